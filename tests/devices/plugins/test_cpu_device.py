"""The CPU device: random graphs against REFERENCE, shapes, options, weights, threads, profile."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import subgraph as sg
from subgraph import ops
from subgraph.devices.export import region_nodes
from subgraph.engine.cpu.region_op import CpuSubgraphOp
from subgraph.graph.types import Array
from subgraph.weights.cache import weight_stats


def close(got: Any, want: Any, least: float = 1e-6) -> None:
    """Hold the difference to the largest element, or to ``least``: what rounding is about."""
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    scale = max(float(np.abs(want).max(initial=0.0)), least)
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-5 * scale)


def compare(graph: sg.Graph, *inputs: Array, least: float = 1e-6, **config: Any) -> None:
    want = sg.compile_model(graph, "REFERENCE")(list(inputs))
    model = sg.compile_model(graph, "CPU", config)
    for _ in range(2):
        got = model(list(inputs))
        for k in range(len(want)):
            close(got[k], want[k], least)


def values(rng: np.random.Generator, *shape: int) -> Array:
    return rng.standard_normal(shape).astype(np.float32)


def convnet(rng: np.random.Generator, batch: Any = "N") -> sg.Graph:
    """A residual network with everything that is folded or fused."""
    x = sg.input("x", (batch, 3, 17, 15), "float32")

    def weight(name: str, *shape: int) -> sg.Value:
        return sg.parameter(name, 0.3 * values(rng, *shape))

    def norm(y: Any, name: str, channels: int) -> Any:
        var = sg.parameter(f"{name}.var", np.abs(values(rng, channels)) + 0.5)
        rest = [weight(f"{name}.{part}", channels) for part in ("scale", "bias", "mean")]
        return ops.BatchNormalization(y, *rest, var, epsilon=1e-3)

    y = ops.Relu(norm(ops.Conv(x, weight("c0", 24, 3, 3, 3), strides=[2, 2]), "n0", 24))
    branch = ops.Conv(y, weight("c1", 24, 24, 3, 3), weight("b1", 24), pads=[1, 1, 1, 1])
    y = ops.Relu(ops.Add(norm(branch, "n1", 24), y))
    scaled = ops.Mul(ops.Conv(y, weight("c2", 20, 24, 1, 1)), weight("s2", 20, 1, 1))
    y = ops.LeakyRelu(ops.Add(scaled, weight("t2", 1, 20, 1, 1)), alpha=0.2)
    z = ops.Concat(y, ops.MaxPool(y, kernel_shape=[3, 3], pads=[1, 1, 1, 1]), axis=1)
    z = ops.Relu(norm(z, "n3", 40))
    mean = ops.Flatten(ops.GlobalAveragePool(z))
    return sg.Graph([x], [ops.Gemm(mean, weight("fc", 10, 40), weight("fb", 10), transB=1)])


@pytest.mark.parametrize("blocked", [True, False])
@pytest.mark.parametrize("fusion", [True, False])
def test_a_network_with_and_without_fusion_and_blocks(fusion: bool, blocked: bool) -> None:
    rng = np.random.default_rng(1)
    graph = convnet(rng)
    config = {"FUSION": fusion, "BLOCKED_LAYOUT": blocked}
    for batch in (1, 3):
        compare(graph, values(rng, batch, 3, 17, 15), **config)


def test_one_model_takes_every_batch() -> None:
    rng = np.random.default_rng(2)
    graph = convnet(rng)
    model = sg.compile_model(graph, "CPU", {"PLAN_CACHE_SIZE": 2})
    reference = sg.compile_model(graph, "REFERENCE")
    for batch in (1, 4, 2, 1, 3, 4):
        x = values(rng, batch, 3, 17, 15)
        close(model(x)[0], reference(x)[0])


@pytest.mark.parametrize("part", ["scale", "bias", "mean", "var"])
def test_a_folded_normalization_follows_its_parameters(part: str) -> None:
    rng = np.random.default_rng(3)
    graph = convnet(rng, 1)
    model, reference = sg.compile_model(graph, "CPU"), sg.compile_model(graph, "REFERENCE")
    x = values(rng, 1, 3, 17, 15)
    before = model(x)[0]
    parameter = model.parameters[f"n1.{part}"]
    parameter.assign(parameter.array + 0.25)
    after = model(x)[0]
    assert not np.allclose(before, after, atol=1e-6)
    close(after, reference(x)[0])


def test_one_weight_of_many_is_redone() -> None:
    rng = np.random.default_rng(4)
    graph = convnet(rng, 1)
    model = sg.compile_model(graph, "CPU")
    x = values(rng, 1, 3, 17, 15)
    model(x)
    redone = weight_stats().redone
    model.parameters["fc"].assign(np.zeros((10, 40), np.float32))
    bias = model.parameters["fb"].array
    np.testing.assert_allclose(model(x)[0], bias[None], atol=1e-6)
    assert weight_stats().redone == redone + 1


def test_a_number_that_a_fusion_has_read() -> None:
    x = sg.input("x", (2, 8), "float32")
    w = sg.parameter("w", np.eye(8, dtype=np.float32))
    low, high = (sg.parameter(n, np.float32(v)) for n, v in (("low", -1.0), ("high", 1.0)))
    model = sg.compile_model(sg.Graph([x], [ops.Clip(ops.MatMul(x, w), low, high)]), "CPU")
    data = np.linspace(-4, 4, 16, dtype=np.float32).reshape(2, 8)
    np.testing.assert_allclose(model(data)[0], np.clip(data, -1, 1), atol=1e-6)
    model.parameters["high"].assign(np.float32(2.5))
    np.testing.assert_allclose(model(data)[0], np.clip(data, -1, 2.5), atol=1e-6)


def test_integer_weights_that_are_shapes_and_indices() -> None:
    x = sg.input("x", (4, 6), "float32")
    index = sg.parameter("index", np.array([0, 2]))
    shape = sg.parameter("shape", np.array([3, 4]))
    model = sg.compile_model(
        sg.Graph([x], [ops.Reshape(ops.Gather(x, index, axis=0), shape)]), "CPU"
    )
    data = np.arange(24, dtype=np.float32).reshape(4, 6)
    np.testing.assert_array_equal(model(data)[0], data[[0, 2]].reshape(3, 4))
    with sg.transaction():
        model.parameters["index"].assign(np.array([3, 1]))
        model.parameters["shape"].assign(np.array([4, 3]))
    np.testing.assert_array_equal(model(data)[0], data[[3, 1]].reshape(4, 3))


def test_results_do_not_depend_on_threads() -> None:
    rng = np.random.default_rng(5)
    graph = convnet(rng, 2)
    x = values(rng, 2, 3, 17, 15)
    one, two, three = (
        sg.compile_model(graph, "CPU", {"INFERENCE_NUM_THREADS": n})(x)[0] for n in (1, 2, 3)
    )
    np.testing.assert_array_equal(one, two)
    np.testing.assert_array_equal(one, three)


def test_requests_side_by_side() -> None:
    rng = np.random.default_rng(6)
    graph = convnet(rng, 1)
    model = sg.compile_model(graph, "CPU", {"PERFORMANCE_HINT": "THROUGHPUT"})
    inputs = [values(rng, 1, 3, 17, 15) for _ in range(4)]
    want = [model(x)[0] for x in inputs]
    wrong: list[int] = []

    def run(k: int) -> None:
        for _ in range(10):
            if not np.array_equal(model(inputs[k])[0], want[k]):
                wrong.append(k)

    threads = [threading.Thread(target=run, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_results_belong_to_the_caller() -> None:
    x = sg.input("x", ("N",), "float32")
    model = sg.compile_model(sg.Graph([x], [ops.Neg(x)]), "CPU")
    for size in (10, 100_000):
        ones = np.ones(size, np.float32)
        first = model(ones)[0]
        model(2 * ones)
        np.testing.assert_array_equal(first, -ones)
        np.testing.assert_array_equal(model(ones[::2])[0], -ones[::2])


def test_outputs_of_every_origin() -> None:
    x = sg.input("x", (2, 3), "float32")
    w = sg.parameter("w", np.arange(6, dtype=np.float32).reshape(2, 3))
    y = ops.Relu(x)
    flat = ops.Reshape(y, sg.parameter("s", np.array([6])))
    turned = ops.Transpose(w)
    graph = sg.Graph([x], [y, flat, turned, ops.Identity(x), ops.Shape(x), ops.Add(y, w)])
    data = np.array([[-1, 2, -3], [4, -5, 6]], np.float32)
    got = sg.compile_model(graph, "CPU")(data)
    want = [
        np.maximum(data, 0),
        np.maximum(data, 0).reshape(6),
        w.parameter.array.T if w.parameter is not None else None,
        data,
        np.array([2, 3]),
        np.maximum(data, 0) + np.arange(6).reshape(2, 3),
    ]
    for k, array in enumerate(want):
        np.testing.assert_array_equal(got[k], array)


def test_query_says_why_not() -> None:
    x = sg.input("x", (3, 3), "float32")
    graph = sg.Graph([x], [ops.Relu(ops.Det(ops.Neg(x, name="neg"), name="det"), name="relu")])
    found = sg.query_model(graph, "CPU")
    assert set(found) == {"neg", "relu"}
    assert "Det" in found.reasons["det"]
    data = np.diag([2.0, -3.0, 4.0]).astype(np.float32)
    model = sg.compile_model(graph, "CPU")
    assert model.execution_devices == ["CPU", "REFERENCE"]
    assert model(data)[0] == pytest.approx(24.0)


def test_options_are_checked() -> None:
    graph = convnet(np.random.default_rng(0))
    with pytest.raises(sg.ConfigError, match="INFERENCE_NUM_THREADS"):
        sg.compile_model(graph, "CPU", {"INFERENCE_NUM_THREADS": -1})
    model = sg.compile_model(graph, "CPU", {"NUM_STREAMS": 3, "INFERENCE_NUM_THREADS": 3})
    assert model.optimal_requests == 3


def test_profile_names_kernels() -> None:
    rng = np.random.default_rng(7)
    model = sg.compile_model(convnet(rng, 1), "CPU", {"ENABLE_PROFILING": True})
    request = model.create_infer_request()
    request.infer([values(rng, 1, 3, 17, 15)])
    entries = request.profile()
    assert any("conv.kernels" in entry.kernel for entry in entries)
    assert all(entry.seconds >= 0 and entry.device == "CPU" for entry in entries)
    assert sum(entry.bytes for entry in entries) > 0


UNARY = ("Relu", "Sigmoid", "Tanh", "Neg", "Abs", "Softplus", "Erf", "Floor", "HardSwish", "Exp")
BINARY = ("Add", "Sub", "Mul", "Max", "Min")


@st.composite
def small_graphs(draw: st.DrawFn) -> tuple[sg.Graph, list[Array]]:
    """Random graphs of elementwise operators, products, reductions and views, values used again."""
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    rows, columns = draw(st.integers(1, 5)), draw(st.integers(1, 40))
    x = sg.input("x", (rows, columns), "float32")
    pool: list[Any] = [x]
    for k in range(draw(st.integers(1, 12))):
        kind = draw(st.sampled_from(("unary", "binary", "weight", "product", "norm", "softmax")))
        a = draw(st.sampled_from(pool))
        if kind == "unary":
            made: Any = getattr(ops, draw(st.sampled_from(UNARY)))(a)
            made = ops.Tanh(made)
        elif kind == "binary":
            made = getattr(ops, draw(st.sampled_from(BINARY)))(a, draw(st.sampled_from(pool)))
        elif kind == "weight":
            shape = draw(st.sampled_from(((1,), (columns,), (rows, 1), (rows, columns))))
            weight = sg.parameter(f"w{k}", rng.standard_normal(shape).astype(np.float32))
            made = getattr(ops, draw(st.sampled_from(BINARY)))(a, weight)
        elif kind == "product":
            square = rng.standard_normal((columns, columns)) / columns
            made = ops.MatMul(a, sg.parameter(f"w{k}", square.astype(np.float32)))
        elif kind == "norm":
            made = ops.Sub(a, ops.ReduceMean(a, sg.parameter(f"w{k}", np.array([1]))))
        else:
            made = ops.Softmax(a)
        pool.append(made)
    outputs = draw(st.lists(st.sampled_from(pool[1:]), min_size=1, max_size=3, unique=True))
    return sg.Graph([x], outputs), [rng.standard_normal((rows, columns)).astype(np.float32)]


@given(small_graphs())
@settings(max_examples=25, deadline=None)
def test_random_graphs_agree_with_the_reference(case: tuple[sg.Graph, list[Array]]) -> None:
    graph, inputs = case
    compare(graph, *inputs, least=0.01)  # a mean taken from equal numbers leaves their rounding


def test_a_run_is_cancelled_between_its_steps() -> None:
    x = sg.input("x", (1 << 20,), "float32")
    y: Any = x
    for k in range(400):
        y = ops.Erf(y) if k % 2 else ops.Softmax(y)
    model = sg.compile_model(sg.Graph([x], [y]), "CPU", {"INFERENCE_NUM_THREADS": 1})
    data = np.ones(1 << 20, np.float32)
    request = model.create_infer_request()
    whole = request.infer([data])[0]
    # Processor time: what else runs on the machine does not count.
    start = time.process_time()
    request.infer([data])
    full = time.process_time() - start
    start = time.process_time()
    request.start_async([data])
    time.sleep(full / 10)
    request.cancel()
    with pytest.raises(sg.RequestCancelledError):
        request.wait(60)
    assert time.process_time() - start < 0.7 * full
    np.testing.assert_array_equal(request.infer([data])[0], whole)


@pytest.mark.parametrize("dilations", [[1, 1, 2], [1, 3, 1], [2, 1, 1]])
def test_a_dilation_along_an_axis_with_one_tap(dilations: list[int]) -> None:
    rng = np.random.default_rng(8)
    kernel = [1 if d > 1 else 2 for d in dilations]
    x = sg.input("x", (1, 8, 3, 3, 3), "float32")
    w = sg.parameter("w", values(rng, 16, 8, *kernel))
    compare(sg.Graph([x], [ops.Conv(x, w, dilations=dilations)]), values(rng, 1, 8, 3, 3, 3))


@pytest.mark.parametrize("dtype", ["float32", "int64"])
def test_data_that_decide_a_size_are_no_key_of_plans(dtype: str) -> None:
    """A network says how long its result is: its few inputs are not what plans are made for."""
    rng = np.random.default_rng(0)
    weights = [rng.random((8, 32), np.float32), rng.random((32, 32), np.float32)]
    x = sg.input("x", (1, 8), dtype)
    hidden = ops.Tanh(ops.MatMul(ops.Cast(x, to=1), sg.parameter("v", weights[0])))
    hidden = ops.Abs(ops.MatMul(hidden, sg.parameter("w", weights[1])))
    most = ops.Cast(ops.ReduceMax(hidden, keepdims=0), to=7)
    places = ops.Range(np.int64(0), ops.Add(most, np.int64(1)), np.int64(1))
    graph = sg.Graph([x], [places, ops.Mul(ops.Cast(places, to=1), np.float32(2))])
    model, reference = (sg.compile_model(graph, device) for device in ("CPU", "REFERENCE"))
    for _ in range(20):
        given = rng.integers(-3, 3, (1, 8)).astype(dtype)
        for mine, other in zip(model([given]).values(), reference([given]).values(), strict=True):
            np.testing.assert_array_equal(mine, other)
    (region,) = region_nodes(model.graph)
    assert isinstance(region.op, CpuSubgraphOp)
    assert not region.op.depends_on_values
    assert region.op.split_region() is not None


def test_numbers_that_are_sizes_are_a_key_of_plans() -> None:
    """But not those that are brought to them."""
    x, sizes = sg.input("x", (2, 12), "int64"), sg.input("sizes", (2,), "int64")
    rows = ops.Reshape(x, ops.Concat(ops.Mul(sizes, np.int64(2)), np.array([-1]), axis=0))
    model = sg.compile_model(sg.Graph([x, sizes], [ops.Neg(rows)]), "CPU")
    for pair in ([1, 1], [3, 1], [2, 3], [1, 1]):
        given = np.random.default_rng(pair).integers(0, 9, (2, 12))
        (found,) = model([given, np.array(pair)]).values()
        np.testing.assert_array_equal(found, -given.reshape(2 * pair[0], 2 * pair[1], -1))
    (region,) = region_nodes(model.graph)
    assert isinstance(region.op, CpuSubgraphOp)
    assert len(region.op.key([given, np.array(pair)])) == 3, "two shapes and the sizes"
    assert region.op.split_region() is None


def test_sizes_that_differ_at_every_call_are_inputs_of_templates() -> None:
    """A few contents have plans of their own; then the node that reads them is left alone."""
    rng = np.random.default_rng(0)
    x, lengths = sg.input("x", (2, "steps", 8)), sg.input("lengths", (2,), "int64")
    places = ops.Range(np.int64(0), ops.ReduceMax(lengths, keepdims=0), np.int64(1))
    inside = ops.Less(ops.Unsqueeze(places, np.array([0])), ops.Unsqueeze(lengths, np.array([1])))
    kept = ops.Mul(x, ops.Unsqueeze(ops.Cast(inside, to=1), np.array([2])))
    weight = sg.parameter("w", rng.random((8, 8), np.float32))
    graph = sg.Graph([x, lengths], [ops.Tanh(ops.MatMul(kept, weight))])
    model, reference = (sg.compile_model(graph, device) for device in ("CPU", "REFERENCE"))
    (region,) = region_nodes(model.graph)
    assert isinstance(region.op, CpuSubgraphOp)
    for steps in range(3, 30):
        given = [rng.random((2, steps, 8), np.float32), np.array([steps, 2])]
        np.testing.assert_allclose(model(given)[0], reference(given)[0], rtol=1e-5, atol=1e-6)
        assert (region.op.split_region() is None) == (steps < 11)
    parts = region.op.split_region()
    assert parts is not None
    inner = [node.op for node in region_nodes(parts.graph)]
    assert inner
    assert all(isinstance(op, CpuSubgraphOp) and not op.depends_on_values for op in inner)
