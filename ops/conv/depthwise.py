"""The step of depthwise convolutions, and of those of small groups, on the CPU device."""

from __future__ import annotations

import math
from typing import Any

from subgraph.engine.codegen.arguments import KernelArguments
from subgraph.engine.planner.lowering import Argument, Lowering
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.ops.movement.geometry import Geometry
from subgraph.ops.shared.tile_planning import Activation, Tiles, grain
from subgraph.system.host import caches

from .arguments import DepthwiseArguments, WindowRowsArguments
from .direct import DirectOutput


def has_windows(of: Tiles, g: Geometry) -> bool:
    """Return whether the kernel `windows` can do a depthwise convolution (``Tiles.windows``)."""
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
    x: Argument,
    weight: Argument,
    bias: Argument,
    out: DirectOutput,
    act: Activation,
) -> None:
    """Emit the kernel `depthwise` or `windows`.

    Args:
        low: Collects the plan's steps and scratch memory.
        of: The contraction tiles.
        g: Sizes of the convolution.
        x: Input in the blocked layout.
        weight: Weights as `depthwise_weights` packs them.
        bias: Bias, padded to whole blocks; 0: none.
        out: Output in the blocked layout.
        act: The activation.
    """
    whole = out.sizes is None and out.steps == (1, 1, 1)
    windows = whole and has_windows(of, g)
    blocks = -(-g.groups * g.inputs // of.lanes)
    pixel = of.lanes * of.item
    sizes = out.sizes or g.target
    rows = g.target[1]

    def strip_bytes() -> int:
        return g.reach(0, 1) * g.reach(1, rows) * g.reach(2, g.target[2]) * pixel

    scratch: Argument = 0
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
    common: dict[str, Any] = {
        **g.arguments(),
        "x": x,
        "weights": weight,
        "y": out.y,
        "bias": bias,
        "residual": out.residual,
        "blocks": blocks,
        "tile": tile,
        "activation": act.kernel,
        "flags": act.flags,
        "low": act.low,
        "high": act.high,
        "rows": rows,
        "x_image": image_in,
        "y_image": image_out,
        "residual_image": image_out,
    }
    if windows:
        arguments: KernelArguments = WindowRowsArguments(group_channels=g.inputs, **common)
    else:
        arguments = DepthwiseArguments(
            scratch=scratch,
            scratch_bytes=scratch_bytes,
            y_column=out.steps[2],
            y_row=out.steps[1] * sizes[2],
            y_plane=out.steps[0] * sizes[1] * sizes[2],
            y_block=math.prod(sizes),
            y_offset=out.offset * pixel,
            **common,
        )
    units = outer * -(-g.target[1] // rows)
    name = "windows" if windows else "depthwise"
    low.emit(
        Kernel("subgraph.ops.conv.depthwise_kernels", name, dtype=of.dtype, lanes=of.lanes, mr=mr),
        arguments,
        units,
        grain=grain(units, 4 * g.flops),
        flops=g.flops,
        bytes=g.images * (image_in + image_out),
    )
