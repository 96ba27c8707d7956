"""The kernel of RotaryEmbedding: pairs of elements turned by the angle of their position."""

from __future__ import annotations

from collections.abc import Callable

from subgraph.engine.codegen.simd import ld, ld_i64, memcpy, st, vec
from subgraph.ops.movement.kernels import arg


def rotate(*, dtype: str, lanes: int, interleaved: bool) -> Callable[..., None]:
    """Return the kernel; a pair is (2 i, 2 i + 1) when ``interleaved``, else (i, i + half).

    Words::

        0 x  1 y  2 cosines  3 sines, rows of "half" elements  4 positions (int64; 0: none, the
        row of a token is its number)  5 heads  6 tokens of a sequence  7 elements of a head
        8 half  9, 10, 11 bytes between batch entries, heads, tokens  12 rows of the cosines

    Units: batch * tokens.
    """
    v = vec(dtype, lanes)
    load_m, store_m, mask_n, item = v.load_m, v.store_m, v.mask_n, v.itemsize
    load, store = ld(dtype), st(dtype)

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        tokens, size, half = arg(args, 6), arg(args, 7), arg(args, 8)
        part = half * item
        for unit in range(begin, end):
            row = unit
            if arg(args, 4) != 0:
                row = min(max(ld_i64(arg(args, 4) + 8 * unit), 0), arg(args, 12) - 1)
            cosines, sines = arg(args, 2) + row * part, arg(args, 3) + row * part
            base = unit // tokens * arg(args, 9) + unit % tokens * arg(args, 11)
            for head in range(arg(args, 5)):
                x = arg(args, 0) + base + head * arg(args, 10)
                y = arg(args, 1) + base + head * arg(args, 10)
                if interleaved:
                    for i in range(half):
                        at = 2 * i * item
                        a, b = load(x + at), load(x + at + item)
                        c, s = load(cosines + i * item), load(sines + i * item)
                        store(y + at, a * c - b * s)
                        store(y + at + item, a * s + b * c)
                else:
                    for i in range(0, half, lanes):
                        at, mask = i * item, mask_n(half - i)
                        p, q = load_m(x + at, mask), load_m(x + part + at, mask)
                        e, f = load_m(cosines + at, mask), load_m(sines + at, mask)
                        store_m(y + at, mask, p * e - q * f)
                        store_m(y + part + at, mask, p * f + q * e)
                memcpy(y + 2 * part, x + 2 * part, size * item - 2 * part)

    return kernel
