"""Resize and Upsample on OPENCL: the lowerings of the CPU, another kernel."""

from __future__ import annotations

from subgraph.engine.toolchain.kernel import Kernel
from subgraph.opencl.lowering import ClLowering, cl_kernel, cl_shared
from subgraph.ops.shared.opencl_code import line, program, register, require, variant_of

from .arguments import BlendAcrossArguments, BlendArguments

cl_shared("Resize", "Upsample")


@cl_kernel("subgraph.ops.image.resize_kernels", "along", "across")
def blend(low: ClLowering, kernel: Kernel, a: BlendArguments) -> None:
    """Launch the weighted sums along a resized axis."""
    dtype = variant_of(kernel)["dtype"]
    require(low, dtype)
    source = program("image/resize", T=register(dtype))
    inner = a.inner if isinstance(a, BlendAcrossArguments) else 1
    tables = [a.indices, a.weights, a.added]
    sizes = [a.neighbours, a.size, a.taken, inner]
    low.launch(source, "blend", [a.y.size, a.x, a.y, *tables, *sizes], *line(low, a.y.size))
