"""Arguments of the kernels that move elements and pack weights."""

from __future__ import annotations

from subgraph.engine.codegen.arguments import Address, KernelArguments, Words


class Transfer(KernelArguments):
    """First arguments of kernels that copy an array from strides to strides.

    Attributes:
        source: The array that is read.
        target: The array that is written.
        source_offset: Bytes from `source` to the first element that is read.
        target_offset: Bytes from `target` to the first element that is written.
    """

    source: Address
    target: Address
    source_offset: int
    target_offset: int


class CopyArguments(Transfer):
    """Arguments of `copy`; a work unit is a tile of rows and of elements along them.

    Tiles along a row are innermost, then tiles of rows, then the outer dimensions.

    Attributes:
        row_size: Elements of a row.
        row_block: Elements of a row in a unit.
        rows: Rows of the innermost outer index.
        rows_block: Rows in a unit.
        source_row: Bytes between rows of the source.
        target_row: Bytes between rows of the target.
        source_step: Bytes between elements of a row of the source.
        target_step: Bytes between elements of a row of the target.
        outer: Number of outer dimensions.
        dims: For each outer dimension its size, bytes in the source, bytes in the target.
    """

    row_size: int
    row_block: int
    rows: int
    rows_block: int
    source_row: int
    target_row: int
    source_step: int
    target_step: int
    outer: int
    dims: Words


class ChannelsArguments(KernelArguments):
    """Arguments of `channels`; a work unit is a part of the pixels of a block of the target.

    Units are in the order [image, block of the target that is written, part].

    Attributes:
        source: The image that is read.
        target: The image that is written.
        source_blocks: Blocks of channels of an image of the source.
        target_blocks: Blocks of channels of an image of the target.
        source_first: Channel of the source that is read first.
        target_first: Channel of the target that is written first.
        count: Channels that are copied.
        target_channels: Channels of the target, without the padding of its last block.
        pixels: Pixels of an image.
        part: Pixels in a unit; the last one of a block may have fewer.
    """

    source: Address
    target: Address
    source_blocks: int
    target_blocks: int
    source_first: int
    target_first: int
    count: int
    target_channels: int
    pixels: int
    part: int


class TransposeArguments(Transfer):
    """Arguments of `transpose`; a work unit is a tile of a matrix.

    Tiles of rows are innermost, then tiles of columns, then the outer dimensions.

    Attributes:
        columns: Columns of the source, contiguous there; rows of the target.
        rows: Rows of the source; columns of the target, contiguous there.
        source_row: Bytes between rows of the source.
        target_row: Bytes between rows of the target.
        columns_block: Columns of the source in a unit.
        rows_block: Rows of the source in a unit.
        outer: Number of outer dimensions.
        dims: For each outer dimension its size, bytes in the source, bytes in the target.
    """

    columns: int
    rows: int
    source_row: int
    target_row: int
    columns_block: int
    rows_block: int
    outer: int
    dims: Words


class ZipArguments(Transfer):
    """Arguments of `zip_rows`; a work unit is a tile of a row, then of the outer dimensions.

    Attributes:
        row_size: Elements of a row.
        row_block: Elements of a row in a unit.
        row_step: Bytes between the rows that are zipped.
        outer: Number of outer dimensions.
        dims: For each outer dimension its size, bytes in the source, bytes in the target.
    """

    row_size: int
    row_block: int
    row_step: int
    outer: int
    dims: Words


class FillArguments(KernelArguments):
    """Arguments of `fill`; a work unit is a tile of the target.

    Attributes:
        target: First element that is written.
        size: Number of elements.
        block: Elements in a unit.
        value: The element that is written everywhere.
    """

    target: Address
    size: int
    block: int
    value: Address


class SequenceArguments(KernelArguments):
    """Arguments of `sequence`; a work unit is a tile of the target.

    Attributes:
        target: First element that is written.
        size: Number of elements.
        block: Elements in a unit.
        start: The first number, an element.
        delta: The difference of neighbours, an element.
    """

    target: Address
    size: int
    block: int
    start: Address
    delta: Address


class TakeArguments(KernelArguments):
    """Arguments of `take`; a work unit is a tile of the axis in y, for one outer index.

    Attributes:
        x: The source, ``[outer][axis_size][inner]``.
        y: The target, ``[outer][taken][inner]``.
        table: For each slice of y its index along the axis in x, or -1 for padding; int64.
        pad: The element that padding consists of.
        outer: Product of the sizes before the axis.
        axis_size: Slices along the axis in x.
        taken: Slices along the axis in y.
        inner: Elements of a slice.
        block: Slices of y in a unit.
        run: First slice of the longest run of y that is also contiguous in x.
        run_size: Slices of that run; 0: there is none.
    """

    x: Address
    y: Address
    table: Address
    pad: Address
    outer: int
    axis_size: int
    taken: int
    inner: int
    block: int
    run: int
    run_size: int


class TakeLastAxesArguments(KernelArguments):
    """Arguments of `take_last_axes`; a work unit is a tile of rows of an image.

    Attributes:
        x: The source, ``[images][rows][row_size]``.
        y: The target, ``[images][taken_rows][taken_row_size]``.
        row_table: For each row of y its row in x, int32.
        column_table: For each element of a row of y its index along the row of x, int32.
        rows: Rows of an image in x.
        taken_rows: Rows of an image in y.
        row_size: Elements of a row in x.
        taken_row_size: Elements of a row in y.
        block: Rows of y in a unit.
        run: First element of the longest run of a row of y that is also contiguous in x.
        run_size: Elements of that run; 0: there is none.
    """

    x: Address
    y: Address
    row_table: Address
    column_table: Address
    rows: int
    taken_rows: int
    row_size: int
    taken_row_size: int
    block: int
    run: int
    run_size: int


class TriluArguments(KernelArguments):
    """Arguments of `trilu`; a work unit is a row.

    Attributes:
        x: The matrices, contiguous.
        y: The triangles, shaped as x.
        rows: Rows of a matrix.
        columns: Elements of a row.
        diagonal: Columns that the diagonal is shifted to the right.
        all_rows: Rows of all matrices, the number of units.
    """

    x: Address
    y: Address
    rows: int
    columns: int
    diagonal: int
    all_rows: int


class ReverseSequenceArguments(KernelArguments):
    """Arguments of `reverse_sequence`; a work unit is an entry of the batch.

    Attributes:
        x: The sequences.
        y: The sequences with their first elements reversed, shaped as x.
        lengths: For each entry how many elements are reversed, int64.
        batch: Entries of the batch, the number of units.
        steps: Elements of a sequence.
        inner: Numbers of an element of a sequence.
        batch_step: Bytes between entries of the batch.
        time_step: Bytes between elements of a sequence.
    """

    x: Address
    y: Address
    lengths: Address
    batch: int
    steps: int
    inner: int
    batch_step: int
    time_step: int


class PhasesArguments(KernelArguments):
    """Arguments of `phases`; a work unit is a row of the target, of an image.

    Attributes:
        source: The plain image ``[N][C][H][W]``.
        target: Its phases, blocked: ``[N][blocks][rows][columns][lanes]``.
        channels: Channels of the source.
        height: Rows of the source.
        width: Columns of the source.
        rows: Rows of the target.
        columns: Columns of the target.
        down: Rows of the source between rows of a phase.
        across: Columns of the source between columns of a phase.
        blocks: Blocks of channels of the target; those beyond the last phase are zeros.
    """

    source: Address
    target: Address
    channels: int
    height: int
    width: int
    rows: int
    columns: int
    down: int
    across: int
    blocks: int


class PackArguments(KernelArguments):
    """Arguments of `pack`; a work unit is a panel.

    Attributes:
        source: Weights ``[columns, inputs, taps]`` of any strides.
        target: The panels.
        columns: Columns of all panels.
        padded: The columns rounded up to whole vectors.
        width: Columns of a panel.
        inputs: Inputs of the source.
        depth: Inputs of the target, at least as many.
        block: Inputs of a block.
        taps: Taps of an input and a column.
        by_column: Bytes between columns of the source.
        by_input: Bytes between inputs of the source.
        by_tap: Bytes between taps of the source.
    """

    source: Address
    target: Address
    columns: int
    padded: int
    width: int
    inputs: int
    depth: int
    block: int
    taps: int
    by_column: int
    by_input: int
    by_tap: int


class PairArguments(KernelArguments):
    """Arguments of `pair`; a work unit is a panel of a matrix.

    Attributes:
        source: Panels of float32 of one matrix after the other, as `pack` writes them.
        target: The registers of pairs of bfloat16, as matrix tiles read B.
        columns: Columns of the panels of a matrix, whole vectors.
        width: Columns of a panel.
        depth: Rows of the panels, whole steps of matrix tiles.
    """

    source: Address
    target: Address
    columns: int
    width: int
    depth: int


class WinogradPackArguments(KernelArguments):
    """Arguments of `winograd`; a work unit is a panel.

    Attributes:
        source: Weights ``[outputs, inputs, taps, taps]``, contiguous.
        target: Panels of each point, one point after the other.
        outputs: Outputs of the source.
        padded: The outputs rounded up to whole vectors.
        width: Columns (outputs) of a panel.
        inputs: Inputs of the source.
        depth: Inputs of the target, at least as many.
        point: Bytes of a point's panels.
    """

    source: Address
    target: Address
    outputs: int
    padded: int
    width: int
    inputs: int
    depth: int
    point: int
