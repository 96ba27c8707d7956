"""Memory of results: arrays of their own for the caller, and arrays that the caller passed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeGuard

import numpy as np

from subgraph.errors import ShapeError
from subgraph.graph.types import Array

# Arrays by the identity of the array that owns their memory.
_ByOwner = dict[int, list[Any]]


def is_array(item: Any) -> TypeGuard[Array]:
    """Return whether an input or result is an array, not a sequence, map or Parameter."""
    return isinstance(item, np.ndarray)


def is_list(results: Any) -> bool:
    """Return whether results, or a value, are a list or tuple; a value is then a sequence."""
    return isinstance(results, (list, tuple))


def read_only(item: Any) -> Any:
    """Return an array, or the arrays of a list, as read-only views; other objects as they are."""
    if is_array(item):
        if not item.flags.writeable:
            return item
        view = item.view()
        view.flags.writeable = False
        return view
    return [read_only(element) for element in item] if is_list(item) else item


def own_results(results: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
    """Return results that the caller may write to: none shares memory with another array.

    Copied are results in the memory of an input or of a result before them, and read-only ones,
    such as views of weights.

    Args:
        results: Arrays, lists of arrays for sequences, or None for an optional without element.
        inputs: The inputs of the run, of the same kinds; objects that are no arrays are ignored.
    """
    if _are_new(results, inputs):
        return list(results)
    by_owner: _ByOwner = {}
    for item in inputs:
        _record(item, by_owner)
    return [_own(result, by_owner) for result in results]


def _are_new(results: Sequence[Any], inputs: Sequence[Any]) -> bool:
    """Return whether results are distinct arrays that own their memory: the usual case, fast."""
    for result in results:
        if type(result) is not np.ndarray or result.base is not None or not result.flags.writeable:
            return False
    for item in inputs:
        if is_list(item):
            return False
    together = {*map(id, results), *map(id, inputs)}
    return len(together) == len(results) + len(inputs)


def _record(item: Any, by_owner: _ByOwner) -> None:
    if is_list(item):
        for element in item:
            _record(element, by_owner)
    elif is_array(item):
        by_owner.setdefault(id(_owner(item)), []).append(item)


def _own(result: Any, by_owner: _ByOwner) -> Any:
    if is_list(result):
        return [item if type(item) is dict else _own(item, by_owner) for item in result]
    if not is_array(result):
        return result
    others = by_owner.setdefault(id(_owner(result)), [])
    # The test compares address ranges only. The exact test of NumPy can take exponential time, and
    # here an unnecessary copy does no harm.
    if not result.flags.writeable or any(np.may_share_memory(result, each) for each in others):
        return result.copy()
    others.append(result)
    return result


def _owner(array: Any) -> Any:
    """Return the array that owns the memory of an array: itself, or the base of a view."""
    while is_array(base := array.base):
        array = base
    return array


def usable_output(
    array: Array | None, dtype: np.dtype[Any], shape: tuple[int, ...]
) -> Array | None:
    """Return an array that a caller passed for a result, if a run can write the result into it.

    Args:
        array: The array; None if the caller passed none.
        dtype: The result's dtype.
        shape: The result's shape.
    """
    if array is None or array.dtype != dtype or array.shape != shape:
        return None
    return array if array.flags.c_contiguous and array.flags.writeable else None


def fill_outputs(results: Sequence[Any], outputs: Sequence[Array | None]) -> list[Any]:
    """Copy results into the arrays of ``outputs``; return these, and results that have no array.

    Raises:
        ShapeError: an array has another shape than the result of this run, or is read-only.
    """
    filled: list[Any] = []
    for position, (result, target) in enumerate(zip(results, outputs, strict=True)):
        if target is not None and target is not result:
            if target.shape != np.shape(result):
                raise ShapeError(
                    f"output {position} has shape {np.shape(result)} in this run, the array to "
                    f"write it into has {target.shape}"
                )
            if not target.flags.writeable:  # it was when it was given
                raise ShapeError(f"output {position}: the array to write it into is read-only")
            np.copyto(target, result, casting="equiv")  # the target's byte order may differ
            result = target
        filled.append(result)
    return filled
