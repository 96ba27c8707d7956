"""The direct convolution kernel over contraction tiles: from the blocked or plain layout to blocks.

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
from subgraph.engine.codegen.simd import call_kernel, ld_i64
from subgraph.engine.codegen.tile import rows_of
from subgraph.engine.codegen.tiling import TileBlock

from .arguments import DirectArguments
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
    copy_strip, gather = strip_copier(dtype, lanes, plain), pixel_gatherer(dtype, lanes, plain)
    set_loops = _loop_setter(item, pixel, step, plain)
    weights_at = _weights_locator(lanes, nv, step, item_b)
    set_panel = _panel_setter(dtype, lanes, nv, plain, item_b, weights_at)
    run_row, skip_border = _row_runner(mr, plain), _border_skipper(plain)

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
                if last == a.input_blocks and first + 1 < last and _is_partial(a, last - 1):
                    last -= 1
                partial = _is_partial(a, first)
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
                        source += _skip_planes(a, t, d0) * a.dilation_depth * plane
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
                            _strip_of(a, partial),
                        )
                first = last

    return kernel


@register_jitable
def _is_partial(a: DirectArguments, begin: int) -> bool:
    """Return whether the segment from block ``begin`` on is a partial last block alone."""
    taps = a.kernel_depth * a.kernel_height * a.kernel_width
    return taps > 1 and a.rest != 0 and begin + 1 == a.input_blocks


@register_jitable
def _strip_of(a: DirectArguments, partial: bool) -> int:
    """Return the strip that runs the rows of a segment (0: none)."""
    return 0 if partial and a.gathered == 0 else a.strip


@register_jitable
def _skip_planes(a: DirectArguments, t: TileBlock, above: int) -> int:
    """Skip the kernel planes that read nothing but padding; return how many come first.

    ``above`` is the plane of the input that the first kernel plane reads.
    """
    dd, depth = a.dilation_depth, a.image_depth
    first = max(0, (dd - 1 - above) // dd)
    t.middle_count = max(0, min(a.kernel_depth, (depth - above + dd - 1) // dd) - first)
    t.b = t.b + first * t.middle_b
    return first


def _loop_setter(item: int, pixel: int, step: int, plain: bool) -> Any:
    """Return ``f(a, t, row, plane, volume, tap, partial)``, which sets the loops of a segment.

    Args:
        item: Bytes of an element.
        pixel: Bytes of a pixel of a block (of a channel if plain).
        step: Channels of a block (1 if plain).
        plain: The input is plain.
    """

    @register_jitable
    def set_loops(
        a: DirectArguments, t: TileBlock, row: int, plane: int, volume: int, tap: int, partial: bool
    ) -> None:
        """Set the tile arguments that all tiles of a segment share: loops over K and strides.

        ``row``, ``plane``, ``volume`` and ``tap`` are the bytes between rows, planes, input blocks
        and gathered taps of the pixels that tiles read; ``partial`` is that of `_is_partial`.
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

    return set_loops


def _weights_locator(lanes: int, nv: int, step: int, item_b: int) -> Any:
    """Return ``f(a, group, panel, begin)``, which returns the address of a panel's weights."""

    @register_jitable
    def weights_at(a: DirectArguments, group: int, panel: int, begin: int) -> int:
        """Return the address of a panel's weights from input block ``begin``."""
        blocks, first = a.output_blocks, panel * nv
        taps = a.kernel_depth * a.kernel_height * a.kernel_width
        before = (group * blocks + first) * a.input_blocks + begin * min(nv, blocks - first)
        weights: int = a.weights
        return weights + before * step * taps * lanes * item_b

    return weights_at


def _panel_setter(
    dtype: str, lanes: int, nv: int, plain: bool, item_b: int, weights_at: Any
) -> Any:
    """Return ``f(a, t, group, panel, begin, end)``, which sets the tile arguments of a panel.

    Args:
        dtype: Dtype of input and output.
        lanes: Channels of one block.
        nv: Blocks of output channels of a panel.
        plain: The input is plain.
        item_b: Bytes of a weight.
        weights_at: The function of `_weights_locator`.
    """
    item = item_bytes(dtype)
    step = 1 if plain else lanes

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
        partial = _is_partial(a, begin)
        t.last_steps = a.rest if end == a.input_blocks else 0
        if partial and _strip_of(a, partial) != 0:
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

    return set_panel


def _row_runner(mr: int, plain: bool) -> Any:
    """Return the function that runs the tiles of a row of outputs, or its strip."""

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

    return run_row


def _border_skipper(plain: bool) -> Any:
    """Return ``f(a, t, top, weights, partial)``, which skips kernel rows outside the image."""

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

    return skip_border
