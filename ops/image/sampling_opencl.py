"""Operators that sample images at computed points, on OPENCL: other kernels than the CPU's."""

from __future__ import annotations

from subgraph.engine.toolchain.kernel import Kernel
from subgraph.opencl.lowering import ClLowering, cl_kernel, cl_shared
from subgraph.opencl.runtime import ClSource
from subgraph.ops.shared.opencl_code import line, number, program, register, require, variant_of

from .arguments import (
    TAPS,
    GridSampleArguments,
    MaxRoiPoolArguments,
    RoiAlignArguments,
    SampleCountArguments,
)

cl_shared("AffineGrid", "GridSample", "MaxRoiPool", "RoiAlign")
_PADDINGS = {"zeros": 0, "border": 1, "reflection": 2}


def _region_source(dtype: str, **flags: int) -> ClSource:
    return program("image/sampling", ROI=1, T=register(dtype), **flags)


@cl_kernel("subgraph.ops.image.roi_kernels", "roi_average", "roi_largest")
def roi_align(low: ClLowering, kernel: Kernel, a: RoiAlignArguments) -> None:
    """Launch RoiAlign."""
    dtype = variant_of(kernel)["dtype"]
    require(low, dtype)
    largest = int(kernel.factory == "roi_largest")
    source = _region_source(dtype, HALF=a.half_pixel, LARGEST=largest)
    arguments = [a.y.size, a.x, a.regions, a.numbers, a.y, a.images, a.channels]
    arguments += [a.height, a.width, a.bins_down, a.bins_across, a.samples, number(dtype, a.scale)]
    low.launch(source, "roi_align", arguments, *line(low, a.y.size))


@cl_kernel("subgraph.ops.image.roi_kernels", "check_sample_count")
def check_sample_count(low: ClLowering, kernel: Kernel, a: SampleCountArguments) -> None:
    """Launch the check of RoiAlign's number of samples."""
    dtype = variant_of(kernel)["dtype"]
    require(low, dtype)
    source = _region_source(dtype, HALF=a.half_pixel, LARGEST=0)
    arguments = [a.regions, a.count, a.bins_down, a.bins_across, number(dtype, a.scale)]
    low.launch(source, "check_sample_count", [*arguments, a.most, a.report], (1,))


@cl_kernel("subgraph.ops.image.roi_kernels", "max_roi_pool")
def max_roi_pool(low: ClLowering, kernel: Kernel, a: MaxRoiPoolArguments) -> None:
    """Launch MaxRoiPool."""
    dtype = variant_of(kernel)["dtype"]
    require(low, dtype)
    source = _region_source(dtype, HALF=0, LARGEST=0)
    arguments = [a.y.size, a.x, a.regions, a.y, a.images, a.channels, a.height, a.width]
    arguments += [a.bins_down, a.bins_across, number(dtype, a.scale)]
    low.launch(source, "max_roi_pool", arguments, *line(low, a.y.size))


@cl_kernel("subgraph.ops.image.sampling_kernels", "grid_sample")
def grid_sample(low: ClLowering, kernel: Kernel, a: GridSampleArguments) -> None:
    """Launch GridSample."""
    variant = variant_of(kernel)
    require(low, variant["dtype"], variant["grid"])
    count = a.grid.size // a.dimensions
    source = program(
        "image/sampling",
        T=register(variant["dtype"]),
        U=register(variant["grid"]),
        TAPS=TAPS[variant["mode"]],
        PADDING=_PADDINGS[variant["padding"]],
        CORNERS=int(variant["corners"]),
    )
    arguments = [count, a.x, a.grid, a.y, a.channels, *a.image, a.dimensions, a.points]
    low.launch(source, "grid_sample", arguments, *line(low, count))
