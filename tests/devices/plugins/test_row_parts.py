"""CPU computes a batch in parts of rows where that is faster, with the results of the whole."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest

import subgraph as sg
from subgraph import ops
from subgraph.engine.cpu.region_op import CpuSubgraphOp
from subgraph.system import host

RNG = np.random.default_rng(5)
WHOLE = {"BATCH_ROWS": 1 << 30}


def floats(*shape: int) -> Any:
    return RNG.standard_normal(shape).astype(np.float32)


def images(rows: int | str) -> sg.Graph:
    """Return a network with few weights for many values, of two inputs and two outputs."""
    x = sg.input("x", shape=(rows, 3, 64, 64))
    scale = sg.input("scale", shape=(rows, 1, 1, 1))
    value = x
    for k, channels in enumerate((3, 16, 16)):
        w = sg.parameter(f"w{k}", floats(16, channels, 3, 3) / 10)
        value = ops.Relu(ops.Conv(value, w, pads=[1, 1, 1, 1]))
    y = ops.Mul(value, scale)
    count = rows if isinstance(rows, int) else -1
    target = sg.parameter("target", np.array([count, 16, 64 * 64]))
    return sg.Graph([x, scale], [y, ops.ReduceMax(ops.Reshape(y, target), np.array([2]))])


def op_of(model: Any) -> CpuSubgraphOp:
    (op,) = [node.op for node in model.graph.nodes]
    assert isinstance(op, CpuSubgraphOp)
    return op


def arena_of(model: Any) -> int:
    """Return the bytes of memory between layers of the model's only idle runner."""
    ((runner, *_),) = model._idle
    (session,) = runner.sessions().values()
    return int(session._arena.memory.nbytes)


@pytest.mark.plain_memory
@pytest.mark.parametrize("size", ["N", 16])
def test_parts_are_faster_for_few_weights_and_many_values(size: int | str) -> None:
    graph = images(size)
    arrays = [floats(16, 3, 64, 64), floats(16, 1, 1, 1)]
    one = {"INFERENCE_NUM_THREADS": 1}
    model = sg.compile_model(graph, "CPU", one)
    whole = sg.compile_model(graph, "CPU", {**one, **WHOLE})
    assert op_of(model).row_parts.of(arrays) == 1
    assert op_of(whole).row_parts.of(arrays) == 16
    for found, expected in zip(model(arrays).values(), whole(arrays).values(), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    assert arena_of(model) < arena_of(whole) / 8
    threads = sg.compile_model(graph, "CPU", {"INFERENCE_NUM_THREADS": 2})
    assert op_of(threads).row_parts.of(arrays) == 16, "threads would wait more often"


@pytest.mark.parametrize("rows", ["N", 6])
def test_parts_are_fused_as_the_whole(rows: int | str) -> None:
    """Targets of Reshape are inputs of a region; the sizes in them are known nevertheless."""
    x = sg.input("x", shape=(rows, 20, 32))
    split = sg.parameter("split", np.array([0, 0, 2, 16]))
    heads = [
        ops.Transpose(ops.Reshape(ops.MatMul(x, floats(32, 32)), split), perm=perm)
        for perm in ([0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3])
    ]
    scores = ops.Softmax(ops.Mul(ops.MatMul(*heads[:2]), np.float32(0.25)), axis=-1)
    joined = ops.Transpose(ops.MatMul(scores, heads[2]), perm=[0, 2, 1, 3])
    y = ops.Reshape(joined, sg.parameter("join", np.array([0, 0, 32])))
    graph, array = sg.Graph([x], [y]), floats(6, 20, 32)
    model = sg.compile_model(graph, "CPU", {"BATCH_ROWS": 2})
    whole = sg.compile_model(graph, "CPU", WHOLE)
    np.testing.assert_allclose(model([array])[0], whole([array])[0], rtol=1e-5, atol=1e-5)
    assert op_of(model).row_parts.of([array]) == 2
    found, expected = ([n.op_type for n in op_of(m).fused.nodes] for m in (model, whole))
    assert found == expected
    assert "Softmax" not in found


def test_many_weights_or_few_values_run_as_a_whole() -> None:
    x = sg.input("x", shape=("N", 512))
    wide = ops.MatMul(
        ops.Relu(ops.MatMul(x, sg.parameter("a", floats(512, 2048)))), floats(2048, 9)
    )
    small = ops.Tanh(ops.MatMul(x, sg.parameter("b", floats(512, 1))))
    for y, rows in ((wide, 300), (small, 64)):
        model = sg.compile_model(sg.Graph([x], [y]), "CPU", {"INFERENCE_NUM_THREADS": 1})
        array = floats(rows, 512)
        assert op_of(model).row_parts.of([array]) == rows


def test_small_rows_run_many_at_a_time() -> None:
    """The call of a part costs as much as many rows of a few kilobytes."""
    one, rows = {"INFERENCE_NUM_THREADS": 1}, 16384
    x = sg.input("x", shape=("N", 1000))
    alone = sg.compile_model(sg.Graph([x], [ops.LogSoftmax(x, axis=-1)]), "CPU", one)
    assert op_of(alone).row_parts.of([np.zeros((rows, 1000), np.float32)]) == rows
    y = ops.Softmax(ops.Softmax(ops.LogSoftmax(x, axis=-1), axis=-1), axis=-1)
    several = sg.compile_model(sg.Graph([x], [y]), "CPU", one)
    part = op_of(several).row_parts.of([np.zeros((rows, 1000), np.float32)])
    assert host.caches().l2 // 16 <= 4000 * part <= host.caches().l2


def test_several_results_of_one_operator_run_as_a_whole() -> None:
    """No node reads from the cache what another one has written there."""
    x = sg.input("x", shape=("N", 128, 256))
    results = ops.Split(x, np.array([128, 128]), axis=-1, outputs=2)
    model = sg.compile_model(sg.Graph([x], list(results)), "CPU", {"INFERENCE_NUM_THREADS": 1})
    assert op_of(model).row_parts.of([floats(64, 128, 256)]) == 64


def test_quantized_models_run_as_a_whole() -> None:
    graph = images("N")
    (x, scale), (y, _) = graph.inputs, graph.outputs
    steps = np.float32(0.1), np.uint8(128)
    quantized = ops.DequantizeLinear(ops.QuantizeLinear(y, *steps), *steps)
    arrays = [floats(16, 3, 64, 64), floats(16, 1, 1, 1)]
    for result, rows in ((quantized, 16), (y, 1)):
        model = sg.compile_model(
            sg.Graph([x, scale], [result]), "CPU", {"INFERENCE_NUM_THREADS": 1}
        )
        assert op_of(model).row_parts.of(arrays) == rows


@pytest.mark.parametrize("size", ["N", 7])
def test_stated_rows_and_a_rest(size: int | str) -> None:
    graph = images(size)
    arrays = [floats(7, 3, 64, 64), floats(7, 1, 1, 1)]
    expected = [np.array(array) for array in sg.compile_model(graph, "CPU", WHOLE)(arrays).values()]
    model = sg.compile_model(graph, "CPU", {"BATCH_ROWS": 3})
    for _ in range(2):
        for found, array in zip(model(arrays).values(), expected, strict=True):
            np.testing.assert_allclose(found, array, rtol=1e-5, atol=1e-5)
    # Results go to the arrays of a request, and each part is measured.
    request = model.create_infer_request()
    own = np.zeros(expected[0].shape, np.float32)
    request.set_output(0, own)
    assert request.infer(arrays)[0] is own
    np.testing.assert_allclose(own, expected[0], rtol=1e-5, atol=1e-5)
    if size == "N":
        own[...] = 0
        with pytest.raises(sg.ShapeError, match=r"output 0 has shape \(5, .* in this run.*\(7, "):
            request.infer([array[:5] for array in arrays])
        assert not own.any()
    profiled = sg.compile_model(graph, "CPU", {"BATCH_ROWS": 3, "ENABLE_PROFILING": True})
    request = profiled.create_infer_request()
    request.infer(arrays)
    kernels = [entry.node for entry in request.profile()]
    assert len(kernels) == 3 * len(set(kernels)) > 3
    assert len(request.profile()) == len(kernels)
    request.infer(arrays)
    assert len(request.profile()) == len(kernels)


def test_weights_that_change_and_exported_models() -> None:
    graph = images(16)
    arrays = [floats(16, 3, 64, 64), floats(16, 1, 1, 1)]
    model = sg.compile_model(graph, "CPU", {"BATCH_ROWS": 2})
    model(arrays)
    model.parameters["w1"].assign(floats(16, 16, 3, 3))
    expected = sg.compile_model(graph, "REFERENCE")(arrays)
    stream = io.BytesIO()
    model.export_model(stream)
    stream.seek(0)
    for again in (model, sg.import_model(stream, "CPU", {"BATCH_ROWS": 2})):
        for found, array in zip(again(arrays).values(), expected.values(), strict=True):
            np.testing.assert_allclose(found, array, rtol=1e-3, atol=1e-3)
        assert op_of(again).row_parts.of(arrays) == 2


@pytest.mark.plain_memory
@pytest.mark.parametrize("size", ["N", 16])
def test_an_imported_model_runs_in_parts_without_its_graph(size: int | str) -> None:
    arrays = [floats(16, 3, 64, 64), floats(16, 1, 1, 1)]
    model = sg.compile_model(images(size), "CPU", {"INFERENCE_NUM_THREADS": 1})
    expected = [np.array(array) for array in model(arrays).values()]
    stream = io.BytesIO()
    model.export_model(stream)
    stream.seek(0)
    again = sg.import_model(stream, "CPU", {"INFERENCE_NUM_THREADS": 1})
    for found, array in zip(again(arrays).values(), expected, strict=True):
        np.testing.assert_array_equal(found, array)
    assert op_of(again).row_parts.of(arrays) == 1
    assert not op_of(again).subgraph.is_loaded


@pytest.mark.parametrize("size", ["N", 6])
def test_rows_that_may_depend_on_each_other_run_together(size: int | str) -> None:
    x = sg.input("x", shape=(size, 4))
    graph = sg.Graph([x], [ops.Softmax(ops.Relu(x), axis=0)])
    model = sg.compile_model(graph, "CPU", {"BATCH_ROWS": 2})
    np.testing.assert_allclose(model(np.ones((6, 4), np.float32))[0], np.full((6, 4), 1 / 6))


@pytest.mark.parametrize("reader", ["none", "Shape", "CastLike"])
@pytest.mark.parametrize("size", ["N", 6])
def test_nodes_on_whose_elements_no_output_depends_get_all_rows(
    size: int | str, reader: str
) -> None:
    x = sg.input("x", shape=(size, 4))
    row, y = ops.Gather(x, np.int64(5), axis=0), ops.Relu(x)
    if reader == "Shape":
        y = ops.Reshape(y, ops.Concat(np.array([-1]), ops.Shape(row), axis=0))
    elif reader == "CastLike":
        y = ops.CastLike(y, row)
    graph = sg.Graph([x], [y])
    if reader == "none":
        nodes = [value.producer for value in (row, y) if value.producer is not None]
        graph = sg.Graph([x], [y], nodes=nodes)
    model = sg.compile_model(graph, "CPU", {"BATCH_ROWS": 2})
    array = floats(6, 4)
    np.testing.assert_array_equal(model(array)[0], np.maximum(array, 0))
    assert op_of(model).row_parts.of([array]) == 6


def test_a_proof_ends_with_the_constants_that_it_has_read() -> None:
    x = sg.input("x", shape=("N", 4))
    axes = sg.parameter("axes", np.array([1]))
    graph = sg.Graph([x], [ops.Sub(x, ops.ReduceSum(x, axes))])
    model = sg.compile_model(graph, "CPU", {"BATCH_ROWS": 2})
    array = floats(6, 4)
    for axis in (1, 0):
        model.parameters["axes"].assign(np.array([axis]))
        expected = array - array.sum(axis, keepdims=True)
        np.testing.assert_allclose(model(array)[0], expected, rtol=1e-5, atol=1e-5)


def test_an_imported_decision_ends_with_the_constants_that_its_proof_has_read() -> None:
    x = sg.input("x", shape=("N", 4))
    axes = sg.parameter("axes", np.array([1]))
    graph = sg.Graph([x], [ops.Sub(x, ops.ReduceSum(x, axes))])
    model = sg.compile_model(graph, "CPU", {"BATCH_ROWS": 2})
    array = floats(6, 4)
    model(array)
    stream = io.BytesIO()
    model.export_model(stream)
    stream.seek(0)
    again = sg.import_model(stream, "CPU", {"BATCH_ROWS": 2})
    again.parameters["axes"].assign(np.array([0]))
    expected = array - array.sum(0, keepdims=True)
    np.testing.assert_allclose(again(array)[0], expected, rtol=1e-5, atol=1e-5)
    assert op_of(again).row_parts.of([array]) == 6


def test_inputs_of_other_numbers_of_rows_run_as_a_whole() -> None:
    x, bias = sg.input("x", shape=("N", 4)), sg.input("bias", shape=("M", 4))
    model = sg.compile_model(sg.Graph([x, bias], [ops.Add(x, bias)]), "CPU", {"BATCH_ROWS": 2})
    a, b = floats(6, 4), floats(1, 4)
    for left, right in ((a, b), (b, a), (a, a)):
        np.testing.assert_allclose(model(left, right)[0], left + right)
        assert op_of(model).row_parts.of([left, right]) == len(left)


def test_sizes_are_not_computed_for_every_new_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    from subgraph.engine.cpu import row_parts

    computed: list[int] = []
    plain = row_parts.row_sizes

    def count(*args: Any) -> Any:
        computed.append(1)
        return plain(*args)

    x = sg.input("x", shape=("N", "T"))
    model = sg.compile_model(sg.Graph([x], [ops.Relu(x)]), "CPU")
    monkeypatch.setattr(row_parts, "row_sizes", count)
    for rows in range(2, 20):
        model(floats(rows, 3))
    assert len(computed) == 1, "sizes are those of a row"
    for width in range(4, 30):
        model(floats(2, width))
    assert len(computed) == 8
