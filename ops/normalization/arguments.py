"""Arguments of the kernels of Softmax and of normalizations."""

from __future__ import annotations

from subgraph.engine.codegen.arguments import Address, KernelArguments


class SoftmaxArguments(KernelArguments):
    """Arguments of `rows` and `columns` of Softmax.

    A work unit of `rows` is a row; one of `columns` is a tile of ``lanes`` elements inside the
    axis, of an outer index.

    Attributes:
        x: The input, ``[outer][size][inner]``.
        y: The result, shaped as x; may be x.
        size: Elements along the axis.
        inner: Elements inside the axis; 1 for `rows`.
    """

    x: Address
    y: Address
    size: int
    inner: int


class RowNormArguments(KernelArguments):
    """Arguments of `rows` of LayerNormalization and RMSNormalization; a work unit is a row.

    Attributes:
        x: The input, contiguous rows.
        y: The result, shaped as x; may be x.
        scale: One row of factors.
        bias: One row that is added; 0: none.
        means: Output: the mean of each row; 0: not stored.
        deviations: Output: the inverse standard deviation of each row; 0: not stored.
        size: Elements of a row.
        epsilon: Added to the variance.
    """

    x: Address
    y: Address
    scale: Address
    bias: Address
    means: Address
    deviations: Address
    size: int
    epsilon: float


class GroupNormArguments(KernelArguments):
    """Arguments of `groups`: GroupNormalization and InstanceNormalization.

    A work unit is a group of channels of an image.

    Attributes:
        x: The images, ``[image][group][channel][pixel]``.
        y: The result, shaped as x.
        scale: Factors of the normalized input.
        bias: Added to it.
        groups: Groups of an image.
        channels: Channels of a group.
        pixels: Pixels of a channel.
        epsilon: Added to the variance.
        channel_step: Elements of scale and bias between channels of a group, 0 or 1.
        group_step: Elements of scale and bias between groups.
    """

    x: Address
    y: Address
    scale: Address
    bias: Address
    groups: int
    channels: int
    pixels: int
    epsilon: float
    channel_step: int
    group_step: int


class BlockParts(KernelArguments):
    """Arguments of kernels over images in blocks of channels, ``[image][block][pixel][lane]``.

    A work unit is a part of the pixels of a block, in the order [image, block, part].

    Attributes:
        x: The images.
        pixels: Pixels of an image.
        part: Pixels of a unit; the last one of a block may have fewer.
        parts: Units of a block.
    """

    x: Address
    pixels: int
    part: int
    parts: int


class BlockMomentsArguments(BlockParts):
    """Arguments of `block_moments`.

    Attributes:
        moments: For each unit the mean and the sum of squared distances of each lane.
    """

    moments: Address


class BlockScaleArguments(BlockParts):
    """Arguments of `scale_blocks`.

    Attributes:
        y: The result, shaped as x.
        factors: For each block of an image a factor and a summand for each lane.
    """

    y: Address
    factors: Address


class GroupFactorsArguments(KernelArguments):
    """Arguments of `group_factors`; a work unit is a block of whole groups, or all of one group.

    Attributes:
        moments: As `block_moments` writes them.
        factors: As `scale_blocks` reads them; 0 in the lanes beyond the last channel.
        scale: Factors of the normalized input, one for each channel.
        bias: Added to it.
        channels: Channels of an image.
        units: Units of an image.
        blocks: Blocks of a unit.
        pixels: As in `BlockParts`.
        part: As in `BlockParts`.
        parts: As in `BlockParts`.
        epsilon: Added to the variance.
    """

    moments: Address
    factors: Address
    scale: Address
    bias: Address
    channels: int
    units: int
    blocks: int
    pixels: int
    part: int
    parts: int
    epsilon: float


class LocalNormOperands(KernelArguments):
    """Operands and numbers of LRN.

    Attributes:
        x: The images.
        y: The result, shaped as x.
        pixels: Pixels of a channel.
        alpha: Factor of the sum of squares: the attribute ``alpha`` over ``size``.
        bias: Added to the scaled sum.
        beta: The exponent.
    """

    x: Address
    y: Address
    pixels: int
    alpha: float
    bias: float
    beta: float


class LocalNormArguments(LocalNormOperands):
    """Arguments of `local_response`, LRN in the plain layout, ``[image][channel][pixel]``.

    A work unit is ``lanes`` pixels of an image.

    Attributes:
        channels: Channels of an image.
        before: Channels before one whose squares are added.
        after: Channels after one whose squares are added.
    """

    channels: int
    before: int
    after: int


class LocalNormBlockedArguments(LocalNormOperands):
    """Arguments of `local_response_blocked`, LRN in the layout ``[image][block][pixel][lanes]``.

    A work unit is a block of channels of an image.

    Attributes:
        blocks: Blocks of channels of an image.
    """

    blocks: int
