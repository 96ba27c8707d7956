"""Conversions of operands between the plain and the blocked layout, through scratch memory.

A kernel that needs another layout than the plan chose reads `blocked` or `plain`, writes to
`blocked_target` or `plain_target`, and ends with `convert_output`, which converts the output.
"""

from __future__ import annotations

import math

from subgraph.engine.planner.layouts import conversion_step
from subgraph.engine.planner.lowering import Lowering
from subgraph.engine.planner.operands import Operand
from subgraph.ops.elementwise.cpu import clear_padding, temporary
from subgraph.ops.shared.delegation import viewed


def blocked(low: Lowering, lanes: int, operand: Operand) -> Operand:
    """Return an operand in blocks of channels, converted to scratch memory if necessary.

    Args:
        low: Collects the plan's steps and scratch memory.
        lanes: Channels of a block.
        operand: An input, ``[N, C, *spatial]``. In the layout "bfloat16" it stays as it is.
    """
    target = blocked_target(low, lanes, operand)
    if target is not operand:
        low.steps.append(conversion_step(operand, target))
    return target


def widened(low: Lowering, operand: Operand) -> Operand:
    """Return an operand in another layout than "bfloat16", converted to blocks if necessary.

    Args:
        low: Collects the plan's steps and scratch memory.
        operand: An input, ``[N, C, *spatial]``.
    """
    if operand.layout != "bfloat16":
        return operand
    target = _scratch_blocks(low, low.float_block, operand)
    low.steps.append(conversion_step(operand, target))
    return target


def plain(low: Lowering, operand: Operand) -> Operand:
    """Return an operand in the plain layout, converted to scratch memory if necessary.

    Args:
        low: Collects the plan's steps and scratch memory.
        operand: An input, ``[N, C, *spatial]``.
    """
    if operand.layout == "plain":
        return operand
    if _has_same_bytes(operand, operand.lanes):
        return viewed(low, operand, operand.shape)
    copy = temporary(low, operand.dtype, operand.shape)
    low.steps.append(conversion_step(operand, copy))
    return copy


def blocked_target(low: Lowering, lanes: int, operand: Operand) -> Operand:
    """Return memory for an output in the blocked layout: its own, or scratch for `convert_output`.

    Args:
        low: Collects the plan's steps and scratch memory.
        lanes: Channels of a block.
        operand: The output, ``[N, C, *spatial]``.
    """
    if operand.layout != "plain" or _has_same_bytes(operand, lanes):
        return operand
    return _scratch_blocks(low, lanes, operand)


def _scratch_blocks(low: Lowering, lanes: int, operand: Operand) -> Operand:
    """Return scratch memory for an operand in blocks of ``lanes`` channels."""
    target = Operand(operand.name, operand.dtype, operand.shape, "blocked", lanes=lanes)
    target.storage = low.scratch(target.nbytes).storage
    return target


def plain_target(low: Lowering, operand: Operand) -> Operand:
    """Return memory for an output in the plain layout: its own, or scratch for `convert_output`.

    Args:
        low: Collects the plan's steps and scratch memory.
        operand: The output, ``[N, C, *spatial]``.
    """
    if operand.layout == "plain" or _has_same_bytes(operand, operand.lanes):
        return operand
    return temporary(low, operand.dtype, operand.shape)


def convert_output(
    low: Lowering, operand: Operand, written: Operand, *, keeps_zero: bool = True
) -> None:
    """Convert a result from the layout it was written in to the output's own layout.

    Args:
        low: Collects the plan's steps and scratch memory.
        operand: The output, ``[N, C, *spatial]``.
        written: The memory from `blocked_target` or `plain_target`.
        keeps_zero: The kernel wrote zeros to the channels beyond C, as the blocked layout requires;
            otherwise they are cleared.
    """
    if written is not operand:
        low.steps.append(conversion_step(written, operand))
    elif operand.layout != "plain" and not keeps_zero:
        clear_padding(low, operand)


def _has_same_bytes(operand: Operand, lanes: int) -> bool:
    """Return whether the operand has the same bytes in both layouts."""
    # The blocked order is (block, pixel, lane); with one pixel and whole blocks this is the order
    # of the channels.
    return math.prod(operand.shape[2:]) == 1 and operand.shape[1] % lanes == 0
