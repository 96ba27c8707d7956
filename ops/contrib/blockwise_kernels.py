"""Products with weights of 2, 4 or 8 bits, quantized in blocks: the weights stay packed in memory.

A vector has one word of each of its columns. The numbers of a row are shifted to the low bits, and
become floats without a conversion: the bits of 2**23 plus a number below 2**23 are those of 2**23
with the number in the low bits of the mantissa. To subtract 2**23 plus the zero point is exact.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.extending import register_jitable

from subgraph.engine.codegen.argument_views import stack_block, view_of
from subgraph.engine.codegen.emit import Emit
from subgraph.engine.codegen.irtools import I32, I64, f32_to_bf16, load_at, splat_value, store_at
from subgraph.engine.codegen.matrix_tile import REGISTER_BYTES
from subgraph.engine.codegen.simd import vec
from subgraph.engine.codegen.tile import size_switch
from subgraph.engine.codegen.tiling import MATRIX_DEPTH

from .arguments import (
    BlockwiseArguments,
    BlockwiseProductArguments,
    BlockwiseTileBlock,
    UnpackPanelsArguments,
)

ZERO = float(1 << 23)  # the float32 whose mantissa counts ones
_ZERO_BITS = 0x4B000000  # its bits

_tile_block = stack_block(BlockwiseTileBlock)


@register_jitable
def _set_panel(
    a: BlockwiseArguments, t: BlockwiseTileBlock, panel: int, width: int, lanes: int
) -> int:
    """Set what a tile reads of a panel; return its vectors.

    Args:
        a: The kernel's arguments.
        t: The tile's.
        panel: Index of the panel.
        width: Columns of a whole panel.
        lanes: Elements of a vector.
    """
    first = panel * width
    t.packed = a.packed + 4 * first * a.blocks * a.whole_words
    t.scales = a.scales + 4 * first * a.blocks
    t.zeros = a.zeros + 4 * first * a.blocks if a.zeros != 0 else 0
    t.blocks = a.blocks
    t.whole_words = a.whole_words
    t.last_words = a.last_words
    vectors = (min(width, a.columns - first) + lanes - 1) // lanes
    t.tail = a.columns - first - (vectors - 1) * lanes
    return vectors


class _Panel:
    """Emits the loops over the numbers of a panel.

    Args:
        e: The emitter.
        t: Address of the `BlockwiseTileBlock`.
        vectors: Vectors of the panel.
        bits: Bits of a number.
    """

    def __init__(self, e: Emit, t: Any, vectors: int, bits: int) -> None:
        e.declaration = BlockwiseTileBlock
        self.e, self.t, self.vectors, self.bits = e, t, vectors, bits
        self.line = 4 * e.lanes
        self.per_word = 32 // bits
        self.whole = ir.VectorType(I32, e.lanes)
        self._words = e.variable(e.word(t, "packed"))
        self._scales = e.variable(e.word(t, "scales"))
        self._zeros = e.variable(e.word(t, "zeros"))

    def scale(self, j: int) -> Any:
        """Return the scales of the block, vector ``j``."""
        return self.e.load(self.e.b.add(self.e.get(self._scales), I64(j * self.line)))

    def _zero_points(self) -> list[Any]:
        """Return the zero points of the block plus 2**23, for each vector."""
        e, b = self.e, self.e.b
        at = e.get(self._zeros)
        centre = e.fconst(ZERO + (1 << (self.bits - 1)))
        slots = [e.variable(centre) for _ in range(self.vectors)]
        with e.when(b.icmp_signed("!=", at, I64(0))):
            for j, slot in enumerate(slots):
                e.put(slot, e.load(b.add(at, I64(j * self.line))))
            e.step(self._zeros, I64(self.vectors * self.line))
        return [e.get(slot) for slot in slots]

    def _ints(self, number: int) -> Any:
        return splat_value(self.e.b, I32(number), self.e.lanes)

    def numbers(
        self,
        word: Callable[[list[Callable[[int], Any]]], None],
        begin: Callable[[], None] = lambda: None,
        end: Callable[[], None] = lambda: None,
    ) -> None:
        """Emit the loops over blocks and words.

        Args:
            word: Emits what is done with a word of each column. It is called with a function for
                each vector that returns the numbers of the word's row k less their zero points.
            begin: Emits what is done before a block.
            end: Emits what is done after it; the scales are still those of the block.
        """
        e, b, t = self.e, self.e.b, self.t
        with e.loop(e.word(t, "blocks")) as left:
            last = b.icmp_signed("==", left, I64(1))
            zeros = self._zero_points()
            begin()
            count = b.select(last, e.word(t, "last_words"), e.word(t, "whole_words"))
            with e.loop(count):
                at = e.get(self._words)
                loaded = [
                    load_at(b, b.add(at, I64(j * self.line)), self.whole, 4)
                    for j in range(self.vectors)
                ]
                e.step(self._words, I64(self.vectors * self.line))
                word([self._row_of(*pair) for pair in zip(loaded, zeros, strict=True)])
            end()
            e.step(self._scales, I64(self.vectors * self.line))

    def _row_of(self, word: Any, zero: Any) -> Callable[[int], Any]:
        e, b = self.e, self.e.b
        mask, base = self._ints((1 << self.bits) - 1), self._ints(_ZERO_BITS)

        def row(k: int) -> Any:
            shifted = b.lshr(word, self._ints(k * self.bits)) if k else word
            real = b.bitcast(b.or_(b.and_(shifted, mask), base), e.vector)
            return b.fsub(real, zero)

        return row


def few_rows(*, bits: int, lanes: int, mr: int, nv: int) -> Callable[..., None]:
    """Return the kernel of `BlockwiseProductArguments`: each weight is unpacked for ``mr`` rows.

    The sum of a block is scaled, so that a scale is multiplied once for each block.

    Args:
        bits: Bits of a number.
        lanes: Elements of a vector.
        mr: Most rows of a tile.
        nv: Vectors of a panel.
    """
    arguments = view_of(BlockwiseProductArguments)
    width = lanes * nv

    def emit(e: Emit, t: Any, rows: int, vectors: int, _count: Any) -> None:
        panel, b = _Panel(e, t, vectors, bits), e.b
        each = [(i, j) for i in range(rows) for j in range(vectors)]
        totals = {place: e.variable(e.fconst(0.0)) for place in each}
        sums = {place: e.variable(e.fconst(0.0)) for place in each}
        a, a_row = e.variable(e.word(t, "a")), e.multiples(e.word(t, "a_row"), rows)

        def begin() -> None:
            for place in each:
                e.put(sums[place], e.fconst(0.0))

        def word(row_of: list[Callable[[int], Any]]) -> None:
            at = e.get(a)
            for k in range(panel.per_word):
                weights = [row(k) for row in row_of]
                for i in range(rows):
                    left = e.broadcast(b.add(b.add(at, a_row[i]), I64(4 * k)))
                    for j in range(vectors):
                        e.put(sums[i, j], e.fma(left, weights[j], e.get(sums[i, j])))
            e.step(a, I64(4 * panel.per_word))

        def end() -> None:
            for j in range(vectors):
                scale = panel.scale(j)
                for i in range(rows):
                    total = e.fma(scale, e.get(sums[i, j]), e.get(totals[i, j]))
                    e.put(totals[i, j], total)

        panel.numbers(word, begin, end)
        c, bias, c_row = e.word(t, "c"), e.word(t, "bias"), e.word(t, "c_row")
        with e.when(b.icmp_signed("!=", bias, I64(0))):
            for i, j in each:
                added = e.load(b.add(bias, I64(j * panel.line)))
                e.put(totals[i, j], b.fadd(e.get(totals[i, j]), added))
        mask = e.tail_mask(e.word(t, "tail"))
        for i, j in each:
            to = b.add(b.add(c, b.mul(c_row, I64(i))), I64(j * panel.line))
            e.store(e.get(totals[i, j]), to, mask if j == vectors - 1 else None)

    sizes = [(rows, v) for v in range(1, nv + 1) for rows in range(1, mr + 1)]
    tiles = size_switch(f"blockwise_{bits}", "float32", lanes, sizes, emit)

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        a = arguments(args)
        t = _tile_block()
        t.a_row = 4 * a.depth
        t.c_row = 4 * a.columns
        for unit in range(begin, end):
            first, vectors = unit * width, _set_panel(a, t, unit, width, lanes)
            t.bias = a.bias + 4 * first if a.bias != 0 else 0
            for row in range(0, a.rows, mr):
                t.a = a.a + row * 4 * a.depth
                t.c = a.y + 4 * (row * a.columns + first)
                tiles(t, min(mr, a.rows - row), vectors, 0)

    return kernel


def unpack_panels(*, bits: int, lanes: int, nv: int, operands: str = "") -> Callable[..., None]:
    """Return the kernel of `UnpackPanelsArguments`.

    Args:
        bits: Bits of a number.
        lanes: Elements of a vector.
        nv: Vectors of a panel.
        operands: ``"bfloat16"`` for registers of matrix tiles, "" for rows of float32.
    """
    arguments = view_of(UnpackPanelsArguments)
    width = lanes * nv
    bytes_ = vec("int8", 64)
    store, zero = bytes_.store, bytes_.zero

    def emit(e: Emit, t: Any, _rows: int, vectors: int, _count: Any) -> None:
        panel, b = _Panel(e, t, vectors, bits), e.b
        scales = [e.variable(e.fconst(0.0)) for _ in range(vectors)]
        c, depth = e.word(t, "c"), e.variable(I64(0))

        def begin() -> None:
            for j, slot in enumerate(scales):
                e.put(slot, panel.scale(j))

        def as_rows(row_of: list[Callable[[int], Any]]) -> None:
            to = b.add(c, b.mul(e.get(depth), I64(vectors * panel.line)))
            for k in range(panel.per_word):
                for j, row in enumerate(row_of):
                    at = b.add(to, I64((k * vectors + j) * panel.line))
                    e.store(b.fmul(row(k), e.get(scales[j])), at)
            e.step(depth, I64(panel.per_word))

        def as_pairs(row_of: list[Callable[[int], Any]]) -> None:
            # Rows are a multiple of two, and a word's lie in one step of 32.
            steps = b.ashr(e.get(depth), I64(5))
            pair = b.ashr(b.and_(e.get(depth), I64(MATRIX_DEPTH - 1)), I64(1))
            to = b.add(c, b.mul(steps, I64(vectors * REGISTER_BYTES)))
            to = b.add(to, b.mul(pair, I64(panel.line)))
            for j, row in enumerate(row_of):
                for k in range(0, panel.per_word, 2):
                    low, high = (
                        b.zext(f32_to_bf16(b, b.fmul(row(k + i), e.get(scales[j]))), panel.whole)
                        for i in range(2)
                    )
                    sixteen = ir.Constant(panel.whole, [I32(16)] * e.lanes)
                    at = b.add(to, I64(j * REGISTER_BYTES + k // 2 * panel.line))
                    store_at(b, at, b.or_(low, b.shl(high, sixteen)), 4)
            e.step(depth, I64(panel.per_word))

        panel.numbers(as_pairs if operands else as_rows, begin)

    sizes = [(1, v) for v in range(1, nv + 1)]
    tiles = size_switch(f"blockwise_panel_{bits}", "float32", lanes, sizes, emit)

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        a = arguments(args)
        t = _tile_block()
        for unit in range(begin, end):
            vectors = _set_panel(a, t, unit, width, lanes)
            t.c = a.target + unit * a.panel
            if operands:
                # The last step may have rows that do not exist.
                size = vectors * REGISTER_BYTES
                last = t.c + (a.panel // (nv * REGISTER_BYTES) - 1) * size
                for at in range(last, last + size, 64):
                    store(at, zero())
            tiles(t, 1, vectors, 0)

    return kernel
