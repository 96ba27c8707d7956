"""Quantised convolutions and products over integer tiles, in blocks of 16 channels.

What a unit reads is first laid out as a strip in scratch memory, with its padding: 16-bit integers
less their zero point (``pairs``), or unsigned bytes; see ``engine.tile_int``. Sources:

- ``blocked``: ``[N][C / 16][H][W][16]`` bytes, the strip ``[C / 16][h][w][16]``.
- ``image``: ``[N][C][H][W]`` with at most four channels, the strip ``[h][w][4]``.
- ``rows``: a matrix ``[W][C]``, the strip the same with rows padded to a multiple of eight bytes.

Weights are ``[group][panel][step][columns of the panel][2 or 4]``, steps over (block, kh, kw,
channel); see ``qlinear_cpu.packed``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic, register_jitable

from subgraph.engine.codegen.dot import dot4, emit_pairs
from subgraph.engine.codegen.emit import Emit, private_function
from subgraph.engine.codegen.irtools import I16, I32, I64, load_at, store_at
from subgraph.engine.codegen.simd import (
    call_kernel,
    convert,
    ld_i8,
    ld_u8,
    st_i8,
    st_i16,
    st_i32,
    st_i64,
    vec,
)
from subgraph.engine.codegen.tile import arg, put, rows_of, stack_words
from subgraph.engine.codegen.tile_int import (
    BLOCK,
    Q_A,
    Q_ARS,
    Q_B,
    Q_BIAS,
    Q_C,
    Q_CJS,
    Q_COLUMNS,
    Q_CRS,
    Q_FAULTS,
    Q_HIGH,
    Q_KIN,
    Q_KLAST,
    Q_LIST,
    Q_LOW,
    Q_N0,
    Q_N1,
    Q_N2,
    Q_ROWS,
    Q_SA0,
    Q_SA1,
    Q_SA2,
    Q_SCALE,
    Q_SHIFT,
    Q_WORDS,
    Q_ZERO,
    Requantizer,
    int_tile,
    vector_bytes,
)

from .guarded_kernels import LINE, PAIRS, guards

_words = stack_words(Q_WORDS)
_where = stack_words(9)
_corner = stack_words(256)
_strides = stack_words(4)
_start = stack_words(BLOCK)
IMAGE = 4  # channels of a pixel of an image's strip


def strip_item(flavour: str) -> int:
    """Return the bytes of an element of a strip."""
    return 2 if flavour == "pairs" else 1


def _element(dtype: str, flavour: str) -> tuple[Any, Any, Any, Any]:
    """Return ``(one, sixteen, clear, clear_block)``: how elements come into a strip.

    ``one(source, to, zero)`` brings one element, ``sixteen(source, to, zero)`` sixteen beside each
    other, ``clear(to, count, zero)`` sets elements to the zero point, ``clear_block`` sixteen.
    """
    load1 = ld_i8 if dtype == "int8" else ld_u8
    flip = 128 if dtype == "int8" else 0
    narrow, wide = vec(dtype, BLOCK), vec("int16", BLOCK)
    widen, load = convert(dtype, "int16", BLOCK), narrow.load
    store, splat = wide.store, wide.splat
    as_byte, byte = convert("int16", "int8", BLOCK), vec("int8", BLOCK)
    store_b, splat_b = byte.store, byte.splat

    if flavour == "pairs":

        @register_jitable
        def one(source: int, to: int, zero: int) -> None:
            st_i16(to, load1(source) - zero)

        @register_jitable
        def sixteen(source: int, to: int, zero: int) -> None:
            store(to, widen(load(source)) - splat(zero))

        @register_jitable
        def clear(to: int, count: int, zero: int) -> None:
            for i in range(count):
                st_i16(to + 2 * i, 0)

        @register_jitable
        def clear_block(to: int, zero: int) -> None:
            store(to, splat(0))
    else:

        @register_jitable
        def one(source: int, to: int, zero: int) -> None:
            st_i8(to, load1(source) + flip)

        @register_jitable
        def sixteen(source: int, to: int, zero: int) -> None:
            store_b(to, as_byte(widen(load(source)) + splat(flip)))

        @register_jitable
        def clear(to: int, count: int, zero: int) -> None:
            for i in range(count):
                st_i8(to + i, zero + flip)

        @register_jitable
        def clear_block(to: int, zero: int) -> None:
            store_b(to, splat_b(zero + flip))

    return one, sixteen, clear, clear_block


def _pixels_of_bytes(dtype: str) -> Any:
    """Return ``beside(source, to, apart, channels)``: sixteen pixels of an image's strip.

    Channels that the image lacks hold anything: their weights are zero.
    """
    byte, pixels = vec("uint8", BLOCK), vec("int32", BLOCK)
    load, store, splat, shl = byte.load, pixels.store, pixels.splat, pixels.shl
    widen = convert("uint8", "int32", BLOCK)
    signs = -0x7F7F7F80 if dtype == "int8" else 0  # 0x80 in each byte

    @register_jitable
    def beside(source: int, to: int, apart: int, channels: int) -> None:
        values = splat(signs)
        for c in range(channels):
            values = values ^ shl(widen(load(source + c * apart)), splat(8 * c))
        store(to, values)

    return beside


def strip_copier(dtype: str, flavour: str, source: str) -> Any:
    """Return ``copy(args, x, to, zero, where)``: lay out a strip.

    ``where``: first row and column of the box in the source, its rows and columns.
    """
    one, sixteen, clear, clear_block = _element(dtype, flavour)
    item = strip_item(flavour)
    beside = _pixels_of_bytes(dtype)

    @register_jitable
    def blocked(args: int, x: int, to: int, zero: int, where: int) -> None:
        height, width = arg(args, 9), arg(args, 10)
        h0, w0, nh, nw = arg(where, 0), arg(where, 1), arg(where, 2), arg(where, 3)
        left = min(max(-w0, 0), nw)
        right = max(min(width - w0, nw), left)
        for b in range(arg(args, 7)):
            for h in range(h0, h0 + nh):
                row = x + ((b * height + h) * width + w0) * BLOCK
                inside = 0 <= h < height
                for w in range(left if inside else nw):
                    clear_block(to + w * BLOCK * item, zero)
                if inside:
                    for w in range(left, right):
                        sixteen(row + w * BLOCK, to + w * BLOCK * item, zero)
                    for w in range(right, nw):
                        clear_block(to + w * BLOCK * item, zero)
                to += nw * BLOCK * item

    @register_jitable
    def image(args: int, x: int, to: int, zero: int, where: int) -> None:
        height, width, channels = arg(args, 9), arg(args, 10), arg(args, 44)
        h0, w0, nh, nw = arg(where, 0), arg(where, 1), arg(where, 2), arg(where, 3)
        clear(to, nh * nw * IMAGE, zero)
        left = min(max(-w0, 0), nw)
        right = max(min(width - w0, nw), left)
        for i in range(nh):
            h = h0 + i
            if h < 0 or h >= height:
                continue
            first, at = left, to + i * nw * IMAGE * item
            row = x + h * width + w0
            if item == 1:
                while first + BLOCK <= right:
                    beside(row + first, at + first * IMAGE, height * width, channels)
                    first += BLOCK
            for c in range(channels):
                for w in range(first, right):
                    one(row + c * height * width + w, at + (w * IMAGE + c) * item, zero)

    @register_jitable
    def rows(args: int, x: int, to: int, zero: int, where: int) -> None:
        depth, step = arg(args, 44), arg(args, 45)
        whole = depth // BLOCK * BLOCK
        for r in range(arg(where, 3)):
            at, start = x + (arg(where, 1) + r) * depth, to + r * step
            for k in range(0, whole, BLOCK):
                sixteen(at + k, start + k * item, zero)
            for k in range(whole, depth):
                one(at + k, start + k * item, zero)
            clear(start + depth * item, step // item - depth, zero)

    return {"blocked": blocked, "image": image, "rows": rows}[source]


def product(
    *, dtype: str, output: str, flavour: str, weights: str, source: str
) -> Callable[..., None]:
    """Return the kernel of quantised convolutions and products; a unit is a block of the output.

    Args:
        dtype: ``"uint8"`` or ``"int8"``: of the input.
        output: Dtype of the output; see ``tile_int.product_tile``.
        flavour: ``"pairs"``, ``"quads"`` or ``"guarded"`` (not for images).
        weights: ``"int8"`` or ``"int16"``: how the weights are held.
        source: ``"blocked"``, ``"image"`` or ``"rows"``.

    Words::

        0 x  1 weights  2 y  3 bias (int32)  4 scale (float32)  5 shift (float32; 0: none)
        6 groups  7 input blocks of a group
        8..10 input D H W  11..13 output D H W  14..16 kernel  17..19 strides  20..22 dilations
        23..25 pads before (D is 1 everywhere)
        26 tile  27 low  28 high (float64, without the zero point)  29 zero point of y
        30 address of the zero point of x (one byte)
        31 output rows of a unit  32 output columns of a unit  33 panels of a unit
        34 scratch (0: x is read in place: unsigned bytes, blocks or rows of whole double steps, one
        tap that reads every pixel)
        35 its bytes per worker
        36 outputs of a group, rounded up to 16
        37 bytes between images of x  38 of y
        39 double steps of the inner loop  40 of its last round
        41 bytes between pixels of y  42 bytes between blocks of 16 outputs
        43 outputs of a group that are stored (rows; elsewhere as word 36)
        44 channels (image, rows)  45 bytes of a pixel in the strip
        46 whether the inner loop runs over kw too
        47 address of the sum of each column's weights (int32), if the bias does not hold the part
        of the zero point of x (0: it does, or there is none)
        48 address of what each column of weights is too large by (int32, rows; 0: nothing)
        49 bytes of scratch before the sums of rows less their zero point, for word 48
        50 bytes between the weights of images, each of which has words 47 and 48 of its own; 0: all
        have the same
        Guarded: 51 tile of quads, for panels of which too much may saturate  52 bounds
        [group][panel][tap][input block][pair of channels], rows padded to 16 bytes
        53 bytes of scratch before the largest bytes of a strip  54 before the list of faults
        55 faults that are corrected in a panel

    Bias, scale and shift have one element for each of ``groups * word 36``. Units: images *
    groups * row blocks * column blocks * panel blocks.
    """
    lanes, mr, nv = int_tile()
    copy_strip = strip_copier(dtype, flavour, source)
    load_zero = ld_i8 if dtype == "int8" else ld_u8
    width = nv * lanes
    step_bytes = vector_bytes(flavour, weights, lanes)
    item = 1 if output in ("uint8", "int8") else 4
    tailed = source == "rows"
    flip = 128 if dtype == "int8" else 0
    find_largest, find_faults = guards()
    whole = vec("int32", BLOCK)
    load_sums, store_sums, splat_sum = whole.load, whole.store, whole.splat
    correcting, shifting = flavour == "guarded", tailed and flavour != "pairs"
    quads, dot = vec("int32", lanes), dot4(lanes)
    zero_quads, ones, load_quads, add_up = quads.zero, quads.splat, quads.load_n, quads.sum

    @register_jitable
    def sum_rows(args: int, scratch: int, rows: int, zero: int) -> None:
        """Add up the bytes of each row of a strip of rows, each less its zero point."""
        step = arg(args, 45)
        for r in range(rows):
            total = zero_quads()
            for k in range(0, step // 4, lanes):
                part = load_quads(scratch + r * step + 4 * k, min(lanes, step // 4 - k))
                total = dot(total, part, ones(0x01010101))
            st_i32(scratch + arg(args, 49) + 4 * r, add_up(total) - step * (zero + flip))

    @register_jitable
    def start_sums(args: int, start: int, column: int, own: int, zero: int, count: int) -> int:
        """Return the address of what the sums of a panel start from.

        ``own``: the column among those of all images that have their own weights. ``count``: the
        columns of the panel, which may be fewer than its width.
        """
        bias = arg(args, 3) + 4 * column
        if arg(args, 47) == 0:
            return bias
        factor = splat_sum(zero + flip)
        for i in range(0, 4 * count, 4 * BLOCK):
            sums = load_sums(arg(args, 47) + 4 * own + i)
            store_sums(start + i, load_sums(bias + i) - factor * sums)
        return start

    @register_jitable
    def choose_tile(args: int, t: int, bounds: int, scratch: int, vectors: int) -> int:
        """Return the tile of a panel, its faults listed: where too much may saturate, quads."""
        strides, most = _strides(), arg(args, 55)
        put(strides, 0, arg(t, Q_SA0))
        put(strides, 1, arg(t, Q_SA1))
        put(strides, 2, arg(t, Q_SA2))
        put(strides, 3, step_bytes * vectors)
        reach, to = scratch + arg(args, 53), scratch + arg(args, 54)
        count = find_faults(args, bounds, reach, to, most, strides)
        put(t, Q_FAULTS, count)
        put(t, Q_LIST, to)
        return arg(args, 26) if count <= most else arg(args, 51)

    @register_jitable
    def copy_corner(corner: int, to: int, crs: int, rows: int, count: int) -> None:
        """Bring home what a tile computed beyond the last column."""
        for i in range(rows):
            for j in range(count * item):
                st_i8(to + i * crs + j, ld_i8(corner + i * width * item + j))

    @register_jitable
    def set_loops(args: int, t: int, row: int, volume: int) -> None:
        kh, kw, dh, dw = arg(args, 15), arg(args, 16), arg(args, 21), arg(args, 22)
        pixel = arg(args, 45)
        put(t, Q_ARS, arg(args, 19) * pixel)
        put(t, Q_N0, arg(args, 7))
        put(t, Q_SA0, volume)
        put(t, Q_N1, kh)
        put(t, Q_SA1, dh * row)
        put(t, Q_N2, 1 if arg(args, 46) != 0 else kw)
        put(t, Q_SA2, dw * pixel)
        put(t, Q_KIN, arg(args, 39))
        put(t, Q_KLAST, arg(args, 40))
        put(t, Q_CRS, arg(args, 41))
        put(t, Q_CJS, arg(args, 42))
        put(t, Q_LOW, arg(args, 27))
        put(t, Q_HIGH, arg(args, 28))
        put(t, Q_ZERO, arg(args, 29))

    @register_jitable
    def run_panel(args: int, t: int, x: int, y: int, where: int, first: int) -> None:
        """Run the tiles of one panel over a strip.

        ``where[4:6]``: output rows and columns; ``where[7]``: the tile; ``where[8]``: sums of rows.
        """
        rows, cols = arg(where, 4), arg(where, 5)
        vectors = min(nv, (arg(args, 36) - first) // lanes)
        stored = arg(args, 43) - first
        crs, row_out = arg(args, 41), arg(args, 13) * arg(args, 41)
        row_in = arg(where, 6) * arg(args, 18)
        cut = tailed and stored < vectors * lanes
        corner = _corner()
        put(t, Q_CRS, width * item if cut else crs)
        put(t, Q_CJS, BLOCK * item if cut else arg(args, 42))
        for r in range(rows):
            i = 0
            while i < cols:
                m = rows_of(cols - i, mr)
                to = y + r * row_out + i * crs
                put(t, Q_A, x + r * row_in + i * arg(t, Q_ARS))
                put(t, Q_C, corner if cut else to)
                put(t, Q_ROWS, arg(where, 8) + 4 * i if arg(where, 8) != 0 else 0)
                call_kernel(arg(where, 7), t, m, vectors, 0)
                if cut:
                    copy_corner(corner, to, crs, m, stored)
                i += m

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        t, where, start = _words(), _where(), _start()
        groups, columns = arg(args, 6), arg(args, 36)
        oh_n, ow_n = arg(args, 12), arg(args, 13)
        rb, wb, pb = arg(args, 31), arg(args, 32), arg(args, 33)
        scratch = arg(args, 34) + worker * arg(args, 35)
        row_blocks, col_blocks = (oh_n + rb - 1) // rb, (ow_n + wb - 1) // wb
        panels = (columns + width - 1) // width
        panel_blocks = (panels + pb - 1) // pb
        spatial = row_blocks * col_blocks
        pixel, zero = arg(args, 45), load_zero(arg(args, 30))
        volume_in = arg(args, 7) * arg(args, 9) * arg(args, 10) * BLOCK
        steps = (arg(args, 7) - 1) * arg(args, 39) + arg(args, 40)
        steps *= 2 * arg(args, 15) * (1 if arg(args, 46) != 0 else arg(args, 16))
        bound_row = (arg(args, 7) * arg(args, 39) * PAIRS + LINE - 1) // LINE * LINE
        bound_rows = arg(args, 15) * (1 if arg(args, 46) != 0 else arg(args, 16))
        copied = -1
        for unit in range(begin, end):
            strip, panel = unit // panel_blocks, unit % panel_blocks * pb
            place, matrix = strip % spatial, strip // spatial
            image, group = matrix // groups, matrix % groups
            oh, ow = place // col_blocks * rb, place % col_blocks * wb
            rows, cols = min(rb, oh_n - oh), min(wb, ow_n - ow)
            nh = (rows - 1) * arg(args, 18) + (arg(args, 15) - 1) * arg(args, 21) + 1
            nw = (cols - 1) * arg(args, 19) + (arg(args, 16) - 1) * arg(args, 22) + 1
            if strip != copied:
                put(where, 0, oh * arg(args, 18) - arg(args, 24))
                put(where, 1, ow * arg(args, 19) - arg(args, 25))
                put(where, 2, nh)
                put(where, 3, nw)
                x = arg(args, 0) + image * arg(args, 37) + group * volume_in
                if arg(args, 34) != 0:
                    copy_strip(args, x, scratch, zero, where)
                else:
                    scratch = x + (oh * ow_n + ow) * pixel
                if correcting:
                    find_largest(args, scratch, nh * nw, scratch + arg(args, 53))
                put(where, 8, 0)
                if shifting and arg(args, 48) != 0:
                    sum_rows(args, scratch, nw, zero)
                    put(where, 8, scratch + arg(args, 49))
                copied = strip
            put(where, 4, rows)
            put(where, 5, cols)
            put(where, 6, nw * pixel)
            put(where, 7, arg(args, 26))
            apart = nh * nw if arg(args, 34) != 0 else oh_n * ow_n
            set_loops(args, t, nw * pixel, apart * pixel)
            y = arg(args, 2) + image * arg(args, 38) + (oh * ow_n + ow) * arg(args, 41)
            for p in range(panel, min(panels, panel + pb)):
                first = p * width
                column = group * columns + first
                own = column if arg(args, 50) == 0 else column + image * columns
                weights_at = arg(args, 1) + image * arg(args, 50)
                put(t, Q_B, weights_at + column // lanes * steps * step_bytes)
                count = min(width, columns - first)
                put(t, Q_BIAS, start_sums(args, start, column, own, zero, count))
                put(t, Q_SCALE, arg(args, 4) + 4 * column)
                put(t, Q_SHIFT, arg(args, 5) + 4 * column if arg(args, 5) != 0 else 0)
                put(t, Q_COLUMNS, arg(args, 48) + 4 * own)
                at = y + column // BLOCK * arg(args, 42)
                if correcting:
                    bounds = arg(args, 52) + (group * panels + p) * bound_rows * bound_row
                    vectors = min(nv, (columns - first) // lanes)
                    put(where, 7, choose_tile(args, t, bounds, scratch, vectors))
                run_panel(args, t, scratch, at, where, first)

    return kernel


# ---------------------------------------------------------------- depthwise

_AT_ONCE = 4  # pixels of a depthwise tile


def _depthwise_tile(output: str) -> Any:
    """Return ``tile(t, count)``: 1 to 4 pixels of 16 channels, over pairs of taps.

    Words: ``0 x (strip), 1 bytes between pixels, 2 offsets of taps (two words a pair), 3 pairs,
    4 weights ([pair][2 x 8 channels][2] int16), 5 y, 6 bias, 7 scale, 8 shift (0: none),
    9 low, 10 high, 11 zero point``.
    """
    half = BLOCK // 2
    lows = [k for q in (0, 8) for i in range(4) for k in (q + i, BLOCK + q + i)]
    highs = [k + 4 for k in lows]
    # Where the sums of the two halves belong.
    order = [*range(4), *range(8, 12), *range(4, 8), *range(12, 16)]

    def body(e: Emit, t: Any, count: int) -> None:
        b = e.b
        line, kind = ir.VectorType(I16, BLOCK), ir.VectorType(I32, half)
        bias = e.word(t, 6)
        parts = [_pick(b, bias, kind, order[:8]), _pick(b, bias, kind, order[8:])]
        acc = [[e.variable(part) for part in parts] for _ in range(count)]
        x, ars = e.word(t, 0), e.word(t, 1)
        table, weights = e.variable(e.word(t, 2)), e.variable(e.word(t, 4))
        with e.loop(e.word(t, 3)):
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
                    held = e.get(acc[i][j])
                    e.put(acc[i][j], b.add(held, emit_pairs(b, mixed, w[j])))
            e.step(table, I64(16))
            e.step(weights, I64(64))
        end = Requantizer(b, half, output, (e.word(t, 9), e.word(t, 10), e.word(t, 11)))
        scale, shift = e.word(t, 7), e.word(t, 8)
        scales = [_pick(b, scale, end.real, order[k : k + 8]) for k in (0, 8)]
        slots = [e.variable(end.real(None)) for _ in range(2)]
        with e.when(b.icmp_signed("!=", shift, I64(0))):
            for j in (0, 1):
                e.put(slots[j], _pick(b, shift, end.real, order[8 * j : 8 * j + 8]))
        for i in range(count):
            sums = [end.scaled(e.get(acc[i][j]), scales[j], e.get(slots[j])) for j in (0, 1)]
            whole = end.packed(sums, order)  # the order undoes itself
            store_at(b, b.add(e.word(t, 5), I64(BLOCK * i)), whole, 1)

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
            for number in range(1, _AT_ONCE + 1):
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


def _pick(builder: Any, address: Any, kind: Any, places: list[int]) -> Any:
    """Emit a vector of elements that lie in two runs."""
    part = ir.VectorType(kind.element, kind.count // 2)
    starts: list[int] = [places[0], places[len(places) // 2]]
    runs = [load_at(builder, builder.add(address, I64(4 * s)), part, 4) for s in starts]
    picks = ir.Constant(ir.VectorType(I32, kind.count), list(range(kind.count)))
    return builder.shuffle_vector(runs[0], runs[1], picks)


def depthwise(*, dtype: str, output: str) -> Callable[..., None]:
    """Return the quantised depthwise convolution in blocks; a unit is rows of one block.

    Words (8 to 25 as in ``product``)::

        0 x  1 weights [block][pair of taps][16][2] int16  2 y  3 bias  4 scale  5 shift
        6 blocks  26 pairs of taps  27 low  28 high  29 zero point of y  30 address of that of x
        31 output rows of a unit  34 scratch  35 its bytes per worker

    The scratch of a worker begins with two words for each pair of taps. Bias, scale and shift have
    16 elements for each block. Units: images * blocks * row blocks.
    """
    copy_strip = strip_copier(dtype, "pairs", "blocked")
    load_zero = ld_i8 if dtype == "int8" else ld_u8
    tile = _depthwise_tile(output)

    @register_jitable
    def set_taps(args: int, table: int, nw: int) -> None:
        taps = arg(args, 15) * arg(args, 16)
        for k in range(2 * arg(args, 26)):
            tap = min(k, taps - 1)  # beyond the last tap weights are zero
            down, along = tap // arg(args, 16), tap % arg(args, 16)
            place = down * arg(args, 21) * nw + along * arg(args, 22)
            st_i64(table + 8 * k, place * BLOCK * 2)

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        t, where, one = _words(), _where(), _words()
        blocks, rb = arg(args, 6), arg(args, 31)
        oh_n, ow_n = arg(args, 12), arg(args, 13)
        row_blocks = (oh_n + rb - 1) // rb
        table = arg(args, 34) + worker * arg(args, 35)
        pairs = arg(args, 26)
        strip = table + (16 * pairs + 63) // 64 * 64
        plane_in, zero = arg(args, 9) * arg(args, 10) * BLOCK, load_zero(arg(args, 30))
        nw = (ow_n - 1) * arg(args, 19) + (arg(args, 16) - 1) * arg(args, 22) + 1
        set_taps(args, table, nw)
        put(t, 1, arg(args, 19) * BLOCK * 2)
        put(t, 2, table)
        put(t, 3, pairs)
        for k in range(3):
            put(t, 9 + k, arg(args, 27 + k))
        put(one, 7, 1)
        put(one, 9, arg(args, 9))
        put(one, 10, arg(args, 10))
        for unit in range(begin, end):
            oh, plane = unit % row_blocks * rb, unit // row_blocks
            block = plane % blocks
            rows = min(rb, oh_n - oh)
            put(where, 0, oh * arg(args, 18) - arg(args, 24))
            put(where, 1, -arg(args, 25))
            put(where, 2, (rows - 1) * arg(args, 18) + (arg(args, 15) - 1) * arg(args, 21) + 1)
            put(where, 3, nw)
            copy_strip(one, arg(args, 0) + plane * plane_in, strip, zero, where)
            put(t, 4, arg(args, 1) + block * pairs * 64)
            put(t, 6, arg(args, 3) + block * 64)
            put(t, 7, arg(args, 4) + block * 64)
            put(t, 8, arg(args, 5) + block * 64 if arg(args, 5) != 0 else 0)
            for r in range(rows):
                to = arg(args, 2) + ((plane * oh_n + oh + r) * ow_n) * BLOCK
                x = strip + r * arg(args, 18) * nw * BLOCK * 2
                i = 0
                while i < ow_n:
                    count = min(_AT_ONCE, ow_n - i)
                    put(t, 0, x + i * arg(t, 1))
                    put(t, 5, to + i * BLOCK)
                    tile(t, count)
                    i += count

    return kernel
