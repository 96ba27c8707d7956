"""Attention on OPENCL, by a kernel that stores no scores; RotaryEmbedding."""

from __future__ import annotations

from typing import Any

import numpy as np

from subgraph.engine.planner.lowering import Lowering, Unsupported
from subgraph.engine.planner.operands import Argument
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.opencl.lowering import ClLowering, cl_kernel, cl_primitive, cl_shared
from subgraph.operators.schema import INTERNAL_DOMAIN
from subgraph.ops.shared.opencl_code import (
    line,
    number,
    program,
    register,
    require,
    storage,
    variant_of,
)

from .arguments import BiasArguments, RotateArguments
from .fused_cpu import AttentionSpec, checked_mask_steps

cl_shared("Attention", "RotaryEmbedding")
cl_shared("FusedAttention", "DecoderAttention", domain=INTERNAL_DOMAIN)
# Estimates: the elements of a head fit into a work-item's private memory, and a block of keys and
# values into half of the 32 KiB of local memory that OpenCL requires; the queries of a work-group
# fill its SIMD units.
_MAX_HEAD_SIZE = 256  # elements
_BLOCK_KEYS = 16  # keys of a block on a CPU
_LOCAL_BYTES = 16384  # of keys and values on a GPU
_MAX_BLOCK_KEYS = 64  # so that the scores of a work-item fit in its registers
_GROUP_QUERIES = 32  # queries of a work-group on a GPU
_GROUP_PARTS = 8  # work-items that share a query on a GPU
_GROUP_MASKS = 64  # work-items that write a row of the mask on a GPU


@cl_primitive
def emit_attention(low: Lowering, r: AttentionSpec) -> None:
    """Launch an attention; the function of this name in ``fused_cpu.py`` says more.

    Raises:
        Unsupported: There is no kernel for these operands.
    """
    assert isinstance(low, ClLowering)
    dtype = r.q.operand.dtype
    require(low, dtype)
    batch, heads, queries, depth = r.q.sizes
    _, kv_heads, keys, values = r.v.sizes
    steps = checked_mask_steps(r)
    if max(depth, values) > _MAX_HEAD_SIZE:
        raise Unsupported(f"attention over heads of {max(depth, values)} elements")
    group, parts, block = 1, 1, _BLOCK_KEYS
    if low.traits.is_gpu:
        group, parts = _GROUP_QUERIES, _GROUP_PARTS
        padded = 4 * (-(-depth // 4) + -(-values // 4)) * r.q.operand.itemsize  # bytes of a key
        # A block has at least one key for each part, and must fit in the local memory.
        while parts > 2 and parts * padded > _LOCAL_BYTES:
            parts //= 2
        block = parts * max(1, min(_LOCAL_BYTES // padded, _MAX_BLOCK_KEYS) // parts)
    source = program(
        "attention/kernels",
        BLOCK=block,
        BOUNDED=int(r.softcap != 0),
        DEPTH=depth,
        MASKED=int(r.mask is not None),
        PARTS=parts,
        QUERIES=group,
        SINKS=int(r.sinks is not None),
        STARTS=int(r.starts is not None),
        T=register(dtype),
        VALUES=values,
        ZERO_UNSEEN=r.zero_unseen,
    )
    arguments: list[Argument | np.generic[Any]] = [queries, r.q.operand, r.k.operand, r.v.operand]
    arguments += [r.out.operand, r.mask or r.q.operand, r.sinks or r.q.operand]
    arguments.append(r.starts or r.q.operand)
    arguments += [keys, heads, heads // kv_heads]
    for of in (r.q.steps, r.k.steps, r.v.steps, r.out.steps, steps):
        arguments += of
    arguments += [number(dtype, r.factor), number(dtype, r.softcap)]
    arguments += [int(r.causal), r.offset, r.window]
    low.launch(
        source,
        "attention",
        arguments,
        (-(-queries // group) * group * batch * heads, parts),
        (group, parts),
        flops=2 * batch * heads * queries * keys * (depth + values),
        bytes=sum(h.operand.nbytes for h in (r.q, r.k, r.v, r.out)),
    )


@cl_kernel("subgraph.ops.attention.mask_kernels", "bias")
def bias(low: ClLowering, kernel: Kernel, a: BiasArguments) -> None:
    """Launch the kernel that writes a mask with causality, windows and padding."""
    variant = variant_of(kernel)
    dtype, mask = variant["dtype"], variant["mask"]
    require(low, dtype)
    group = _GROUP_MASKS if low.traits.is_gpu else 1
    source = program(
        "attention/kernels",
        COUNTED=int(a.counts != 0),
        GROUP=group,
        M=storage(mask or "uint8"),
        MASK=("", "bool", dtype).index(mask),
        T=register(dtype),
    )
    y, given, *sizes, counts, flags = a.words()
    count = flags.size
    ranges = line(low, count) if group == 1 else ((count * group,), (group,))
    low.launch(source, "bias", [count, y, given or y, *sizes, counts or y, flags], *ranges)


@cl_kernel("subgraph.ops.attention.rotary_kernels", "rotate")
def rotate(low: ClLowering, kernel: Kernel, r: RotateArguments) -> None:
    """Launch RotaryEmbedding."""
    variant = variant_of(kernel)
    dtype = variant["dtype"]
    require(low, dtype)
    known = not isinstance(r.positions, int)
    flags = {"PAIRS": int(variant["interleaved"]), "POSITIONS": int(known)}
    operands = [r.x, r.y, r.cosines, r.sines, r.positions if known else r.x]
    strides = (r.batch_stride, r.head_stride, r.token_stride)
    elements = [stride // r.x.itemsize for stride in strides]
    low.launch(
        program("attention/rotary", T=register(dtype), **flags),
        "rotate_pairs",
        [r.x.size, *operands, r.heads, r.tokens, r.size, r.half, *elements, r.rows],
        *line(low, r.x.size),
    )
