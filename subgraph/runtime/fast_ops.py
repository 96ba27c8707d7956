"""Fast ops of the default executor: views and copies between regions, without the usual checks.

The results equal those of the reference. Inputs that a fast op does not accept are passed to the
reference, which also raises the errors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from subgraph.graph.graph import Node
from subgraph.graph.limits import (
    ARRAY_OBJECT_BYTES,
    MAX_UNCOUNTED_BYTES,
    check_memory,
    count_results,
)
from subgraph.graph.result_arrays import read_only
from subgraph.graph.types import DTYPE_OF_ONNX, numpy_dtype
from subgraph.operators.operator import operator_key
from subgraph.operators.reference import evaluate
from subgraph.operators.schema import INTERNAL_DOMAIN

Run = Callable[[Sequence[Any]], Sequence[Any]]


def fast_op(node: Node) -> Run | None:
    """Return a callable that runs a node without checks; None if the reference has to run it."""
    make = _FAST.get(operator_key(node.op_type, node.domain))
    return None if make is None else make(node)


def _is_result(node: Node) -> bool:
    """Return whether an output of the node is an output of the graph, and so needs own memory."""
    return node.graph is None or any(map(node.graph.is_output, node.outputs))


def _constant(node: Node) -> Run | None:
    if _is_result(node):
        return None
    results: list[Sequence[Any]] = []

    def run(inputs: Sequence[Any]) -> Sequence[Any]:
        # All runs share the array. It is read-only, so that a sequence with it as an item gets a
        # copy before the caller does.
        if not results:
            results.append([read_only(item) for item in evaluate(node, inputs)])
        return results[0]

    return run


def _identity(node: Node) -> Run:
    return partial(_copied, node) if _is_result(node) else list


def _copied(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    value = inputs[0]
    if type(value) is np.ndarray and value.nbytes > MAX_UNCOUNTED_BYTES:
        check_memory(value.nbytes, node.name)
    return [value.copy()] if type(value) in (np.ndarray, list) else evaluate(node, inputs)


def _cast(node: Node) -> Run | None:
    """Cast without work: PyTorch's exporter casts a loop's condition to its own dtype."""
    to = DTYPE_OF_ONNX.get(node.attrs.get("to", 0))
    return None if to is None else partial(_converted, node, numpy_dtype(to), _is_result(node))


def _converted(node: Node, dtype: np.dtype[Any], own: bool, inputs: Sequence[Any]) -> Sequence[Any]:
    value = inputs[0]
    if type(value) is not np.ndarray:
        return evaluate(node, inputs)
    if value.dtype == dtype:
        return [value.copy() if own else value]
    if value.dtype.kind in "biu" and dtype.char in _PLAIN_CASTS:
        if value.nbytes > MAX_UNCOUNTED_BYTES:
            check_memory(value.size * dtype.itemsize, node.name)
        return [value.astype(dtype)]
    return evaluate(node, inputs)


def _trim(node: Node) -> Run:
    """Return a padded form's buffer, cut to its count of elements, as a view.

    An output of the graph is copied, unless the view is contiguous, nothing else reads the buffer,
    and the buffer is at most `_MAX_HELD` times as large as the view.
    """
    is_result, only_reader = _is_result(node), _is_only_reader(node)

    def run(inputs: Sequence[Any]) -> Sequence[Any]:
        buffer, count = inputs
        axis = int(node.attrs["axis"]) % buffer.ndim
        if not 0 <= count.item() <= buffer.shape[axis]:
            return evaluate(node, inputs)
        cut = buffer[(*[slice(None)] * axis, slice(count.item()))]
        own = only_reader and cut.flags.c_contiguous and _MAX_HELD * cut.nbytes >= buffer.nbytes
        return [cut.copy(order="C") if is_result and not own else cut]

    return run


def _is_only_reader(node: Node) -> bool:
    """Return whether the first input is computed by a node and read by this one only."""
    buffer, graph = node.inputs[0], node.graph
    if buffer is None or buffer.producer is None or graph is None or graph.is_output(buffer):
        return False
    return len(buffer.consumers) == 1


def _empty(node: Node) -> Run:
    return lambda inputs: [[]]


def _construct(node: Node) -> Run:
    return lambda inputs: [list(inputs)]


def _length(node: Node) -> Run:
    return lambda inputs: [np.array(len(inputs[0]), np.int64)]


def _at(node: Node) -> Run | None:
    return None if _is_result(node) else partial(_item, node)


def _item(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    items, at = inputs[0], int(inputs[1])
    return [items[at]] if -len(items) <= at < len(items) else evaluate(node, inputs)


def _insert(node: Node) -> Run:
    def run(inputs: Sequence[Any]) -> Sequence[Any]:
        if len(inputs) == 2 or inputs[2] is None:
            # A device may have made the item, and the sequence of a loop may grow without end.
            count_results(inputs[1:2], node.name)
            return [[*inputs[0], inputs[1]]]
        return evaluate(node, inputs)

    return run


def _split(node: Node) -> Run:
    axis = int(node.attrs.get("axis", 0))

    def run(inputs: Sequence[Any]) -> Sequence[Any]:
        array, split = inputs[0], inputs[1] if len(inputs) > 1 else None
        sizes = None
        if type(array) is np.ndarray and split is not None and -array.ndim <= axis < array.ndim:
            sizes = _sizes(array.shape[axis], split)
        if sizes is None:
            return evaluate(node, inputs)
        check_memory(array.nbytes + ARRAY_OBJECT_BYTES * len(sizes), node.name)
        rows = np.moveaxis(array, axis, 0) if axis else array
        parts: list[Any] = []
        end = 0
        for size in sizes:
            begin, end = end, end + size
            part = rows[begin:end]
            # The parts are copied: as views, each would keep the whole array alive.
            parts.append((np.moveaxis(part, 0, axis) if axis else part).copy(order="C"))
        return [parts]

    return run


def _sizes(length: int, split: Any) -> list[int] | None:
    """Return the sizes of the parts into which an axis is split; None if they are invalid."""
    if split.ndim == 0:
        size = int(split)
        if size <= 0 or length == 0:
            return None
        # A split of 1 along a long axis makes millions of arrays, whose headers need more memory
        # than their elements.
        check_memory(ARRAY_OBJECT_BYTES * (length // size), "the parts of a sequence")
        return [min(size, length - begin) for begin in range(0, length, size)]
    sizes: list[int] = split.tolist() if split.ndim == 1 else []
    return sizes if sizes and min(sizes) >= 0 and sum(sizes) == length else None


def _joined(node: Node) -> Run:
    axis, stacks = int(node.attrs.get("axis", 0)), bool(node.attrs.get("new_axis", 0))
    join: Callable[..., Any] = np.stack if stacks else np.concatenate

    def run(inputs: Sequence[Any]) -> Sequence[Any]:
        items = inputs[0]
        dtype = items[0].dtype if len(items) else None
        fits = dtype is not None and -items[0].ndim - 1 <= axis <= items[0].ndim
        if fits and all(item.dtype == dtype for item in items):
            check_memory(sum(item.nbytes for item in items), node.name)
            try:
                return [join(items, axis)]
            except ValueError:  # the reference raises an error that names the cause
                pass
        return evaluate(node, inputs)

    return run


_MAX_HELD = 4  # a result may keep alive at most this multiple of its own bytes (estimate)
# Type characters of the dtypes to which NumPy converts integers as in C, without a warning.
_PLAIN_CASTS = "?bBhHiIlLqQfd"
_FAST: dict[str, Callable[[Node], Run | None]] = {
    "Cast": _cast,
    "ConcatFromSequence": _joined,
    "Constant": _constant,
    "Identity": _identity,
    "SequenceAt": _at,
    "SequenceConstruct": _construct,
    "SequenceEmpty": _empty,
    "SequenceInsert": _insert,
    "SequenceLength": _length,
    "SplitToSequence": _split,
    f"{INTERNAL_DOMAIN}::Trim": _trim,
}
