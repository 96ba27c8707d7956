"""Kernels that pool regions of images: RoiAlign, MaxRoiPool.

Coordinates that are NaN or far outside are clamped, so that no memory outside the image is read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba.extending import register_jitable

from subgraph.dtypes import item_bytes
from subgraph.engine.codegen.argument_views import view_of
from subgraph.engine.codegen.simd import ld, ld_i64, st, vec
from subgraph.ops.checks.kernels import report_value

from .arguments import (
    MAX_PIXELS,
    MAX_SAMPLES,
    MaxRoiPoolArguments,
    RoiAlignArguments,
    RoiAverageArguments,
    SampleCountArguments,
)
from .sampling_kernels import clamped_floor

Function = Callable[..., Any]
_ENTRY = 16  # bytes of a row or column of pixels with its weight: its index, int64, and an element


def _bins(dtype: str) -> tuple[Any, Any]:
    """Return functions that read a region, and that find the two pixels around a coordinate.

    The first takes the arguments of a kernel of RoiAlign and the index of a region, and returns its
    image, its top and left edge, the height and width of a bin, and the samples of a bin down and
    across. The second returns both pixels and the distance from the first.
    """
    load, image_of = ld(dtype), ld("int64")
    item, real = item_bytes(dtype), np.dtype(dtype).type

    @register_jitable
    def samples(size: Any, bins: int, wanted: int) -> int:
        if wanted > 0:
            return wanted
        # ONNX takes ceil(size / bins) samples if their number is not given. The bound keeps a huge
        # or infinite region from a loop without end; a step of its own reports the region.
        each = min(max(size / real(bins), real(0)), real(MAX_SAMPLES))
        count = int(each)
        return count + 1 if real(count) < each else count

    @register_jitable
    def read(a: RoiAlignArguments, number: int) -> tuple[int, Any, Any, Any, Any, int, int]:
        bins_down, bins_across, wanted = a.bins_down, a.bins_across, a.samples
        scale, half = real(a.scale), a.half_pixel != 0
        shift = real(0.5) if half else real(0)
        region = a.regions + number * 4 * item
        # The number comes from an input; clamped, it cannot make the kernel read another tensor.
        image = min(max(image_of(a.numbers + number * 8), 0), a.images - 1)
        left, top = load(region) * scale - shift, load(region + item) * scale - shift
        wide = load(region + 2 * item) * scale - shift - left
        high = load(region + 3 * item) * scale - shift - top
        if not half:
            # Without the shift by half a pixel, ONNX makes malformed regions at least one pixel
            # large.
            wide, high = max(wide, real(1)), max(high, real(1))
        down, across = samples(high, bins_down, wanted), samples(wide, bins_across, wanted)
        return image, top, left, high / real(bins_down), wide / real(bins_across), down, across

    @register_jitable
    def around(at: Any, size: int) -> tuple[int, int, Any]:
        """Return the two neighbours of a coordinate and its distance from the first."""
        at = max(at, real(0))
        low = int(at)
        # Beyond the last pixel there is no second neighbour to interpolate with.
        if low >= size - 1:
            return size - 1, size - 1, real(0)
        return low, low + 1, at - real(low)

    return read, around


def check_sample_count(*, dtype: str) -> Function:
    """Return the kernel of `SampleCountArguments`: it reports too large and not finite regions.

    Args:
        dtype: ``"float32"`` or ``"float64"``.
    """
    arguments = view_of(SampleCountArguments)
    load, item, real = ld(dtype), item_bytes(dtype), np.dtype(dtype).type

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        a = arguments(args)
        scale = real(a.scale)
        shift = real(0.5) if a.half_pixel != 0 else real(0)
        for k in range(2 * a.count):
            first = a.regions + (k // 2 * 4 + k % 2) * item
            size = (load(first + 2 * item) * scale - shift) - (load(first) * scale - shift)
            each = size / real(a.bins_down if k % 2 else a.bins_across)
            # The negated comparison also reports a NaN.
            if not (each >= -MAX_PIXELS and each <= a.most):
                many = int(min(each, real(2 * MAX_PIXELS))) if each > 0 else -1
                report_value(ld_i64(a.report), ld_i64(a.report + 8), many, 0, a.most)

    return kernel


def _axis_weights(dtype: str) -> Function:
    """Return ``f(entries, start, extent, samples, size)``: pixel weights of a bin on one axis."""
    load, store, line_of, put_line = ld(dtype), st(dtype), ld("int64"), st("int64")
    real = np.dtype(dtype).type
    _, around = _bins(dtype)

    @register_jitable
    def add(entries: int, count: int, line: int, weight: Any) -> int:
        """Add a weight to the entry of a row or column of pixels; return the number of entries."""
        for back in range(1, min(count, 3) + 1):
            at = entries + (count - back) * _ENTRY
            if line_of(at) == line:
                store(at + 8, load(at + 8) + weight)
                return count
        put_line(entries + count * _ENTRY, line)
        store(entries + count * _ENTRY + 8, weight)
        return count + 1

    @register_jitable
    def add_line_weights(entries: int, start: Any, extent: Any, samples: int, size: int) -> int:
        """List the rows or columns that a bin samples, with their weights; return how many.

        Coordinates rise or fall monotonically, so that a line met before is one of the last three.

        Args:
            entries: Address of the list.
            start: First coordinate of the bin, in pixels.
            extent: Size of the bin along the axis, in pixels.
            samples: Samples of the bin along the axis.
            size: Pixels of the image along the axis.
        """
        count = 0
        share = real(1) / real(max(samples, 1))
        for i in range(samples):
            at = start + (real(i) + real(0.5)) * extent / real(samples)
            # Samples more than a pixel outside the image count as 0 in the average.
            if at >= -1 and at <= size:
                low, high, far = around(at, size)
                count = add(entries, count, low, (real(1) - far) * share)
                count = add(entries, count, high, far * share)
        return count

    return add_line_weights


def _dense_bins(dtype: str, lanes: int) -> tuple[Function, Function]:
    """Return two functions that average a row of bins by sums of whole rows of pixels."""
    v = vec(dtype, lanes)
    load_all, store_all, load_n, fma, splat, nothing = (
        *(v.load, v.store, v.load_n),
        *(v.fma, v.splat, v.zero),
    )
    load, store, line_of = ld(dtype), st(dtype), ld("int64")
    item, real = item_bytes(dtype), np.dtype(dtype).type

    @register_jitable
    def add_rows(
        image: int, width: int, rows: int, count: int, first: int, end: int, sums: int
    ) -> None:
        """Write the weighted sums of ``count`` rows, for the columns from ``first`` to ``end``."""
        for column in range(first, end, lanes):
            total = nothing()
            rest = width - column
            for k in range(count):
                at = image + (line_of(rows + k * _ENTRY) * width + column) * item
                # The last row of the last channel may end with the tensor, so a vector there must
                # not be whole.
                value = load_all(at) if rest >= lanes else load_n(at, rest)
                total = fma(splat(load(rows + k * _ENTRY + 8)), value, total)
            store_all(sums + column * item, total)

    @register_jitable
    def add_sums(columns: int, width: int, counts: int, bins: int, sums: int, y: int) -> None:
        """Write a row of bins from the weighted sums of their rows."""
        for j in range(bins):
            total = real(0)
            at = columns + j * width * _ENTRY
            for _ in range(line_of(counts + 8 * j)):
                total += load(at + 8) * load(sums + line_of(at) * item)
                at += _ENTRY
            store(y + j * item, total)

    return add_rows, add_sums


def _sparse_bins(dtype: str) -> Function:
    """Return the function that averages a row of bins pixel by pixel."""
    load, store, line_of = ld(dtype), st(dtype), ld("int64")
    item, real = item_bytes(dtype), np.dtype(dtype).type

    @register_jitable
    def add_pixels(
        image: int, width: int, rows: int, count: int, columns: int, counts: int, bins: int, y: int
    ) -> None:
        """Write a row of bins pixel by pixel: faster if they sample few of many columns.

        Args:
            image: Address of the channel.
            width: Width of the image in pixels; also the entries of each list of columns.
            rows: Address of the list of rows.
            count: Entries of that list.
            columns: Address of the lists of columns, one for each bin.
            counts: Address of the numbers of their entries, int64.
            bins: Bins across.
            y: Address of the results.
        """
        for j in range(bins):
            total = real(0)
            at = columns + j * width * _ENTRY
            for _ in range(line_of(counts + 8 * j)):
                column = image + line_of(at) * item
                each = real(0)
                for k in range(count):
                    each += load(rows + k * _ENTRY + 8) * load(
                        column + line_of(rows + k * _ENTRY) * width * item
                    )
                total += load(at + 8) * each
                at += _ENTRY
            store(y + j * item, total)

    return add_pixels


def roi_average(*, dtype: str, lanes: int) -> Function:
    """Return the kernel of `RoiAverageArguments`: RoiAlign whose bins are averages.

    The weight of a pixel in a bin is the product of a weight of its row and one of its column. So
    the rows of a bin are summed first, a vector of columns at a time, and then the columns. The
    weights serve all channels of a work unit.

    Args:
        dtype: ``"float32"`` or ``"float64"``.
        lanes: Elements of a vector.
    """
    arguments = view_of(RoiAverageArguments)
    item, real = item_bytes(dtype), np.dtype(dtype).type
    read, _ = _bins(dtype)
    add_line_weights, line_of, put_line = _axis_weights(dtype), ld("int64"), st("int64")
    (add_rows, add_sums), add_pixels = _dense_bins(dtype, lanes), _sparse_bins(dtype)

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        a = arguments(args)
        channels, height, width = a.channels, a.height, a.width
        bins_down, bins_across, block = a.bins_down, a.bins_across, a.unit_channels
        rows = a.scratch + worker * a.scratch_bytes
        counts = rows + height * _ENTRY
        columns = counts + 8 * bins_across
        sums = columns + bins_across * width * _ENTRY
        blocks = (channels + block - 1) // block
        plane = height * width * item
        for unit in range(begin, end):
            region, first = unit // blocks, unit % blocks * block
            image, top, left, high, wide, down, across = read(a, region)
            first_column, end_column, entries = width, 0, 0
            for j in range(bins_across):
                at = columns + j * width * _ENTRY
                count = add_line_weights(at, left + real(j) * wide, wide, across, width)
                put_line(counts + 8 * j, count)
                entries += count
                for k in range(count):
                    line = line_of(at + k * _ENTRY)
                    first_column = min(first_column, line)
                    end_column = max(end_column, line + 1)
            # Summing rows by vectors takes about (columns / lanes) operations for each row, summing
            # single pixels one for each entry.
            dense = end_column - first_column <= lanes * entries
            x = a.x + (image * channels + first) * plane
            y = a.y + (region * channels + first) * bins_down * bins_across * item
            for i in range(bins_down):
                count = add_line_weights(rows, top + real(i) * high, high, down, height)
                for c in range(min(block, channels - first)):
                    to = y + (c * bins_down + i) * bins_across * item
                    if dense:
                        add_rows(x + c * plane, width, rows, count, first_column, end_column, sums)
                        add_sums(columns, width, counts, bins_across, sums, to)
                    else:
                        add_pixels(
                            x + c * plane, width, rows, count, columns, counts, bins_across, to
                        )

    return kernel


def roi_largest(*, dtype: str) -> Function:
    """Return the kernel of `RoiAlignArguments`: a bin is the largest weighted pixel of its samples.

    Args:
        dtype: ``"float32"`` or ``"float64"``.
    """
    arguments = view_of(RoiAlignArguments)
    load, store = ld(dtype), st(dtype)
    item, real = item_bytes(dtype), np.dtype(dtype).type
    read, around = _bins(dtype)

    @register_jitable
    def one_bin(
        image: int,
        a: RoiAlignArguments,
        top: Any,
        left: Any,
        high: Any,
        wide: Any,
        down: int,
        across: int,
    ) -> Any:
        """Return the largest weighted pixel of one bin."""
        height, width = a.height, a.width
        total = real(0)
        started = False
        for i in range(down):
            y = top + (real(i) + real(0.5)) * high / real(down)
            for j in range(across):
                x = left + (real(j) + real(0.5)) * wide / real(across)
                found = real(0)
                if y >= -1 and y <= height and x >= -1 and x <= width:
                    y0, y1, fy = around(y, height)
                    x0, x1, fx = around(x, width)
                    hy, hx = real(1) - fy, real(1) - fx
                    p = hy * hx * load(image + (y0 * width + x0) * item)
                    q = hy * fx * load(image + (y0 * width + x1) * item)
                    r = fy * hx * load(image + (y1 * width + x0) * item)
                    s = fy * fx * load(image + (y1 * width + x1) * item)
                    found = max(max(p, q), max(r, s))
                # The first sample replaces the 0, since all samples may be negative.
                total = max(total, found) if started else found
                started = True
        return total

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        a = arguments(args)
        channels, plane = a.channels, a.height * a.width * item
        bins_down, bins_across = a.bins_down, a.bins_across
        for unit in range(begin, end):
            number, top, left, high, wide, down, across = read(a, unit // channels)
            image = a.x + (number * channels + unit % channels) * plane
            y = a.y + unit * bins_down * bins_across * item
            for i in range(bins_down):
                for j in range(bins_across):
                    at_y, at_x = top + real(i) * high, left + real(j) * wide
                    store(y, one_bin(image, a, at_y, at_x, high, wide, down, across))
                    y += item

    return kernel


def max_roi_pool(*, dtype: str) -> Function:
    """Return the kernel of `MaxRoiPoolArguments`.

    Args:
        dtype: ``"float32"`` or ``"float64"``.
    """
    arguments = view_of(MaxRoiPoolArguments)
    load, store = ld(dtype), st(dtype)
    item, real = item_bytes(dtype), np.dtype(dtype).type

    @register_jitable
    def rounded(x: Any) -> int:
        """Round to the nearest integer, halves away from zero."""
        return clamped_floor(float(x) + 0.5) if x >= 0 else -clamped_floor(0.5 - float(x))

    @register_jitable
    def bounds(start: int, size: int, bins: int, bin: int, limit: int) -> tuple[int, int]:
        """Return the begin and end of a bin in pixels, clamped to the image."""
        # The begin is rounded down and the end up, so that neighbouring bins may share pixels but
        # leave none out.
        first = start + bin * size // bins
        last = start + ((bin + 1) * size + bins - 1) // bins
        return min(max(first, 0), limit), min(max(last, 0), limit)

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        a = arguments(args)
        channels, height, width = a.channels, a.height, a.width
        down, across, scale = a.bins_down, a.bins_across, real(a.scale)
        for unit in range(begin, end):
            region = a.regions + unit // channels * 5 * item
            number = min(max(clamped_floor(float(load(region))), 0), a.images - 1)
            left, top = (
                rounded(load(region + item) * scale),
                rounded(load(region + 2 * item) * scale),
            )
            right = rounded(load(region + 3 * item) * scale)
            bottom = rounded(load(region + 4 * item) * scale)
            high, wide = max(bottom - top + 1, 1), max(right - left + 1, 1)
            image = a.x + (number * channels + unit % channels) * height * width * item
            y = a.y + unit * down * across * item
            for i in range(down):
                y0, y1 = bounds(top, high, down, i, height)
                for j in range(across):
                    x0, x1 = bounds(left, wide, across, j, width)
                    found = real(0)
                    for r in range(y0, y1):
                        for c in range(x0, x1):
                            value = load(image + (r * width + c) * item)
                            # The first pixel replaces the 0, since all may be negative; an empty
                            # bin stays 0.
                            if (r == y0 and c == x0) or value > found:
                                found = value
                    store(y, found)
                    y += item

    return kernel
