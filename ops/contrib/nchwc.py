"""Operators on blocked layouts that ONNX Runtime writes for one machine (``ORT_ENABLE_ALL``).

A tensor [N, C, H, W] is stored as [N, C / B, H, W, B], its channels padded by zeros to blocks of B.
Only operators of this domain, and elementwise ones, read such tensors, so that here they are
ordinary tensors with padded channels; only the filters, which are stored in blocks in the file, are
put in order. The file does not state B. As for ONNX Runtime itself, it is that of this machine.
"""

from __future__ import annotations

from subgraph.graph.graph import Node
from subgraph.operators.functions import Call, Results, function
from subgraph.operators.requirements import Tensor, require, require_rank, require_whole_number
from subgraph.operators.schema import NCHWC
from subgraph.system.host import native_architecture
from subgraph.system.processor import processor

from .fused import CONVOLUTION_ATTRIBUTES, POOL_ATTRIBUTES, fused_convolution


def block_channels() -> int:
    """Return the channels of a block (B), as ONNX Runtime chooses them for this machine."""
    wide = native_architecture() == "aarch64" or processor().features.get("avx512f")
    return 16 if wide else 8


def image_operands(node: Node, x: Tensor) -> None:
    """Raise ShapeError unless the input holds images [N, C, H, W]."""
    require_rank("X", x, 4)


@function("ReorderInput", "X -> Y", domain=NCHWC, requires=image_operands, channels_last=0)
def reorder_input(call: Call) -> Results:
    """Pad channels by zeros to whole blocks."""
    x = call.inputs[0]
    if call.attribute("channels_last"):
        x = call.Transpose(x, perm=(0, 3, 1, 2))
    missing = -call.size(x, 1) % block_channels()
    return [call.Pad(x, [0, 0, 0, 0, 0, missing, 0, 0])]


def reorder_output_operands(node: Node, x: Tensor) -> None:
    """Raise ShapeError unless the images have at least as many channels as the result."""
    require_rank("X", x, 4)
    channels = require_whole_number(node, "channels", 0, least=1)
    require(channels <= x.shape[1], "{} of {} channels are needed", channels, x.shape[1])


@function(
    "ReorderOutput",
    "X -> Y",
    domain=NCHWC,
    requires=reorder_output_operands,
    channels=0,
    channels_last=0,
)
def reorder_output(call: Call) -> Results:
    """Remove the channels of padding."""
    x = call.Slice(call.inputs[0], [0], [call.attribute("channels")], [1])
    return [call.Transpose(x, perm=(0, 2, 3, 1)) if call.attribute("channels_last") else x]


def convolution_operands(
    node: Node, x: Tensor, w: Tensor, b: Tensor | None = None, total: Tensor | None = None
) -> None:
    """Raise ShapeError unless the filters fit the images and are in blocks of this machine.

    Args:
        node: The Conv.
        x: Images, [N, C, H, W].
        w: Filters: memory in blocks, the shape as if it were not.
        b: A number for each filter.
        total: Added to the result, of its shape.
    """
    require_rank("X", x, 4)
    require_rank("W", w, 4)
    block = block_channels()
    filters, channels = w.shape[:2]
    in_blocks = filters % block == 0 and (channels < block or channels % block == 0)
    # Inputs are padded to this machine's blocks, filters to those of the machine that saved them.
    require(
        in_blocks and x.shape[1] == channels * node.attrs.get("group", 1),
        "filters of shape {} for {} channels are not in blocks of {} channels, as ONNX Runtime has "
        "on this machine; save the model on this machine again, or with ORT_ENABLE_EXTENDED",
        list(w.shape),
        x.shape[1],
        block,
    )


@function(
    "Conv",
    "X, W, B?, Sum? -> Y",
    domain=NCHWC,
    requires=convolution_operands,
    activation="string",
    activation_params="floats",
    **CONVOLUTION_ATTRIBUTES,
)
def conv(call: Call) -> Results:
    """Convolution with filters in blocks, a sum, and an activation."""
    x, w, *rest = call.inputs
    block = block_channels()
    filters, channels, height, width = (call.size(w, axis) for axis in range(4))
    # [O / B, I / B, H, W, B of I, B of O]; fewer channels than a block are not blocked.
    inner = block if channels % block == 0 else 1
    parts = [filters // block, channels // inner, height, width, inner, block]
    filters_first = call.Transpose(call.Reshape(w, parts), perm=(0, 5, 1, 4, 2, 3))
    w = call.Reshape(filters_first, [filters, channels, height, width])
    return [fused_convolution(call, x, w, *rest)]


@function("AveragePool", "X -> Y", domain=NCHWC, count_include_pad=0, **POOL_ATTRIBUTES)
@function("GlobalAveragePool", "X -> Y", domain=NCHWC)
@function("GlobalMaxPool", "X -> Y", domain=NCHWC)
@function("MaxPool", "X -> Y", domain=NCHWC, storage_order=0, **POOL_ATTRIBUTES)
def pool(call: Call) -> Results:
    """Pool, as the standard does."""
    return call.as_standard()


def upsample_operands(node: Node, x: Tensor) -> None:
    """Raise ShapeError unless images are enlarged by whole numbers along height and width."""
    require_rank("X", x, 4)
    scales = list(node.attrs.get("scales", ()))
    fits = len(scales) == 4 and scales[:2] == [1, 1] and min(scales) >= 1
    require(fits, "scales are {}; needed are [1, 1, height, width], at least 1", scales)


@function(
    "Upsample",
    "X -> Y",
    domain=NCHWC,
    requires=upsample_operands,
    coordinate_transformation_mode="asymmetric",
    mode="nearest",
    scales="ints",
)
def upsample(call: Call) -> Results:
    """Enlarge images by whole numbers."""
    options = call.attributes("coordinate_transformation_mode", "mode")
    scales = call.constant(call.attribute("scales"), "float32")
    return [call.Resize(call.inputs[0], None, scales, nearest_mode="floor", **options)]
