"""Inputs of expressions over elements: how each operand lies in memory, beside the output."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import attrs
import numpy as np

from subgraph.engine.planner.lowering import Lowering, Unsupported
from subgraph.engine.planner.operands import Operand, Weight
from subgraph.graph.types import Array
from subgraph.ops.shared.strides import Ints, collapse, contiguous


@attrs.frozen
class Source:
    """An input of an expression: an operand, and the shape and layout in which it is read.

    Attributes:
        operand: The operand, or a weight computed once with the plan.
        shape: The shape in which it broadcasts to the output; may differ from the operand's own.
        layout: "plain", "blocked" or "bfloat16".
        dtype: Its dtype.
    """

    operand: Operand | Weight
    shape: tuple[int, ...]
    layout: str
    dtype: str

    @property
    def stored(self) -> str:
        """The dtype of its elements in memory."""
        return "bfloat16" if self.layout == "bfloat16" else self.dtype


def source(operand: Operand, shape: Sequence[int] | None = None) -> Source:
    """Return an operand as the input of an expression, read in ``shape`` (None: in its own).

    Raises:
        Unsupported: The shape has another number of elements than the operand.
    """
    wanted = operand.shape if shape is None else tuple(shape)
    if shape is not None and math.prod(wanted) != operand.size:
        raise Unsupported(f"{operand.name!r} of shape {operand.shape} read as {wanted}")
    return Source(operand, wanted, operand.layout, operand.dtype)


def blocked_sources(
    low: Lowering, sources: Sequence[Source], target: Operand
) -> tuple[list[Operand | Weight], Ints, list[Ints]]:
    """Return operands, dimensions [images, blocks, pixels, lanes], and strides along them."""
    lanes = target.lanes
    shape = (target.shape[0], target.blocks, math.prod(target.shape[2:]), lanes)
    operands: list[Operand | Weight] = []
    strides: list[Ints] = []
    for s in sources:
        operand, steps = _blocked_source(low, s, target, shape)
        operands.append(operand)
        strides.append(steps)
    return operands, shape, strides


def _blocked_source(
    low: Lowering, s: Source, target: Operand, dims: Ints
) -> tuple[Operand | Weight, Ints]:
    """Return an input and its strides, in elements, along [images, blocks, pixels, lanes].

    An input must hold one number, one for each image, one for each pixel, or one for each channel;
    plain channels are padded to whole blocks.

    Raises:
        Unsupported: The input does not broadcast to the output in blocks of channels.
    """
    images, blocks, _, lanes = dims
    channels = target.shape[1]
    shape = (1,) * (len(target.shape) - len(s.shape)) + s.shape
    if s.layout == target.layout and s.shape == target.shape:
        return s.operand, contiguous(dims)
    if s.layout == "plain" and math.prod(shape) == 1:
        return s.operand, (0, 0, 0, 0)
    if s.layout == "plain" and math.prod(shape[1:]) == 1 and shape[0] == images:
        return s.operand, (1, 0, 0, 0)
    # Of blocks of lower rank another dimension than the second aligns with the channels.
    ranked = len(s.shape) == len(target.shape)
    if shape[1:] == (1, *target.shape[2:]) and (ranked or s.layout == "plain"):
        # The first channel of each pixel.
        own = s.operand.lanes if isinstance(s.operand, Operand) else 1
        return s.operand, (math.prod(shape[2:]) * own if shape[0] > 1 else 0, 0, own, 0)
    if s.layout in ("blocked", "bfloat16"):
        alike = ranked and s.shape[1] == channels
        if alike and math.prod(s.shape[2:]) == 1:
            steps = contiguous((s.shape[0], blocks, 1, lanes))
            own = s.operand.blocks * s.operand.lanes if isinstance(s.operand, Operand) else 0
            if own != blocks * lanes:
                raise Unsupported(f"{own} lanes of channels beside {blocks * lanes}")
            return s.operand, (steps[0] if s.shape[0] > 1 else 0, steps[1], 0, 1)
        raise Unsupported(f"blocked shapes {s.shape} and {target.shape} do not broadcast")
    if shape[1] != channels or math.prod(shape[2:]) != 1:
        raise Unsupported(f"plain shape {s.shape} beside blocked {target.shape}")
    if shape[0] == 1 and channels % lanes:
        padded = -(-channels // lanes) * lanes
        weight = low.weight(f"pad_channels{padded}", partial(_pad, size=padded), s.operand)
        return weight, (0, lanes, 0, 1)
    if channels % lanes:
        raise Unsupported(f"{channels} plain channels are no multiple of {lanes}")
    return s.operand, (channels if shape[0] > 1 else 0, lanes, 0, 1)


def _pad(array: Array, size: int) -> Array:
    """Append zeros to a weight, up to ``size`` elements."""
    flat = array.reshape(-1)
    return np.concatenate([flat, np.zeros(size - flat.size, flat.dtype)])


def merge_blocks(
    shape: Ints, strides: Sequence[Ints], lanes: int
) -> tuple[Ints, list[Ints], list[bool]]:
    """Merge the dimensions of the blocked layout; pixels and lanes become one row.

    Returns:
        The merged dimensions, the strides of each operand along them, and for each operand whether
        it is one block of channels that repeats along the row (mode "p").
    """
    block = shape[3]
    last = [(s[2], s[3]) for s in strides]
    if block != lanes or any(pair not in ((lanes, 1), (0, 0), (0, 1)) for pair in last):
        dims, merged = collapse(shape, strides)
        return dims, merged, [False] * len(merged)
    merged = [(s[0], s[1], s[3]) for s in strides]
    periodic = [pair == (0, 1) and shape[2] > 1 for pair in last]
    if not any(periodic):
        dims, joined = collapse((*shape[:2], shape[2] * block), merged)
        return dims, joined, [False] * len(joined)
    outer, joined = collapse(shape[:2], [s[:2] for s in merged])
    rows = [(*s, m[2]) for s, m in zip(joined, merged, strict=True)]
    return (*outer, shape[2] * block), rows, periodic
