"""Pooling on the CPU device: windows and whole images, in both layouts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from subgraph.engine.codegen.arguments import KernelArguments
from subgraph.engine.planner.layouts import block_lanes
from subgraph.engine.planner.lowering import Lowering, Unsupported, lowering
from subgraph.engine.planner.operands import Argument, Layout, Operand
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.graph.graph import Node
from subgraph.operators.schema import INTERNAL_DOMAIN
from subgraph.ops.movement.geometry import (
    Geometry,
    Triple,
    auto_pad,
    ints,
    triple,
    window_geometry,
)
from subgraph.ops.movement.layout_conversion import blocked, blocked_target, convert_output
from subgraph.ops.shared.tile_planning import (
    FLOATS,
    Tiles,
    grain,
    shared,
    tiles,
    units_wanted,
)

from .arguments import (
    GlobalPoolArguments,
    PoolBytesArguments,
    PoolIndicesArguments,
    PoolRowsArguments,
    PoolWindowArguments,
)
from .windows import INT8

_MAX_LINE_COLUMNS = 4096  # input columns of a line of the kernel `rows`: 16 KiB, half of L1
_MAX_COLUMNS_OF_LINES = 512  # columns of several short lines computed together (estimate)
_BOTH: tuple[Layout, ...] = ("plain", "blocked")
_LAYOUTS: tuple[Layout, ...] = (*_BOTH, "bfloat16")
_KINDS = {"MaxPool": "max", "FusedQMaxPool": "max", "AveragePool": "average", "LpPool": "l"}


@lowering("MaxPool", "AveragePool", "LpPool", dtypes=(*FLOATS, *INT8), layouts=_LAYOUTS)
@lowering("FusedQMaxPool", domain=INTERNAL_DOMAIN, dtypes=INT8, layouts=_BOTH)
def window(node: Node, low: Lowering) -> None:
    """Lower MaxPool, AveragePool and LpPool, and MaxPool of bytes between equal scales."""
    x, y = low.input(0), low.output()
    if not y.size:
        return
    if len(low.outputs) > 1 and len(node.outputs) > 1:
        _max_pool_indices(node, low)
        return
    g, kind = pool_geometry(node, x, y), pool_kind(node)
    stored = "bfloat16" if x.layout == "bfloat16" else ""
    if stored and y.layout != "blocked":
        raise Unsupported("windows of bfloat16 in the plain layout")
    if stored:
        y.store_as("bfloat16")  # it has readers of bfloat16, or x would be float32
    elif x.dtype in FLOATS and _covers_image(g):
        emit_global_pool(low, x, y, kind)
        return
    lanes, images = block_lanes(x.dtype) if x.layout == "plain" else x.lanes, x.shape[0]
    source, target, blocks, pixel = x, y, x.shape[1], x.itemsize
    plain = x.layout == "plain" and x.dtype in FLOATS and not _uses_blocks(x, lanes, g)
    if not plain:
        source, target = blocked(low, lanes, x), blocked_target(low, lanes, y)
        blocks, pixel = -(-blocks // lanes), pixel * lanes
    if x.dtype in INT8 and g.kernel[0] == g.source[0] == g.target[0] == 1:
        _emit_byte_maxima(low, g, source, target, images * blocks)
        convert_output(low, y, target)
        return
    outer, high = images * blocks * g.target[0], g.target[1]
    rows = shared(high, high, outer, units_wanted(low.threads), 1, 1)
    image_in, image_out = (blocks * math.prod(s) * pixel for s in (g.source, g.target))
    common: dict[str, Any] = {
        **pool_arguments(node, x, g),
        "x": source,
        "y": target,
        "blocks": blocks,
        "rows": rows,
        "x_image": image_in,
        "y_image": image_out,
    }
    if plain:
        kernel, arguments = _rows_of_images(low, tiles(x.dtype), g, kind, common)
    else:
        form = {"storage": stored} if stored else {}
        kernel = Kernel(
            "subgraph.ops.pool.kernels", "window", dtype=x.dtype, lanes=lanes, kind=kind, **form
        )
        arguments = PoolWindowArguments(**common)
    units = outer * -(-high // rows)
    work = y.size * g.taps
    low.emit(
        kernel,
        arguments,
        units,
        grain=grain(units, 2 * work),
        flops=work,
        bytes=images * (image_in + image_out),
    )
    convert_output(low, y, target)


def _emit_byte_maxima(low: Lowering, g: Geometry, x: Operand, y: Operand, planes: int) -> None:
    """Emit MaxPool over bytes in two dimensions, in blocks; ``planes`` is the number of blocks."""
    units, reach = planes * g.target[1], max(g.reach(2, g.target[2]), g.pads[2] + g.source[2])
    scratch = low.worker_scratch(reach * x.lanes)
    arguments = PoolBytesArguments(
        x=x, y=y, scratch_size=reach * x.lanes, **scratch, **g.arguments()
    )
    work = y.size * (g.kernel[1] + g.kernel[2])
    low.emit(
        Kernel("subgraph.ops.pool.byte_kernels", "max_pool", dtype=x.dtype),
        arguments,
        units,
        grain=grain(units, 2 * work),
        flops=work,
        bytes=x.nbytes + y.nbytes,
    )


def _covers_image(g: Geometry) -> bool:
    """Return whether there is one window, as large as the image."""
    alone = g.target == g.dilations == (1, 1, 1)
    return alone and g.kernel == g.source and not any(g.pads)


def _rows_of_images(
    low: Lowering, of: Tiles, g: Geometry, kind: str, common: Mapping[str, Any]
) -> tuple[Kernel, KernelArguments]:
    """Return the kernel `rows`, which pools the plain layout, and its arguments.

    Args:
        low: Collects scratch memory.
        of: The tiles of the dtype.
        g: Sizes of the pooling.
        kind: The kind of pooling.
        common: The arguments that `window` has, too, except ``blocks``.
    """
    stride, taps = g.strides[2], g.kernel[2]
    usual, reach = stride <= 2, (taps - 1) * g.dilations[2]
    columns = min(g.target[2], max(1, _MAX_LINE_COLUMNS // stride))
    # A line is a vector of windows longer than its columns, as the last vector may read past them.
    length = stride * (columns + of.lanes) + reach
    lines = max(1, min(g.target[1], _MAX_COLUMNS_OF_LINES // length))
    nbytes = (lines * length + 2 * (columns + of.lanes)) * of.item
    kernel = Kernel(
        "subgraph.ops.pool.row_kernels",
        "rows",
        dtype=of.dtype,
        lanes=of.lanes,
        kind=kind,
        stride=stride if usual else 0,
        across=taps if usual and of.dtype == "float32" and taps in (2, 3) else 0,
    )
    memory = low.worker_scratch(nbytes)
    return kernel, PoolRowsArguments(columns=columns, lines=lines, **memory, **common)


def _uses_blocks(x: Operand, lanes: int, g: Geometry) -> bool:
    """Return whether plain images are converted to blocks, which takes less time.

    Rows are shorter than a vector, or windows are further apart than vectors of a row can serve.
    """
    if g.strides[2] > 3 and lanes > 1:
        return x.shape[1] >= lanes
    return g.target[2] < lanes and x.shape[1] % lanes == 0


def _max_pool_indices(node: Node, low: Lowering) -> None:
    """Lower MaxPool with the indices of the maxima.

    Raises:
        Unsupported: The images are in blocks.
    """
    x, y = low.input(0), low.output()
    if x.layout != "plain":
        raise Unsupported(f"indices of maxima in layout {x.layout}")
    g = pool_geometry(node, x, y)
    depth, height, width = g.source
    if node.attrs.get("storage_order", 0):
        # Column-major: the first dimension of the image is innermost; missing ones have size 1.
        along = (1, depth, depth * height)
    else:
        along = (height * width, width, 1)
    arguments = PoolIndicesArguments(
        x=x,
        y=y,
        indices=low.output(1),
        index_depth=along[0],
        index_height=along[1],
        index_width=along[2],
        **g.arguments(),
    )
    units = x.shape[0] * x.shape[1]
    work = units * g.pixels * g.taps
    kernel = Kernel("subgraph.ops.pool.maxpool_indices_kernels", "max_pool_indices", dtype=x.dtype)
    low.emit(kernel, arguments, units, grain=grain(units, 2 * work), flops=work, bytes=x.nbytes)


@lowering("GlobalMaxPool", "GlobalAveragePool", "GlobalLpPool", dtypes=FLOATS, layouts=_LAYOUTS)
def global_pool(node: Node, low: Lowering) -> None:
    """Lower global pooling."""
    x, y = low.input(0), low.output()
    if x.rank < 3:
        raise Unsupported("global pooling of an input without pixels")
    if y.size:
        emit_global_pool(low, x, y, pool_kind(node))


def emit_global_pool(low: Lowering, x: Operand, y: Argument, kind: str) -> None:
    """Emit global pooling.

    Args:
        low: Collects the plan's steps.
        x: Images, ``[N, C, *spatial]``, in any layout.
        y: Result of one pixel for each image, in the layout of x; in blocks if that is "bfloat16".
        kind: ``"max"``, ``"min"``, ``"average"``, ``"l1"`` or ``"l2"``.
    """
    of = tiles(x.dtype, x.lanes if x.layout == "blocked" else 0)
    plain, rounded = x.layout == "plain", x.layout == "bfloat16"
    pixels = math.prod(x.shape[2:])
    item = of.item if plain else of.lanes * of.item
    blocks = x.shape[1] if plain else -(-x.shape[1] // of.lanes)
    kernel = Kernel(
        "subgraph.ops.pool.kernels",
        "global_pool",
        dtype=of.dtype,
        lanes=of.lanes,
        kind=kind,
        plain=plain,
        **({"storage": "bfloat16"} if rounded else {}),
    )
    units = x.shape[0] * blocks
    low.emit(
        kernel,
        GlobalPoolArguments(
            x=x,
            y=y,
            pixels=pixels,
            blocks=blocks,
            # Two blocks are one of bfloat16, whose pixels have as many bytes.
            x_image=-(-blocks // (1 + rounded)) * pixels * item,
            y_image=blocks * item,
        ),
        units,
        grain=grain(units, 2 * x.size),
        flops=x.size,
        bytes=x.nbytes + units * item,
    )


def pool_kind(node: Node) -> str:
    """Return the kind of pooling: ``"max"``, ``"average"``, or by ``p`` ``"l1"`` or ``"l2"``.

    Raises:
        Unsupported: ``p`` is neither 1 nor 2.
    """
    kind = _KINDS[node.op_type.removeprefix("Global")]
    if kind != "l":
        return kind
    power = float(node.attrs.get("p", 2))
    if power not in (1.0, 2.0):
        raise Unsupported(f"{node.op_type} with p = {power:g}; 1 and 2 have kernels")
    return f"l{int(power)}"


def pool_geometry(node: Node, x: Operand, y: Operand) -> Geometry:
    """Return the sizes of a pooling operator.

    Args:
        node: The node.
        x: Input, ``[N, C, *spatial]``.
        y: Output, ``[N, C, *windows]``.

    Raises:
        Unsupported: It has more than three spatial dimensions.
    """
    kernel = ints(node, "kernel_shape", x.rank - 2, 1)
    return window_geometry(node, x, y, kernel, (1, x.shape[1], x.shape[1]))


def pool_arguments(node: Node, x: Operand, g: Geometry) -> dict[str, int]:
    """Return the fields of `PoolWindowArguments` that describe the windows.

    Args:
        node: The node.
        x: Input, ``[N, C, *spatial]``.
        g: Sizes of the pooling.
    """
    after = trailing_pads(node, g, x.rank - 2)
    names = ("after_depth", "after_height", "after_width")
    include = int(node.attrs.get("count_include_pad", 0))
    return {**g.arguments(), "count_include_pad": include, **dict(zip(names, after, strict=True))}


def trailing_pads(node: Node, g: Geometry, rank: int) -> Triple:
    """Return the pads after each dimension, which an average with ``count_include_pad`` counts.

    Args:
        node: The node.
        g: Sizes of the pooling.
        rank: Number of spatial dimensions of the node.
    """
    mode = auto_pad(node)
    if mode == "VALID":
        return 0, 0, 0
    if mode == "NOTSET":
        return triple(ints(node, "pads", 2 * rank, 0)[rank:], 0)
    beyond = [g.reach(k, g.target[k]) - g.source[k] - g.pads[k] for k in range(3)]
    return triple([max(pad, 0) for pad in beyond], 0)
