"""LinearAttention on OPENCL: the CPU's lowering with a kernel of its own."""

from __future__ import annotations

from typing import Any

import numpy as np

from subgraph.engine.planner.operands import Argument
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.opencl.lowering import ClLowering, cl_kernel, cl_shared
from subgraph.ops.shared.opencl_code import line, number, program, register, require, variant_of

from .arguments import LinearAttentionArguments

cl_shared("LinearAttention")


@cl_kernel("subgraph.ops.attention.linear_kernels", "linear_attention")
def linear_attention(low: ClLowering, kernel: Kernel, a: LinearAttentionArguments) -> None:
    """Launch the kernel with a work-item for each column of the states."""
    variant = variant_of(kernel)
    dtype = variant["dtype"]
    require(low, dtype)
    # 0 is an omitted operand, which the kernel does not read: any buffer stands for it.
    addresses = (a.query, a.key, a.value, a.past, a.decay, a.beta, a.y, a.state)
    operands = [a.query if isinstance(operand, int) else operand for operand in addresses]
    count = a.state.size // a.key_size
    flags = {name.upper(): int(variant[name]) for name in ("gated", "delta", "past")}
    arguments: list[Argument | np.generic[Any]] = [count, *operands, a.tokens, a.heads]
    arguments += [a.kv_heads, a.key_size, a.value_size, number(dtype, a.scale), a.decays, a.betas]
    source = program("attention/linear", T=register(dtype), **flags)
    low.launch(source, "linear_attention", arguments, *line(low, count))
