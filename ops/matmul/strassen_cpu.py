"""Strassen's product of matrices on the CPU device: where it is used, and how its work is cut."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from subgraph.engine.planner.lowering import Argument, Lowering, Operand
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.graph.types import Array
from subgraph.ops.shared.tile_planning import Activation, Tiles, even_part, grain, round_up
from subgraph.system.host import caches

from .arguments import StrassenArguments

_SUMS = 7  # operands that are made of A
_GAP = 16  # elements between their rows
_LEAST_LANES = 16  # narrower tiles end too often
_LEAST_ROWS = 48  # fewer cost less than the sums of a weight
_LEAST_PAIRS = 12  # of panels: fewer cost less than the sums of A, which every thread makes
_LEAST_DEPTH = 384  # below it the ends of tiles cost as much as is saved
_MOST_ROWS = 128  # of a block
_DEEPEST = 384  # steps of a pass in each half
_ALIKE = 16.0  # times as large may a column be as the one that it is added to
# Elements of the weight. Measured on chains of MatMul, one thread: with weights of 768 x 768 they
# run at 0.92 to 1.00 of the plain product's speed, with 768 x 3072 at 1.00 to 1.05 of it.
_LEAST_ELEMENTS = 1_000_000
_LARGEST = 1e15  # of which products are finite
_PAIRS = 48  # of panels of a block, at most: each block makes the sums of A
_SHARED_PAIRS = 12  # where threads share the blocks


def fits(low: Lowering, of: Tiles, n: int, depth: int) -> bool:
    """Return whether Strassen's product of a matrix and a packed weight is allowed and possible."""
    if not low.options.get("STRASSEN", True) or of.dtype != "float32" or of.weights:
        return False
    return n % (2 * of.width) == 0 and depth % (2 * of.lanes) == 0 and depth > 0


def saves(of: Tiles, m: int, n: int, depth: int) -> bool:
    """Return whether Strassen's product is expected to be faster than the plain one."""
    large = n >= 2 * of.width * _LEAST_PAIRS and depth >= _LEAST_DEPTH
    large = large and n * depth >= _LEAST_ELEMENTS
    return large and m >= _LEAST_ROWS and of.lanes >= _LEAST_LANES


def alike_columns(of: Tiles, change: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """Return the recipe of a number for each pair of panels: 1 if columns may share their errors.

    Each column of a panel is added to one of the panel half of all columns later: neither may be
    more than 16 times as large as the other, infinite or NaN.
    """

    def make(weight: Array) -> Array:
        matrix = change(weight)[0]
        largest = np.maximum(matrix.max(axis=0), -matrix.min(axis=0)).reshape(2, -1, of.width)
        more, less = largest.max(axis=0), largest.min(axis=0)
        return np.asarray(((more <= _ALIKE * less) & (more < _LARGEST)).all(axis=1), np.int64)

    return make


def emit_strassen(
    low: Lowering,
    of: Tiles,
    left: tuple[Operand, int],
    weight: Argument,
    alike: Argument,
    out: Operand,
    sizes: tuple[int, int, int],
    init: Argument,
    residual: Argument,
    act: Activation,
) -> None:
    """Emit ``strassen_kernels.product``.

    Args:
        low: Where to.
        of: Its tiles.
        left: The left operand and the elements between its rows.
        weight: The packed right operand.
        alike: What `alike_columns` makes of it.
        out: The result.
        sizes: M, N, K.
        init: One element per column, 0 for none.
        residual: What is added at the end, 0 for none.
        act: What follows.
    """
    (a, row_step), (m, n, depth) = left, sizes
    item = of.item
    # Blocks and passes are the same for every number of threads: so are the results.
    blocks = -(-m // _MOST_ROWS)
    mb = round_up(-(-m // blocks), 2)
    room = caches().l2 * 3 // 4 // (_SUMS * item * (mb // 2))
    most = max(64, min(room, _DEEPEST))
    passes = -(-depth // 2 // most)
    kc = round_up(-(-depth // 2 // passes), of.lanes)
    pairs = n // of.width // 2
    row_blocks = -(-m // mb)
    pb = min(pairs, _PAIRS)
    if low.threads > 1:
        pb = min(pb, _SHARED_PAIRS, -(-pairs * row_blocks // low.threads))
        pb = even_part(pairs, pb, row_blocks, low.threads)
    units = row_blocks * -(-pairs // pb)
    row = (kc + _GAP) * item
    room = _SUMS * (mb // 2) * row + (kc + 2 * mb) * of.width * item
    scratch = low.scratch(room, per_worker=True)
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
        post=act.post,
        flags=act.flags,
        low=act.low,
        high=act.high,
        block_rows=mb,
        block_pairs=pb,
        pass_depth=kc,
        scratch=scratch,
        scratch_bytes=scratch.nbytes,
        sum_row=row,
        sum_bytes=mb // 2 * row,
        mixed_tile=of.contraction(ahead=True, twice=True, mixed=True),
        alike=alike,
    )
    flops = 2 * m * n * depth
    moved = (a.size + 2 * m * n + n * depth) * item
    kernel = Kernel("subgraph.ops.matmul.strassen_kernels", "product", **of.variant)
    low.emit(
        kernel,
        arguments,
        units,
        grain=grain(units, flops),
        flops=flops * 7 // 8,
        bytes=moved,
    )
