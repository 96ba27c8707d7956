"""Strided convolutions of few channels, as convolutions without stride over an image's phases.

The phases of an image for stride s are its s * s sub-images of every s-th row and column. A
convolution of stride s over C channels equals one of stride 1 over the ``s * s * C`` phases, whose
kernel has s times fewer taps along each axis: the 7 x 7 kernel with which many networks begin, of
stride 2 over 3 colours, becomes a 4 x 4 kernel over 12 phases, which Winograd's algorithm computes.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import attrs
import numpy as np

from subgraph.engine.planner.lowering import Lowering
from subgraph.engine.planner.operands import Argument, Scratch
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.graph.types import Array
from subgraph.ops.movement.arguments import PhasesArguments
from subgraph.ops.movement.geometry import Geometry, winograd_weights
from subgraph.ops.shared.tile_planning import Tiles, grain, round_up

# Taps along an axis: outputs of Winograd's tile along it. Every such tile reads 6 inputs.
OUTPUTS = {3: 4, 4: 3, 5: 2}


@attrs.frozen
class Phases:
    """A convolution over the phases of its image.

    Attributes:
        step: Stride of the replaced convolution; each channel has ``step * step`` phases.
        shift: Zero taps added before the first along H and W, so that windows begin at phase 0.
        g: Sizes of the convolution over the phases.
    """

    step: int
    shift: tuple[int, int]
    g: Geometry


def phases_of(g: Geometry) -> Phases | None:
    """Return the convolution over phases, or None if Winograd's algorithm cannot compute it."""
    step = g.strides[1]
    # `Phases` has one stride for both axes, and `phase_weights` divides taps by their position in
    # the kernel, which is that in the image only without dilation.
    flat = g.kernel[0] == g.source[0] == g.target[0] == 1
    if not flat or g.groups > 1 or step == 1 or step != g.strides[2] or g.dilations[1:] != (1, 1):
        return None
    # Zero taps in front enlarge the pads to multiples of the stride, so that the first tap of each
    # window reads phase 0.
    rows, columns = ((-pad % step) for pad in g.pads[1:])
    taps = -(-(g.kernel[1] + rows) // step)
    # Winograd's transforms exist for square kernels of these sizes.
    if taps not in OUTPUTS or taps != -(-(g.kernel[2] + columns) // step):
        return None
    over = attrs.evolve(
        g,
        inputs=g.inputs * step * step,
        # A last row or column that some phases lack is filled with zeros.
        source=(1, -(-g.source[1] // step), -(-g.source[2] // step)),
        kernel=(1, taps, taps),
        strides=(1, 1, 1),
        pads=(0, (g.pads[1] + rows) // step, (g.pads[2] + columns) // step),
    )
    return Phases(step, (rows, columns), over)


def phase_weights(of: Tiles, phases: Phases) -> Callable[[Array], Array]:
    """Return the function that packs weights ``[O, I, H, W]`` by phases for Winograd's kernel."""
    step, (rows, columns), taps = phases.step, phases.shift, phases.g.kernel[1]
    pack = winograd_weights(of, OUTPUTS[taps])

    def make(weight: Array) -> Array:
        outputs, inputs = weight.shape[:2]
        height, width = weight.shape[-2:]
        whole = np.zeros((outputs, inputs, taps * step, taps * step), weight.dtype)
        whole[:, :, rows : rows + height, columns : columns + width] = weight.reshape(
            outputs, inputs, height, width
        )
        split = whole.reshape(outputs, inputs, taps, step, taps, step)
        # The order of channels of the kernel ``phases``: row of the phase, channel, its column.
        return pack(split.transpose(0, 3, 1, 5, 2, 4).reshape(outputs, -1, taps, taps))

    return make


def emit_phases(low: Lowering, of: Tiles, g: Geometry, phases: Phases, x: Argument) -> Scratch:
    """Emit the step that writes the phases of an image as channels in the blocked layout.

    Args:
        low: Collects the plan's steps and scratch memory.
        of: The contraction tiles.
        g: Sizes of the strided convolution.
        phases: The convolution over the phases.
        x: The image in the plain layout.

    Returns:
        The phases, ``[N][blocks][rows][columns][lanes]``.
    """
    rows, columns = phases.g.source[1:]
    blocks = round_up(phases.g.inputs, of.lanes) // of.lanes
    pixel = of.lanes * of.item
    target = low.scratch(g.images * blocks * rows * columns * pixel)
    # Two neighbouring floats are copied as one 8-byte element if no pair is split.
    pair = 2 if of.item == 4 and phases.step % 2 == g.source[2] % 2 == of.lanes % 2 == 0 else 1
    arguments = PhasesArguments(
        source=x,
        target=target,
        channels=g.inputs,
        height=g.source[1],
        width=g.source[2] // pair,
        rows=rows,
        columns=columns,
        down=phases.step,
        across=phases.step // pair,
        blocks=blocks,
    )
    units = g.images * rows
    written = target.nbytes
    low.emit(
        Kernel(
            "subgraph.ops.movement.reorder_kernels",
            "phases",
            item=pair * of.item,
            lanes=of.lanes // pair,
        ),
        arguments,
        units,
        grain=grain(units, written),
        bytes=g.images * g.inputs * math.prod(g.source) * of.item + written,
    )
    return target
