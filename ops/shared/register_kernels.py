"""Functions of kernels that write registers of matrix tiles: rows of A, pairs of rows of B."""

from __future__ import annotations

from typing import Any

from numba.extending import register_jitable

from subgraph.engine.codegen.bfloat16 import store_bfloat16, store_bfloat16_pairs
from subgraph.engine.codegen.matrix_tile import (
    LANES,
    REGISTER_BYTES,
    ROW_BYTES,
    ROWS,
)
from subgraph.engine.codegen.simd import vec
from subgraph.engine.codegen.tiling import MATRIX_DEPTH

_VECTOR = LANES * 4  # bytes of a vector of float32


def row_rounder() -> Any:
    """Return ``f(source, step, rows, depth, target)``, which rounds rows to registers of A.

    The rows, of ``depth`` adjacent elements of float32, are ``step`` bytes apart. The target has,
    for each 16 rows, all steps of 32 elements, the last of them padded with zeros. Rows that do not
    exist are left as they are: no result depends on them.
    """
    v = vec("float32", LANES)
    load, load_n, zero = v.load, v.load_n, v.zero

    @register_jitable
    def round_rows(source: int, step: int, rows: int, depth: int, target: int) -> None:
        steps = (depth + MATRIX_DEPTH - 1) // MATRIX_DEPTH
        whole = depth // MATRIX_DEPTH
        for row in range(rows):
            at = source + row * step
            to = target + row // ROWS * steps * REGISTER_BYTES + row % ROWS * ROW_BYTES
            for _ in range(whole):
                store_bfloat16(to, load(at))
                store_bfloat16(to + ROW_BYTES // 2, load(at + _VECTOR))
                at += 2 * _VECTOR
                to += REGISTER_BYTES
            rest = depth - whole * MATRIX_DEPTH
            if rest > 0:
                store_bfloat16(to, load_n(at, rest))
                more = load_n(at + _VECTOR, rest - LANES) if rest > LANES else zero()
                store_bfloat16(to + ROW_BYTES // 2, more)

    return round_rows


def row_pairer() -> Any:
    """Return ``f(source, rows, vectors, target)``, which rounds rows to registers of pairs of B.

    The rows are adjacent, each of ``vectors`` vectors of float32; their number is a multiple of 32.
    The target has, for each 32 rows, a register for each vector.
    """

    @register_jitable
    def pair_rows(source: int, rows: int, vectors: int, target: int) -> None:
        line = vectors * _VECTOR
        to = target
        for step in range(0, rows, MATRIX_DEPTH):
            for vector in range(vectors):
                first = source + step * line + vector * _VECTOR
                for row in range(0, MATRIX_DEPTH, 2):
                    upper = first + row * line
                    store_bfloat16_pairs(to, upper, upper + line)
                    to += ROW_BYTES

    return pair_rows
