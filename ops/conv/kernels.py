"""Direct convolution kernels over contraction tiles: blocked layout, first layer, plain layout.

Blocked activations are ``[N][C / lanes][D][H][W][lanes]``, the last block padded with channels that
must hold finite values (their weights are zero). 1-D and 2-D convolutions set the leading sizes to
1. Weights are packed per group as ``[panel][K][columns]`` like the B of ``gemm_kernels``: a panel
is ``nv`` blocks of output channels (the last one as many as are left) and K runs over
``(input block, kd, kh, kw, lane)``, or ``(channel, kd, kh, kw)`` for plain input.
"""

from __future__ import annotations

from collections.abc import Callable

from numba.extending import register_jitable

from subgraph.engine.codegen.simd import call_kernel, ld, st, vec
from subgraph.engine.codegen.tile import arg, put, rows_of, stack_words
from subgraph.engine.codegen.tiling import (
    T_A,
    T_AHEAD,
    T_AKS,
    T_ARS,
    T_B,
    T_BJS,
    T_BKS,
    T_C,
    T_CJS,
    T_CRS,
    T_FLAGS,
    T_HI,
    T_IJS,
    T_INIT,
    T_IRS,
    T_KIN,
    T_KLAST,
    T_LO,
    T_N0,
    T_N1,
    T_N2,
    T_PACE,
    T_RBIAS,
    T_RES,
    T_RJS,
    T_RRS,
    T_SA0,
    T_SA1,
    T_SA2,
    T_SB0,
    T_SB1,
    T_SB2,
    T_TAIL,
    T_WORDS,
)

from .copy_kernels import pixel_gatherer, strip_copier

_ITEM = {"float32": 4, "float64": 8}
_NEAR = 8  # tiles of a row whose sums wait in the first cache for their activation
_words = stack_words(T_WORDS)
_where = stack_words(8)


def direct(
    *, dtype: str, lanes: int, mr: int, nv: int, plain: bool, weights: str = ""
) -> Callable[..., None]:
    """Return the direct convolution into the blocked layout; one unit is a block of the output.

    Args:
        dtype: ``"float32"`` or ``"float64"``.
        lanes: Channels of one block.
        mr: Most pixels of a tile.
        nv: Blocks of output channels of a panel.
        plain: The input is plain (``[N][C][D][H][W]``), the output blocked all the same.
        weights: ``"bfloat16"`` where the weights are held in it.

    Words::

        0 x  1 packed weights  2 y  3 bias (padded to whole blocks; 0: none)
        4 residual, shaped as y (0: none)
        5 groups  6 input blocks of one group (channels when plain)  7 output blocks of one group
        8..10 input D H W  11..13 output D H W  14..16 kernel D H W  17..19 strides
        20..22 dilations  23..25 pads before (D H W)
        26 contraction tile  27 post kernel (0: none)  28 F_* flags  29 lower  30 upper (float64)
        31 output rows of a unit  32 output columns of a unit  33 panels of a unit
        34 scratch (0: x is read in place: no pads, whole blocks)  35 its bytes per worker
        36 units run over panels first (0) or over pixels first (1)
        37 bytes between images of x  38 of y  39 of the residual
        40..42 pixels of y between outputs along W, H, D  43 between blocks of output channels
        44 bytes from the start of an image of y to its first output
        45 bands (0: none)
        46 channels of the last input block that count (0: all); it is a segment of its own with
           more than one tap, which takes kernel D = 1
        47 input blocks of a segment
        48 what the scratch holds: a box of pixels (0) or for each tap the pixels it reads (1)
        49 strip (``subgraph.engine.codegen.strip``) that runs a row of outputs in place of tiles
           (0: none); with kernel D > 1 only from a box, without dilation along D
        50 units over panels that may run as one

    The sums run over segments of the input blocks, so short that the weights of a panel stay in the
    first cache while all pixels of a unit pass; a later segment goes on from what y holds.

    Bands are three words for each panel: the first of the input blocks that it reads, their number,
    and where its weights begin, in bytes. That is how groups that are no whole blocks run, as one.

    y and the residual share their strides; 1, W, H W, D H W unless only some of the pixels are
    written (transposed convolution). With scratch, the part of x that a unit reads for a segment is
    copied there with its padding. A worker needs as many pixels for each block as
    ``reach(D) * reach(H) * reach(W)``, where
    ``reach = (outputs - 1) * stride + (kernel - 1) * dilation + 1`` over the outputs of a unit (one
    along D), or as the outputs of a unit times the taps.
    Blocked input with a dilation along W needs kernel D = 1.
    Units: N * groups * output D * row blocks * column blocks * panel blocks.
    """
    item = _ITEM[dtype]
    item_b = 2 if weights == "bfloat16" else item
    pixel = item if plain else lanes * item
    step = 1 if plain else lanes
    copy_strip = strip_copier(dtype, lanes, plain)
    gather = pixel_gatherer(dtype, lanes, plain)

    @register_jitable
    def set_loops(
        args: int, t: int, row: int, plane: int, volume: int, tap: int, narrow: bool
    ) -> None:
        """Set what is the same for all tiles of a segment: the loops over K and the strides."""
        kd, kh, kw = arg(args, 14), arg(args, 15), arg(args, 16)
        dd, dh, dw = arg(args, 20), arg(args, 21), arg(args, 22)
        put(t, T_ARS, arg(args, 19) * pixel)
        put(t, T_SA0, volume)
        if arg(args, 48):
            put(t, T_ARS, pixel)
            put(t, T_N1, 1)
            put(t, T_N2, kd * kh * kw)
            put(t, T_SA2, tap)
            put(t, T_KIN, step)
            put(t, T_AKS, item)
        elif plain or (dw == 1 and not narrow):
            put(t, T_N1, kd)
            put(t, T_SA1, dd * plane)
            put(t, T_N2, kh)
            put(t, T_SA2, dh * row)
            put(t, T_KIN, kw * step)
            put(t, T_AKS, dw * item)
        else:
            put(t, T_N1, kh)
            put(t, T_SA1, dh * row)
            put(t, T_N2, kw)
            put(t, T_SA2, dw * pixel)
            put(t, T_KIN, step)
            put(t, T_AKS, item)
        if kd * kh * kw == 1:
            put(t, T_SA2, volume)

    @register_jitable
    def is_narrow(args: int, begin: int) -> bool:
        """Return whether the segment from block ``begin`` is a last block that lacks channels."""
        taps = arg(args, 14) * arg(args, 15) * arg(args, 16)
        return taps > 1 and arg(args, 46) != 0 and begin + 1 == arg(args, 6)

    @register_jitable
    def strip_of(args: int, narrow: bool) -> int:
        """Return the strip that runs the rows of a segment (0: none)."""
        return 0 if narrow and arg(args, 48) == 0 else arg(args, 49)

    @register_jitable
    def weights_at(args: int, group: int, panel: int, begin: int) -> int:
        """Return the address of a panel's weights from input block ``begin``."""
        blocks, first = arg(args, 7), panel * nv
        taps = arg(args, 14) * arg(args, 15) * arg(args, 16)
        before = (group * blocks + first) * arg(args, 6) + begin * min(nv, blocks - first)
        return arg(args, 1) + before * step * taps * lanes * item_b

    @register_jitable
    def panel_words(args: int, t: int, group: int, panel: int, begin: int, end: int) -> int:
        """Set weights and start values of a panel from input block begin to end; return vectors."""
        blocks = arg(args, 7)
        taps = arg(args, 14) * arg(args, 15) * arg(args, 16)
        depth = arg(args, 6) * taps * step
        first = panel * nv
        vectors = min(nv, blocks - first)
        columns = vectors * lanes * item_b
        bands = arg(args, 45)
        if bands != 0:
            put(t, T_N0, arg(bands, 3 * panel + 1))
            put(t, T_B, arg(args, 1) + arg(bands, 3 * panel + 2))
            end = arg(bands, 3 * panel) + arg(bands, 3 * panel + 1)
        else:
            put(t, T_N0, end - begin)
            put(t, T_B, weights_at(args, group, panel, begin))
        narrow = is_narrow(args, begin)
        put(t, T_KLAST, arg(args, 46) if end == arg(args, 6) else 0)
        if narrow and strip_of(args, narrow) != 0:
            # A strip takes what a block lacks behind its rounds: here behind none, for each tap.
            put(t, T_N0, taps)
            put(t, T_N2, 0)
            put(t, T_SA0, arg(t, T_SA2))
        elif narrow:
            put(t, T_N0, 1)
        elif arg(args, 49) != 0 and arg(t, T_KLAST) != 0:
            put(t, T_N2, arg(t, T_N0) - 1)
            put(t, T_N0, 1)
        elif (taps == 1 or arg(args, 48)) and arg(t, T_KLAST) == 0:
            # The innermost of the segment loops costs least.
            put(t, T_N2, arg(t, T_N0) * taps)
            put(t, T_N0, 1)
        elif taps == 1:
            put(t, T_N2, 1)
        put(t, T_AHEAD, arg(t, T_B) + depth * columns)
        put(t, T_BKS, columns)
        put(t, T_SB2, arg(t, T_KIN) * columns)
        rows = plain or (arg(args, 22) == 1 and not narrow)
        within = arg(args, 15) if rows else arg(args, 16)
        put(t, T_SB1, within * arg(t, T_KIN) * columns)
        put(t, T_SB0, (1 if narrow else taps) * step * columns)
        if arg(args, 49) != 0 and arg(args, 14) > 1 and arg(args, 48) == 0:
            # In the box planes lie as far apart as blocks: strips have one loop over both.
            put(t, T_N0, arg(t, T_N0) * arg(args, 14))
            put(t, T_SA0, arg(t, T_SA1))
            put(t, T_SB0, arg(t, T_SB1))
        bias = arg(args, 3)
        if bias != 0:
            bias += (group * blocks + first) * lanes * item
        put(t, T_INIT, bias)
        put(t, T_IRS, 0 if begin == 0 else arg(t, T_CRS))
        put(t, T_IJS, lanes * item if begin == 0 else arg(t, T_CJS))
        return vectors

    @register_jitable
    def run_strips(strip: int, t: int, pixels: int, vectors: int, post: int) -> None:
        """Run a row of outputs; with an activation in parts that are still near afterwards."""
        part = pixels if post == 0 else _NEAR * mr
        c = arg(t, T_C)
        for i in range(0, pixels, part):
            count = min(part, pixels - i)
            call_kernel(strip, t, count, vectors, 0)
            if post != 0:
                put(t, T_C, c + i * arg(t, T_CRS))
                call_kernel(post, t, count, vectors, 0)
                put(t, T_C, c + (i + count) * arg(t, T_CRS))

    @register_jitable
    def run_row(
        args: int,
        t: int,
        x: int,
        y: int,
        res: int,
        pixels: int,
        vectors: int,
        size: int,
        more: bool,
        post: int,
        left: int,
        strip: int,
    ) -> None:
        """Run the tiles of a row of outputs, or its strip; ``more``: go on from what y holds.

        ``left`` is the column of the image that the first tap of the first output reads.
        """
        if strip != 0:
            put(t, T_A, x)
            put(t, T_C, y)
            put(t, T_RES, res)
            run_strips(strip, t, pixels, vectors, post)
            return
        dw, weights = arg(args, 22), arg(t, T_B)
        apart = not plain and dw > 1 and arg(args, 16) > 1 and arg(args, 48) == 0
        i = 0
        tile = arg(args, 26)
        share = arg(t, T_PACE) * (size // arg(t, T_BKS) // 2)
        while i < pixels:
            m = rows_of(pixels - i, mr)
            put(t, T_A, x + i * arg(t, T_ARS))
            put(t, T_C, y + i * arg(t, T_CRS))
            put(t, T_RES, res + i * arg(t, T_RRS) if res != 0 else 0)
            if more:
                put(t, T_INIT, arg(t, T_C))
            put(t, T_AHEAD, arg(t, T_AHEAD) + share)
            if apart:
                # Taps that read nothing but padding are left out.
                at = left + i * arg(args, 19)
                end = at + (m - 1) * arg(args, 19)
                tap = max(0, (dw - 1 - end) // dw)
                put(t, T_N2, max(0, min(arg(args, 16), (arg(args, 10) - at + dw - 1) // dw) - tap))
                put(t, T_A, arg(t, T_A) + tap * arg(t, T_SA2))
                put(t, T_B, weights + tap * arg(t, T_SB2))
            call_kernel(tile, t, m, vectors, 0)
            if post != 0:
                call_kernel(post, t, m, vectors, 0)
            i += m
        put(t, T_B, weights)

    @register_jitable
    def skip_planes(args: int, t: int, above: int) -> int:
        """Leave out the kernel planes that read nothing but padding; return how many come first.

        ``above`` is the plane of the input that the first kernel plane reads.
        """
        dd, depth = arg(args, 20), arg(args, 8)
        first = max(0, (dd - 1 - above) // dd)
        put(t, T_N1, max(0, min(arg(args, 14), (depth - above + dd - 1) // dd) - first))
        put(t, T_B, arg(t, T_B) + first * arg(t, T_SB1))
        return first

    @register_jitable
    def skip_border(args: int, t: int, top: int, weights: int, narrow: bool) -> int:
        """Leave out the kernel rows that read nothing but padding; return how many come first.

        ``top`` is the row of the image that the first kernel row reads.
        """
        kh, dh, height = arg(args, 15), arg(args, 21), arg(args, 9)
        first = max(0, (dh - 1 - top) // dh)
        count = max(0, min(kh, (height - top + dh - 1) // dh) - first)
        if plain or (arg(args, 22) == 1 and not narrow):
            put(t, T_N2, count)
            put(t, T_B, weights + first * arg(t, T_SB2))
        else:
            put(t, T_N1, count)
            put(t, T_B, weights + first * arg(t, T_SB1))
        return first

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        t, where = _words(), _where()
        groups, blocks = arg(args, 5), arg(args, 7)
        height, width = arg(args, 9), arg(args, 10)
        od_n, oh_n, ow_n = arg(args, 11), arg(args, 12), arg(args, 13)
        sd, sh, sw = arg(args, 17), arg(args, 18), arg(args, 19)
        dh = arg(args, 21)
        rb, wb, pb = arg(args, 31), arg(args, 32), arg(args, 33)
        scratch, gathered = arg(args, 34), arg(args, 48) != 0
        if scratch != 0:
            scratch += worker * arg(args, 35)
        row_blocks, col_blocks = (oh_n + rb - 1) // rb, (ow_n + wb - 1) // wb
        panels = (blocks + nv - 1) // nv
        panel_blocks = (panels + pb - 1) // pb
        spatial = od_n * row_blocks * col_blocks
        block_in = arg(args, 8) * height * width * pixel
        taps = arg(args, 14) * arg(args, 15) * arg(args, 16)
        along = arg(args, 40) * lanes * item
        plane_out = arg(args, 43) * lanes * item
        put(t, T_BJS, lanes * item_b)
        put(t, T_CRS, along)
        put(t, T_CJS, plane_out)
        put(t, T_IJS, lanes * item)
        put(t, T_RRS, along)
        put(t, T_RJS, plane_out)
        put(t, T_LO, arg(args, 29))
        put(t, T_HI, arg(args, 30))
        copied = -1
        unit = begin
        while unit < end:
            image, rest = unit // (spatial * panel_blocks), unit % (spatial * panel_blocks)
            image, group = image // groups, image % groups
            together = 1
            if arg(args, 36) == 0:
                place, panel = rest // panel_blocks, rest % panel_blocks * pb
                # Units of the same pixels share what is copied of them, and their part of x.
                together = min(end - unit, panel_blocks - rest % panel_blocks, arg(args, 50))
            else:
                place, panel = rest % spatial, rest // spatial * pb
            unit += together
            last_panel = min(panels, panel + together * pb)
            cb = place % col_blocks
            rows_at = place // col_blocks % row_blocks
            od = place // col_blocks // row_blocks
            oh, ow = rows_at * rb, cb * wb
            rows, cols = min(rb, oh_n - oh), min(wb, ow_n - ow)
            x = arg(args, 0) + image * arg(args, 37) + group * arg(args, 6) * block_in
            d0 = od * sd - arg(args, 23)
            h0 = oh * sh - arg(args, 24)
            w0 = ow * sw - arg(args, 25)
            nd, nh, nw = 1, rows, cols
            if scratch == 0:
                nd, nh, nw = arg(args, 8), height, width
            elif not gathered:
                nd = (arg(args, 14) - 1) * arg(args, 20) + 1
                nh = (rows - 1) * sh + (arg(args, 15) - 1) * arg(args, 21) + 1
                nw = (cols - 1) * sw + (arg(args, 16) - 1) * arg(args, 22) + 1
            row = nw * pixel
            plane = nh * row
            volume = nd * plane * (taps if gathered else 1)
            put(where, 0, d0)
            put(where, 1, h0)
            put(where, 2, w0)
            put(where, 3, rows if gathered else nd)
            put(where, 4, cols if gathered else nh)
            put(where, 5, nw)
            out = (od * arg(args, 42) + oh * arg(args, 41)) * lanes * item + ow * along
            down = row if gathered else sh * row
            # Rows of outputs without a gap between them are one row.
            runs, length = rows, cols
            if gathered and arg(args, 41) == cols * arg(args, 40):
                runs, length = 1, rows * cols
            first = 0
            while first < arg(args, 6):
                last = min(first + arg(args, 47), arg(args, 6))
                if last == arg(args, 6) and first + 1 < last and is_narrow(args, last - 1):
                    last -= 1
                narrow = is_narrow(args, first)
                set_loops(args, t, row, plane, volume, plane, narrow)
                if scratch == 0:
                    a = x + first * volume + d0 * plane + h0 * row + w0 * pixel
                else:
                    a = scratch
                    strip = ((image * groups + group) * spatial + place) * arg(args, 6) + first
                    if strip != copied and gathered:
                        gather(args, x + first * block_in, a, last - first, where)
                    elif strip != copied:
                        copy_strip(args, last - first, x + first * block_in, a, where)
                    copied = strip
                done = last == arg(args, 6)
                put(t, T_FLAGS, arg(args, 28) if done else 0)
                for p in range(panel, last_panel):
                    vectors = panel_words(args, t, group, p, first, last)
                    if p + 1 == last_panel and not done:
                        put(t, T_AHEAD, weights_at(args, group, panel, last))
                    at = out + (group * blocks + p * nv) * plane_out
                    at += arg(args, 44)
                    y = arg(args, 2) + image * arg(args, 38) + at
                    res = arg(args, 4) if done else 0
                    if res != 0:
                        res += image * arg(args, 39) + at
                    source = a
                    if arg(args, 45) != 0:
                        source += arg(arg(args, 45), 3 * p) * volume
                    post = arg(args, 27) if done else 0
                    size = (last - first) * taps * step * arg(t, T_BKS)
                    if arg(args, 14) > 1 and not gathered and arg(args, 49) == 0:
                        source += skip_planes(args, t, d0) * arg(args, 20) * plane
                    put(t, T_PACE, 2 * arg(t, T_BKS) // max(1, runs * ((length + mr - 1) // mr)))
                    weights = arg(t, T_B)
                    for r in range(runs):
                        r_out = r * arg(args, 41) * lanes * item
                        skipped = 0
                        if not gathered and arg(args, 15) > 1:
                            skipped = skip_border(args, t, h0 + r * sh, weights, narrow)
                        run_row(
                            args,
                            t,
                            source + r * down + skipped * dh * row,
                            y + r_out,
                            res + r_out if res != 0 else 0,
                            length,
                            vectors,
                            size,
                            first > 0,
                            post,
                            w0,
                            strip_of(args, narrow),
                        )
                first = last

    return kernel


def generic(*, dtype: str, lanes: int, mr: int, nv: int) -> Callable[..., None]:
    """Return the convolution in the plain layout: any sizes, groups, strides and dilations.

    Output channels are the rows of tiles and pixels the lanes. What a unit reads is first laid out
    as a matrix ``[K][pixels]`` unless the input is that already (1x1, stride 1, no pads).

    Words (8 to 25 and 37 to 39 as in ``direct``)::

        0 x  1 weights [group][output channel][K]  2 y  3 bias (0: none)  4 residual (0: none)
        5 groups  6 input channels of one group  7 output channels of one group
        26 contraction tile  27 post kernel (0: none)  28 F_* flags  29 lower  30 upper (float64)
        31 the masked tile  32 pixels of a unit, a multiple of lanes
        34 scratch (0: x is read in place)  35 its bytes per worker

    K runs over (channel, kd, kh, kw). A worker's scratch holds K rows of the pixels of a unit.
    Units: N * groups * ceil(output pixels / pixels of a unit).
    """
    v = vec(dtype, lanes)
    load, store = v.load, v.store
    load1, store1 = ld(dtype), st(dtype)
    item = _ITEM[dtype]
    width = nv * lanes

    @register_jitable
    def fill_run(x: int, to: int, first: int, count: int, size: int, stride: int) -> None:
        """Copy x[first + i * stride] for i < count, zero where that lies outside [0, size)."""
        start = 0
        if first < 0:
            start = min(count, (-first + stride - 1) // stride)
        stop = start
        if size > first:
            stop = max(start, min(count, (size - first + stride - 1) // stride))
        for i in range(start):
            store1(to + i * item, 0.0)
        i = start
        if stride == 1:
            while i + lanes <= stop:
                store(to + i * item, load(x + (first + i) * item))
                i += lanes
        while i < stop:
            store1(to + i * item, load1(x + (first + i * stride) * item))
            i += 1
        for j in range(stop, count):
            store1(to + j * item, 0.0)

    @register_jitable
    def lay_out(args: int, x: int, to: int, first: int, count: int, step: int) -> None:
        depth, height, width_in = arg(args, 8), arg(args, 9), arg(args, 10)
        oh_n, ow_n = arg(args, 12), arg(args, 13)
        kd, kh, kw = arg(args, 14), arg(args, 15), arg(args, 16)
        sw = arg(args, 19)
        for row in range(arg(args, 6) * kd * kh * kw):
            j = row % kw
            i = row // kw % kh
            a = row // kw // kh % kd
            channel = x + row // (kd * kh * kw) * depth * height * width_in * item
            done = 0
            while done < count:
                ow = (first + done) % ow_n
                oh = (first + done) // ow_n % oh_n
                od = (first + done) // ow_n // oh_n
                run = min(count - done, ow_n - ow)
                d = od * arg(args, 17) - arg(args, 23) + a * arg(args, 20)
                h = oh * arg(args, 18) - arg(args, 24) + i * arg(args, 21)
                w = ow * sw - arg(args, 25) + j * arg(args, 22)
                at = to + row * step + done * item
                if d < 0 or d >= depth or h < 0 or h >= height:
                    for z in range(run):
                        store1(at + z * item, 0.0)
                else:
                    source = channel + (d * height + h) * width_in * item
                    fill_run(source, at, w, run, width_in, sw)
                done += run

    @register_jitable
    def channels(args: int, t: int, b: int, w: int, c: int, bias: int, res: int) -> None:
        """Run all output channels of a group over the pixels at column block ``c``."""
        outputs, post = arg(args, 7), arg(args, 27)
        tail, vectors = arg(t, T_TAIL), arg(t, T_IJS)
        tile = arg(args, 26) if tail == lanes else arg(args, 31)
        i = 0
        while i < outputs:
            m = rows_of(outputs - i, mr)
            put(t, T_A, w + i * arg(t, T_ARS))
            put(t, T_B, b)
            put(t, T_C, c + i * arg(t, T_CRS))
            put(t, T_RBIAS, bias + i * item if bias != 0 else 0)
            put(t, T_RES, res + i * arg(t, T_CRS) if res != 0 else 0)
            call_kernel(tile, t, m, vectors, 0)
            if post != 0:
                call_kernel(post, t, m, vectors, 0)
            i += m

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        t = _words()
        groups, inputs, outputs = arg(args, 5), arg(args, 6), arg(args, 7)
        size_in = arg(args, 8) * arg(args, 9) * arg(args, 10)
        pixels = arg(args, 11) * arg(args, 12) * arg(args, 13)
        total = inputs * arg(args, 14) * arg(args, 15) * arg(args, 16)
        part, scratch = arg(args, 32), arg(args, 34)
        if scratch != 0:
            scratch += worker * arg(args, 35)
        parts = (pixels + part - 1) // part
        step = part * item if scratch != 0 else size_in * item
        put(t, T_ARS, total * item)
        put(t, T_AKS, item)
        put(t, T_BKS, step)
        put(t, T_BJS, lanes * item)
        put(t, T_N0, 1)
        put(t, T_N1, 1)
        put(t, T_N2, 1)
        put(t, T_KIN, total)
        put(t, T_CRS, pixels * item)
        put(t, T_CJS, lanes * item)
        put(t, T_RRS, pixels * item)
        put(t, T_RJS, lanes * item)
        put(t, T_INIT, 0)
        put(t, T_FLAGS, arg(args, 28))
        put(t, T_LO, arg(args, 29))
        put(t, T_HI, arg(args, 30))
        for unit in range(begin, end):
            first = unit % parts * part
            group = unit // parts % groups
            image = unit // parts // groups
            count = min(part, pixels - first)
            x = arg(args, 0) + image * arg(args, 37) + group * inputs * size_in * item
            b = x + first * item
            if scratch != 0:
                lay_out(args, x, scratch, first, count, step)
                b = scratch
            w = arg(args, 1) + group * outputs * total * item
            out = (group * outputs * pixels + first) * item
            y = arg(args, 2) + image * arg(args, 38) + out
            bias, res = arg(args, 3), arg(args, 4)
            if bias != 0:
                bias += group * outputs * item
            if res != 0:
                res += image * arg(args, 39) + out
            for p in range(0, count, width):
                columns = min(width, count - p)
                vectors = (columns + lanes - 1) // lanes
                put(t, T_TAIL, columns - (vectors - 1) * lanes)
                put(t, T_IJS, vectors)
                at = p * item
                channels(args, t, b + at, w, y + at, bias, res + at if res != 0 else 0)

    return kernel
