"""Kernel of integer GEMM: a register tile of four rows times a vector."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba.extending import register_jitable

from subgraph.engine.codegen.argument_views import view_of
from subgraph.engine.codegen.simd import vec
from subgraph.ops.movement.kernels import outer_offset

from .arguments import IntegerGemmArguments

Function = Callable[..., Any]


def product(*, dtype: str, lanes: int) -> Function:
    """Return the kernel of `IntegerGemmArguments`: A @ B modulo 2**32 or 2**64.

    Args:
        dtype: Dtype of the elements.
        lanes: Elements of a vector.
    """
    arguments = view_of(IntegerGemmArguments)
    v = vec(dtype, lanes)
    store_n, item = v.store_n, v.itemsize
    product_of_rows = _four_rows(v)

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        stack = arguments(args)
        m, depth, n, dimensions = stack.rows, stack.depth, stack.columns, stack.dimensions
        blocks = (m + 3) // 4
        row, line = depth * item, n * item
        for unit in range(begin, end):
            which, first, last = unit // blocks, unit % blocks * 4, m - 1
            a = stack.a + outer_offset(stack.dims, dimensions, which, 0)
            b = stack.b + outer_offset(stack.dims, dimensions, which, 1)
            y = stack.y + which * m * line
            i1, i2, i3 = min(first + 1, last), min(first + 2, last), min(first + 3, last)
            a0, a1, a2, a3 = a + first * row, a + i1 * row, a + i2 * row, a + i3 * row
            y0, y1, y2, y3 = y + first * line, y + i1 * line, y + i2 * line, y + i3 * line
            at = 0
            while at < n:
                to, left = at * item, min(n - at, lanes)
                c0, c1, c2, c3 = product_of_rows(a0, a1, a2, a3, b + to, line, row, left)
                store_n(y0 + to, left, c0)
                store_n(y1 + to, left, c1)
                store_n(y2 + to, left, c2)
                store_n(y3 + to, left, c3)
                at += lanes

    return kernel


def _four_rows(v: Any) -> Function:
    """Return the function that multiplies four rows of A by columns of B.

    ``a0`` to ``a3`` are the rows, of ``row`` bytes; ``b`` is the first element of the columns, in
    rows of ``line`` bytes.
    """
    load_n, bcast, zero, item = v.load_n, v.bcast, v.zero, v.itemsize

    @register_jitable
    def product_of_rows(
        a0: int, a1: int, a2: int, a3: int, b: int, line: int, row: int, n: int
    ) -> Any:
        """Return the sums of four rows and ``n`` columns, one vector at most."""
        c0, c1, c2, c3 = zero(), zero(), zero(), zero()
        for k in range(0, row, item):
            s = load_n(b, n)
            b += line
            c0, c1 = c0 + bcast(a0 + k) * s, c1 + bcast(a1 + k) * s
            c2, c3 = c2 + bcast(a2 + k) * s, c3 + bcast(a3 + k) * s
        return c0, c1, c2, c3

    return product_of_rows
