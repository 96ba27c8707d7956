"""Kernels of int8 convolutions with exact 32-bit sums, by a matrix product of weights and windows.

``C[m, n] = sum (A[m, k] - za[m]) (B[k, n] - zb[n])``. A is converted to unsigned bytes (signed ones
plus 128, their zero points too), B to signed bytes (unsigned ones less 128), four values of k
adjacent, for the dot-product instruction. The zero points are subtracted afterwards:
``sum A B - za[m] sb[n] - zb[n] ra[m]`` with ``sb`` the column sums of B and ``ra[m] = sum A[m, k] -
K za[m]``. K is padded with zero bytes to a multiple of four.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic, register_jitable

from subgraph.engine.codegen.argument_views import view_of
from subgraph.engine.codegen.dot import dot4, emit_dot4
from subgraph.engine.codegen.emit import Emit, private_function
from subgraph.engine.codegen.irtools import I32, I64, load_at, splat_value, store_at
from subgraph.engine.codegen.simd import convert, ld_i32, shuffle, st_i32, st_u8, vec
from subgraph.system.numba_internals import cgutils

from .arguments import ColumnsArguments, IntegerProductArguments, QuadsArguments

_BYTES = 16  # pixels that are interleaved to quads at a time


def _tile(lanes: int, rows: int, vectors: int) -> Any:
    """Return ``tile(a, a step, b, quads, c, c step)``: rows x vectors int32 sums from zero."""
    kind = ir.VectorType(I32, lanes)

    def body(builder: Any, args: Any) -> None:
        e = Emit(builder, "float32", lanes)
        block = args[0]
        a_step, quads, c, c_step = (e.word(block, k) for k in (1, 3, 4, 5))
        zero = ir.Constant(kind, [0] * lanes)
        sums = [[e.variable(zero) for _ in range(vectors)] for _ in range(rows)]
        a, b = e.variable(e.word(block, 0)), e.variable(e.word(block, 2))
        with e.loop(quads):
            at = e.get(b)
            right = [
                load_at(builder, builder.add(at, I64(4 * lanes * j)), kind, 4)
                for j in range(vectors)
            ]
            for i in range(rows):
                source = builder.add(e.get(a), builder.mul(a_step, I64(i)))
                left = splat_value(builder, load_at(builder, source, I32, 1), lanes)
                for j in range(vectors):
                    e.put(sums[i][j], emit_dot4(builder, e.get(sums[i][j]), left, right[j]))
                e.fence()
            e.step(a, I64(4))
            e.step(b, I64(4 * lanes * vectors))
        for i in range(rows):
            for j in range(vectors):
                to = builder.add(c, builder.mul(c_step, I64(i)))
                store_at(builder, builder.add(to, I64(4 * lanes * j)), e.get(sums[i][j]), 4)

    @intrinsic
    def tile(
        typingctx: Any, a: Any, a_step: Any, b: Any, quads: Any, c: Any, c_step: Any
    ) -> tuple[Any, Any]:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            name = f"dot_{lanes}_{rows}x{vectors}"
            function = builder.module.globals.get(name)
            if function is None:
                function = private_function(builder.module, name)
                inside = ir.IRBuilder(function.append_basic_block("entry"))
                body(inside, function.args)
                inside.ret_void()
            slot = cgutils.alloca_once(builder, ir.ArrayType(I64, 6))
            words = builder.ptrtoint(slot, I64)
            for k, value in enumerate(args):
                store_at(builder, builder.add(words, I64(8 * k)), value, 8)
            builder.call(function, [words])
            return context.get_dummy_value()

        return types.void(*[types.int64] * 6), codegen

    return tile


def quads_s8(*, dtype: str) -> Callable[..., None]:
    """Return the kernel of `QuadsArguments`, which interleaves four channels.

    Args:
        dtype: ``"uint8"`` (128 is subtracted) or ``"int8"``.
    """
    arguments = view_of(QuadsArguments)
    v = vec("uint8", _BYTES)
    load, load_n, splat, zero = v.load, v.load_n, v.splat, v.zero
    pairs = [k for i in range(_BYTES) for k in (i, _BYTES + i)]
    fours = [
        k for i in range(0, 2 * _BYTES, 2) for k in (i, i + 1, 2 * _BYTES + i, 2 * _BYTES + i + 1)
    ]
    mix, mix_pairs = shuffle("uint8", _BYTES, pairs), shuffle("uint8", 2 * _BYTES, fours)
    whole = vec("uint8", 4 * _BYTES)
    store_all, store_n, mask = whole.store, whole.store_n, 128 if dtype == "uint8" else 0

    @register_jitable
    def line(x: int, plane: int, channel: int, count: int, rest: int) -> Any:
        """Return 16 bytes of a channel, of which ``rest`` exist; zeros for ``channel >= count``."""
        if channel >= count:
            return zero()
        at = x + channel * plane
        return (load(at) if rest >= _BYTES else load_n(at, rest)) ^ splat(mask)

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        image = arguments(args)
        channels, plane = image.channels, image.pixels
        quads = (channels + 3) // 4
        for unit in range(begin, end):
            first = unit % quads * 4
            x = image.x + (unit // quads * channels + first) * plane
            y, count = image.y + unit * plane * 4, channels - first
            for p in range(0, plane, _BYTES):
                rest = plane - p
                a, b = line(x + p, plane, 0, count, rest), line(x + p, plane, 1, count, rest)
                c, d = line(x + p, plane, 2, count, rest), line(x + p, plane, 3, count, rest)
                four = mix_pairs(mix(a, b), mix(c, d))
                if rest >= _BYTES:
                    store_all(y + 4 * p, four)
                else:
                    store_n(y + 4 * p, 4 * rest, four)

    return kernel


def _line_copier(lanes: int) -> Any:
    """Return ``f(windows, source, to, start, stop, run, pad)``, which copies pixels of a row."""
    v = vec("int32", lanes)
    load, store = v.load, v.store

    @register_jitable
    def fill(to: int, start: int, stop: int, value: int) -> None:
        """Set pixels of four channels, from ``start`` to ``stop``, to the bytes of ``value``."""
        for p in range(start, stop):
            st_i32(to + 4 * p, value)

    @register_jitable
    def copy_line(
        windows: ColumnsArguments, source: int, to: int, start: int, stop: int, run: int, pad: int
    ) -> None:
        """Copy pixels of one row for one tap and four channels.

        Args:
            windows: The arguments.
            source: Address of the pixel that the first one reads.
            to: Address of the first pixel in the panel.
            start: First pixel inside the image.
            stop: The pixel after the last one inside.
            run: Number of pixels.
            pad: Four bytes of the padding.
        """
        stride = windows.stride_width
        fill(to, 0, start, pad)
        fill(to, stop, run, pad)
        if stride == 1:
            for p in range(start, stop, lanes):
                left = stop - p
                if left >= lanes:
                    store(to + 4 * p, load(source + 4 * p))
                else:
                    for k in range(p, stop):
                        st_i32(to + 4 * k, ld_i32(source + 4 * k))
        else:
            for p in range(start, stop):
                st_i32(to + 4 * p, ld_i32(source + 4 * p * stride))

    return copy_line


def _row_copier(lanes: int, width: int) -> Any:
    """Return ``f(windows, x, to, pixel, run)``: all of K for pixels of one row of the output.

    Args:
        lanes: int32 elements of a vector.
        width: Pixels of a panel.
    """
    copy_line = _line_copier(lanes)

    @register_jitable
    def copy_row(windows: ColumnsArguments, x: int, to: int, pixel: int, run: int) -> None:
        """Copy all of K for pixels of one row of the output.

        Args:
            windows: The arguments.
            x: Address of the group of the image.
            to: Address of the first pixel in the panel.
            pixel: The first pixel of the output.
            run: Number of pixels.
        """
        quads, depth, height, wide = (
            windows.quads,
            windows.image_depth,
            windows.image_height,
            windows.image_width,
        )
        oh_n, ow_n, stride = windows.output_height, windows.output_width, windows.stride_width
        plane = depth * height * wide * 4
        w0 = pixel % ow_n * stride - windows.pad_width
        h0 = pixel // ow_n % oh_n * windows.stride_height - windows.pad_height
        d0 = pixel // ow_n // oh_n * windows.stride_depth - windows.pad_depth
        for a in range(windows.kernel_depth):
            d = d0 + a * windows.dilation_depth
            for i in range(windows.kernel_height):
                h = h0 + i * windows.dilation_height
                outside = d < 0 or d >= depth or h < 0 or h >= height
                for j in range(windows.kernel_width):
                    w = w0 + j * windows.dilation_width
                    start, stop = min(max((stride - 1 - w) // stride, 0), run), run
                    if w + (run - 1) * stride >= wide:
                        stop = max(start, (wide - w + stride - 1) // stride)
                    if outside:
                        start = stop = run
                    source = x + ((d * height + h) * wide + w) * 4
                    for q in range(quads):
                        pad = windows.pad if q < quads - 1 else windows.last_pad
                        copy_line(windows, source + q * plane, to, start, stop, run, pad)
                        to += width * 4

    return copy_row


def columns_s8(*, lanes: int, vectors: int) -> Callable[..., None]:
    """Return the kernel of `ColumnsArguments`, which copies the windows of a convolution (im2col).

    A panel is ``lanes * vectors`` pixels wide. K runs over (kd, kh, kw, channel).

    Args:
        lanes: int32 elements of a vector.
        vectors: Vectors of a panel.
    """
    arguments = view_of(ColumnsArguments)
    width = lanes * vectors
    v = vec("int32", lanes)
    load, store, splat, dot = v.load, v.store, v.splat, dot4(lanes)
    copy_row = _row_copier(lanes, width)

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        windows = arguments(args)
        panels, ow_n = windows.panels, windows.output_width
        quads = windows.quads * windows.kernel_depth * windows.kernel_height * windows.kernel_width
        size = windows.quads * windows.image_depth * windows.image_height * windows.image_width * 4
        pixels = windows.output_depth * windows.output_height * ow_n
        for unit in range(begin, end):
            panel, matrix = unit % panels, unit // panels
            base = windows.target + unit * quads * width * 4
            first = panel * width
            count = min(width, pixels - first)
            if count < width:
                for i in range(0, quads * width * 4, 4 * lanes):
                    store(base + i, splat(0))
            done = 0
            while done < count:
                run = min(count - done, ow_n - (first + done) % ow_n)
                copy_row(windows, windows.x + matrix * size, base + 4 * done, first + done, run)
                done += run
            sums = windows.sums + (matrix * panels * width + first) * 4
            for j in range(0, width, lanes):
                total = splat(0)
                for q in range(quads):
                    total = dot(total, splat(0x01010101), load(base + (q * width + j) * 4))
                store(sums + 4 * j, total)

    return kernel


def product(*, lanes: int, vectors: int, rows: int, output: str) -> Callable[..., None]:
    """Return the kernel of `IntegerProductArguments`, a stack of products.

    Args:
        lanes: int32 elements of a vector.
        vectors: Vectors of a panel.
        rows: Rows of a tile.
        output: ``"int32"``; or ``"uint8"`` or ``"int8"``: sums are scaled, rounded to nearest even,
            the zero point is added, and the result clamped.
    """
    arguments = view_of(IntegerProductArguments)
    full, one = _tile(lanes, rows, vectors), _tile(lanes, 1, vectors)
    width = lanes * vectors
    finish = _row_finisher(lanes, width, output)

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        product = arguments(args)
        height, columns, step = product.m, product.n, product.row_bytes
        panels, blocks = (columns + width - 1) // width, (height + rows - 1) // rows
        scratch = product.scratch + worker * product.scratch_bytes
        quads = step // 4
        for unit in range(begin, end):
            block, panel = unit % blocks, unit // blocks % panels
            matrix = unit // blocks // panels
            group = matrix % product.groups
            row = block * rows
            a = product.a + (group * height + row) * step
            b = product.b + matrix * product.b_bytes + panel * quads * width * 4
            count = min(rows, height - row)
            if count == rows:
                full(a, step, b, quads, scratch, width * 4)
            else:
                for i in range(count):
                    one(a + i * step, step, b, quads, scratch + i * width * 4, width * 4)
            for i in range(count):
                finish(product, scratch + i * width * 4, group, matrix, row + i, panel * width)

    return kernel


def _row_finisher(lanes: int, width: int, output: str) -> Any:
    """Return ``f(product, sums, group, matrix, row, first)``, which writes a row of a panel.

    Args:
        lanes: int32 elements of a vector.
        width: Columns of a panel.
        output: As of `product`.
    """
    v, reals = vec("int32", lanes), vec("float32", lanes)
    load, store, splat, store_n = v.load, v.store, v.splat, v.store_n
    to_float, to_int = convert("int32", "float32", lanes), convert("float32", "int32", lanes)
    splat_real, bcast, rint = reals.splat, reals.bcast, reals.rint
    largest_of, least_of = reals.max, reals.min
    item = 4 if output == "int32" else 1
    least, most = (0.0, 255.0) if output == "uint8" else (-128.0, 127.0)
    plain = output == "int32"

    @register_jitable
    def finish(
        product: IntegerProductArguments, sums: int, group: int, matrix: int, row: int, first: int
    ) -> None:
        """Subtract the share of zero points from one row of a panel, requantize and store it.

        Args:
            product: The arguments.
            sums: Address of the row's sums, int32.
            group: The left side.
            matrix: The right side.
            row: Row of the result.
            first: First column of the panel.
        """
        n = product.n
        index = group * product.m + row
        za, ra = ld_i32(product.a_zeros + 4 * index), ld_i32(product.a_sums + 4 * index)
        sb = product.b_sums + 4 * (matrix * product.sums_step + first)
        to = product.c + ((matrix * product.m + row) * n + first) * item
        for j in range(0, min(width, n - first), lanes):
            total = load(sums + 4 * j) - splat(za) * load(sb + 4 * j)
            total = total - splat(ra) * load(product.b_zeros + 4 * (first + j))
            if product.bias != 0:
                total = total + splat(ld_i32(product.bias + 4 * index))
            count = min(lanes, n - first - j)
            if plain:
                store_n(to + 4 * j, count, total)
            else:
                scale = bcast(product.scale + 4 * index)
                real = rint(to_float(total) * scale) + splat_real(float(product.c_zero))
                store(
                    sums + 4 * j,
                    to_int(least_of(splat_real(most), largest_of(splat_real(least), real))),
                )
                for i in range(count):
                    st_u8(to + j + i, ld_i32(sums + 4 * (j + i)) & 255)

    return finish
