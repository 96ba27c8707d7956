"""Products with weights of 2, 4 or 8 bits, quantized in blocks: the weights stay packed in memory.

A vector has one word of each of its columns. The numbers of a row are shifted to the low bits, and
become floats without a conversion: the bits of 2**23 plus a number below 2**23 are those of 2**23
with the number in the low bits of the mantissa. To subtract 2**23 plus the zero point is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

from llvmlite import ir
from numba.extending import register_jitable

from subgraph.dtypes import item_bytes
from subgraph.engine.codegen.argument_views import stack_block, view_of
from subgraph.engine.codegen.dot import emit_dot4, emit_saturating_pairs, emit_sums_of_pairs
from subgraph.engine.codegen.emit import Emit
from subgraph.engine.codegen.irtools import I32, I64, f32_to_bf16, load_at, splat_value, store_at
from subgraph.engine.codegen.matrix_registers import REGISTER_BYTES
from subgraph.engine.codegen.simd import convert, ld, memcpy, memset, shuffle, st, st_f32, vec
from subgraph.engine.codegen.tile import size_switch
from subgraph.engine.codegen.tiling import MATRIX_DEPTH
from subgraph.system import host

from .arguments import (
    NUMBER_BASE,
    BlockwiseArguments,
    BlockwiseGroupsArguments,
    BlockwiseProductArguments,
    BlockwiseTileBlock,
    QuantizeRowsArguments,
    UnpackPanelsArguments,
)

_BASE_BITS = 0x4B000000  # of `NUMBER_BASE` as float32
_CHUNK = 16  # elements that `quantize_rows` rounds at a time: whole words of 2, 4 and 8 bits
_ROUNDING = float(3 << 22)  # 1.5 * 2**23: an integer that is added is in the low bits of the sum

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
        centre = e.fconst(float(NUMBER_BASE + (1 << (self.bits - 1))))
        slots = [e.variable(centre) for _ in range(self.vectors)]
        with e.when(b.icmp_signed("!=", at, I64(0))):
            for j, slot in enumerate(slots):
                e.put(slot, e.load(b.add(at, I64(j * self.line))))
            e.step(self._zeros, I64(self.vectors * self.line))
        return [e.get(slot) for slot in slots]

    def ints(self, number: int) -> Any:
        """Return an integer in all lanes."""
        return splat_value(self.e.b, I32(number), self.e.lanes)

    def numbers(
        self,
        word: Callable[[list[Any], list[Any]], None],
        begin: Callable[[], None],
        end: Callable[[list[Any]], None] = lambda zeros: None,
    ) -> None:
        """Emit the loops over blocks and words.

        Args:
            word: Emits what is done with a word of each column: ``word(words, zeros)`` gets a
                vector of words, and of zero points plus 2**23, for each vector of the panel.
            begin: Emits what is done before a block.
            end: ``end(zeros)`` emits what is done after it; the scales are still those of the
                block.
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
                word(loaded, zeros)
            end(zeros)
            e.step(self._scales, I64(self.vectors * self.line))

    def row(self, word: Any, zero: Any, k: int) -> Any:
        """Return the numbers of row ``k`` of a word less their zero points, as floats."""
        b = self.e.b
        shifted = self.shifted(word, k)
        number = b.and_(shifted, self.ints((1 << self.bits) - 1))
        return b.fsub(b.bitcast(b.or_(number, self.ints(_BASE_BITS)), self.e.vector), zero)

    def shifted(self, word: Any, k: int) -> Any:
        """Return a word shifted by ``k`` numbers to the low bits."""
        return self.e.b.lshr(word, self.ints(k * self.bits)) if k else word


def _float_tile(bits: int) -> Any:
    """Return the emitter of a product's tile; see `size_switch`.

    The sum of a block is scaled, so that a scale is multiplied once for each block.
    """

    def emit(e: Emit, t: Any, rows: int, vectors: int, _count: Any) -> None:
        panel, b = _Panel(e, t, vectors, bits), e.b
        each = [(i, j) for i in range(rows) for j in range(vectors)]
        totals = {place: e.variable(e.fconst(0.0)) for place in each}
        sums = {place: e.variable(e.fconst(0.0)) for place in each}
        a, a_row = e.variable(e.word(t, "a")), e.multiples(e.word(t, "a_row"), rows)

        def begin() -> None:
            for place in each:
                e.put(sums[place], e.fconst(0.0))

        def word(words: list[Any], zeros: list[Any]) -> None:
            at = e.get(a)
            for k in range(panel.per_word):
                weights = [panel.row(*pair, k) for pair in zip(words, zeros, strict=True)]
                for i in range(rows):
                    left = e.broadcast(b.add(b.add(at, a_row[i]), I64(4 * k)))
                    for j in range(vectors):
                        e.put(sums[i, j], e.fma(left, weights[j], e.get(sums[i, j])))
            e.step(a, I64(4 * panel.per_word))

        def end(_zeros: list[Any]) -> None:
            for j in range(vectors):
                scale = panel.scale(j)
                for i in range(rows):
                    total = e.fma(scale, e.get(sums[i, j]), e.get(totals[i, j]))
                    e.put(totals[i, j], total)

        panel.numbers(word, begin, end)
        _store(panel, rows, totals)

    return emit


def _byte_tile(bits: int) -> Any:
    """Return the emitter of a tile of a product with rows of bytes.

    Sums of products of integers are exact. With a row's x in a block = ``s * q``, and weights
    ``w * (n - z)``: ``sum x * weight = s * w * (sum q * n - z * sum q)``.
    """
    per_byte = 8 // bits
    # The products of a word's numbers of 4 bits and fewer have a sum of at most 8 * 15 * 127, which
    # fits in 16 bits.
    in_16_bits = bits < 8 and host.prefers_pmaddubsw()
    add_products = _add_pairs if in_16_bits else _add_fours
    runs = [range(per_byte)] if in_16_bits else [range(k, k + 1) for k in range(per_byte)]

    def emit(e: Emit, t: Any, rows: int, vectors: int, _count: Any) -> None:
        panel, b = _Panel(e, t, vectors, bits), e.b
        each = [(i, j) for i in range(rows) for j in range(vectors)]
        totals = {place: e.variable(e.fconst(0.0)) for place in each}
        sums = {place: e.variable(panel.whole(None)) for place in each}
        a, a_row = e.variable(e.word(t, "a")), e.multiples(e.word(t, "a_row"), rows)
        factors = e.variable(e.word(t, "factors"))
        factors_row = e.multiples(e.word(t, "factors_row"), rows)

        def begin() -> None:
            for place in each:
                e.put(sums[place], panel.whole(None))

        def word(words: list[Any], _zeros: list[Any]) -> None:
            at = e.get(a)
            # The number at the low bits of each byte.
            mask = panel.ints(0x01010101 * ((1 << bits) - 1) if bits < 8 else -1)
            for together in runs:
                numbers = [[b.and_(panel.shifted(w, k), mask) for k in together] for w in words]
                for i in range(rows):
                    at_row = b.add(at, a_row[i])
                    left = [
                        splat_value(b, load_at(b, b.add(at_row, I64(4 * k)), I32, 4), e.lanes)
                        for k in together
                    ]
                    for j in range(vectors):
                        e.put(sums[i, j], add_products(b, e.get(sums[i, j]), numbers[j], left))
            e.step(a, I64(4 * per_byte))

        def end(zeros: list[Any]) -> None:
            at = e.get(factors)
            points = [b.fsub(zero, e.fconst(float(NUMBER_BASE))) for zero in zeros]
            scales = [panel.scale(j) for j in range(vectors)]
            for i in range(rows):
                own = b.add(at, factors_row[i])
                scale, less = e.broadcast(own), b.fneg(e.broadcast(b.add(own, I64(4))))
                for j in range(vectors):
                    real = b.sitofp(e.get(sums[i, j]), e.vector)
                    real = e.fma(points[j], less, real)
                    factor = b.fmul(scale, scales[j])
                    e.put(totals[i, j], e.fma(factor, real, e.get(totals[i, j])))
            e.step(factors, I64(8))

        panel.numbers(word, begin, end)
        _store(panel, rows, totals)

    return emit


def _add_fours(builder: Any, total: Any, numbers: Sequence[Any], left: Sequence[Any]) -> Any:
    """Return sums plus the products of numbers, unsigned bytes, and signed bytes of a row."""
    for pair in zip(numbers, left, strict=True):
        total = emit_dot4(builder, total, *pair)
    return total


def _add_pairs(builder: Any, total: Any, numbers: Sequence[Any], left: Sequence[Any]) -> Any:
    """Return the same as `_add_fours`, with sums of 16 bits until the last addition."""
    pairs = [emit_saturating_pairs(builder, *pair) for pair in zip(numbers, left, strict=True)]
    return builder.add(total, emit_sums_of_pairs(builder, reduce(builder.add, pairs)))


def _store(panel: _Panel, rows: int, totals: Mapping[tuple[int, int], Any]) -> None:
    """Emit the end of a tile: the bias is added to the totals, and they are stored."""
    e, b, t = panel.e, panel.e.b, panel.t
    c, bias, c_row = e.word(t, "c"), e.word(t, "bias"), e.word(t, "c_row")
    with e.when(b.icmp_signed("!=", bias, I64(0))):
        for (_, j), total in totals.items():
            added = e.load(b.add(bias, I64(j * panel.line)))
            e.put(total, b.fadd(e.get(total), added))
    mask, last = e.tail_mask(e.word(t, "tail")), panel.vectors - 1
    for i in range(rows):
        row = b.add(c, b.mul(c_row, I64(i)))
        for j in range(panel.vectors):
            to = b.add(row, I64(j * panel.line))
            e.store(e.get(totals[i, j]), to, mask if j == last else None)


def _tiles(bits: int, lanes: int, mr: int, nv: int, of_bytes: bool) -> Any:
    """Return the tiles of a product: ``f(block, rows, vectors, 0)``."""
    sizes = [(rows, v) for v in range(1, nv + 1) for rows in range(1, mr + 1)]
    name = f"blockwise_bytes_{bits}" if of_bytes else f"blockwise_{bits}"
    emit = _byte_tile(bits) if of_bytes else _float_tile(bits)
    return size_switch(name, "float32", lanes, sizes, emit)


def few_rows(*, bits: int, lanes: int, mr: int, nv: int, of_bytes: bool) -> Callable[..., None]:
    """Return the kernel of `BlockwiseProductArguments`: each weight is unpacked for ``mr`` rows.

    Args:
        bits: Bits of a number.
        lanes: Elements of a vector.
        mr: Most rows of a tile.
        nv: Vectors of a panel.
        of_bytes: Whether the rows are of bytes; see `quantize_rows`.
    """
    arguments = view_of(BlockwiseProductArguments)
    width, item = lanes * nv, 1 if of_bytes else 4
    tiles = _tiles(bits, lanes, mr, nv, of_bytes)

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        a = arguments(args)
        t = _tile_block()
        t.a_row = item * a.depth
        t.factors_row = 8 * a.blocks
        t.c_row = 4 * a.columns
        for unit in range(begin, end):
            first, vectors = unit * width, _set_panel(a, t, unit, width, lanes)
            t.bias = a.bias + 4 * first if a.bias != 0 else 0
            for row in range(0, a.rows, mr):
                t.a = a.a + row * t.a_row
                t.factors = a.factors + row * t.factors_row
                t.c = a.y + 4 * (row * a.columns + first)
                tiles(t, min(mr, a.rows - row), vectors, 0)

    return kernel


def grouped_rows(
    *, bits: int, lanes: int, mr: int, nv: int, index: str, of_bytes: bool
) -> Callable[..., None]:
    """Return the kernel of `BlockwiseGroupsArguments`: a row is multiplied by the matrix it names.

    The rows of a matrix are copied together, so that each weight is unpacked for ``mr`` of them.

    Args:
        bits: Bits of a number.
        lanes: Elements of a vector.
        mr: Most rows of a tile.
        nv: Vectors of a panel.
        index: Dtype of the indices.
        of_bytes: The rows are bytes of `quantize_rows`.
    """
    arguments = view_of(BlockwiseGroupsArguments)
    width, item, item_index = lanes * nv, 1 if of_bytes else 4, item_bytes(index)
    tiles = _tiles(bits, lanes, mr, nv, of_bytes)
    load_index, load_place, store_place = ld(index), ld("int64"), st("int64")

    @register_jitable
    def multiply(
        a: BlockwiseGroupsArguments, t: BlockwiseTileBlock, unit: int, scratch: int, rows: int
    ) -> None:
        """Multiply the rows in scratch, and write the columns of the unit to their rows of y."""
        panels = (a.columns + width - 1) // width
        blocks = (panels + a.block_panels - 1) // a.block_panels
        matrix, first_panel = unit // blocks, unit % blocks * a.block_panels
        taken = scratch + a.block_rows * 8
        factors = taken + a.block_rows * t.a_row
        made = factors + (a.block_rows * t.factors_row if of_bytes else 0)
        for panel in range(first_panel, min(panels, first_panel + a.block_panels)):
            vectors = _set_panel(a, t, panel, width, lanes)
            t.packed += matrix * a.words_step
            t.scales += matrix * a.numbers_step
            if t.zeros != 0:
                t.zeros += matrix * a.numbers_step
            count = min(width, a.columns - panel * width)
            for row in range(0, rows, mr):
                t.a = taken + row * t.a_row
                t.factors = factors + row * t.factors_row
                t.c = made
                high = min(mr, rows - row)
                tiles(t, high, vectors, 0)
                for i in range(high):
                    place = load_place(scratch + (row + i) * 8)
                    to = a.y + 4 * (place * a.columns + panel * width)
                    memcpy(to, made + i * t.c_row, 4 * count)

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        a = arguments(args)
        t = _tile_block()
        t.a_row = item * a.depth
        t.factors_row = 8 * a.blocks
        t.c_row = 4 * width
        t.bias = 0
        panels = (a.columns + width - 1) // width
        blocks = (panels + a.block_panels - 1) // a.block_panels
        scratch = a.scratch + worker * a.scratch_bytes
        taken = scratch + a.block_rows * 8
        factors = taken + a.block_rows * t.a_row
        for unit in range(begin, end):
            matrix, rows = unit // blocks, 0
            for row in range(a.rows):
                chosen = load_index(a.indices + row * item_index)
                if chosen == matrix or chosen + a.matrices == matrix:
                    memcpy(taken + rows * t.a_row, a.a + row * t.a_row, t.a_row)
                    if of_bytes:
                        own = a.factors + row * t.factors_row
                        memcpy(factors + rows * t.factors_row, own, t.factors_row)
                    store_place(scratch + rows * 8, row)
                    rows += 1
                if rows == a.block_rows or (rows > 0 and row == a.rows - 1):
                    multiply(a, t, unit, scratch, rows)
                    rows = 0

    return kernel


def quantize_rows(*, bits: int) -> Callable[..., None]:
    """Return the kernel of `QuantizeRowsArguments`: blocks of rows become int8, and a scale.

    The scale is the largest absolute value divided by 127. The bytes of a block are in the order of
    the numbers at the low bits of the bytes of a word, then of those above them.

    Args:
        bits: Bits of a number of the weights.
    """
    arguments = view_of(QuantizeRowsArguments)
    v, words, bytes_ = (vec(dtype, _CHUNK) for dtype in ("float32", "int32", "int8"))
    load, load_n, splat, absolute, bits_of = v.load, v.load_n, v.splat, v.abs, v.bits
    larger, largest, total, no_words = words.max, words.hmax, words.sum, words.zero
    splat_word, from_bits, first_of = words.splat, v.from_bits, v.get
    store, store_n = bytes_.store, bytes_.store_n
    to_byte, to_word = convert("int32", "int8", _CHUNK), convert("int8", "int32", _CHUNK)
    per_word, per_byte = 32 // bits, 8 // bits
    places = [
        k - k % per_word + k % per_word % per_byte * 4 + k % per_word // per_byte
        for k in range(_CHUNK)
    ]
    ordered = shuffle("int8", _CHUNK, [places.index(k) for k in range(_CHUNK)])

    @register_jitable(forceinline=True)
    def taken(address: int, count: int) -> Any:
        """Return up to `_CHUNK` of ``count`` elements at an address, then zeros."""
        return load(address) if count >= _CHUNK else load_n(address, count)

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        a = arguments(args)
        for unit in range(begin, end):
            first = unit % a.blocks * a.width
            count = min(a.width, a.depth - first)
            at = unit // a.blocks * a.depth + first
            x, target = a.x + 4 * at, a.target + at
            # The bits of absolute values are in the values' order, those of NaN behind all.
            most, sums = no_words(), no_words()
            for k in range(0, count, _CHUNK):
                most = larger(most, bits_of(absolute(taken(x + 4 * k, count - k))))
            top = first_of(from_bits(splat_word(largest(most))), 0)
            inverse = splat(127.0 / top if top > 0.0 else 0.0)
            for k in range(0, count, _CHUNK):
                byte = to_byte(bits_of(taken(x + 4 * k, count - k) * inverse + splat(_ROUNDING)))
                sums = sums + to_word(byte)
                if count - k >= _CHUNK:
                    store(target + k, ordered(byte, byte))
                else:
                    store_n(target + k, count - k, ordered(byte, byte))
            # A row with infinities or NaN gives NaN.
            st_f32(a.factors + 8 * unit, top / 127.0 + (top - top))
            st_f32(a.factors + 8 * unit + 4, total(sums))

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

    def emit(e: Emit, t: Any, _rows: int, vectors: int, _count: Any) -> None:
        panel, b = _Panel(e, t, vectors, bits), e.b
        scales = [e.variable(e.fconst(0.0)) for _ in range(vectors)]
        c, depth = e.word(t, "c"), e.variable(I64(0))

        def begin() -> None:
            for j, slot in enumerate(scales):
                e.put(slot, panel.scale(j))

        def as_rows(words: list[Any], zeros: list[Any]) -> None:
            to = b.add(c, b.mul(e.get(depth), I64(vectors * panel.line)))
            for k in range(panel.per_word):
                for j in range(vectors):
                    at = b.add(to, I64((k * vectors + j) * panel.line))
                    real = panel.row(words[j], zeros[j], k)
                    e.store(b.fmul(real, e.get(scales[j])), at)
            e.step(depth, I64(panel.per_word))

        def as_pairs(words: list[Any], zeros: list[Any]) -> None:
            # Rows are a multiple of two, and a word's lie in one step of 32.
            steps = b.ashr(e.get(depth), I64(5))
            pair = b.ashr(b.and_(e.get(depth), I64(MATRIX_DEPTH - 1)), I64(1))
            to = b.add(c, b.mul(steps, I64(vectors * REGISTER_BYTES)))
            to = b.add(to, b.mul(pair, I64(panel.line)))
            for j in range(vectors):
                rows = [panel.row(words[j], zeros[j], k) for k in range(panel.per_word)]
                scaled = [b.fmul(row, e.get(scales[j])) for row in rows]
                narrow = [b.zext(f32_to_bf16(b, row), panel.whole) for row in scaled]
                for k in range(0, panel.per_word, 2):
                    pair_of_rows = b.or_(narrow[k], b.shl(narrow[k + 1], panel.ints(16)))
                    at = b.add(to, I64(j * REGISTER_BYTES + k // 2 * panel.line))
                    store_at(b, at, pair_of_rows, 4)
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
                steps = a.panel // (nv * REGISTER_BYTES)
                memset(t.c + (steps - 1) * size, 0, size)
            tiles(t, 1, vectors, 0)

    return kernel
