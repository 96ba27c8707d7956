"""Arguments of two kernels of ``ops/movement`` that the lowerings of elementwise operators use."""

from __future__ import annotations

from subgraph.engine.codegen.arguments import Address, KernelArguments


class ClearPaddingArguments(KernelArguments):
    """Arguments of `clear_padding`, which zeroes the padding channels. A work unit is one image.

    Attributes:
        array: First element of the array, blocked layout ``[images][blocks][pixels][lanes]``.
        blocks: Blocks of channels of an image.
        pixels: Pixels of an image.
        pixel: Bytes of one pixel of a block.
        used: Bytes of one pixel of the last block that hold channels; the rest is padding.
    """

    array: Address
    blocks: int
    pixels: int
    pixel: int
    used: int


class ByteTableArguments(KernelArguments):
    """Arguments of `byte_table`, a lookup ``y[i] = table[x[i]]``; a work unit is one tile.

    Attributes:
        x: First input element, one byte each.
        y: First output element.
        table: 256 elements of the output's dtype.
        size: Number of elements.
        block: Elements of a tile.
    """

    x: Address
    y: Address
    table: Address
    size: int
    block: int
