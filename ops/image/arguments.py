"""Arguments of the kernels that resize and sample images."""

from __future__ import annotations

from subgraph.engine.codegen.arguments import Address, KernelArguments, ReportWords, Triple


class BlendArguments(KernelArguments):
    """Arguments of `along`; a work unit is what lies at one index of the axes outside the axis.

    Tables have a row for each neighbour, with a column for each element of the result's axis.

    Attributes:
        x: First element of the input.
        y: First element of the result.
        indices: Table of the neighbours' indices along the input's axis, int32.
        weights: Table of the neighbours' weights.
        added: What is added to each element of the result's axis.
        neighbours: Neighbours of an element.
        size: Elements of the input's axis.
        taken: Elements of the result's axis.
    """

    x: Address
    y: Address
    indices: Address
    weights: Address
    added: Address
    neighbours: int
    size: int
    taken: int


class BlendAcrossArguments(BlendArguments):
    """Arguments of `across`; a work unit is a tile of rows at one index of the axes outside.

    A row is what lies inside the axis.

    Attributes:
        inner: Elements inside the axis.
        rows: Rows of a unit.
    """

    inner: int
    rows: int


class BlendNearbyArguments(BlendArguments):
    """Arguments of `nearby`; units are those of `along`.

    Results are made in blocks of a vector. The indices count from that of a block's first
    neighbour, which lies never so far behind that the vectors from there end beyond a row of x,
    unless the row is shorter.

    Attributes:
        firsts: Index of each block's first neighbour, int32.
        vectors: Vectors that hold all neighbours of a block.
    """

    firsts: Address
    vectors: int


class RoiAlignArguments(KernelArguments):
    """Arguments of `roi_largest`; a work unit is a channel of a region.

    Attributes:
        x: First element of the images, [images, channels, height, width].
        regions: First corner of a region, [regions, 4].
        numbers: Number of each region's image, int64.
        y: First element of the results, [regions, channels, bins down, bins across].
        images: Number of images.
        channels: Channels of an image.
        height: Pixels of an image along its height.
        width: Pixels of an image along its width.
        bins_down: Bins of a region along the height.
        bins_across: Bins of a region along the width.
        samples: Samples of a bin along each axis; 0: as many as its size in pixels, rounded up.
        scale: Pixels in a unit of the regions' corners.
        half_pixel: Whether the centres of pixels lie at halves (0 or 1).
    """

    x: Address
    regions: Address
    numbers: Address
    y: Address
    images: int
    channels: int
    height: int
    width: int
    bins_down: int
    bins_across: int
    samples: int
    scale: float
    half_pixel: int


class RoiAverageArguments(RoiAlignArguments):
    """Arguments of `roi_average`; a work unit is a block of channels of a region.

    A worker's scratch has an entry for each row of an image (a line of pixels, its weight), the
    counts of all bins across, an entry for each column of an image for each of these, and one row
    of an image and a vector.

    Attributes:
        scratch: Scratch of the first worker.
        scratch_step: Bytes from a worker's scratch to the next one's.
        unit_channels: Channels of a unit.
    """

    scratch: Address
    scratch_step: int
    unit_channels: int


class FewSamplesArguments(KernelArguments):
    """Arguments of `few_samples`, which has one work unit.

    Attributes:
        regions: First corner of a region, [regions, 4].
        count: Number of regions.
        bins_down: Bins of a region along the height.
        bins_across: Bins of a region along the width.
        scale: Pixels in a unit of the regions' corners.
        half_pixel: Whether the centres of pixels lie at halves (0 or 1).
        report: Where regions of too many samples are reported.
    """

    regions: Address
    count: int
    bins_down: int
    bins_across: int
    scale: float
    half_pixel: int
    report: ReportWords


class MaxRoiPoolArguments(KernelArguments):
    """Arguments of `max_roi_pool`; a work unit is a channel of a region.

    Attributes:
        x: First element of the images, [images, channels, height, width].
        regions: Number of the first region's image, then its corners, [regions, 5].
        y: First element of the results, [regions, channels, bins down, bins across].
        images: Number of images.
        channels: Channels of an image.
        height: Pixels of an image along its height.
        width: Pixels of an image along its width.
        bins_down: Bins of a region along the height.
        bins_across: Bins of a region along the width.
        scale: Pixels in a unit of the regions' corners.
    """

    x: Address
    regions: Address
    y: Address
    images: int
    channels: int
    height: int
    width: int
    bins_down: int
    bins_across: int
    scale: float


class GridSampleArguments(KernelArguments):
    """Arguments of `grid_sample`; a work unit is a block of places of an image.

    A worker's scratch has, for each dimension, four indices and four weights (192 bytes); then for
    each pixel around a place where it lies in the image (int32, -1: none), for all places of the
    block; then the weights of these.

    Attributes:
        x: First element of the images, [images, channels, depth, height, width].
        grid: First number of the grid, [images, places, dimensions].
        y: First element of the results, [images, channels, places].
        channels: Channels of an image, or its blocks of channels.
        image: Pixels of an image along each axis; 1 along missing ones.
        dimensions: Dimensions of an image, 1 to 3.
        places: Places of an image that are sampled.
        scratch: Scratch of the first worker.
        scratch_step: Bytes from a worker's scratch to the next one's.
        block: Places of a unit, whole vectors.
    """

    x: Address
    grid: Address
    y: Address
    channels: int
    image: Triple
    dimensions: int
    places: int
    scratch: Address
    scratch_step: int
    block: int
