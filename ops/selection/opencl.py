"""TopK, NonZero, Compress, Unique, NonMaxSuppression on OPENCL: the CPU's shape work, own kernels.

Two things carry all of them: the order of elements, found by merging, and the numbers of what is
flagged. A GPU does them with groups; on a CPU each work-item has a share of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from subgraph.engine.planner.lowering import Operand, Unsupported, Word
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.opencl.lowering import ClLowering, cl_kernel, cl_shared
from subgraph.opencl.runtime import ClSource
from subgraph.operators.schema import INTERNAL_DOMAIN
from subgraph.ops.elementwise.cpu import temporary
from subgraph.ops.elementwise.expressions import INTEGERS
from subgraph.ops.movement.copies_cpu import emit_fill
from subgraph.ops.movement.opencl import as_words
from subgraph.ops.shared.opencl_code import line, require, storage, word

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


def _parts(words: Sequence[Word], count: int) -> tuple[list[Operand], list[int]]:
    """Return the operands that come first, and the numbers after them."""
    operands = [word for word in words[:count] if isinstance(word, Operand)]
    assert len(operands) == count
    return operands, [word for word in words[count:] if isinstance(word, int)]


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
        words: list[Word] = [count, x, order, spare, counts, size, inner, length, most, width]
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
def top(low: ClLowering, kernel: Kernel, words: Sequence[Word]) -> None:
    """Launch TopK."""
    variant: dict[str, Any] = dict(kernel.variant)
    (x, values, places), (size, inner, k, *_) = _parts(words, 3)
    descending = bool(variant["largest"])
    found = _ordered(low, x, x.size // size, size, inner=inner, most=k, descending=descending)
    source = _program(low, variant["dtype"], ORDER=1, DESCENDING=int(descending), COUNTED=0)
    arguments: list[Word] = [values.size, x, found, values, places, size, inner, k]
    low.launch(source, "top", arguments, *line(low, values.size))


# ---------------------------------------------------------------------------- numbers


def _numbered(
    low: ClLowering,
    size: int,
    total: Operand,
    arguments: Sequence[Word],
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
    words: list[Word] = [size, chunk, counts, total, *arguments]
    low.launch(source, "number", words, *_teams(low, teams))


def _places(
    low: ClLowering, x: Operand, places: Operand, total: Operand, dims: Sequence[int], half: bool
) -> None:
    """Launch what finds elements that are not zero: ``places`` [rank, size]."""
    table = low.weight("table32", np.array, np.array(dims, np.int32))
    dtype = "uint16" if half else "uint8" if x.dtype == "bool" else x.dtype
    arguments: list[Word] = [x, places, table]
    flags = {"SCAN": 0, "HALF": int(half), "RANK": len(dims)}
    _numbered(low, math.prod(dims), total, arguments, dtype, **flags)


@cl_kernel("subgraph.ops.selection.kernels", "non_zero")
def non_zero(low: ClLowering, kernel: Kernel, words: Sequence[Word]) -> None:
    """Launch NonZero."""
    (x, places, total), (_, _, *dims) = _parts(words, 3)
    _places(low, x, places, total, dims, bool(dict(kernel.variant)["half"]))


@cl_kernel("subgraph.ops.selection.kernels", "compress")
def compress(low: ClLowering, kernel: Kernel, words: Sequence[Word]) -> None:
    """Launch Compress: the places of true conditions, then copies."""
    (x, conditions, y, total), (outer, size, step, _, room) = _parts(words, 4)
    places = temporary(low, "int64", (room,))
    _places(low, conditions, places, total, [room], False)
    item = min(x.itemsize, 8)
    count = outer * room * (step // item)
    arguments: list[Word] = [count, as_words(x, item), places, total, as_words(y, item)]
    source = ClSource(
        "selection/kernels", defines=(("COMPRESS", 1), ("GROUP", 1), ("T", word(item)))
    )
    low.launch(source, "compress", [*arguments, size, room, step // item], *line(low, count))


@cl_kernel("subgraph.ops.selection.kernels", "unique")
def unique(low: ClLowering, kernel: Kernel, words: Sequence[Word]) -> None:
    """Launch Unique: the order of the rows, groups of equal ones, what is told of each."""
    variant: dict[str, Any] = dict(kernel.variant)
    dtype = variant["dtype"]
    (x, y, first, inverse, counts, total), (rows, length, *_) = _parts(words, 6)
    order = _ordered(low, x, 1, rows, length=length)
    groups, begins, firsts = (temporary(low, "int32", (rows,)) for _ in range(3))
    arguments: list[Word] = [x, order, groups, begins, firsts, length]
    _numbered(low, rows, total, arguments, dtype, SCAN=1)
    numbers = groups
    if not variant["in_order"]:
        numbers = temporary(low, "int32", (rows,))
        _numbered(low, rows, total, [firsts, numbers], SCAN=2)
    count = rows * max(length, 1)
    arguments = [count, x, order, groups, begins, numbers, total, y, first, inverse, counts]
    source = _program(low, dtype, DISTINCT=1, SORTED=int(variant["in_order"]))
    low.launch(source, "distinct", [*arguments, rows, length], *line(low, count))


# ---------------------------------------------------------------------------- boxes


@cl_kernel("subgraph.ops.selection.kernels", "suppress")
def suppress(low: ClLowering, kernel: Kernel, words: Sequence[Word]) -> None:
    """Launch what picks boxes of each class: those good enough, in order, then one by one."""
    boxes, scores, most, limit, least, picked, many = words[:7]
    number, classes, room = (n for n in words[7:10] if isinstance(n, int))
    assert isinstance(scores, Operand)
    assert isinstance(picked, Operand)
    assert isinstance(many, Operand)
    lines = many.size
    if not isinstance(most, Operand):
        emit_fill(low, many, lines, np.zeros(1, np.int64))
        return
    flags = {
        "CENTRED": int(bool(dict(kernel.variant)["centred"])),
        "LIMITED": int(isinstance(limit, Operand)),
        "SCORED": int(isinstance(least, Operand)),
    }
    source = _program(low, BOXES=1, **flags)
    order = temporary(low, "int32", (lines, number))
    counts = temporary(low, "int32", (lines,))
    arguments: list[Word] = [lines, scores, least or scores, order, counts, number]
    low.launch(source, "candidates", arguments, *_teams(low, lines))
    order = _ordered(low, scores, lines, number, descending=True, chosen=(order, counts))
    arguments = [lines, boxes, order, counts, most, limit or boxes, picked, many]
    low.launch(source, "suppress", [*arguments, number, classes, room], *_teams(low, lines))


@cl_kernel("subgraph.ops.selection.kernels", "gather_picked")
def gather_picked(low: ClLowering, kernel: Kernel, words: Sequence[Word]) -> None:
    """Launch what puts the picks of all classes one after the other."""
    (picked, many, y, total), (lines, classes, room) = _parts(words, 4)
    source = _program(low, BOXES=1, CENTRED=0, LIMITED=0, SCORED=0)
    arguments: list[Word] = [lines, picked, many, y, total, classes, room]
    low.launch(source, "gather_picked", arguments, *_teams(low, lines))
