"""Kernels that pack weights into panels, plain or transformed for Winograd's algorithm.

They run once for each weight, when a model is loaded or a weight has changed, and are meant to read
and write at the speed of memory. A panel holds ``width`` neighbouring columns, row by row; the last
panel has only as many vectors as its columns need.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

from llvmlite import ir
from numba.extending import register_jitable

from subgraph.engine.codegen.argument_views import view_of
from subgraph.engine.codegen.irtools import (
    I32,
    I64,
    INT64,
    VOID,
    define,
    emit_convert,
    emit_fma,
    load_at,
    store_at,
)
from subgraph.engine.codegen.simd import ld as loads
from subgraph.engine.codegen.simd import memcpy, memset, vec
from subgraph.engine.codegen.simd import st as stores
from subgraph.engine.codegen.transpose import transposer
from subgraph.ops.shared.register_kernels import row_pairer

from .arguments import PackArguments, PairArguments, WinogradPackArguments
from .kernels import WORDS


def pack(*, item: int, lanes: int) -> Callable[..., None]:
    """Return the kernel of `PackArguments`, which packs weights into panels.

    The rows of a panel are (block of inputs, tap, input in the block). Inputs and columns that pad
    a block or a vector are zero.

    Args:
        item: Bytes of an element.
        lanes: Elements of a vector.
    """
    arguments = view_of(PackArguments)
    pack_block = _block_packer(item, lanes)

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        a = arguments(args)
        source, target, columns, padded = a.source, a.target, a.columns, a.padded
        width, inputs, depth, size = a.width, a.inputs, a.depth, a.block
        taps, by_column, by_input, by_tap = a.taps, a.by_column, a.by_input, a.by_tap
        for panel in range(begin, end):
            first = panel * width
            wide, valid = min(width, padded - first), min(width, columns - first)
            for start in range(0, depth, size):
                block = min(size, depth - start)
                existing = max(min(block, inputs - start), 0)
                x = source + first * by_column + start * by_input
                # Only the last panel can be narrower than the width, so all panels before this one
                # are whole.
                y = target + (first * depth + start * wide) * taps * item
                # Padding must be zero even where the matching input is zero as well: a NaN left in
                # the memory times 0 is NaN and would be added to valid outputs.
                if valid < wide or existing < block:
                    memset(y, 0, block * taps * wide * item)
                pack_block(x, y, wide, valid, block, existing, taps, by_column, by_input, by_tap)

    return kernel


def pair() -> Callable[..., None]:
    """Return the kernel of `PairArguments`, which rounds panels to bfloat16 for matrix tiles."""
    arguments, pair_rows = view_of(PairArguments), row_pairer()

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        a = arguments(args)
        width, depth = a.width, a.depth
        panels = (a.columns + width - 1) // width
        for unit in range(begin, end):
            first = unit % panels * width
            columns = min(width, a.columns - first)
            at = (unit // panels * a.columns + first) * depth
            pair_rows(a.source + at * 4, columns * 4, depth, columns, a.target + at * 2)

    return kernel


def _block_packer(item: int, lanes: int) -> Any:
    """Return the function that packs the inputs of a block, for the columns of a panel.

    Args:
        item: Bytes of an element.
        lanes: Elements of a vector.
    """
    load, store = loads(WORDS[item]), stores(WORDS[item])
    transpose_block = transposer(WORDS[item], lanes)

    @register_jitable
    def pack_block(
        x: int,
        y: int,
        wide: int,
        columns: int,
        block: int,
        inputs: int,
        taps: int,
        by_column: int,
        by_input: int,
        by_tap: int,
    ) -> None:
        """Write the existing elements of a block of a panel, whose rows are (tap, input).

        ``x`` is the address of the first element, ``y`` that of the block. The panel has ``wide``
        columns, of which ``columns`` exist; the block has ``block`` inputs, of which ``inputs``
        exist. The source's strides, ``by_column``, ``by_input`` and ``by_tap``, are in bytes.
        """
        if by_column == item:
            for k in range(inputs):
                for tap in range(taps):
                    row = y + (tap * block + k) * wide * item
                    memcpy(row, x + k * by_input + tap * by_tap, columns * item)
            return
        if by_input == item:
            for tap in range(taps):
                for k in range(0, inputs, lanes):
                    for column in range(0, columns, lanes):
                        transpose_block(
                            x + column * by_column + k * item + tap * by_tap,
                            by_column,
                            min(lanes, columns - column),
                            min(lanes, inputs - k),
                            y + ((tap * block + k) * wide + column) * item,
                            wide * item,
                        )
            return
        # Columns in the outer loop: a column is contiguous, and the block written stays in L1.
        for column in range(columns):
            for k in range(inputs):
                at = x + column * by_column + k * by_input
                to = y + (k * wide + column) * item
                for tap in range(taps):
                    store(to + tap * block * wide * item, load(at + tap * by_tap))

    return pack_block


Matrix = tuple[tuple[float, ...], ...]


def winograd_matrix(m: int, taps: int) -> Matrix:
    """Return G, ``(m + taps - 1) x taps``, which transforms weights to values at 4 or 6 points.

    The points are those of ``subgraph.ops.conv.winograd_kernels``, the last row infinity.
    """
    if m + taps == 5:
        return (1.0, 0.0, 0.0), (0.5, 0.5, 0.5), (0.5, -0.5, 0.5), (0.0, 0.0, 1.0)
    points = (0.0, 2 / 3, -2 / 3, 1.5, -1.5)
    rows: list[tuple[float, ...]] = []
    for i, p in enumerate(points):
        # Lagrange's denominators are applied to the weights, which are transformed once, instead of
        # to the images of each run.
        scale = math.prod(p - q for j, q in enumerate(points) if j != i)
        rows.append(tuple(p**k / scale for k in range(taps)))
    return (*rows, (*[0.0] * (taps - 1), 1.0))


@cache
def _transform(dtype: str, lanes: int, matrix: Matrix) -> Any:
    """Return ``transform(source, bytes between its columns, columns, target, bytes of a point)``.

    It computes ``matrix g matrix^T`` in float64 for the square weights ``g`` of up to ``lanes``
    columns; missing columns count as zeros. Each element of the result is a vector over columns,
    stored at its own point.
    """
    v = vec(dtype, lanes)
    side = len(matrix[0])

    def taps(builder: Any, source: Any, step: Any, count: Any) -> list[Any]:
        zero = ir.Constant(v.llvm.element, 0.0)
        found: list[Any] = [ir.Constant(v.llvm, ir.Undefined)] * side**2
        last = builder.sub(count, I64(1))
        for lane in range(lanes):
            # A missing column loads the last existing one, whose address is valid, and then selects
            # zero.
            there = builder.icmp_signed("<", I64(lane), count)
            row = builder.select(there, I64(lane), last)
            at = builder.add(source, builder.mul(row, step))
            for tap in range(side**2):
                address = builder.add(at, I64(tap * v.itemsize))
                value = load_at(builder, address, v.llvm.element, v.itemsize)
                value = builder.select(there, value, zero)
                found[tap] = builder.insert_element(found[tap], value, I32(lane))
        return [emit_convert(builder, each, dtype, "float64") for each in found]

    def emit(builder: Any, _context: Any, args: Sequence[Any]) -> None:
        source, step, count, target, apart = args
        for value in _both_ways(builder, taps(builder, source, step, count), matrix):
            store_at(builder, target, emit_convert(builder, value, "float64", dtype), v.itemsize)
            target = builder.add(target, apart)

    return define(VOID, [INT64] * 5, emit)


def _both_ways(builder: Any, g: Sequence[Any], matrix: Matrix) -> Iterator[Any]:
    """Yield the elements of ``matrix g matrix^T`` for vectors ``g``, row by row."""
    side = len(matrix[0])
    columns = [list(_along(builder, matrix, g[column::side])) for column in range(side)]
    for line in zip(*columns, strict=True):
        yield from _along(builder, matrix, line)


def _along(builder: Any, matrix: Matrix, values: Sequence[Any]) -> Iterator[Any]:
    """Yield ``matrix @ values``; the rows of points ``p`` and ``-p`` share their even terms."""
    kind = values[0].type

    def times(factor: float) -> Any:
        return ir.Constant(kind, [kind.element(factor)] * kind.count)

    def add(row: Sequence[float], ks: range, total: Any = None) -> Any:
        for k in ks:
            if row[k] == 0.0:
                continue
            if total is None:
                total = values[k] if row[k] == 1.0 else builder.fmul(values[k], times(row[k]))
            else:
                total = emit_fma(builder, values[k], times(row[k]), total)
        return total

    even, odd = range(0, len(values), 2), range(1, len(values), 2)
    shared: Any = None
    for row, before in zip(matrix, (None, *matrix), strict=False):
        mirrored = before is not None and all(row[k] == before[k] for k in even)
        shared = shared if mirrored else add(row, even)
        yield add(row, odd, shared)


def winograd(*, dtype: str, lanes: int, m: int, taps: int = 3) -> Callable[..., None]:
    """Return the kernel of `WinogradPackArguments`, which transforms weights and packs each point.

    Args:
        dtype: ``"float32"`` or ``"float64"``; the transformation is done in float64.
        lanes: Elements of a vector.
        m: Outputs of a tile along an axis.
        taps: Weights along an axis; there are ``(m + taps - 1)^2`` points, 16 or 36.
    """
    arguments = view_of(WinogradPackArguments)
    transform = _transform(dtype, lanes, winograd_matrix(m, taps))
    item = vec(dtype, lanes).itemsize
    points = (m + taps - 1) ** 2

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        a = arguments(args)
        source, target, outputs, padded = a.source, a.target, a.outputs, a.padded
        width, inputs, depth, apart = a.width, a.inputs, a.depth, a.point
        step = taps * taps * inputs * item
        for panel in range(begin, end):
            first = panel * width
            wide = min(width, padded - first)
            y = target + first * depth * item
            for k in range(inputs):
                for column in range(0, wide, lanes):
                    x = source + (first + column) * step + taps * taps * k * item
                    to = y + (k * wide + column) * item
                    transform(x, step, outputs - first - column, to, apart)
            # The inputs are padded to whole blocks. The multiplication reads these rows too, so
            # they must not hold a NaN.
            for point in range(points):
                rest = (depth - inputs) * wide * item
                memset(y + point * apart + inputs * wide * item, 0, rest)

    return kernel
