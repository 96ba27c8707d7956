"""SegmentSum on OPENCL: the CPU's shape work, one work-item for each sum."""

from __future__ import annotations

from typing import Any

from subgraph.engine.toolchain.kernel import Kernel
from subgraph.opencl.lowering import ClLowering, cl_kernel, cl_shared
from subgraph.opencl.runtime import ClSource
from subgraph.operators.schema import INTERNAL_DOMAIN
from subgraph.ops.shared.opencl_code import line, register, require

from .arguments import SegmentSumArguments

cl_shared("SegmentSum", domain=INTERNAL_DOMAIN)


@cl_kernel("subgraph.ops.indexing.segment_kernels", "segment_sum")
def segment_sum(low: ClLowering, kernel: Kernel, a: SegmentSumArguments) -> None:
    """Launch the sums, or the means."""
    variant: dict[str, Any] = dict(kernel.variant)
    require(low, variant["dtype"])
    defines = (("MEAN", int(variant["mean"])), ("T", register(variant["dtype"])))
    program = ClSource("indexing/segments", defines=defines)
    low.launch(program, "segment_sum", [a.y.size, *a.words()], *line(low, a.y.size))
