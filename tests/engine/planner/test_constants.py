"""Values computed from weights alone: each computed once, and their evaluation by NumPy."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import subgraph as sg
from subgraph import ops
from subgraph.graph.types import ONNX_DTYPE, Array
from subgraph.operators.inference import check_values
from subgraph.operators.reference import evaluate, standard


def on_weight(value: sg.Value) -> sg.Graph:
    x = sg.input("x", (4,), "float32")
    return sg.Graph([x], [ops.Add(x, value)])


def doubled(weight: sg.Value, times: int) -> sg.Value:
    """Return a value whose tree of uses has 2 ** times leaves."""
    for _ in range(times):
        weight = ops.Mul(ops.Add(weight, weight), np.float32(0.5))
    return weight


@pytest.mark.parametrize("device", ["CPU", "OPENCL", "REFERENCE"])
def test_a_shared_value_is_computed_once(device: str) -> None:
    weight = sg.parameter("w", np.arange(4, dtype=np.float32))
    graph = on_weight(doubled(weight, 60))
    model = sg.compile_model(graph, device)
    ones = np.ones(4, np.float32)
    assert model(x=ones)[0].tolist() == [1, 2, 3, 4]
    graph.parameters["w"].assign(np.full(4, 7, np.float32))
    assert model(x=ones)[0].tolist() == [8, 8, 8, 8]


@pytest.mark.parametrize("device", ["CPU", "OPENCL"])
def test_weights_that_omit_other_inputs_are_not_shared(device: str) -> None:
    weight, bound = np.linspace(-2, 2, 4, dtype=np.float32), np.float32(0.5)
    w, b = sg.parameter("w", weight), sg.parameter("b", bound)
    x = sg.input("x", (4,), "float32")
    graph = sg.Graph([x], [ops.Add(x, ops.Clip(w, b)), ops.Add(x, ops.Clip(w, None, b))])
    results = sg.compile_model(graph, device)(x=np.zeros(4, np.float32))
    np.testing.assert_array_equal(results[0], np.maximum(weight, bound))
    np.testing.assert_array_equal(results[1], np.minimum(weight, bound))


def test_a_long_chain_needs_no_recursion() -> None:
    value = sg.parameter("w", np.zeros(4, np.float32))
    for _ in range(3000):
        value = ops.Neg(value)
    model = sg.compile_model(on_weight(ops.Add(value, np.float32(1))), "CPU")
    assert model(x=np.zeros(4, np.float32))[0].tolist() == [1, 1, 1, 1]


def test_weights_over_shared_ones_keep_their_own_recipes() -> None:
    weight = sg.parameter("w", np.arange(4, dtype=np.float32))
    x = sg.input("x", (4,), "float32")
    shared = ops.Neg(weight)
    plain, reversed_ = ops.Sub(shared, weight), ops.Sub(weight, shared)
    model = sg.compile_model(sg.Graph([x], [ops.Add(x, plain), ops.Add(x, reversed_)]), "CPU")
    first, second = model(x=np.zeros(4, np.float32)).values()
    assert first.tolist() == [0, -2, -4, -6]
    assert second.tolist() == [0, 2, 4, 6]


shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)


def check(value: sg.Value, inputs: list[Array]) -> None:
    """Compare the evaluation of the value's node with onnx.reference's."""
    node = value.producer
    assert node is not None
    try:
        check_values(node, inputs)
    except sg.SubgraphError:
        with pytest.raises(sg.SubgraphError):
            evaluate(node, inputs)
        return
    try:
        with np.errstate(all="ignore"):
            expected = np.asarray(standard(node, inputs)[0])
    except Exception:  # also of operands that fit, for which the operator has a definition
        with contextlib.suppress(sg.SubgraphError):
            evaluate(node, inputs)
        return
    found = evaluate(node, inputs)[0]
    assert found.dtype == expected.dtype
    if found.dtype.isbuiltin != 1:
        found, expected = found.astype(np.float64), expected.astype(np.float64)
    np.testing.assert_array_equal(found, expected)


@given(shape=shapes.filter(bool), data=st.data())
@settings(max_examples=100, deadline=None)
def test_scatter_elements(shape: tuple[int, ...], data: st.DataObject) -> None:
    rank = len(shape)
    smaller = tuple(data.draw(st.integers(0, size)) for size in shape)
    axis = data.draw(st.integers(-rank, rank - 1))
    size = shape[axis]
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    index = rng.integers(-size, size + (size == 0), smaller)
    if not size:
        index = index[..., :0]
    arrays = [rng.standard_normal(shape), index, rng.standard_normal(index.shape)]
    names = [sg.input(n, a.shape, a.dtype.name) for n, a in zip("xiu", arrays, strict=True)]
    check(ops.ScatterElements(*names, axis=axis), arrays)


@given(shape=shapes.filter(bool), rows=shapes, data=st.data())
@settings(max_examples=100, deadline=None)
def test_gather_nd_and_scatter_nd(
    shape: tuple[int, ...], rows: tuple[int, ...], data: st.DataObject
) -> None:
    depth = data.draw(st.integers(1, len(shape)))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    if 0 in shape[:depth]:
        rows = (*rows, 0)
    index = np.stack(
        [rng.integers(-max(size, 1), max(size, 1), rows) for size in shape[:depth]], axis=-1
    )
    x = rng.standard_normal(shape)
    data_in, index_in = sg.input("x", shape, "float64"), sg.input("i", index.shape, "int64")
    check(ops.GatherND(data_in, index_in), [x, index])
    updates = rng.standard_normal(index.shape[:-1] + shape[depth:])
    update_in = sg.input("u", updates.shape, "float64")
    check(ops.ScatterND(data_in, index_in, update_in), [x, index, updates])


DTYPES = ["float32", "float64", "int64", "int32", "uint8"]


def drawn(data: st.DataObject, shape: tuple[int, ...], dtype: str) -> Array:
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    values = rng.integers(0 if dtype == "uint8" else -9, 9, shape).astype(dtype)
    if dtype.startswith("float"):
        values += rng.choice(np.array([0, 0.5, np.inf, np.nan], dtype), shape)
    return values


def given_as(arrays: Sequence[Array]) -> list[sg.Value]:
    return [sg.input(f"x{k}", a.shape, a.dtype.name) for k, a in enumerate(arrays)]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@given(
    op_type=st.sampled_from(["Ceil", "Floor", "Neg", "Reciprocal", "Sqrt", "Cast", "Flatten"]),
    shape=shapes,
    dtype=st.sampled_from(DTYPES),
    data=st.data(),
)
@settings(max_examples=150, deadline=None)
def test_of_one_input(
    op_type: str, shape: tuple[int, ...], dtype: str, data: st.DataObject
) -> None:
    x = drawn(data, shape, dtype)
    attrs: dict[str, Any] = {}
    if op_type == "Cast":
        others = ["int8", "float16", "bfloat16", "float8_e5m2", "float8_e4m3fn"]
        attrs["to"] = int(ONNX_DTYPE[data.draw(st.sampled_from([*DTYPES, *others]))])
    elif op_type == "Flatten":
        attrs["axis"] = data.draw(st.integers(-len(shape), len(shape)))
    elif op_type != "Neg" and not dtype.startswith("float"):
        return  # the operator takes no integers
    if op_type == "Neg" and dtype == "uint8":
        return  # nor this one unsigned ones
    check(getattr(ops, op_type)(*given_as([x]), **attrs), [x])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@given(
    op_type=st.sampled_from(["Add", "Sub", "Mul", "Div", "Max", "Min", "Less", "Equal"]),
    shape=shapes,
    dtype=st.sampled_from(DTYPES),
    data=st.data(),
)
@settings(max_examples=150, deadline=None)
def test_of_two_inputs(
    op_type: str, shape: tuple[int, ...], dtype: str, data: st.DataObject
) -> None:
    arrays = [drawn(data, shape, dtype), drawn(data, shape[data.draw(st.integers(0, 3)) :], dtype)]
    if op_type == "Div" and not dtype.startswith("float"):
        arrays[1] += arrays[1] == 0
    check(getattr(ops, op_type)(*given_as(arrays)), arrays)


@given(
    op_type=st.sampled_from(["ReduceMax", "ReduceMin", "ReduceProd"]),
    shape=shapes,
    dtype=st.sampled_from(DTYPES),
    keeps=st.booleans(),
    noop=st.booleans(),
    data=st.data(),
)
@settings(max_examples=100, deadline=None)
def test_reductions(
    op_type: str,
    shape: tuple[int, ...],
    dtype: str,
    keeps: bool,
    noop: bool,
    data: st.DataObject,
) -> None:
    if op_type == "ReduceProd" and dtype == "uint8":
        return  # the operator takes no small integers
    rank = len(shape)
    axes = st.lists(st.integers(0, rank - 1), unique=True) if rank else st.just([])
    arrays = [drawn(data, shape, dtype), np.array(data.draw(axes), np.int64)]
    if data.draw(st.booleans()):
        del arrays[1]
    reduced = getattr(ops, op_type)(
        *given_as(arrays), keepdims=int(keeps), noop_with_empty_axes=int(noop)
    )
    check(reduced, arrays)


@given(shape=shapes, dtype=st.sampled_from(DTYPES), data=st.data())
@settings(max_examples=150, deadline=None)
def test_movement(shape: tuple[int, ...], dtype: str, data: st.DataObject) -> None:
    x, rank = drawn(data, shape, dtype), len(shape)
    numbers = st.integers(-6, 6)
    axes = data.draw(st.lists(st.integers(-rank, rank - 1), max_size=rank) if rank else st.just([]))
    slices = [data.draw(st.tuples(numbers, numbers, numbers.filter(bool))) for _ in axes]
    # onnx.reference is wrong for negative steps from before the first element.
    right = all(
        step > 0 or start >= -shape[axis]
        for axis, (start, _, step) in zip(axes, slices, strict=True)
    )
    if right and len({axis % rank for axis in axes}) == len(axes):
        cut = [np.array([p[k] for p in slices], np.int64) for k in (0, 1, 2)]
        arrays = [x, cut[0], cut[1], np.array(axes, np.int64), cut[2]]
        check(ops.Slice(*given_as(arrays)), arrays)
    repeats = np.array([data.draw(st.integers(0, 3)) for _ in shape], np.int64)
    check(ops.Tile(*given_as([x, repeats])), [x, repeats])
    wider = (*data.draw(shapes), *shape)
    check(ops.Expand(*given_as([x, np.array(wider, np.int64)])), [x, np.array(wider, np.int64)])
    if rank:
        axis = data.draw(st.integers(-rank, rank - 1))
        check(ops.Concat(*given_as([x, x[..., :]]), axis=axis), [x, x])
    one = x[..., None]
    check(ops.Squeeze(*given_as([one, np.array([-1])])), [one, np.array([-1])])
    condition = drawn(data, shape, "int64") > 0
    check(
        ops.Where(*given_as([condition, x, x[::-1] if rank else x])),
        [condition, x, x[::-1] if rank else x],
    )


@given(begin=st.integers(-20, 20), end=st.integers(-20, 20), step=st.integers(-4, 4).filter(bool))
@settings(max_examples=60, deadline=None)
def test_ranges(begin: int, end: int, step: int) -> None:
    for dtype in ("int64", "int32", "float32"):
        arrays = [np.array(v, dtype) for v in (begin, end, step)]
        check(ops.Range(*given_as(arrays)), arrays)


@given(shapes)
def test_size(shape: tuple[int, ...]) -> None:
    check(ops.Size(sg.input("x", shape)), [np.zeros(shape, np.float32)])
