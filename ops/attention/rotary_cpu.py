"""RotaryEmbedding on the CPU device."""

from __future__ import annotations

from subgraph.engine.planner.lowering import Lowering, lowering
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.graph.graph import Node
from subgraph.ops.checks.cpu import emit_range_check

from .arguments import RotateArguments
from .fused_cpu import heads_of

_MIN_ELEMENTS_PER_THREAD = 8192  # estimate: more work than starting a thread


@lowering("RotaryEmbedding", dtypes=("float32", "float64"))
def rotary(node: Node, low: Lowering) -> None:
    """Lower RotaryEmbedding of [batch, heads, tokens, size] or [batch, tokens, heads * size]."""
    x, y = low.input(0), low.output()
    cosines, sines, positions = low.input(1), low.input(2), low.optional(3)
    if x.size == 0:
        return
    of = heads_of(x, int(node.attrs.get("num_heads", 0)))
    batch, heads, tokens, size = of.sizes
    half, rows = cosines.shape[-1], cosines.size // cosines.shape[-1]
    if positions is not None:
        emit_range_check(low, positions, "position_ids", 0, rows - 1)
    batch_stride, head_stride, token_stride = (step * x.itemsize for step in of.steps[:3])
    arguments = RotateArguments(
        x=x,
        y=y,
        cosines=cosines,
        sines=sines,
        positions=positions or 0,
        heads=heads,
        tokens=tokens,
        size=size,
        half=half,
        batch_stride=batch_stride,
        head_stride=head_stride,
        token_stride=token_stride,
        rows=rows,
    )
    kernel = Kernel(
        "subgraph.ops.attention.rotary_kernels",
        "rotate",
        dtype=x.dtype,
        lanes=low.lanes(x.dtype),
        interleaved=bool(node.attrs.get("interleaved", 0)),
    )
    grain = max(1, _MIN_ELEMENTS_PER_THREAD // (heads * size))
    low.emit(kernel, arguments, batch * tokens, grain=grain, flops=6 * x.size, bytes=2 * x.nbytes)
