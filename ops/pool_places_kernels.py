"""The kernel of MaxPool that also says where each maximum was; any number dtype, plain layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from subgraph.engine.simd import ld, st
from subgraph.types import numpy_dtype

from .movement_kernels import arg


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

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        depth, height, width = arg(args, 3), arg(args, 4), arg(args, 5)
        planes, rows, columns = arg(args, 6), arg(args, 7), arg(args, 8)
        size, made = depth * height * width, planes * rows * columns
        for unit in range(begin, end):
            x = arg(args, 0) + unit * size * item
            for o in range(made):
                d0 = o // (rows * columns) * arg(args, 12) - arg(args, 18)
                h0 = o // columns % rows * arg(args, 13) - arg(args, 19)
                w0 = o % columns * arg(args, 14) - arg(args, 20)
                found, place = False, 0
                best = load(x)
                for i in range(arg(args, 9)):
                    d = d0 + i * arg(args, 15)
                    for j in range(arg(args, 10)):
                        h = h0 + j * arg(args, 16)
                        for k in range(arg(args, 11)):
                            w = w0 + k * arg(args, 17)
                            if d < 0 or d >= depth or h < 0 or h >= height or w < 0 or w >= width:
                                continue
                            value = load(x + ((d * height + h) * width + w) * item)
                            if not found or value > best or (value != value and best == best):
                                found, best = True, value
                                place = d * arg(args, 21) + h * arg(args, 22) + w * arg(args, 23)
                store(arg(args, 1) + (unit * made + o) * item, best)
                if arg(args, 2) != 0:
                    put(arg(args, 2) + (unit * made + o) * 8, unit * size + place)

    return kernel
