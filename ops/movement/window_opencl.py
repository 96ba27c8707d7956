"""Sizes of images and windows as arguments of OpenCL kernels."""

from __future__ import annotations

from collections.abc import Iterable

from subgraph.engine.planner.lowering import Unsupported

from .geometry import Geometry

LINE_PIXELS = 16  # output pixels of a row that a work-item of a CPU computes at a time (estimate)
# Bound of elements along a dimension, so that the sum of two fits in 32 bits.
MAX_EXTENT = 1 << 30


def require_positions(windows: Iterable[tuple[int, int, int]]) -> None:
    """Require that the positions of windows fit in the kernels' 32-bit integers.

    Args:
        windows: Of each dimension the largest position, the pads before it, and the elements from
            the first tap of a window to the last.

    Raises:
        Unsupported: A sum of the three may not fit.
    """
    for last, pad, span in windows:
        if last + abs(pad) + span >= 1 << 31:
            raise Unsupported(f"windows of {span} elements and pads of {pad} around {last}")


def window_sizes(g: Geometry) -> list[int]:
    """Return the kernel arguments WINDOW_SIZES of ``windows.cl``.

    Raises:
        Unsupported: Positions of windows may exceed the kernels' 32-bit integers.
    """
    for k in range(3):
        first, last = g.pads[k], g.reach(k, g.target[k] + LINE_PIXELS) + g.source[k]
        if not -MAX_EXTENT < first < MAX_EXTENT or last >= MAX_EXTENT:
            raise Unsupported(f"windows over {last} elements, pads of {first}")
    return [*g.arguments().values()]
