"""Conversions of operands between the plain and the blocked layout, through scratch memory.

A kernel that needs another layout than the plan chose reads `blocked` or `plain`, writes to
`blocked_target` or `plain_target`, and ends with `convert_output`, which converts the output.
"""

from __future__ import annotations

import math

from subgraph.engine.planner.layout_arguments import ReorderArguments
from subgraph.engine.planner.layouts import conversion_step
from subgraph.engine.planner.lowering import Lowering
from subgraph.engine.planner.operands import Argument, Operand, Scratch
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.ops.elementwise.cpu import clear_padding, temporary
from subgraph.ops.shared.delegation import viewed
from subgraph.ops.shared.tile_planning import Tiles, grain, round_up

_UNIT_PIXELS = 2048  # pixels of a work unit (estimate)


def blocked(low: Lowering, of: Tiles, operand: Operand) -> Argument:
    """Return an operand in blocks of channels, converted to scratch memory if necessary.

    Args:
        low: Collects the plan's steps and scratch memory.
        of: The contraction tiles; their lanes are the channels of a block.
        operand: An input, ``[N, C, *spatial]``. In the layout "bfloat16" it stays as it is.
    """
    target = blocked_target(low, of, operand)
    if target is not operand:
        _emit_conversion(low, of, "to_blocked", operand, target, operand.shape)
    return target


def widened(low: Lowering, operand: Operand) -> Operand:
    """Return an operand in another layout than "bfloat16", converted to blocks if necessary.

    Args:
        low: Collects the plan's steps and scratch memory.
        operand: An input, ``[N, C, *spatial]``.
    """
    if operand.layout != "bfloat16":
        return operand
    target = Operand(operand.name, operand.dtype, operand.shape, "blocked")
    target.lanes = low.float_block
    target.storage = low.scratch(target.nbytes).storage
    low.steps.append(conversion_step(operand, target))
    return target


def plain(low: Lowering, of: Tiles, operand: Operand) -> Operand:
    """Return an operand in the plain layout, converted to scratch memory if necessary.

    Args:
        low: Collects the plan's steps and scratch memory.
        of: The contraction tiles; their lanes are the channels of a block.
        operand: An input, ``[N, C, *spatial]``.
    """
    if operand.layout == "plain":
        return operand
    if _same_bytes(operand, of):
        return viewed(low, operand, operand.shape)
    copy = temporary(low, operand.dtype, operand.shape)
    _emit_conversion(low, of, "to_plain", operand, copy, operand.shape)
    return copy


def blocked_target(low: Lowering, of: Tiles, operand: Operand) -> Argument:
    """Return memory for an output in the blocked layout: its own, or scratch for `convert_output`.

    Args:
        low: Collects the plan's steps and scratch memory.
        of: The contraction tiles; their lanes are the channels of a block.
        operand: The output, ``[N, C, *spatial]``.
    """
    if operand.layout != "plain" or _same_bytes(operand, of):
        return operand
    channels = operand.shape[0] * round_up(operand.shape[1], of.lanes)
    return low.scratch(channels * math.prod(operand.shape[2:]) * of.item)


def plain_target(low: Lowering, of: Tiles, operand: Operand) -> Operand | Scratch:
    """Return memory for an output in the plain layout: its own, or scratch for `convert_output`.

    Args:
        low: Collects the plan's steps and scratch memory.
        of: The contraction tiles; their lanes are the channels of a block.
        operand: The output, ``[N, C, *spatial]``.
    """
    if operand.layout == "plain" or _same_bytes(operand, of):
        return operand
    return low.scratch(operand.size * of.item)


def convert_output(
    low: Lowering, of: Tiles, operand: Operand, written: Argument, *, keeps_zero: bool = True
) -> None:
    """Convert a result from the layout it was written in to the output's own layout.

    Args:
        low: Collects the plan's steps and scratch memory.
        of: The contraction tiles; their lanes are the channels of a block.
        operand: The output, ``[N, C, *spatial]``.
        written: The memory from `blocked_target` or `plain_target`.
        keeps_zero: The kernel wrote zeros to the channels beyond C, as the blocked layout requires;
            otherwise they are cleared.
    """
    if written is operand:
        if operand.layout == "blocked" and operand.shape[1] % of.lanes and not keeps_zero:
            clear_padding(low, operand)
        return
    kind = "to_plain" if operand.layout == "plain" else "to_blocked"
    _emit_conversion(low, of, kind, written, operand, operand.shape)


def _same_bytes(operand: Operand, of: Tiles) -> bool:
    """Return whether the operand has the same bytes in both layouts."""
    # The blocked order is (block, pixel, lane); with one pixel and whole blocks this is the order
    # of the channels.
    return math.prod(operand.shape[2:]) == 1 and operand.shape[1] % of.lanes == 0


def _emit_conversion(
    low: Lowering, of: Tiles, kind: str, source: Argument, target: Argument, shape: tuple[int, ...]
) -> None:
    """Emit the kernel ``kind``, "to_blocked" or "to_plain", for an image of shape ``shape``."""
    pixels = math.prod(shape[2:])
    blocks = -(-shape[1] // of.lanes)
    parts = -(-pixels // _UNIT_PIXELS)
    units = shape[0] * blocks * parts
    moved = 2 * math.prod(shape)
    low.emit(
        Kernel("subgraph.ops.movement.reorder_kernels", kind, dtype=of.dtype, lanes=of.lanes),
        ReorderArguments(
            source=source,
            target=target,
            channels=shape[1],
            pixels=pixels,
            blocks=blocks,
            part=_UNIT_PIXELS,
            parts=parts,
        ),
        units,
        grain=grain(units, 4 * moved),
        bytes=moved * of.item,
    )
