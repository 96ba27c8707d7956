"""Reductions on the CPU device: Reduce*, ArgMax, ArgMin, CumSum, CumProd."""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs
import numpy as np

from subgraph.dtypes import FLOATS, HALF_FLOATS, INTEGERS, compute_dtype
from subgraph.engine.planner.lowering import Lowering, Unsupported, lowering
from subgraph.engine.planner.operands import Operand
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.graph.graph import Node
from subgraph.graph.symbolic import larger
from subgraph.graph.types import numpy_dtype
from subgraph.ops.elementwise.cpu import (
    cast_to,
    emit_cast,
    emit_expression,
    source,
    temporary,
    widened,
)
from subgraph.ops.elementwise.expressions import Expression
from subgraph.ops.elementwise.primitives import primitive
from subgraph.ops.movement.copies_cpu import emit_fill
from subgraph.ops.movement.cpu import known, known_ints
from subgraph.ops.movement.layout_conversion import blocked_target, convert_output
from subgraph.ops.pool.cpu import emit_global_pool
from subgraph.ops.shared.strides import Ints, collapse, contiguous, normal_axis

from .arguments import ArgMinMaxArguments, CumulativeArguments, ReductionArguments
from .op import number_range

_OPS = {
    "ReduceSum": "sum",
    "ReduceMean": "mean",
    "ReduceProd": "prod",
    "ReduceMax": "max",
    "ReduceMin": "min",
    "ReduceL1": "l1",
    "ReduceL2": "l2",
    "ReduceSumSquare": "sumsq",
    "ReduceLogSum": "logsum",
    "ReduceLogSumExp": "sumexp",
}
_REAL = frozenset({"mean", "l2", "logsum", "sumexp"})  # integers are reduced as float64
_EMPTY = {"mean": math.nan, "logsum": -math.inf, "sumexp": -math.inf}  # of no elements; else 0
_POOLED = {"mean": "average", "max": "max", "min": "min"}  # kinds of pooling of images
_MIN_ELEMENTS_PER_THREAD = 8192  # estimate: more work than starting a thread


def reduced_axes(low: Lowering, rank: int) -> list[int]:
    """Return the axes that a Reduce operator reduces."""
    axes = known_ints(low, 1, "axes")
    if not axes:
        return [] if low.node.attrs.get("noop_with_empty_axes", 0) else list(range(rank))
    return [normal_axis(axis, rank) for axis in axes]


@attrs.frozen(eq=False)
class Reduction:
    """A reduction of at least one element, its dimensions merged as far as possible.

    Attributes:
        op: An operation of `subgraph.ops.reduce.kernels.rows`.
        x: The input.
        y: The results in row-major order of the axes that are not reduced.
        shifts: For "sumexp" what is subtracted before exp, with y's elements; else None.
        dtype: The dtype as which elements are read.
        count: Elements that are reduced to one.
        dims: Sizes of the merged dimensions.
        steps: Elements of x between neighbours along them.
        kept: For each of them whether it is not reduced.
    """

    op: str
    x: Operand
    y: Operand
    shifts: Operand | None
    dtype: str
    count: int
    dims: Ints
    steps: Ints
    kept: Sequence[bool]


def emit_reduction(
    low: Lowering,
    op: str,
    x: Operand,
    y: Operand,
    axes: Sequence[int],
    shifts: Operand | None = None,
    dtype: str = "",
) -> None:
    """Emit the step that reduces ``axes`` of ``x`` into ``y``, both of one dtype.

    Args:
        low: Where the step goes.
        op: An operation of `subgraph.ops.reduce.kernels.rows`.
        x: The input.
        y: The results in row-major order of the axes that are kept; of any shape.
        axes: The axes that are reduced, counted from the front.
        shifts: For "sumexp" what is subtracted before exp, with y's elements.
        dtype: The dtype as which elements are read, if not x's.

    Raises:
        Unsupported: The dtype is float16 or bfloat16, which no kernel of a reduction reads; the
            caller reduces a `widened` operand.
    """
    if (dtype or x.dtype) in HALF_FLOATS:
        raise Unsupported(f"a reduction of {x.dtype} that was not widened")
    if y.size == 0:
        return
    count = math.prod(x.shape[a] for a in axes)
    if count == 0:
        emit_empty_reduction(low, op, y)
        return
    # Kept dimensions merge with kept ones only, reduced ones with reduced ones: reduced ones have
    # a second stride of 0.
    marks = contiguous([1 if d in axes else n for d, n in enumerate(x.shape)])
    marks = tuple(0 if d in axes else m for d, m in enumerate(marks))
    dims, (steps, kinds) = collapse(x.shape, [contiguous(x.shape), marks])
    kept = [True] if dims == (1,) else [kind != 0 for kind in kinds]
    reduction = Reduction(op, x, y, shifts, dtype or x.dtype, count, dims, steps, kept)
    emit_merged_reduction(low, reduction)


@primitive
def emit_merged_reduction(low: Lowering, r: Reduction) -> None:
    """Emit the step of a reduction."""
    size, last_kept, item = r.dims[-1], r.kept[-1], r.x.itemsize

    def loops(kept: bool) -> list[int]:
        chosen = [d for d in range(len(r.dims) - 1) if r.kept[d] is kept]
        return [word for d in chosen for word in (r.dims[d], r.steps[d] * item, 0)]

    kept, reduced = loops(True), loops(False)
    arguments = ReductionArguments(
        x=r.x,
        y=r.y,
        shifts=r.shifts or 0,
        size=size,
        kept=len(kept) // 3,
        reduced=len(reduced) // 3,
        iterations=math.prod(reduced[::3]),
        count=r.count,
        dims=[*kept, *reduced],
    )
    lanes = low.lanes(r.dtype)
    factory = "columns" if last_kept else "rows"
    units = math.prod(kept[::3]) * (-(-size // (4 * lanes)) if last_kept else 1)
    work = r.count * (4 * lanes if last_kept else 1)
    low.emit(
        Kernel("subgraph.ops.reduce.kernels", factory, dtype=r.dtype, lanes=lanes, op=r.op),
        arguments,
        units,
        grain=larger(1, _MIN_ELEMENTS_PER_THREAD // work),
        flops=r.x.size,
        bytes=r.x.nbytes + r.y.nbytes,
    )


def emit_empty_reduction(low: Lowering, op: str, y: Operand) -> None:
    """Emit the result of a reduction of no elements.

    Args:
        low: Where the step goes.
        op: An operation of `subgraph.ops.reduce.kernels.rows`.
        y: The result, filled with the operation's identity (NaN for "mean").
    """
    dtype = numpy_dtype(y.dtype)
    least, most = number_range(dtype)
    results = {**_EMPTY, "max": least, "min": most, "prod": 1.0}
    number = np.array([results.get(op, 0.0)]).astype(dtype)
    emit_fill(low, y, y.size, number)


@lowering(*_OPS, layouts=("plain", "blocked", "bfloat16"))
def reduce(node: Node, low: Lowering) -> None:
    """Lower a Reduce operator."""
    x, y = low.input(0), low.output()
    op = _OPS[node.op_type]
    axes = reduced_axes(low, x.rank)
    if x.layout in ("blocked", "bfloat16"):
        if op not in _POOLED or sorted(axes) != list(range(2, x.rank)) or not x.size:
            raise Unsupported(f"{node.op_type} over axes {axes} in blocks of channels")
        lanes = x.lanes if x.layout == "blocked" else low.block_lanes(x.dtype)
        found = blocked_target(low, lanes, y)
        emit_global_pool(low, x, found, _POOLED[op])
        convert_output(low, y, found)
        return
    if x.dtype not in (*FLOATS, *INTEGERS, "bool"):
        raise Unsupported(f"{node.op_type} of {x.dtype}")
    if op in ("sum", "max", "min", "prod", "mean") and x.size == y.size and x.size > 0:
        low.alias(y, x)
        return
    work = compute_dtype(x.dtype)
    if work in INTEGERS and op in _REAL:
        work = "float64"
    x, result = widened(low, x, y, work)
    shifts = None
    if op == "sumexp" and x.size:
        shifts = _maxima(low, x, result, axes)
    dtype = "uint8" if work == "bool" else work
    emit_reduction(low, op, x, result, axes, shifts, dtype)
    emit_cast(low, result, y)


def _maxima(low: Lowering, x: Operand, y: Operand, axes: Sequence[int]) -> Operand:
    """Emit the maxima that are subtracted before exp, 0 for infinite ones."""
    found, finite = temporary(low, x.dtype, y.shape), temporary(low, x.dtype, y.shape)
    emit_reduction(low, "max", x, found, axes)
    e = Expression()
    term = e.input(x.dtype)
    # Infinity less an infinite maximum would be NaN. Without a shift the sum of exponentials is
    # then infinity or 0, whose logarithm is the result. A maximum of NaN is in the sum anyway.
    bounded = e("lt", e("abs", term), math.inf)
    emit_expression(
        low,
        e,
        [source(found)],
        [(e("where", bounded, term, 0, dtype=x.dtype), finite)],
    )
    return finite


@lowering("ArgMax", "ArgMin")
def lower_argminmax(node: Node, low: Lowering) -> None:
    """Lower ArgMax and ArgMin."""
    x, y = low.input(0), low.output()
    axis = normal_axis(int(node.attrs.get("axis", 0)), x.rank)
    if x.dtype not in (*FLOATS, *INTEGERS):
        raise Unsupported(f"{node.op_type} of {x.dtype}")
    x = cast_to(low, x, compute_dtype(x.dtype))
    if y.size == 0:
        return
    last = bool(node.attrs.get("select_last_index", 0))
    size, inner = x.shape[axis] if x.rank else 1, math.prod(x.shape[axis + 1 :])
    emit_argminmax(low, x, y, size, inner, largest=node.op_type == "ArgMax", last=last)


def emit_argminmax(
    low: Lowering, x: Operand, y: Operand, size: int, inner: int, *, largest: bool, last: bool
) -> None:
    """Emit the step that finds the index of the largest or smallest element along an axis.

    Args:
        low: Where the step goes.
        x: The elements, ``[outer][size][inner]``.
        y: The indices, int64.
        size: Elements along the axis.
        inner: Elements inside it.
        largest: Find the largest element, else the smallest.
        last: Of equal elements the last, else the first.
    """
    lanes = min(16, low.lanes(x.dtype))  # indices are int32
    along = inner == 1
    if along:
        units, cost = x.size // size, size
    else:
        lanes *= 4 if inner >= 4 * lanes else 1
        units, cost = x.size // (size * inner) * -(-inner // lanes), size * lanes
    kernel = Kernel(
        "subgraph.ops.reduce.kernels",
        "argminmax_rows" if along else "argminmax_columns",
        dtype=x.dtype,
        lanes=lanes,
        largest=largest,
        last=last,
    )
    arguments = ArgMinMaxArguments(x=x, y=y, size=size, inner=inner)
    low.emit(
        kernel,
        arguments,
        units,
        grain=larger(1, _MIN_ELEMENTS_PER_THREAD // cost),
        bytes=x.nbytes + y.nbytes,
    )


@lowering("CumSum", "CumProd")
def cumulative(node: Node, low: Lowering) -> None:
    """Lower CumSum and CumProd."""
    x, y = low.input(0), low.output()
    axis = normal_axis(int(known(low, 1).reshape(-1)[0]), x.rank)
    work = compute_dtype(x.dtype)
    if work not in (*FLOATS, *INTEGERS):
        raise Unsupported(f"{node.op_type} of {x.dtype}")
    if x.size == 0:
        return
    x, result = widened(low, x, y, work)
    inner = math.prod(x.shape[axis + 1 :])
    lanes = low.lanes(work) if inner > 1 else 1
    op = "sum" if node.op_type == "CumSum" else "prod"
    kernel = Kernel("subgraph.ops.reduce.kernels", "cumulative", dtype=work, lanes=lanes, op=op)
    units = math.prod(x.shape[:axis]) * -(-inner // (4 * lanes))
    size = x.shape[axis] if x.rank else 1
    arguments = CumulativeArguments(
        x=x,
        y=result,
        size=size,
        inner=inner,
        reverse=int(node.attrs.get("reverse", 0)),
        exclusive=int(node.attrs.get("exclusive", 0)),
    )
    grain = larger(1, _MIN_ELEMENTS_PER_THREAD // (4 * size * lanes))
    low.emit(kernel, arguments, units, grain=grain, bytes=2 * x.nbytes)
    emit_cast(low, result, y)
