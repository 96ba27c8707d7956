"""Quantized depthwise convolutions in blocks of 16 channels, over pairs of taps.

The input of a work unit is first copied to a patch in scratch memory, with its padding; see
`patches`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic, register_jitable

from subgraph.engine.codegen.argument_views import stack_block, view_of
from subgraph.engine.codegen.arguments import Address, WordBlock
from subgraph.engine.codegen.dot import emit_pair_products
from subgraph.engine.codegen.emit import Emit, private_function
from subgraph.engine.codegen.irtools import I16, I32, I64, load_at, store_at
from subgraph.engine.codegen.simd import ld_i8, ld_u8, st_i64
from subgraph.engine.codegen.tile_int import BLOCK, Requantizer

from .arguments import QuantizedDepthwiseArguments
from .patches import PatchBox, patch_copier

# 4 pixels have 8 vectors of sums, which fit in AVX2's 16 registers beside 2 of weights, 2 of pixels
# and those of a product.
_TILE_PIXELS = 4  # most pixels of a depthwise tile


class DepthwiseTileBlock(WordBlock):
    """Arguments of a depthwise tile.

    Attributes:
        x: First pixel of the patch.
        x_step: Bytes between the pixels that adjacent outputs read.
        taps: Two 64-bit numbers for each pair of taps: their bytes from the first pixel.
        pairs: Pairs of taps.
        weights: int16, ``[pair][16 channels][2]``.
        y: First pixel of the output.
        bias: First value of the sums, an int32 for each channel.
        scale: float32 for each channel.
        shift: float32 added after scaling, for each channel; 0: none.
        low: Lower bound of the result without its zero point.
        high: Upper bound of the result without its zero point.
        zero: Zero point of the result.
    """

    x: Address
    x_step: int
    taps: Address
    pairs: int
    weights: Address
    y: Address
    bias: Address
    scale: Address
    shift: Address
    low: float
    high: float
    zero: int


_depthwise_block, _box = stack_block(DepthwiseTileBlock), stack_block(PatchBox)


def _emit_depthwise(e: Emit, t: Any, count: int, output: str) -> None:
    """Emit a depthwise tile.

    Args:
        e: Where code is emitted.
        t: Address of the tile's `DepthwiseTileBlock`.
        count: Pixels of the tile.
        output: Dtype of the output.
    """
    half = BLOCK // 2
    # vpmaddwd adds two adjacent products. A depthwise convolution has no sum over channels, so that
    # these are the products of two taps, whose pixels are interleaved channel by channel.
    lows = [k for q in (0, 8) for i in range(4) for k in (q + i, BLOCK + q + i)]
    highs = [k + 4 for k in lows]
    # Unpacking 128-bit halves of vectors interleaves channels; this is the order of the sums.
    order = [*range(4), *range(8, 12), *range(4, 8), *range(12, 16)]
    e.declaration = DepthwiseTileBlock
    b = e.b
    line, kind = ir.VectorType(I16, BLOCK), ir.VectorType(I32, half)
    bias = e.word(t, "bias")
    parts = [_pick(b, bias, kind, order[:8]), _pick(b, bias, kind, order[8:])]
    acc = [[e.variable(part) for part in parts] for _ in range(count)]
    x, ars = e.word(t, "x"), e.word(t, "x_step")
    table, weights = e.variable(e.word(t, "taps")), e.variable(e.word(t, "weights"))
    with e.loop(e.word(t, "pairs")):
        # The taps of a pair may lie in different rows, so that each has its offset in a table,
        # which all tiles share, in place of loops over rows and columns.
        first = b.add(x, e.load_i64(e.get(table)))
        second = b.add(x, e.load_i64(b.add(e.get(table), I64(8))))
        w = [load_at(b, b.add(e.get(weights), I64(32 * j)), line, 2) for j in (0, 1)]
        for i in range(count):
            move = b.mul(ars, I64(i))
            one, two = (load_at(b, b.add(at, move), line, 2) for at in (first, second))
            for j, picks in enumerate((lows, highs)):
                mixed = b.shuffle_vector(one, two, ir.Constant(ir.VectorType(I32, BLOCK), picks))
                total = e.get(acc[i][j])
                e.put(acc[i][j], b.add(total, emit_pair_products(b, mixed, w[j])))
        e.step(table, I64(16))
        e.step(weights, I64(64))
    end = Requantizer(b, half, output, (e.word(t, "low"), e.word(t, "high"), e.word(t, "zero")))
    scale, shift = e.word(t, "scale"), e.word(t, "shift")
    scales = [_pick(b, scale, end.real, order[k : k + 8]) for k in (0, 8)]
    slots = [e.variable(end.real(None)) for _ in range(2)]
    # Without a shift zeros are added: one code serves both cases.
    with e.when(b.icmp_signed("!=", shift, I64(0))):
        for j in (0, 1):
            e.put(slots[j], _pick(b, shift, end.real, order[8 * j : 8 * j + 8]))
    for i in range(count):
        sums = [end.scaled(e.get(acc[i][j]), scales[j], e.get(slots[j])) for j in (0, 1)]
        whole = end.packed(sums, order)  # the permutation is its own inverse
        store_at(b, b.add(e.word(t, "y"), I64(BLOCK * i)), whole, 1)


def _depthwise_tile(output: str) -> Any:
    """Return ``tile(t, count)``: 1 to 4 pixels of 16 channels, over pairs of taps."""
    half = BLOCK // 2

    def define(module: Any, count: int) -> Any:
        function = private_function(module, f"int_depthwise_{output}_{count}")
        builder = ir.IRBuilder(function.append_basic_block("entry"))
        _emit_depthwise(Emit(builder, "float32", half), function.args[0], count, output)
        builder.ret_void()
        return function

    @intrinsic
    def tile(typingctx: Any, block: Any, count: Any) -> tuple[Any, Any]:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            done = builder.append_basic_block("tile_done")
            switch = builder.switch(args[1], done)
            for number in range(1, _TILE_PIXELS + 1):
                function = define(builder.module, number)
                case = builder.append_basic_block("tile")
                switch.add_case(I64(number), case)
                with builder.goto_block(case):
                    builder.call(function, [args[0]])
                    builder.branch(done)
            builder.position_at_end(done)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), codegen

    return tile


def _pick(builder: Any, address: Any, kind: Any, indices: list[int]) -> Any:
    """Emit the load of a vector whose elements are two runs of indices."""
    part = ir.VectorType(kind.element, kind.count // 2)
    starts: list[int] = [indices[0], indices[len(indices) // 2]]
    runs = [load_at(builder, builder.add(address, I64(4 * s)), part, 4) for s in starts]
    picks = ir.Constant(ir.VectorType(I32, kind.count), list(range(kind.count)))
    return builder.shuffle_vector(runs[0], runs[1], picks)


@register_jitable
def _set_taps(a: QuantizedDepthwiseArguments, table: int, nw: int) -> None:
    """Write the offsets of the taps in a patch with rows of ``nw`` pixels."""
    taps = a.kernel_height * a.kernel_width
    for k in range(2 * a.pairs):
        tap = min(k, taps - 1)  # after the last tap weights are zero
        down, along = tap // a.kernel_width, tap % a.kernel_width
        pixel = down * a.dilation_height * nw + along * a.dilation_width
        st_i64(table + 8 * k, pixel * BLOCK * 2)


def depthwise(*, dtype: str, output: str) -> Callable[..., None]:
    """Return the kernel of `QuantizedDepthwiseArguments`: a depthwise convolution in blocks.

    Args:
        dtype: ``"uint8"`` or ``"int8"``: of the input.
        output: Dtype of the output, "uint8" or "int8".
    """
    arguments = view_of(QuantizedDepthwiseArguments)
    copy_patch = patch_copier(dtype, "pairs", "blocked")
    load_zero = ld_i8 if dtype == "int8" else ld_u8
    tile = _depthwise_tile(output)

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        a = arguments(args)
        t, where = _depthwise_block(), _box()
        blocks, rb = a.blocks, a.unit_rows
        oh_n, ow_n = a.output_height, a.output_width
        row_blocks = (oh_n + rb - 1) // rb
        table = a.scratch + worker * a.scratch_bytes
        pairs = a.pairs
        # The table takes whole cache lines, as each pixel of the patch after it is half of one.
        patch = table + (16 * pairs + 63) // 64 * 64
        plane_in, zero = a.image_height * a.image_width * BLOCK, load_zero(a.x_zero)
        nw = (ow_n - 1) * a.stride_width + (a.kernel_width - 1) * a.dilation_width + 1
        _set_taps(a, table, nw)
        t.x_step = a.stride_width * BLOCK * 2
        t.taps = table
        t.pairs = pairs
        t.low = a.low
        t.high = a.high
        t.zero = a.y_zero
        where.plane = 0
        where.planes = 1
        where.plane_step = 1
        # For the copy each block of channels is an image of its own.
        plane_of = (1, 1, a.image_height, a.image_width, BLOCK, BLOCK * 2)
        for unit in range(begin, end):
            oh, plane = unit % row_blocks * rb, unit // row_blocks
            block = plane % blocks
            rows = min(rb, oh_n - oh)
            where.row = oh * a.stride_height - a.pad_height
            where.column = -a.pad_width
            where.rows = (
                (rows - 1) * a.stride_height + (a.kernel_height - 1) * a.dilation_height + 1
            )
            where.columns = nw
            copy_patch(plane_of, a.x + plane * plane_in, patch, zero, where)
            t.weights = a.weights + block * pairs * 64
            t.bias = a.bias + block * 64
            t.scale = a.scale + block * 64
            t.shift = a.shift + block * 64 if a.shift != 0 else 0
            for r in range(rows):
                to = a.y + ((plane * oh_n + oh + r) * ow_n) * BLOCK
                x = patch + r * a.stride_height * nw * BLOCK * 2
                i = 0
                while i < ow_n:
                    count = min(_TILE_PIXELS, ow_n - i)
                    t.x = x + i * t.x_step
                    t.y = to + i * BLOCK
                    tile(t, count)
                    i += count

    return kernel
