"""Arguments of two kernels of ``ops/movement`` that elementwise operators emit."""

from __future__ import annotations

from subgraph.engine.codegen.arguments import Address, KernelArguments


class ClearPaddingArguments(KernelArguments):
    """Arguments of `clear_padding`; a work unit is an image.

    Attributes:
        array: The blocked array, ``[images][blocks][pixels][lanes]``.
        blocks: Blocks of channels of an image.
        pixels: Pixels of an image.
        pixel: Bytes of a pixel of a block.
        used: Bytes of a pixel of the last block that hold channels.
    """

    array: Address
    blocks: int
    pixels: int
    pixel: int
    used: int


class ByteTableArguments(KernelArguments):
    """Arguments of `byte_table`; a work unit is a tile of elements.

    Attributes:
        x: Bytes that are looked up.
        y: What the table has for each of them.
        table: 256 elements.
        size: Number of elements.
        block: Elements in a unit.
    """

    x: Address
    y: Address
    table: Address
    size: int
    block: int
