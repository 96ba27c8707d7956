"""Arguments of the kernels of convolutions over matrix tiles."""

from __future__ import annotations

from subgraph.engine.codegen.arguments import Address, KernelArguments


class LineArguments(KernelArguments):
    """Arguments of `lines`; a work unit is a line of a block of 32 channels.

    A line is the pixels of a row of the image that one row of outputs reads: all of them, or only
    those of one tap. Lines are numbered by tap, plane and row of their windows.

    Attributes:
        x: Images of float32 in blocks of 16 channels, ``[N][block][D][H][W][16]``, or of bfloat16
            in blocks of 32.
        y: The lines of bfloat16: for each block and tap the pixels of its lines, 32 channels each.
        groups: Groups of channels.
        blocks: Blocks of x of a group.
        depth: Planes of an image.
        height: Rows of an image.
        width: Columns of an image.
        planes: Planes of lines.
        rows: Rows of lines.
        columns: Pixels of a line.
        taps_height: Taps along the height that have lines of their own; 1 if lines are for all.
        taps_width: The same along the width.
        tap_planes: Planes from a tap to the next one along the depth.
        tap_rows: Rows from a tap to the next one along the height.
        tap_columns: Columns from a tap to the next one along the width.
        plane_step: Planes of the image from a plane of lines to the next one.
        row_step: Rows from a row of lines to the next one.
        column_step: Columns from a pixel of a line to the next one.
        first_plane: Plane of the first tap's first line; negative in the padding.
        first_row: Its row.
        first_column: The column of its first pixel.
        lines: Lines of a block.
        y_group: Bytes of y between groups, those of the next image included.
        y_block: Bytes of y between blocks.
        y_plane: Bytes of y between planes; 0: their lines follow each other.
        y_tap: Bytes of y between taps.
        y_register: Bytes of y between runs of 16 pixels.
    """

    x: Address
    y: Address
    groups: int
    blocks: int
    depth: int
    height: int
    width: int
    planes: int
    rows: int
    columns: int
    taps_height: int
    taps_width: int
    tap_planes: int
    tap_rows: int
    tap_columns: int
    plane_step: int
    row_step: int
    column_step: int
    first_plane: int
    first_row: int
    first_column: int
    lines: int
    y_group: int
    y_block: int
    y_plane: int
    y_tap: int
    y_register: int


class MatrixConvArguments(KernelArguments):
    """Arguments of `convolve`; a work unit is a block of rows of a block of panels of a plane.

    Rows are innermost, then panels, planes, groups and images. A panel is two blocks of 16 output
    channels, or the last one. The pixels of 16 neighbouring outputs fill a register of x.

    Attributes:
        x: Lines of bfloat16, as `lines` writes them.
        weights: Registers of pairs, ``[group][panel][block of 32 inputs][tap]``.
        y: Results of float32 in blocks of 16 channels, or of bfloat16 in blocks of 32.
        bias: One element for each channel, padded to whole blocks; 0: none.
        residual: An array of one of both forms that is added; 0: none.
        groups: Groups of channels.
        groups_of_line: Groups whose channels are a block of x: 2 of 16, else 1.
        planes: Planes of outputs that are computed one by one.
        blocks: Blocks of 32 input channels of a group, for each of the taps along the depth.
        output_blocks: Blocks of 16 output channels of a group.
        depth: Elements of such a block that are multiplied, an even number.
        last_depth: The same of the last block; 0: as many as of the others. Matrix tiles of AMX
            multiply whole blocks, beyond which weights are 0.
        taps_height: Rows of taps.
        taps_width: Taps of a row.
        height: Rows of an image; rows of taps that read none of them are left out.
        first_row: Row of the image that the first row of taps of the first outputs reads.
        row_step: Rows of the image from a row of outputs to the next one.
        tap_rows: Rows of the image from a row of taps to the next one.
        outputs: Outputs of a plane.
        rows: Rows of outputs of a plane, or runs of them that are computed at a time.
        columns: Outputs of a row; the last one may have fewer.
        gap: Rows of a tile between the last output of a row and the first one of the next row; -1:
            no tile has outputs of several rows.
        x_group: Bytes of x between groups that share no block, those of the next image included.
        x_plane: Bytes of x between the first pixels of planes of outputs.
        x_block: Bytes of x between blocks of channels.
        x_tap_row: Bytes of x between rows of taps.
        x_tap: Bytes of x between taps of a row.
        x_row: Bytes of x between the first pixels of rows of outputs.
        x_column: Bytes of x between the first pixels of outputs of a register.
        x_register: Bytes of x between the first pixels of registers.
        y_image: Bytes of y between images.
        y_block: Bytes of y for 16 channels of an image.
        y_offset: Bytes from the start of an image of y to its first output.
        y_plane: Bytes of y between planes of outputs.
        y_row: With ``scratch`` the bytes of y between rows of outputs of an image.
        y_column: With ``scratch`` the bytes of y between outputs of a row of an image.
        y_columns: Outputs of a row of an image.
        y_rounded: Whether y is of bfloat16.
        residual_image: As ``y_image``, of the residual.
        residual_block: As ``y_block``, of the residual.
        residual_plane: As ``y_plane``, of the residual.
        tile: The matrix tile.
        activation: The kernel applied to a finished tile; 0: none.
        activation_stores: Whether the activation stores the outputs, of bfloat16, in y.
        flags: ``F_*`` flags of the results.
        low: Lower bound of the results, if the flags ask for it.
        high: Upper bound of the results, if the flags ask for it.
        unit_rows: Rows of a unit.
        unit_panels: Panels of a unit.
        ahead_lines: Cache lines of the weights of the next unit that a step prefetches.
        scratch: Memory of the first worker for a tile of float32, of which each output is then
            stored to y on its own, rounded or apart from the next one; 0: the tile is stored to y.
        scratch_bytes: Bytes between the areas of workers.
    """

    x: Address
    weights: Address
    y: Address
    bias: Address
    residual: Address
    groups: int
    groups_of_line: int
    planes: int
    blocks: int
    output_blocks: int
    depth: int
    last_depth: int
    taps_height: int
    taps_width: int
    height: int
    first_row: int
    row_step: int
    tap_rows: int
    outputs: int
    rows: int
    columns: int
    gap: int
    x_group: int
    x_plane: int
    x_block: int
    x_tap_row: int
    x_tap: int
    x_row: int
    x_column: int
    x_register: int
    y_image: int
    y_block: int
    y_offset: int
    y_plane: int
    y_row: int
    y_column: int
    y_columns: int
    y_rounded: int
    residual_image: int
    residual_block: int
    residual_plane: int
    tile: Address
    activation: Address
    activation_stores: int
    flags: int
    low: float
    high: float
    unit_rows: int
    unit_panels: int
    ahead_lines: int
    scratch: Address
    scratch_bytes: int


class ImageLineArguments(KernelArguments):
    """Arguments of `image_lines`; a work unit is a row of y.

    Attributes:
        x: Plain images of float32, ``[N][C][H][W]``.
        y: The rows that windows read, of bfloat16: ``[N][row][column][element]``. Elements beyond
            the channels, and pixels outside an image, are 0.
        channels: Channels of an image.
        height: Rows of an image.
        width: Columns of an image.
        rows: Rows of y of an image.
        columns: Columns of y; at least a vector of them lies behind the last window.
        elements: Elements of a pixel of y, 2 or 4, at least the channels.
        first_row: Row of the image of the first row of y; negative in the padding.
        first_column: The same of columns.
        last_column: Column of the image behind the last one that a window reads.
    """

    x: Address
    y: Address
    channels: int
    height: int
    width: int
    rows: int
    columns: int
    elements: int
    first_row: int
    first_column: int
    last_column: int
