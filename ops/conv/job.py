"""A convolution on the CPU device: its sizes, its operands and its contraction tiles."""

from __future__ import annotations

from collections.abc import Callable

import attrs

from subgraph.engine.planner.lowering import Lowering
from subgraph.engine.planner.operands import Operand, Weight
from subgraph.graph.graph import Node
from subgraph.graph.types import Array
from subgraph.ops.movement.geometry import Geometry, conv_geometry
from subgraph.ops.shared.tile_planning import Activation, Tiles, activation, direct_tiles, tiles


@attrs.define
class Job:
    """A convolution to be lowered: ``act(conv(x, w) + bias + residual)``.

    Attributes:
        low: Collects the plan's steps, weights and scratch memory.
        whole: Sizes of the convolution.
        g: Its sizes without the taps that read nothing but padding.
        taps: The taps along D, H and W that ``g`` has.
        of: Tiles of direct and Winograd convolutions.
        high: Tiles of the kernel `generic`.
        x: The input.
        w: The weights, ``[O, I / groups, ...]``.
        bias: The bias, ``[O]``, or None.
        residual: An array shaped as ``y`` that is added, or None.
        y: The output.
        act: The activation.
    """

    low: Lowering
    whole: Geometry
    g: Geometry
    taps: tuple[slice, slice, slice]
    of: Tiles
    high: Tiles
    x: Operand
    w: Operand
    bias: Operand | None
    residual: Operand | None
    y: Operand
    act: Activation

    @property
    def channels_in(self) -> int:
        """All input channels."""
        return self.g.groups * self.g.inputs

    @property
    def channels_out(self) -> int:
        """All output channels."""
        return self.g.groups * self.g.outputs

    @property
    def constant(self) -> bool:
        """Whether weights and bias depend on the model's weights only."""
        return self.w.constant and (self.bias is None or self.bias.constant)

    def weight(self, recipe: str, make: Callable[[Array], Array]) -> Weight:
        """Return the packed weights of the taps that read pixels.

        Args:
            recipe: Names the packed form in the weight cache.
            make: Packs an array ``[O, I / groups, ...]``.
        """
        kernel, taps = self.whole.kernel, self.taps
        if self.g.kernel == kernel:
            return self.low.weight(recipe, make, self.w)

        def cut(weight: Array) -> Array:
            return make(weight.reshape(*weight.shape[:2], *kernel)[(..., *taps)])

        return self.low.weight(f"{recipe} taps {self.taps_text} of {kernel}", cut, self.w)

    @property
    def taps_text(self) -> str:
        """The taps of ``g`` as text, for keys of the weight cache."""
        return " ".join(f"{t.start}:{t.stop}" for t in self.taps)


def read_job(node: Node, low: Lowering) -> Job:
    """Return the convolution that a node describes."""
    x, w, y = low.input(0), low.input(1), low.output()
    lanes = low.block_lanes(x.dtype)
    of, high = direct_tiles(x.dtype, lanes), tiles(x.dtype, lanes)
    whole = conv_geometry(node, x, w, y)
    g, taps = whole.trimmed()
    act = activation(node, of, low)
    return Job(low, whole, g, taps, of, high, x, w, low.optional(2), low.optional(3), y, act)
