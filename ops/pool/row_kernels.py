"""The kernel that pools windows in the plain layout: over rows of an image, then over columns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba.extending import register_jitable

from subgraph.dtypes import item_bytes
from subgraph.engine.codegen.argument_views import view_of
from subgraph.engine.codegen.simd import shuffle, st, vec

from .arguments import PoolRowsArguments
from .kernels import combiner, merger, start_of, window_taps


def rows(*, dtype: str, lanes: int, kind: str, stride: int, across: int) -> Callable[..., None]:
    """Return the kernel of `PoolRowsArguments`.

    All windows of an output row cover the same image rows. These rows are first reduced to one
    line, a vector of columns at a time, with padding around it; then each window's columns of the
    line are reduced.

    Args:
        dtype: ``"float32"`` or ``"float64"``.
        lanes: Elements of a vector.
        kind: ``"max"``, ``"average"``, ``"l1"`` or ``"l2"``.
        stride: Stride along W, 1 or 2; 0: any other.
        across: Columns of a window; 0: any number.
    """
    arguments = view_of(PoolRowsArguments)
    windows = _window_reducer(dtype, lanes, kind, stride, across)
    item, average = item_bytes(dtype), kind == "average"
    pad_lines, reduce_lines = _line_padder(dtype, lanes, kind), _line_reducer(dtype, lanes, kind)
    count, scale = _counter(dtype, lanes), _scaler(dtype, lanes)
    first_tap, end_tap = window_taps()

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        a = arguments(args)
        blocks, depth = a.blocks, a.image_depth
        od_n, oh_n, ow_n = a.output_depth, a.output_height, a.output_width
        kd, kw, dd, dw = a.kernel_depth, a.kernel_width, a.dilation_depth, a.dilation_width
        step, each, rb, lines = a.stride_width, a.columns, a.rows, a.lines
        line = a.scratch + worker * a.scratch_bytes
        pitch = (step * (each + lanes) + (kw - 1) * dw) * item
        counts = line + lines * pitch
        scales = counts + (each + lanes) * item
        plane = a.image_height * a.image_width * item
        row_blocks = (oh_n + rb - 1) // rb
        for first in range(0, ow_n, each):
            n = min(each, ow_n - first)
            if average:
                count(a, first, n, counts)
            left, inside = pad_lines(a, line, pitch, first, n)
            skipped = first * step - a.pad_width + left  # columns of the image before the lines
            scaled = -1  # `around` of the factors in the scratch
            for unit in range(begin, end):
                oh0, od = unit % row_blocks * rb, unit // row_blocks % od_n
                oh_end = min(oh_n, oh0 + rb)
                block = unit // row_blocks // od_n % blocks
                image = unit // row_blocks // od_n // blocks
                x = a.x + image * a.x_image + block * depth * plane
                y = a.y + image * a.y_image
                y += (((block * od_n + od) * oh_n + oh0) * ow_n + first) * item
                d = od * a.stride_depth - a.pad_depth
                d_first, d_end = first_tap(d, dd), end_tap(d, dd, kd, depth)
                planes = d_end - d_first
                counted = end_tap(d, dd, kd, depth + a.after_depth) if average else 0
                x += (d + d_first * dd) * plane + skipped * item
                for top in range(oh0, oh_end, lines):
                    # Several lines are written before they are read, since loads that overlap
                    # recent stores of another alignment wait for them.
                    bottom = min(oh_end, top + lines)
                    reduce_lines(a, x, planes, top, bottom, inside, line + left * item, pitch)
                    for oh in range(top, bottom):
                        around = _rows_around(a, oh, planes, counted) if average else 0
                        if average and around != scaled:
                            scale(counts, scales, n, around)
                            scaled = around
                        # A partial vector may overwrite later rows, which are computed afterwards.
                        room = (oh_end - oh) * ow_n if n == ow_n else n
                        at = line + (oh - top) * pitch
                        windows(at, scales, kw, dw * item, step, n, y, room)
                        y += ow_n * item

    return kernel


_first_tap, _end_tap = window_taps()


@register_jitable(forceinline=True)
def _rows_around(a: PoolRowsArguments, oh: int, planes: int, counted: int) -> int:
    """Return how many rows of the image the windows of output row ``oh`` count in an average.

    ``planes`` are those inside the image, ``counted`` those that count with padding.
    """
    h = oh * a.stride_height - a.pad_height
    dh, kh, height = a.dilation_height, a.kernel_height, a.image_height
    if a.count_include_pad != 0:
        padded: int = _end_tap(h, dh, kh, height + a.after_height)
        return counted * padded
    rows: int = _end_tap(h, dh, kh, height) - _first_tap(h, dh)
    return max(planes, 0) * max(rows, 0)


def _line_padder(dtype: str, lanes: int, kind: str) -> Any:
    """Return ``f(a, line, pitch, first, n)``, which writes the padding around lines."""
    item, fill = item_bytes(dtype), _filler(dtype, kind)

    @register_jitable(forceinline=True)
    def pad_lines(
        a: PoolRowsArguments, line: int, pitch: int, first: int, n: int
    ) -> tuple[int, int]:
        """Write the padding of lines; return the columns of it on the left, and those inside.

        Args:
            a: The kernel's arguments.
            line: Address of the first line.
            pitch: Bytes between lines.
            first: First window of an output row.
            n: Number of windows.
        """
        step, width = a.stride_width, a.image_width
        # The line covers `length` columns of the image from column w on.
        w = first * step - a.pad_width
        length = (n - 1) * step + (a.kernel_width - 1) * a.dilation_width + 1
        left = min(max(-w, 0), length)
        inside = max(min(width - (w + left), length - left), 0)
        covered = left + (inside + lanes - 1) // lanes * lanes
        for k in range(a.lines):
            fill(line + k * pitch, left)
            fill(line + k * pitch + covered * item, length - covered)
        return left, inside

    return pad_lines


def _line_reducer(dtype: str, lanes: int, kind: str) -> Any:
    """Return ``f(a, x, planes, top, bottom, inside, to, pitch)``: rows of an image to lines."""
    item, reduce_rows = item_bytes(dtype), _row_reducer(dtype, lanes, kind)

    @register_jitable(forceinline=True)
    def reduce_lines(
        a: PoolRowsArguments,
        x: int,
        planes: int,
        top: int,
        bottom: int,
        inside: int,
        to: int,
        pitch: int,
    ) -> None:
        """Reduce the rows of the image that output rows read, each time to a line.

        Args:
            a: The kernel's arguments.
            x: Address of row 0 of the first plane, at the first column inside the image.
            planes: Planes of the windows inside the image.
            top: First output row.
            bottom: The output row after the last one.
            inside: Columns of a line inside the image.
            to: Address of the first line.
            pitch: Bytes between lines.
        """
        dh, kh, height, row = a.dilation_height, a.kernel_height, a.image_height, a.image_width
        row *= item
        plane = a.dilation_depth * height * row
        for oh in range(top, bottom):
            h = oh * a.stride_height - a.pad_height
            first, end = _first_tap(h, dh), _end_tap(h, dh, kh, height)
            at = x + (h + first * dh) * row
            reduce_rows(at, plane, dh * row, planes, end - first, inside, to)
            to += pitch

    return reduce_lines


def _filler(dtype: str, kind: str) -> Any:
    """Return ``f(address, count)``, which fills elements of a line with the padding's value."""
    put, item = st(dtype), item_bytes(dtype)
    start = start_of(kind)

    @register_jitable
    def fill(to: int, count: int) -> None:
        for at in range(to, to + count * item, item):
            put(at, start)

    return fill


def _row_reducer(dtype: str, lanes: int, kind: str) -> Any:
    """Return the function that reduces rows of an image to a line."""
    v = vec(dtype, lanes)
    load, store, load_m, splat = v.load, v.store, v.load_m, v.splat
    mask_n, select, combine = v.mask_n, v.select, combiner(kind, v)
    start, largest = start_of(kind), kind == "max"
    wide = lanes * item_bytes(dtype)

    @register_jitable
    def first(x: Any) -> Any:
        return x if largest else combine(splat(start), x)

    @register_jitable
    def reduce_rows(
        x: int, plane: int, row: int, planes: int, rows: int, columns: int, to: int
    ) -> None:
        """Reduce ``rows`` rows of ``planes`` planes, from address ``x`` on, to a line at ``to``.

        ``plane`` and ``row`` are bytes between planes and rows. The last vector is filled up with
        the padding's value.
        """
        whole = columns // lanes * wide
        if planes == 1 and rows == 3:
            for j in range(0, whole, wide):
                total = combine(first(load(x + j)), load(x + row + j))
                store(to + j, combine(total, load(x + 2 * row + j)))
        elif planes == 1 and rows == 2:
            for j in range(0, whole, wide):
                store(to + j, combine(first(load(x + j)), load(x + row + j)))
        else:
            for j in range(0, whole, wide):
                total = splat(start)
                for d in range(planes):
                    at = x + d * plane + j
                    for _ in range(rows):
                        total = combine(total, load(at))
                        at += row
                store(to + j, total)
        if columns % lanes > 0:
            total, mask = splat(start), mask_n(columns % lanes)
            for d in range(planes):
                at = x + d * plane + whole
                for _ in range(rows):
                    total = combine(total, load_m(at, mask))
                    at += row
            # The whole vector is written: the lanes after the image are padding, which `pad_lines`
            # therefore writes only from the next vector on.
            store(to + whole, select(mask, total, splat(start)))

    return reduce_rows


def _single_reducer(dtype: str, kind: str) -> Any:
    """Return the function that reduces the columns of windows one element at a time."""
    one = vec(dtype, 1)
    load_one, store_one, item = one.load, one.store, item_bytes(dtype)
    merge_one = merger(kind, one)

    @register_jitable
    def one_by_one(line: int, taps: int, near: int, step: int, n: int, y: int) -> None:
        """Reduce the columns of ``n`` windows of a line; taps are ``near`` bytes apart."""
        for o in range(n):
            at = line + o * step * item
            total = load_one(at)
            for _ in range(1, taps):
                at += near
                total = merge_one(total, load_one(at))
            store_one(y + o * item, total)

    return one_by_one


def _window_reducer(dtype: str, lanes: int, kind: str, stride: int, across: int) -> Any:
    """Return the function that reduces the columns of the windows of a line by vectors."""
    v = vec(dtype, lanes)
    load, store, splat, sqrt = v.load, v.store, v.splat, v.sqrt
    load_n, store_n = v.load_n, v.store_n
    one_by_one = _single_reducer(dtype, kind)
    evens = shuffle(dtype, lanes, range(0, 2 * lanes, 2))
    item, merge = item_bytes(dtype), merger(kind, v)
    start = start_of(kind)
    average, root, wide = kind == "average", kind == "l2", lanes * item

    @register_jitable
    def windows(
        line: int,
        scales: int,
        taps: int,
        near: int,
        step: int,
        n: int,
        y: int,
        room: int,
    ) -> None:
        """Write ``n`` windows of a line to ``y``, in vectors that end within ``room`` elements."""
        if stride == 0:
            one_by_one(line, taps, near, step, n, y)
        for j in range(0, n, lanes):
            if stride == 0:
                # The columns are reduced already, into the output; what remains is the scale and
                # the root.
                total = load_n(y + j * item, n - j)
            else:
                at = line + j * stride * item
                total = splat(start)
                for _ in range(across if across > 0 else taps):
                    # The last vectors may read after the last window's columns: a line in the
                    # scratch has room for another vector of windows, and no result keeps those
                    # lanes.
                    value = load(at) if stride == 1 else evens(load(at), load(at + wide))
                    total = merge(total, value)
                    at += near
            if average:
                total = total * load(scales + j * item)
            if root:
                total = sqrt(total)
            if j + lanes <= room:
                store(y + j * item, total)
            else:
                store_n(y + j * item, n - j, total)

    return windows


def _counter(dtype: str, lanes: int) -> Any:
    """Return the function that counts the columns of windows for averages."""
    put, item = st(dtype), item_bytes(dtype)
    first_tap, end_tap = window_taps()

    @register_jitable
    def count(a: PoolRowsArguments, first: int, n: int, counts: int) -> None:
        """Write the number of columns of each of ``n`` windows from window ``first`` on."""
        include, width, taps = a.count_include_pad, a.image_width, a.kernel_width
        dilation = a.dilation_width
        # Rounded up to whole vectors, as `scale` reads them.
        for o in range((n + lanes - 1) // lanes * lanes):
            w = (first + o) * a.stride_width - a.pad_width
            if include != 0:
                found = end_tap(w, dilation, taps, width + a.after_width)
            else:
                found = end_tap(w, dilation, taps, width) - first_tap(w, dilation)
            put(counts + o * item, float(max(found, 0)))

    return count


def _scaler(dtype: str, lanes: int) -> Any:
    """Return the function that writes the factors of averages."""
    v = vec(dtype, lanes)
    load, store, splat, item = v.load, v.store, v.splat, item_bytes(dtype)

    @register_jitable
    def scale(counts: int, scales: int, n: int, around: int) -> None:
        """Write the factor of each sum: one over the pixels that the window counts."""
        for j in range(0, n, lanes):
            pixels = load(counts + j * item) * splat(float(around))
            store(scales + j * item, splat(1.0) / pixels)

    return scale
