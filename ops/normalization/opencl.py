"""Softmax and normalizations on OPENCL: the CPU's lowerings, with kernels beside the reductions'.

On a GPU a work-group computes a long row together; on a CPU each work-item has rows of its own.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from subgraph.engine.planner.operands import Argument
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.opencl.lowering import ClLowering, cl_kernel, cl_shared
from subgraph.ops.reduce.opencl import row_program, row_ranges
from subgraph.ops.shared.opencl_code import line, number, require, variant_of

from .arguments import GroupNormArguments, LocalNormArguments, RowNormArguments, SoftmaxArguments

Arguments = list["Argument | np.generic[Any]"]

cl_shared(
    *("Softmax", "LogSoftmax", "Hardmax", "LayerNormalization", "RMSNormalization"),
    *("InstanceNormalization", "GroupNormalization", "BatchNormalization", "LRN"),
    *("LpNormalization", "MeanVarianceNormalization"),
)


@cl_kernel("subgraph.ops.normalization.softmax_kernels", "rows", "columns")
def softmax(low: ClLowering, kernel: Kernel, a: SoftmaxArguments) -> None:
    """Launch Softmax or LogSoftmax."""
    variant = variant_of(kernel)
    require(low, variant["dtype"])
    rows = a.x.size // a.size
    group, *ranges = row_ranges(low, rows, a.size)
    rounding = ("", "float16", "bfloat16").index(variant["half_precision"])
    flags = {"LOG": int(variant["log"]), "ROUND_TO": rounding}
    source = row_program(variant["dtype"], SOFTMAX=1, GROUP=group, **flags)
    low.launch(source, "softmax", [rows, *a.words()], *ranges)


@cl_kernel("subgraph.ops.normalization.kernels", "rows")
def rows(low: ClLowering, kernel: Kernel, a: RowNormArguments) -> None:
    """Launch LayerNormalization or RMSNormalization."""
    variant = variant_of(kernel)
    dtype = variant["dtype"]
    require(low, dtype)
    count = a.x.size // a.size
    group, *ranges = row_ranges(low, count, a.size)
    x, y, scale, *optional, size, epsilon = a.words()
    present = [int(not isinstance(word, int)) for word in optional]
    source = row_program(
        dtype,
        NORMALIZE=1,
        CENTRED=int(variant["centred"]),
        GROUP=group,
        BIAS=present[0],
        MEANS=present[1],
        DEVIATIONS=present[2],
    )
    operands = [y if isinstance(word, int) else word for word in optional]
    arguments: Arguments = [count, x, y, scale, *operands, size, number(dtype, epsilon)]
    low.launch(source, "rows", arguments, *ranges)


@cl_kernel("subgraph.ops.normalization.kernels", "groups")
def groups(low: ClLowering, kernel: Kernel, a: GroupNormArguments) -> None:
    """Launch InstanceNormalization or GroupNormalization."""
    dtype = variant_of(kernel)["dtype"]
    require(low, dtype)
    rows = a.x.size // (a.channels * a.pixels)
    group, *ranges = row_ranges(low, rows, a.pixels)
    source = row_program(dtype, NORMALIZE=1, CENTRED=1, BIAS=1, MEANS=0, DEVIATIONS=0, GROUP=group)
    *leading, epsilon, channel_step, group_step = a.words()
    arguments: Arguments = [rows, *leading, number(dtype, epsilon), channel_step, group_step]
    low.launch(source, "groups", arguments, *ranges)


@cl_kernel("subgraph.ops.normalization.kernels", "local_response")
def local_response(low: ClLowering, kernel: Kernel, a: LocalNormArguments) -> None:
    """Launch LRN."""
    dtype = variant_of(kernel)["dtype"]
    require(low, dtype)
    numbers = [number(dtype, value) for value in (a.alpha, a.bias, a.beta)]
    arguments: Arguments = [a.x.size, a.x, a.y, a.channels, a.pixels, a.before, a.after, *numbers]
    low.launch(row_program(dtype, EACH=1), "local_response", arguments, *line(low, a.x.size))
