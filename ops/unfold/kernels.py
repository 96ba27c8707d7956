"""Kernels that convert between images and columns of windows: for DeformConv and Col2Im."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba.extending import register_jitable

from subgraph.engine.codegen.argument_views import DEPTH, HEIGHT, WIDTH, along, view_of
from subgraph.engine.codegen.simd import convert, ld, shuffle, st, vec
from subgraph.engine.codegen.tile import stack_words

from .arguments import ColumnsToImageArguments, DeformColumnsArguments

Function = Callable[..., Any]


def deform_columns(*, dtype: str, lanes: int, masked: bool) -> Function:
    """Return the kernel of `DeformColumnsArguments`, which samples images at the taps' offsets.

    Samples are interpolated bilinearly; pixels outside an image are zero. A vector of adjacent
    windows finds its pixels and their factors once for all channels.

    Args:
        dtype: ``"float32"`` or ``"float64"``.
        lanes: Elements of a vector.
        masked: Whether samples are multiplied by a mask.
    """
    arguments = view_of(DeformColumnsArguments)
    v, integers = vec(dtype, lanes), vec("int32", lanes)
    load_n, store_n, splat, iota, zero = v.load_n, v.store_n, v.splat, v.iota, v.zero
    select, floor, fma, gather, first = v.select, v.floor, v.fma, v.gather, v.mask_n
    to_integer, repeat, item = convert(dtype, "int32", lanes), integers.splat, v.itemsize

    @register_jitable
    def sample(
        a: DeformColumnsArguments, image: int, to: int, step: int, each: int, n: int,
        y: Any, x: Any, factor: Any,
    ) -> None:  # fmt: skip
        """Write samples of all channels.

        Args:
            a: The kernel's arguments.
            image: Address of the first channel's image.
            to: Address of the first channel's samples.
            step: Bytes from the samples of a channel to those of the next one.
            each: Channels.
            n: Windows of the vector.
            y: Row of each sample in pixels.
            x: Column of each sample in pixels.
            factor: Factor of each sample.
        """
        height, width = splat(a.image_height), splat(a.image_width)
        # False for NaN, too: such a sample is zero.
        near = (y > splat(-1)) & (y < height) & (x > splat(-1)) & (x < width) & first(n)
        y, x = select(near, y, zero()), select(near, x, zero())
        # A sample may lie within one pixel outside the image, where some of its four pixels do not
        # exist.
        y0, x0 = floor(y), floor(x)
        fy, fx = y - y0, x - x0
        above, below = near & (y0 >= zero()), near & (y0 + splat(1) < height)
        before, behind = x0 >= zero(), x0 + splat(1) < width
        top, low = (splat(1) - fy) * factor, fy * factor
        f00, f01 = top * (splat(1) - fx), top * fx
        f10, f11 = low * (splat(1) - fx), low * fx
        i00 = to_integer(y0) * repeat(a.image_width) + to_integer(x0)
        i01, i10 = i00 + repeat(1), i00 + repeat(a.image_width)
        i11 = i10 + repeat(1)
        m00, m01, m10, m11 = above & before, above & behind, below & before, below & behind
        for _ in range(each):
            found = gather(image, i00, m00) * f00
            found = fma(gather(image, i01, m01), f01, found)
            found = fma(gather(image, i10, m10), f10, found)
            store_n(to, n, fma(gather(image, i11, m11), f11, found))
            image += a.image_height * a.image_width * item
            to += step

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        a = arguments(args)
        groups, across_taps = a.groups, a.kernel_width
        down, across, each = a.output_height, a.output_width, a.channels // a.groups
        taps, pixels = a.kernel_height * across_taps, down * across
        for unit in range(begin, end):
            tap, group = unit % taps, unit // taps % groups
            plane = unit // (taps * groups) * a.channels + group * each
            offset = a.offsets + unit * 2 * pixels * item
            weight = a.mask + unit * pixels * item
            image = a.x + plane * a.image_height * a.image_width * item
            for i in range(down):
                top = i * a.stride_height - a.pad_height + tap // across_taps * a.dilation_height
                for j in range(0, across, lanes):
                    n, index = min(lanes, across - j), i * across + j
                    left = j * a.stride_width - a.pad_width + tap % across_taps * a.dilation_width
                    y = splat(top) + load_n(offset + index * item, n)
                    x = fma(iota(), splat(a.stride_width), splat(left))
                    x = x + load_n(offset + (pixels + index) * item, n)
                    factor = load_n(weight + index * item, n) if masked else splat(1)
                    to = a.columns + ((plane * taps + tap) * pixels + index) * item
                    sample(a, image, to, taps * pixels * item, each, n, y, x, factor)

    return kernel


@register_jitable
def _tap_distances(a: ColumnsToImageArguments, axis: int) -> Any:
    """Return the distances of taps that reach the same pixels, and those of their windows.

    Tap t of window w reaches pixel ``w * stride + t * dilation``, as does tap
    ``t + stride / g`` of window ``w - dilation / g``, g their greatest common divisor.
    """
    divisor, rest = along(a.stride, axis), along(a.dilation, axis)
    while rest > 0:
        divisor, rest = rest, divisor % rest
    return along(a.stride, axis) // divisor, along(a.dilation, axis) // divisor


@register_jitable
def _first_tap(a: ColumnsToImageArguments, axis: int, pixel: int) -> Any:
    """Return the first tap that reaches a pixel (``pixel``), and the window that it is in.

    If none does, the tap is the number of taps. The window may be beyond those of the image.
    """
    step, taps = along(a.stride, axis), along(a.kernel, axis)
    at = pixel + along(a.pad, axis)
    # Every pixel is reached by tap 0 of a window, if windows outside the image count.
    if step == 1:
        return 0, at
    for tap in range(min(step, taps)):
        if at % step == 0:
            return tap, at // step
        at -= along(a.dilation, axis)
    return taps, 0


def columns_to_image(*, dtype: str, lanes: int, stride: int) -> Function:
    """Return the kernel of `ColumnsToImageArguments`, which sums columns of windows to images.

    A vector of adjacent pixels of a row, or of every ``stride``-th pixel, is computed and written
    once: the sum over all taps that reach these pixels.

    Args:
        dtype: ``"float32"`` or ``"float64"``.
        lanes: Elements of a vector.
        stride: Stride along the last axis, 1 or 2; 0: any other.
    """
    arguments = view_of(ColumnsToImageArguments)
    v = vec(dtype, lanes)
    bcast, zero, item = v.bcast, v.zero, v.itemsize
    row = _row_writer(dtype, lanes, stride)

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        a = arguments(args)
        depth, height, width = along(a.image, DEPTH), along(a.image, HEIGHT), along(a.image, WIDTH)
        taps = along(a.kernel, DEPTH) * along(a.kernel, HEIGHT) * along(a.kernel, WIDTH)
        windows = along(a.windows, DEPTH) * along(a.windows, HEIGHT) * along(a.windows, WIDTH)
        steps = _tap_distances(a, DEPTH), _tap_distances(a, HEIGHT), _tap_distances(a, WIDTH)
        phases = _first_tap(a, WIDTH, 0), _first_tap(a, WIDTH, 1)
        down, across = along(a.stride, DEPTH), along(a.stride, HEIGHT)
        for unit in range(begin, end):
            x = a.columns + unit * taps * windows * item
            image = a.y + unit * depth * height * width * item
            bias = zero()
            if a.bias != 0:
                bias = bcast(a.bias + unit % a.channels * item)
            for first_slice in range(min(down, depth)):
                t, i = _first_tap(a, DEPTH, first_slice)
                for z in range(first_slice, depth, down):
                    for first_row in range(min(across, height)):
                        b, j = _first_tap(a, HEIGHT, first_row)
                        for y in range(first_row, height, across):
                            to = image + (z * height + y) * width * item
                            # The pixel one stride further has the same taps in the next windows, so
                            # that nothing is divided.
                            row(a, x, to, bias, steps, ((t, i), (b, j)), phases)
                            j += 1
                    i += 1

    return kernel


def _tap_summer(dtype: str, lanes: int) -> Any:
    """Return ``f(a, x, steps, taps, windows)``, which sums a vector of pixels over all taps."""
    v, integers = vec(dtype, lanes), vec("uint32", lanes)
    load, load_m, zero, item = v.load, v.load_m, v.zero, v.itemsize
    number, splat = integers.iota, integers.splat

    @register_jitable
    def tap_sum(a: ColumnsToImageArguments, x: int, steps: Any, taps: Any, windows: Any) -> Any:
        """Return the sums of a vector of pixels over all taps.

        For each axis, ``steps`` are those of `_tap_distances`, ``taps`` and ``windows`` those of
        `_first_tap`.
        """
        # `while` instead of `range`: a range with a variable step divides before it begins.
        wide, n = along(a.kernel, WIDTH), along(a.windows, WIDTH)
        plane = along(a.windows, DEPTH) * along(a.windows, HEIGHT) * n * item
        result, t, i = zero(), taps[0], windows[0]
        while t < along(a.kernel, DEPTH):
            b, j = taps[1], windows[1]
            while b < along(a.kernel, HEIGHT):
                # A tap may reach the pixel from a window that does not exist.
                if 0 <= i < along(a.windows, DEPTH) and 0 <= j < along(a.windows, HEIGHT):
                    c, w = taps[2], windows[2]
                    row = x + (t * along(a.kernel, HEIGHT) + b) * wide * plane
                    row += (i * along(a.windows, HEIGHT) + j) * n * item
                    while c < wide:
                        at = row + c * plane + w * item
                        if w >= 0 and w + lanes <= n:
                            result = result + load(at)
                        elif w < n and w + lanes > 0:
                            # As unsigned numbers, windows before the first one are large.
                            result = result + load_m(at, number() + splat(w) < splat(n))
                        c += steps[2][0]
                        w -= steps[2][1]
                b += steps[1][0]
                j -= steps[1][1]
            t += steps[0][0]
            i -= steps[0][1]
        return result

    return tap_sum


def _row_writer(dtype: str, lanes: int, stride: int) -> Any:
    """Return ``f(a, x, to, bias, steps, at, phases)``, which writes a row of the image."""
    tap_sum = _tap_summer(dtype, lanes)
    v = vec(dtype, lanes)
    store, store_n, item = v.store, v.store_n, v.itemsize
    take, put = ld(dtype), st(dtype)
    lower = shuffle(dtype, lanes, [i // 2 + i % 2 * lanes for i in range(lanes)])
    upper = shuffle(dtype, lanes, [(i + lanes) // 2 + i % 2 * lanes for i in range(lanes)])
    held = stack_words(max(1, lanes * item // 8))

    @register_jitable
    def row(
        a: ColumnsToImageArguments, x: int, to: int, bias: Any, steps: Any, at: Any, phases: Any
    ) -> None:
        """Write a row of the image.

        ``at`` has the first tap and its window along D and H, ``phases`` those of the first two
        pixels along W (`_first_tap`).
        """
        width, step = along(a.image, WIDTH), along(a.stride, WIDTH)
        (t, i), (b, j) = at
        if stride == 0:
            # The results lie apart in memory, so they are stored one by one from a buffer on the
            # stack.
            buffer = held()
            for phase in range(min(step, width)):
                c, w = _first_tap(a, WIDTH, phase)
                for q in range(0, (width - phase + step - 1) // step, lanes):
                    store(buffer, bias + tap_sum(a, x, steps, (t, b, c), (i, j, w + q)))
                    target = to + (phase + q * step) * item
                    for k in range(min(lanes, (width - phase + step - 1) // step - q)):
                        put(target + k * step * item, take(buffer + k * item))
            return
        c, w = phases[0]
        d, u = phases[1]
        for q in range(0, (width + stride - 1) // stride, lanes):
            even = bias + tap_sum(a, x, steps, (t, b, c), (i, j, w + q))
            left = width - q * stride
            if stride == 1:
                if left >= lanes:
                    store(to + q * item, even)
                else:
                    store_n(to + q * item, left, even)
                continue
            odd = bias + tap_sum(a, x, steps, (t, b, d), (i, j, u + q))
            target = to + 2 * q * item
            if left >= 2 * lanes:
                store(target, lower(even, odd))
                store(target + lanes * item, upper(even, odd))
            else:
                store_n(target, left, lower(even, odd))
                # With up to one vector left, this count is not positive and nothing is written.
                store_n(target + lanes * item, left - lanes, upper(even, odd))

    return row
