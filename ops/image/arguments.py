"""Arguments of the kernels that resize and sample images."""

from __future__ import annotations

from subgraph.engine.codegen.arguments import Address, KernelArguments, ReportWords, Triple

# Pixels that the modes of GridSample combine along a dimension.
TAPS = {"nearest": 1, "linear": 2, "cubic": 4}
# Samples of a bin along an axis, if their number is computed from the region's size (estimate), so
# that an input with a huge region does not occupy a device.
MAX_SAMPLES = 4096
MAX_PIXELS = 1 << 30  # pixels of a bin along an axis, if the number of its samples is given


class BlendArguments(KernelArguments):
    """Arguments of `along`; a work unit is one line along the resized axis.

    Each table has a row for each neighbour, with a column for each element of the result's axis.

    Attributes:
        x: First element of the input.
        y: First element of the result.
        indices: Table of the neighbours' indices along the input's axis, int32.
        weights: Table of the neighbours' weights.
        added: For each element of the result's axis the first term of its sum: the extrapolation
            value outside the region of interest, else 0.
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
    """Arguments of `across`; a work unit is a tile of rows at one index of the outer dimensions.

    A row is the elements inside the resized axis, at one index of it.

    Attributes:
        inner: Elements of a row.
        rows: Rows of a work unit.
    """

    inner: int
    rows: int


class BlendNearbyArguments(BlendArguments):
    """Arguments of `nearby`; work units are those of `along`.

    The results are computed in blocks of one vector each. All neighbours of a block lie in a few
    vectors of x, of which the first begins at the block's first index; `indices` count from there.
    These vectors end within the line, unless the line is shorter than they are.

    Attributes:
        firsts: First index of each block, int32.
        vectors: Vectors that hold all neighbours of a block.
    """

    firsts: Address
    vectors: int


class RoiAlignArguments(KernelArguments):
    """Arguments of `roi_largest`; a work unit is a channel of a region.

    Attributes:
        x: First element of the images, [images, channels, height, width].
        regions: First corner of the first region, [regions, 4].
        numbers: Index of each region's image, int64.
        y: First element of the results, [regions, channels, bins down, bins across].
        images: Number of images.
        channels: Channels of an image.
        height: Height of an image in pixels.
        width: Width of an image in pixels.
        bins_down: Bins of a region along the height.
        bins_across: Bins of a region along the width.
        samples: Samples of a bin along each axis; 0: the size of the bin in pixels, rounded up.
        scale: Pixels in a unit of the regions' corners.
        half_pixel: Whether the centres of pixels have coordinates k + 0.5 (0 or 1).
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

    The scratch of a worker holds, in this order: an entry (index and weight) for each row of an
    image, an int64 count for each bin across, an entry for each column of an image and bin across,
    and one row of an image and one vector of elements.

    Attributes:
        scratch: Scratch of the first worker.
        scratch_bytes: Bytes from a worker's scratch to the next one's.
        unit_channels: Channels of a work unit.
    """

    scratch: Address
    scratch_bytes: int
    unit_channels: int


class SampleCountArguments(KernelArguments):
    """Arguments of `check_sample_count`, which has one work unit.

    Attributes:
        regions: First corner of the first region, [regions, 4].
        count: Number of regions.
        bins_down: Bins of a region along the height.
        bins_across: Bins of a region along the width.
        scale: Pixels in a unit of the regions' corners.
        half_pixel: Whether the centres of pixels have coordinates k + 0.5 (0 or 1).
        most: Most pixels in a bin along an axis.
        report: Where a larger region, or one that is not finite, is reported.
    """

    regions: Address
    count: int
    bins_down: int
    bins_across: int
    scale: float
    half_pixel: int
    most: int
    report: ReportWords


class MaxRoiPoolArguments(KernelArguments):
    """Arguments of `max_roi_pool`; a work unit is a channel of a region.

    Attributes:
        x: First element of the images, [images, channels, height, width].
        regions: The regions, [regions, 5]: index of the image, then the corners.
        y: First element of the results, [regions, channels, bins down, bins across].
        images: Number of images.
        channels: Channels of an image.
        height: Height of an image in pixels.
        width: Width of an image in pixels.
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
    """Arguments of `grid_sample`; a work unit is a block of sampled points of an image.

    The scratch of a worker holds four indices (int64) and four weights (float64) for each of three
    dimensions, 192 bytes; then for each neighbouring pixel its index in the image (int32, -1: none)
    for all points of the block; then the weights of these.

    Attributes:
        x: First element of the images, [images, channels, depth, height, width].
        grid: First coordinate of the grid, [images, points, dimensions].
        y: First element of the results, [images, channels, points].
        channels: Channels of an image, or its blocks of channels.
        image: Pixels of an image along each axis; 1 along missing ones.
        dimensions: Dimensions of an image, 1 to 3.
        points: Points of an image that are sampled.
        scratch: Scratch of the first worker.
        scratch_bytes: Bytes from a worker's scratch to the next one's.
        block: Points of a work unit, a multiple of the lanes of a vector.
    """

    x: Address
    grid: Address
    y: Address
    channels: int
    image: Triple
    dimensions: int
    points: int
    scratch: Address
    scratch_bytes: int
    block: int
