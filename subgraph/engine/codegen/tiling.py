"""The arguments of register tiles, and how work is cut into them; free of numba.

A contraction tile (``subgraph.engine.codegen.tile``) reads everything it needs from a block of
64-bit words, which kernels fill in. Planning code takes the tile sizes from here.
"""

from __future__ import annotations

from subgraph.engine.codegen.arguments import Address, WordBlock


class TileBlock(WordBlock):
    """Arguments of a tile; all strides are bytes, 0 for an address means that there is none.

    Attributes:
        a: A at row 0, first segment.
        a_row: Stride of A between rows.
        a_step: Between the steps of the innermost loop.
        b: B at the first segment.
        b_step: Stride of B between the steps of the innermost loop.
        b_vector: Between the vectors of one step.
        outer_count: Iterations of the outermost loop over segments.
        outer_a: Stride of A along it.
        outer_b: Stride of B along it.
        middle_count: Iterations of the loop inside that.
        middle_a: Stride of A along it.
        middle_b: Stride of B along it.
        inner_count: Iterations of the loop inside that.
        inner_a: Stride of A along it.
        inner_b: Stride of B along it.
        steps: Steps of the innermost loop.
        c: First element of C.
        c_row: Stride of C between rows.
        c_vector: Between the vectors of one row.
        start: What the sums start from (bias, or C to continue a sum); 0: zeros.
        start_row: Its stride between rows.
        start_vector: Between vectors.
        row_bias: One element per row that is added at the end.
        residual: What is added at the end.
        residual_row: Its stride between rows.
        residual_vector: Between vectors.
        flags: ``F_*`` bits.
        low: Lower bound of the activation, or its first parameter.
        high: Upper bound of the activation, or its second parameter.
        tail: Valid elements of the last vector (masked tiles only).
        last_steps: Steps of the innermost loop in the last iteration of the outermost; 0: as many
            as in the others.
        ahead: What comes after B: tiles with ``ahead`` prefetch it meanwhile.
        pace: Bytes of it for every two steps of the innermost loop.
        left: Pixels of a row of windows that lie outside, at its beginning.
        right: The same at its end.
        zeros: A vector of zeros.
        addend: Bytes from B to what is added to it (tiles with ``mixed`` only).
        sum_copy: Bytes from B to where the sums are stored.
        sign: The factor of what is added to B.
    """

    a: Address
    a_row: int
    a_step: int
    b: Address
    b_step: int
    b_vector: int
    outer_count: int
    outer_a: int
    outer_b: int
    middle_count: int
    middle_a: int
    middle_b: int
    inner_count: int
    inner_a: int
    inner_b: int
    steps: int
    c: Address
    c_row: int
    c_vector: int
    start: Address
    start_row: int
    start_vector: int
    row_bias: Address
    residual: Address
    residual_row: int
    residual_vector: int
    flags: int
    low: float
    high: float
    tail: int
    last_steps: int
    ahead: Address
    pace: int
    left: int
    right: int
    zeros: Address
    addend: int
    sum_copy: int
    sign: float


F_LO = 1  # the result is at least `low`
F_HI = 2  # the result is at most `high`
F_MINUS = 4  # the sums are subtracted from `residual` (tiles with ``twice``)

FEW_ROWS = 8  # most rows of few-row tiles, which address each dense operand by one register


def tile_shape(lanes: int, registers: int) -> tuple[int, int]:
    """Return ``(mr, nv)``: rows and vectors of the largest tile that stays in registers."""
    if registers >= 32 and lanes > 1:
        return 14, 2
    return (6, 2) if lanes > 1 else (4, 2)


def tile_rows(left: int, mr: int) -> int:
    """Return how many rows the next tile takes of ``left``: equal tiles rather than a rest.

    Usable inside kernels. Only row counts of :func:`row_counts` come out.
    """
    tiles = (left + mr - 1) // mr
    rows = (left + tiles - 1) // tiles
    if rows <= 8 or rows % 2 == 0:
        return rows
    return rows + 1 if rows < left else (rows + 1) // 2


def tile_run(left: int, mr: int) -> tuple[int, int]:
    """Return how many rows the next tiles take of ``left``, and how many tiles take as many.

    Low tiles come in two heights that differ by one row: they wait for their sums. Usable inside
    kernels.
    """
    rows = tile_rows(left, mr)
    return rows, left - (left + rows - 1) // rows * (rows - 1) if rows <= 8 else 1


def row_counts(mr: int) -> tuple[int, ...]:
    """Return the tile heights that are compiled for a largest height ``mr`` (even above 8)."""
    return tuple(r for r in range(1, mr + 1) if r <= 8 or r % 2 == 0)
