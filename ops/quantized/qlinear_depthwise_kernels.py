"""Quantized depthwise convolutions in blocks of 16 channels, over pairs or quads of taps.

The input of a work unit is first copied to a patch in scratch memory, with its padding; see
`patches`. A depthwise convolution has no sum over channels, so that the products that an
instruction adds are those of taps, whose pixels are interleaved channel by channel:

- ``pairs``: two taps as 16-bit integers (vpmaddwd), anywhere in the window.
- ``quads``: four adjacent taps of a row of the kernel as bytes (vpdpbusd with vectors of 512 bits).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic, register_jitable

from subgraph.engine.codegen.argument_views import stack_block, view_of
from subgraph.engine.codegen.arguments import Address, WordBlock
from subgraph.engine.codegen.dot import emit_dot4, emit_pair_products
from subgraph.engine.codegen.emit import Emit, private_function
from subgraph.engine.codegen.irtools import (
    I8,
    I16,
    I32,
    I64,
    load_at,
    shuffle_vectors,
    store_at,
)
from subgraph.engine.codegen.simd import ld_i8, ld_u8, st_i64
from subgraph.engine.codegen.tile_int import BLOCK, Requantizer

from .arguments import QuantizedDepthwiseArguments
from .patches import PatchBox, element_bytes, patch_copier
from .qlinear_packing import PAIR_CHANNELS, QUAD

# Most pixels of a tile. Of pairs, 4 pixels have 8 vectors of sums, which fit in 16 registers beside
# 2 of weights, 2 of pixels and those of a product. Of quads, a pixel has one of 32 registers.
_TILE_PIXELS = {"pairs": 4, "quads": 8}


class DepthwiseTileBlock(WordBlock):
    """Arguments of a depthwise tile. A step is a pair or a quad of taps.

    Attributes:
        x: First pixel of the patch.
        x_step: Bytes between the pixels that adjacent outputs read.
        taps: 64-bit numbers: bytes from the first pixel to each tap of a pair, or to the first tap
            of a quad.
        steps: Steps of a window.
        weights: ``[step][16 channels][taps of a step]``, int16 or int8.
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
    steps: int
    weights: Address
    y: Address
    bias: Address
    scale: Address
    shift: Address
    low: float
    high: float
    zero: int


_depthwise_block, _box = stack_block(DepthwiseTileBlock), stack_block(PatchBox)


class _Pairs:
    """Emits a step of two taps of 16-bit integers.

    Attributes:
        orders: The channels of each vector of sums.
        offsets: Offsets of a step in the table of taps.
    """

    orders = PAIR_CHANNELS
    offsets = 2

    @staticmethod
    def weights(builder: Any, at: Any) -> list[Any]:
        """Return the weights of a step for each vector of sums."""
        line = ir.VectorType(I16, BLOCK)
        return [load_at(builder, builder.add(at, I64(32 * j)), line, 2) for j in (0, 1)]

    @staticmethod
    def add(builder: Any, sums: list[Any], taps: list[Any], weights: list[Any]) -> list[Any]:
        """Return the sums of a pixel with the products of a step, whose taps are at ``taps``."""
        line = ir.VectorType(I16, BLOCK)
        one, two = (load_at(builder, at, line, 2) for at in taps)
        mixed = [
            shuffle_vectors(builder, one, two, [k for c in order for k in (c, BLOCK + c)])
            for order in PAIR_CHANNELS
        ]
        return [
            builder.add(total, emit_pair_products(builder, each, weight))
            for total, each, weight in zip(sums, mixed, weights, strict=True)
        ]


class _Quads:
    """Emits a step of four adjacent taps of bytes; the attributes are those of `_Pairs`."""

    orders = (list(range(BLOCK)),)
    offsets = 1

    @staticmethod
    def weights(builder: Any, at: Any) -> list[Any]:
        """Return the weights of a step for each vector of sums."""
        return [load_at(builder, at, ir.VectorType(I32, BLOCK), 4)]

    @staticmethod
    def add(builder: Any, sums: list[Any], taps: list[Any], weights: list[Any]) -> list[Any]:
        """Return the sums of a pixel with the products of a step, whose taps are at ``taps``."""
        bytes_ = load_at(builder, taps[0], ir.VectorType(I8, QUAD * BLOCK), 1)
        mixed = shuffle_vectors(
            builder, bytes_, None, [k * BLOCK + c for c in range(BLOCK) for k in range(QUAD)]
        )
        quads = builder.bitcast(mixed, ir.VectorType(I32, BLOCK))
        return [emit_dot4(builder, sums[0], quads, weights[0])]


_STEPS: dict[str, type[_Pairs | _Quads]] = {"pairs": _Pairs, "quads": _Quads}


def _emit_depthwise(e: Emit, t: Any, count: int, flavour: str, output: str) -> None:
    """Emit a depthwise tile.

    Args:
        e: Where code is emitted.
        t: Address of the tile's `DepthwiseTileBlock`.
        count: Pixels of the tile.
        flavour: ``"pairs"`` or ``"quads"``.
        output: Dtype of the output.
    """
    step, b = _STEPS[flavour], e.b
    e.declaration = DepthwiseTileBlock
    bias, kind = e.word(t, "bias"), ir.VectorType(I32, e.lanes)
    parts = [_pick(b, bias, kind, order) for order in step.orders]
    acc = [[e.variable(part) for part in parts] for _ in range(count)]
    x, x_step = e.word(t, "x"), e.word(t, "x_step")
    table, weights = e.variable(e.word(t, "taps")), e.variable(e.word(t, "weights"))
    with e.loop(e.word(t, "steps")):
        # The taps of a pair may lie in different rows, so that each has its offset in a table,
        # which all tiles share, in place of loops over rows and columns.
        at = e.get(table)
        taps = [b.add(x, e.load_i64(b.add(at, I64(8 * k)))) for k in range(step.offsets)]
        w = step.weights(b, e.get(weights))
        for i in range(count):
            move = b.mul(x_step, I64(i))
            sums = [e.get(slot) for slot in acc[i]]
            sums = step.add(b, sums, [b.add(tap, move) for tap in taps], w)
            for slot, total in zip(acc[i], sums, strict=True):
                e.put(slot, total)
        e.step(table, I64(8 * step.offsets))
        e.step(weights, I64(4 * BLOCK))
    end = Requantizer(b, e.lanes, output, (e.word(t, "low"), e.word(t, "high"), e.word(t, "zero")))
    scale, shift = e.word(t, "scale"), e.word(t, "shift")
    scales = [_pick(b, scale, end.real, order) for order in step.orders]
    slots = [e.variable(end.real(None)) for _ in scales]
    # Without a shift zeros are added: one code serves both cases.
    with e.when(b.icmp_signed("!=", shift, I64(0))):
        for slot, order in zip(slots, step.orders, strict=True):
            e.put(slot, _pick(b, shift, end.real, order))
    order = [channel for part in step.orders for channel in part]
    for i in range(count):
        sums = [end.scaled(e.get(v), scales[j], e.get(slots[j])) for j, v in enumerate(acc[i])]
        whole = end.packed(sums, order)  # the permutation is its own inverse
        store_at(b, b.add(e.word(t, "y"), I64(BLOCK * i)), whole, 1)


def _depthwise_tile(flavour: str, output: str) -> Any:
    """Return ``tile(t, count)``: pixels of 16 channels, at most `_TILE_PIXELS` of the flavour."""
    lanes = BLOCK // len(_STEPS[flavour].orders)

    def define(module: Any, count: int) -> Any:
        function = private_function(module, f"int_depthwise_{flavour}_{output}_{count}")
        builder = ir.IRBuilder(function.append_basic_block("entry"))
        emitter = Emit(builder, "float32", lanes)
        _emit_depthwise(emitter, function.args[0], count, flavour, output)
        builder.ret_void()
        return function

    @intrinsic
    def tile(typingctx: Any, block: Any, count: Any) -> tuple[Any, Any]:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            done = builder.append_basic_block("tile_done")
            switch = builder.switch(args[1], done)
            for number in range(1, _TILE_PIXELS[flavour] + 1):
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
def _set_pairs(a: QuantizedDepthwiseArguments, table: int, nw: int) -> None:
    """Write the offsets of the taps of pairs in a patch with rows of ``nw`` pixels."""
    taps = a.kernel_height * a.kernel_width
    for k in range(2 * a.steps):
        tap = min(k, taps - 1)  # after the last tap weights are zero
        down, along = tap // a.kernel_width, tap % a.kernel_width
        pixel = down * a.dilation_height * nw + along * a.dilation_width
        st_i64(table + 8 * k, pixel * BLOCK * 2)


@register_jitable
def _set_quads(a: QuantizedDepthwiseArguments, table: int, nw: int) -> None:
    """Write the offsets of the first taps of quads in a patch with rows of ``nw`` pixels."""
    along = a.steps // a.kernel_height
    for k in range(a.steps):
        pixel = k // along * a.dilation_height * nw + k % along * QUAD
        st_i64(table + 8 * k, pixel * BLOCK)


def depthwise(*, dtype: str, output: str, flavour: str) -> Callable[..., None]:
    """Return the kernel of `QuantizedDepthwiseArguments`: a depthwise convolution in blocks.

    Args:
        dtype: ``"uint8"`` or ``"int8"``: of the input.
        output: Dtype of the output, "uint8" or "int8".
        flavour: ``"pairs"`` or ``"quads"``.
    """
    arguments = view_of(QuantizedDepthwiseArguments)
    copy_patch = patch_copier(dtype, flavour, "blocked")
    load_zero = ld_i8 if dtype == "int8" else ld_u8
    tile, most = _depthwise_tile(flavour, output), _TILE_PIXELS[flavour]
    set_taps = _set_pairs if flavour == "pairs" else _set_quads
    offsets, pixel = _STEPS[flavour].offsets, BLOCK * element_bytes(flavour)

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        a = arguments(args)
        t, where = _depthwise_block(), _box()
        blocks, rb = a.blocks, a.unit_rows
        oh_n, ow_n = a.output_height, a.output_width
        row_blocks = (oh_n + rb - 1) // rb
        table = a.scratch + worker * a.scratch_bytes
        # The table takes whole cache lines, as each pixel of the patch after it is a part of one.
        patch = table + (8 * offsets * a.steps + 63) // 64 * 64
        plane_in, zero = a.image_height * a.image_width * BLOCK, load_zero(a.x_zero)
        nw = (ow_n - 1) * a.stride_width + (a.kernel_width - 1) * a.dilation_width + 1
        set_taps(a, table, nw)
        t.x_step = a.stride_width * pixel
        t.taps = table
        t.steps = a.steps
        t.low = a.low
        t.high = a.high
        t.zero = a.y_zero
        where.plane = 0
        where.planes = 1
        where.plane_step = 1
        # For the copy each block of channels is an image of its own.
        plane_of = (1, 1, a.image_height, a.image_width, BLOCK, pixel)
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
            t.weights = a.weights + block * a.steps * 64
            t.bias = a.bias + block * 64
            t.scale = a.scale + block * 64
            t.shift = a.shift + block * 64 if a.shift != 0 else 0
            for r in range(rows):
                to = a.y + ((plane * oh_n + oh + r) * ow_n) * BLOCK
                x = patch + r * a.stride_height * nw * pixel
                i = 0
                while i < ow_n:
                    count = min(most, ow_n - i)
                    t.x = x + i * t.x_step
                    t.y = to + i * BLOCK
                    tile(t, count)
                    i += count

    return kernel
