"""TopK, NonZero, Compress, Unique, NonMaxSuppression on OPENCL: the CPU's shape work, own kernels.

Two things carry all of them: the order of elements, found by merging, and the numbers of what is
flagged. A GPU does them with groups; on a CPU each work-item has a share of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from subgraph.engine.planner.lowering import Argument, Operand, Unsupported
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.opencl.lowering import ClLowering, cl_kernel, cl_shared
from subgraph.opencl.runtime import ClSource
from subgraph.operators.schema import INTERNAL_DOMAIN
from subgraph.ops.elementwise.cpu import temporary
from subgraph.ops.elementwise.expressions import INTEGERS
from subgraph.ops.movement.copies_cpu import emit_fill
from subgraph.ops.movement.opencl import as_unsigned
from subgraph.ops.shared.opencl_code import line, require, storage, word

from .arguments import (
    CompressArguments,
    GatherPickedArguments,
    NonZeroArguments,
    SuppressArguments,
    TopKArguments,
    UniqueArguments,
)
from .padded import PREFIX, TRIMMED

_TEAM = 128  # work-items of a GPU's group
_TEAMS = 512  # of a GPU that share a count
_RUN = 16  # places that a work-item of a GPU sorts
_MERGED = 8  # places that a work-item of a GPU merges
_FEW = 4  # runs of so many times what is wanted are worth a heap
_SHARE = 2048  # items that are worth a work-item of a CPU
_MOST = 2**31

cl_shared("TopK")
cl_shared("Trim", *(f"{PREFIX}{name}" for name in TRIMMED), domain=INTERNAL_DOMAIN)


def _program(low: ClLowering, dtype: str = "", /, **defines: int) -> ClSource:
    held: dict[str, str | int] = {"GROUP": _group(low), "REAL": int(dtype not in INTEGERS)}
    if dtype:
        require(low, dtype)
        held["T"] = storage(dtype)
    return ClSource("selection/kernels", defines=tuple(sorted({**held, **defines}.items())))


def _group(low: ClLowering) -> int:
    return _TEAM if low.traits.is_gpu else 1


def _teams(low: ClLowering, count: int) -> tuple[tuple[int], tuple[int]]:
    """Return the ranges over ``count`` teams."""
    return (count * _group(low),), (_group(low),)


# ---------------------------------------------------------------------------- order


def _run_width(low: ClLowering, lines: int, size: int) -> int:
    """Return how many places one work-item sorts: a power of two."""
    if low.traits.is_gpu:
        return _RUN
    shares = max(1, 4 * low.traits.units // lines)
    return 1 << (max(64, -(-size // shares)) - 1).bit_length()


def _ordered(
    low: ClLowering,
    x: Operand,
    lines: int,
    size: int,
    *,
    inner: int = 1,
    length: int = 1,
    most: int = 0,
    descending: bool = False,
    chosen: tuple[Operand, Operand] | None = None,
) -> Operand:
    """Launch what finds the order of the elements of each line.

    Args:
        low: Where the steps go.
        x: The elements, [outer, size, inner], or [size, length]: rows that are compared as a whole.
        lines: outer * inner.
        size: Elements of a line.
        inner: Distance between elements of a line.
        length: Elements of a row.
        most: How many are wanted of each line; 0: all.
        descending: Whether the largest is first. The earlier of equal ones is always first.
        chosen: Places [lines, size] to put in order, and how many there are in each line; None:
            all. The places are overwritten.

    Returns:
        The places, int32 [lines, size].
    """
    most = most or size
    order, spare = (temporary(low, "int32", (lines, size)) for _ in range(2))
    if chosen is not None:
        order = chosen[0]
    counts = order if chosen is None else chosen[1]
    flags = {"DESCENDING": int(descending), "COUNTED": int(chosen is not None)}
    source = _program(low, "uint8" if x.dtype == "bool" else x.dtype, ORDER=1, **flags)
    width = _run_width(low, lines, size)

    def launch(kernel: str, count: int, *more: int) -> None:
        if count >= _MOST:
            raise Unsupported(f"an order of {count} elements; kernels count to 2^31")
        words: list[Argument] = [count, x, order, spare, counts, size, inner, length, most, width]
        low.launch(source, kernel, [*words, *more], *line(low, count))

    runs = -(-size // width)
    few = chosen is None and _FEW * most <= width
    launch("picks" if few else "runs", lines * runs, runs)
    while width < size:
        taken, pairs = min(width, most), -(-size // (2 * width))
        found = min(2 * taken, most)
        chunk = _chunk(low, lines * pairs * found)
        chunks = -(-found // chunk)
        launch("merge", lines * pairs * chunks, pairs, taken, chunk, chunks)
        order, spare, width = spare, order, 2 * width
    return order


def _chunk(low: ClLowering, count: int) -> int:
    """Return how many of so many places a work-item merges."""
    return _MERGED if low.traits.is_gpu else max(_SHARE // 8, -(-count // (4 * low.traits.units)))


@cl_kernel("subgraph.ops.selection.top_kernels", "keys", "wide_keys")
def top(low: ClLowering, kernel: Kernel, a: TopKArguments) -> None:
    """Launch TopK."""
    variant: dict[str, Any] = dict(kernel.variant)
    descending = bool(variant["largest"])
    lines = a.x.size // a.size
    found = _ordered(low, a.x, lines, a.size, inner=a.inner, most=a.k, descending=descending)
    source = _program(low, variant["dtype"], ORDER=1, DESCENDING=int(descending), COUNTED=0)
    count = a.values.size
    arguments = [count, a.x, found, a.values, a.indices, a.size, a.inner, a.k]
    low.launch(source, "top", arguments, *line(low, count))


# ---------------------------------------------------------------------------- numbers


def _numbered(
    low: ClLowering,
    size: int,
    total: Operand,
    arguments: Sequence[Argument],
    dtype: str = "",
    **defines: int,
) -> None:
    """Launch what numbers the flagged among ``size`` items, and writes how many there are."""
    group = _group(low)
    most = _TEAMS if low.traits.is_gpu else 4 * low.traits.units
    least = 4 * group if low.traits.is_gpu else _SHARE
    teams = max(1, min(most, -(-size // least)))
    chunk = -(-size // (teams * group)) * group
    alone = teams == 1
    counts = total if alone else temporary(low, "int32", (teams,))
    source = _program(low, dtype, ALONE=int(alone), **defines)
    if not alone:
        low.launch(source, "tally", [size, chunk, counts, *arguments], *_teams(low, teams))
        low.launch(source, "starts", [teams, counts, total], *_teams(low, 1))
    words: list[Argument] = [size, chunk, counts, total, *arguments]
    low.launch(source, "number", words, *_teams(low, teams))


def _indices(
    low: ClLowering, x: Operand, indices: Operand, total: Operand, dims: Sequence[int], half: bool
) -> None:
    """Launch what finds elements that are not zero: ``indices`` [rank, size]."""
    table = low.weight("table32", np.array, np.array(dims, np.int32))
    dtype = "uint16" if half else "uint8" if x.dtype == "bool" else x.dtype
    arguments: list[Argument] = [x, indices, table]
    flags = {"SCAN": 0, "HALF": int(half), "RANK": len(dims)}
    _numbered(low, math.prod(dims), total, arguments, dtype, **flags)


@cl_kernel("subgraph.ops.selection.kernels", "non_zero")
def non_zero(low: ClLowering, kernel: Kernel, a: NonZeroArguments) -> None:
    """Launch NonZero."""
    _indices(low, a.x, a.indices, a.count, a.dims, bool(dict(kernel.variant)["half"]))


@cl_kernel("subgraph.ops.selection.kernels", "compress")
def compress(low: ClLowering, kernel: Kernel, a: CompressArguments) -> None:
    """Launch Compress: the indices of true conditions, then copies."""
    indices = temporary(low, "int64", (a.room,))
    _indices(low, a.conditions, indices, a.count, [a.room], False)
    item = min(a.x.itemsize, 8)
    inner = a.slice_bytes // item
    count = a.outer * a.room * inner
    arguments = [count, as_unsigned(a.x, item), indices, a.count, as_unsigned(a.y, item)]
    source = ClSource(
        "selection/kernels", defines=(("COMPRESS", 1), ("GROUP", 1), ("T", word(item)))
    )
    low.launch(source, "compress", [*arguments, a.size, a.room, inner], *line(low, count))


@cl_kernel("subgraph.ops.selection.kernels", "unique")
def unique(low: ClLowering, kernel: Kernel, a: UniqueArguments) -> None:
    """Launch Unique: the order of the rows, groups of equal ones, numbers and counts of each."""
    variant: dict[str, Any] = dict(kernel.variant)
    dtype = variant["dtype"]
    rows, total = a.rows, a.count
    order = _ordered(low, a.x, 1, rows, length=a.length)
    groups, begins, firsts = (temporary(low, "int32", (rows,)) for _ in range(3))
    arguments: list[Argument] = [a.x, order, groups, begins, firsts, a.length]
    _numbered(low, rows, total, arguments, dtype, SCAN=1)
    numbers = groups
    if not variant["in_order"]:
        numbers = temporary(low, "int32", (rows,))
        _numbered(low, rows, total, [firsts, numbers], SCAN=2)
    count = rows * max(a.length, 1)
    arguments = [count, a.x, order, groups, begins, numbers, total, a.y, a.first, a.inverse]
    source = _program(low, dtype, DISTINCT=1, SORTED=int(variant["in_order"]))
    low.launch(source, "distinct", [*arguments, a.counts, rows, a.length], *line(low, count))


# ---------------------------------------------------------------------------- boxes


@cl_kernel("subgraph.ops.selection.kernels", "suppress")
def suppress(low: ClLowering, kernel: Kernel, a: SuppressArguments) -> None:
    """Launch what picks boxes of each class: those good enough, in order, then one by one."""
    lines, number = a.counts.size, a.number
    if not isinstance(a.most, Operand):
        emit_fill(low, a.counts, lines, np.zeros(1, np.int64))
        return
    flags = {
        "CENTRED": int(bool(dict(kernel.variant)["centred"])),
        "LIMITED": int(isinstance(a.overlap, Operand)),
        "SCORED": int(isinstance(a.least, Operand)),
    }
    source = _program(low, BOXES=1, **flags)
    order = temporary(low, "int32", (lines, number))
    counts = temporary(low, "int32", (lines,))
    arguments: list[Argument] = [lines, a.scores, a.least or a.scores, order, counts, number]
    low.launch(source, "candidates", arguments, *_teams(low, lines))
    order = _ordered(low, a.scores, lines, number, descending=True, chosen=(order, counts))
    arguments = [lines, a.boxes, order, counts, a.most, a.overlap or a.boxes, a.picked, a.counts]
    arguments += [number, a.classes, a.room]
    low.launch(source, "suppress", arguments, *_teams(low, lines))


@cl_kernel("subgraph.ops.selection.kernels", "gather_picked")
def gather_picked(low: ClLowering, kernel: Kernel, a: GatherPickedArguments) -> None:
    """Launch what puts the picks of all classes one after the other."""
    source = _program(low, BOXES=1, CENTRED=0, LIMITED=0, SCORED=0)
    arguments = [a.units, a.picked, a.counts, a.y, a.count, a.classes, a.room]
    low.launch(source, "gather_picked", arguments, *_teams(low, a.units))
