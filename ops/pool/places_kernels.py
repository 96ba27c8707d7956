"""The kernel of MaxPool that also says where each maximum was; any number dtype, plain layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba.extending import register_jitable

from subgraph.engine.codegen.simd import ld, st
from subgraph.graph.types import numpy_dtype
from subgraph.ops.movement.kernels import arg


def largest(*, dtype: str) -> Callable[..., Any]:
    """Return the kernel; the first of equal elements counts, NaN before all.

    Words::

        0 x [images * channels, D, H, W]  1 y  2 places (int64, in the whole input) or 0
        3..5 input D H W  6..8 output D H W  9..11 kernel D H W  12..14 strides  15..17 dilations
        18..20 pads before  21..23 what a step along D H W adds to a place

    Units: images * channels.
    """
    load, store, put = ld(dtype), st(dtype), st("int64")
    item = numpy_dtype(dtype).itemsize

    @register_jitable
    def taps(at: int, size: int, count: int, step: int) -> tuple[int, int]:
        """Return the first tap inside the input and the one behind the last."""
        if at >= 0 and at + (count - 1) * step < size:
            return 0, count
        return max(0, (step - 1 - at) // step), max(0, min(count, (size - at + step - 1) // step))

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        depth, height, width = arg(args, 3), arg(args, 4), arg(args, 5)
        planes, rows, columns = arg(args, 6), arg(args, 7), arg(args, 8)
        size = depth * height * width
        kernel_w, stride_w, spread_w, pad_w = (
            arg(args, 11),
            arg(args, 14),
            arg(args, 17),
            arg(args, 20),
        )
        along_d, along_h, along_w = arg(args, 21), arg(args, 22), arg(args, 23)
        places = arg(args, 2)
        for row in range(begin * planes * rows, end * planes * rows):
            unit, h0 = row // (planes * rows), row % rows * arg(args, 13) - arg(args, 19)
            d0 = row // rows % planes * arg(args, 12) - arg(args, 18)
            first_d, last_d = taps(d0, depth, arg(args, 9), arg(args, 15))
            first_h, last_h = taps(h0, height, arg(args, 10), arg(args, 16))
            spread_d, spread_h = arg(args, 15), arg(args, 16)
            x, y = arg(args, 0) + unit * size * item, arg(args, 1) + row * columns * item
            for o in range(columns):
                w0 = o * stride_w - pad_w
                first_w, last_w = taps(w0, width, kernel_w, spread_w)
                best, place = load(x), 0
                if first_d < last_d and first_h < last_h and first_w < last_w:
                    d, h = d0 + first_d * spread_d, h0 + first_h * spread_h
                    w = w0 + first_w * spread_w
                    best = load(x + ((d * height + h) * width + w) * item)
                    place = d * along_d + h * along_h + w * along_w
                for i in range(first_d, last_d):
                    d = d0 + i * spread_d
                    for j in range(first_h, last_h):
                        h = h0 + j * spread_h
                        line = x + (d * height + h) * width * item
                        here = d * along_d + h * along_h
                        for k in range(first_w, last_w):
                            w = w0 + k * spread_w
                            value = load(line + w * item)
                            # No branch: nobody can tell which element is the largest.
                            more = (value > best) | ((value != value) & (best == best))
                            best = value if more else best
                            place = here + w * along_w if more else place
                store(y + o * item, best)
                if places != 0:
                    put(places + (row * columns + o) * 8, unit * size + place)

    return kernel
