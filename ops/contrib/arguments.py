"""Arguments of the kernels of products with weights of 2, 4 or 8 bits."""

from __future__ import annotations

from subgraph.engine.codegen.arguments import Address, KernelArguments, WordBlock

# The float32 whose mantissa counts ones: the bits of this plus a number below are its bits with the
# number in the low ones.
NUMBER_BASE = 1 << 23


class BlockwiseArguments(KernelArguments):
    """What all kernels of blockwise weights take.

    A *panel* is a number of vectors of columns. A word of 32 bits holds the numbers of successive
    rows of one column, the first one in its low bits.

    Attributes:
        packed: int32 ``[panel][word of a column][column of the panel]``.
        scales: float32 ``[panel][block][column of the panel]``.
        zeros: As ``scales``: zero points plus `NUMBER_BASE`; 0: all are half of the range.
        columns: Columns that exist.
        blocks: Blocks of a column.
        whole_words: Words of a block of a column.
        last_words: Words of the last block whose rows exist.
    """

    packed: Address
    scales: Address
    zeros: Address
    columns: int
    blocks: int
    whole_words: int
    last_words: int


class BlockwiseProductArguments(BlockwiseArguments):
    """Arguments of `few_rows`; a work unit is a panel.

    Attributes:
        a: Left side, rows without gaps: float32, or bytes of `quantize_rows`.
        factors: Two float32 for each block of a row of bytes, as in `QuantizeRowsArguments`; 0 for
            float32.
        y: The product, float32 rows without gaps.
        bias: float32 for each column, padded to whole vectors; 0: none.
        rows: Rows of ``a`` and ``y``.
        depth: Elements of a row of ``a``.
    """

    a: Address
    factors: Address
    y: Address
    bias: Address
    rows: int
    depth: int


class BlockwiseGroupsArguments(BlockwiseProductArguments):
    """Arguments of `grouped_rows`: each row is multiplied by one of several matrices.

    A work unit is a block of panels of one matrix, for all rows that use it. There is no bias.

    Attributes:
        indices: For each row the number of its matrix; negative ones count from the end.
        matrices: Number of matrices.
        words_step: Bytes from the packed words of a matrix to those of the next.
        numbers_step: Bytes from the scales, or zero points, of a matrix to those of the next.
        block_panels: Panels of a unit.
        block_rows: Rows that are copied together.
        scratch: Memory of the first worker: for ``block_rows`` rows their numbers (int64), the rows
            of ``a``, with bytes their factors; then the rows of a tile's result.
        scratch_bytes: Bytes from a worker's memory to the next one's.
    """

    indices: Address
    matrices: int
    words_step: int
    numbers_step: int
    block_panels: int
    block_rows: int
    scratch: Address
    scratch_bytes: int


class QuantizeRowsArguments(KernelArguments):
    """Arguments of `quantize_rows`; a work unit is a block of a row.

    Attributes:
        x: Rows of float32 without gaps.
        target: Rows of as many bytes.
        factors: float32 for each block of a row: its scale, and the sum of its bytes.
        depth: Elements of a row.
        blocks: Blocks of a row.
        width: Elements of a block.
    """

    x: Address
    target: Address
    factors: Address
    depth: int
    blocks: int
    width: int


class UnpackPanelsArguments(BlockwiseArguments):
    """Arguments of `unpack_panels`; a work unit is a panel.

    Attributes:
        target: The panels that contraction tiles read: float32 ``[row][column]``, or for matrix
            tiles registers of pairs of bfloat16.
        panel: Bytes from a panel of the target to the next one.
    """

    target: Address
    panel: int


class BlockwiseTileBlock(WordBlock):
    """What a tile of a product with blockwise weights reads.

    Attributes:
        packed: Words of the panel.
        scales: Scales of the panel.
        zeros: Zero points of the panel plus 2**23; 0: all are half of the range.
        blocks: Blocks.
        whole_words: Words of a block of a column.
        last_words: Words of the last block.
        a: First element of the left side.
        a_row: Bytes between its rows.
        factors: Scale and sum of each block of the first row (rows of bytes only).
        factors_row: Bytes between those of rows.
        bias: float32 for each column; 0: none.
        c: First element of the result.
        c_row: Bytes between its rows.
        tail: Columns of the last vector that exist.
    """

    packed: Address
    scales: Address
    zeros: Address
    blocks: int
    whole_words: int
    last_words: int
    a: Address
    a_row: int
    factors: Address
    factors_row: int
    bias: Address
    c: Address
    c_row: int
    tail: int
