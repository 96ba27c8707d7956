"""Quantized convolutions and products over integer tiles, in blocks of 16 channels.

The input of a work unit is first copied to a patch in scratch memory, with its padding; see
`patches` and `subgraph.engine.codegen.tile_int`.

Weights are ``[group][panel][step][columns of the panel][2 or 4]``, steps over (block, kh, kw,
channel); see ``qlinear_packing.packed``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic, register_jitable

from subgraph.engine.codegen.argument_views import stack_block, view_of
from subgraph.engine.codegen.arguments import Address, WordBlock
from subgraph.engine.codegen.dot import dot4, emit_pair_products
from subgraph.engine.codegen.emit import Emit, private_function
from subgraph.engine.codegen.irtools import I16, I32, I64, load_at, store_at
from subgraph.engine.codegen.simd import (
    call_kernel,
    ld_i8,
    ld_u8,
    st_i8,
    st_i32,
    st_i64,
    vec,
)
from subgraph.engine.codegen.tile import rows_of, stack_words
from subgraph.engine.codegen.tile_int import (
    BLOCK,
    IntegerTileBlock,
    Requantizer,
    integer_tile_shape,
    vector_bytes,
)

from .arguments import QuantizedDepthwiseArguments, QuantizedProductArguments
from .patches import PatchBox, patch_copier
from .qlinear_packing import LINE
from .saturation_kernels import (
    PAIRS,
    TileStrides,
    fault_finder,
    largest_finder,
)

_corner = stack_words(256)
_start = stack_words(BLOCK)


class Unit(PatchBox):
    """A work unit: the box of its patch, and its output.

    Attributes:
        unit_rows: Rows of its output.
        unit_columns: Columns of its output.
        patch_row: Bytes of a row of the patch.
        tile: The integer tile.
        row_sums: Sums of the patch's rows less the zero point; 0: not needed.
    """

    unit_rows: int
    unit_columns: int
    patch_row: int
    tile: Address
    row_sums: Address


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


_tile_block, _unit = stack_block(IntegerTileBlock), stack_block(Unit)
_tile_strides = stack_block(TileStrides)
_depthwise_block, _box = stack_block(DepthwiseTileBlock), stack_block(PatchBox)


def product(
    *, dtype: str, output: str, flavour: str, weights: str, source: str
) -> Callable[..., None]:
    """Return the kernel of `QuantizedProductArguments`: quantized convolutions and products.

    Args:
        dtype: ``"uint8"`` or ``"int8"``: of the input.
        output: Dtype of the output; see ``tile_int.integer_contraction``.
        flavour: ``"pairs"``, ``"quads"`` or ``"checked"`` (not for images).
        weights: Dtype of the packed weights, ``"int8"`` or ``"int16"``.
        source: ``"blocked"``, ``"image"`` or ``"rows"``.
    """
    arguments = view_of(QuantizedProductArguments)
    lanes, _, nv = integer_tile_shape()
    copy_patch = patch_copier(dtype, flavour, source)
    load_zero = ld_i8 if dtype == "int8" else ld_u8
    width, step_bytes = nv * lanes, vector_bytes(flavour, weights, lanes)
    item = 1 if output in ("uint8", "int8") else 4
    tailed, flip = source == "rows", 128 if dtype == "int8" else 0
    correcting, shifting = flavour == "checked", tailed and flavour != "pairs"
    find_largest = largest_finder()
    sum_rows, start_sums = _row_sums(lanes, flip), _start_sums(flip)
    choose_tile = _tile_chooser(step_bytes)
    run_panel = _panel_runner(item, tailed)

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        product = arguments(args)
        t, where, start = _tile_block(), _unit(), _start()
        groups, columns = product.groups, product.columns
        oh_n, ow_n = product.output_height, product.output_width
        rb, wb, pb = product.unit_rows, product.unit_columns, product.unit_panels
        scratch = product.scratch + worker * product.scratch_bytes
        row_blocks, col_blocks = (oh_n + rb - 1) // rb, (ow_n + wb - 1) // wb
        panels = (columns + width - 1) // width
        panel_blocks = (panels + pb - 1) // pb
        spatial = row_blocks * col_blocks
        pixel, zero = product.pixel, load_zero(product.x_zero)
        volume_in = product.blocks * product.image_height * product.image_width * BLOCK
        steps = (product.blocks - 1) * product.inner + product.last_inner
        steps *= (
            2 * product.kernel_height * (1 if product.width_merged != 0 else product.kernel_width)
        )
        bound_row = (product.blocks * product.inner * PAIRS + LINE - 1) // LINE * LINE
        bound_rows = product.kernel_height * (
            1 if product.width_merged != 0 else product.kernel_width
        )
        copied = -1
        for unit in range(begin, end):
            patch, panel = unit // panel_blocks, unit % panel_blocks * pb
            box, matrix = patch % spatial, patch // spatial
            image, group = matrix // groups, matrix % groups
            oh, ow = box // col_blocks * rb, box % col_blocks * wb
            rows, cols = min(rb, oh_n - oh), min(wb, ow_n - ow)
            nh = (
                (rows - 1) * product.stride_height
                + (product.kernel_height - 1) * product.dilation_height
                + 1
            )
            nw = (
                (cols - 1) * product.stride_width
                + (product.kernel_width - 1) * product.dilation_width
                + 1
            )
            if patch != copied:
                where.row = oh * product.stride_height - product.pad_height
                where.column = ow * product.stride_width - product.pad_width
                where.rows = nh
                where.columns = nw
                x = product.x + image * product.x_image + group * volume_in
                if product.scratch != 0:
                    patch_of = (
                        product.blocks,
                        product.image_height,
                        product.image_width,
                        product.channels,
                        product.pixel,
                    )
                    copy_patch(patch_of, x, scratch, zero, where)
                else:
                    scratch = x + (oh * ow_n + ow) * pixel
                if correcting:
                    find_largest(product, scratch, nh * nw, scratch + product.largest_at)
                where.row_sums = 0
                if shifting and product.excess != 0:
                    sum_rows(product, scratch, nw, zero)
                    where.row_sums = scratch + product.row_sums_at
                copied = patch
            where.unit_rows = rows
            where.unit_columns = cols
            where.patch_row = nw * pixel
            where.tile = product.tile
            block_pixels = nh * nw if product.scratch != 0 else oh_n * ow_n
            _set_loops(product, t, nw * pixel, block_pixels * pixel)
            y = product.y + image * product.y_image + (oh * ow_n + ow) * product.y_pixel
            for p in range(panel, min(panels, panel + pb)):
                first = p * width
                column = group * columns + first
                own = column if product.weights_image == 0 else column + image * columns
                weights_at = product.weights + image * product.weights_image
                t.b = weights_at + column // lanes * steps * step_bytes
                count = min(width, columns - first)
                t.bias = start_sums(product, start, column, own, zero, count)
                t.scale = product.scale + 4 * column
                t.shift = product.shift + 4 * column if product.shift != 0 else 0
                t.column_excess = product.excess + 4 * own
                at = y + column // BLOCK * product.y_block
                if correcting:
                    bounds = product.bounds + (group * panels + p) * bound_rows * bound_row
                    vectors = min(nv, (columns - first) // lanes)
                    where.tile = choose_tile(product, t, bounds, scratch, vectors)
                run_panel(product, t, scratch, at, where, first)

    return kernel


def _row_sums(lanes: int, flip: int) -> Any:
    """Return ``f(product, scratch, rows, zero)``, which sums the rows of a patch of rows.

    ``flip`` is 128 if the patch has signed bytes plus 128, else 0.
    """
    quads, dot = vec("int32", lanes), dot4(lanes)
    zero_quads, ones, load_quads, add_up = quads.zero, quads.splat, quads.load_n, quads.sum

    @register_jitable
    def sum_rows(product: QuantizedProductArguments, scratch: int, rows: int, zero: int) -> None:
        """Write the sum of the bytes of each row, each less the zero point."""
        step = product.pixel
        for r in range(rows):
            total = zero_quads()
            for k in range(0, step // 4, lanes):
                part = load_quads(scratch + r * step + 4 * k, min(lanes, step // 4 - k))
                total = dot(total, part, ones(0x01010101))
            st_i32(scratch + product.row_sums_at + 4 * r, add_up(total) - step * (zero + flip))

    return sum_rows


def _start_sums(flip: int) -> Any:
    """Return ``f(product, start, column, own, zero, count)``: first values of a panel's sums.

    ``flip`` is 128 if the patch has signed bytes plus 128, else 0.
    """
    whole = vec("int32", BLOCK)
    load_sums, store_sums, splat_sum = whole.load, whole.store, whole.splat

    @register_jitable
    def start_sums(
        product: QuantizedProductArguments,
        start: int,
        column: int,
        own: int,
        zero: int,
        count: int,
    ) -> int:
        """Return the address of the first values of a panel's sums: the bias, or ``start``.

        ``column``: the panel's first column among those of all groups. ``own``: the same among
        those of all images, if each has its own weights. ``count``: columns of the panel.
        """
        bias: int = product.bias + 4 * column
        if product.weight_sums == 0:
            return bias
        factor = splat_sum(zero + flip)
        for i in range(0, 4 * count, 4 * BLOCK):
            sums = load_sums(product.weight_sums + 4 * own + i)
            store_sums(start + i, load_sums(bias + i) - factor * sums)
        return start

    return start_sums


def _tile_chooser(step_bytes: int) -> Any:
    """Return ``f(product, t, bounds, scratch, vectors)``: the tile of a panel (checked).

    ``step_bytes`` are those of a vector of weights.
    """
    find_faults = fault_finder()

    @register_jitable
    def choose_tile(
        product: QuantizedProductArguments,
        t: IntegerTileBlock,
        bounds: int,
        scratch: int,
        vectors: int,
    ) -> int:
        """List the faults of a panel; return its tile, that of quads if there are too many."""
        strides, most = _tile_strides(), product.most_faults
        strides.block = t.outer_a
        strides.row = t.middle_a
        strides.tap = t.inner_a
        strides.step = step_bytes * vectors
        reach, to = scratch + product.largest_at, scratch + product.faults_at
        count = find_faults(product, bounds, reach, to, most, strides)
        t.saturated_count = count
        t.saturated_steps = to
        tile: int = product.tile if count <= most else product.quads_tile
        return tile

    return choose_tile


@register_jitable
def _set_loops(
    product: QuantizedProductArguments, t: IntegerTileBlock, row: int, volume: int
) -> None:
    """Write the loops of a tile: ``row`` bytes of a row of the patch, ``volume`` of a block."""
    kh, kw, dh, dw = (
        product.kernel_height,
        product.kernel_width,
        product.dilation_height,
        product.dilation_width,
    )
    pixel = product.pixel
    t.a_row = product.stride_width * pixel
    t.outer_count = product.blocks
    t.outer_a = volume
    t.middle_count = kh
    t.middle_a = dh * row
    t.inner_count = 1 if product.width_merged != 0 else kw
    t.inner_a = dw * pixel
    t.steps = product.inner
    t.last_steps = product.last_inner
    t.c_row = product.y_pixel
    t.c_block = product.y_block
    t.low = product.low
    t.high = product.high
    t.zero = product.y_zero


def _panel_runner(item: int, tailed: bool) -> Any:
    """Return ``f(product, t, x, y, where, first)``: the tiles of a panel over a patch.

    Args:
        item: Bytes of an element of the output.
        tailed: The output may have fewer columns than the vectors of a panel.
    """
    lanes, mr, nv = integer_tile_shape()
    width = nv * lanes

    @register_jitable
    def copy_corner(corner: int, to: int, crs: int, rows: int, count: int) -> None:
        """Copy the ``count`` columns that exist from a tile that was written to ``corner``."""
        for i in range(rows):
            for j in range(count * item):
                st_i8(to + i * crs + j, ld_i8(corner + i * width * item + j))

    @register_jitable
    def run_panel(
        product: QuantizedProductArguments,
        t: IntegerTileBlock,
        x: int,
        y: int,
        where: Unit,
        first: int,
    ) -> None:
        """Run the tiles of one panel over a patch.

        Args:
            product: The arguments.
            t: Arguments of the tile.
            x: Address of the patch.
            y: Address of the first pixel of the output.
            where: The work unit.
            first: First column of the panel.
        """
        rows, cols = where.unit_rows, where.unit_columns
        vectors = min(nv, (product.columns - first) // lanes)
        stored = product.stored - first
        crs, row_out = product.y_pixel, product.output_width * product.y_pixel
        row_in = where.patch_row * product.stride_height
        cut = tailed and stored < vectors * lanes
        corner = _corner()
        t.c_row = width * item if cut else crs
        t.c_block = BLOCK * item if cut else product.y_block
        for r in range(rows):
            i = 0
            while i < cols:
                m = rows_of(cols - i, mr)
                to = y + r * row_out + i * crs
                t.a = x + r * row_in + i * t.a_row
                t.c = corner if cut else to
                t.row_sums = where.row_sums + 4 * i if where.row_sums != 0 else 0
                call_kernel(where.tile, t, m, vectors, 0)
                if cut:
                    copy_corner(corner, to, crs, m, stored)
                i += m

    return run_panel


# ---------------------------------------------------------------- depthwise

_TILE_PIXELS = 4  # most pixels of a depthwise tile


def _depthwise_tile(output: str) -> Any:
    """Return ``tile(t, count)``: 1 to 4 pixels of 16 channels, over pairs of taps."""
    half = BLOCK // 2
    lows = [k for q in (0, 8) for i in range(4) for k in (q + i, BLOCK + q + i)]
    highs = [k + 4 for k in lows]
    # Unpacking 128-bit halves of vectors interleaves channels; this is the order of the sums.
    order = [*range(4), *range(8, 12), *range(4, 8), *range(12, 16)]

    def body(e: Emit, t: Any, count: int) -> None:
        e.declaration = DepthwiseTileBlock
        b = e.b
        line, kind = ir.VectorType(I16, BLOCK), ir.VectorType(I32, half)
        bias = e.word(t, "bias")
        parts = [_pick(b, bias, kind, order[:8]), _pick(b, bias, kind, order[8:])]
        acc = [[e.variable(part) for part in parts] for _ in range(count)]
        x, ars = e.word(t, "x"), e.word(t, "x_step")
        table, weights = e.variable(e.word(t, "taps")), e.variable(e.word(t, "weights"))
        with e.loop(e.word(t, "pairs")):
            first = b.add(x, e.load_i64(e.get(table)))
            second = b.add(x, e.load_i64(b.add(e.get(table), I64(8))))
            w = [load_at(b, b.add(e.get(weights), I64(32 * j)), line, 2) for j in (0, 1)]
            for i in range(count):
                move = b.mul(ars, I64(i))
                one, two = (load_at(b, b.add(at, move), line, 2) for at in (first, second))
                for j, picks in enumerate((lows, highs)):
                    mixed = b.shuffle_vector(
                        one, two, ir.Constant(ir.VectorType(I32, BLOCK), picks)
                    )
                    total = e.get(acc[i][j])
                    e.put(acc[i][j], b.add(total, emit_pair_products(b, mixed, w[j])))
            e.step(table, I64(16))
            e.step(weights, I64(64))
        end = Requantizer(b, half, output, (e.word(t, "low"), e.word(t, "high"), e.word(t, "zero")))
        scale, shift = e.word(t, "scale"), e.word(t, "shift")
        scales = [_pick(b, scale, end.real, order[k : k + 8]) for k in (0, 8)]
        slots = [e.variable(end.real(None)) for _ in range(2)]
        with e.when(b.icmp_signed("!=", shift, I64(0))):
            for j in (0, 1):
                e.put(slots[j], _pick(b, shift, end.real, order[8 * j : 8 * j + 8]))
        for i in range(count):
            sums = [end.scaled(e.get(acc[i][j]), scales[j], e.get(slots[j])) for j in (0, 1)]
            whole = end.packed(sums, order)  # the permutation is its own inverse
            store_at(b, b.add(e.word(t, "y"), I64(BLOCK * i)), whole, 1)

    def define(module: Any, count: int) -> Any:
        function = private_function(module, f"int_depthwise_{output}_{count}")
        builder = ir.IRBuilder(function.append_basic_block("entry"))
        body(Emit(builder, "float32", half), function.args[0], count)
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
        plane_of = (1, a.image_height, a.image_width, BLOCK, BLOCK * 2)
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
