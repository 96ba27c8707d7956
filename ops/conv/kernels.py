"""Direct convolution kernels over contraction tiles: blocked layout, first layer, plain layout.

Blocked activations are ``[N][C / lanes][D][H][W][lanes]``. The last block is padded with channels
that must hold finite values, since their weights are zero. In 1-D and 2-D convolutions the missing
leading sizes are 1. Weights are packed per group as ``[panel][K][columns]``, like B in
``subgraph.ops.matmul.kernels``: a panel is ``nv`` blocks of output channels (the last one has the
rest) and K runs over ``(input block, kd, kh, kw, lane)``, or ``(channel, kd, kh, kw)`` for plain
input.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba.extending import register_jitable

from subgraph.dtypes import item_bytes
from subgraph.engine.codegen.argument_views import stack_block, view_of
from subgraph.engine.codegen.simd import call_kernel, ld, ld_i64, st, vec
from subgraph.engine.codegen.tile import rows_of
from subgraph.engine.codegen.tiling import (
    TileBlock,
)

from .arguments import DirectArguments, GenericArguments
from .copy_kernels import Box, pixel_gatherer, strip_copier

_NEAR = 8  # tiles whose sums fit in the L1 cache until their activation (estimate)
_tile_block = stack_block(TileBlock)
_box = stack_block(Box)


def direct(
    *, dtype: str, lanes: int, mr: int, nv: int, plain: bool, weights: str = ""
) -> Callable[..., None]:
    """Return the kernel of `DirectArguments`: convolution into the blocked layout.

    Args:
        dtype: ``"float32"`` or ``"float64"``.
        lanes: Channels of one block.
        mr: Most pixels of a tile.
        nv: Blocks of output channels of a panel.
        plain: The input is plain, ``[N][C][D][H][W]``; the output is blocked in any case.
        weights: ``"bfloat16"`` if the weights are stored as bfloat16, "" if as ``dtype``.
    """
    arguments = view_of(DirectArguments)
    item = item_bytes(dtype)
    item_b = 2 if weights == "bfloat16" else item
    pixel = item if plain else lanes * item
    step = 1 if plain else lanes
    copy_strip = strip_copier(dtype, lanes, plain)
    gather = pixel_gatherer(dtype, lanes, plain)

    @register_jitable
    def set_loops(
        a: DirectArguments, t: TileBlock, row: int, plane: int, volume: int, tap: int, partial: bool
    ) -> None:
        """Set the tile arguments that all tiles of a segment share: loops over K and strides.

        ``row``, ``plane``, ``volume`` and ``tap`` are the bytes between rows, planes, input blocks
        and gathered taps of the pixels that tiles read; ``partial`` is that of `is_partial`.
        """
        kd, kh, kw = a.kernel_depth, a.kernel_height, a.kernel_width
        dd, dh, dw = a.dilation_depth, a.dilation_height, a.dilation_width
        t.a_row = a.stride_width * pixel
        t.outer_a = volume
        if a.gathered:
            t.a_row = pixel
            t.middle_count = 1
            t.inner_count = kd * kh * kw
            t.inner_a = tap
            t.steps = step
            t.a_step = item
        elif plain or (dw == 1 and not partial):
            t.middle_count = kd
            t.middle_a = dd * plane
            t.inner_count = kh
            t.inner_a = dh * row
            t.steps = kw * step
            t.a_step = dw * item
        else:
            t.middle_count = kh
            t.middle_a = dh * row
            t.inner_count = kw
            t.inner_a = dw * pixel
            t.steps = step
            t.a_step = item
        if kd * kh * kw == 1:
            t.inner_a = volume

    @register_jitable
    def is_partial(a: DirectArguments, begin: int) -> bool:
        """Return whether the segment from block ``begin`` on is a partial last block alone."""
        taps = a.kernel_depth * a.kernel_height * a.kernel_width
        return taps > 1 and a.rest != 0 and begin + 1 == a.input_blocks

    @register_jitable
    def strip_of(a: DirectArguments, partial: bool) -> int:
        """Return the strip that runs the rows of a segment (0: none)."""
        return 0 if partial and a.gathered == 0 else a.strip

    @register_jitable
    def weights_at(a: DirectArguments, group: int, panel: int, begin: int) -> int:
        """Return the address of a panel's weights from input block ``begin``."""
        blocks, first = a.output_blocks, panel * nv
        taps = a.kernel_depth * a.kernel_height * a.kernel_width
        before = (group * blocks + first) * a.input_blocks + begin * min(nv, blocks - first)
        weights: int = a.weights
        return weights + before * step * taps * lanes * item_b

    @register_jitable
    def set_panel(
        a: DirectArguments, t: TileBlock, group: int, panel: int, begin: int, end: int
    ) -> int:
        """Set weights and start values of a panel from input block begin to end; return vectors."""
        blocks = a.output_blocks
        taps = a.kernel_depth * a.kernel_height * a.kernel_width
        depth = a.input_blocks * taps * step
        first = panel * nv
        vectors = min(nv, blocks - first)
        columns = vectors * lanes * item_b
        bands = a.bands
        if bands != 0:
            t.outer_count = ld_i64(bands + 24 * panel + 8)
            t.b = a.weights + ld_i64(bands + 24 * panel + 16)
            end = ld_i64(bands + 24 * panel) + ld_i64(bands + 24 * panel + 8)
        else:
            t.outer_count = end - begin
            t.b = weights_at(a, group, panel, begin)
        partial = is_partial(a, begin)
        t.last_steps = a.rest if end == a.input_blocks else 0
        if partial and strip_of(a, partial) != 0:
            # A strip ends its rounds with a partial one: here each tap is a partial round.
            t.outer_count = taps
            t.inner_count = 0
            t.outer_a = t.inner_a
        elif partial:
            t.outer_count = 1
        elif a.strip != 0 and t.last_steps != 0:
            t.inner_count = t.outer_count - 1
            t.outer_count = 1
        elif (taps == 1 or a.gathered) and t.last_steps == 0:
            # The innermost loop over segments has the least overhead.
            t.inner_count = t.outer_count * taps
            t.outer_count = 1
        elif taps == 1:
            t.inner_count = 1
        t.ahead = t.b + depth * columns
        t.b_step = columns
        t.inner_b = t.steps * columns
        rows = plain or (a.dilation_width == 1 and not partial)
        within = a.kernel_height if rows else a.kernel_width
        t.middle_b = within * t.steps * columns
        t.outer_b = (1 if partial else taps) * step * columns
        if a.strip != 0 and a.kernel_depth > 1 and a.gathered == 0:
            # Planes of the box are as far apart as its blocks, so one loop of a strip runs both.
            t.outer_count = t.outer_count * a.kernel_depth
            t.outer_a = t.middle_a
            t.outer_b = t.middle_b
        bias = a.bias
        if bias != 0:
            bias += (group * blocks + first) * lanes * item
        t.start = bias
        t.start_row = 0 if begin == 0 else t.c_row
        t.start_vector = lanes * item if begin == 0 else t.c_vector
        return vectors

    @register_jitable
    def run_strips(strip: int, t: TileBlock, pixels: int, vectors: int, activate: int) -> None:
        """Compute a row of outputs; with an activation, in parts that stay in the L1 cache."""
        part = pixels if activate == 0 else _NEAR * mr
        c = t.c
        for i in range(0, pixels, part):
            count = min(part, pixels - i)
            call_kernel(strip, t, count, vectors, 0)
            if activate != 0:
                t.c = c + i * t.c_row
                call_kernel(activate, t, count, vectors, 0)
                t.c = c + (i + count) * t.c_row

    @register_jitable
    def run_row(
        a: DirectArguments,
        t: TileBlock,
        x: int,
        y: int,
        res: int,
        pixels: int,
        vectors: int,
        size: int,
        more: bool,
        activate: int,
        left: int,
        strip: int,
    ) -> None:
        """Run the tiles of a row of outputs, or its strip.

        ``x``, ``y`` and ``res`` (0: none) are addresses of the first pixel, ``size`` the bytes of
        the panel's weights in this segment. ``more``: add to the partial sums in y. ``left`` is the
        column of the image that the first tap of the first output reads.
        """
        if strip != 0:
            t.a = x
            t.c = y
            t.residual = res
            run_strips(strip, t, pixels, vectors, activate)
            return
        dw, weights = a.dilation_width, t.b
        dilated = not plain and dw > 1 and a.kernel_width > 1 and a.gathered == 0
        i = 0
        tile = a.tile
        share = t.pace * (size // t.b_step // 2)
        while i < pixels:
            m = rows_of(pixels - i, mr)
            t.a = x + i * t.a_row
            t.c = y + i * t.c_row
            t.residual = res + i * t.residual_row if res != 0 else 0
            if more:
                t.start = t.c
            t.ahead = t.ahead + share
            if dilated:
                # Skip the taps that read nothing but padding.
                at = left + i * a.stride_width
                end = at + (m - 1) * a.stride_width
                tap = max(0, (dw - 1 - end) // dw)
                t.inner_count = max(
                    0, min(a.kernel_width, (a.image_width - at + dw - 1) // dw) - tap
                )
                t.a = t.a + tap * t.inner_a
                t.b = weights + tap * t.inner_b
            call_kernel(tile, t, m, vectors, 0)
            if activate != 0:
                call_kernel(activate, t, m, vectors, 0)
            i += m
        t.b = weights

    @register_jitable
    def skip_planes(a: DirectArguments, t: TileBlock, above: int) -> int:
        """Skip the kernel planes that read nothing but padding; return how many come first.

        ``above`` is the plane of the input that the first kernel plane reads.
        """
        dd, depth = a.dilation_depth, a.image_depth
        first = max(0, (dd - 1 - above) // dd)
        t.middle_count = max(0, min(a.kernel_depth, (depth - above + dd - 1) // dd) - first)
        t.b = t.b + first * t.middle_b
        return first

    @register_jitable
    def skip_border(a: DirectArguments, t: TileBlock, top: int, weights: int, partial: bool) -> int:
        """Skip the kernel rows that read nothing but padding; return how many come first.

        ``top`` is the row of the image that the first kernel row reads.
        """
        kh, dh, height = a.kernel_height, a.dilation_height, a.image_height
        first = max(0, (dh - 1 - top) // dh)
        count = max(0, min(kh, (height - top + dh - 1) // dh) - first)
        if plain or (a.dilation_width == 1 and not partial):
            t.inner_count = count
            t.b = weights + first * t.inner_b
        else:
            t.middle_count = count
            t.b = weights + first * t.middle_b
        return first

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        a = arguments(args)
        t, where = _tile_block(), _box()
        groups, blocks = a.groups, a.output_blocks
        height, width = a.image_height, a.image_width
        od_n, oh_n, ow_n = a.output_depth, a.output_height, a.output_width
        sd, sh, sw = a.stride_depth, a.stride_height, a.stride_width
        dh = a.dilation_height
        rb, wb, pb = a.rows, a.columns, a.panels
        scratch, gathered = a.scratch, a.gathered != 0
        if scratch != 0:
            scratch += worker * a.scratch_bytes
        row_blocks, col_blocks = (oh_n + rb - 1) // rb, (ow_n + wb - 1) // wb
        panels = (blocks + nv - 1) // nv
        panel_blocks = (panels + pb - 1) // pb
        spatial = od_n * row_blocks * col_blocks
        block_in = a.image_depth * height * width * pixel
        taps = a.kernel_depth * a.kernel_height * a.kernel_width
        along = a.y_column * lanes * item
        plane_out = a.y_block * lanes * item
        t.b_vector = lanes * item_b
        t.c_row = along
        t.c_vector = plane_out
        t.start_vector = lanes * item
        t.residual_row = along
        t.residual_vector = plane_out
        t.low = a.low
        t.high = a.high
        copied = -1
        unit = begin
        while unit < end:
            image, rest = unit // (spatial * panel_blocks), unit % (spatial * panel_blocks)
            image, group = image // groups, image % groups
            together = 1
            if a.over_pixels == 0:
                box, panel = rest // panel_blocks, rest % panel_blocks * pb
                # Units of the same pixels share the copy of their input.
                together = min(end - unit, panel_blocks - rest % panel_blocks, a.joined)
            else:
                box, panel = rest % spatial, rest // spatial * pb
            unit += together
            last_panel = min(panels, panel + together * pb)
            cb = box % col_blocks
            rows_at = box // col_blocks % row_blocks
            od = box // col_blocks // row_blocks
            oh, ow = rows_at * rb, cb * wb
            rows, cols = min(rb, oh_n - oh), min(wb, ow_n - ow)
            x = a.x + image * a.x_image + group * a.input_blocks * block_in
            d0 = od * sd - a.pad_depth
            h0 = oh * sh - a.pad_height
            w0 = ow * sw - a.pad_width
            nd, nh, nw = 1, rows, cols
            if scratch == 0:
                nd, nh, nw = a.image_depth, height, width
            elif not gathered:
                nd = (a.kernel_depth - 1) * a.dilation_depth + 1
                nh = (rows - 1) * sh + (a.kernel_height - 1) * a.dilation_height + 1
                nw = (cols - 1) * sw + (a.kernel_width - 1) * a.dilation_width + 1
            row = nw * pixel
            plane = nh * row
            volume = nd * plane * (taps if gathered else 1)
            where.depth = d0
            where.row = h0
            where.column = w0
            where.depths = nd
            where.rows = rows if gathered else nh
            where.columns = cols if gathered else nw
            out = (od * a.y_plane + oh * a.y_row) * lanes * item + ow * along
            down = row if gathered else sh * row
            # Contiguous rows of outputs run as one row.
            runs, length = rows, cols
            if gathered and a.y_row == cols * a.y_column:
                runs, length = 1, rows * cols
            first = 0
            while first < a.input_blocks:
                last = min(first + a.segment, a.input_blocks)
                if last == a.input_blocks and first + 1 < last and is_partial(a, last - 1):
                    last -= 1
                partial = is_partial(a, first)
                set_loops(a, t, row, plane, volume, plane, partial)
                if scratch == 0:
                    pixels_at = x + first * volume + d0 * plane + h0 * row + w0 * pixel
                else:
                    pixels_at = scratch
                    strip = ((image * groups + group) * spatial + box) * a.input_blocks + first
                    if strip != copied and gathered:
                        gather(a, x + first * block_in, pixels_at, last - first, where)
                    elif strip != copied:
                        copy_strip(a, last - first, x + first * block_in, pixels_at, where)
                    copied = strip
                done = last == a.input_blocks
                t.flags = a.flags if done else 0
                for p in range(panel, last_panel):
                    vectors = set_panel(a, t, group, p, first, last)
                    if p + 1 == last_panel and not done:
                        t.ahead = weights_at(a, group, panel, last)
                    at = out + (group * blocks + p * nv) * plane_out
                    at += a.y_offset
                    y = a.y + image * a.y_image + at
                    res = a.residual if done else 0
                    if res != 0:
                        res += image * a.residual_image + at
                    source = pixels_at
                    if a.bands != 0:
                        source += ld_i64(a.bands + 24 * p) * volume
                    activate = a.activation if done else 0
                    size = (last - first) * taps * step * t.b_step
                    if a.kernel_depth > 1 and not gathered and a.strip == 0:
                        source += skip_planes(a, t, d0) * a.dilation_depth * plane
                    t.pace = 2 * t.b_step // max(1, runs * ((length + mr - 1) // mr))
                    weights = t.b
                    for r in range(runs):
                        r_out = r * a.y_row * lanes * item
                        skipped = 0
                        if not gathered and a.kernel_height > 1:
                            skipped = skip_border(a, t, h0 + r * sh, weights, partial)
                        run_row(
                            a,
                            t,
                            source + r * down + skipped * dh * row,
                            y + r_out,
                            res + r_out if res != 0 else 0,
                            length,
                            vectors,
                            size,
                            first > 0,
                            activate,
                            w0,
                            strip_of(a, partial),
                        )
                first = last

    return kernel


def generic(*, dtype: str, lanes: int, mr: int, nv: int) -> Callable[..., None]:
    """Return the kernel of `GenericArguments`: plain layout, any sizes and groups.

    Tiles have output channels as rows and pixels as lanes. The input of a unit is first copied to a
    matrix ``[K][pixels]``, unless it has that form already (1x1, stride 1, no pads).

    Args:
        dtype: ``"float32"`` or ``"float64"``.
        lanes: Pixels of a vector.
        mr: Most output channels of a tile.
        nv: Vectors of pixels of a tile.
    """
    arguments = view_of(GenericArguments)
    lay_out, channels = _matrix_of_windows(dtype, lanes), _channel_runner(dtype, lanes, mr)
    item, width = item_bytes(dtype), nv * lanes

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        a = arguments(args)
        t = _tile_block()
        groups, inputs, outputs = a.groups, a.inputs, a.outputs
        size_in = a.image_depth * a.image_height * a.image_width
        pixels = a.output_depth * a.output_height * a.output_width
        total = inputs * a.kernel_depth * a.kernel_height * a.kernel_width
        part, scratch = a.pixels, a.scratch
        if scratch != 0:
            scratch += worker * a.scratch_bytes
        parts = (pixels + part - 1) // part
        step = part * item if scratch != 0 else size_in * item
        t.a_row = total * item
        t.a_step = item
        t.b_step = step
        t.b_vector = lanes * item
        t.outer_count = 1
        t.middle_count = 1
        t.inner_count = 1
        t.steps = total
        t.c_row = pixels * item
        t.c_vector = lanes * item
        t.residual_row = pixels * item
        t.residual_vector = lanes * item
        t.start = 0
        t.flags = a.flags
        t.low = a.low
        t.high = a.high
        for unit in range(begin, end):
            first = unit % parts * part
            group = unit // parts % groups
            image = unit // parts // groups
            count = min(part, pixels - first)
            x = a.x + image * a.x_image + group * inputs * size_in * item
            b = x + first * item
            if scratch != 0:
                lay_out(a, x, scratch, first, count, step)
                b = scratch
            w = a.weights + group * outputs * total * item
            out = (group * outputs * pixels + first) * item
            y = a.y + image * a.y_image + out
            bias, res = a.bias, a.residual
            if bias != 0:
                bias += group * outputs * item
            if res != 0:
                res += image * a.residual_image + out
            for p in range(0, count, width):
                columns = min(width, count - p)
                vectors = (columns + lanes - 1) // lanes
                t.tail = columns - (vectors - 1) * lanes
                t.start_vector = vectors
                at = p * item
                channels(a, t, b + at, w, y + at, bias, res + at if res != 0 else 0)

    return kernel


def _matrix_of_windows(dtype: str, lanes: int) -> Any:
    """Return ``f(a, x, to, first, count, step)``, which writes windows as ``[K][pixels]``.

    The columns of the matrix are ``count`` outputs from ``first`` on; its rows are ``step`` bytes
    apart.
    """
    v = vec(dtype, lanes)
    load, store, item = v.load, v.store, v.itemsize
    load1, store1 = ld(dtype), st(dtype)

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
    def lay_out(a: GenericArguments, x: int, to: int, first: int, count: int, step: int) -> None:
        depth, height, width_in = a.image_depth, a.image_height, a.image_width
        oh_n, ow_n = a.output_height, a.output_width
        kd, kh, kw = a.kernel_depth, a.kernel_height, a.kernel_width
        sw = a.stride_width
        for row in range(a.inputs * kd * kh * kw):
            j = row % kw
            i = row // kw % kh
            k = row // kw // kh % kd
            channel = x + row // (kd * kh * kw) * depth * height * width_in * item
            done = 0
            while done < count:
                ow = (first + done) % ow_n
                oh = (first + done) // ow_n % oh_n
                od = (first + done) // ow_n // oh_n
                run = min(count - done, ow_n - ow)
                d = od * a.stride_depth - a.pad_depth + k * a.dilation_depth
                h = oh * a.stride_height - a.pad_height + i * a.dilation_height
                w = ow * sw - a.pad_width + j * a.dilation_width
                at = to + row * step + done * item
                if d < 0 or d >= depth or h < 0 or h >= height:
                    for z in range(run):
                        store1(at + z * item, 0.0)
                else:
                    source = channel + (d * height + h) * width_in * item
                    fill_run(source, at, w, run, width_in, sw)
                done += run

    return lay_out


def _channel_runner(dtype: str, lanes: int, mr: int) -> Any:
    """Return ``f(a, t, b, w, c, bias, res)``, which runs the tiles of a group's output channels."""
    item = item_bytes(dtype)

    @register_jitable
    def channels(
        a: GenericArguments, t: TileBlock, b: int, w: int, c: int, bias: int, res: int
    ) -> None:
        """Compute a block of columns (pixels) for all output channels of a group.

        Addresses: ``b`` the matrix of windows, ``w`` the group's weights, ``c`` the outputs,
        ``bias`` and ``res`` the bias and the residual (0: none).
        """
        outputs, activate = a.outputs, a.activation
        tail, vectors = t.tail, t.start_vector
        tile = a.tile if tail == lanes else a.masked_tile
        i = 0
        while i < outputs:
            m = rows_of(outputs - i, mr)
            t.a = w + i * t.a_row
            t.b = b
            t.c = c + i * t.c_row
            t.row_bias = bias + i * item if bias != 0 else 0
            t.residual = res + i * t.c_row if res != 0 else 0
            call_kernel(tile, t, m, vectors, 0)
            if activate != 0:
                call_kernel(activate, t, m, vectors, 0)
            i += m

    return channels
