"""Depthwise convolutions on the CPU device, and those of small groups: the step that does them."""

from __future__ import annotations

import math

from subgraph.engine.planner.lowering import Lowering, Word
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.ops.movement.geometry import Geometry
from subgraph.ops.shared.tile_planning import Activation, Tiles, grain
from subgraph.system.host import caches

from .direct import DirectOutput


def has_windows(of: Tiles, g: Geometry) -> bool:
    """Return whether rows of windows can do a depthwise convolution: see ``Tiles.windows``."""
    outside = (g.target[2] - 1) * g.strides[2] - g.pads[2] + g.kernel[2] - g.source[2]
    return (
        g.kernel[0] == g.source[0] == g.target[0] == 1 == g.dilations[2]
        and of.has_windows(g.kernel[2], g.strides[2])
        and max(g.pads[2], outside) <= g.kernel[2] // 2
    )


def emit_depthwise(
    low: Lowering,
    of: Tiles,
    g: Geometry,
    x: Word,
    weight: Word,
    bias: Word,
    out: DirectOutput,
    act: Activation,
) -> None:
    """Emit a kernel of ``depthwise_kernels`` over blocked x, weights and output."""
    whole = out.sizes is None and out.steps == (1, 1, 1)
    windows = whole and has_windows(of, g)
    blocks = -(-g.groups * g.inputs // of.lanes)
    pixel = of.lanes * of.item
    sizes = out.sizes or g.target
    rows = g.target[1]

    def strip_bytes() -> int:
        return g.reach(0, 1) * g.reach(1, rows) * g.reach(2, g.target[2]) * pixel

    scratch: Word = 0
    scratch_bytes = 0
    outer = g.images * blocks * g.target[0]
    if windows:
        tile = of.windows(g.kernel[2], g.strides[2], g.inputs)
        mr = of.window_rows(g.kernel[2])
        while low.threads > 1 < rows and outer * -(-g.target[1] // rows) < 4 * low.threads:
            rows = -(-rows // 2)
    else:
        tile, mr = of.depthwise(), of.mr
        while rows > 1 and strip_bytes() > caches().l2 // 4:
            rows = -(-rows // 2)
        if g.padded:
            scratch = low.scratch(strip_bytes(), per_worker=True)
            scratch_bytes = scratch.nbytes
    image_in = blocks * math.prod(g.source) * pixel
    image_out = blocks * math.prod(sizes) * pixel
    words: list[Word] = [x, weight, out.y, bias, out.residual, g.inputs, blocks, blocks]
    words += g.words()
    words += [tile, act.post, act.flags, act.low, act.high, rows, 0, 0]
    words += [scratch, scratch_bytes, 0, image_in, image_out, image_out]
    if not windows:
        words += [out.steps[2], out.steps[1] * sizes[2], out.steps[0] * sizes[1] * sizes[2]]
        words += [math.prod(sizes), out.offset * pixel]
    units = outer * -(-g.target[1] // rows)
    name = "windows" if windows else "depthwise"
    low.emit(
        Kernel("subgraph.ops.conv.depthwise_kernels", name, dtype=of.dtype, lanes=of.lanes, mr=mr),
        words,
        units,
        grain=grain(units, 4 * g.flops),
        flops=g.flops,
        bytes=g.images * (image_in + image_out),
    )
