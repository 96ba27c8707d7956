"""The kernel of DFT and STFT, in double precision.

Stockham's autosort algorithm over the prime factors of the length, with pairs of twos taken as
fours: any length, no reordering, N * (sum of the factors) steps. After C. Van Loan, "Computational
Frameworks for the Fast Fourier Transform", SIAM 1992.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba.extending import register_jitable

from subgraph.engine.codegen.argument_views import view_of
from subgraph.engine.codegen.simd import ld, ld_i64, st
from subgraph.graph.types import numpy_dtype

from .arguments import LinesArguments

_get, _put = ld("float64"), st("float64")


@register_jitable
def fours(a: int, b: int, table: int, size: int, step: int, sign: float) -> None:
    """Compute one pass of factor four from buffer ``a`` to ``b``, both ``size`` complex float64.

    Args:
        a: Address of the input.
        b: Address of the output.
        table: Address of the roots of unity.
        size: Length of the transform.
        step: Product of the factors of earlier passes.
        sign: 1 forward, -1 inverse.
    """
    # Stockham's algorithm writes every pass to the other buffer in an order that makes the last
    # result sorted, so that no permutation by reversed digits is needed.
    parts = size // (4 * step)
    quarter = 16 * step * parts
    for p in range(parts):
        c1, s1 = _get(table + 16 * (p * step)), sign * _get(table + 16 * (p * step) + 8)
        # The second and third power of a root save two loads each; as all is computed in float64,
        # the error is a few units in its last place.
        c2, s2 = c1 * c1 - s1 * s1, 2 * c1 * s1
        c3, s3 = c2 * c1 - s2 * s1, c2 * s1 + s2 * c1
        for q in range(step):
            at = a + 16 * (q + step * p)
            r0, i0 = _get(at), _get(at + 8)
            r1, i1 = _get(at + quarter), _get(at + quarter + 8)
            r2, i2 = _get(at + 2 * quarter), _get(at + 2 * quarter + 8)
            r3, i3 = _get(at + 3 * quarter), _get(at + 3 * quarter + 8)
            er, ei, dr, di = r0 + r2, i0 + i2, r0 - r2, i0 - i2
            fr, fi = r1 + r3, i1 + i3
            gr, gi = sign * (i1 - i3), -sign * (r1 - r3)
            to = b + 16 * (q + 4 * step * p)
            _put(to, er + fr)
            _put(to + 8, ei + fi)
            tr, ti = dr + gr, di + gi
            _put(to + 16 * step, tr * c1 - ti * s1)
            _put(to + 16 * step + 8, tr * s1 + ti * c1)
            tr, ti = er - fr, ei - fi
            _put(to + 32 * step, tr * c2 - ti * s2)
            _put(to + 32 * step + 8, tr * s2 + ti * c2)
            tr, ti = dr - gr, di - gi
            _put(to + 48 * step, tr * c3 - ti * s3)
            _put(to + 48 * step + 8, tr * s3 + ti * c3)


@register_jitable
def factor(a: int, b: int, table: int, size: int, step: int, radix: int, sign: float) -> None:
    """Compute one pass of any factor ``radix``; the other parameters are those of `fours`."""
    parts = size // (radix * step)
    for p in range(parts):
        for k in range(radix):
            # The root of unity of (j, k) times the twiddle of (p, k) is one entry of the table.
            for q in range(step):
                real, imaginary = 0.0, 0.0
                for j in range(radix):
                    place = (j * k * (size // radix) + p * k * step) % size
                    c, s = _get(table + 16 * place), sign * _get(table + 16 * place + 8)
                    at = a + 16 * (q + step * (p + parts * j))
                    x, y = _get(at), _get(at + 8)
                    real += x * c - y * s
                    imaginary += x * s + y * c
                to = b + 16 * (q + step * (radix * p + k))
                _put(to, real)
                _put(to + 8, imaginary)


def lines(*, dtype: str) -> Callable[..., Any]:
    """Return the kernel of `LinesArguments`: it transforms lines.

    Args:
        dtype: Dtype of x and y, ``"float32"`` or ``"float64"``.
    """
    arguments = view_of(LinesArguments)
    load, store = ld(dtype), st(dtype)
    item = numpy_dtype(dtype).itemsize

    @register_jitable
    def read(o: LinesArguments, x: int, buffer: int) -> None:
        """Copy a line to a buffer: windowed, padded with zeros, and completed by symmetry."""
        size, given, numbers = o.size, o.samples, o.x_numbers
        step, window = o.x_step * item, o.window
        for i in range(size):
            real, imaginary = 0.0, 0.0
            if i < given:
                real = float(load(x + i * step))
                if numbers == 2:
                    imaginary = float(load(x + i * step + item))
                if window != 0:
                    factor = float(load(window + i * item))
                    real *= factor
                    imaginary *= factor
            _put(buffer + 16 * i, real)
            _put(buffer + 16 * i + 8, imaginary)
        # A one-sided input has only the first half; the rest of a real signal's transform is its
        # conjugate in reverse order.
        if o.hermitian != 0:
            for i in range(size // 2 + 1, size):
                _put(buffer + 16 * i, _get(buffer + 16 * (size - i)))
                _put(buffer + 16 * i + 8, -_get(buffer + 16 * (size - i) + 8))

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        o = arguments(args)
        size, many, numbers, table = o.size, o.lines, o.y_numbers, o.table
        sign = float(o.direction)
        # ONNX divides by the length in the inverse transform only.
        scale = 1.0 if sign > 0 else 1.0 / size
        for unit in range(begin, end):
            outer, line = unit // many, unit % many
            a = o.scratch + worker * o.scratch_bytes
            b = a + 16 * size
            x = o.x + (outer * o.x_outer + line * o.x_line) * item
            y = o.y + (outer * o.y_outer + line * o.y_line) * item
            read(o, x, a)
            step = 1
            for k in range(o.factor_count):
                radix = ld_i64(o.factors + 8 * k)
                if radix == 4:
                    fours(a, b, table, size, step, sign)
                else:
                    factor(a, b, table, size, step, radix, sign)
                step *= radix
                a, b = b, a
            for i in range(o.results):
                at = y + i * o.y_step * item
                store(at, _get(a + 16 * i) * scale)
                if numbers == 2:
                    store(at + item, _get(a + 16 * i + 8) * scale)

    return kernel
