"""TopK on the CPU device, and the padded forms of operators whose output size depends on values.

The latter are followed by a Trim: see ``ops/selection/padded.py``.
"""

from __future__ import annotations

import math

import numpy as np

from subgraph.dtypes import HALF_FLOATS, INTEGERS
from subgraph.engine.planner.lowering import Lowering, lowering
from subgraph.engine.planner.operands import Operand
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.graph.graph import Node
from subgraph.operators.schema import INTERNAL_DOMAIN
from subgraph.ops.elementwise.cpu import cast_to, emit_cast, temporary, widened
from subgraph.ops.indexing.cpu import emit_gather_elements
from subgraph.ops.movement.copies_cpu import emit_copy, emit_fill
from subgraph.ops.movement.cpu import element_bytes
from subgraph.ops.reduce.cpu import emit_argminmax
from subgraph.ops.shared.strides import contiguous, normal_axis

from .arguments import (
    CompressArguments,
    GatherPickedArguments,
    NonZeroArguments,
    SuppressArguments,
    TopKArguments,
    UniqueArguments,
)

_ORDERED = ("float32", "float64", *INTEGERS, "bool")
# Fewer elements take less time than another thread takes to start on them; an estimate.
_MIN_ELEMENTS_PER_THREAD = 4096


def _emit_zero_count(low: Lowering, count: Operand) -> None:
    """Emit the step that writes 0 to the count of a padded form."""
    emit_fill(low, count, 1, np.zeros(1, np.int64))


@lowering("TopK", dtypes=("float32", "float64", *INTEGERS))
def top_k(node: Node, low: Lowering) -> None:
    """Select the largest or smallest elements along an axis, sorted."""
    x, values, indices = low.input(0), low.output(), low.output(1)
    axis = normal_axis(int(node.attrs.get("axis", -1)), x.rank)
    if values.size == 0:
        return
    k = values.shape[axis]
    inner = math.prod(x.shape[axis + 1 :])
    largest = bool(node.attrs.get("largest", 1))
    if k == 1 and (largest or x.dtype in INTEGERS):  # TopK and ArgMax agree: NaN is the largest
        emit_argminmax(low, x, indices, x.shape[axis], inner, largest=largest, last=False)
        emit_gather_elements(low, x, indices, values, axis)
        return
    wide = x.itemsize > 4 or x.shape[axis] >= 1 << 32
    arguments = TopKArguments(
        x=x,
        values=values,
        indices=indices,
        size=x.shape[axis],
        inner=inner,
        k=k,
        **low.worker_scratch((32 if wide else 16) * k),
    )
    if wide:
        kernel = Kernel(
            "subgraph.ops.selection.top_kernels", "wide_keys", dtype=x.dtype, largest=largest
        )
    else:
        lanes = low.lanes(x.dtype)
        kernel = Kernel(
            "subgraph.ops.selection.top_kernels",
            "keys",
            dtype=x.dtype,
            lanes=lanes,
            largest=largest,
        )
    units = x.size // x.shape[axis]
    low.emit(
        kernel,
        arguments,
        units,
        grain=max(1, _MIN_ELEMENTS_PER_THREAD // x.shape[axis]),
        bytes=x.nbytes,
    )


@lowering("Trim", domain=INTERNAL_DOMAIN)
def trim(node: Node, low: Lowering) -> None:
    """Lower Trim: a view along the first axis, a copy along others."""
    x, y = low.input(0), low.output()
    if y.size == 0:
        return
    if normal_axis(int(node.attrs["axis"]), x.rank) == 0:
        low.alias(y, x)
        return
    steps = (contiguous(x.shape), contiguous(y.shape))
    emit_copy(low, x, y, y.shape, *steps, item=element_bytes(x))


@lowering("PaddedNonZero", domain=INTERNAL_DOMAIN, dtypes=(*_ORDERED, *HALF_FLOATS))
def non_zero(node: Node, low: Lowering) -> None:
    """Lower the padded form of NonZero: one pass over the elements."""
    x, indices, count = low.input(0), low.output(0), low.output(1)
    if x.size == 0:
        _emit_zero_count(low, count)
        return
    dtype = {"bool": "uint8", **dict.fromkeys(HALF_FLOATS, "uint16")}.get(x.dtype, x.dtype)
    kernel = Kernel(
        "subgraph.ops.selection.kernels", "non_zero", dtype=dtype, half=x.dtype in HALF_FLOATS
    )
    arguments = NonZeroArguments(
        x=x, indices=indices, count=count, size=x.size, rank=x.rank, dims=x.shape
    )
    low.emit(kernel, arguments, 1, bytes=x.nbytes)


@lowering("PaddedCompress", domain=INTERNAL_DOMAIN)
def compress(node: Node, low: Lowering) -> None:
    """Lower the padded form of Compress: it copies the slices with a true condition, in order."""
    x, conditions, y, count = low.input(0), low.input(1), low.output(0), low.output(1)
    axis = node.attrs.get("axis")
    dims: tuple[int, ...] = (x.size,) if axis is None else x.shape
    place = 0 if axis is None else normal_axis(int(axis), len(dims))
    item = element_bytes(x)
    if y.size == 0 and 0 not in (*dims[:place], *dims[place + 1 :]):
        _emit_zero_count(low, count)
        return
    step = math.prod(dims[place + 1 :]) * item
    arguments = CompressArguments(
        x=x,
        conditions=conditions,
        y=y,
        count=count,
        outer=math.prod(dims[:place]),
        size=dims[place],
        slice_bytes=step,
        sought=conditions.size,
        room=y.shape[place],
        scratch=low.scratch(8 * conditions.size),
    )
    kernel = Kernel("subgraph.ops.selection.kernels", "compress", item=min(item, 8))
    low.emit(kernel, arguments, 1, bytes=2 * y.nbytes)


@lowering("PaddedUnique", domain=INTERNAL_DOMAIN, dtypes=(*_ORDERED, *HALF_FLOATS))
def unique(node: Node, low: Lowering) -> None:
    """Lower the padded form of Unique: equal rows are grouped, counted and sorted.

    An axis other than the first is transposed to the front.
    """
    x, y, first, inverse, counts, count = low.input(0), *low.outputs
    axis = node.attrs.get("axis")
    dims = (x.size,) if axis is None else x.shape
    place = 0 if axis is None else normal_axis(int(axis), len(dims))
    rows = dims[place]
    if rows == 0:
        _emit_zero_count(low, count)
        return
    order = (place, *(d for d in range(len(dims)) if d != place))
    shape = [dims[d] for d in order]
    x, wide = widened(low, x, y, "float32" if x.dtype in HALF_FLOATS else x.dtype)
    rows_first, result = x, wide
    steps = contiguous(dims)
    transposed = [steps[d] for d in order]
    if place:
        rows_first, result = temporary(low, x.dtype, shape), temporary(low, x.dtype, shape)
        emit_copy(low, x, rows_first, shape, transposed, contiguous(shape), item=x.itemsize)
    arguments = UniqueArguments(
        x=rows_first,
        y=result,
        first=first,
        inverse=inverse,
        counts=counts,
        count=count,
        rows=rows,
        length=x.size // rows,
        order=low.scratch(16 * rows),
        table=low.scratch(32 * rows + 512),
    )
    dtype = "uint8" if x.dtype == "bool" else x.dtype
    in_order = bool(node.attrs.get("sorted", 1))
    kernel = Kernel("subgraph.ops.selection.kernels", "unique", dtype=dtype, in_order=in_order)
    low.emit(kernel, arguments, 1, bytes=2 * x.nbytes)
    if place:
        emit_copy(low, result, wide, shape, contiguous(shape), transposed, item=x.itemsize)
    emit_cast(low, wide, y)


@lowering("PaddedNonMaxSuppression", domain=INTERNAL_DOMAIN, dtypes=("float32", "float16"))
def non_max_suppression(node: Node, low: Lowering) -> None:
    """Lower the padded form of NonMaxSuppression: each class by itself, then all joined."""
    boxes, scores = (cast_to(low, low.input(k), "float32") for k in range(2))
    found, count = low.output(0), low.output(1)
    batch, classes, number = scores.shape
    units = batch * classes
    if found.size == 0:
        _emit_zero_count(low, count)
        return
    room = found.shape[0] // units
    picked = temporary(low, "int64", (units, room))
    many = temporary(low, "int64", (units,))
    lanes = low.lanes("float32")
    most, overlap, least = (low.optional(k) for k in (2, 3, 4))
    arguments = SuppressArguments(
        boxes=boxes,
        scores=scores,
        most=most or 0,
        overlap=overlap or 0,
        least=least or 0,
        picked=picked,
        counts=many,
        number=number,
        classes=classes,
        room=room,
        **low.worker_scratch(8 * number + 20 * (number + lanes)),
    )
    centred = bool(node.attrs.get("center_point_box", 0))
    kernel = Kernel("subgraph.ops.selection.kernels", "suppress", centred=centred, lanes=lanes)
    low.emit(kernel, arguments, units, grain=1, bytes=boxes.nbytes + scores.nbytes)
    together = GatherPickedArguments(
        picked=picked, counts=many, y=found, count=count, units=units, classes=classes, room=room
    )
    low.emit(Kernel("subgraph.ops.selection.kernels", "gather_picked"), together, 1)
