"""The number of channels in a block of the blocked layout, chosen by a graph's convolutions.

A block is a vector, and the unused lanes of the last block are multiplied as well: in groups of 8
channels, half the lanes of a block of 16 are zeros. On processors on which a vector of half the
width takes half the time, networks of such groups are faster in blocks of half a vector.
"""

from __future__ import annotations

import math

import attrs

from subgraph.graph.graph import Graph, Node
from subgraph.graph.types import TensorType
from subgraph.system import host

# Half vectors are chosen if the products take this many times longer with whole vectors (estimate:
# copies and the rest of the network are faster with whole ones).
_MIN_GAIN = 1.1
# Convolutions read an image with no more channels, red, green and blue, in plain layout.
_MAX_IMAGE_CHANNELS = 3
# Blocks of output channels in a packed panel of weights: the vectors of a tile
# (`tiling.tile_shape`).
_PANEL_BLOCKS = 2


@attrs.frozen
class ConvolutionSize:
    """The sizes of a convolution.

    Attributes:
        pixels: Outputs of a channel, of one image.
        groups: Number of groups.
        inputs: Input channels of one group.
        outputs: Output channels of one group.
        taps: Weights of one input and output channel.
    """

    pixels: int
    groups: int
    inputs: int
    outputs: int
    taps: int

    def vectors(self, lanes: int) -> int:
        """Return the number of vector products, with blocks of ``lanes`` channels."""
        return self.pixels * self.taps * self._products(lanes)

    def _products(self, lanes: int) -> int:
        channels = self.groups * self.outputs
        # A depthwise convolution multiplies vectors of channels elementwise: one product for each
        # block.
        if self.groups > 1 and self.inputs == 1:
            return -(-channels // lanes)
        if self.groups > 1:
            return min(self._merged(lanes), self._per_panel(lanes))
        # Convolutions of one tap, and those over an image, skip the lanes beyond the last channel.
        exact = self.taps == 1 or self.inputs <= _MAX_IMAGE_CHANNELS
        return (self.inputs if exact else _padded(self.inputs, lanes)) * -(-channels // lanes)

    def _merged(self, lanes: int) -> int:
        """Return the vector products of a pixel and tap if groups are merged to whole blocks."""
        whole = (lanes // math.gcd(lanes, size) for size in (self.inputs, self.outputs))
        together = math.lcm(*whole)
        if self.groups % together:
            together = self.groups
        blocks = -(-together * self.outputs // lanes)
        return self.groups // together * _padded(together * self.inputs, lanes) * blocks

    def _per_panel(self, lanes: int) -> int:
        """Return the vector products if each panel of outputs reads only its blocks of inputs."""
        channels, width = self.groups * self.outputs, _PANEL_BLOCKS * lanes
        total = 0
        for start in range(0, channels, width):
            end = min(channels, start + width)
            first = start // self.outputs * self.inputs // lanes
            last = -(-((end - 1) // self.outputs + 1) * self.inputs // lanes)
            total += (last - first) * lanes * -(-(end - start) // lanes)
        return total


def _padded(channels: int, lanes: int) -> int:
    return -(-channels // lanes) * lanes


def float_block(graph: Graph, *, rounds: bool = False) -> int:
    """Return the channels of a block of float32 values: a whole vector, or half of one.

    The number depends on the graph and the processor, not on the sizes of a run, so that all plans
    of a graph share their packed weights.

    Args:
        graph: The graph.
        rounds: Whether products may round their operands to bfloat16, of which whole vectors are
            multiplied.
    """
    lanes = host.lanes("float32")
    if not host.splits_512_bit_vectors() or (rounds and host.multiplies_bfloat16()):
        return lanes
    sizes: list[ConvolutionSize] = []
    for node in (node for level in graph.levels() for node in level.nodes):
        if "QLinear" in node.op_type:
            return lanes  # a block of bytes then has as many channels as one of floats
        if node.op_type in ("Conv", "FusedConv"):
            found = _size_of(node)
            if found is None:
                return lanes
            sizes.append(found)
    whole = sum(s.vectors(lanes) for s in sizes)
    half = sum(s.vectors(lanes // 2) for s in sizes) / 2
    return lanes // 2 if whole > _MIN_GAIN * half else lanes


def _size_of(node: Node) -> ConvolutionSize | None:
    """Return the sizes of a convolution of float32; None if they are unknown or do not fit."""
    weight, result = node.inputs[1], node.outputs[0].type
    if weight is None or not isinstance(result, TensorType) or result.dtype != "float32":
        return None
    filters = weight.type
    if not isinstance(filters, TensorType) or filters.shape is None or result.shape is None:
        return None
    sizes = [d for d in filters.shape if isinstance(d, int)]
    pixels = [d for d in result.shape[2:] if isinstance(d, int)]
    if len(sizes) < len(filters.shape) or len(pixels) < len(result.shape) - 2:
        return None
    groups = int(node.attrs.get("group", 1))
    if len(sizes) < 2 or groups < 1:
        return None  # planning the node raises the error
    outputs, inputs = sizes[:2]
    return ConvolutionSize(
        math.prod(pixels), groups, inputs, outputs // groups, math.prod(sizes[2:])
    )
