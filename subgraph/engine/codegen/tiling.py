"""The argument words of register tiles, and how work is cut into them; free of numba.

A contraction tile (``subgraph.engine.codegen.tile``) reads everything it needs from a block of
64-bit words; kernels fill in the ``T_*`` words. Planning code takes the tile sizes from here.
"""

from __future__ import annotations

# Words of a tile's argument block (index; times 8 gives the byte offset).
T_A = 0  # address of A at row 0, first segment
T_ARS = 1  # bytes between rows of A
T_AKS = 2  # bytes between the steps of the inner loop in A
T_B = 3  # address of B at the first segment
T_BKS = 4  # bytes between the steps of the inner loop in B
T_BJS = 5  # bytes between the vectors of one step of B
T_N0, T_SA0, T_SB0 = 6, 7, 8  # outermost segment loop: count, bytes in A, bytes in B
T_N1, T_SA1, T_SB1 = 9, 10, 11
T_N2, T_SA2, T_SB2 = 12, 13, 14
T_KIN = 15  # steps of the inner loop
T_C = 16  # address of C
T_CRS = 17  # bytes between rows of C
T_CJS = 18  # bytes between the vectors of one row of C
T_INIT = 19  # address of what the sums start from (bias, or C to continue a sum), 0 for zero
T_IRS, T_IJS = 20, 21  # its strides in bytes: rows, vectors
T_RBIAS = 22  # address of one element per row that is added at the end, 0 for none
T_RES = 23  # address of what is added at the end (residual), 0 for none
T_RRS, T_RJS = 24, 25  # its strides in bytes: rows, vectors
T_FLAGS = 26  # F_* bits
T_LO, T_HI = 27, 28  # float64 bits: bounds of the activation
T_TAIL = 29  # valid elements of the last vector (masked tiles only)
T_KLAST = 30  # steps of the inner loop in the last round of the outermost loop; 0: T_KIN
T_AHEAD = 31  # address of what comes after B: tiles with ``ahead`` bring it closer meanwhile
T_PACE = 32  # bytes of it for every two steps of the inner loop
T_LEFT, T_RIGHT = 33, 34  # pixels of a row of windows that lie outside, at its ends
T_ZERO = 35  # address of a vector of zeros
T_WORDS = 36

F_LO = 1  # the result is at least T_LO
F_HI = 2  # the result is at most T_HI

LOW_ROWS = 8  # tiles of at most so many rows address dense operands in one register each


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
