"""Layouts between nodes: conversions through scratch memory, and what the readers of a value take.

A kernel that needs another layout than the plan chose reads `blocked` or `plain`, writes to
`blocked_target` or `plain_target`, and ends with `convert_output`, which converts the output.

A kernel that can write several layouts asks for those that its readers take: `read_in_blocks` for
blocks of channels, `reads_view` for rows that lie in them. The answers are estimates: the plan
converts a value for other readers.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from subgraph.engine.planner.layouts import CONVOLUTIONS, conversion_step
from subgraph.engine.planner.lowering import LOWERINGS, Lowering
from subgraph.engine.planner.operands import Operand
from subgraph.graph.graph import Node, Value
from subgraph.operators.operator import operator_key
from subgraph.ops.elementwise.cpu import clear_padding, temporary
from subgraph.ops.shared.delegation import viewed

_RESIDUAL = 3  # input of FusedMatMul that is added to its result
_MOST_READERS = 16  # nodes behind a node that are searched (estimate)


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
    elif operand.layout in ("blocked", "bfloat16") and not keeps_zero:
        clear_padding(low, operand)


def _has_same_bytes(operand: Operand, lanes: int) -> bool:
    """Return whether the operand has the same bytes in both layouts."""
    # The blocked order is (block, pixel, lane); with one pixel and whole blocks this is the order
    # of the channels.
    return math.prod(operand.shape[2:]) == 1 and operand.shape[1] % lanes == 0


def read_in_blocks(node: Node) -> bool:
    """Return whether a convolution or a Transpose from blocks reads the output of a node.

    Between them may stand operators that compute on blocks of channels.
    """
    behind = [node]
    for each in behind:  # which grows
        for user in [user for value in each.outputs for user in value.consumers]:
            if user.op_type in CONVOLUTIONS or _moves_channels(user, last_order):
                return True
            if len(behind) < _MOST_READERS and user not in behind and _computes_on_blocks(user):
                behind.append(user)
    return False


def _computes_on_blocks(node: Node) -> bool:
    rule = LOWERINGS.find(operator_key(node.op_type, node.domain))
    return rule is not None and "blocked" in rule.layouts and node.op_type != "Transpose"


def reads_view(low: Lowering, rows: Operand, lanes: int) -> bool:
    """Return whether all readers take rows of channels where they lie in blocks (`in_blocks`).

    These are Transposes before convolutions, and matrix products. (Normalizations of such rows,
    copied vector by vector from blocks, took 1.03 of the time of ConvNeXt.)

    Args:
        low: The lowering of the node that computes the rows.
        rows: Its first output, ``[1, *spatial, C]``.
        lanes: Channels of a block.
    """
    node = low.node
    if rows is not low.outputs[0] or rows.rank < 3 or rows.shape[0] != 1 or rows.shape[-1] % lanes:
        return False
    if not lanes == low.float_block == low.lanes("float32") or rows.dtype != "float32":
        return False
    return is_read_by(node, _takes_view)


def is_read_by(node: Node, takes: Callable[[Node, Value], bool]) -> bool:
    """Return whether the first output of a node has readers, nodes alone, that all take it.

    Args:
        node: The node.
        takes: ``takes(user, value)`` says whether a node takes the value that it reads.
    """
    value = node.outputs[0]
    if node.graph is None or node.graph.is_output(value) or not value.uses:
        return False
    return all(takes(user, value) for user in value.consumers)


def _takes_view(user: Node, value: Value) -> bool:
    if user.op_type == "Reshape":
        return is_read_by(user, _takes_view)
    if user.op_type == "Transpose":
        return _moves_channels(user, first_order) and read_in_blocks(user)
    adds = user.op_type == "FusedMatMul" and _places(user, value) == [_RESIDUAL]
    return adds or multiplies(user, value)


def multiplies(user: Node, value: Value) -> bool:
    """Return whether a node is a product of a value, its left operand, with a weight."""
    if user.op_type not in ("MatMul", "Gemm", "FusedMatMul") or user.attrs.get("transA", 0):
        return False
    right = user.inputs[1]
    weighted = right is not None and right.parameter is not None
    return weighted and _places(user, value) == [0]


def _places(user: Node, value: Value) -> list[int]:
    return [k for k, each in enumerate(user.inputs) if each is value]


def _moves_channels(node: Node, order: Callable[[int], tuple[int, ...]]) -> bool:
    """Return whether a node is a Transpose whose ``perm`` is ``order(number of axes)``."""
    perm = node.attrs.get("perm", ())
    return node.op_type == "Transpose" and len(perm) > 2 and tuple(perm) == order(len(perm))


def last_order(rank: int) -> tuple[int, ...]:
    """Return the order of axes by which a Transpose moves the channels of an image last."""
    return (0, *range(2, rank), 1)


def first_order(rank: int) -> tuple[int, ...]:
    """Return the order of axes by which a Transpose moves the last axis to the channels' place."""
    return (0, rank - 1, *range(1, rank - 1))
