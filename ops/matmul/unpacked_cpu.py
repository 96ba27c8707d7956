"""Matrix products on the CPU device that read B as it lies: of few rows, and of few steps."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from subgraph.engine.planner.lowering import Lowering, Word
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.graph.types import Array
from subgraph.ops.elementwise.cpu import temporary
from subgraph.ops.movement.copies_cpu import emit_copy
from subgraph.ops.shared.strides import contiguous
from subgraph.ops.shared.tile_planning import Tiles, grain, round_up
from subgraph.system.host import caches

from .arguments import UnpackedArguments
from .products import Matrix, Product, batch_steps, is_transposed

SHALLOW = 8  # maximum K of a product that is bound by writing its result
_ROWS_WORK = 4096  # minimum elements of the result in a unit of `shallow`
_LEAST_COLUMNS = 64  # minimum columns in a unit of `few_rows`
_COLUMNS_IN_CACHE = 2048  # bytes of a row of B: eight rows take half of a 32 KiB L1 cache


def reads_once(product: Product, a: Matrix, of: Tiles) -> bool:
    """Return whether so few rows meet a B computed at run time that it is read as it lies."""
    b, act, rows = product.b, product.act, a.rows
    if b.operand.constant or act.post != 0 or act.flags:
        return False
    large = b.rows * b.columns * of.item > caches().l2 // 2
    if is_transposed(b):
        most = 4 if not of.low else 16 if large else 8
        return a.column_step == 1 and rows <= most and b.rows >= 32  # sums across vectors cost
    # Wide tiles need not walk down B in columns of a cache line or two.
    if not of.low or b.column_step != 1 or b.columns < of.lanes:
        return False
    return rows == 1 or (b.rows >= 8 and rows <= (16 if large else 8 if b.columns >= 128 else 2))


def emit_few_rows(
    low: Lowering,
    product: Product,
    a: Matrix,
    sizes: Sequence[int],
    steps: Sequence[Sequence[int]],
    of: Tiles,
    init: Word,
    residual: Word,
) -> None:
    """Emit the product of few rows, which reads B as it lies."""
    b, turned, item = product.b, is_transposed(product.b), of.item
    m, n, depth, batch = a.rows, b.columns, a.columns, math.prod(sizes)
    block = n
    if low.threads > 1:
        pieces = max(1, min(-(-4 * low.threads // batch), n // _LEAST_COLUMNS))
        block = round_up(-(-n // pieces), of.lanes)
    if not turned and m > 1:  # eight rows of B stay in the first cache
        block = min(block, _COLUMNS_IN_CACHE // item)
    units = batch * -(-n // block)
    arguments = UnpackedArguments(
        a=a.operand,
        b=b.operand,
        c=product.out,
        init=init,
        residual=residual,
        m=m,
        n=n,
        k=depth,
        a_row=a.row_step * item,
        a_column=a.column_step * item,
        b_step=(b.column_step if turned else b.row_step) * item,
        alpha=product.alpha,
        block=block,
        **batch_steps(sizes, steps, item, item),
    )
    flops = 2 * batch * m * n * depth
    moved = (a.operand.size + b.operand.size + 2 * batch * m * n) * item
    low.emit(
        Kernel(
            "subgraph.ops.matmul.row_kernels",
            "few_rows",
            dtype=of.dtype,
            lanes=of.lanes,
            turned=turned,
        ),
        arguments,
        units,
        grain=grain(units, flops + 2 * moved),
        flops=flops,
        bytes=moved,
    )


def emit_shallow(
    low: Lowering,
    product: Product,
    a: Matrix,
    sizes: Sequence[int],
    steps: Sequence[Sequence[int]],
    of: Tiles,
    init: Word,
) -> None:
    """Emit the product of few steps, over rows of B."""
    b, item = product.b, of.item
    m, n, depth, batch = a.rows, b.columns, a.columns, math.prod(sizes)
    b_word: Word = b.operand
    if b.column_step != 1 and n > 1:
        shape = (*b.shape, depth, n)
        if b.operand.constant:

            def turn(array: Array) -> Array:
                return np.ascontiguousarray(array.reshape(*b.shape, n, depth).swapaxes(-1, -2))

            b_word = low.weight(f"gemm rows {shape}", turn, b.operand)
        else:
            b_word = turned = temporary(low, of.dtype, shape)
            outside = contiguous(shape)[:-2]
            given = (*outside, b.row_step, b.column_step)
            emit_copy(low, b.operand, turned, shape, given, contiguous(shape), item=item)
    rows = m if low.threads == 1 else min(m, max(1, _ROWS_WORK // n))
    units = batch * -(-m // rows)
    arguments = UnpackedArguments(
        a=a.operand,
        b=b_word,
        c=product.out,
        init=init,
        residual=0,
        m=m,
        n=n,
        k=depth,
        a_row=a.row_step * item,
        a_column=a.column_step * item,
        b_step=n * item,
        alpha=product.alpha,
        block=rows,
        **batch_steps(sizes, steps, item, item),
    )
    flops = 2 * batch * m * n * depth
    moved = (a.operand.size + b.operand.size + batch * m * n) * item
    lanes = min(of.lanes, max(4, 1 << (n - 1).bit_length()))  # of narrow rows, no more than these
    low.emit(
        Kernel(
            "subgraph.ops.matmul.row_kernels", "shallow", dtype=of.dtype, lanes=lanes, depth=depth
        ),
        arguments,
        units,
        grain=grain(units, flops + 2 * moved),
        flops=flops,
        bytes=moved,
    )
