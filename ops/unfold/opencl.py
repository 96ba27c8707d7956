"""Operators that unfold or fold windows and blocks, on OPENCL: other kernels than the CPU's."""

from __future__ import annotations

from subgraph.engine.planner.operands import Operand
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.opencl.lowering import ClLowering, cl_kernel, cl_shared
from subgraph.opencl.runtime import ClSource
from subgraph.ops.movement.window_opencl import require_positions
from subgraph.ops.shared.opencl_code import line, program, register, require, variant_of

from .arguments import ColumnsToImageArguments, DeformColumnsArguments

cl_shared("Col2Im", "DeformConv", "DepthToSpace", "MaxUnpool", "SpaceToDepth")


def _program(low: ClLowering, kernel: Kernel, **defines: int) -> ClSource:
    dtype = variant_of(kernel)["dtype"]
    require(low, dtype)
    return program("unfold/kernels", T=register(dtype), **defines)


@cl_kernel("subgraph.ops.unfold.kernels", "deform_columns")
def deform_columns(low: ClLowering, kernel: Kernel, a: DeformColumnsArguments) -> None:
    """Launch the sampling step of DeformConv."""
    down = (a.output_height - 1) * a.stride_height
    across = (a.output_width - 1) * a.stride_width
    span_down = (a.kernel_height - 1) * a.dilation_height
    span_across = (a.kernel_width - 1) * a.dilation_width
    require_positions([(down, a.pad_height, span_down), (across, a.pad_width, span_across)])
    source = _program(low, kernel, DEFORM=1, MASKED=int(isinstance(a.mask, Operand)))
    *sizes, x, offsets, mask, columns, channels, groups = a.words()
    arguments = [a.columns.size, x, offsets, mask or x, columns, channels, groups, *sizes]
    low.launch(source, "deform_columns", arguments, *line(low, a.columns.size))


@cl_kernel("subgraph.ops.unfold.kernels", "columns_to_image")
def columns_to_image(low: ClLowering, kernel: Kernel, a: ColumnsToImageArguments) -> None:
    """Launch the summation step of Col2Im, which has no bias."""
    spans = [(taps - 1) * step for taps, step in zip(a.kernel, a.dilation, strict=True)]
    require_positions(zip(a.image, a.pad, spans, strict=True))
    source = _program(low, kernel, COLUMNS=1)
    *arguments, _bias, _channels = a.words()
    low.launch(source, "columns_to_image", [a.y.size, *arguments], *line(low, a.y.size))
