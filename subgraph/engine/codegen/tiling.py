"""The argument block of register tiles, and the division of rows into tiles.

A kernel fills in a `TileBlock` for each tile that it calls (`subgraph.engine.codegen.tile`).
Lowerings take the sizes of tiles from here, so this module does not import numba.
"""

from __future__ import annotations

from subgraph.engine.codegen.arguments import Address, WordBlock


class TileBlock(WordBlock):
    """Arguments of a tile: ``C = epilogue(start + sum of A * B)``.

    The sum runs over four nested loops: outer, middle and inner, whose strides are free (blocks
    of channels, rows and columns of a convolution's kernel), and the innermost over steps (channels
    of a block, or k of a GEMM).
    Strides are in bytes. An address of 0 means that there is no such operand. Strips, panels and
    windows (`strip`, `panel`) use some fields in ways of their own.

    Attributes:
        a: A at row 0 and the first iteration of all loops.
        a_row: Stride of A between rows.
        a_step: Stride of A between steps.
        b: B at the first vector and the first iteration of all loops.
        b_step: Stride of B between steps.
        b_vector: Stride of B between the vectors of one step.
        outer_count: Iterations of the outer loop.
        outer_a: Stride of A between them.
        outer_b: Stride of B between them.
        middle_count: Iterations of the middle loop.
        middle_a: Stride of A between them.
        middle_b: Stride of B between them.
        inner_count: Iterations of the inner loop.
        inner_a: Stride of A between them.
        inner_b: Stride of B between them.
        steps: Steps in one iteration of the inner loop.
        c: First element of C.
        c_row: Stride of C between rows.
        c_vector: Stride of C between the vectors of one row.
        start: Initial values of the sums: a bias, or C to continue a sum; 0 for zeros.
        start_row: Their stride between rows.
        start_vector: Their stride between vectors.
        row_bias: One element per row that is added to the sums.
        residual: Another tensor that is added to the sums.
        residual_row: Its stride between rows.
        residual_vector: Its stride between vectors.
        flags: Sum of ``F_*``.
        low: Lower bound of the result if F_LO is set. Other activations, which kernels apply to C
            after the tile, keep their first parameter here.
        high: Upper bound of the result if F_HI is set, else the activation's second parameter.
        tail: Elements of the last vector of a row that exist (masked tiles only).
        last_steps: Steps in the last iteration of the outer loop; 0: as many as in the others.
        ahead: Address of the memory that will be read after B (tiles that prefetch only).
        pace: Bytes of that memory to prefetch per two steps.
        left: Pixels of a row that lie outside the image at its begin (windows only).
        right: Pixels of a row that lie outside the image at its end (windows only).
        zeros: Address of a vector of zeros (windows only).
        a_register: Stride of A between registers of 16 rows (matrix tiles only).
        run_rows: Rows of sums that are a run of rows of C (matrix tiles only); 0: all rows are.
        gap_rows: Rows of sums between runs, which are not rows of C.
        first_run: Rows of the first run, if there are several.
        a_gap: Bytes by which the first row of A of a run is farther away than the next row of the
            run before (dot products of pairs only; their sums have no gaps).
        depth: Elements of A of a step (emulated matrix tiles only); 0: `MATRIX_DEPTH`.
        last_depth: Elements of A, an even number, of the last step of the last iteration of the
            outer loop; 0: as of other steps. Only dot products of pairs need not read the rest.
        rounded: Where an activation stores its results in bfloat16: pixels of a block of 32
            channels, of which each vector of a row has half.
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
    a_register: int
    run_rows: int
    gap_rows: int
    first_run: int
    a_gap: int
    depth: int
    last_depth: int
    rounded: Address


# Flags of `TileBlock.flags`.
F_LO = 1  # the result is at least `low`
F_HI = 2  # the result is at most `high`
F_BFLOAT16_C = 4  # C is rounded to bfloat16 (matrix tiles only)
F_BFLOAT16_RESIDUAL = 8  # `residual` is bfloat16 (matrix tiles only)

# Matrix tiles (`subgraph.engine.codegen.matrix_tile`): rows of a register, and bytes of a row; rows
# and vectors of two by two registers of sums; elements of bfloat16 of a step along K (hardware
# figures).
MATRIX_ROWS, MATRIX_ROW_BYTES = 16, 64
MATRIX_TILE = 2 * MATRIX_ROWS, 2
MATRIX_DEPTH = 32
# Bytes behind the last pixel of an image that the last tile reads, and ignores: its registers.
MATRIX_SLACK = MATRIX_TILE[0] * MATRIX_ROW_BYTES

# Tiles of at most this many rows unroll their steps over operands without gaps, each of which then
# needs one address register (x86's addressing modes reach the multiples of a stride up to 8).
FEW_ROWS = 8
# Taller tiles have an even number of rows, so that fewer heights are compiled (estimate).
_MAX_ODD_ROWS = 8


def tile_shape(lanes: int, registers: int) -> tuple[int, int]:
    """Return ``(mr, nv)``, rows and vectors of the largest tile whose sums stay in registers.

    Args:
        lanes: Elements of a vector.
        registers: Number of vector registers.
    """
    # 14 x 2 sums, 2 vectors of B and 1 of A are 31 of 32 registers; 6 x 2 sums and the same
    # operands are 15 of 16.
    if registers >= 32 and lanes > 1:
        return 14, 2
    return (6, 2) if lanes > 1 else (4, 2)


def tile_rows(left: int, mr: int) -> int:
    """Return the rows of the next tile: about equal tiles, rather than full ones and a remainder.

    Kernels call it, too (it compiles with numba).

    Args:
        left: Rows that are left, at least 1.
        mr: Most rows of a tile.

    Returns:
        One of `row_counts`, at most ``left``.
    """
    tiles = (left + mr - 1) // mr
    rows = (left + tiles - 1) // tiles
    # Odd heights above _MAX_ODD_ROWS are not compiled (`row_counts`).
    if rows <= _MAX_ODD_ROWS or rows % 2 == 0:
        return rows
    # One row more is possible only if the next tile has a row to give; a single tile becomes two.
    return rows + 1 if rows < left else (rows + 1) // 2


def tile_run(left: int, mr: int) -> tuple[int, int]:
    """Return the rows of the next tile, and how many tiles in a row have as many.

    Up to 8 rows, tiles have two heights that differ by one, so that none is so low that it waits
    for the latency of its sums. Kernels call it, too. Arguments are those of `tile_rows`.
    """
    rows = tile_rows(left, mr)
    return rows, left - (left + rows - 1) // rows * (rows - 1) if rows <= _MAX_ODD_ROWS else 1


def row_counts(mr: int) -> tuple[int, ...]:
    """Return the tile heights that are compiled, up to ``mr``: all up to 8, even ones above."""
    return tuple(r for r in range(1, mr + 1) if r <= _MAX_ODD_ROWS or r % 2 == 0)
