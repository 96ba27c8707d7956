"""How many channels a block of the blocked layout has: chosen for a graph by what its sums cost.

A block is a vector, and what a network's channels leave of the last one is multiplied all the same:
groups of 8 channels in blocks of 16 are half zeros. Where a vector of half the width takes half the
time, such networks are faster in blocks of half a vector.
"""

from __future__ import annotations

import math

import attrs

from subgraph.graph.graph import Graph, Node
from subgraph.graph.types import TensorType
from subgraph.system import host

_GAIN = 1.1  # what blocks of half a vector must save: tiles and copies of whole ones are faster
_COLOURS = 3  # channels of an image that is read as it is
_PANEL = 2  # blocks of outputs that are computed together


@attrs.frozen
class Sums:
    """The sums of a convolution.

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
        """Return the vectors that are multiplied, with blocks of so many channels."""
        return self.pixels * self.taps * self._products(lanes)

    def _products(self, lanes: int) -> int:
        channels = self.groups * self.outputs
        if self.groups > 1 and self.inputs == 1:
            return -(-channels // lanes)
        if self.groups > 1:
            return min(self._merged(lanes), self._bands(lanes))
        # Over one tap, or the colours of an image, sums end with the last channel.
        exact = self.taps == 1 or self.inputs <= _COLOURS
        return (self.inputs if exact else _padded(self.inputs, lanes)) * -(-channels // lanes)

    def _merged(self, lanes: int) -> int:
        """Return the products where groups go together that are whole blocks."""
        whole = (lanes // math.gcd(lanes, size) for size in (self.inputs, self.outputs))
        together = math.lcm(*whole)
        if self.groups % together:
            together = self.groups
        blocks = -(-together * self.outputs // lanes)
        return self.groups // together * _padded(together * self.inputs, lanes) * blocks

    def _bands(self, lanes: int) -> int:
        """Return the products where panels of outputs read the blocks of inputs that they need."""
        channels, width = self.groups * self.outputs, _PANEL * lanes
        total = 0
        for start in range(0, channels, width):
            end = min(channels, start + width)
            first = start // self.outputs * self.inputs // lanes
            last = -(-((end - 1) // self.outputs + 1) * self.inputs // lanes)
            total += (last - first) * lanes * -(-(end - start) // lanes)
        return total


def _padded(channels: int, lanes: int) -> int:
    return -(-channels // lanes) * lanes


def float_block(graph: Graph) -> int:
    """Return the channels of a block of float32 values: a whole vector, or half of one.

    It depends on the graph and the processor alone, never on the sizes of a run.
    """
    lanes = host.lanes("float32")
    if not host.halves_cost_half():
        return lanes
    sums: list[Sums] = []
    for node in (node for level in graph.levels() for node in level.nodes):
        if "QLinear" in node.op_type:
            return lanes  # blocks of bytes have as many channels
        if node.op_type in ("Conv", "FusedConv"):
            found = _sums(node)
            if found is None:
                return lanes
            sums.append(found)
    whole = sum(s.vectors(lanes) for s in sums)
    half = sum(s.vectors(lanes // 2) for s in sums) / 2
    return lanes // 2 if whole > _GAIN * half else lanes


def _sums(node: Node) -> Sums | None:
    """Return the sums of a convolution of float32, None where its sizes are not known."""
    weight, result = node.inputs[1], node.outputs[0].type
    if weight is None or not isinstance(result, TensorType) or result.dtype != "float32":
        return None
    given = weight.type
    if not isinstance(given, TensorType) or given.shape is None or result.shape is None:
        return None
    sizes = [d for d in given.shape if isinstance(d, int)]
    places = [d for d in result.shape[2:] if isinstance(d, int)]
    if len(sizes) < len(given.shape) or len(places) < len(result.shape) - 2:
        return None
    groups = int(node.attrs.get("group", 1))
    outputs, inputs = sizes[:2]
    return Sums(math.prod(places), groups, inputs, outputs // groups, math.prod(sizes[2:]))
