"""Pooling on OPENCL: a work-item computes a window; a global pool has one window for each image."""

from __future__ import annotations

import math

from subgraph.dtypes import FLOATS, compute_dtype
from subgraph.engine.planner.lowering import Unsupported
from subgraph.engine.planner.operands import Argument
from subgraph.graph.graph import Node
from subgraph.opencl.lowering import ClLowering, cl_lowering
from subgraph.ops.elementwise.cpu import emit_cast, widened
from subgraph.ops.movement.geometry import Geometry
from subgraph.ops.movement.window_opencl import MAX_EXTENT, window_sizes
from subgraph.ops.shared.opencl_code import line, program, register, require

from .cpu import pool_geometry, pool_kind, trailing_pads
from .windows import INT8

_LOWEST = {"int8": "CHAR_MIN", "uint8": "0"}  # in OpenCL C; floats begin at -INFINITY


@cl_lowering("MaxPool", "AveragePool", "LpPool", dtypes=(*FLOATS, *INT8))
def window(node: Node, low: ClLowering) -> None:
    """Lower MaxPool, AveragePool and LpPool."""
    x, out = low.input(0), low.output()
    require(low, compute_dtype(out.dtype))
    if out.size:
        g = pool_geometry(node, x, out)
        include = int(node.attrs.get("count_include_pad", 0))
        _pool(low, g, trailing_pads(node, g, x.rank - 2), include)


@cl_lowering("GlobalMaxPool", "GlobalAveragePool", "GlobalLpPool", dtypes=FLOATS)
def global_pool(node: Node, low: ClLowering) -> None:
    """Lower global pooling: a window as large as the image."""
    x, out = low.input(0), low.output()
    require(low, compute_dtype(out.dtype))
    if x.rank < 3:
        raise Unsupported("global pooling of an input without pixels")
    if out.size:
        image, ones = (1, 1, math.prod(x.shape[2:])), (1, 1, 1)
        channels = x.shape[1]
        g = Geometry(x.shape[0], 1, channels, channels, image, ones, image, ones, ones, (0, 0, 0))
        _pool(low, g, (0, 0, 0), 0)


def _pool(low: ClLowering, g: Geometry, after: tuple[int, int, int], include: int) -> None:
    """Launch the kernel.

    Args:
        low: Collects the plan's launches.
        g: Sizes of the pooling.
        after: Pads after each dimension.
        include: 1 if averages count the pixels of the padding, 0 if only those of the image.

    Raises:
        Unsupported: Positions may exceed the kernel's 32-bit integers.
    """
    if max(after) >= MAX_EXTENT:
        raise Unsupported(f"pads of {max(after)} elements")
    node, out = low.node, low.output()
    kind, dtype = pool_kind(node), compute_dtype(out.dtype)
    x, y = widened(low, low.input(0), out, dtype)
    indices = low.outputs[1:]
    source = program(
        "pool/kernels",
        T=register(dtype),
        POOL=f"POOL_{kind.upper()}",
        LOWEST=_LOWEST.get(dtype, "-INFINITY") if kind == "max" else "0",
        INCLUDE=include,
        INDICES=1 + int(node.attrs.get("storage_order", 0)) if indices else 0,
    )
    arguments: list[Argument] = [y.size, x, y, *window_sizes(g), *after, *indices]
    low.launch(
        source,
        "window",
        arguments,
        *line(low, y.size),
        flops=y.size * g.taps,
        bytes=x.nbytes + y.nbytes,
    )
    emit_cast(low, y, out)
