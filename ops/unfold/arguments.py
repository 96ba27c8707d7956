"""Arguments of the kernels that convert between images and columns of windows."""

from __future__ import annotations

from subgraph.engine.codegen.arguments import Address, KernelArguments, Triple
from subgraph.ops.movement.window_arguments import WindowArguments


class DeformColumnsArguments(WindowArguments):
    """Arguments of `deform_columns`; a work unit is a tap of a window, for a group of an image.

    Images have depth 1.

    Attributes:
        x: First element of the images, [images, channels, height, width].
        offsets: First offset, [images, groups * taps * 2, output height, output width].
        mask: First factor, [images, groups * taps, output height, output width]; 0: factors are 1.
        columns: First sample, [images, channels, taps, output height * output width].
        channels: Channels of an image.
        groups: Groups of channels that share offsets.
    """

    x: Address
    offsets: Address
    mask: Address
    columns: Address
    channels: int
    groups: int


class ColumnsToImageArguments(KernelArguments):
    """Arguments of `columns_to_image`; a work unit is a channel of an image.

    Images of fewer dimensions have size 1, and windows one tap, along the missing ones.

    Attributes:
        columns: First element of the columns, [images, channels, taps, windows].
        y: First element of the sums, [images, channels, *image].
        image: Pixels of an image along each axis.
        kernel: Taps of a window along each axis.
        windows: Windows along each axis.
        stride: Pixels from a window to the next one.
        pad: Pixels of padding before the image.
        dilation: Pixels from a tap to the next one.
        bias: First element of the bias, one for each channel; 0: none.
        channels: Channels of an image.
    """

    columns: Address
    y: Address
    image: Triple
    kernel: Triple
    windows: Triple
    stride: Triple
    pad: Triple
    dilation: Triple
    bias: Address
    channels: int
