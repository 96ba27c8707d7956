"""Selections along axes as steps: elements of the result by tables of indices, and Pad."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from subgraph.dtypes import UNSIGNED
from subgraph.engine.planner.lowering import Lowering, Unsupported, lowering
from subgraph.engine.planner.operands import Operand, Scratch
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.graph.graph import Node
from subgraph.graph.limits import check_memory
from subgraph.graph.symbolic import larger, smaller
from subgraph.graph.types import Array, numpy_dtype
from subgraph.operators.requirements import decoded
from subgraph.ops.elementwise.cpu import clear_padding
from subgraph.ops.elementwise.primitives import primitive
from subgraph.ops.shared.strides import contiguous, normal_axis

from .arguments import TakeArguments, TakeLastAxesArguments
from .copies_cpu import UNIT_BYTES, emit_copy, emit_fill
from .cpu import element_bytes, known_ints
from .types import Repeats

_PAD_TABLE_BYTES = 40  # bytes of the table of a padded axis and temporaries, an element (measured)
_TABLE_BYTES = 16384  # bytes of a unit of `take`, and least bytes for a thread (estimate)
_ZEROS = np.zeros(16, np.uint8)  # an element of any dtype
_REPEATED = (1, 2, 3, 4)  # repetitions of the elements of a row that need no table


def emit_take(
    low: Lowering,
    source_: Operand | Scratch,
    target: Operand | Scratch,
    shape: Sequence[int],
    axis: int,
    table: Array | Repeats,
    *,
    item: int,
    pad: Array = _ZEROS,
) -> None:
    """Emit the step that takes slices along ``axis`` by a table.

    Args:
        low: Collects the plan's steps and constants.
        source_: The array.
        target: The result; ``shape`` with ``len(table)`` slices along the axis.
        shape: Sizes of the source.
        axis: The axis.
        table: For each slice of the result its index in the source, or -1 for the pad element.
        item: Bytes of an element.
        pad: The pad element, an array of one element.
    """
    table = table.table() if isinstance(table, Repeats) else table
    outer, inner = math.prod(shape[:axis]), math.prod(shape[axis + 1 :])
    block = max(1, min(len(table), _TABLE_BYTES // max(inner * item, 1)))
    held = low.weight("table", np.array, np.ascontiguousarray(table, np.int64))
    run, run_size = _longest_run(table)
    arguments = TakeArguments(
        x=source_,
        y=target,
        table=held,
        pad=low.weight("element", np.array, pad),
        outer=outer,
        axis_size=shape[axis],
        taken=len(table),
        inner=inner,
        block=block,
        run=run,
        run_size=run_size,
    )
    units = outer * -(-len(table) // block) if inner else 0
    kernel = Kernel("subgraph.ops.movement.kernels", "take", item=item)
    moved = 2 * outer * len(table) * inner * item
    grain = max(1, _TABLE_BYTES // (block * inner * item + 1))
    low.emit(kernel, arguments, units, grain=grain, bytes=moved)


@primitive
def emit_take_last_axes(
    low: Lowering,
    source_: Operand | Scratch,
    target: Operand | Scratch,
    shape: Sequence[int],
    tables: Mapping[int, Array | Repeats],
    *,
    item: int,
) -> None:
    """Emit the step that takes elements of the last two axes by a table for each axis.

    Args:
        low: Collects the plan's steps and constants.
        source_: The array.
        target: The result.
        shape: Sizes of the source.
        tables: For the last or the last but one axis, the index in the source of each element of
            the result; an axis without a table is copied as it is.
        item: Bytes of an element.
    """
    if len(shape) - 2 not in tables:
        # Each row counts as an image, so that no table depends on the number of rows.
        tables = {len(shape): tables[len(shape) - 1]}
        shape = (*shape[:-1], 1, shape[-1])
    before = (1, *shape)[-2:]
    rows, columns = (
        tables[len(shape) + axis] if len(shape) + axis in tables else np.arange(before[axis])
        for axis in (-2, -1)
    )
    row_count, column_count = table_size(rows), table_size(columns)
    # Repeated elements are written by permuting vectors, which needs no loads from a table.
    times = _repetitions(columns, before[1])
    lanes = low.lanes(UNSIGNED[item])
    kernel = Kernel(
        "subgraph.ops.movement.kernels", "take_last_axes", item=item, lanes=lanes, times=times
    )
    row_table, column_table = (
        low.weight("table32", np.array, np.ascontiguousarray(table, np.int32))
        for table in (t.longer() if isinstance(t, Repeats) else t for t in (rows, columns))
    )
    row_bytes = column_count * item
    block = larger(1, smaller(row_count, UNIT_BYTES // row_bytes))
    run, run_size = (0, 0) if isinstance(columns, Repeats) else _longest_run(columns)
    arguments = TakeLastAxesArguments(
        x=source_,
        y=target,
        row_table=row_table,
        column_table=column_table,
        rows=before[0],
        taken_rows=row_count,
        row_size=before[1],
        taken_row_size=column_count,
        block=block,
        run=run,
        run_size=run_size,
    )
    images = math.prod(shape[:-2])
    grain = larger(1, UNIT_BYTES // (block * row_bytes))
    moved = images * (math.prod(before) * item + row_count * row_bytes)
    low.emit(kernel, arguments, images * -(-row_count // block), grain=grain, bytes=moved)


def table_size(table: Array | Repeats) -> int:
    """Return the number of elements of a table."""
    return table.count if isinstance(table, Repeats) else len(table)


def _repetitions(table: Array | Repeats, size: int) -> int:
    """Return how often each of ``size`` indices is repeated; 0 if the kernel reads the table."""
    times = table.times if isinstance(table, Repeats) else len(table) // size
    if times not in _REPEATED:
        return 0
    regular = isinstance(table, Repeats) or np.array_equal(table, np.arange(len(table)) // times)
    return times if regular else 0


def _longest_run(table: Array) -> tuple[int, int]:
    """Return start and length of the longest part of a table that counts up by one, or (0, 0)."""
    table = table.astype(np.int64)
    # A step from the pad index -1 to 0 counts up by one as well, but is not a run of the source.
    broken = (np.diff(table) != 1) | (table[:-1] < 0)
    edges = np.concatenate([[0], np.flatnonzero(broken) + 1, [len(table)]])
    longest = int(np.argmax(np.diff(edges)))
    first, size = int(edges[longest]), int(edges[longest + 1] - edges[longest])
    # One or two slices are copied like the others.
    return (first, size) if size > 2 and table[first] >= 0 else (0, 0)


@lowering("Pad", layouts=("plain", "blocked"))
def pad(node: Node, low: Lowering) -> None:
    """Lower Pad of all modes; negative pads cut elements off."""
    x, y = low.input(0), low.output()
    item = element_bytes(x)
    mode = decoded(node.attrs.get("mode", "constant"))
    amounts = known_ints(low, 1, "pads") or [int(v) for v in node.attrs.get("paddings", ())]
    axes = known_ints(low, 3, "axes") if low.optional(3) is not None else None
    axes = list(range(x.rank)) if axes is None else [normal_axis(a, x.rank) for a in axes]
    shape = list(x.memory_shape)
    before, after = [0] * len(shape), [0] * len(shape)
    for k, axis in enumerate(axes):
        before[axis], after[axis] = amounts[k], amounts[len(axes) + k]
    if y.size == 0:
        return
    if not any(before) and not any(after):
        low.alias(y, x)
        return
    if x.layout == "blocked" and (before[1] or after[1]):
        raise Unsupported("Pad of channels in blocks")
    if mode == "constant":
        _pad_constant(node, low, before, after, item)
        return
    if x.size == 0:
        raise Unsupported("Pad of an empty tensor")
    if item == 16:
        raise Unsupported("Pad of complex numbers")
    current: Operand | Scratch = x
    tables = {
        axis: _pad_table(mode, shape[axis], before[axis], after[axis])
        for axis in range(len(shape))
        if before[axis] or after[axis]
    }
    # The last two axes are padded together by one step, the others by a step each.
    around = [axis for axis in tables if axis < len(shape) - 2]
    for axis in around:
        shape_after = [*shape[:axis], len(tables[axis]), *shape[axis + 1 :]]
        last = len(tables) == len(around) and axis == around[-1]
        target = y if last else low.scratch(math.prod(shape_after) * item)
        emit_take(low, current, target, shape, axis, tables[axis], item=item)
        current, shape = target, shape_after
    if len(tables) > len(around):
        emit_take_last_axes(low, current, y, shape, tables, item=item)


def _pad_constant(
    node: Node, low: Lowering, before: list[int], after: list[int], item: int
) -> None:
    x, y = low.input(0), low.output()
    from_shape, to_shape = x.memory_shape, y.memory_shape
    # The whole output is filled and then partly overwritten, as the border is not one array.
    value = low.optional(2)
    if value is None:
        number = np.full(1, node.attrs.get("value", 0.0)).astype(numpy_dtype(y.dtype))
        emit_fill(low, y, math.prod(to_shape), number)
    else:
        emit_fill(low, y, math.prod(to_shape), value)
    if y.layout == "blocked":
        clear_padding(low, y)
    steps, target = contiguous(from_shape), contiguous(to_shape)
    # A negative pad removes elements from the input, so the copy starts later in the input and a
    # positive one makes it start later in the output.
    shape = [n + min(b, 0) + min(a, 0) for n, b, a in zip(from_shape, before, after, strict=True)]
    if min(shape, default=1) <= 0:
        return
    emit_copy(
        low,
        x,
        y,
        shape,
        steps,
        target,
        item=item,
        from_offset=sum(max(-b, 0) * s for b, s in zip(before, steps, strict=True)),
        to_offset=sum(max(b, 0) * s for b, s in zip(before, target, strict=True)),
    )


def _pad_table(mode: str, size: int, before: int, after: int) -> Array:
    """Return for each element of the padded axis its index in the axis before."""
    # Elements that negative pads cut off are not part of the repeated pattern.
    first, size = max(-before, 0), size - max(-before, 0) - max(-after, 0)
    count = size + max(before, 0) + max(after, 0)
    check_memory(_PAD_TABLE_BYTES * count, f"the table of a Pad to {count} elements")
    at = np.arange(-max(before, 0), size + max(after, 0))
    if mode == "edge":
        return first + np.clip(at, 0, size - 1)
    if mode == "wrap":
        return first + at % size
    if size == 1:
        return np.full(len(at), first)
    # A reflection does not repeat the outermost elements, so the pattern has two elements less than
    # both directions together.
    period = 2 * (size - 1)
    folded = at % period
    return first + np.where(folded < size, folded, period - folded)
