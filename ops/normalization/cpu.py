"""Normalizations on the CPU device: LayerNormalization and its kin, BatchNormalization, LRN."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from subgraph.dtypes import FLOATS
from subgraph.engine.codegen.arguments import KernelArguments
from subgraph.engine.planner.lowering import Lowering, Unsupported, lowering
from subgraph.engine.planner.operands import Operand
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.graph.graph import Node
from subgraph.graph.symbolic import larger, smaller
from subgraph.graph.types import Array
from subgraph.operators.schema import is_before
from subgraph.ops.elementwise.cpu import (
    Source,
    allow_in_place,
    cast_to,
    emit_cast,
    emit_expression,
    source,
    temporary,
    widened,
)
from subgraph.ops.elementwise.expressions import Expression
from subgraph.ops.reduce.cpu import emit_reduction
from subgraph.ops.shared.strides import normal_axis

from .arguments import (
    BlockMomentsArguments,
    BlockScaleArguments,
    GroupFactorsArguments,
    GroupNormArguments,
    LocalNormArguments,
    LocalNormBlockedArguments,
    RowNormArguments,
)

_PART_PIXELS = 1024  # pixels of a unit of blocks, 64 KiB of float32 (estimate)
_MIN_ELEMENTS_PER_THREAD = 8192  # estimate: more work than starting a thread


@lowering("LayerNormalization", "RMSNormalization", dtypes=FLOATS)
def rows(node: Node, low: Lowering) -> None:
    """Lower LayerNormalization and RMSNormalization."""
    x, y = low.input(0), low.output()
    centred = node.op_type == "LayerNormalization"
    axis = normal_axis(int(node.attrs.get("axis", -1)), x.rank)
    scale, bias = low.input(1), low.optional(2) if centred else None
    shape = x.shape[axis:]
    size = math.prod(shape)
    if x.size == 0:
        raise Unsupported(f"{node.op_type} of an empty tensor")
    converted, result = widened(low, x, y)
    work = converted.dtype
    factor = _one_row(low, scale, shape, work)
    shift = None if bias is None else _one_row(low, bias, shape, work)
    # The kernel stores statistics in the work dtype; for another stash_type there is no kernel.
    means = low.outputs[1] if centred and len(low.outputs) > 1 else None
    deviations = low.outputs[2] if centred and len(low.outputs) > 2 else None
    for stat in (means, deviations):
        if stat is not None and stat.dtype != work:
            raise Unsupported(f"{node.op_type} with statistics of {stat.dtype}")
    arguments = RowNormArguments(
        x=converted,
        y=result,
        scale=factor,
        bias=shift or 0,
        means=means or 0,
        deviations=deviations or 0,
        size=size,
        epsilon=float(node.attrs.get("epsilon", 1e-5)),
    )
    kernel = Kernel(
        "subgraph.ops.normalization.kernels",
        "rows",
        dtype=work,
        lanes=low.lanes(work),
        centred=centred,
        bias=shift is not None,
    )
    grain = max(1, _MIN_ELEMENTS_PER_THREAD // size)
    low.emit(kernel, arguments, x.size // size, grain=grain, flops=8 * x.size, bytes=2 * x.nbytes)
    emit_cast(low, result, y)
    if result is y:
        read = [(o, o.shape) for o in (x, factor, shift) if o is not None]
        allow_in_place(low, y, x, read)


def _one_row(low: Lowering, operand: Operand, shape: Sequence[int], dtype: str) -> Operand:
    """Return a scale or bias, which broadcasts to ``shape``, as one row of that shape.

    Raises:
        Unsupported: It changes from row to row.
    """
    converted = cast_to(low, operand, dtype)
    lead = converted.shape[: max(0, converted.rank - len(shape))]
    if math.prod(lead) != 1:
        raise Unsupported(f"scale or bias of shape {operand.shape} changes from row to row")
    inner = converted.shape[len(lead) :]
    if math.prod(inner) == math.prod(shape):
        return converted
    whole = temporary(low, dtype, shape)
    e = Expression()
    emit_expression(low, e, [source(converted, inner)], [(e.input(dtype), whole)])
    return whole


@lowering(
    "InstanceNormalization", "GroupNormalization", dtypes=FLOATS, layouts=("plain", "blocked")
)
def groups(node: Node, low: Lowering) -> None:
    """Lower InstanceNormalization and GroupNormalization."""
    x, y = low.input(0), low.output()
    channels = x.shape[1]
    pixels = math.prod(x.shape[2:])
    if x.size == 0:
        raise Unsupported(f"{node.op_type} of an empty tensor")
    count = channels
    steps = (1, 1)  # elements of scale and bias between channels, and between groups
    if node.op_type == "GroupNormalization":
        count = int(node.attrs["num_groups"])
        per_group = low.input(1).size == count and is_before(node, 21)
        steps = (0, 1) if per_group else (1, channels // count)
    if x.layout == "blocked":
        if steps[0] == 0:
            raise Unsupported("one scale for each group of channels in blocks")
        _groups_of_blocks(low, channels // count, float(node.attrs.get("epsilon", 1e-5)))
        return
    converted, result = widened(low, x, y)
    work = converted.dtype
    epsilon = float(node.attrs.get("epsilon", 1e-5))
    size = channels // count
    arguments = GroupNormArguments(
        x=converted,
        y=result,
        scale=cast_to(low, low.input(1), work),
        bias=cast_to(low, low.input(2), work),
        groups=count,
        channels=size,
        pixels=pixels,
        epsilon=epsilon,
        channel_step=steps[0],
        group_step=steps[1],
    )
    kernel = Kernel(
        "subgraph.ops.normalization.kernels", "groups", dtype=work, lanes=low.lanes(work)
    )
    grain = max(1, _MIN_ELEMENTS_PER_THREAD // (size * pixels))
    low.emit(
        kernel,
        arguments,
        x.shape[0] * count,
        grain=grain,
        flops=8 * x.size,
        bytes=2 * x.nbytes,
    )
    emit_cast(low, result, y)


def _groups_of_blocks(low: Lowering, size: int, epsilon: float) -> None:
    """Emit a normalization of groups of ``size`` channels in blocks of channels.

    Raises:
        Unsupported: Groups and blocks have no common borders.
    """
    x, y = low.input(0), low.output()
    together = min(size, x.lanes)
    if max(size, x.lanes) % together or together & (together - 1):
        raise Unsupported(f"groups of {size} channels in blocks of {x.lanes}")
    blocks = max(1, size // x.lanes)
    pixels = math.prod(x.shape[2:])
    part = smaller(pixels, _PART_PIXELS)
    parts = -(-pixels // part)
    sizes = {"pixels": pixels, "part": part, "parts": parts}
    count = x.shape[0] * x.blocks
    pair = 2 * x.lanes * x.itemsize
    moments, factors = low.scratch(count * parts * pair), low.scratch(count * pair)
    grain = larger(1, _MIN_ELEMENTS_PER_THREAD // (x.lanes * part))
    variant: dict[str, str | int] = {"dtype": x.dtype, "lanes": x.lanes}
    module = "subgraph.ops.normalization.block_kernels"
    low.emit(
        Kernel(module, "block_moments", **variant),
        BlockMomentsArguments(x=x, moments=moments, **sizes),
        count * parts,
        grain=grain,
        flops=4 * x.size,
        bytes=x.nbytes,
    )
    units = -(-x.blocks // blocks)
    low.emit(
        Kernel(module, "group_factors", **variant, together=together),
        GroupFactorsArguments(
            moments=moments,
            factors=factors,
            scale=low.input(1),
            bias=low.input(2),
            channels=x.shape[1],
            units=units,
            blocks=blocks,
            epsilon=epsilon,
            **sizes,
        ),
        x.shape[0] * units,
        bytes=count * (parts + 1) * pair,
    )
    low.emit(
        Kernel(module, "scale_blocks", **variant),
        BlockScaleArguments(x=x, y=y, factors=factors, **sizes),
        count * parts,
        grain=grain,
        flops=2 * x.size,
        bytes=2 * x.nbytes,
    )
    low.in_place(y, x)


def _factor(scale: Array, variance: Array, *, epsilon: float, dtype: str) -> Array:
    """Return the factor of each channel for stored statistics."""
    # Computed once, when weights are prepared; in float64, so that it is rounded once.
    wide = scale.astype(np.float64) / np.sqrt(variance.astype(np.float64) + epsilon)
    return wide.astype(dtype)


def _shift(
    scale: Array, bias: Array, mean: Array, variance: Array, *, epsilon: float, dtype: str
) -> Array:
    """Return the number to add to each scaled channel for stored statistics."""
    factor = scale.astype(np.float64) / np.sqrt(variance.astype(np.float64) + epsilon)
    return (bias.astype(np.float64) - mean.astype(np.float64) * factor).astype(dtype)


@lowering("BatchNormalization", dtypes=FLOATS, layouts=("plain", "blocked"))
def batch_normalization(node: Node, low: Lowering) -> None:
    """Lower BatchNormalization with stored statistics, to one multiplication and addition."""
    if len(low.outputs) > 1 or node.attrs.get("training_mode", 0):
        raise Unsupported("BatchNormalization in training mode")
    if is_before(node, 7) and not node.attrs.get("is_test", 0):
        raise Unsupported("BatchNormalization in training mode")
    if not node.attrs.get("spatial", 1):
        raise Unsupported("BatchNormalization with statistics for each pixel")
    x, y = low.input(0), low.output()
    scale, bias, mean, variance = (low.input(k) for k in range(1, 5))
    epsilon = float(node.attrs.get("epsilon", 1e-5))
    channels = (x.shape[1] if x.rank > 1 else 1, *(1,) * (x.rank - 2))
    e = Expression()
    term = e.input(x.dtype)
    if all(operand.constant for operand in (scale, bias, mean, variance)):
        work = "float64" if x.dtype == "float64" else "float32"
        recipe = f"{epsilon!r} {work}"
        make = partial(_factor, epsilon=epsilon, dtype=work)
        factor = low.weight(f"batch_norm_factor {recipe}", make, scale, variance)
        make = partial(_shift, epsilon=epsilon, dtype=work)
        shift = low.weight(f"batch_norm_shift {recipe}", make, scale, bias, mean, variance)
        parameters = [Source(weight, channels, "plain", work) for weight in (factor, shift)]
        a, b = e.input(work), e.input(work)
        result = e("add", e("mul", term, a, dtype=x.dtype), b, dtype=x.dtype)
    else:
        operands = (scale, bias, mean, variance)
        parameters = [Source(o, channels, "plain", o.dtype) for o in operands]
        s, b, m, v = (e.input(o.dtype) for o in operands)
        root = e("sqrt", e("add", v, e.number(epsilon, v.dtype)))
        factor_ = e("div", s, root, dtype=v.dtype)
        result = e("mul", e("sub", term, m, dtype=x.dtype), factor_, dtype=x.dtype)
        result = e("add", result, b, dtype=x.dtype)
    emit_expression(low, e, [source(x), *parameters], [(result, y)])


@lowering("LRN", dtypes=FLOATS, layouts=("plain", "blocked"))
def lower_lrn(node: Node, low: Lowering) -> None:
    """Lower LRN."""
    x, y = low.input(0), low.output()
    if x.size == 0:
        return
    size = int(node.attrs["size"])
    before, after = (size - 1) // 2, size // 2
    pixels, beta = math.prod(x.shape[2:]), float(node.attrs.get("beta", 0.75))
    converted, result = widened(low, x, y)
    work = converted.dtype
    common: dict[str, Any] = {
        "x": converted,
        "y": result,
        "pixels": pixels,
        "alpha": float(node.attrs.get("alpha", 1e-4)) / size,
        "bias": float(node.attrs.get("bias", 1.0)),
        "beta": beta,
    }
    variant: dict[str, Any] = {"dtype": work, "three_quarters": beta == 0.75}
    if x.layout == "blocked":
        if max(before, after) >= x.lanes or work != x.dtype:
            raise Unsupported(f"LRN over {size} channels in blocks of {x.lanes}")
        name, lanes = "local_response_blocked", x.lanes
        variant |= {"before": before, "after": after}
        arguments: KernelArguments = LocalNormBlockedArguments(blocks=x.blocks, **common)
        units, cost = x.shape[0] * x.blocks, pixels * lanes
    else:
        name, lanes = "local_response", low.lanes(work)
        arguments = LocalNormArguments(channels=x.shape[1], before=before, after=after, **common)
        units, cost = x.shape[0] * -(-pixels // lanes), x.shape[1] * lanes
    low.emit(
        Kernel("subgraph.ops.normalization.kernels", name, lanes=lanes, **variant),
        arguments,
        units,
        grain=max(1, _MIN_ELEMENTS_PER_THREAD // cost),
        flops=(size + 8) * x.size,
        bytes=2 * x.nbytes,
    )
    emit_cast(low, result, y)


@lowering("MeanVarianceNormalization", dtypes=("float32", "float64"))
def mean_variance(node: Node, low: Lowering) -> None:
    """Lower MeanVarianceNormalization: (x - mean) / (standard deviation + 1e-9)."""
    x, y = low.input(0), low.output()
    if x.size == 0:
        return
    axes = [normal_axis(int(a), x.rank) for a in node.attrs.get("axes", (0, 2, 3))]
    shape = [1 if d in axes else n for d, n in enumerate(x.shape)]
    mean, squares = temporary(low, x.dtype, shape), temporary(low, x.dtype, shape)
    centred = temporary(low, x.dtype, x.shape)
    emit_reduction(low, "mean", x, mean, axes)
    e = Expression()
    value, middle = e.input(x.dtype), e.input(x.dtype)
    emit_expression(low, e, [source(x), source(mean)], [(e("sub", value, middle), centred)])
    emit_reduction(low, "sumsq", centred, squares, axes)
    e = Expression()
    value, total = e.input(x.dtype), e.input(x.dtype)
    count = e.number(float(math.prod(x.shape[a] for a in axes)), x.dtype)
    deviation = e("add", e("sqrt", e("div", total, count)), 1e-9)
    result = e("div", value, deviation)
    emit_expression(low, e, [source(centred), source(squares)], [(result, y)])


@lowering("LpNormalization", dtypes=("float32", "float64"))
def lp_normalization(node: Node, low: Lowering) -> None:
    """Lower LpNormalization: a reduction, then a division; the result is 0 where the norm is."""
    x, y = low.input(0), low.output()
    axis = normal_axis(int(node.attrs.get("axis", -1)), x.rank)
    if x.size == 0:
        return
    norms = temporary(low, x.dtype, [1 if d == axis else n for d, n in enumerate(x.shape)])
    emit_reduction(low, "l1" if int(node.attrs.get("p", 2)) == 1 else "l2", x, norms, [axis])
    e = Expression()
    value, norm = e.input(x.dtype), e.input(x.dtype)
    quotient = e("where", e("eq", norm, 0), 0, e("div", value, norm), dtype=x.dtype)
    emit_expression(low, e, [source(x), source(norms)], [(quotient, y)])
