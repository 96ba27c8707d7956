"""Arguments of the kernels of matrix products."""

from __future__ import annotations

from subgraph.engine.codegen.arguments import Address, KernelArguments, Words


class WholeProductArguments(KernelArguments):
    """Arguments of `product` of integers; a work unit is four rows of a matrix of the stack.

    Blocks of rows are innermost. The last block of a matrix may overlap the one before: its rows
    are computed as often as it takes.

    Attributes:
        a: Left matrices, ``[stack][rows][depth]``.
        b: Right matrices, ``[stack][depth][columns]``.
        y: The products, ``[stack][rows][columns]``, contiguous.
        rows: Rows of a matrix of a.
        depth: Columns of a matrix of a, rows of one of b.
        columns: Columns of a matrix of b.
        dimensions: Number of dimensions of the stack.
        dims: For each dimension of the stack its size, bytes in a, bytes in b.
    """

    a: Address
    b: Address
    y: Address
    rows: int
    depth: int
    columns: int
    dimensions: int
    dims: Words
