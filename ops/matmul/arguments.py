"""Arguments of the kernels of matrix products."""

from __future__ import annotations

from subgraph.engine.codegen.arguments import Address, KernelArguments, Triple, Words


class IntegerGemmArguments(KernelArguments):
    """Arguments of `product` of integers; a work unit is four rows of a matrix of the stack.

    Blocks of rows are innermost. If the last block of a matrix has fewer than four rows, its last
    row is computed repeatedly.

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


class PackRightArguments(KernelArguments):
    """Arguments of `pack_b`; a work unit is a panel of a matrix.

    Attributes:
        source: The matrices, of any strides.
        target: Their panels, ``[matrix][panel][depth][columns of the panel]``.
        depth: Rows of a matrix.
        columns: Columns of a matrix.
        row_step: Bytes between rows of the source.
        column_step: Bytes between columns of the source.
        source_matrix: Bytes between matrices of the source.
        target_matrix: Bytes between matrices of the target.
        panels: Panels of a matrix.
        factor: Factor by which every element is multiplied.
    """

    source: Address
    target: Address
    depth: int
    columns: int
    row_step: int
    column_step: int
    source_matrix: int
    target_matrix: int
    panels: int
    factor: float


class RoundRowsArguments(KernelArguments):
    """Arguments of `round_rows`; a work unit is 16 rows of a matrix.

    Attributes:
        source: Matrices of float32, of any strides.
        target: Registers of bfloat16 of each matrix: for each 16 rows all steps of 32 columns.
        rows: Rows of a matrix.
        depth: Columns of a matrix.
        row_step: Bytes between rows of the source.
        column_step: Bytes between columns of the source.
        source_matrix: Bytes between matrices of the source.
        block: Adjacent columns of the source, a multiple of 16; 0: all.
        block_step: Bytes between blocks of columns of the source.
    """

    source: Address
    target: Address
    rows: int
    depth: int
    row_step: int
    column_step: int
    source_matrix: int
    block: int
    block_step: int


class GemmArguments(KernelArguments):
    """Arguments of `gemm`; a work unit is a block of C of a product of the batch.

    The batch has three levels; units run over its products outermost. B is packed into panels, or
    row-major. Matrix tiles read registers of A, as `round_rows` writes them, and of B.

    Attributes:
        a: Left matrices.
        b: Right matrices.
        c: The results; the columns of a vector are contiguous.
        init: Initial values of each row of sums, one element for each column; 0: zeros.
        residual: Matrices added at the end; 0: none.
        m: Rows of A and C.
        n: Columns of B and C.
        k: Columns of A, rows of B.
        a_row: Bytes between rows of A.
        a_column: Bytes between columns of A; with matrix tiles between steps.
        a_register: Bytes between registers of A (matrix tiles only).
        a_blocks: Blocks of adjacent columns of A; 1: all columns are adjacent.
        a_block: Bytes between these blocks.
        b_row: Bytes between rows of B; 0: B is packed.
        c_row: Bytes between rows of C; of float32 also if C is stored as registers.
        c_vector: Bytes between vectors of a row of C.
        residual_row: As ``c_row``, of the residual.
        residual_vector: As ``c_vector``, of the residual.
        c_register: Bytes between the registers of 16 rows of C and those of the next 16, if C is
            stored as registers of bfloat16; 0: as rows.
        tile: The contraction tile.
        masked_tile: The contraction tile whose last vector is masked.
        activation: The kernel applied to a finished tile; 0: none.
        flags: ``F_*`` flags of the results.
        low: Lower bound of the results, if the flags ask for it.
        high: Upper bound of the results, if the flags ask for it.
        block_rows: Rows of a block.
        block_panels: Panels of a block.
        size1: Size of level 1 of the batch.
        size2: Size of level 2, the innermost.
        a_steps: Bytes between matrices of A along each level.
        b_steps: Bytes between matrices of B along each level.
        c_steps: Bytes between matrices of C along each level.
        rows_first: 1 if units run over blocks of rows innermost, 0 if over blocks of panels.
    """

    a: Address
    b: Address
    c: Address
    init: Address
    residual: Address
    m: int
    n: int
    k: int
    a_row: int
    a_column: int
    a_register: int
    a_blocks: int
    a_block: int
    b_row: int
    c_row: int
    c_vector: int
    residual_row: int
    residual_vector: int
    c_register: int
    tile: Address
    masked_tile: Address
    activation: Address
    flags: int
    low: float
    high: float
    block_rows: int
    block_panels: int
    size1: int
    size2: int
    a_steps: Triple
    b_steps: Triple
    c_steps: Triple
    rows_first: int


class GroupedGemmArguments(GemmArguments):
    """Arguments of `grouped`: each row of A is multiplied by one of several matrices.

    A work unit is a block of panels of one matrix, for all rows that use it; ``block_rows`` of them
    are computed together. A and C are one matrix each, with adjacent rows; the last of ``b_steps``
    is the bytes between the packed matrices of B, and the other steps are 0.

    Attributes:
        indices: For each row of A the number of its matrix; negative ones count from the end.
        matrices: Number of matrices of B.
        scratch: Memory of each worker for the numbers of ``block_rows`` rows, and these rows of A
            and C.
        scratch_bytes: Bytes between the memory of two workers.
    """

    indices: Address
    matrices: int
    scratch: Address
    scratch_bytes: int
