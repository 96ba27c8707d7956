"""Products of 8-bit integers with exact 32-bit sums: matrices and convolutions.

``C[m, n] = sum (A[m, k] - za[m]) (B[k, n] - zb[n])``. A is brought to unsigned bytes (signed ones
plus 128, their zero points too), B to signed bytes (unsigned ones less 128), four steps of k beside
each other, for the dot-product instruction. The zero points are taken out afterwards:
``sum A B - za[m] sb[n] - zb[n] ra[m]`` with ``sb`` the column sums of B and ``ra[m] = sum A[m, k] -
K za[m]``. K is padded with zero bytes to a multiple of four.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, register_jitable

from subgraph.engine.dot import dot4, emit_dot4
from subgraph.engine.emit import Emit, private_function
from subgraph.engine.irtools import I32, I64, load_at, splat_value, store_at
from subgraph.engine.simd import convert, ld_i32, ld_u8, st_u8, vec
from subgraph.engine.tile import arg

_ROWS = 8  # rows of a tile


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


def columns_s8(*, lanes: int, vectors: int) -> Callable[..., None]:
    """Return the kernel that lays out the windows of a convolution; a unit is a panel of pixels.

    A panel is ``lanes * vectors`` pixels wide. Words (8 to 25 as in ``conv_kernels.generic``)::

        0 x (bytes)  1 panels [image, group][panel][K / 4][width][4]  2 sb [image, group][pixels]
        3 what is added to a byte (0 or 128)  4 the byte of the padding (as stored in x)
        5 groups  6 input channels of one group  7 panels of one matrix
        8..10 input D H W  11..13 output D H W  14..16 kernel  17..19 strides  20..22 dilations
        23..25 pads before  26 K / 4

    K runs over (channel, kd, kh, kw). Units: images * groups * panels.
    """
    width = lanes * vectors
    v = vec("int32", lanes)
    load, store, splat, dot = v.load, v.store, v.splat, dot4(lanes)

    @register_jitable
    def fill(to: int, start: int, stop: int, value: int) -> None:
        for p in range(start, stop):
            st_u8(to + 4 * p, value)

    @register_jitable
    def line(args: int, source: int, to: int, w: int, run: int) -> None:
        """Lay out one step of K for pixels of one row: bytes w, w + stride, ... of the source."""
        wide, stride, flip = arg(args, 10), arg(args, 19), arg(args, 3)
        pad = (arg(args, 4) + flip) & 255
        start = 0
        if w < 0:
            start = min(run, -w if stride == 1 else (-w + stride - 1) // stride)
        stop = run
        if w + (run - 1) * stride >= wide:
            stop = max(start, (wide - w + stride - 1) // stride) if wide > w else start
        fill(to, 0, start, pad)
        for p in range(start, stop):
            st_u8(to + 4 * p, (ld_u8(source + w + p * stride) + flip) & 255)
        fill(to, stop, run, pad)

    @register_jitable
    def row(args: int, x: int, base: int, pixel: int, run: int) -> None:
        """Lay out all of K for pixels of one row of the output."""
        depth, height, wide = arg(args, 8), arg(args, 9), arg(args, 10)
        oh_n, ow_n = arg(args, 12), arg(args, 13)
        pad = (arg(args, 4) + arg(args, 3)) & 255
        w0 = pixel % ow_n * arg(args, 19) - arg(args, 25)
        h0 = pixel // ow_n % oh_n * arg(args, 18) - arg(args, 24)
        d0 = pixel // ow_n // oh_n * arg(args, 17) - arg(args, 23)
        k = 0
        for c in range(arg(args, 6)):
            for a in range(arg(args, 14)):
                d = d0 + a * arg(args, 20)
                for i in range(arg(args, 15)):
                    h = h0 + i * arg(args, 21)
                    outside = d < 0 or d >= depth or h < 0 or h >= height
                    source = x + ((c * depth + d) * height + h) * wide
                    for j in range(arg(args, 16)):
                        to = base + (k >> 2) * width * 4 + (k & 3)
                        if outside:
                            fill(to, 0, run, pad)
                        else:
                            line(args, source, to, w0 + j * arg(args, 22), run)
                        k += 1

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        inputs, panels, quads = arg(args, 6), arg(args, 7), arg(args, 26)
        size = arg(args, 8) * arg(args, 9) * arg(args, 10)
        pixels = arg(args, 11) * arg(args, 12) * arg(args, 13)
        ow_n = arg(args, 13)
        for unit in range(begin, end):
            panel, matrix = unit % panels, unit // panels
            base = arg(args, 1) + unit * quads * width * 4
            first = panel * width
            count = min(width, pixels - first)
            for i in range(0, quads * width * 4, 4 * lanes):
                if count < width or i >= (quads - 1) * width * 4:
                    store(base + i, splat(0))
            done = 0
            while done < count:
                run = min(count - done, ow_n - (first + done) % ow_n)
                row(args, arg(args, 0) + matrix * inputs * size, base + 4 * done, first + done, run)
                done += run
            sums = arg(args, 2) + (matrix * panels * width + first) * 4
            for j in range(0, width, lanes):
                total = splat(0)
                for q in range(quads):
                    total = dot(total, splat(0x01010101), load(base + (q * width + j) * 4))
                store(sums + 4 * j, total)

    return kernel


def product(*, lanes: int, vectors: int, output: str) -> Callable[..., None]:
    """Return the kernel of a stack of products; one unit is up to eight rows of one panel.

    Args:
        lanes: int32 elements of a vector.
        vectors: Vectors of a panel.
        output: ``"int32"``, or ``"uint8"`` and ``"int8"`` for sums that are scaled and rounded to
            nearest even, the zero point added, and clamped.

    Words::

        0 A [group][M][bytes of a row]  1 B [matrix][panel][K / 4][columns][4]  2 C [matrix][M][N]
        3 M  4 N  5 bytes of a row of A  6 groups
        7 za  8 ra (int32, [group][M])  9 sb  10 zb (int32, [columns], padded)
        11 int32 between the sb of matrices  12 scale (float32; 0 for int32)
        13 scales are one per row [group][M] (1) or per column (0)  14 zero point of C
        15 scratch  16 its bytes per worker: at least 8 * columns * 4
        17 bytes between the B of matrices  18 bias (int32, [group][M]; 0: none)

    Units: matrices * ceil(M / 8) * panels, matrices a multiple of groups.
    """
    v, f = vec("int32", lanes), vec("float32", lanes)
    load, store, splat, store_n = v.load, v.store, v.splat, v.store_n
    to_float, to_int = convert("int32", "float32", lanes), convert("float32", "int32", lanes)
    f_load, f_splat, f_bcast, rint = f.load, f.splat, f.bcast, f.rint
    f_max, f_min = f.max, f.min
    full, one = _tile(lanes, _ROWS, vectors), _tile(lanes, 1, vectors)
    width = lanes * vectors
    item = 4 if output == "int32" else 1
    least, most = (0.0, 255.0) if output == "uint8" else (-128.0, 127.0)
    plain = output == "int32"

    @register_jitable
    def finish(args: int, sums: int, group: int, matrix: int, row: int, first: int) -> None:
        """Take out the zero points of one row of a panel and store it."""
        n = arg(args, 4)
        index = group * arg(args, 3) + row
        za, ra = ld_i32(arg(args, 7) + 4 * index), ld_i32(arg(args, 8) + 4 * index)
        sb = arg(args, 9) + 4 * (matrix * arg(args, 11) + first)
        to = arg(args, 2) + ((matrix * arg(args, 3) + row) * n + first) * item
        for j in range(0, min(width, n - first), lanes):
            total = load(sums + 4 * j) - splat(za) * load(sb + 4 * j)
            total = total - splat(ra) * load(arg(args, 10) + 4 * (first + j))
            if arg(args, 18) != 0:
                total = total + splat(ld_i32(arg(args, 18) + 4 * index))
            count = min(lanes, n - first - j)
            if plain:
                store_n(to + 4 * j, count, total)
            else:
                if arg(args, 13) != 0:
                    scale = f_bcast(arg(args, 12) + 4 * index)
                else:
                    scale = f_load(arg(args, 12) + 4 * (first + j))
                real = rint(to_float(total) * scale) + f_splat(float(arg(args, 14)))
                store(sums + 4 * j, to_int(f_min(f_splat(most), f_max(f_splat(least), real))))
                for i in range(count):
                    st_u8(to + j + i, ld_i32(sums + 4 * (j + i)) & 255)

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        rows, columns, step = arg(args, 3), arg(args, 4), arg(args, 5)
        panels, blocks = (columns + width - 1) // width, (rows + _ROWS - 1) // _ROWS
        scratch = arg(args, 15) + worker * arg(args, 16)
        quads = step // 4
        for unit in range(begin, end):
            block, panel = unit % blocks, unit // blocks % panels
            matrix = unit // blocks // panels
            group = matrix % arg(args, 6)
            row = block * _ROWS
            a = arg(args, 0) + (group * rows + row) * step
            b = arg(args, 1) + matrix * arg(args, 17) + panel * quads * width * 4
            count = min(_ROWS, rows - row)
            if count == _ROWS:
                full(a, step, b, quads, scratch, width * 4)
            else:
                for i in range(count):
                    one(a + i * step, step, b, quads, scratch + i * width * 4, width * 4)
            for i in range(count):
                finish(args, scratch + i * width * 4, group, matrix, row + i, panel * width)

    return kernel
