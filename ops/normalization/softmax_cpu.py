"""Softmax, LogSoftmax and Hardmax on the CPU device."""

from __future__ import annotations

from subgraph.engine.planner.lowering import Lowering, lowering
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.graph.graph import Node
from subgraph.ops.composite.cpu import softmax_sizes
from subgraph.ops.elementwise.cpu import emit_cast, widened

from .arguments import SoftmaxArguments

_MIN_ELEMENTS_PER_THREAD = 4096  # estimate: more work than starting a thread


@lowering("Softmax", "LogSoftmax", dtypes=("float32", "float64", "float16", "bfloat16"))
def softmax(node: Node, low: Lowering) -> None:
    """Lower Softmax and LogSoftmax."""
    x, y = low.input(0), low.output()
    if x.size == 0:
        return
    size, inner = softmax_sizes(node, x)
    converted, result = widened(low, x, y)
    lanes = low.lanes(converted.dtype)
    if inner == 1:
        name, units, cost = "rows", x.size // size, size
    else:
        # Four vectors at a time: whole cache lines, and independent work to hide latency.
        lanes *= 4 if inner >= 4 * lanes else 1
        units = x.size // (size * inner) * -(-inner // lanes)
        name, cost = "columns", size * lanes
    kernel = Kernel(
        "subgraph.ops.normalization.softmax_kernels",
        name,
        dtype=converted.dtype,
        lanes=lanes,
        log=node.op_type == "LogSoftmax",
        half_precision="" if converted is x else x.dtype,
    )
    arguments = SoftmaxArguments(x=converted, y=result, size=size, inner=inner)
    low.emit(
        kernel,
        arguments,
        units,
        grain=max(1, _MIN_ELEMENTS_PER_THREAD // cost),
        flops=20 * x.size,
        bytes=2 * x.nbytes,
    )
    emit_cast(low, result, y)
    if result is y:
        low.in_place(y, x)
