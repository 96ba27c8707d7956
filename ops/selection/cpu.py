"""Operators that find how much they give, on the CPU device: bounded forms, and the cut after them.

See ``ops/selection/padded.py`` for what they mean.
"""

from __future__ import annotations

import math

import numpy as np

from subgraph.engine.planner.lowering import Lowering, Operand, Unsupported, Word, lowering
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.graph.graph import Node
from subgraph.operators.schema import INTERNAL_DOMAIN
from subgraph.ops.elementwise.cpu import cast_to, emit_cast, temporary
from subgraph.ops.elementwise.expressions import INTEGERS
from subgraph.ops.movement.copies_cpu import emit_copy, emit_fill
from subgraph.ops.movement.cpu import element_bytes
from subgraph.ops.shared.strides import contiguous, normal_axis

_ORDERED = ("float32", "float64", *INTEGERS, "bool")
_HALF = ("float16", "bfloat16")


def _nothing(low: Lowering, count: Operand) -> None:
    emit_fill(low, count, 1, np.zeros(1, np.int64))


@lowering("Trim", domain=INTERNAL_DOMAIN)
def trim(node: Node, low: Lowering) -> None:
    """Lower the cut: a view along the first axis, a copy along others."""
    x, y = low.given(0), low.output()
    if y.size == 0:
        return
    if normal_axis(int(node.attrs["axis"]), x.rank) == 0:
        low.alias(y, x)
        return
    steps = (contiguous(x.shape), contiguous(y.shape))
    emit_copy(low, x, y, y.shape, *steps, item=element_bytes(x))


@lowering("BoundedNonZero", domain=INTERNAL_DOMAIN, dtypes=(*_ORDERED, *_HALF))
def non_zero(node: Node, low: Lowering) -> None:
    """Lower NonZero: one pass over the elements."""
    x, places, count = low.given(0), low.output(0), low.output(1)
    if x.size == 0:
        _nothing(low, count)
        return
    dtype = {"bool": "uint8", **dict.fromkeys(_HALF, "uint16")}.get(x.dtype, x.dtype)
    kernel = Kernel(
        "subgraph.ops.selection.kernels", "non_zero", dtype=dtype, half=x.dtype in _HALF
    )
    words: list[Word] = [x, places, count, x.size, x.rank, *x.shape]
    low.emit(kernel, words, 1, bytes=x.nbytes)


@lowering("BoundedCompress", domain=INTERNAL_DOMAIN)
def compress(node: Node, low: Lowering) -> None:
    """Lower Compress: slices with a true condition, in order."""
    x, conditions, y, count = low.given(0), low.given(1), low.output(0), low.output(1)
    axis = node.attrs.get("axis")
    dims: tuple[int, ...] = (x.size,) if axis is None else x.shape
    place = 0 if axis is None else normal_axis(int(axis), len(dims))
    item = element_bytes(x)
    if y.size == 0 and 0 not in (*dims[:place], *dims[place + 1 :]):
        _nothing(low, count)
        return
    step = math.prod(dims[place + 1 :]) * item
    words: list[Word] = [x, conditions, y, count, math.prod(dims[:place]), dims[place], step]
    words += [conditions.size, y.shape[place], low.scratch(8 * conditions.size)]
    kernel = Kernel("subgraph.ops.selection.kernels", "compress", item=min(item, 8))
    low.emit(kernel, words, 1, bytes=2 * y.nbytes)


@lowering("BoundedUnique", domain=INTERNAL_DOMAIN, dtypes=(*_ORDERED, *_HALF))
def unique(node: Node, low: Lowering) -> None:
    """Lower Unique: rows sorted, equal ones counted; another axis is turned to the front."""
    x, y, first, inverse, counts, count = low.given(0), *low.outputs
    axis = node.attrs.get("axis")
    dims = (x.size,) if axis is None else x.shape
    place = 0 if axis is None else normal_axis(int(axis), len(dims))
    rows = dims[place]
    if rows == 0:
        _nothing(low, count)
        return
    order = (place, *(d for d in range(len(dims)) if d != place))
    shape = [dims[d] for d in order]
    if x.dtype in _HALF:
        x, wide = cast_to(low, x, "float32"), temporary(low, "float32", y.shape)
    else:
        wide = y
    given, result = x, wide
    steps = contiguous(dims)
    turned = [steps[d] for d in order]
    if place:
        given, result = temporary(low, x.dtype, shape), temporary(low, x.dtype, shape)
        emit_copy(low, x, given, shape, turned, contiguous(shape), item=x.itemsize)
    scratch, table = low.scratch(16 * rows), low.scratch(32 * rows + 512)
    words: list[Word] = [given, result, first, inverse, counts, count]
    words += [rows, x.size // rows, scratch, table]
    dtype = "uint8" if x.dtype == "bool" else x.dtype
    in_order = bool(node.attrs.get("sorted", 1))
    kernel = Kernel("subgraph.ops.selection.kernels", "unique", dtype=dtype, in_order=in_order)
    low.emit(kernel, words, 1, bytes=2 * x.nbytes)
    if place:
        emit_copy(low, result, wide, shape, contiguous(shape), turned, item=x.itemsize)
    if wide is not y:
        emit_cast(low, wide, y)


@lowering("BoundedNonMaxSuppression", domain=INTERNAL_DOMAIN, dtypes=("float32", "float16"))
def non_max_suppression(node: Node, low: Lowering) -> None:
    """Lower NonMaxSuppression: each class by itself, then all picks one after the other."""
    boxes, scores = (cast_to(low, low.given(k), "float32") for k in range(2))
    found, count = low.output(0), low.output(1)
    batch, classes, number = scores.shape
    units = batch * classes
    if boxes.shape != (batch, number, 4):
        raise Unsupported(f"boxes {boxes.shape} for scores {scores.shape}")
    if found.size == 0:
        _nothing(low, count)
        return
    room = found.shape[0] // units
    picked = temporary(low, "int64", (units, room))
    many = temporary(low, "int64", (units,))
    lanes = low.lanes("float32")
    scratch = low.scratch(8 * number + 20 * (number + lanes), per_worker=True)
    limits = [low.optional(k) for k in (2, 3, 4)]
    most = limits[0]
    if most is not None and most.dtype != "int64":
        raise Unsupported(f"a number of boxes of {most.dtype}")
    words: list[Word] = [boxes, scores, *(o or 0 for o in limits), picked, many]
    words += [number, classes, room, scratch, scratch.nbytes]
    centred = bool(node.attrs.get("center_point_box", 0))
    kernel = Kernel("subgraph.ops.selection.kernels", "suppress", centred=centred, lanes=lanes)
    low.emit(kernel, words, units, grain=1, bytes=boxes.nbytes + scores.nbytes)
    words = [picked, many, found, count, units, classes, room]
    low.emit(Kernel("subgraph.ops.selection.kernels", "gather_picked"), words, 1)
