"""LinearAttention on OPENCL: the CPU's shape work, another kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from subgraph.engine.planner.lowering import Operand, Word
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.opencl.lowering import ClLowering, cl_kernel, cl_shared
from subgraph.opencl.runtime import ClSource
from subgraph.ops.shared.opencl_code import line, number, register, require

cl_shared("LinearAttention")


@cl_kernel("subgraph.ops.attention.linear_kernels", "linear_attention")
def linear_attention(low: ClLowering, kernel: Kernel, words: Sequence[Word]) -> None:
    """Launch a work-item for each column of the states."""
    variant: dict[str, Any] = dict(kernel.variant)
    dtype = variant["dtype"]
    require(low, dtype)
    operands = [words[0] if isinstance(word, int) else word for word in words[:8]]
    tokens, heads, owners, keys, values, scale, decays, betas = words[8:16]
    state = words[7]
    assert isinstance(state, Operand)
    assert isinstance(keys, int)
    assert isinstance(scale, float)
    count = state.size // keys
    defines: dict[str, str | int] = {"T": register(dtype)}
    defines |= {name.upper(): int(variant[name]) for name in ("gated", "delta", "past")}
    arguments: list[Word | np.generic[Any]] = [count, *operands, tokens, heads, owners, keys]
    arguments += [values, number(dtype, scale), decays, betas]
    source = ClSource("attention/linear", defines=tuple(sorted(defines.items())))
    low.launch(source, "linear_attention", arguments, *line(low, count))
