"""TopK, NonZero, Compress, Unique and NonMaxSuppression on OPENCL: other kernels than the CPU's.

All of them are made of two algorithms: a merge sort of indices, and a prefix sum that numbers
flagged items. A *team* is a work-group of a GPU, or a single work-item of a CPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from subgraph.dtypes import INTEGERS
from subgraph.engine.planner.lowering import Unsupported
from subgraph.engine.planner.operands import Argument, Operand
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.opencl.lowering import ClLowering, cl_kernel, cl_shared
from subgraph.opencl.runtime import ClSource
from subgraph.operators.schema import INTERNAL_DOMAIN
from subgraph.ops.elementwise.cpu import temporary
from subgraph.ops.movement.copies_cpu import emit_fill
from subgraph.ops.movement.opencl import as_unsigned
from subgraph.ops.shared.opencl_code import line, program, require, storage, variant_of, word

from .arguments import (
    CompressArguments,
    GatherPickedArguments,
    NonZeroArguments,
    SuppressArguments,
    TopKArguments,
    UniqueArguments,
)
from .padded import PREFIX, TRIMMED

# Estimates, except for _MAX_COUNT.
_TEAM = 128  # work-items of a GPU's work-group; GROUP in kernels.cl
_MAX_TEAMS = 512  # teams of a GPU that share a prefix sum
_RUN = 16  # indices that a work-item of a GPU sorts
_MERGED = 8  # indices that a work-item of a GPU merges
_MIN_HEAP_RATIO = 4  # elements of a run for each element to select, for which a heap is used
_MIN_ITEMS = 2048  # items of a prefix sum for a work-item of a CPU
_MIN_CPU_RUN = 64  # indices that a work-item of a CPU sorts, at least
_MIN_CPU_MERGED = 256  # indices that a work-item of a CPU merges, at least
_ITEMS_PER_UNIT = 4  # work-items for each compute unit of a CPU, which balance their ends
_MAX_COUNT = 2**31  # kernels count in int32

cl_shared("TopK")
cl_shared("Trim", *(f"{PREFIX}{name}" for name in TRIMMED), domain=INTERNAL_DOMAIN)


def _program(low: ClLowering, dtype: str = "", /, **defines: int) -> ClSource:
    """Return the program with these macros; a dtype defines the element type T."""
    macros: dict[str, str | int] = {"GROUP": _group(low), "REAL": int(dtype not in INTEGERS)}
    if dtype:
        require(low, dtype)
        macros["T"] = storage(dtype)
    return program("selection/kernels", **macros, **defines)


def _group(low: ClLowering) -> int:
    """Return the work-items of a team."""
    return _TEAM if low.traits.is_gpu else 1


def _teams(low: ClLowering, count: int) -> tuple[tuple[int], tuple[int]]:
    """Return the global and local range over ``count`` teams."""
    return (count * _group(low),), (_group(low),)


# ---------------------------------------------------------------------------- order


def _run_width(low: ClLowering, lines: int, size: int) -> int:
    """Return the number of indices that one work-item sorts: a power of two."""
    if low.traits.is_gpu:
        return _RUN
    shares = max(1, _ITEMS_PER_UNIT * low.traits.units // lines)
    return 1 << (max(_MIN_CPU_RUN, -(-size // shares)) - 1).bit_length()


def _sorted_indices(
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
    """Launch the kernels that sort the indices of each line by their elements.

    Args:
        low: The lowering that gets the launches.
        x: The elements, [outer, size, inner], or [size, length]: rows that are compared as a whole.
        lines: outer * inner.
        size: Elements of a line.
        inner: Distance between elements of a line.
        length: Elements of a row.
        most: Indices of each line that must be found; 0: all.
        descending: Whether the largest is first. Of equal elements the lower index is always first.
        chosen: Indices [lines, size] to sort, and their number for each line; None: all indices.
            The first operand is overwritten.

    Returns:
        The indices, int32 [lines, size].
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
        if count >= _MAX_COUNT:
            raise Unsupported(f"an order of {count} elements; kernels count to 2^31")
        buffers: list[Argument] = [x, order, spare, counts]
        sizes = [size, inner, length, most, width, *more]
        low.launch(source, kernel, [count, *buffers, *sizes], *line(low, count))

    runs = -(-size // width)
    few = chosen is None and _MIN_HEAP_RATIO * most <= width
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
    """Return how many of ``count`` indices one work-item merges."""
    if low.traits.is_gpu:
        return _MERGED
    return max(_MIN_CPU_MERGED, -(-count // (_ITEMS_PER_UNIT * low.traits.units)))


@cl_kernel("subgraph.ops.selection.top_kernels", "keys", "wide_keys")
def top_k(low: ClLowering, kernel: Kernel, a: TopKArguments) -> None:
    """Launch TopK."""
    variant = variant_of(kernel)
    descending = bool(variant["largest"])
    lines = a.x.size // a.size
    found = _sorted_indices(low, a.x, lines, a.size, inner=a.inner, most=a.k, descending=descending)
    source = _program(low, variant["dtype"], ORDER=1, DESCENDING=int(descending), COUNTED=0)
    count = a.values.size
    arguments = [count, a.x, found, a.values, a.indices, a.size, a.inner, a.k]
    low.launch(source, "top", arguments, *line(low, count))


# ---------------------------------------------------------------------------- numbers


def _number_flagged(
    low: ClLowering,
    size: int,
    total: Operand,
    arguments: Sequence[Argument],
    dtype: str = "",
    **defines: int,
) -> None:
    """Launch the prefix sum that numbers the flagged among ``size`` items.

    Args:
        low: The lowering that gets the launches.
        size: Number of items.
        total: Operand that gets the number of flagged items, one int64.
        arguments: Arguments that the flag and the result of an item need (SCAN in ``kernels.cl``).
        dtype: Dtype of the elements that the flag is computed from, if any.
        defines: Macros of the program.
    """
    group = _group(low)
    most = _MAX_TEAMS if low.traits.is_gpu else _ITEMS_PER_UNIT * low.traits.units
    least = 4 * group if low.traits.is_gpu else _MIN_ITEMS
    teams = max(1, min(most, -(-size // least)))
    # Whole work-groups: every work-item of a team must reach the barriers of the prefix sum.
    chunk = -(-size // (teams * group)) * group
    alone = teams == 1
    counts = total if alone else temporary(low, "int32", (teams,))
    source = _program(low, dtype, ALONE=int(alone), **defines)
    if not alone:
        low.launch(source, "tally", [size, chunk, counts, *arguments], *_teams(low, teams))
        low.launch(source, "starts", [teams, counts, total], *_teams(low, 1))
    low.launch(source, "number", [size, chunk, counts, total, *arguments], *_teams(low, teams))


def _flagged_indices(
    low: ClLowering, x: Operand, indices: Operand, total: Operand, dims: Sequence[int], half: bool
) -> None:
    """Launch the kernels that find elements that are not zero.

    Args:
        low: The lowering that gets the launches.
        x: The elements.
        indices: Operand that gets the indices, [rank, size].
        total: Operand that gets their number.
        dims: The shape of x.
        half: Whether elements are 16-bit floats.
    """
    table = low.weight("table32", np.array, np.array(dims, np.int32))
    dtype = "uint16" if half else "uint8" if x.dtype == "bool" else x.dtype
    arguments: list[Argument] = [x, indices, table]
    flags = {"SCAN": 0, "HALF": int(half), "RANK": len(dims)}
    _number_flagged(low, math.prod(dims), total, arguments, dtype, **flags)


@cl_kernel("subgraph.ops.selection.kernels", "non_zero")
def non_zero(low: ClLowering, kernel: Kernel, a: NonZeroArguments) -> None:
    """Launch NonZero."""
    _flagged_indices(low, a.x, a.indices, a.count, a.dims, variant_of(kernel)["half"])


@cl_kernel("subgraph.ops.selection.kernels", "compress")
def compress(low: ClLowering, kernel: Kernel, a: CompressArguments) -> None:
    """Launch Compress: the indices of true conditions, then copies of their slices."""
    indices = temporary(low, "int64", (a.room,))
    _flagged_indices(low, a.conditions, indices, a.count, [a.room], False)
    item = min(a.x.itemsize, 8)
    inner = a.slice_bytes // item
    count = a.outer * a.room * inner
    arguments = [count, as_unsigned(a.x, item), indices, a.count, as_unsigned(a.y, item)]
    source = program("selection/kernels", COMPRESS=1, GROUP=1, T=word(item))
    low.launch(source, "compress", [*arguments, a.size, a.room, inner], *line(low, count))


@cl_kernel("subgraph.ops.selection.kernels", "unique")
def unique(low: ClLowering, kernel: Kernel, a: UniqueArguments) -> None:
    """Launch Unique: sorted rows, groups of equal ones, and the number and count of each group."""
    variant = variant_of(kernel)
    dtype = variant["dtype"]
    rows, total = a.rows, a.count
    order = _sorted_indices(low, a.x, 1, rows, length=a.length)
    groups, begins, firsts = (temporary(low, "int32", (rows,)) for _ in range(3))
    arguments: list[Argument] = [a.x, order, groups, begins, firsts, a.length]
    _number_flagged(low, rows, total, arguments, dtype, SCAN=1)
    # In sorted order the number of a row's group is its number in the result already.
    numbers = groups
    if not variant["in_order"]:
        numbers = temporary(low, "int32", (rows,))
        _number_flagged(low, rows, total, [firsts, numbers], SCAN=2)
    count = rows * max(a.length, 1)
    arguments = [count, a.x, order, groups, begins, numbers, total, a.y, a.first, a.inverse]
    source = _program(low, dtype, DISTINCT=1, SORTED=int(variant["in_order"]))
    low.launch(source, "distinct", [*arguments, a.counts, rows, a.length], *line(low, count))


# ---------------------------------------------------------------------------- boxes


@cl_kernel("subgraph.ops.selection.kernels", "suppress")
def suppress(low: ClLowering, kernel: Kernel, a: SuppressArguments) -> None:
    """Launch NonMaxSuppression of each class: boxes above the threshold, sorted, then selected."""
    lines, number = a.counts.size, a.number
    # ONNX: without max_output_boxes_per_class no box is selected.
    if not isinstance(a.most, Operand):
        emit_fill(low, a.counts, lines, np.zeros(1, np.int64))
        return
    flags = {
        "CENTRED": int(variant_of(kernel)["centred"]),
        "LIMITED": int(isinstance(a.overlap, Operand)),
        "SCORED": int(isinstance(a.least, Operand)),
    }
    source = _program(low, BOXES=1, **flags)
    order = temporary(low, "int32", (lines, number))
    counts = temporary(low, "int32", (lines,))
    arguments: list[Argument] = [lines, a.scores, a.least or a.scores, order, counts, number]
    low.launch(source, "candidates", arguments, *_teams(low, lines))
    order = _sorted_indices(low, a.scores, lines, number, descending=True, chosen=(order, counts))
    arguments = [lines, a.boxes, order, counts, a.most, a.overlap or a.boxes, a.picked, a.counts]
    arguments += [number, a.classes, a.room]
    low.launch(source, "suppress", arguments, *_teams(low, lines))


@cl_kernel("subgraph.ops.selection.kernels", "gather_picked")
def gather_picked(low: ClLowering, kernel: Kernel, a: GatherPickedArguments) -> None:
    """Launch the kernel that joins the selected boxes of all classes."""
    source = _program(low, BOXES=1, CENTRED=0, LIMITED=0, SCORED=0)
    arguments = [a.units, a.picked, a.counts, a.y, a.count, a.classes, a.room]
    low.launch(source, "gather_picked", arguments, *_teams(low, a.units))
