"""The kernel of convolutions in the plain layout, of any sizes and groups: im2col and a product."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba.extending import register_jitable

from subgraph.dtypes import item_bytes
from subgraph.engine.codegen.argument_views import stack_block, view_of
from subgraph.engine.codegen.simd import call_kernel, ld, st, vec
from subgraph.engine.codegen.tile import rows_of
from subgraph.engine.codegen.tiling import TileBlock

from .arguments import GenericArguments

_tile_block = stack_block(TileBlock)


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
    set_strides = _stride_setter(dtype, lanes)
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
        set_strides(a, t, step, pixels, total)
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
                at = p * item
                channels(a, t, vectors, b + at, w, y + at, bias, res + at if res != 0 else 0)

    return kernel


def _stride_setter(dtype: str, lanes: int) -> Any:
    """Return ``f(a, t, step, pixels, total)``, which sets the fields of ``t`` that all tiles share.

    ``step`` is the bytes between rows of the matrix of windows, ``pixels`` the pixels of an output
    channel, ``total`` the weights of one (K).
    """
    item = item_bytes(dtype)

    @register_jitable
    def set_strides(a: GenericArguments, t: TileBlock, step: int, pixels: int, total: int) -> None:
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

    return set_strides


def _matrix_of_windows(dtype: str, lanes: int) -> Any:
    """Return ``f(a, x, to, first, count, step)``, which writes windows as ``[K][pixels]``.

    The columns of the matrix are ``count`` outputs from ``first`` on; its rows are ``step`` bytes
    apart.
    """
    fill_run = _run_filler(dtype, lanes)
    store1, item = st(dtype), item_bytes(dtype)

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
                # Outputs of one row read one row of the image, so that a run ends with the row.
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


def _run_filler(dtype: str, lanes: int) -> Any:
    """Return ``f(x, to, first, count, size, stride)``, which copies pixels of a row of an image.

    It writes the elements ``first + i * stride`` of the row at address ``x`` to address ``to``, for
    i < count; those outside [0, size) are 0.
    """
    v = vec(dtype, lanes)
    load, store, item = v.load, v.store, v.itemsize
    load1, store1 = ld(dtype), st(dtype)

    @register_jitable
    def fill_run(x: int, to: int, first: int, count: int, size: int, stride: int) -> None:
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

    return fill_run


def _channel_runner(dtype: str, lanes: int, mr: int) -> Any:
    """Return ``f(a, t, b, w, c, bias, res)``, which runs the tiles of a group's output channels."""
    item = item_bytes(dtype)

    @register_jitable
    def channels(
        a: GenericArguments, t: TileBlock, vectors: int, b: int, w: int, c: int, bias: int, res: int
    ) -> None:
        """Compute a block of ``vectors`` vectors of pixels for all output channels of a group.

        The last vector has ``t.tail`` pixels. Addresses: ``b`` the matrix of windows, ``w`` the
        group's weights, ``c`` the outputs, ``bias`` and ``res`` bias and residual (0: none).
        """
        outputs, activate = a.outputs, a.activation
        tail = t.tail
        # Only the last block of columns can end with a partial vector.
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
