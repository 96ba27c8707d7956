"""The kernel of MaxPool with the indices of the maxima: plain layout, any dtype of numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from subgraph.engine.codegen.argument_views import view_of
from subgraph.engine.codegen.simd import ld, st
from subgraph.graph.types import numpy_dtype

from .arguments import PoolIndicesArguments
from .kernels import window_taps


def max_pool_indices(*, dtype: str) -> Callable[..., Any]:
    """Return the kernel of `PoolIndicesArguments`.

    The maximum of equal elements is the first one; NaN counts as larger than all others. The index
    of a window without pixels of the image is -1.

    Args:
        dtype: Dtype of the elements.
    """
    arguments = view_of(PoolIndicesArguments)
    load, store, put = ld(dtype), st(dtype), st("int64")
    numbers = numpy_dtype(dtype)
    item = numbers.itemsize
    first_tap, end_tap = window_taps()
    lowest = numbers.type(np.iinfo(numbers).min if "int" in dtype else -np.inf)

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        a = arguments(args)
        depth, height, width = a.image_depth, a.image_height, a.image_width
        planes, rows, columns = a.output_depth, a.output_height, a.output_width
        size = depth * height * width
        kernel_w, stride_w = a.kernel_width, a.stride_width
        spread_w, pad_w = a.dilation_width, a.pad_width
        along_d, along_h, along_w = a.index_depth, a.index_height, a.index_width
        indices = a.indices
        for row in range(begin * planes * rows, end * planes * rows):
            unit, h0 = row // (planes * rows), row % rows * a.stride_height - a.pad_height
            d0 = row // rows % planes * a.stride_depth - a.pad_depth
            spread_d, spread_h = a.dilation_depth, a.dilation_height
            first_d = first_tap(d0, spread_d)
            last_d = end_tap(d0, spread_d, a.kernel_depth, depth)
            first_h = first_tap(h0, spread_h)
            last_h = end_tap(h0, spread_h, a.kernel_height, height)
            x, y = a.x + unit * size * item, a.y + row * columns * item
            first = unit * size
            for o in range(columns):
                w0 = o * stride_w - pad_w
                first_w = first_tap(w0, spread_w)
                last_w = end_tap(w0, spread_w, kernel_w, width)
                best, index = lowest, -1
                if first_d < last_d and first_h < last_h and first_w < last_w:
                    d, h = d0 + first_d * spread_d, h0 + first_h * spread_h
                    w = w0 + first_w * spread_w
                    best = load(x + ((d * height + h) * width + w) * item)
                    index = first + d * along_d + h * along_h + w * along_w
                for i in range(first_d, last_d):
                    d = d0 + i * spread_d
                    for j in range(first_h, last_h):
                        h = h0 + j * spread_h
                        line = x + (d * height + h) * width * item
                        here = first + d * along_d + h * along_h
                        for k in range(first_w, last_w):
                            w = w0 + k * spread_w
                            value = load(line + w * item)
                            # Selects instead of branches, which would be unpredictable.
                            # The first NaN replaces any number, and nothing replaces it.
                            more = (value > best) | ((value != value) & (best == best))
                            best = value if more else best
                            index = here + w * along_w if more else index
                store(y + o * item, best)
                put(indices + (row * columns + o) * 8, index)

    return kernel
