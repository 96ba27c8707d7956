"""Attention on OPENCL: one kernel with an online softmax, no scores in memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from subgraph.engine.lowering import Lowering, Unsupported, Word
from subgraph.opencl.lowering import ClLowering, cl_primitive, cl_shared
from subgraph.opencl.runtime import ClSource

from .attention_cpu import Request, mask_steps
from .opencl_code import register, require
from .products_opencl import number

cl_shared("Attention")
cl_shared("FusedAttention", domain="subgraph.cpu")
_KEYS = 16  # of a block
_QUERIES = 64  # of a GPU's group
_LARGEST = 256  # elements of a head that a work-item keeps


@cl_primitive
def emit_attention(low: Lowering, r: Request) -> None:
    """Launch an attention; see the CPU's function of this name."""
    assert isinstance(low, ClLowering)
    dtype = r.q.operand.dtype
    require(low, dtype)
    batch, heads, queries, depth = r.q.sizes
    _, shared, keys, values = r.v.sizes
    if r.q.steps[3] != 1 or r.out.steps[3] != 1:
        raise Unsupported("attention over queries whose elements are not contiguous")
    if shared == 0 or heads % shared or r.k.sizes != (batch, shared, keys, depth):
        raise Unsupported(f"attention of heads {r.q.sizes}, {r.k.sizes}, {r.v.sizes}")
    if keys == 0 or not r.out.operand.size:
        raise Unsupported("attention over nothing")
    if max(depth, values) > _LARGEST:
        raise Unsupported(f"attention over heads of {max(depth, values)} elements")
    steps: tuple[int, ...] = (0, 0, 0, 0)
    if r.mask is not None:
        if r.mask.dtype != dtype:
            raise Unsupported(f"a mask of {r.mask.dtype}; it must be of the queries' dtype")
        steps = mask_steps(r.mask, (batch, heads, queries, keys))
    gpu = low.traits.is_gpu
    defines: dict[str, str | int] = {
        "BLOCK": _KEYS,
        "DEPTH": depth,
        "MASKED": int(r.mask is not None),
        "SHARED": int(gpu),
        "T": register(dtype),
        "VALUES": values,
    }
    words: list[Word | np.generic[Any]] = [queries, r.q.operand, r.k.operand, r.v.operand]
    words += [r.out.operand, r.mask or r.q.operand, keys, heads, heads // shared]
    for of in (r.q.steps, r.k.steps, r.v.steps, r.out.steps, steps):
        words += of
    words += [number(dtype, r.scale), int(r.causal), r.offset]
    group = _QUERIES if gpu else 1
    low.launch(
        ClSource("attention", defines=tuple(sorted(defines.items()))),
        "attention",
        words,
        (-(-queries // group) * group, batch * heads),
        (group, 1),
        flops=2 * batch * heads * queries * keys * (depth + values),
        bytes=sum(h.operand.nbytes for h in (r.q, r.k, r.v, r.out)),
    )
