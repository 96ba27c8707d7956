"""Strassen's matrix product on the CPU device: when it is used, and the tiling of its loops."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from subgraph.engine.planner.lowering import Argument, Lowering, Operand
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.graph.types import Array
from subgraph.ops.shared.tile_planning import Activation, Tiles, even_part, grain, round_up
from subgraph.system.host import caches

from .arguments import StrassenArguments

_SUMS = 7  # sums of quarters of A that are operands of products
# Elements of padding between rows of these sums, so that they do not share cache sets.
_ROW_PADDING = 16
# Limits below which additions and the overhead of tiles cost as much as the saved product saves
# (estimates, except _MIN_ELEMENTS).
_MIN_LANES = 16  # elements of a vector
_MIN_ROWS = 48  # rows of A
_MIN_PAIRS = 12  # pairs of panels of B: every thread computes the sums of A
_MIN_DEPTH = 384  # steps of K
# Elements of the weight. Measured on chains of MatMul, one thread: with weights of 768 x 768 they
# run at 0.92 to 1.00 of the plain product's speed, with 768 x 3072 at 1.00 to 1.05 of it.
_MIN_ELEMENTS = 1_000_000
# The sums of a block of rows may take this part of the L2 cache (estimate): the rest is for panels.
_PART_OF_L2 = 0.75
# Limits of a block of rows and of a pass (estimates).
_MAX_BLOCK_ROWS = 128  # rows of a block, at most
_MIN_PASS_DEPTH, _MAX_PASS_DEPTH = 64, 384  # steps of a pass in each half of K
# Largest ratio of magnitudes of columns that are added (estimate): the larger column's error is
# added to the smaller one.
_MAX_RATIO = 16.0
_MAX_ELEMENT = 1e15  # elements below it have finite products in float32
# Pairs of panels of a block, at most (estimates); each block computes the sums of A.
_MAX_BLOCK_PAIRS = 48
_MAX_SHARED_BLOCK_PAIRS = 12  # the same if threads share the blocks


def is_possible(low: Lowering, of: Tiles, n: int, depth: int) -> bool:
    """Return whether Strassen's product of a matrix and a packed weight is enabled and possible.

    Args:
        low: The lowering, with the option ``STRASSEN``.
        of: The contraction tiles.
        n: Columns of the weight.
        depth: Rows of the weight.
    """
    if not low.options.get("STRASSEN", True) or of.dtype != "float32" or of.packed_as:
        return False
    return n % (2 * of.width) == 0 and depth % (2 * of.lanes) == 0 and depth > 0


def is_faster(of: Tiles, m: int, n: int, depth: int) -> bool:
    """Return whether Strassen's product is expected to be faster than the plain one.

    Args:
        of: The contraction tiles.
        m: Rows of the left matrix.
        n: Columns of the weight.
        depth: Rows of the weight.
    """
    large = n >= 2 * of.width * _MIN_PAIRS and depth >= _MIN_DEPTH
    large = large and n * depth >= _MIN_ELEMENTS
    return large and m >= _MIN_ROWS and of.lanes >= _MIN_LANES


def similar_columns(of: Tiles, change: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """Return a function from a weight to a flag for each pair of panels: 1 if its sums are safe.

    Strassen's algorithm adds each column of a panel to a column of the paired panel, half of all
    columns later. That is safe if neither is 16 times as large as the other, infinite or NaN.

    Args:
        of: The contraction tiles.
        change: Function from the weight to ``[1, K, N]``.
    """

    def make(weight: Array) -> Array:
        matrix = change(weight)[0]
        largest = np.maximum(matrix.max(axis=0), -matrix.min(axis=0)).reshape(2, -1, of.width)
        more, less = largest.max(axis=0), largest.min(axis=0)
        return np.asarray(
            ((more <= _MAX_RATIO * less) & (more < _MAX_ELEMENT)).all(axis=1), np.int64
        )

    return make


def emit_strassen(
    low: Lowering,
    of: Tiles,
    left: tuple[Operand, int],
    weight: Argument,
    similar: Argument,
    out: Operand,
    sizes: tuple[int, int, int],
    init: Argument,
    residual: Argument,
    act: Activation,
) -> None:
    """Emit the kernel ``strassen_kernels.product``.

    Args:
        low: Collects the plan's steps and scratch memory.
        of: The contraction tiles.
        left: The left operand and the elements between its rows.
        weight: The packed right operand.
        similar: Its flags from `similar_columns`.
        out: The result.
        sizes: M, N, K.
        init: Initial values of sums, one per column; 0: zeros.
        residual: Matrix added at the end; 0: none.
        act: The activation.
    """
    (a, row_step), (m, n, depth), item = left, sizes, of.item
    mb, pb, kc = _block(of, m, n, depth, low.threads)
    row = (kc + _ROW_PADDING) * item
    sums = mb // 2 * row
    arguments = StrassenArguments(
        a=a,
        b=weight,
        c=out,
        init=init,
        residual=residual,
        m=m,
        n=n,
        k=depth,
        a_row=row_step * item,
        tile=of.contraction(ahead=True),
        twice_tile=of.contraction(ahead=True, twice=True),
        **act.arguments(),
        block_rows=mb,
        block_pairs=pb,
        pass_depth=kc,
        **low.worker_scratch(_SUMS * sums + (kc + 2 * mb) * of.width * item),
        sum_row=row,
        sum_bytes=sums,
        mixed_tile=of.contraction(ahead=True, twice=True, mixed=True),
        similar=similar,
    )
    flops, units = 2 * m * n * depth, -(-m // mb) * -(-(n // of.width // 2) // pb)
    low.emit(
        Kernel("subgraph.ops.matmul.strassen_kernels", "product", **of.variant),
        arguments,
        units,
        grain=grain(units, flops),
        flops=flops * 7 // 8,
        bytes=(a.size + 2 * m * n + n * depth) * item,
    )


def _block(of: Tiles, m: int, n: int, depth: int, threads: int) -> tuple[int, int, int]:
    """Return the rows of a block, its pairs of panels, and the steps of a pass in each half of K.

    Rows and steps do not depend on the number of threads, and so neither do the results.
    """
    rows = round_up(-(-m // -(-m // _MAX_BLOCK_ROWS)), 2)
    fitting = int(caches().l2 * _PART_OF_L2) // (_SUMS * of.item * (rows // 2))
    passes = -(-depth // 2 // max(_MIN_PASS_DEPTH, min(fitting, _MAX_PASS_DEPTH)))
    steps = round_up(-(-depth // 2 // passes), of.lanes)
    all_pairs, row_blocks = n // of.width // 2, -(-m // rows)
    pairs = min(all_pairs, _MAX_BLOCK_PAIRS)
    if threads > 1:
        pairs = min(pairs, _MAX_SHARED_BLOCK_PAIRS, -(-all_pairs * row_blocks // threads))
        pairs = even_part(all_pairs, pairs, row_blocks, threads)
    return rows, pairs, steps
