"""Pooling of quantised values on the CPU device, in blocks of channels."""

from __future__ import annotations

from subgraph.engine.kernel import Kernel
from subgraph.engine.lowering import Lowering, Unsupported, lowering
from subgraph.graph import Node

from .pool_cpu import pool_geometry
from .tile_planning import grain


@lowering(
    "FusedQMaxPool",
    domain="subgraph.cpu",
    dtypes=("uint8", "int8"),
    layouts=("plain", "blocked"),
)
def max_pool(node: Node, low: Lowering) -> None:
    """Lower MaxPool between equal scales."""
    x, y = low.given(0), low.output()
    if not y.size:
        return
    if x.layout != "blocked" or y.layout != "blocked":
        raise Unsupported("MaxPool of bytes in the plain layout")
    g = pool_geometry(node, x, y)
    if g.kernel[0] != 1 or g.source[0] != 1:
        raise Unsupported("MaxPool of bytes in three dimensions")
    units = x.shape[0] * x.blocks * g.target[1]
    low.emit(
        Kernel("qpool_kernels", "largest", dtype=x.dtype),
        [x, y, 0, 0, 0, 0, 0, 0, *g.words()],
        units,
        grain=grain(units, g.taps * y.size),
        bytes=x.nbytes + y.nbytes,
    )
