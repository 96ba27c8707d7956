"""Kernels that reformat weights: rows of a matrix into panels, 3x3 weights into Winograd's points.

They run once for each weight, when a model is loaded or a weight has changed, and are made to read
and write at the speed of memory. A panel holds ``width`` neighbouring columns, row by row; the last
is narrowed to whole vectors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from llvmlite import ir
from numba.extending import register_jitable

from subgraph.engine.irtools import F64, I32, I64, INT64, VOID, define, emit_convert, load_at
from subgraph.engine.simd import ld as loads
from subgraph.engine.simd import memcpy, memset, vec
from subgraph.engine.simd import st as stores
from subgraph.engine.transpose import transposer

from .movement_kernels import WORDS, arg


def pack(*, item: int, lanes: int) -> Callable[..., None]:
    """Return the kernel that packs ``[columns, inputs, taps]`` of any strides into panels.

    The rows of a panel are (block of inputs, tap, input in the block). What lies behind the inputs
    or the columns is filled with zeros.

    Args:
        item: Bytes of an element.
        lanes: Elements of a vector.

    Words::

        0 source  1 target  2 columns  3 columns rounded up to whole vectors  4 columns of a panel
        5 inputs  6 inputs of the target, at least as many  7 inputs of a block  8 taps
        9, 10, 11 bytes between columns, inputs, taps of the source

    Units: panels.
    """
    load, store = loads(WORDS[item]), stores(WORDS[item])
    turn = transposer(WORDS[item], lanes)

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
                        turn(
                            x + column * by_column + k * item + tap * by_tap,
                            by_column,
                            min(lanes, columns - column),
                            min(lanes, inputs - k),
                            y + ((tap * block + k) * wide + column) * item,
                            wide * item,
                        )
            return
        # Along a column first: its elements lie together, and what is written stays in the cache.
        for column in range(columns):
            for k in range(inputs):
                at = x + column * by_column + k * by_input
                to = y + (k * wide + column) * item
                for tap in range(taps):
                    store(to + tap * block * wide * item, load(at + tap * by_tap))

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        source, target, columns, padded = arg(args, 0), arg(args, 1), arg(args, 2), arg(args, 3)
        width, inputs, depth, size = arg(args, 4), arg(args, 5), arg(args, 6), arg(args, 7)
        taps, by_column, by_input, by_tap = arg(args, 8), arg(args, 9), arg(args, 10), arg(args, 11)
        for panel in range(begin, end):
            first = panel * width
            wide, valid = min(width, padded - first), min(width, columns - first)
            for start in range(0, depth, size):
                block = min(size, depth - start)
                known = max(min(block, inputs - start), 0)
                x = source + first * by_column + start * by_input
                y = target + (first * depth + start * wide) * taps * item
                if valid < wide or known < block:
                    memset(y, 0, block * taps * wide * item)
                pack_block(x, y, wide, valid, block, known, taps, by_column, by_input, by_tap)

    return kernel


Matrix = tuple[tuple[float, ...], ...]


def winograd_matrix(m: int, taps: int) -> Matrix:
    """Return G, which transforms so many weights into ``m + taps - 1`` values, 4 or 6."""
    if m + taps == 5:
        return (1.0, 0.0, 0.0), (0.5, 0.5, 0.5), (0.5, -0.5, 0.5), (0.0, 0.0, 1.0)
    points = (0.0, 2 / 3, -2 / 3, 1.5, -1.5)
    rows: list[tuple[float, ...]] = []
    for i, p in enumerate(points):
        scale = math.prod(p - q for j, q in enumerate(points) if j != i)
        rows.append(tuple(p**k / scale for k in range(taps)))
    return (*rows, (*[0.0] * (taps - 1), 1.0))


@cache
def _transform(dtype: str, lanes: int, matrix: Matrix) -> Any:
    """Return ``transform(source, bytes between its columns, how many, target, bytes of a point)``.

    Up to ``lanes`` columns of weights ``g``, as many each way as the matrix is wide, become
    ``matrix g matrix^T`` in float64; what is missing is taken as zeros. Each of the results is a
    vector at a point of its own.
    """
    v = vec(dtype, lanes)
    wide = ir.VectorType(F64, lanes)
    side = len(matrix[0])

    def taps(builder: Any, source: Any, step: Any, count: Any) -> list[Any]:
        zero = ir.Constant(v.llvm.element, 0.0)
        found: list[Any] = [ir.Constant(v.llvm, ir.Undefined)] * side**2
        last = builder.sub(count, I64(1))
        for lane in range(lanes):
            there = builder.icmp_signed("<", I64(lane), count)
            row = builder.select(there, I64(lane), last)
            at = builder.add(source, builder.mul(row, step))
            for tap in range(side**2):
                address = builder.add(at, I64(tap * v.itemsize))
                value = load_at(builder, address, v.llvm.element, v.itemsize)
                value = builder.select(there, value, zero)
                found[tap] = builder.insert_element(found[tap], value, I32(lane))
        return [emit_convert(builder, each, dtype, "float64") for each in found]

    def dot(builder: Any, row: Sequence[float], values: Sequence[Any]) -> Any:
        total: Any = None
        for factor, value in zip(row, values, strict=True):
            if factor == 0.0:
                continue
            term = value
            if factor != 1.0:
                term = builder.fmul(value, ir.Constant(wide, [F64(factor)] * lanes))
            total = term if total is None else builder.fadd(total, term)
        return total

    def emit(builder: Any, _context: Any, args: Sequence[Any]) -> None:
        source, step, count, target, apart = args
        g = taps(builder, source, step, count)
        half = [[dot(builder, row, g[c::side]) for c in range(side)] for row in matrix]
        point = target
        for line in half:
            for row in matrix:
                value = emit_convert(builder, dot(builder, row, line), "float64", dtype)
                stored = builder.store(value, builder.inttoptr(point, ir.PointerType()))
                stored.align = v.itemsize
                point = builder.add(point, apart)

    return define(VOID, [INT64] * 5, emit)


def winograd(*, dtype: str, lanes: int, m: int, taps: int = 3) -> Callable[..., None]:
    """Return the kernel that transforms ``[O, I, taps, taps]`` and packs each point into panels.

    Args:
        dtype: ``"float32"`` or ``"float64"``; the transformation is done in float64.
        lanes: Elements of a vector.
        m: Outputs of a tile along an axis.
        taps: Weights along an axis; there are ``(m + taps - 1)^2`` points, 16 or 36.

    Words::

        0 source  1 target  2 outputs  3 outputs rounded up to whole vectors  4 columns of a panel
        5 inputs  6 inputs of the target, at least as many  7 bytes of a point

    Units: panels.
    """
    transform = _transform(dtype, lanes, winograd_matrix(m, taps))
    item = vec(dtype, lanes).itemsize
    points = (m + taps - 1) ** 2

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        source, target, outputs, padded = arg(args, 0), arg(args, 1), arg(args, 2), arg(args, 3)
        width, inputs, depth, apart = arg(args, 4), arg(args, 5), arg(args, 6), arg(args, 7)
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
            for point in range(points):
                rest = (depth - inputs) * wide * item
                memset(y + point * apart + inputs * wide * item, 0, rest)

    return kernel
