"""Softmax and normalizations on OPENCL: the CPU's shape work over the kernels of reductions.

On a GPU a work-group takes a long row together; on a CPU each work-item has rows of its own.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from subgraph.engine.planner.lowering import Argument
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.opencl.lowering import ClLowering, cl_kernel, cl_shared
from subgraph.ops.reduce.opencl import program, team, variant_of
from subgraph.ops.shared.opencl_code import line, number, require

from .arguments import GroupNormArguments, LocalNormArguments, RowNormArguments, SoftmaxArguments

Words = list["Argument | np.generic[Any]"]

cl_shared(
    *("Softmax", "LogSoftmax", "LayerNormalization", "RMSNormalization"),
    *("InstanceNormalization", "GroupNormalization", "BatchNormalization", "LRN"),
)


@cl_kernel("subgraph.ops.normalization.softmax_kernels", "rows", "columns")
def softmax(low: ClLowering, kernel: Kernel, a: SoftmaxArguments) -> None:
    """Launch Softmax or LogSoftmax."""
    variant = variant_of(kernel)
    require(low, variant["dtype"])
    rows = a.x.size // a.size
    group, *ranges = team(low, rows, a.size)
    narrow = ("", "float16", "bfloat16").index(variant["narrow"])
    flags = {"LOG": int(variant["log"]), "NARROW": narrow}
    source = program(variant["dtype"], SOFTMAX=1, GROUP=group, **flags)
    low.launch(source, "softmax", [rows, *a.words()], *ranges)


@cl_kernel("subgraph.ops.normalization.kernels", "rows")
def rows(low: ClLowering, kernel: Kernel, a: RowNormArguments) -> None:
    """Launch LayerNormalization or RMSNormalization."""
    variant = variant_of(kernel)
    dtype = variant["dtype"]
    require(low, dtype)
    count = a.x.size // a.size
    group, *ranges = team(low, count, a.size)
    optional: list[Argument] = [a.bias, a.means, a.deviations]
    there = [int(not isinstance(word, int)) for word in optional]
    source = program(
        dtype,
        NORMALIZE=1,
        CENTRED=int(variant["centred"]),
        GROUP=group,
        BIAS=there[0],
        MEANS=there[1],
        DEVIATIONS=there[2],
    )
    held = [a.y if isinstance(word, int) else word for word in optional]
    epsilon = number(dtype, a.epsilon)
    arguments: Words = [count, a.x, a.y, a.scale, *held, a.size, epsilon]
    low.launch(source, "rows", arguments, *ranges)


@cl_kernel("subgraph.ops.normalization.kernels", "groups")
def groups(low: ClLowering, kernel: Kernel, a: GroupNormArguments) -> None:
    """Launch InstanceNormalization or GroupNormalization."""
    dtype = variant_of(kernel)["dtype"]
    require(low, dtype)
    rows = a.x.size // (a.channels * a.pixels)
    group, *ranges = team(low, rows, a.pixels)
    source = program(dtype, NORMALIZE=1, CENTRED=1, BIAS=1, MEANS=0, DEVIATIONS=0, GROUP=group)
    epsilon = number(dtype, a.epsilon)
    arguments: Words = [rows, a.x, a.y, a.scale, a.bias, a.groups, a.channels, a.pixels, epsilon]
    low.launch(source, "groups", [*arguments, a.channel_step, a.group_step], *ranges)


@cl_kernel("subgraph.ops.normalization.kernels", "local")
def local(low: ClLowering, kernel: Kernel, a: LocalNormArguments) -> None:
    """Launch LRN."""
    dtype = variant_of(kernel)["dtype"]
    require(low, dtype)
    numbers = [number(dtype, value) for value in (a.alpha, a.bias, a.beta)]
    arguments: Words = [a.x.size, a.x, a.y, a.channels, a.pixels, a.before, a.after, *numbers]
    low.launch(program(dtype, EACH=1), "local_response", arguments, *line(low, a.x.size))
