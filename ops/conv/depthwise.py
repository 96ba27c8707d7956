"""The steps of convolutions that multiply lane by lane on the CPU device.

They are depthwise ones, those of small groups, and those to a few channels.
"""

from __future__ import annotations

import math
from typing import Any

from subgraph.engine.codegen.arguments import KernelArguments
from subgraph.engine.planner.lowering import Lowering
from subgraph.engine.planner.operands import Argument
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.graph.symbolic import larger
from subgraph.ops.movement.geometry import Geometry
from subgraph.ops.movement.packed_conv import PackedConv, is_rounded
from subgraph.ops.shared.tile_planning import Tiles, grain, shared, units_wanted
from subgraph.system.host import caches

from .arguments import (
    WINDOW_OUTPUTS,
    DepthwiseArguments,
    LaneSumArguments,
    RepeatArguments,
    WindowRowsArguments,
)


def has_windows(of: Tiles, g: Geometry) -> bool:
    """Return whether the kernel `windows` can do a depthwise convolution (``Tiles.windows``)."""
    return (
        g.kernel[0] == g.source[0] == g.target[0] == 1
        and of.has_windows(g.kernel[2], g.strides[2])
        and _has_borders_of_windows(g)
    )


def adds_lanes(of: Tiles, g: Geometry) -> bool:
    """Return whether the kernel `lane_sums` can do a convolution."""
    single = g.kernel[2] == 1 and of.lanes > 1
    windows = single or of.has_windows(g.kernel[2], g.strides[2])
    return g.groups == 1 and windows and _has_borders_of_windows(g)


def _has_borders_of_windows(g: Geometry) -> bool:
    # The tile compares only its first and its last ``taps // 2`` pixels with the borders (`strip`),
    # so that no more may lie outside at either end.
    outside = (g.target[2] - 1) * g.strides[2] - g.pads[2] + g.kernel[2] - g.source[2]
    return g.dilations[2] == 1 and max(g.pads[2], outside) <= g.kernel[2] // 2


def repeat_channels(low: Lowering, of: Tiles, g: Geometry, x: Argument) -> Argument:
    """Emit the steps that write each channel once for every output that reads it.

    A depthwise convolution with several outputs for a channel is one with one output, of these.

    Args:
        low: Collects the plan's steps and scratch memory.
        of: Tiles of direct convolutions.
        g: Sizes of the convolution, with one input channel and several outputs for each group.
        x: The input in blocks of channels.
    """
    x_blocks, y_blocks = (-(-g.groups * each // of.lanes) for each in (1, g.outputs))
    pixels = math.prod(g.source)
    block = pixels * of.lanes * of.item
    y = low.scratch(g.images * y_blocks * block)
    for part in range(min(g.outputs, y_blocks)):
        units = g.images * -(-(y_blocks - part) // g.outputs)
        low.emit(
            Kernel(
                "subgraph.ops.conv.copy_kernels",
                "repeat",
                dtype=of.dtype,
                lanes=of.lanes,
                times=g.outputs,
                part=part,
            ),
            RepeatArguments(x=x, y=y, x_blocks=x_blocks, y_blocks=y_blocks, pixels=pixels),
            units,
            grain=grain(units, units * pixels * of.lanes),
            bytes=2 * units * block,
        )
    return y


def emit_depthwise(low: Lowering, conv: PackedConv) -> None:
    """Emit the kernel `depthwise` or `windows`.

    Args:
        low: Collects the plan's steps and scratch memory.
        conv: The convolution, its weights packed by `depthwise_weights`.
    """
    of, g, out = conv.of, conv.g, conv.out
    # `windows` writes adjacent pixels; phases of a transposed convolution are apart.
    windows = out.whole and has_windows(of, g)
    blocks = -(-g.groups * g.inputs // of.lanes)
    pixel = of.lanes * of.item
    # Two blocks of float32 are one of bfloat16, whose pixels have as many bytes.
    reads_rounded, rounded = is_rounded(conv.x), is_rounded(out.y)
    together = 2 if reads_rounded or rounded else 1
    blocks_in, blocks_out = (-(-blocks // (1 + half)) for half in (reads_rounded, rounded))
    image_in = blocks_in * math.prod(g.source) * pixel
    image_out = blocks_out * math.prod(out.sizes or g.target) * pixel
    outer = g.images * -(-blocks // together) * g.target[0]
    high, plane = g.target[1], g.reach(0, 1) * g.reach(2, g.target[2]) * pixel
    if windows:
        rows = shared(high, high, outer, units_wanted(low.threads), 1, 1)
    else:
        # The input of a unit fills a quarter of the L2 cache. The rest of the cache is for outputs,
        # residual and what the next unit reads (estimate).
        rows = g.outputs_within(1, caches().l2 // 4, plane)
    common: dict[str, Any] = {
        **g.arguments(),
        **conv.act.arguments(rounds=rounded),
        "x": conv.x,
        "weights": conv.weight,
        "y": out.y,
        "bias": conv.bias,
        "residual": out.residual,
        "blocks": blocks,
        "rows": rows,
        "x_image": image_in,
        "y_image": image_out,
        "residual_image": blocks * math.prod(out.sizes or g.target) * pixel,
    }
    if windows:
        name, mr = "windows", of.window_rows(g.kernel[2])
        # Activations read and write float32.
        apart = rounded and conv.act.kernel != 0
        storage = "bfloat16" if rounded and not apart else ""
        room = larger(WINDOW_OUTPUTS, g.target[2]) * pixel if apart else None
        arguments: KernelArguments = WindowRowsArguments(
            tile=of.windows(
                g.kernel[2], g.strides[2], g.inputs, storage, "bfloat16" if reads_rounded else ""
            ),
            group_channels=g.inputs,
            together=together,
            x_rounded=int(reads_rounded),
            y_rounded=int(rounded),
            **low.worker_scratch(room),
            **common,
        )
    else:
        name, mr = "depthwise", of.mr
        arguments = DepthwiseArguments(
            tile=of.depthwise(),
            # Only padding needs a copy: the image is in the layout that the tiles read.
            **low.worker_scratch(plane * g.reach(1, rows) if g.padded else None),
            **out.strides(g.target, pixel),
            **common,
        )
    units = outer * -(-high // rows)
    low.emit(
        Kernel("subgraph.ops.conv.depthwise_kernels", name, dtype=of.dtype, lanes=of.lanes, mr=mr),
        arguments,
        units,
        # Depthwise kernels have few multiplications for each load, so that one of them takes as
        # long as four of a matrix product (estimate).
        grain=grain(units, 4 * g.flops),
        flops=g.flops,
        bytes=g.images * (image_in + image_out),
    )


def emit_lane_sums(low: Lowering, conv: PackedConv) -> None:
    """Emit the kernel `lane_sums`.

    Args:
        low: Collects the plan's steps and scratch memory.
        conv: The convolution, its weights packed by `lane_sum_weights` and its bias by
            `first_lane`; y and the residual are plain.
    """
    of, g = conv.of, conv.g
    blocks, pixel = -(-g.inputs // of.lanes), of.lanes * of.item
    rounded, width = is_rounded(conv.x), g.target[2]
    image_in = -(-blocks // (1 + rounded)) * math.prod(g.source) * pixel
    image_out = g.outputs * g.pixels * of.item
    # A long row has several units, of about as many outputs.
    columns = -(-width // -(-width // WINDOW_OUTPUTS))
    others = g.images * g.target[0]
    high = g.target[1]
    rows = 1 if columns < width else shared(high, high, others, units_wanted(low.threads), 1, 1)
    arguments = LaneSumArguments(
        x=conv.x,
        weights=conv.weight,
        y=conv.out.y,
        bias=conv.bias,
        residual=conv.out.residual,
        **g.arguments(),
        **conv.act.arguments(),
        tile=of.windows(g.kernel[2], g.strides[2], source="bfloat16" if rounded else ""),
        outputs=g.outputs,
        blocks=blocks,
        rows=rows,
        columns=columns,
        x_rounded=int(rounded),
        x_image=image_in,
        y_image=image_out,
        residual_image=image_out,
        **low.worker_scratch((WINDOW_OUTPUTS + of.lanes) * pixel),
    )
    units = others * -(-high // rows) * -(-width // columns)
    low.emit(
        Kernel(
            "subgraph.ops.conv.depthwise_kernels",
            "lane_sums",
            dtype=of.dtype,
            lanes=of.lanes,
            mr=of.window_rows(g.kernel[2]),
        ),
        arguments,
        units,
        grain=grain(units, 4 * g.flops),
        flops=g.flops,
        bytes=g.images * (image_in + image_out),
    )
