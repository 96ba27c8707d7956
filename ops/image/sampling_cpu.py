"""Operators that sample images at computed points, on the CPU device."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from subgraph.dtypes import FLOATS
from subgraph.engine.planner.lowering import Lowering, Unsupported, lowering
from subgraph.engine.planner.operands import Operand
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.graph.graph import Node
from subgraph.graph.limits import check_memory
from subgraph.graph.types import numpy_dtype
from subgraph.operators.requirements import decoded
from subgraph.operators.schema import is_before
from subgraph.ops.checks.cpu import emit_range_check
from subgraph.ops.elementwise.cpu import cast_to, emit_cast, temporary, widened
from subgraph.ops.movement.copies_cpu import emit_copy
from subgraph.ops.movement.cpu import known
from subgraph.ops.movement.layout_conversion import blocked, blocked_target, convert_output
from subgraph.ops.movement.types import whole_numbers
from subgraph.ops.shared.delegation import delegate
from subgraph.ops.shared.strides import contiguous
from subgraph.ops.shared.tile_planning import tiles

from .arguments import (
    MAX_PIXELS,
    MAX_SAMPLES,
    TAPS,
    GridSampleArguments,
    MaxRoiPoolArguments,
    RoiAlignArguments,
    RoiAverageArguments,
    SampleCountArguments,
)
from .reference import MODES, pixel_coordinates

_MIN_PIXELS_PER_THREAD = 2048  # output pixels; an estimate
_MAX_SCRATCH = 1 << 26  # bytes of a thread, for the weights of a region; an estimate
# Channels of a work unit of RoiAlign, which share the weights of a region; an estimate.
_CHANNELS = 32
_TABLE = 1024  # neighbouring pixels of the points of a block; an estimate
_MAX_EXACT_FLOAT32 = 1 << 24  # coordinates are clamped in float32, which holds integers up to here


@lowering("RoiAlign", dtypes=FLOATS)
def roi_align(node: Node, low: Lowering) -> None:
    """Lower RoiAlign; a work unit is a block of channels of a region, for maxima one channel."""
    x, numbers, y = low.input(0), low.input(2), low.output()
    if y.size == 0:
        return
    if x.size == 0:
        raise Unsupported("RoiAlign of an empty image")
    converted, result = widened(low, x, y)
    regions = cast_to(low, low.input(1), converted.dtype)
    emit_range_check(low, numbers, "batch_indices", 0, x.shape[0] - 1)
    images = cast_to(low, numbers, "int64")
    usual = "output_half_pixel" if is_before(node, 16) else "half_pixel"
    half = decoded(node.attrs.get("coordinate_transformation_mode", usual)) == "half_pixel"
    ratio = int(node.attrs.get("sampling_ratio", 0))
    shared: dict[str, Any] = {
        "regions": regions,
        "bins_down": y.shape[2],
        "bins_across": y.shape[3],
        "scale": float(node.attrs.get("spatial_scale", 1.0)),
        "half_pixel": int(half),
    }
    counted, most = ("pixels", MAX_PIXELS) if ratio else ("samples", MAX_SAMPLES)
    report = low.report(f"rois ({counted} of a bin, -1 if not finite)")
    checked = SampleCountArguments(count=regions.shape[0], most=most, report=report, **shared)
    kernel = Kernel("subgraph.ops.image.roi_kernels", "check_sample_count", dtype=converted.dtype)
    low.emit(kernel, checked, 1, bytes=regions.nbytes)
    common: dict[str, Any] = {
        **shared,
        "x": converted,
        "numbers": images,
        "y": result,
        "images": x.shape[0],
        "channels": x.shape[1],
        "height": x.shape[2],
        "width": x.shape[3],
        "samples": ratio,
    }
    bins = math.prod(y.shape[2:])
    grain = max(1, _MIN_PIXELS_PER_THREAD // (4 * bins))
    if decoded(node.attrs.get("mode", "avg")) == "max":
        kernel = Kernel("subgraph.ops.image.roi_kernels", "roi_largest", dtype=converted.dtype)
        arguments = RoiAlignArguments(**common)
        low.emit(kernel, arguments, y.size // bins, grain=grain, bytes=4 * y.nbytes)
    else:
        _emit_averages(low, converted, y, common, grain)
    emit_cast(low, result, y)


def _emit_averages(
    low: Lowering, x: Operand, y: Operand, common: Mapping[str, Any], grain: int
) -> None:
    """Emit RoiAlign by averages.

    Args:
        low: Collects the plan's steps and scratch memory.
        x: The images in a dtype in which the kernel computes.
        y: The output.
        common: The arguments that `roi_largest` has, too.
        grain: Channels of regions for which a thread is started.
    """
    (channels, height, width), across = x.shape[1:], y.shape[3]
    lanes = low.lanes(x.dtype)
    nbytes = 16 * (height + across * width) + 8 * across + (width + lanes) * x.itemsize
    if nbytes > _MAX_SCRATCH:
        raise Unsupported(f"RoiAlign of rows of {width} into {across} bins")
    each = min(channels, _CHANNELS)
    arguments = RoiAverageArguments(unit_channels=each, **low.worker_scratch(nbytes), **common)
    kernel = Kernel("subgraph.ops.image.roi_kernels", "roi_average", dtype=x.dtype, lanes=lanes)
    units = y.shape[0] * -(-channels // each)
    low.emit(kernel, arguments, units, grain=-(-grain // each), bytes=4 * y.nbytes)


@lowering("MaxRoiPool", dtypes=FLOATS)
def max_roi_pool(node: Node, low: Lowering) -> None:
    """Lower MaxRoiPool; a work unit is a channel of a region."""
    x, y = low.input(0), low.output()
    if y.size == 0:
        return
    if x.size == 0:
        raise Unsupported("MaxRoiPool of an empty image")
    converted, result = widened(low, x, y)
    rois = cast_to(low, low.input(1), converted.dtype)
    emit_range_check(low, rois, "rois", 0, x.shape[0] - 1, step=5)
    arguments = MaxRoiPoolArguments(
        x=converted,
        regions=rois,
        y=result,
        images=x.shape[0],
        channels=x.shape[1],
        height=x.shape[2],
        width=x.shape[3],
        bins_down=y.shape[2],
        bins_across=y.shape[3],
        scale=float(node.attrs.get("spatial_scale", 1.0)),
    )
    bins = math.prod(y.shape[2:])
    kernel = Kernel("subgraph.ops.image.roi_kernels", "max_roi_pool", dtype=converted.dtype)
    low.emit(
        kernel,
        arguments,
        y.size // bins,
        grain=max(1, _MIN_PIXELS_PER_THREAD // (4 * bins)),
        bytes=x.nbytes,
    )
    emit_cast(low, result, y)


@lowering("GridSample", dtypes=FLOATS)
def grid_sample(node: Node, low: Lowering) -> None:
    """Lower GridSample; a work unit is a block of points, whose neighbours serve all channels."""
    x, y = low.input(0), low.output()
    if y.size == 0:
        return
    rank = x.rank - 2
    large = math.prod(x.shape[2:]) >= 1 << 31 or any(n > _MAX_EXACT_FLOAT32 for n in x.shape[2:])
    if x.size == 0 or not 1 <= rank <= 3 or large:
        raise Unsupported(f"GridSample of {x.shape}")
    converted, result = widened(low, x, y)
    grid = low.input(1)
    grid = grid if grid.dtype in ("float32", "float64") else cast_to(low, grid, "float32")
    points = math.prod(y.shape[2:])
    usual = "bilinear" if is_before(node, 20) else "linear"
    mode = decoded(node.attrs.get("mode", usual))
    mode = MODES.get(mode, mode)
    around = TAPS[mode] ** rank
    of = tiles(converted.dtype)
    # In the blocked layout channels are read as vectors. Converting the image to it and back costs
    # less than that saves if enough pixels are read.
    blocks = low.kernels == "CPU" and x.shape[1] >= of.lanes > 1
    blocks = blocks and 2 * points * around >= math.prod(x.shape[2:])
    source = blocked(low, of.lanes, converted) if blocks else converted
    target = blocked_target(low, of.lanes, result) if blocks else result
    kernel = Kernel(
        "subgraph.ops.image.sampling_kernels",
        "grid_sample",
        dtype=converted.dtype,
        lanes=of.lanes,
        grid=grid.dtype,
        mode=mode,
        padding=decoded(node.attrs.get("padding_mode", "zeros")),
        corners=bool(node.attrs.get("align_corners", 0)),
        blocked=blocks,
    )
    # Whole vectors of points, since the kernel reads the table of a block in vectors.
    block = max(1, _TABLE // around // of.lanes) * of.lanes
    space = (1,) * (3 - rank) + x.shape[2:]
    channels = -(-x.shape[1] // of.lanes) if blocks else x.shape[1]
    arguments = GridSampleArguments(
        x=source,
        grid=grid,
        y=target,
        channels=channels,
        image=space,
        dimensions=rank,
        points=points,
        block=block,
        **low.worker_scratch(192 + around * block * (4 + converted.itemsize)),
    )
    grain = max(1, _MIN_PIXELS_PER_THREAD // (x.shape[1] * block))
    units = x.shape[0] * -(-points // block)
    low.emit(kernel, arguments, units, grain=grain, bytes=2 * y.nbytes)
    convert_output(low, result, target)
    emit_cast(low, result, y)


@lowering("AffineGrid", dtypes=("float32", "float64"))
def affine_grid(node: Node, low: Lowering) -> None:
    """Lower AffineGrid of a known size: a product of theta with the coordinates of all pixels."""
    theta, y = low.input(0), low.output()
    if y.size == 0:
        raise Unsupported("an empty AffineGrid")
    space, corners = whole_numbers(known(low, 1))[2:], bool(node.attrs.get("align_corners", 0))
    count = math.prod(space)
    check_memory(8 * (2 * len(space) + 2) * count, f"coordinates of {count} pixels")
    points = pixel_coordinates(space, corners).reshape(count, -1).T
    coordinates = np.ascontiguousarray(points, numpy_dtype(theta.dtype))
    grid = Operand(f"{node.name}.grid", theta.dtype, coordinates.shape)
    low.set_constant(grid, coordinates)
    rank, count = len(space), coordinates.shape[1]
    # The product has the coordinates as rows; the copy below transposes it to a point after the
    # other.
    product = temporary(low, theta.dtype, (theta.shape[0], rank, count))
    delegate(low, "MatMul", [theta, grid], product)
    shape = (theta.shape[0], count, rank)
    steps = (rank * count, 1, count)
    emit_copy(low, product, y, shape, steps, contiguous(shape), item=theta.itemsize)
