"""Views of memory, against NumPy's strides and reshapes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from subgraph.engine.planner.views import View, dense, expanded, reshaped, runs


def elements(view: View) -> list[int]:
    """Return the offset of each element, in row-major order."""
    offsets = np.zeros((), np.int64)
    for size, stride in (part for dimension in view for part in dimension):
        offsets = offsets[..., None] + np.arange(size) * stride
    found: list[int] = offsets.reshape(-1).tolist()
    return found


SIZES = st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=4)


@given(SIZES, SIZES, st.data())
def test_a_reshaped_view_has_the_same_elements_in_order(
    shape: list[int], other: list[int], data: st.DataObject
) -> None:
    memory = [size + data.draw(st.sampled_from([0, 0, 5])) for size in shape]
    view = dense(shape, memory)
    whole = np.arange(np.prod(memory)).reshape(memory)
    inside = whole[tuple(slice(size) for size in shape)]
    assert elements(view) == inside.reshape(-1).tolist()
    found = reshaped(view, other)
    if np.prod(shape) != np.prod(other):
        assert found is None
        return
    if memory == shape:
        assert found is not None
    if found is not None:
        assert elements(found) == elements(view)
        assert [int(np.prod([size for size, _ in parts])) for parts in found] == other


@given(SIZES)
def test_runs_join_what_is_adjacent(shape: list[int]) -> None:
    view = dense(shape, shape)
    count = int(np.prod(shape))
    assert runs(view) == ([] if count == 1 else [(count, 1)])


def test_repeated_heads() -> None:
    view = dense((2, 3, 1, 5, 4), (2, 3, 1, 9, 4))
    groups = expanded(view, (2, 3, 7, 5, 4))
    heads = reshaped(groups, (2, 21, 5, 4))
    assert heads is not None
    assert heads == (((2, 108),), ((3, 36), (7, 0)), ((5, 4),), ((4, 1),))
    x = np.arange(2 * 3 * 9 * 4).reshape(2, 3, 9, 4)[:, :, :5]
    assert elements(heads) == np.repeat(x, 7, axis=1).reshape(-1).tolist()
    assert reshaped(groups, (2, 7, 3, 5, 4)) is None  # the parts of 3 and 7 cannot be divided
    assert reshaped(groups, (42, 5, 4)) == (((2, 108), (3, 36), (7, 0)), ((5, 4),), ((4, 1),))


@pytest.mark.parametrize("shape", [(2, 0), (0,), (5, 2)])
def test_shapes_that_no_view_has(shape: tuple[int, ...]) -> None:
    assert reshaped(dense((3, 2), (3, 4)), shape) is None
