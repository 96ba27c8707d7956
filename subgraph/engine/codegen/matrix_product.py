"""Products of few rows over matrix tiles, without the epilogue of a contraction tile.

Attention multiplies 32 queries at a time by a block of keys, and their weights by the values: many
products of few steps, whose results stay in the cache. A contraction tile
(`subgraph.engine.codegen.matrix_tile`) is called for each 32 columns of results. A call reads its
arguments from memory, and this has a higher cost than a product of few steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from subgraph.engine.codegen.emit import Emit
from subgraph.engine.codegen.irtools import INT64, VOID, define
from subgraph.engine.codegen.matrix_registers import (
    LANES,
    REGISTER_BYTES,
    ROW_BYTES,
    ROWS,
    PairSums,
    RegisterTile,
    RowRuns,
    pair_rows,
)
from subgraph.engine.codegen.tiling import MATRIX_DEPTH
from subgraph.system import host


class _Product:
    """Emits the tiles of a product of 16 or 32 rows.

    Args:
        e: The emitter.
        rows: Registers of sums along the rows, 1 or 2.
        args: The arguments of `multiply_rows` but the first one.
        count: Rows, for dot products of pairs; None: matrix tiles of ``rows`` registers.
    """

    def __init__(self, e: Emit, rows: int, args: Sequence[Any], count: Any = None) -> None:
        self.e, self.rows, self.count = e, rows, count
        self.left, self.left_register, self.right, self.right_step = args[:4]
        self.vectors, self.steps, self.c, self.line, self.adds = args[4:]

    def emit(self) -> None:
        """Emit the tiles of all vectors, two vectors at a time."""
        e = self.e
        right, c = e.variable(self.right), e.variable(self.c)
        with e.loop(e.b.ashr(self.vectors, e.const(1))):
            self.tile(2, e.get(right), e.get(c))
            e.step(right, e.const(2 * REGISTER_BYTES))
            e.step(c, e.const(2 * ROW_BYTES))
        with e.when(e.flag(self.vectors, 1)):
            self.tile(1, e.get(right), e.get(c))

    def tile(self, vectors: int, right: Any, c: Any) -> None:
        """Emit one tile.

        Args:
            vectors: Its vectors, 1 or 2.
            right: Address of its first register of B.
            c: Address of its first result.
        """
        e, b = self.e, self.e.b
        if self.count is not None:
            self.pair_rows(vectors, right, c)
            return
        tile = RegisterTile(e, None, self.rows, vectors)
        registers = tile.registers
        places = [
            (register, b.add(c, b.add(b.mul(self.line, e.const(i * ROWS)), e.const(j * ROW_BYTES))))
            for i, j, register in tile.each()
        ]
        with b.if_else(b.icmp_signed("!=", self.adds, e.const(0))) as (adds, otherwise):
            with adds:
                for register, at in places:
                    registers.load(register, at, self.line)
            with otherwise:
                for register, _ in places:
                    registers.zero(register)
        from_left, from_right = e.variable(self.left), e.variable(right)
        row, apart = e.const(ROW_BYTES), e.const(REGISTER_BYTES)
        with e.loop(self.steps):
            left = e.get(from_left), self.left_register, row
            tile.multiply(left, (e.get(from_right), apart, row), registers.multiply)
            e.step(from_left, e.const(REGISTER_BYTES))
            e.step(from_right, self.right_step)
        for register, at in places:
            registers.store(register, at, self.line)

    def pair_rows(self, vectors: int, right: Any, c: Any) -> None:
        """Emit the tile of all rows by dot products of pairs; arguments are those of `tile`."""
        e, b = self.e, self.e.b
        left, to, at = (e.variable(value) for value in (self.count, c, self.left))
        most, row, run = pair_rows(vectors), e.const(ROW_BYTES), e.const(ROWS)
        gap = b.sub(self.left_register, e.const(REGISTER_BYTES))
        runs = RowRuns(e, row, run, run, gap, crosses=False)
        with e.while_positive(left):
            offsets, behind = runs.take(most, e.get(left))
            part = PairSums(e, offsets, vectors, e.const(REGISTER_BYTES))
            places = [
                (slot, b.add(b.mul(self.line, e.const(i)), e.const(j * ROW_BYTES)))
                for i, j, slot in part.each()
            ]
            with e.when(b.icmp_signed("!=", self.adds, e.const(0))):
                for slot, offset in places:
                    e.put(slot, e.load(b.add(e.get(to), offset)))
            from_left, from_right = e.variable(e.get(at)), e.variable(right)
            with e.loop(self.steps):
                part.add(e.get(from_left), e.get(from_right), e.const(MATRIX_DEPTH // 2))
                e.step(from_left, e.const(REGISTER_BYTES))
                e.step(from_right, self.right_step)
            for slot, offset in places:
                e.store(e.get(slot), b.add(e.get(to), offset))
            e.step(at, behind)
            e.step(to, b.mul(self.line, e.const(most)))
            e.step(left, e.const(-most))


def _emit(builder: Any, _context: Any, args: Sequence[Any]) -> None:
    e = Emit(builder, "float32", LANES)
    if not host.has_bfloat16_tiles():
        _Product(e, 2, args[1:], args[0]).emit()
        return
    is_two = builder.icmp_signed(">", args[0], e.const(ROWS))
    with builder.if_else(is_two) as (two, one):
        with two:
            _Product(e, 2, args[1:]).emit()
        with one:
            _Product(e, 1, args[1:]).emit()


# The intrinsic ``(rows, left, left_register, right, right_step, vectors, steps, c, line, adds)``,
# which multiplies at most 32 rows; the kernel has called `configure_tiles`. Results of rows that
# do not exist, up to 16 or 32, are written as well.
#   rows: Rows of A and C.
#   left: Address of the registers of A: for each 16 rows, ``steps`` registers one after the other.
#   left_register: Bytes between the registers of 16 rows and those of the next 16.
#   right: Address of the registers of B: for each step, ``vectors`` registers or more.
#   right_step: Bytes between the registers of two steps.
#   vectors: Vectors of 16 columns of C.
#   steps: Steps along K.
#   c: Address of C, of float32.
#   line: Bytes between rows of C.
#   adds: Whether the products are added to C.
multiply_rows = define(VOID, [INT64] * 10, _emit)
