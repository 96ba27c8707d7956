"""Reductions on OPENCL: the CPU's lowerings with kernels of their own.

On a GPU a work-group computes a long row together; on a CPU each work-item has rows of its own.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from subgraph.dtypes import INTEGERS
from subgraph.engine.planner.lowering import Lowering, Unsupported
from subgraph.engine.planner.operands import Argument
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.opencl.lowering import ClLowering, cl_kernel, cl_primitive, cl_shared
from subgraph.opencl.runtime import ClSource
from subgraph.ops.shared.opencl_code import line, program, register, require, variant_of

from .arguments import ArgMinMaxArguments, CumulativeArguments
from .cpu import Reduction

Arguments = list["Argument | np.generic[Any]"]
_GROUP_ITEMS = 128  # work-items of a GPU that share a row (estimate)
_MIN_GROUP_ROW = 64  # elements of a row; shorter ones belong to one work-item (estimate)
_MAX_DIMENSIONS = 4  # kept ones, and reduced ones, in the arguments of kernels (kernels.cl)

cl_shared(
    *("ReduceSum", "ReduceMean", "ReduceProd", "ReduceMax", "ReduceMin", "ReduceL1", "ReduceL2"),
    *("ReduceSumSquare", "ReduceLogSum", "ReduceLogSumExp", "ArgMax", "ArgMin"),
    *("CumProd", "CumSum"),
)

# Macros of kernels.cl for each operation: START, STEP(a, v), JOIN(a, b), END(a).
_STEPS = {
    "sum": ("0", "(a) + (v)", "(a) + (b)", "a"),
    "mean": ("0", "(a) + (v)", "(a) + (b)", "(a) / total"),
    "prod": ("1", "(a) * (v)", "(a) * (b)", "a"),
    "max": ("x[0]", "(IS_NAN(a) || a > (v) ? a : (v))", "(IS_NAN(a) || a > (b) ? a : (b))", "a"),
    "min": ("x[0]", "(IS_NAN(a) || a < (v) ? a : (v))", "(IS_NAN(a) || a < (b) ? a : (b))", "a"),
    "l1": ("0", "(a) + ((v) < 0 ? -(v) : (v))", "(a) + (b)", "a"),
    "l2": ("0", "(a) + (v) * (v)", "(a) + (b)", "sqrt(a)"),
    "sumsq": ("0", "(a) + (v) * (v)", "(a) + (b)", "a"),
    "logsum": ("0", "(a) + (v)", "(a) + (b)", "log(a)"),
    "sumexp": ("0", "(a) + exp((v) - shift)", "(a) + (b)", "log(a) + shift"),
}


def row_program(dtype: str, **macros: str | int) -> ClSource:
    """Return the program of reductions and normalizations for a dtype, with these macros."""
    macros = {"GROUP": 1, "REAL": int(dtype not in INTEGERS), **macros}
    return program("reduce/kernels", T=register(dtype), **macros)


def row_ranges(low: ClLowering, count: int, size: int) -> tuple[int, tuple[int], tuple[int]]:
    """Return how many work-items share a row, and the launch ranges.

    Args:
        low: The lowering.
        count: Number of rows.
        size: Elements of a row.

    Returns:
        Work-items that share a row, the global range, the range of a work-group.
    """
    if low.traits.is_gpu and size >= _MIN_GROUP_ROW:
        return _GROUP_ITEMS, (count * _GROUP_ITEMS,), (_GROUP_ITEMS,)
    return 1, *line(low, count)


@cl_primitive
def emit_merged_reduction(low: Lowering, r: Reduction) -> None:
    """Launch a reduction.

    Raises:
        Unsupported: More than four dimensions are kept, or reduced.
    """
    assert isinstance(low, ClLowering)
    require(low, r.x.dtype)
    kept = [d for d, is_kept in enumerate(r.kept) if is_kept]
    others = [d for d, is_kept in enumerate(r.kept) if not is_kept]
    if max(len(kept), len(others)) > _MAX_DIMENSIONS:
        raise Unsupported(f"a reduction over {len(r.dims)} dimensions that do not merge")
    arguments: Arguments = [r.y.size, r.x, r.y, r.shifts or r.y]
    for chosen in (kept, others):
        missing = _MAX_DIMENSIONS - len(chosen)
        arguments += [*[1] * missing, *(r.dims[d] for d in chosen)]
        arguments += [*[0] * missing, *(r.steps[d] for d in chosen)]
    arguments.append(r.count)
    start, step, join, end = _STEPS[r.op]
    group, *ranges = row_ranges(low, r.y.size, r.count)
    macros: dict[str, str | int] = {"STEP(a, v)": step, "JOIN(a, b)": join, "END(a)": end}
    source = row_program(
        r.dtype, REDUCE=1, START=start, GROUP=group, SHIFTED=int(bool(r.shifts)), **macros
    )
    moved = r.x.nbytes + r.y.nbytes
    low.launch(source, "reduce", arguments, *ranges, flops=r.x.size, bytes=moved)


@cl_kernel("subgraph.ops.reduce.kernels", "argminmax_columns", "argminmax_rows")
def argminmax(low: ClLowering, kernel: Kernel, a: ArgMinMaxArguments) -> None:
    """Launch ArgMax or ArgMin."""
    variant = variant_of(kernel)
    require(low, variant["dtype"])
    flags = {"LARGEST": int(variant["largest"]), "LAST": int(variant["last"]), "PRODUCT": 0}
    rows = a.x.size // a.size
    source = row_program(variant["dtype"], SCAN=1, **flags)
    low.launch(source, "argminmax", [rows, *a.words()], *line(low, rows))


@cl_kernel("subgraph.ops.reduce.kernels", "cumulative")
def cumulative(low: ClLowering, kernel: Kernel, a: CumulativeArguments) -> None:
    """Launch CumSum or CumProd."""
    variant = variant_of(kernel)
    require(low, variant["dtype"])
    rows = a.x.size // a.size
    flags = {"LARGEST": 0, "LAST": 0, "PRODUCT": int(variant["op"] == "prod")}
    source = row_program(variant["dtype"], SCAN=1, **flags)
    low.launch(source, "cumulative", [rows, *a.words()], *line(low, rows))
