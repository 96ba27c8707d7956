"""Kernels over blocks of channels that multiply lane by lane.

They are those of depthwise convolutions, where each channel has its own filter, and of convolutions
to a few channels, which add the lanes at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from numba.extending import register_jitable

from subgraph.dtypes import item_bytes
from subgraph.engine.codegen.argument_views import stack_block, view_of
from subgraph.engine.codegen.simd import call_kernel, memset, shuffle, vec
from subgraph.engine.codegen.tile import rows_of, stack_words
from subgraph.engine.codegen.tiling import F_HI, F_LO, TileBlock

from .arguments import (
    WINDOW_OUTPUTS,
    DepthwiseArguments,
    LaneSumArguments,
    WindowRowsArguments,
)
from .copy_kernels import Box, strip_copier, taps_inside

_tile_block = stack_block(TileBlock)
_box = stack_block(Box)
_zeros = stack_words(8)  # as many bytes as the widest vector


class _Source(NamedTuple):
    """The pixels that the output rows of a unit read, in place or as they are copied to scratch.

    Attributes:
        x: Address of the pixel that the first tap of the first output reads.
        row_bytes: Bytes between rows.
        plane_bytes: Bytes between planes.
    """

    x: int
    row_bytes: int
    plane_bytes: int


def depthwise(*, dtype: str, lanes: int, mr: int) -> Callable[..., None]:
    """Return the kernel of `DepthwiseArguments`.

    Args:
        dtype: ``"float32"`` or ``"float64"``.
        lanes: Channels of a block.
        mr: Most pixels of a tile.
    """
    arguments = view_of(DepthwiseArguments)
    pixel = lanes * item_bytes(dtype)
    set_strides, load_rows = _stride_setter(pixel), _row_loader(dtype, lanes)
    run_row = _row_runner(pixel, mr)

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        a = arguments(args)
        t, window = _tile_block(), _box()
        set_strides(a, t)
        # Without padding there is no scratch: tiles read the image itself.
        scratch = a.scratch
        if scratch != 0:
            scratch += worker * a.scratch_bytes
        row_blocks = (a.output_height + a.rows - 1) // a.rows
        height, down = a.image_height, a.y_row * pixel
        kh, sh, dh, pad = a.kernel_height, a.stride_height, a.dilation_height, a.pad_height
        kernel_row = a.kernel_width * pixel
        for unit in range(begin, end):
            first_row = unit % row_blocks * a.rows
            plane = unit // row_blocks % a.output_depth
            block = unit // row_blocks // a.output_depth % a.blocks
            image = unit // row_blocks // a.output_depth // a.blocks
            rows = min(a.rows, a.output_height - first_row)
            source = load_rows(a, window, scratch, image, block, plane, first_row, rows)
            t.outer_a = a.dilation_depth * source.plane_bytes
            t.middle_a = a.dilation_height * source.row_bytes
            t.start = a.bias + block * pixel if a.bias != 0 else 0
            to = (block * a.y_block + plane * a.y_plane + first_row * a.y_row) * pixel + a.y_offset
            y = a.y + image * a.y_image + to
            weights = a.weights + block * a.kernel_depth * kh * kernel_row
            residual = a.residual
            if residual != 0:
                residual += image * a.residual_image + to
            for row in range(rows):
                above = (first_row + row) * sh - pad
                # Rows of taps in the padding are left out, also where scratch has zeros for them:
                # at the border of a small image they are a large part of the products.
                first, count = taps_inside(above, above, kh, dh, height)
                t.middle_count = count
                x = source.x + (row * sh + first * dh) * source.row_bytes
                at = row * down
                row_residual = residual + at if residual != 0 else 0
                run_row(a, t, x, weights + first * kernel_row, y + at, row_residual)

    return kernel


def _stride_setter(pixel: int) -> Any:
    """Return ``f(a, t)``, which sets the fields of a depthwise tile that are always the same.

    ``pixel`` is the bytes of a pixel.
    """

    @register_jitable
    def set_strides(a: DepthwiseArguments, t: TileBlock) -> None:
        t.a_row = a.stride_width * pixel
        t.a_step = a.dilation_width * pixel
        t.b_step = pixel
        t.outer_count = a.kernel_depth
        # A step is a tap along the width, as there is no sum over channels: a row of taps runs in
        # the innermost loop, planes and rows in the two loops around.
        t.inner_count = 1
        t.outer_b = a.kernel_height * a.kernel_width * pixel
        t.middle_b = a.kernel_width * pixel
        t.c_row = a.y_column * pixel
        t.residual_row = a.y_column * pixel
        t.flags = a.flags
        t.low = a.low
        t.high = a.high

    return set_strides


def _row_loader(dtype: str, lanes: int) -> Any:
    """Return ``f(a, window, scratch, image, block, plane, row, rows)``: the `_Source` of rows.

    The outputs are ``rows`` rows from ``row`` on, in a plane of a block of channels. With scratch,
    the box of pixels that they read is copied there; ``window`` is memory for that box's sizes.
    """
    copy_strip = strip_copier(dtype, lanes, False)
    pixel = lanes * item_bytes(dtype)

    @register_jitable
    def load_rows(
        a: DepthwiseArguments,
        window: Box,
        scratch: int,
        image: int,
        block: int,
        plane: int,
        row: int,
        rows: int,
    ) -> _Source:
        depth = plane * a.stride_depth - a.pad_depth
        top = row * a.stride_height - a.pad_height
        row_bytes = a.image_width * pixel
        plane_bytes = a.image_height * row_bytes
        x = a.x + image * a.x_image + block * a.image_depth * plane_bytes
        if scratch == 0:
            x += depth * plane_bytes + top * row_bytes - a.pad_width * pixel
            return _Source(x, row_bytes, plane_bytes)
        # The box has whole rows, so that one copy serves all tiles of an output row.
        columns = (a.output_width - 1) * a.stride_width + (a.kernel_width - 1) * a.dilation_width
        window.depth = depth
        window.row = top
        window.column = -a.pad_width
        window.depths = (a.kernel_depth - 1) * a.dilation_depth + 1
        window.rows = (rows - 1) * a.stride_height + (a.kernel_height - 1) * a.dilation_height + 1
        window.columns = columns + 1
        copy_strip(a, 1, x, scratch, window)
        row_bytes = window.columns * pixel
        return _Source(scratch, row_bytes, window.rows * row_bytes)

    return load_rows


def _row_runner(pixel: int, mr: int) -> Any:
    """Return ``f(a, t, x, weights, y, residual)``, which computes a row of outputs.

    ``x`` is the address of the pixel that the first tap reads, ``weights`` that of its weights;
    ``y`` and ``residual`` (0: none) are those of the first output.

    Args:
        pixel: Bytes of a pixel.
        mr: Most pixels of a tile.
    """

    @register_jitable
    def run_row(
        a: DepthwiseArguments, t: TileBlock, x: int, weights: int, y: int, residual: int
    ) -> None:
        outputs, stride, pad = a.output_width, a.stride_width, a.pad_width
        taps, dilation, width = a.kernel_width, a.dilation_width, a.image_width
        tile, activate, along = a.tile, a.activation, t.c_row
        i = 0
        while i < outputs:
            pixels = rows_of(outputs - i, mr)
            left = i * stride - pad
            # A tap is left out if all pixels of the tile read padding with it. For the others the
            # copy in scratch has zeros outside the image.
            first, count = taps_inside(left, left + (pixels - 1) * stride, taps, dilation, width)
            t.steps = count
            t.b = weights + first * pixel
            t.a = x + (i * stride + first * dilation) * pixel
            t.c = y + i * along
            t.residual = residual + i * along if residual != 0 else 0
            # The activation follows each tile, whose outputs are still in the L1 cache.
            call_kernel(tile, t, pixels, 1, 0)
            if activate != 0:
                call_kernel(activate, t, pixels, 1, 0)
            i += pixels

    return run_row


class _RowCalls(NamedTuple):
    """How the rows of `windows` are computed by calls of its tile.

    Attributes:
        windows: Windows of a tile.
        first: First output row whose windows lie inside the image along the height.
        last: The output row after the last one of these.
        most: Most of these rows that one call computes.
    """

    windows: int
    first: int
    last: int
    most: int


def windows(*, dtype: str, lanes: int, mr: int) -> Callable[..., None]:
    """Return the kernel of `WindowRowsArguments`: convolution of single channels or small groups.

    It loads each pixel once for all outputs of its row, and needs no scratch.

    Args:
        dtype: ``"float32"`` or ``"float64"``.
        lanes: Channels of a block.
        mr: Most windows of a row of windows.
    """
    arguments = view_of(WindowRowsArguments)
    pixel = lanes * item_bytes(dtype)
    set_tile, run_rows = _window_setter(pixel, mr), _window_row_runner(dtype, lanes)

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        a = arguments(args)
        t = _tile_block()
        t.zeros = _zeros()
        calls = set_tile(a, t)
        row_blocks = (a.output_height + a.rows - 1) // a.rows
        groups = (a.blocks + a.together - 1) // a.together
        scratch = a.scratch + worker * a.scratch_bytes
        for unit in range(begin, end):
            row = unit % row_blocks * a.rows
            block = unit // row_blocks % groups * a.together
            image = unit // row_blocks // groups
            stop = min(row + a.rows, a.output_height)
            run_rows(a, t, calls, scratch, image, block, row, stop)

    return kernel


def _window_setter(pixel: int, mr: int) -> Any:
    """Return ``f(a, t)``, which sets the fields of ``t`` that are always the same.

    It returns the `_RowCalls` of the arguments.

    Args:
        pixel: Bytes of a pixel.
        mr: Most windows of a row of windows.
    """

    @register_jitable
    def set_tile(a: WindowRowsArguments, t: TileBlock) -> _RowCalls:
        width, outputs = a.image_width, a.output_width
        stride, dilation, pad = a.stride_height, a.dilation_height, a.pad_height
        windows = rows_of(outputs, mr)
        t.a_row = stride * width * pixel
        t.middle_a = dilation * width * pixel
        t.middle_b = a.group_channels * a.kernel_width * pixel
        t.c_row = outputs * pixel
        # All tiles of a row have as many windows; the last one overlaps the tile before and stores
        # the same values again: a call has one height.
        t.outer_count = (outputs + windows - 1) // windows
        t.inner_count = (outputs - windows) * pixel
        # The tile reads zeros for these pixels, which saves the copy of the image with its padding.
        t.left = a.pad_width
        t.right = max(0, (outputs - 1) * a.stride_width - a.pad_width + a.kernel_width - width)
        t.flags = a.flags
        t.low = a.low
        t.high = a.high
        # Rows whose windows lie inside the image run in one call; with an activation, as many as
        # stay in the L1 cache until it reads them.
        first = (pad + stride - 1) // stride
        below = a.image_height + pad - (a.kernel_height - 1) * dilation - 1
        # The rows of two blocks that share pixels of bfloat16 are computed alternately.
        whole = a.activation == 0 and a.together == 1
        most = a.output_height if whole else max(1, WINDOW_OUTPUTS // outputs)
        return _RowCalls(windows, first, max(first, below // stride + 1), most)

    return set_tile


def _window_row_runner(dtype: str, lanes: int) -> Any:
    """Return a function that computes the outputs of the rows ``row`` to ``stop``.

    They are those of all blocks of a unit, of which ``block`` is the first one.

    Args:
        dtype: ``"float32"`` or ``"float64"``.
        lanes: Channels of a block.
    """
    pixel = lanes * item_bytes(dtype)
    half = pixel // 2  # bytes of as many channels of bfloat16

    @register_jitable
    def run_calls(
        a: WindowRowsArguments, t: TileBlock, windows: int, rows: int, scratch: int, y: int
    ) -> None:
        """Compute some rows of a block, of ``windows`` each, and store them from address y on."""
        outputs = rows * a.output_width
        t.c = y if a.scratch == 0 else scratch
        call_kernel(a.tile, t, windows, rows, 0)
        if a.activation != 0:
            # The rows are adjacent: the activation sees them as one row of pixels.
            along = t.c_row
            t.c_row, t.rounded = pixel, y
            call_kernel(a.activation, t, outputs, 1, 0)
            t.c_row = along

    @register_jitable
    def clear(half_pixel: int, pixels: int) -> None:
        """Clear the second half of each pixel, which no block has."""
        for _ in range(pixels):
            memset(half_pixel, 0, half)
            half_pixel += pixel

    @register_jitable
    def run_rows(
        a: WindowRowsArguments,
        t: TileBlock,
        calls: _RowCalls,
        scratch: int,
        image: int,
        block: int,
        row: int,
        stop: int,
    ) -> None:
        height, taps, row_bytes = a.image_height, a.kernel_height, a.image_width * pixel
        stride, dilation, pad = a.stride_height, a.dilation_height, a.pad_height
        last_block = min(block + a.together, a.blocks)
        while row < stop:
            # Rows of the border have fewer taps, so that each is a call of its own. A window
            # outside the image has no taps: the count of iterations may be negative, and the tile
            # then stores the bias.
            above = row * stride - pad
            first, last, count = 0, taps, 1
            if row >= calls.first and row < calls.last:
                count = min(calls.most, min(calls.last, stop) - row)
            else:
                first = (-above + dilation - 1) // dilation if above < 0 else 0
                last = min(taps, (height - above + dilation - 1) // dilation)
            x = a.x + image * a.x_image + (above + first * dilation) * row_bytes
            x -= a.pad_width * pixel
            t.middle_count = last - first
            for each in range(block, last_block):
                # Two blocks of float32 are one of bfloat16, of which each has half a pixel.
                of_x, of_y = each * height * row_bytes, (each * a.output_height + row) * t.c_row
                residual = a.residual
                if residual != 0:
                    residual += image * a.residual_image + of_y
                if a.x_rounded != 0:
                    of_x = each // 2 * height * row_bytes + each % 2 * half
                if a.y_rounded != 0:
                    of_y = (each // 2 * a.output_height + row) * t.c_row + each % 2 * half
                t.a = x + of_x
                t.b = a.weights + (each * taps + first) * t.middle_b
                t.start = a.bias + each * pixel if a.bias != 0 else 0
                t.residual = residual
                run_calls(a, t, calls.windows, count, scratch, a.y + image * a.y_image + of_y)
                if a.y_rounded != 0 and each % 2 == 0 and each == a.blocks - 1:
                    clear(a.y + image * a.y_image + of_y + half, count * a.output_width)
            row += count

    return run_rows


class _Part(NamedTuple):
    """Columns of some output rows, which whole tiles of `lane_sums` compute.

    Attributes:
        column: The first column.
        columns: Columns, a multiple of ``windows``.
        windows: Windows of a tile.
        rows: Rows.
    """

    column: int
    columns: int
    windows: int
    rows: int


def lane_sums(*, dtype: str, lanes: int, mr: int) -> Callable[..., None]:
    """Return the kernel of `LaneSumArguments`: convolution to a few channels.

    `direct` computes a whole block of channels, of which most would be padding. Here the tile of
    depthwise convolutions multiplies each block of input channels with the weights of one output,
    and at the end the lanes of each pixel are added.

    Args:
        dtype: ``"float32"`` or ``"float64"``.
        lanes: Channels of a block.
        mr: Most windows of a row of windows.
    """
    arguments = view_of(LaneSumArguments)
    item = item_bytes(dtype)
    pixel = lanes * item
    add_terms, store_sums = _term_adder(pixel), _sum_storer(dtype, lanes)

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        a = arguments(args)
        t = _tile_block()
        t.zeros = _zeros()
        t.a_row = a.stride_height * a.image_width * pixel
        t.middle_a = a.dilation_height * a.image_width * pixel
        t.middle_b = a.kernel_width * pixel
        t.c_vector = pixel
        t.low, t.high = a.low, a.high
        scratch = a.scratch + worker * a.scratch_bytes
        height, taps, dilation = a.image_height, a.kernel_height, a.dilation_height
        row_blocks = (a.output_height + a.rows - 1) // a.rows
        parts = (a.output_width + a.columns - 1) // a.columns
        for unit in range(begin, end):
            column = unit % parts * a.columns
            row = unit // parts % row_blocks * a.rows
            plane = unit // (parts * row_blocks) % a.output_depth
            image = unit // (parts * row_blocks * a.output_depth)
            n = min(a.columns, a.output_width - column)
            windows = rows_of(n, mr)
            stop = min(row + a.rows, a.output_height)
            most = max(1, WINDOW_OUTPUTS // n)
            while row < stop:
                # Rows with the same taps inside the image are computed together.
                above = row * a.stride_height - a.pad_height
                first, count = taps_inside(above, above, taps, dilation, height)
                rows = 1
                if count == taps:
                    below = height - 1 - (taps - 1) * dilation + a.pad_height
                    rows = min(most, min(stop, below // a.stride_height + 1) - row)
                t.middle_count = count
                above += first * dilation
                for output in range(a.outputs):
                    t.c_row = n * pixel
                    # Tiles that overlapped would add twice: what remains of the rows is a part of
                    # its own, with lower tiles.
                    done = 0
                    while done < n:
                        high = min(windows, n - done)
                        part = _Part(column + done, (n - done) // high * high, high, rows)
                        t.c = scratch + done * pixel
                        add_terms(a, t, image, plane, above, output, first, part)
                        done += part.columns
                    y = (output * a.output_depth + plane) * a.output_height + row
                    y = a.y + image * a.y_image + (y * a.output_width + column) * item
                    store_sums(a, t, scratch, y, rows * n)
                row += rows

    return kernel


def _term_adder(pixel: int) -> Any:
    """Return a function that adds the products of all planes of taps and all blocks of channels.

    ``pixel`` is the bytes of a pixel.
    """
    half = pixel // 2

    @register_jitable
    def add_terms(
        a: LaneSumArguments,
        t: TileBlock,
        image: int,
        plane: int,
        above: int,
        output: int,
        first: int,
        part: _Part,
    ) -> None:
        windows, rows = part.windows, part.rows
        t.outer_count = part.columns // windows
        t.inner_count = (part.columns - windows) * pixel
        left = part.column * a.stride_width - a.pad_width
        t.left = -left
        t.right = left + (part.columns - 1) * a.stride_width + a.kernel_width - a.image_width
        area = a.image_height * a.image_width * pixel
        at = above * a.image_width + left
        x = a.x + image * a.x_image + at * pixel
        t.start = a.bias + output * pixel if a.bias != 0 else 0
        t.start_row = 0
        for tap in range(a.kernel_depth):
            depth = plane * a.stride_depth - a.pad_depth + tap * a.dilation_depth
            if depth < 0 or depth >= a.image_depth:
                continue
            for block in range(a.blocks):
                of_x = (block * a.image_depth + depth) * area
                if a.x_rounded != 0:
                    of_x = (block // 2 * a.image_depth + depth) * area + block % 2 * half
                t.a = x + of_x
                row = ((output * a.kernel_depth + tap) * a.blocks + block) * a.kernel_height + first
                t.b = a.weights + row * a.kernel_width * pixel
                call_kernel(a.tile, t, windows, rows, 0)
                t.start_row = pixel  # the next sums continue these
        if t.start_row == 0:
            # All planes of taps lie in the padding.
            t.middle_count = 0
            call_kernel(a.tile, t, windows, rows, 0)

    return add_terms


def _sum_storer(dtype: str, lanes: int) -> Any:
    """Return ``f(a, t, sums, y, count)``, which adds the lanes of ``count`` vectors at ``sums``."""
    v = vec(dtype, lanes)
    splat, select, item = v.splat, v.select, v.itemsize
    load_n, store_n = v.load_n, v.store_n
    total = _lane_adder(dtype, lanes, lanes)

    @register_jitable
    def store_sums(a: LaneSumArguments, t: TileBlock, sums: int, y: int, count: int) -> None:
        for i in range(0, count, lanes):
            values = total(sums + i * lanes * item)
            if a.residual != 0:
                values = values + load_n(a.residual + (y - a.y) + i * item, count - i)
            # NaN passes the bounds, since comparisons with it are false.
            if a.flags & F_LO:
                values = select(values < splat(a.low), splat(a.low), values)
            if a.flags & F_HI:
                values = select(values > splat(a.high), splat(a.high), values)
            store_n(y + i * item, count - i, values)
        if a.activation != 0:
            t.c, t.tail = y, count % lanes
            call_kernel(a.activation, t, 1, (count + lanes - 1) // lanes, 0)
            t.tail = 0

    return store_sums


def _lane_adder(dtype: str, lanes: int, count: int) -> Any:
    """Return ``f(address)``: for ``count`` vectors, the sums of neighbouring lanes of each.

    They are a vector of ``lanes // count`` sums for each of them, in order.
    """
    if count == 1:
        return vec(dtype, lanes).load
    half = _lane_adder(dtype, lanes, count // 2)
    second = count // 2 * lanes * item_bytes(dtype)
    even, odd = (shuffle(dtype, lanes, range(k, 2 * lanes, 2)) for k in (0, 1))

    @register_jitable
    def add(at: int) -> Any:
        a, b = half(at), half(at + second)
        return even(a, b) + odd(a, b)

    return add
