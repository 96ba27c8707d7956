"""Kernel that packs a matrix of bytes, computed at run time, into panels for integer tiles.

``qlinear_packing.packed`` does the same with weights, when a plan is made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba.extending import register_jitable

from subgraph.engine.codegen.argument_views import view_of
from subgraph.engine.codegen.dot import dot4
from subgraph.engine.codegen.simd import ld_i8, ld_u8, shuffle, st_i32, vec

from .arguments import PanelsArguments
from .qlinear_packing import BLOCK


def panels(*, dtype: str, lanes: int, vectors: int) -> Callable[..., None]:
    """Return the kernel of `PanelsArguments`, which packs matrices for ``quads``.

    Args:
        dtype: ``"uint8"`` (128 is subtracted) or ``"int8"``.
        lanes: int32 elements of a vector.
        vectors: Vectors of a panel; the last panel may have fewer.
    """
    arguments = view_of(PanelsArguments)
    width = lanes * vectors
    offset, sums = 128 if dtype == "uint8" else 0, vec("int32", lanes)
    load_sums, store_sums, splat_sum, dot = sums.load, sums.store, sums.splat, dot4(lanes)
    load_zero, pack = ld_i8 if dtype == "int8" else ld_u8, _column_packer(offset)

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        a = arguments(args)
        columns, quads = a.columns, a.quads
        across = (columns + width - 1) // width
        for unit in range(begin, end):
            matrix, first = unit // across, unit % across * width
            panel_columns = min(width, columns - first)
            stride, index = 4 * panel_columns, 4 * (matrix * columns + first)
            x = a.x + matrix * a.depth * a.row_size
            to = a.y + index * quads
            for c in range(0, panel_columns, BLOCK):
                pack(a, x, to + 4 * c, first + c, stride)
            for c in range(0, panel_columns, lanes):
                total = splat_sum(0)
                # Ones as the unsigned operand: the products are the signed bytes themselves, four a
                # lane.
                for q in range(quads):
                    total = dot(total, splat_sum(0x01010101), load_sums(to + q * stride + 4 * c))
                store_sums(a.sums + index + 4 * c, total)
            for c in range(panel_columns):
                # Columns that complete a block of 16 have no zero point of their own; any serves
                # them, as they are not stored.
                column = min(first + c, a.row_size - 1)
                excess = load_zero(a.zeros + column * a.zero_step) - offset
                st_i32(a.excess + index + 4 * c, excess)

    return kernel


def _column_packer(offset: int) -> Any:
    """Return ``f(a, x, to, first, stride)``, which packs 16 columns of a matrix.

    Args:
        offset: Subtracted from bytes, 128 or 0.
    """
    line, four = vec("uint8", BLOCK), vec("uint8", 4 * BLOCK)
    load, load_n, splat, zero, store = line.load, line.load_n, line.splat, line.zero, four.store
    pairs = [k for i in range(BLOCK) for k in (i, BLOCK + i)]
    fours = [
        k for i in range(0, 2 * BLOCK, 2) for k in (i, i + 1, 2 * BLOCK + i, 2 * BLOCK + i + 1)
    ]
    # A shuffle has two operands, so that four rows become quads in two steps: bytes of two rows
    # make pairs, and two pairs a quad.
    mix, mix_pairs = shuffle("uint8", BLOCK, pairs), shuffle("uint8", 2 * BLOCK, fours)

    @register_jitable
    def row(x: int, k: int, depth: int, step: int, count: int) -> Any:
        """Return bytes of a row of which ``count`` exist; zeros after the last row."""
        # A row of 0 adds nothing to the sums, whatever the bytes of the other operand are.
        # Exclusive or with 128 subtracts 128 from an unsigned byte.
        if k >= depth:
            return zero()
        at = x + k * step
        return (load(at) if count >= BLOCK else load_n(at, count)) ^ splat(offset)

    @register_jitable
    def pack(a: PanelsArguments, x: int, to: int, first: int, stride: int) -> None:
        """Pack 16 columns from ``first`` on: ``stride`` bytes between the quads of rows."""
        depth, step = a.depth, a.row_size
        count, at = step - first, x + first
        for q in range(a.quads):
            k = 4 * q
            left = mix(row(at, k, depth, step, count), row(at, k + 1, depth, step, count))
            right = mix(row(at, k + 2, depth, step, count), row(at, k + 3, depth, step, count))
            store(to + q * stride, mix_pairs(left, right))

    return pack
