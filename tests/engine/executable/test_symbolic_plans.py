"""Symbolic plans: traced numbers, and plans for new shapes against plans made afresh."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

import subgraph as sg
from subgraph import ops
from subgraph.devices.export import region_nodes
from subgraph.engine.codegen.tiling import FEW_ROWS, tile_rows
from subgraph.engine.cpu import symbolic_plans
from subgraph.engine.cpu.region_op import CpuSubgraphOp
from subgraph.engine.cpu.symbolic_plans import SymbolicPlans
from subgraph.engine.executable import symbolic_plan
from subgraph.engine.executable.executable_plan import ExecutablePlan
from subgraph.engine.executable.symbolic_plan import PlanInstance
from subgraph.graph.symbolic import SymInt, Trace, float_bits, is_symbolic, pinned, recorded, single
from subgraph.graph.types import Array
from subgraph.ops.conv.direct import direct_tiling, tile_cycles
from subgraph.ops.movement.geometry import Geometry
from subgraph.ops.shared.tile_planning import Tiles

Sizes = Sequence[int]

# ------------------------------------------------------------------ traced numbers


def _tiles(a: Any, b: Any) -> list[Any]:
    block = max(16, min(a, 64))
    count = -(-a // block)
    return [block, count, a - (count - 1) * block, math.prod((a, b, count)), sum([a, b])]


def _loop(a: Any, b: Any) -> list[Any]:
    lanes = 16
    while lanes > min(a, b):
        lanes //= 2
    return [lanes, a % lanes, b << 1, -a, abs(a - b), (a | 1) ^ b]


def _floats(a: Any, b: Any) -> list[Any]:
    cost = 0.5 * a / (b + 1) + 3
    rounded = [math.ceil(cost), round(cost), math.floor(a**2 / 3), math.trunc(cost), single(cost)]
    return [*rounded, float_bits(cost), int(cost > 9)]


def _array(a: Any, b: Any) -> list[Any]:
    dims = np.array([a, 4, b], object)
    return [*(dims * 2).tolist(), np.int64(3) * a, b + np.int32(2)]


FUNCTIONS = (_tiles, _loop, _floats, _array)
SIZES = st.integers(1, 300)


def _traced(function: Callable[..., list[Any]], *dims: int) -> Callable[[Sizes], list[Any] | None]:
    trace = Trace()
    results = function(*[trace.dimension(dim) for dim in dims])
    evaluate = trace.function(results)
    return lambda others: evaluate(others, lambda sizes: sizes)


@given(st.sampled_from(FUNCTIONS), SIZES, SIZES, st.lists(st.tuples(SIZES, SIZES), max_size=8))
@settings(max_examples=300, deadline=None)
def test_a_traced_function_is_the_function(
    function: Callable[..., list[Any]], a: int, b: int, others: list[tuple[int, int]]
) -> None:
    evaluate = _traced(function, a, b)
    assert evaluate((a, b)) == function(a, b)
    for dims in others:
        found = evaluate(dims)
        assert found is None or found == function(*dims)


def test_one_trace_serves_most_sizes() -> None:
    evaluate = _traced(_tiles, 100, 7)
    assert sum(evaluate((a, 7)) is not None for a in range(65, 200)) == 135
    assert evaluate((40, 7)) is None, "a smaller block would have been chosen"


LEAVING: dict[str, Callable[[Any], Any]] = {
    "int": int,
    "float": float,
    "index": lambda a: list(range(10))[a],
    "range": lambda a: len(range(a)),
    "text": lambda a: f"{a}",
    "repr": repr,
    "key": lambda a: {7: "seven"}[a],
    "array": lambda a: np.array([a], np.int64)[0],
    "shape": lambda a: np.zeros((a, 2)).size,
    "scalar": np.int64,
    "method": lambda a: a.bit_length(),
    "gcd": lambda a: math.gcd(a, 12),
    "log": math.log2,
    "digits": lambda a: round(a, 2),
}


@pytest.mark.parametrize("name", LEAVING)
def test_converted_numbers_are_pinned(name: str) -> None:
    trace = Trace()
    number = trace.dimension(7)
    result = LEAVING[name](number)
    assert result == LEAVING[name](7)
    assert not is_symbolic(result)
    evaluate = trace.function([])
    assert evaluate([7], list) is not None
    assert evaluate([8], list) is None


def test_a_traced_number_is_one_to_isinstance_and_a_plain_one_afterwards() -> None:
    trace = Trace()
    a: Any = trace.dimension(5)
    half: Any = a / 2
    assert isinstance(a, int)
    assert isinstance(half, float)
    assert not isinstance(a, bool)
    assert (a == 5, a != 5, a < 6, bool(a - 5)) == (True, False, True, False)
    assert a != "5"
    with pytest.raises(TypeError):
        a + "5"  # type: ignore[operator]
    trace.function([])
    after: Any = a + 1
    assert not is_symbolic(after)
    assert after == 6
    assert pinned(a) == 5
    assert isinstance(object.__repr__(a), str)
    assert type(a) is SymInt


@recorded
def _thirds(a: int, least: int) -> int:
    while a > least:
        a = -(-a // 3)
    return a


@given(SIZES, SIZES, st.lists(st.tuples(SIZES, SIZES), max_size=8))
@settings(deadline=None)
def test_recorded_functions_add_no_guards(a: int, b: int, others: list[tuple[int, int]]) -> None:
    assert _thirds(10, 3) == 2
    evaluate = _traced(lambda a, b: [_thirds(a, b) + 1, _thirds(a, 3)], a, b)
    for dims in others:
        assert evaluate(dims) == [_thirds(*dims) + 1, _thirds(dims[0], 3)]


def test_the_decisions_can_be_read() -> None:
    trace = Trace()
    a: Any = trace.dimension(5)
    assert a * 2 + 1 > 10
    assert not a - 7 > 0
    assert trace.guards() == ["((dims[0] * 2) + 1) > 10", "not (dims[0] - 7) > 0"]


@given(st.integers(1, 5000), st.integers(1, FEW_ROWS))
@settings(deadline=None)
def test_cycles_of_few_row_tiles_are_those_of_single_tiles(pixels: int, most: int) -> None:
    of, left, cycles = Tiles("float32", 8, most, 2), pixels, 0.0
    while left > 0:
        rows = tile_rows(left, most)
        cycles += max(rows, 4) + 0.5
        left -= rows
    assert tile_cycles(pixels, of) == cycles


def _decisions(of: Tiles, side: int) -> int:
    """Return how many decisions cut a convolution of 3 x 3 over a square of pixels."""
    trace = Trace()
    ones: tuple[int, int, int] = (1, 1, 1)
    image: Any = (1, trace.dimension(side), trace.dimension(side))
    direct_tiling(
        of, Geometry(1, 1, 64, 64, image, image, (1, 3, 3), ones, ones, (0, 1, 1)), False, False, 1
    )
    return len(trace.guards())


@pytest.mark.parametrize("most", [6, 8, 14])
def test_decisions_do_not_grow_with_sizes(most: int) -> None:
    of = Tiles("float32", 16, most, 2)
    assert _decisions(of, 3000) < _decisions(of, 30) + 40  # halvings only


# ------------------------------------------------------------------ graphs


def _values(rng: np.random.Generator, *shape: int) -> Array:
    return rng.standard_normal(shape).astype(np.float32)


def _weight(name: str, *shape: int) -> sg.Value:
    seed = sum(map(ord, name))
    return sg.parameter(name, 0.3 * _values(np.random.default_rng(seed), *shape))


def _attention() -> sg.Graph:
    """Self-attention over a sequence, its reshapes computed from shapes, behind an embedding."""
    ids = sg.input("ids", ("b", "t"), "int64")
    length = ops.Gather(ops.Shape(ids), np.int64(1), axis=0)
    places = ops.Range(np.int64(0), length, np.int64(1))
    x = ops.Add(
        ops.Gather(_weight("words", 50, 32), ids), ops.Gather(_weight("places", 400, 32), places)
    )
    batch = ops.Shape(x, start=0, end=1)
    heads = ops.Concat(batch, np.array([-1, 4, 8]), axis=0)

    def head(name: str) -> sg.Value:
        y = ops.Add(ops.MatMul(x, _weight(name, 32, 32)), _weight(f"{name}.b", 32))
        return ops.Transpose(ops.Reshape(y, heads), perm=[0, 2, 1, 3])

    scores = ops.MatMul(head("q"), ops.Transpose(head("k"), perm=[0, 1, 3, 2]))
    mixed = ops.MatMul(ops.Softmax(ops.Div(scores, np.float32(8**0.5)), axis=-1), head("v"))
    back = ops.Concat(batch, np.array([-1, 32]), axis=0)
    y = ops.Reshape(ops.Transpose(mixed, perm=[0, 2, 1, 3]), back)
    y = ops.Add(ops.MatMul(y, _weight("o", 32, 32)), x)
    return sg.Graph([ids], [ops.LayerNormalization(y, _weight("s", 32), _weight("t", 32))])


def _growing() -> sg.Graph:
    """One step of a decoder with a growing cache and a mask that is a slice of a weight."""
    x = sg.input("x", (1, 2, 1, 8), "float32")
    cache = sg.input("cache", (1, 2, "past", 8), "float32")
    keys = ops.Concat(cache, x, axis=2)
    total = ops.Shape(keys, start=2, end=3)
    mask = ops.Slice(_weight("mask", 1, 1, 1, 64), np.array([0]), total, np.array([3]))
    scores = ops.Add(ops.MatMul(x, ops.Transpose(keys, perm=[0, 1, 3, 2])), mask)
    return sg.Graph([x, cache], [ops.MatMul(ops.Softmax(scores, axis=-1), keys), keys])


def _convolutions() -> sg.Graph:
    """Convolutions of any batch and image size: blocked layouts, Winograd, pooling, resizing."""
    x = sg.input("x", ("n", 3, "h", "w"), "float32")
    y = ops.Relu(ops.Conv(x, _weight("c0", 16, 3, 3, 3), strides=[2, 2], pads=[1, 1, 1, 1]))
    z = ops.Relu(ops.Conv(y, _weight("c1", 16, 16, 3, 3), pads=[1, 1, 1, 1]))
    z = ops.MaxPool(ops.Add(z, y), kernel_shape=[2, 2], strides=[2, 2], ceil_mode=1)
    z = ops.Conv(z, _weight("c2", 24, 16, 1, 1), _weight("b2", 24))
    wide = ops.Resize(z, np.zeros(0, np.float32), np.array([1, 1, 2, 2], np.float32))
    return sg.Graph([x], [wide, ops.GlobalAveragePool(z), ops.ReduceMean(x, axes=[2, 3])])


def _broadcast() -> sg.Graph:
    """Elementwise operators that broadcast dimensions of 1, and products of all ranks."""
    a = sg.input("a", ("m", "k"), "float32")
    b = sg.input("b", ("k", "n"), "float32")
    c = sg.input("c", ("m", 1), "float32")
    product = ops.MatMul(a, b)
    summed = ops.Add(ops.Mul(product, c), ops.ReduceMax(b, axes=[0]))
    joined = ops.Concat(summed, product, axis=0)
    parts = ops.Split(joined, axis=0, num_outputs=2)
    turned = ops.Transpose(ops.Sub(parts[0], ops.Tanh(parts[1])))
    taken = ops.Pad(turned, np.array([1, 0, 0, 2]))
    flat = ops.Reshape(taken, np.array([-1]))
    return sg.Graph(
        [a, b, c], [flat, ops.CumSum(product, np.int64(1)), ops.Expand(c, ops.Shape(a))]
    )


def _recurrent() -> sg.Graph:
    """Recurrent layers, bidirectional and stacked, of any sequence length and batch."""
    x = sg.input("x", ("steps", "n", 6), "float32")
    y, *_ = ops.LSTM(
        *(x, _weight("w", 2, 32, 6), _weight("r", 2, 32, 8), _weight("b", 2, 64)),
        hidden_size=8,
        direction="bidirectional",
    )
    rows = ops.Reshape(ops.Transpose(y, perm=[0, 2, 1, 3]), np.array([0, 0, 16]))
    z, last = ops.GRU(rows, _weight("w1", 1, 15, 16), _weight("r1", 1, 15, 5), hidden_size=5)
    return sg.Graph([x], [z, last])


def _resized() -> sg.Graph:
    """Images repeated along both axes, along one, from the outside in, resized to computed sizes.

    Bytes multiplied.
    """
    x = sg.input("x", ("n", 3, "h", "w"), "float32")
    none = np.zeros(0, np.float32)
    form: dict[str, Any] = {
        "mode": "nearest",
        "coordinate_transformation_mode": "asymmetric",
        "nearest_mode": "floor",
    }
    twice = ops.Resize(x, none, np.array([1, 1, 2, 2], np.float32), **form)
    wide = ops.Resize(x, none, np.array([1, 1, 1, 8], np.float32), **form)
    tall = ops.Resize(x, none, np.array([1, 1, 3, 1], np.float32), **form)
    mirrored = ops.Pad(x, np.array([0, 0, 0, 2, 0, 0, 0, 1]), mode="reflect")
    number = ops.Cast(x, to=3)
    weights = sg.parameter("w8", np.arange(-54, 54, dtype=np.int8).reshape(4, 3, 3, 3))
    sums = ops.ConvInteger(number, weights)
    up = ops.ConvTranspose(x, _weight("up", 3, 5, 2, 2), strides=[2, 2])
    floats = ops.Mul(ops.Cast(ops.Shape(x, start=2), to=1), np.array([2, 3], np.float32))
    sizes = ops.Cast(ops.Floor(ops.Add(floats, np.float32(0.4))), to=7)
    small = ops.Resize(x, None, None, ops.Concat(ops.Shape(x, end=2), sizes, axis=0), **form)
    return sg.Graph([x], [twice, wide, tall, mirrored, sums, up, small])


def _ids(rng: np.random.Generator, *shape: int) -> Array:
    return rng.integers(0, 50, shape)


Feed = Callable[[np.random.Generator, int, int], list[Array]]
ONE_THREAD = {"INFERENCE_NUM_THREADS": 1}
GRAPHS: dict[str, tuple[Callable[[], sg.Graph], Feed]] = {
    "attention": (_attention, lambda rng, i, j: [_ids(rng, 1 + j % 3, i)]),
    "growing": (_growing, lambda rng, i, j: [_values(rng, 1, 2, 1, 8), _values(rng, 1, 2, i, 8)]),
    "convolutions": (_convolutions, lambda rng, i, j: [_values(rng, i, 3, j + 4, 12)]),
    "resized": (_resized, lambda rng, i, j: [_values(rng, 2, 3, i + 2, j + 4)]),
    "recurrent": (_recurrent, lambda rng, i, j: [_values(rng, i, j, 6)]),
    "broadcast": (
        _broadcast,
        lambda rng, i, j: [_values(rng, i, j), _values(rng, j, 5), _values(rng, i, 1)],
    ),
}


def _symbolic_plans(model: sg.CompiledModel) -> SymbolicPlans:
    (node,) = region_nodes(model.graph)
    region = node.op
    assert isinstance(region, CpuSubgraphOp)
    return region.symbolic


def _close(got: Any, want: Any) -> None:
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    scale = max(float(np.abs(want).max(initial=0.0)), 1e-6)
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-5 * scale)


@pytest.mark.parametrize("name", GRAPHS)
@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 9)), min_size=3, max_size=9))
@settings(max_examples=6, deadline=None)
def test_any_shapes_in_any_order(name: str, sizes: list[tuple[int, int]]) -> None:
    build, feed = GRAPHS[name]
    rng = np.random.default_rng(0)
    model = sg.compile_model(build(), "CPU", ONE_THREAD)
    reference = sg.compile_model(build(), "REFERENCE")
    for pair in sizes:
        inputs = feed(rng, *pair)
        for got, want in zip(model(inputs).values(), reference(inputs).values(), strict=True):
            _close(got, want)


@pytest.mark.parametrize("name", GRAPHS)
def test_a_series_of_shapes_is_served_by_symbolic_plans(name: str) -> None:
    build, feed = GRAPHS[name]
    rng = np.random.default_rng(0)
    model = sg.compile_model(build(), "CPU", ONE_THREAD)
    for size in range(20, 33):
        inputs = feed(rng, size, 4)
        once, fresh = model(inputs), sg.compile_model(build(), "CPU", ONE_THREAD)
        for got, want in zip(once.values(), fresh(inputs).values(), strict=True):
            np.testing.assert_array_equal(got, want)
    plans = _symbolic_plans(model)
    assert plans.made <= 6
    assert plans.used >= 6


@pytest.mark.parametrize("size", [2040, 2049, 5000])
def test_repeated_elements_of_long_rows(size: int) -> None:
    model = sg.compile_model(_resized(), "CPU", ONE_THREAD)
    rng = np.random.default_rng(0)
    for width in (7, 30, size):
        x = _values(rng, 1, 3, 3, width)
        twice = model(x=x)[0]
        np.testing.assert_array_equal(twice, x.repeat(2, axis=2).repeat(2, axis=3))


def _assign(weight: sg.Value, array: Array) -> None:
    assert weight.parameter is not None
    weight.parameter.assign(array)


def _running(sizes: Sequence[int], model: sg.CompiledModel, name: str = "attention") -> None:
    build, feed = GRAPHS[name]
    rng = np.random.default_rng(1)
    fresh = sg.compile_model(build(), "REFERENCE")
    for size in sizes:
        inputs = feed(rng, size, 4)
        for got, want in zip(model(inputs).values(), fresh(inputs).values(), strict=True):
            _close(got, want)


def test_a_weight_that_changes_between_shapes() -> None:
    x = sg.input("x", ("n", 4), "float32")
    weight = sg.parameter("w", np.eye(4, dtype=np.float32))
    model = sg.compile_model(sg.Graph([x], [ops.MatMul(x, weight)]), "CPU", ONE_THREAD)
    for size in range(20, 40):
        _assign(weight, np.eye(4, dtype=np.float32) * size)
        given = np.ones((size, 4), np.float32)
        np.testing.assert_array_equal(model([given])[0], given * size)
    assert _symbolic_plans(model).used > 10


def test_a_changed_weight_that_decides_a_shape_makes_a_new_symbolic_plan() -> None:
    x = sg.input("x", ("n", 6), "float32")
    shape = sg.parameter("shape", np.array([-1, 3]))
    model = sg.compile_model(sg.Graph([x], [ops.Neg(ops.Reshape(x, shape))]), "CPU", ONE_THREAD)
    for size in range(8, 40):
        if size == 20:
            _assign(shape, np.array([2, -1]))
        want = (-1, 3) if size < 20 else (2, -1)
        given = np.arange(size * 6, dtype=np.float32).reshape(size, 6)
        np.testing.assert_array_equal(model([given])[0], -given.reshape(want))
    assert _symbolic_plans(model).used > 20


def test_shapes_that_do_not_come_back_share_one_executable_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rebound: list[PlanInstance] = []
    rebind = ExecutablePlan.rebind

    def counted(plan: ExecutablePlan, instance: PlanInstance) -> None:
        rebound.append(instance)
        rebind(plan, instance)

    monkeypatch.setattr(ExecutablePlan, "rebind", counted)
    x = sg.input("x", ("n", 4), "float32")
    model = sg.compile_model(sg.Graph([x], [ops.Softmax(ops.Exp(x))]), "CPU", ONE_THREAD)
    (node,) = region_nodes(model.graph)
    assert isinstance(node.op, CpuSubgraphOp)
    session = node.op.session()

    def run(size: int) -> None:
        given = np.random.default_rng(size).standard_normal((size, 4)).astype(np.float32)
        want = np.exp(np.exp(given)) / np.exp(np.exp(given)).sum(1, keepdims=True)
        np.testing.assert_allclose(session([given])[0], want, rtol=1e-5)

    for size in range(20, 32):
        run(size)
    assert len(rebound) == 10  # one plan for the first shape alone, one for all others
    # Shapes that alternate get executable plans of their own.
    for _ in range(6):
        for size in (22, 26, 30):
            run(size)
    rebound.clear()
    for size in (22, 26, 30):
        run(size)
    assert not rebound


def test_requests_of_many_threads_and_shapes_at_once() -> None:
    model = sg.compile_model(_attention(), "CPU", {"INFERENCE_NUM_THREADS": 2})
    errors: list[BaseException] = []

    def work(first: int) -> None:
        try:
            _running([first, 30, first + 7, 31, first + 1, first], model)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(first,)) for first in (5, 12, 24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_the_profile_is_that_of_the_shape() -> None:
    config = {**ONE_THREAD, "ENABLE_PROFILING": True}
    model = sg.compile_model(_broadcast(), "CPU", config)
    moved: list[int] = []
    for size in (20, 21, 22, 23, 24, 30):
        feed = GRAPHS["broadcast"][1](np.random.default_rng(0), size, 4)
        request, other = model.create_infer_request(), sg.compile_model(_broadcast(), "CPU", config)
        request.infer(feed)
        fresh = other.create_infer_request()
        fresh.infer(feed)
        ours, theirs = request.profile(), fresh.profile()
        assert [(e.node, e.bytes, e.flops) for e in ours] == [
            (e.node, e.bytes, e.flops) for e in theirs
        ]
        moved.append(sum(entry.bytes for entry in ours))
    assert moved == sorted(set(moved))


def test_an_export_contains_the_instances_of_symbolic_plans(tmp_path: Path) -> None:
    model = sg.compile_model(_attention(), "CPU", ONE_THREAD)
    _running(range(10, 16), model)
    model.export_model(tmp_path / "model.sgc")
    again = sg.default_core().import_model(tmp_path / "model.sgc", "CPU", ONE_THREAD)
    _running((12, 15, 40, 41, 42), again)


def test_graphs_that_cannot_be_traced_have_concrete_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def refuse(*args: Any) -> None:
        asked.append(len(args))
        raise TypeError("a rule that takes plain numbers only")

    monkeypatch.setattr(symbolic_plans, "make_symbolic_plan", refuse)
    model = sg.compile_model(_attention(), "CPU", ONE_THREAD)
    _running(range(5, 30), model)
    assert _symbolic_plans(model).used == 0
    (counts,) = model.get_property("REGION_STRATEGIES").values()
    causes = counts["declined"]["symbolic plan"]
    assert causes["TypeError: a rule that takes plain numbers only"] == len(asked)
    assert len(asked) < 12, "tracing is tried for the first shapes only"


def test_wrong_inputs_between_shapes_are_refused_and_harm_nothing() -> None:
    model = sg.compile_model(_broadcast(), "CPU", ONE_THREAD)
    feed = GRAPHS["broadcast"][1]
    rng = np.random.default_rng(0)
    _running((20, 21, 22), model, "broadcast")
    for _ in range(3):
        a, b, c = feed(rng, 23, 4)
        with pytest.raises(sg.SubgraphError, match=r"23|22"):
            model([a, b, c[:-1]])
    _running((23, 24, 40, 8), model, "broadcast")


def test_floats_that_follow_from_sizes_make_no_symbolic_plan() -> None:
    """The integers of a symbolic plan would truncate them."""
    trace = Trace()
    half: Any = trace.dimension(3)
    items = np.array([1, half * 0.5], object)
    with pytest.raises(sg.UnsupportedOpError, match="floats"):
        symbolic_plan._SymbolicNumbers().array(items)  # pyright: ignore[reportPrivateUsage]


def test_steps_of_a_decoder_with_a_cache_need_one_plan() -> None:
    """Exporters of language models write the length of a cache as that of a mask."""
    heads, keys, size = 4, 2, 16
    nodes = [
        helper.make_node("Shape", ["mask"], ["length"], start=1, end=2),
        helper.make_node("Squeeze", ["length"], ["size"]),
        helper.make_node("Cast", ["size"], ["total"], to=TensorProto.INT32),
        helper.make_node(
            "GroupQueryAttention",
            ["x", "", "", "k", "v", "ends", "total", "cos", "sin"],
            ["y", "keys", "values"],
            domain="com.microsoft",
            num_heads=heads,
            kv_num_heads=keys,
            do_rotary=1,
        ),
    ]
    rng = np.random.default_rng(0)
    width, cache = (heads + 2 * keys) * size, ["B", keys, "P", size]
    ports = [("x", 1, ["B", "S", width]), ("k", 1, cache), ("v", 1, cache)]
    ports += [("mask", TensorProto.INT64, ["B", "T"]), ("ends", TensorProto.INT32, ["B"])]
    ends = [helper.make_tensor_value_info(name, 1, None) for name in ("y", "keys", "values")]
    tables = [
        numpy_helper.from_array(rng.standard_normal((64, size // 2)).astype(np.float32), name)
        for name in ("cos", "sin")
    ]
    inputs = [helper.make_tensor_value_info(*port) for port in ports]
    model = helper.make_model(
        helper.make_graph(nodes, "g", inputs, ends, tables),
        opset_imports=[helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)],
        ir_version=9,
    )
    compiled = sg.compile_model(sg.load(model), "CPU")
    reference = sg.compile_model(sg.load(model), "REFERENCE")
    for past in range(20, 40):
        fed = {
            "x": rng.standard_normal((1, 1, width)).astype(np.float32),
            **{n: rng.standard_normal((1, keys, past, size)).astype(np.float32) for n in "kv"},
            "mask": np.ones((1, past + 1), np.int64),
            "ends": np.array([past], np.int32),
        }
        wanted = reference(fed)
        for name, got in compiled(fed).items():
            np.testing.assert_allclose(got, wanted[name], rtol=1e-4, atol=1e-5)
    plans = _symbolic_plans(compiled)
    assert plans.made == 1
    assert plans.used == 18


def test_sizes_that_the_onnx_package_passes_on_stay_symbolic() -> None:
    """GridSample has no type inference of its own."""
    x, grid = sg.input("x", ("n", 3, 8, 8), "float32"), sg.input("g", ("n", "h", 5, 2), "float32")
    model = sg.compile_model(sg.Graph([x, grid], [ops.GridSample(x, grid)]), "CPU", ONE_THREAD)
    rng = np.random.default_rng(0)
    for count, rows in ((1, 4), (2, 4), (3, 4), (3, 6), (4, 5), (6, 9)):
        a = rng.standard_normal((count, 3, 8, 8)).astype(np.float32)
        b = rng.uniform(-1, 1, (count, rows, 5, 2)).astype(np.float32)
        assert model([a, b])[0].shape == (count, 3, rows, 5)
    plans = _symbolic_plans(model)
    assert plans.made == 2  # for images, then also for rows
    assert plans.used == 3
