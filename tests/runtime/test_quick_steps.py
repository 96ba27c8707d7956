"""Steps that the default executor does itself, against the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import subgraph as sg
from subgraph import ops
from subgraph.graph.types import ONNX_DTYPE
from subgraph.operators.reference import evaluate
from subgraph.runtime.fast_ops import fast_op

DTYPES = ("bool", "uint8", "int32", "int64", "float16", "float32", "float64")


@pytest.mark.parametrize("is_result", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_casts_are_those_of_the_reference(dtype: str, is_result: bool) -> None:
    array = np.random.default_rng(0).integers(0, 2, (3, 4)).astype(dtype)
    if dtype not in ("bool", "uint8"):
        array[0] = -1, 30, 100, 101
    for to in DTYPES:
        x = sg.input("x", (3, 4), dtype)
        y = ops.Cast(x, to=ONNX_DTYPE[to])
        sg.Graph([x], [y if is_result else ops.Cast(y, to=ONNX_DTYPE["float64"])])
        assert y.producer is not None
        run = fast_op(y.producer)
        assert run is not None
        for item in (array, array[0, 0], array[:0]):
            (got,), (wanted,) = run([item]), evaluate(y.producer, [item])
            assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
            np.testing.assert_array_equal(got, wanted)
            assert not is_result or not np.shares_memory(got, item)


@pytest.mark.parametrize("value", [np.arange(3.0), np.array(2.0), [np.arange(2.0)]])
def test_identity_as_a_result_is_a_copy(value: Any) -> None:
    x = sg.input("x", (3,), "float64")
    y = ops.Identity(x)
    sg.Graph([x], [y])
    assert y.producer is not None
    run = fast_op(y.producer)
    assert run is not None
    (got,), (wanted,) = run([value]), evaluate(y.producer, [value])
    assert type(got) is type(wanted)
    assert got is not value
    np.testing.assert_array_equal(got, wanted)


def _check(value: sg.Value, inputs: list[Any]) -> None:
    """Check that a node gives what the reference gives, as arrays of its own, or as it refuses."""
    assert value.producer is not None
    run = fast_op(value.producer)
    assert run is not None
    try:
        (wanted,) = evaluate(value.producer, inputs)
    except sg.SubgraphError as error:
        with pytest.raises(type(error)):
            run(inputs)
        return
    (got,) = run(inputs)
    assert isinstance(got, list) == isinstance(wanted, list)
    pairs = [(got, wanted)] if isinstance(got, np.ndarray) else zip(got, wanted, strict=True)
    for mine, other in pairs:
        assert mine.dtype == other.dtype
        np.testing.assert_array_equal(mine, other)
        assert mine.flags.c_contiguous
        assert not any(np.shares_memory(mine, x) for x in inputs if isinstance(x, np.ndarray))


_SHAPES = st.lists(st.integers(0, 4), min_size=1, max_size=3).map(tuple)


@settings(max_examples=100, deadline=None)
@given(shape=_SHAPES, data=st.data())
def test_parts_of_a_tensor(shape: tuple[int, ...], data: st.DataObject) -> None:
    """Of one size, and of given sizes."""
    array = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    size = shape[axis]
    first = data.draw(st.integers(0, size))
    sizes = data.draw(st.sampled_from([2, 5, [first, size - first], [first, 0, size - first]]))
    split = np.array(sizes, np.int64)
    x, given_split = sg.input("x", shape), sg.input("split", split.shape, "int64")
    _check(ops.SplitToSequence(x, given_split, axis=axis), [array, split])


@settings(max_examples=100, deadline=None)
@given(shape=_SHAPES, new_axis=st.booleans(), dtypes=st.booleans(), data=st.data())
def test_items_joined(
    shape: tuple[int, ...], new_axis: bool, dtypes: bool, data: st.DataObject
) -> None:
    """Along an axis or a new one; none, or of several dtypes, for the reference to refuse."""
    rank = len(shape) + new_axis
    axis, count = data.draw(st.integers(-rank, rank - 1)), data.draw(st.integers(0, 3))
    items: list[Any] = [np.full(shape, k, np.float32) for k in range(count)]
    if dtypes and count > 1:
        items[-1] = items[-1].astype(np.int64)
    held = sg.input("held", type=sg.SequenceType(sg.TensorType("float32", shape)))
    _check(ops.ConcatFromSequence(held, axis=axis, new_axis=int(new_axis)), [items])
