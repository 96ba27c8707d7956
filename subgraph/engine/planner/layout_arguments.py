"""Arguments of the kernels that copy operands and convert their layouts."""

from __future__ import annotations

from subgraph.engine.codegen.arguments import Address, KernelArguments


class CopyBytesArguments(KernelArguments):
    """Arguments of `copy`; a work unit is a block of consecutive bytes.

    Attributes:
        source: First byte that is read.
        target: First byte that is written.
        size: Bytes that are copied.
        block: Bytes in a unit; the last one may have fewer.
    """

    source: Address
    target: Address
    size: int
    block: int


class ReorderArguments(KernelArguments):
    """Arguments of kernels between layouts; a work unit is a part of the pixels of a block.

    Units are in the order [image, block of channels, part]. For the kernels between blocks and
    channels last, a unit is a part of the pixels of all blocks, in the order [image, part].

    Attributes:
        source: First element that is read.
        target: First element that is written.
        channels: Channels of an image.
        pixels: Pixels of an image.
        blocks: Blocks of channels of an image.
        part: Pixels in a unit; the last one of a block may have fewer.
        parts: Units of a block.
    """

    source: Address
    target: Address
    channels: int
    pixels: int
    blocks: int
    part: int
    parts: int


class RegistersArguments(KernelArguments):
    """Arguments of `from_registers`; a work unit is 16 rows.

    Attributes:
        source: Registers of matrix tiles: for each 16 rows, all steps of 32 columns of bfloat16.
        target: The rows, of float32.
        rows: Number of rows.
        columns: Columns of a row.
    """

    source: Address
    target: Address
    rows: int
    columns: int


class StridesArguments(KernelArguments):
    """Arguments of `from_strides`; a work unit is a row, and rows are numbered by four loops.

    Attributes:
        source: First byte of the first row.
        target: First byte that is written.
        row: Bytes of a row.
        size_1: Iterations of the second loop; those of the first follow from the work units.
        size_2: Those of the third loop.
        size_3: Those of the innermost loop.
        step_0: Bytes of the source from one iteration of the outermost loop to the next.
        step_1: Those of the second loop.
        step_2: Those of the third loop.
        step_3: Those of the innermost loop.
    """

    source: Address
    target: Address
    row: int
    size_1: int
    size_2: int
    size_3: int
    step_0: int
    step_1: int
    step_2: int
    step_3: int
