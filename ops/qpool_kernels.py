"""Pooling of quantised values in blocks of 16 channels: largest bytes, exact."""

from __future__ import annotations

from collections.abc import Callable

from subgraph.engine.simd import vec
from subgraph.engine.tile import arg

_BLOCK = 16


def largest(*, dtype: str) -> Callable[..., None]:
    """Return the kernel of MaxPool over ``[N * C / 16][H][W][16]`` bytes.

    Words (8 to 25 as in ``conv_kernels.direct``): ``0 x, 1 y``. A window reaches no pixel outside
    the image that counts. Units: planes * output H.
    """
    v = vec(dtype, _BLOCK)
    load, store, splat, most = v.load, v.store, v.splat, v.max
    least = -128 if dtype == "int8" else 0

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        height, width = arg(args, 9), arg(args, 10)
        oh_n, ow_n, kh, kw = arg(args, 12), arg(args, 13), arg(args, 15), arg(args, 16)
        dh, dw = arg(args, 21), arg(args, 22)
        for unit in range(begin, end):
            plane, oh = unit // oh_n, unit % oh_n
            x = arg(args, 0) + plane * height * width * _BLOCK
            y = arg(args, 1) + unit * ow_n * _BLOCK
            h0 = oh * arg(args, 18) - arg(args, 24)
            for ow in range(ow_n):
                w0 = ow * arg(args, 19) - arg(args, 25)
                found = splat(least)
                for i in range(kh):
                    h = h0 + i * dh
                    if h < 0 or h >= height:
                        continue
                    for j in range(kw):
                        w = w0 + j * dw
                        if 0 <= w < width:
                            found = most(load(x + (h * width + w) * _BLOCK), found)
                store(y + ow * _BLOCK, found)

    return kernel
