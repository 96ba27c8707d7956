"""Selections along axes as steps: elements of the result by tables of indices (Pad, Resize)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from subgraph.dtypes import UNSIGNED
from subgraph.engine.planner.lowering import Lowering
from subgraph.engine.planner.operands import Operand, Scratch
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.graph.symbolic import larger, smaller
from subgraph.graph.types import Array
from subgraph.ops.elementwise.primitives import primitive

from .arguments import TakeArguments, TakeLastAxesArguments
from .copies_cpu import UNIT_BYTES
from .types import Repeats

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
