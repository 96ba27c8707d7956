"""MatMul, Gemm and MatMulInteger of integers that are computed at run time, on the CPU device.

Integers of 32 and 64 bits are multiplied modulo 2**32 or 2**64. Integers of 8 bits minus their zero
points are multiplied as floats: float32 represents sums of up to `MAX_FLOAT32_TERMS` products
exactly, float64 all longer ones.
"""

from __future__ import annotations

import math

from subgraph.engine.planner.lowering import Lowering, Unsupported
from subgraph.engine.planner.operands import Operand
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.ops.elementwise.cpu import emit_cast, emit_expression, source, temporary
from subgraph.ops.elementwise.expressions import Expression
from subgraph.ops.shared.delegation import delegate
from subgraph.ops.shared.strides import broadcast_sizes, broadcast_strides

from .arguments import IntegerGemmArguments

INTEGERS = ("int32", "int64", "uint32", "uint64")
MAX_FLOAT32_TERMS = (
    258  # most terms of at most 255 * 255 each whose sum is below 2**24, exact in float32
)
_ROWS = 4  # rows of a work unit, which the kernel computes side by side
_MIN_PRODUCTS_PER_THREAD = 1 << 16  # least multiplications of a thread (estimate)


def emit_integer_product(low: Lowering, a: Operand, b: Operand, y: Operand) -> None:
    """Emit A @ B of integers; stacks of matrices broadcast.

    Args:
        low: Collects the plan's steps.
        a: ``[..., M, K]`` or ``[K]``, int32, int64, uint32 or uint64.
        b: ``[..., K, N]`` or ``[K]``, of the same dtype.
        y: The result.

    Raises:
        Unsupported: Dtypes or depths differ.
    """
    if a.dtype not in INTEGERS or b.dtype != a.dtype or not a.rank or not b.rank:
        raise Unsupported(f"a product of {a.dtype} and {b.dtype}")
    left = (1, *a.shape) if a.rank == 1 else a.shape
    right = (*b.shape, 1) if b.rank == 1 else b.shape
    (m, depth), n = left[-2:], right[-1]
    if right[-2] != depth:
        raise Unsupported(f"a product of depths {depth} and {right[-2]}")
    stack = broadcast_sizes(left[:-2], right[:-2])
    steps = [
        [step * size * a.itemsize for step in broadcast_strides(shape[:-2], stack)]
        for shape, size in ((left, m * depth), (right, depth * n))
    ]
    arguments = IntegerGemmArguments(
        a=a,
        b=b,
        y=y,
        rows=m,
        depth=depth,
        columns=n,
        dimensions=len(stack),
        dims=[word for dim in zip(stack, *steps, strict=True) for word in dim],
    )
    kernel = Kernel(
        "subgraph.ops.matmul.integer_gemm_kernels",
        "product",
        dtype=a.dtype,
        lanes=low.lanes(a.dtype),
    )
    units = math.prod(stack) * -(-m // _ROWS)
    grain = max(1, _MIN_PRODUCTS_PER_THREAD // max(_ROWS * depth * n, 1))
    moved = a.nbytes + b.nbytes + y.nbytes
    low.emit(kernel, arguments, units, grain=grain, flops=2 * y.size * depth, bytes=moved)


def emit_int8_product(
    low: Lowering, a: Operand, b: Operand, zeros: tuple[Operand | None, Operand | None], y: Operand
) -> None:
    """Emit the int32 product of 8-bit integers minus their zero points.

    Args:
        low: Collects the plan's steps.
        a: ``[..., M, K]``, int8 or uint8.
        b: ``[..., K, N]``, int8 or uint8.
        zeros: Zero points of a and b, one number each; None: 0.
        y: The result, int32.

    Raises:
        Unsupported: A zero point has several numbers.
    """
    if any(zero is not None and zero.size != 1 for zero in zeros):
        raise Unsupported("a product of computed bytes with zero points for each row or column")
    work = "float32" if a.shape[-1] <= MAX_FLOAT32_TERMS else "float64"
    sides: list[Operand] = []
    for side, zero in zip((a, b), zeros, strict=True):
        e = Expression()
        value = e.cast(e.input(side.dtype), work)
        if zero is not None:
            value = e("sub", value, e.cast(e.input(zero.dtype), work))
        wide = temporary(low, work, side.shape)
        sources = [source(side), *([] if zero is None else [source(zero, ())])]
        emit_expression(low, e, sources, [(value, wide)])
        sides.append(wide)
    sums = temporary(low, work, y.shape)
    delegate(low, "MatMul", sides, sums)
    emit_cast(low, sums, y)
