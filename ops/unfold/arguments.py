"""Arguments of the kernels that convert between images and columns of windows."""

from __future__ import annotations

from subgraph.engine.codegen.arguments import Address, KernelArguments, Triple


class DeformColumnsArguments(KernelArguments):
    """Arguments of `deform_columns`; a work unit is a tap of a window, for a group of an image.

    Attributes:
        x: First element of the images, [images, channels, height, width].
        offsets: First offset, [images, groups * taps * 2, output height, output width].
        mask: First factor, [images, groups * taps, output height, output width]; 0: factors are 1.
        columns: First sample, [images, channels, taps, output height * output width].
        channels: Channels of an image.
        height: Pixels of an image along its height.
        width: Pixels of an image along its width.
        groups: Groups of channels that share offsets.
        kernel_height: Taps of a window along the height.
        kernel_width: Taps of a window along the width.
        output_height: Windows along the height.
        output_width: Windows along the width.
        stride_height: Pixels from a window to the next one along the height.
        stride_width: Along the width.
        pad_height: Pixels of padding before the image along the height.
        pad_width: Along the width.
        dilation_height: Pixels from a tap to the next one along the height.
        dilation_width: Along the width.
    """

    x: Address
    offsets: Address
    mask: Address
    columns: Address
    channels: int
    height: int
    width: int
    groups: int
    kernel_height: int
    kernel_width: int
    output_height: int
    output_width: int
    stride_height: int
    stride_width: int
    pad_height: int
    pad_width: int
    dilation_height: int
    dilation_width: int


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
