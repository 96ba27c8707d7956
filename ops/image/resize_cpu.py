"""Resize and Upsample on the CPU device.

One axis is resized after the other, by tables of neighbours and weights that the plan holds. An
image in blocks of channels is resized as an array whose last axis is that of a block.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import attrs
import numpy as np

from subgraph.dtypes import FLOATS
from subgraph.engine.planner.lowering import Lowering, Unsupported, lowering
from subgraph.engine.planner.operands import Operand
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.graph.graph import Node
from subgraph.graph.limits import check_memory
from subgraph.graph.symbolic import plain
from subgraph.graph.types import Array, numpy_dtype
from subgraph.operators.requirements import decoded
from subgraph.ops.elementwise.cpu import cast_to, emit_expression, source, temporary
from subgraph.ops.elementwise.expressions import Expression
from subgraph.ops.movement.cpu import element_bytes, known
from subgraph.ops.movement.layout_conversion import read_in_blocks
from subgraph.ops.movement.tables_cpu import emit_take, emit_take_last_axes, table_size
from subgraph.ops.movement.types import Repeats
from subgraph.ops.shared.delegation import viewed
from subgraph.ops.shared.strides import normal_axis

from .arguments import BlendAcrossArguments, BlendArguments, BlendNearbyArguments
from .reference import exact_scale

_TILE = 8192  # elements of a work unit; an estimate
_GATHER_COST = 4  # cost of a gathered element relative to one of a contiguous load; an estimate
# Vectors, by their lanes, up to which permuting them costs less than gathering; an estimate.
_MAX_PERMUTED_VECTORS = {16: 4, 8: 1}
_TABLE_BYTES = 64  # bytes of the tables and temporaries of an element and neighbour (measured: 46)
_MAX_INDEX = 2**31 - 1  # tables of neighbours hold int32
_CENTRED = ("half_pixel", "pytorch_half_pixel", "half_pixel_symmetric")


@attrs.frozen
class Axis:
    """How one axis is resized.

    Attributes:
        axis: The axis, not negative.
        size: Its size before.
        taken: Its size after.
        scale: The factor; may differ from the ratio of the sizes.
        start: Begin of the region of interest, as a fraction of the axis.
        end: Its end.
    """

    axis: int
    size: int
    taken: int
    scale: float
    start: float = 0.0
    end: float = 1.0


@lowering("Resize", "Upsample", layouts=("plain", "blocked"))
def resize(node: Node, low: Lowering) -> None:
    """Lower Resize and Upsample."""
    x, y = low.input(0), low.output()
    old = node.op_type == "Upsample" or node.version == 10
    mode = decoded(node.attrs.get("mode", "nearest")).replace("bilinear", "linear")
    transform = decoded(node.attrs.get("coordinate_transformation_mode", "half_pixel"))
    rounding = decoded(node.attrs.get("nearest_mode", "round_prefer_floor"))
    if old:
        # Before opset 11 ONNX had no attributes for these; positions were always output / scale.
        transform, rounding = "asymmetric", "outwards"
    if y.size == 0:
        return
    if x.size == 0:
        raise Unsupported(f"{node.op_type} of an empty tensor")
    axes = [a for a in _axes(low, old, transform) if not _is_identity(a, transform)]
    if y.layout == "blocked":
        # Behind an enlarged image that is read in plain, a conversion would move more.
        spatial = all(a.axis > 1 for a in axes) and x.layout == "blocked"
        if not spatial or transform == "tf_crop_and_resize" or not read_in_blocks(node):
            raise Unsupported(f"{node.op_type} in blocks of channels")
        x, y = (viewed(low, image, image.memory_shape) for image in (x, y))
    if not axes:
        low.alias(low.output(), low.input(0))
    elif mode == "nearest":
        _nearest(low, x, y, axes, transform, rounding)
    else:
        _blend(low, x, y, axes, mode, transform)


def _is_identity(axis: Axis, transform: str) -> bool:
    """Return whether resizing an axis does not change it."""
    whole = transform != "tf_crop_and_resize" or (axis.start, axis.end) == (0.0, 1.0)
    return axis.size == axis.taken and math.isclose(axis.scale, 1.0) and whole


def _content(low: Lowering, index: int) -> Array | None:
    """Return the content of a constant input; None if it is omitted or empty."""
    operand = low.optional(index)
    return None if operand is None or operand.size == 0 else known(low, index)


def _axes(low: Lowering, old: bool, transform: str) -> list[Axis]:
    """Return how each axis is resized."""
    node, x, y = low.node, low.input(0), low.output()
    stated = [normal_axis(int(a), x.rank) for a in node.attrs.get("axes") or range(x.rank)]
    scales = _scales(low, old, stated)
    roi = _content(low, 1) if transform == "tf_crop_and_resize" else None
    found: list[Axis] = []
    for k, axis in enumerate(stated):
        region = (0.0, 1.0)
        if roi is not None:
            region = (float(roi[k]), float(roi[len(stated) + k]))
        found.append(Axis(axis, x.shape[axis], y.shape[axis], scales[k], *region))
    return found


def _scales(low: Lowering, old: bool, axes: Sequence[int]) -> list[float]:
    """Return the scale of each axis, from an input, an attribute, or the ratio of the sizes."""
    node, x, y = low.node, low.input(0), low.output()
    scales = _content(low, 1 if old else 2)
    if scales is not None:
        stated = [float(s) for s in scales.reshape(-1)]
        if old:
            return stated
        # Plans by integer scales may serve several sizes, and need no correction.
        pairs = zip(stated, axes, strict=True)
        return [s if s.is_integer() else exact_scale(s, int(x.shape[a])) for s, a in pairs]
    if "scales" in node.attrs:
        return [float(s) for s in node.attrs["scales"]]
    if "height_scale" in node.attrs:
        return [1.0, 1.0, float(node.attrs["height_scale"]), float(node.attrs["width_scale"])]
    sizes = known(low, 3)
    policy = decoded(node.attrs.get("keep_aspect_ratio_policy", "stretch"))
    if policy == "stretch":
        return [y.shape[axis] / x.shape[axis] for axis in axes]
    ratios = [float(s) / x.shape[axis] for s, axis in zip(sizes, axes, strict=True)]
    return [min(ratios) if policy == "not_larger" else max(ratios)] * len(axes)


def _check_tables(low: Lowering, a: Axis, neighbours: int) -> None:
    """Raise LimitError if the tables of an axis do not fit into the memory budget.

    Args:
        low: The lowering of the node.
        a: The axis.
        neighbours: Number of input elements from which an output element is computed.
    """
    check_memory(_TABLE_BYTES * neighbours * a.taken, f"tables of node {low.node.name!r}")


def _positions(a: Axis, transform: str) -> tuple[Array, Array]:
    """Return the input position of each output element, and which ones lie outside the region."""
    j = np.arange(a.taken, dtype=np.float64)
    length = a.scale * a.size
    outside = np.zeros(a.taken, bool)
    if transform == "align_corners":
        # A resized axis of one element has no distance between corners to divide by; ONNX takes the
        # first.
        at = np.zeros(a.taken) if length == 1 else j * (a.size - 1) / (length - 1)
    elif transform == "asymmetric":
        at = j / a.scale
    elif transform == "tf_half_pixel_for_nn":
        at = (j + 0.5) / a.scale
    elif transform == "tf_crop_and_resize":
        part, last = a.end - a.start, a.size - 1
        middle = np.full(a.taken, part * last / 2)
        with np.errstate(invalid="ignore"):
            at = middle if length == 1 else j * part * last / (length - 1)
            at = at + a.start * (a.size - 1)
        outside = (at < 0) | (at > a.size - 1)
    elif transform == "pytorch_half_pixel" and a.taken == 1:
        at = np.zeros(1)
    else:
        # The order of these sums follows onnx.reference, so that positions round as there.
        shift = a.size / 2 * (1 - a.taken / length) if transform == "half_pixel_symmetric" else 0.0
        at = shift + (j + 0.5) / a.scale - 0.5
    # The region of interest may be NaN or infinite, but tables of indices hold integers.
    return np.nan_to_num(at, posinf=a.size, neginf=-1), outside


def _nearest(
    low: Lowering, x: Operand, y: Operand, axes: Sequence[Axis], transform: str, rounding: str
) -> None:
    """Emit the steps of mode "nearest": copies of whole elements by tables of indices."""
    item = element_bytes(x)
    if item == 16:
        raise Unsupported("Resize of complex numbers")
    value = float(low.node.attrs.get("extrapolation_value", 0.0))
    pad = np.full(1, value).astype(numpy_dtype(x.dtype))
    for a in axes:
        _check_tables(low, a, 1)
    tables = {a.axis: _nearest_table(a, transform, rounding, x.rank) for a in axes}
    order = [a.axis for a in _in_order(axes, x.rank)]
    last_two = [axis for axis in order if axis >= x.rank - 2]
    together = all(_inside(tables[axis]) for axis in last_two)
    if together:
        # The last two axes are resized by one step, before or after the outer ones.
        order = [axis for axis in order if axis not in last_two[1:]]
    place, shape = x, list(x.shape)
    for axis in order:
        images = together and axis in last_two
        shape_after = [*shape]
        for done in last_two if images else (axis,):
            shape_after[done] = table_size(tables[done])
        target = y if shape_after == list(y.shape) else temporary(low, x.dtype, shape_after)
        if images:
            emit_take_last_axes(low, place, target, shape, tables, item=item)
        else:
            emit_take(low, place, target, shape, axis, tables[axis], item=item, pad=pad)
        place, shape = target, shape_after


def _inside(table: Array | Repeats) -> bool:
    """Return whether no element of a table lies outside the region of interest."""
    return isinstance(table, Repeats) or bool((table >= 0).all())


def _repeats(transform: str, rounding: str) -> bool:
    """Return whether an integer scale repeats every element, in this rounding of positions."""
    if transform in ("asymmetric", "tf_half_pixel_for_nn"):
        return rounding == "floor"
    # Positions are less than half an element away from the element that contains them.
    return transform in _CENTRED and rounding.startswith("round_prefer")


def _nearest_table(a: Axis, transform: str, rounding: str, rank: int) -> Array | Repeats:
    """Return the input index of each output element (-1: outside), or for some scales `Repeats`."""
    times = plain(a.taken) // plain(a.size)
    alike = a.axis >= rank - 2 and _repeats(transform, rounding)
    if alike and times > 1 and a.scale == times and a.taken == a.size * times:
        return Repeats(a.size, times)
    at, outside = _positions(a, transform)
    if rounding == "outwards":
        # Before opset 11, in float32: the ceiling along axes that shrink, else the floor.
        at, rounding = at.astype(np.float32), "ceil" if a.scale < 1 else "floor"
    table = np.clip(_rounded(at, rounding), 0, a.size - 1).astype(np.int64)
    table[outside] = -1
    return table


def _rounded(at: Array, rounding: str) -> Array:
    """Round positions to indices; "prefer" decides about halves."""
    if rounding == "floor":
        return np.floor(at)
    if rounding == "ceil":
        return np.ceil(at)
    return np.ceil(at - 0.5) if rounding == "round_prefer_floor" else np.floor(at + 0.5)


def _in_order(axes: Sequence[Axis], rank: int) -> list[Axis]:
    """Return the axes in the order of least cost: one that shrinks leaves less work to the next.

    The last axis costs more, as its neighbours are gathered one by one.
    """

    def cost(order: Iterable[Axis]) -> float:
        elements, total = 1.0, 0.0
        for a in order:
            elements *= a.taken / a.size
            total += elements * (_GATHER_COST if a.axis == rank - 1 else 1)
        return total

    return list(min(itertools.permutations(sorted(axes, key=lambda a: -a.axis)), key=cost))


# ---------------------------------------------------------------- weighted sums


def _blend(
    low: Lowering, x: Operand, y: Operand, axes: Sequence[Axis], mode: str, transform: str
) -> None:
    """Emit the steps of the modes "linear" and "cubic": a weighted sum along one axis each."""
    if x.dtype not in (*FLOATS, "uint8", "int8", "int32"):
        raise Unsupported(f"Resize of {x.dtype} with mode {mode}")
    work = "float64" if x.dtype in ("float64", "int32") else "float32"
    place = cast_to(low, x, work)
    result = y if y.dtype == work else temporary(low, work, y.shape)
    for k, a in enumerate(_in_order(axes, x.rank)):
        shape = [a.taken if d == a.axis else n for d, n in enumerate(place.shape)]
        target = result if k == len(axes) - 1 else temporary(low, work, shape)
        _check_tables(low, a, 2 * math.ceil(_reach(low.node, a, mode)))
        _emit_blend(low, place, target, a, _taps(low.node, a, mode, transform))
        place = target
    if result is not y:
        _store_rounded(low, result, y)


def _store_rounded(low: Lowering, x: Operand, y: Operand) -> None:
    """Emit the conversion of the result to an output of another dtype, rounded and saturated."""
    e = Expression()
    term = e.input(x.dtype)
    if y.dtype not in FLOATS:
        # Cubic weights are partly negative, so results can leave the range of the inputs. The
        # conversion would wrap them around without the bounds.
        info = np.iinfo(y.dtype)
        term = e("rint", e("max", e("min", term, float(info.max)), float(info.min)))
    emit_expression(low, e, [source(x)], [(e.cast(term, y.dtype), y)])


def _filter_scale(node: Node, a: Axis) -> float:
    """Return the factor of distances to neighbours, below 1 for a filter that antialias widens."""
    return min(a.scale, 1.0) if node.attrs.get("antialias", 0) else 1.0


def _reach(node: Node, a: Axis, mode: str) -> float:
    """Return how far the neighbours of a position are, in elements."""
    return (1 if mode == "linear" else 2) / _filter_scale(node, a)


def _taps(node: Node, a: Axis, mode: str, transform: str) -> tuple[Array, Array, Array]:
    """Return neighbours and weights, [neighbours, size], and the first term of each sum, [size]."""
    at, outside = _positions(a, transform)
    antialias = bool(node.attrs.get("antialias", 0))
    scale, reach = _filter_scale(node, a), _reach(node, a, mode)
    first = math.floor(-reach) + 1
    offsets = np.arange(first, 2 - first)
    # An integer position is the right end of its interval, as in the standard's reference.
    left = np.ceil(at) - 1
    ratio = at - left
    distance = np.abs(offsets[:, None] - ratio[None, :]) * scale
    if mode == "linear":
        weights = np.clip(1 - distance, 0, 1)
    else:
        weights = _cubic(distance, float(node.attrs.get("cubic_coeff_a", -0.75)))
    # A widened filter covers a different number of pixels at each position, so its weights are
    # scaled to the sum 1.
    if antialias:
        weights = weights / weights.sum(axis=0, keepdims=True)
    indices = left[None, :].astype(np.int64) + offsets[:, None]
    if node.attrs.get("exclude_outside", 0):
        weights = np.where((indices < 0) | (indices >= a.size), 0.0, weights)
        total = weights.sum(axis=0, keepdims=True)
        # A position far outside has no weight left; dividing by 1 keeps zeros instead of NaN.
        weights = weights / np.where(total == 0, 1.0, total)
    weights[:, outside] = 0.0
    added = np.where(outside, float(node.attrs.get("extrapolation_value", 0.0)), 0.0)
    return np.clip(indices, 0, a.size - 1), weights, added


def _cubic(distance: Array, a: float) -> Array:
    """Return the weights of cubic convolution (Keys, 1981)."""
    d = distance
    near = ((a + 2) * d - (a + 3)) * d * d + 1
    far = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
    return np.where(d <= 1, near, np.where(d < 2, far, 0.0))


def _emit_blend(
    low: Lowering, x: Operand, y: Operand, a: Axis, taps: tuple[Array, Array, Array]
) -> None:
    """Emit the weighted sum along one axis; ``taps`` is the result of `_taps`."""
    indices, weights, added = taps
    if a.size > _MAX_INDEX:
        raise Unsupported(f"Resize of {a.size} elements along an axis")
    dtype = numpy_dtype(x.dtype)
    # The widest window is reserved for every position; neighbours that no position uses cost a load
    # each and are dropped.
    used = np.flatnonzero(np.any(weights != 0, axis=1))
    if not used.size:  # all positions lie outside of the region: the first neighbour has weight 0
        used = np.arange(1)
    indices, weights = indices[used], weights[used]
    outer, inner = math.prod(x.shape[: a.axis]), math.prod(x.shape[a.axis + 1 :])
    lanes = low.lanes(x.dtype)
    found = _firsts(indices, a.size, lanes) if inner == 1 and low.permutes(x.dtype) else None
    if found is not None:
        indices = indices - np.repeat(found[0], lanes)[: a.taken]
    common: dict[str, Any] = {
        "x": x,
        "y": y,
        "indices": low.weight("table32", np.array, np.ascontiguousarray(indices, np.int32)),
        "weights": low.weight("weights", np.array, np.ascontiguousarray(weights, dtype)),
        "added": low.weight("added", np.array, added.astype(dtype)),
        "neighbours": len(used),
        "size": a.size,
        "taken": a.taken,
    }
    flops = 2 * len(used) * y.size
    if inner == 1:
        name, arguments = "along", BlendArguments(**common)
        if found is not None:
            firsts = low.weight("table32", np.array, found[0].astype(np.int32))
            name = "nearby"
            arguments = BlendNearbyArguments(firsts=firsts, vectors=found[1], **common)
        kernel = Kernel("subgraph.ops.image.resize_kernels", name, dtype=x.dtype, lanes=lanes)
        units, grain = outer, max(1, _TILE // a.taken)
    else:
        block = max(1, min(a.taken, _TILE // inner))
        arguments = BlendAcrossArguments(inner=inner, rows=block, **common)
        kernel = Kernel("subgraph.ops.image.resize_kernels", "across", dtype=x.dtype, lanes=lanes)
        units, grain = outer * -(-a.taken // block), max(1, _TILE // (block * inner))
    low.emit(kernel, arguments, units, grain=grain, flops=flops, bytes=x.nbytes + y.nbytes)


def _firsts(indices: Array, size: int, lanes: int) -> tuple[Array, int] | None:
    """Return the index of the first vector of each block of results, and the vectors of a block.

    Args:
        indices: Indices of the neighbours, [neighbours, results].
        size: Elements of the axis.
        lanes: Elements of a vector, and results of a block.

    Returns:
        None if a block's neighbours lie in more vectors than `_MAX_PERMUTED_VECTORS`.
    """
    starts = list(range(0, indices.shape[1], lanes))
    first = np.minimum.reduceat(indices.min(axis=0), starts)
    last = np.maximum.reduceat(indices.max(axis=0), starts)
    for vectors in range(1, _MAX_PERMUTED_VECTORS[lanes] + 1):
        # Moved back from the end of the axis, the last vector of a block still lies inside it.
        begin = np.minimum(first, max(0, size - vectors * lanes))
        if bool((last - begin < vectors * lanes).all()):
            return begin, vectors
    return None
