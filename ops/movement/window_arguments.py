"""Arguments of every kernel that applies windows to images: convolutions and pooling."""

from __future__ import annotations

from subgraph.engine.codegen.arguments import KernelArguments


class WindowArguments(KernelArguments):
    """Sizes of images and windows along depth, height and width: `Geometry.arguments`.

    Images of fewer dimensions have size 1, and windows kernel 1, along the missing ones.

    Attributes:
        image_depth: Pixels of an input image along its depth.
        image_height: Along its height.
        image_width: Along its width.
        output_depth: Pixels of an output image along its depth.
        output_height: Along its height.
        output_width: Along its width.
        kernel_depth: Taps of a window along the depth.
        kernel_height: Along the height.
        kernel_width: Along the width.
        stride_depth: Input pixels from a window to the next one along the depth.
        stride_height: Along the height.
        stride_width: Along the width.
        dilation_depth: Input pixels from a tap to the next one along the depth.
        dilation_height: Along the height.
        dilation_width: Along the width.
        pad_depth: Pixels of padding before the image along the depth.
        pad_height: Along the height.
        pad_width: Along the width.
    """

    image_depth: int
    image_height: int
    image_width: int
    output_depth: int
    output_height: int
    output_width: int
    kernel_depth: int
    kernel_height: int
    kernel_width: int
    stride_depth: int
    stride_height: int
    stride_width: int
    dilation_depth: int
    dilation_height: int
    dilation_width: int
    pad_depth: int
    pad_height: int
    pad_width: int


def taps_inside(first: int, last: int, taps: int, dilation: int, size: int) -> tuple[int, int]:
    """Return the first tap of neighbouring windows inside the image, and the number of such taps.

    Kernels call it (it compiles with numba).

    Args:
        first: Pixel that the first tap of the first window reads.
        last: Pixel that the first tap of the last window reads.
        taps: Taps along the axis.
        dilation: Pixels from a tap to the next one.
        size: Pixels of the image along the axis.
    """
    # A tap counts if any of the windows reads a pixel with it. The last window is the first to
    # reach the image, the first window the last to leave it.
    begin = max(0, (dilation - 1 - last) // dilation)
    return begin, max(0, min(taps, (size - first + dilation - 1) // dilation) - begin)
