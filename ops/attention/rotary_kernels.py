"""Kernel of RotaryEmbedding: rotates pairs of elements by the angle of their position.

After Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021.
"""

from __future__ import annotations

from collections.abc import Callable

from subgraph.engine.codegen.argument_views import view_of
from subgraph.engine.codegen.simd import ld, ld_i64, memcpy, st, vec

from .arguments import RotateArguments


def rotate(*, dtype: str, lanes: int, interleaved: bool) -> Callable[..., None]:
    """Return the kernel of `RotateArguments`.

    Args:
        dtype: Of the elements.
        lanes: Elements of a vector.
        interleaved: A pair is the elements (2 i, 2 i + 1) of a head; else (i, i + half).
    """
    arguments = view_of(RotateArguments)
    v = vec(dtype, lanes)
    load_m, store_m, mask_n, item = v.load_m, v.store_m, v.mask_n, v.itemsize
    load, store = ld(dtype), st(dtype)

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        r = arguments(args)
        tokens, size, half = r.tokens, r.size, r.half
        part = half * item
        for unit in range(begin, end):
            row = unit
            if r.positions != 0:
                # Positions are data: one that is out of range must not read outside the caches.
                row = min(max(ld_i64(r.positions + 8 * unit), 0), r.rows - 1)
            cosines, sines = r.cosines + row * part, r.sines + row * part
            base = unit // tokens * r.batch_stride + unit % tokens * r.token_stride
            for head in range(r.heads):
                x = r.x + base + head * r.head_stride
                y = r.y + base + head * r.head_stride
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
