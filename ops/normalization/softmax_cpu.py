"""Softmax, LogSoftmax and Hardmax on the CPU device."""

from __future__ import annotations

import math

import numpy as np

from subgraph.engine.planner.lowering import Lowering, lowering
from subgraph.engine.planner.operands import Operand
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.graph.graph import Node
from subgraph.operators.schema import is_before
from subgraph.ops.elementwise.cpu import emit_cast, temporary, widened
from subgraph.ops.indexing.arguments import OneHotArguments
from subgraph.ops.reduce.cpu import emit_argminmax
from subgraph.ops.shared.strides import normal_axis

from .arguments import SoftmaxArguments

_MIN_ELEMENTS_PER_THREAD = 4096  # estimate: more work than starting a thread


def _row_sizes(node: Node, x: Operand) -> tuple[int, int]:
    """Return the elements of a row of Softmax or Hardmax, and those between two of them in x.

    Before opset 13, a row has all dimensions from the axis on.
    """
    old = is_before(node, 13)
    axis = normal_axis(int(node.attrs.get("axis", 1 if old else -1)), x.rank)
    if old:
        return math.prod(x.shape[axis:]), 1
    return x.shape[axis] if x.rank else 1, math.prod(x.shape[axis + 1 :])


@lowering("Softmax", "LogSoftmax", dtypes=("float32", "float64", "float16", "bfloat16"))
def softmax(node: Node, low: Lowering) -> None:
    """Lower Softmax and LogSoftmax."""
    x, y = low.input(0), low.output()
    if x.size == 0:
        return
    size, inner = _row_sizes(node, x)
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


@lowering("Hardmax", dtypes=("float32", "float64"))
def hardmax(node: Node, low: Lowering) -> None:
    """Lower Hardmax: 1 at the first largest element along the axis, 0 elsewhere."""
    x, y = low.input(0), low.output()
    if x.size == 0:
        return
    size, inner = _row_sizes(node, x)
    outer = x.size // (size * inner)
    indices = temporary(low, "int64", (outer, inner))
    emit_argminmax(low, x, indices, size, inner, largest=True, last=False)
    zero_and_one = low.weight("hardmax", np.array, np.array([0, 1], x.dtype))
    kernel = Kernel("subgraph.ops.indexing.kernels", "one_hot", item=x.itemsize)
    arguments = OneHotArguments(
        indices=indices, values=zero_and_one, y=y, depth=size, inner=inner, wraps=0
    )
    low.emit(kernel, arguments, outer, bytes=y.nbytes)
