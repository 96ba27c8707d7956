"""Copies of the inputs of convolutions: boxes of images, pixels of a tap, repeated channels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba.extending import register_jitable

from subgraph.dtypes import item_bytes
from subgraph.engine.codegen.argument_views import stack_block, view_of
from subgraph.engine.codegen.arguments import WordBlock
from subgraph.engine.codegen.simd import ld, shuffle, st, vec
from subgraph.ops.movement.window_arguments import WindowArguments
from subgraph.ops.movement.window_arguments import taps_inside as _taps_inside

from .arguments import GatherArguments, RepeatArguments


class Box(WordBlock):
    """A box of pixels, which may extend beyond the borders of the image.

    Attributes:
        depth: First plane; may be negative.
        row: First row; may be negative.
        column: First column; may be negative.
        depths: Number of planes.
        rows: Number of rows.
        columns: Number of columns.
    """

    depth: int
    row: int
    column: int
    depths: int
    rows: int
    columns: int


_box = stack_block(Box)
taps_inside = register_jitable(_taps_inside)


def strip_copier(dtype: str, lanes: int, plain: bool) -> Any:
    """Return the compiled function that copies a box of an image, with zeros for pixels outside.

    Its signature is ``copy(sizes, blocks, x, to, where)``. It copies the box ``where`` of each of
    ``blocks`` blocks (channels if plain) from address ``x`` to address ``to``; ``sizes`` are
    `WindowArguments` with the sizes of the image.

    Args:
        dtype: ``"float32"`` or ``"float64"``.
        lanes: Channels of a block.
        plain: The image is in the plain layout, else in the blocked one.
    """
    v = vec(dtype, lanes)
    load, store, zero = v.load, v.store, v.zero
    load1, store1 = ld(dtype), st(dtype)
    item = item_bytes(dtype)
    pixel = item if plain else lanes * item

    @register_jitable
    def clear(to: int, pixels: int) -> None:
        if plain:
            for i in range(pixels):
                store1(to + i * item, 0.0)
        else:
            for i in range(pixels):
                store(to + i * pixel, zero())

    @register_jitable
    def copy(source: int, to: int, pixels: int) -> None:
        if plain:
            for i in range(0, pixels - lanes + 1, lanes):
                store(to + i * item, load(source + i * item))
            # Pixels that do not fill a vector are copied one by one: a vector would read beyond the
            # row.
            for i in range(pixels // lanes * lanes, pixels):
                store1(to + i * item, load1(source + i * item))
        else:
            for i in range(pixels):
                store(to + i * pixel, load(source + i * pixel))

    @register_jitable
    def copy_strip(a: WindowArguments, blocks: int, x: int, to: int, where: Box) -> None:
        depth, height, width = a.image_depth, a.image_height, a.image_width
        d0, h0, w0 = where.depth, where.row, where.column
        nd, nh, nw = where.depths, where.rows, where.columns
        # The three parts of a row, padding, pixels and padding, are the same for all rows of the
        # box.
        left = min(max(-w0, 0), nw)
        right = max(min(width - w0, nw), left)
        for b in range(blocks):
            for d in range(d0, d0 + nd):
                for h in range(h0, h0 + nh):
                    if d < 0 or d >= depth or h < 0 or h >= height:
                        clear(to, nw)
                    else:
                        row = x + (((b * depth + d) * height + h) * width + w0) * pixel
                        clear(to, left)
                        copy(row + left * pixel, to + left * pixel, right - left)
                        clear(to + right * pixel, nw - right)
                    to += nw * pixel

    return copy_strip


def pixel_gatherer(dtype: str, lanes: int, plain: bool) -> Any:
    """Return the compiled function that copies for each tap the pixels that outputs read.

    ``gather(sizes, x, to, blocks, where)`` copies, for each of the blocks (channels if plain) and
    each tap, the pixels that ``where.rows * where.columns`` outputs read. The window of the first
    output begins at the depth, row and column of ``where``; ``sizes`` are `WindowArguments`.

    Args:
        dtype: ``"float32"`` or ``"float64"``.
        lanes: Channels of a block.
        plain: The image is in the plain layout, else in the blocked one.
    """
    v = vec(dtype, lanes)
    load, store, zero = v.load, v.store, v.zero
    item = item_bytes(dtype)
    pixel = item if plain else lanes * item

    @register_jitable
    def gather(a: WindowArguments, x: int, to: int, blocks: int, where: Box) -> None:
        depth, height, width = a.image_depth, a.image_height, a.image_width
        rows, cols, sw = where.rows, where.columns, a.stride_width
        taps_w = a.kernel_width
        taps_h = a.kernel_height
        for b in range(blocks):
            for tap in range(a.kernel_depth * taps_h * taps_w):
                d = where.depth + tap // (taps_h * taps_w) * a.dilation_depth
                h = where.row + tap // taps_w % taps_h * a.dilation_height
                w = where.column + tap % taps_w * a.dilation_width
                # The first output whose pixel lies at column 0 or behind, and the first one behind
                # the image.
                left = min(max((sw - 1 - w) // sw, 0), cols)
                right = max(min((width - w + sw - 1) // sw, cols), left)
                inside = d >= 0 and d < depth
                for _ in range(rows):
                    if inside and h >= 0 and h < height:
                        for i in range(left):
                            store(to + i * pixel, zero())
                        source = x + (((b * depth + d) * height + h) * width + w) * pixel
                        for i in range(left, right):
                            store(to + i * pixel, load(source + i * sw * pixel))
                        for i in range(right, cols):
                            store(to + i * pixel, zero())
                    else:
                        for i in range(cols):
                            store(to + i * pixel, zero())
                    to += cols * pixel
                    h += a.stride_height

    return gather


def gather(*, dtype: str, lanes: int) -> Callable[..., None]:
    """Return the kernel of `GatherArguments`, which copies the input of a convolution by taps.

    The result, ``[N][D][input block][tap][H][W of the output][lanes]``, is the input of a
    convolution of one tap whose input blocks are the pairs of block and tap; it adds the same terms
    in the same order.

    Args:
        dtype: ``"float32"`` or ``"float64"``.
        lanes: Channels of a block.
    """
    arguments = view_of(GatherArguments)
    copy = pixel_gatherer(dtype, lanes, False)
    pixel = lanes * item_bytes(dtype)

    def kernel(args: int, begin: int, end: int, _worker: int) -> None:
        a = arguments(args)
        where = _box()
        blocks, depth = a.blocks, a.output_depth
        rows, cols = a.output_height, a.output_width
        taps = a.kernel_depth * a.kernel_height * a.kernel_width
        area = a.image_depth * a.image_height * a.image_width * pixel
        where.row = -a.pad_height
        where.column = -a.pad_width
        where.rows = rows
        where.columns = cols
        for unit in range(begin, end):
            block, slice_ = unit % blocks, unit // blocks
            where.depth = slice_ % depth * a.stride_depth - a.pad_depth
            x = a.x + slice_ // depth * a.x_image + block * area
            copy(a, x, a.y + unit * taps * rows * cols * pixel, 1, where)

    return kernel


def repeat(*, dtype: str, lanes: int, times: int, part: int) -> Callable[..., None]:
    """Return the kernel of `RepeatArguments`, which writes each channel of images several times.

    Lane k of result block b is channel ``(b * lanes + k) // times``, so that all blocks whose
    number leaves the remainder ``part`` when it is divided by ``times`` pick the same lanes.

    Args:
        dtype: ``"float32"`` or ``"float64"``.
        lanes: Channels of a block.
        times: Copies of a channel.
        part: The remainder of the blocks that the kernel writes.
    """
    arguments = view_of(RepeatArguments)
    v = vec(dtype, lanes)
    load, store = v.load, v.store
    pick = shuffle(dtype, lanes, [(part * lanes + lane) // times for lane in range(lanes)])
    pixel = lanes * item_bytes(dtype)

    def kernel(args: int, begin: int, end: int, _worker: int) -> None:
        a = arguments(args)
        area = a.pixels * pixel
        # Blocks of an image that this kernel writes.
        own = (a.y_blocks - part + times - 1) // times
        for unit in range(begin, end):
            image, number = unit // own, unit % own
            x = a.x + (image * a.x_blocks + number) * area
            y = a.y + (image * a.y_blocks + number * times + part) * area
            for i in range(0, area, pixel):
                value = load(x + i)
                store(y + i, pick(value, value))

    return kernel
