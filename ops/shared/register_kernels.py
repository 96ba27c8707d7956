"""Functions of kernels that write registers of matrix tiles: rows of A, pairs of rows of B.

Elements of float32 are rounded to bfloat16. Elements beyond the sizes of a matrix, up to whole
steps of 32 along K and whole vectors of 16 columns of B, are 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba.extending import register_jitable

from subgraph.engine.codegen.bfloat16 import (
    bfloat16_pairs,
    emit_bfloat16_row,
    store_bfloat16,
    store_bfloat16_pairs,
)
from subgraph.engine.codegen.irtools import (
    I32,
    I64,
    INT64,
    VOID,
    define,
    first_lanes,
    load_at,
    load_masked,
    store_at,
)
from subgraph.engine.codegen.matrix_registers import LANES, REGISTER_BYTES, ROW_BYTES, ROWS
from subgraph.engine.codegen.simd import vec
from subgraph.engine.codegen.tiling import MATRIX_DEPTH
from subgraph.engine.codegen.transpose import emit_transpose

_VECTOR = LANES * 4  # bytes of a vector of float32


def row_rounder() -> Any:
    """Return ``f(source, step, rows, depth, factor, target)``: rows, times a factor, as A.

    The rows, of ``depth`` adjacent elements of float32, are ``step`` bytes apart. The target has,
    for each 16 rows, all steps of 32 elements. Rows that do not exist are left as they are: no
    result depends on them.
    """
    v = vec("float32", LANES)
    load, load_n, splat, zero = v.load, v.load_n, v.splat, v.zero

    @register_jitable
    def round_rows(
        source: int, step: int, rows: int, depth: int, factor: float, target: int
    ) -> None:
        steps = (depth + MATRIX_DEPTH - 1) // MATRIX_DEPTH
        whole = depth // MATRIX_DEPTH
        scale = splat(factor)
        for row in range(rows):
            at = source + row * step
            to = target + row // ROWS * steps * REGISTER_BYTES + row % ROWS * ROW_BYTES
            for _ in range(whole):
                store_bfloat16(to, load(at) * scale)
                store_bfloat16(to + ROW_BYTES // 2, load(at + _VECTOR) * scale)
                at += 2 * _VECTOR
                to += REGISTER_BYTES
            rest = depth - whole * MATRIX_DEPTH
            if rest > 0:
                store_bfloat16(to, load_n(at, rest) * scale)
                more = load_n(at + _VECTOR, rest - LANES) if rest > LANES else zero()
                store_bfloat16(to + ROW_BYTES // 2, more * scale)

    return round_rows


def row_pairer() -> Any:
    """Return ``f(source, step, rows, columns, target)``, which writes rows as registers of B.

    The rows, of ``columns`` adjacent elements of float32, are ``step`` bytes apart. The target has,
    for each 32 rows, a register for each vector of 16 columns.
    """
    v, words = vec("float32", LANES), vec("int32", LANES)
    load_n, zero, store = v.load_n, v.zero, words.store

    @register_jitable
    def pair_rows(source: int, step: int, rows: int, columns: int, target: int) -> None:
        to = target
        for first in range(0, rows, MATRIX_DEPTH):
            for column in range(0, columns, LANES):
                count = min(LANES, columns - column)
                for row in range(first, first + MATRIX_DEPTH, 2):
                    upper = source + row * step + column * 4
                    if count == LANES and row + 1 < rows:
                        store_bfloat16_pairs(to, upper, upper + step)
                    else:
                        even = load_n(upper, count) if row < rows else zero()
                        odd = load_n(upper + step, count) if row + 1 < rows else zero()
                        store(to, bfloat16_pairs(even, odd))
                    to += ROW_BYTES

    return pair_rows


def _emit_column_register(builder: Any, args: Sequence[Any], whole: bool) -> None:
    """Emit the conversion of 16 columns of B, 32 elements each, to a register.

    Args:
        builder: LLVM's builder.
        args: Address of the first column, bytes between columns, number of columns, elements of
            each, address of the register.
        whole: Whether there are 16 columns of at least 32 elements.
    """
    source, step, columns, length, target = args
    v = vec("float32", LANES)
    rest = builder.sub(length, I64(LANES))
    pairs: list[Any] = []
    for column in range(LANES):
        at = builder.add(source, builder.mul(step, I64(column)))
        if whole:
            vectors = [
                load_at(builder, where, v.llvm, 4) for where in (at, builder.add(at, I64(_VECTOR)))
            ]
        else:
            # Columns that do not exist read the first one with an empty mask: a masked load whose
            # address is not mapped takes hundreds of cycles.
            exists = builder.icmp_signed(">", columns, I64(column))
            at = builder.select(exists, at, source)
            upper = builder.select(
                builder.icmp_signed(">", rest, I64(0)), builder.add(at, I64(_VECTOR)), at
            )
            vectors = [
                load_masked(
                    builder,
                    where,
                    v.llvm,
                    first_lanes(builder, builder.select(exists, count, I64(0)), LANES),
                    4,
                )
                for where, count in ((at, length), (upper, rest))
            ]
        row = emit_bfloat16_row(builder, *vectors)
        pairs.append(builder.bitcast(row, ir.VectorType(I32, LANES)))
    for row, values in enumerate(emit_transpose(builder, pairs, 4)):
        store_at(builder, builder.add(target, I64(row * ROW_BYTES)), values, 4)


# (first column, bytes between columns, number of columns, elements of each, register)
_whole_register = define(VOID, [INT64] * 5, lambda b, c, a: _emit_column_register(b, a, True))
_partial_register = define(VOID, [INT64] * 5, lambda b, c, a: _emit_column_register(b, a, False))


def column_pairer() -> Any:
    """Return ``f(source, step, columns, length, target)``: columns of B as its registers.

    The columns, of ``length`` adjacent elements of float32, are ``step`` bytes apart. The target is
    as that of `row_pairer`.
    """

    @register_jitable
    def pair_columns(source: int, step: int, columns: int, length: int, target: int) -> None:
        to = target
        for first in range(0, length, MATRIX_DEPTH):
            rest = length - first
            for column in range(0, columns, LANES):
                at, count = source + column * step + first * 4, min(LANES, columns - column)
                if count == LANES and rest >= MATRIX_DEPTH:
                    _whole_register(at, step, count, rest, to)
                else:
                    _partial_register(at, step, count, rest, to)
                to += REGISTER_BYTES

    return pair_columns
