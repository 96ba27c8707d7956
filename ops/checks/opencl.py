"""Checks on OPENCL: the CPU's lowerings, another kernel."""

from __future__ import annotations

import numpy as np

from subgraph.engine.toolchain.kernel import Kernel
from subgraph.opencl.lowering import ClLowering, cl_kernel, cl_shared
from subgraph.operators.schema import INTERNAL_DOMAIN
from subgraph.ops.shared.opencl_code import program, require, storage, variant_of

from .arguments import InRangeArguments

cl_shared("Required", domain=INTERNAL_DOMAIN)


@cl_kernel("subgraph.ops.checks.kernels", "in_range")
def in_range(low: ClLowering, kernel: Kernel, a: InRangeArguments) -> None:
    """Launch the check of values that other kernels clamp."""
    dtype = variant_of(kernel)["dtype"]
    require(low, dtype)
    arguments = [a.values, a.count, a.step, a.least, a.most, np.int64(a.also), a.report]
    low.launch(program("checks/kernels", T=storage(dtype)), "in_range", arguments, (1,))
