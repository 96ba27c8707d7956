"""Operators that gather and scatter elements by index, on the CPU: Gather*, Scatter*, OneHot."""

from __future__ import annotations

import math
from collections.abc import Generator
from contextlib import contextmanager

from subgraph.dtypes import FLOATS, HALF_FLOATS, INTEGERS, UNSIGNED
from subgraph.engine.planner.lowering import Lowering, Unsupported, lowering
from subgraph.engine.planner.operands import Operand
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.graph.graph import Node, Value
from subgraph.graph.symbolic import larger, smaller
from subgraph.operators.operator import operator_of
from subgraph.operators.requirements import decoded
from subgraph.operators.schema import INTERNAL_DOMAIN
from subgraph.ops.checks.cpu import emit_range_check
from subgraph.ops.elementwise.cpu import cast_to, emit_cast, temporary
from subgraph.ops.movement.copies_cpu import emit_copy
from subgraph.ops.movement.cpu import element_bytes, emit_view
from subgraph.ops.shared.strides import contiguous, normal_axis

from .arguments import (
    ElementsArguments,
    GatherArguments,
    OneHotArguments,
    TensorScatterArguments,
    TuplesArguments,
)
from .op import wraps

# Bytes of a tile, and of a thread's work at least: half of a 32 KiB L1 cache, since a slice is both
# read and written.
_TILE_BYTES = 16384
# Fewer elements take less time than another thread takes to start on them; an estimate.
_MIN_ELEMENTS_PER_THREAD = 4096


def _unsigned_dtype(operand: Operand) -> str:
    """Return the unsigned dtype of the same size, as which elements are copied.

    Raises:
        Unsupported: The elements have 16 bytes.
    """
    item = element_bytes(operand)
    if item == 16:
        raise Unsupported("indexing of complex numbers")
    return UNSIGNED[item]


@lowering("Gather")
def gather(node: Node, low: Lowering) -> None:
    """Gather slices along an axis; a single constant index makes the result a view."""
    x, indices, y = low.input(0), low.input(1), low.output()
    axis = normal_axis(int(node.attrs.get("axis", 0)), x.rank)
    item = element_bytes(x)
    size = x.shape[axis]
    if y.size == 0:
        emit_range_check(low, indices, "indices", -size, size - 1)
        return
    steps = contiguous(x.shape)
    if indices.known is not None and indices.size == 1:
        index = int(indices.known.reshape(-1)[0])
        strides = (*steps[:axis], *(0 for _ in indices.shape), *steps[axis + 1 :])
        # A known index was checked with the node's requirements; the clamp keeps the view inside
        # the data in any case.
        index = min(max(index + size if index < 0 else index, 0), size - 1)
        emit_view(low, strides, index * steps[axis])
        return
    inner = steps[axis]
    if item == 16:
        item, inner = 8, 2 * inner
    outer = math.prod(x.shape[:axis])
    block = larger(1, smaller(indices.size, _TILE_BYTES // (inner * item)))
    kernel = Kernel("subgraph.ops.indexing.kernels", "gather", item=item, index=indices.dtype)
    arguments = GatherArguments(
        data=x,
        indices=indices,
        y=y,
        size=size,
        count=indices.size,
        inner=inner,
        block=block,
        report=low.report("indices"),
    )
    units = outer * -(-indices.size // block)
    grain = larger(1, _TILE_BYTES // (block * inner * item))
    low.emit(kernel, arguments, units, grain=grain, bytes=2 * y.nbytes + indices.nbytes)


def _element_arguments(
    low: Lowering, data: Operand, indices: Operand, y: Operand, axis: int
) -> ElementsArguments:
    """Return the arguments of `elements`; ``data`` is gathered from or scattered to."""
    steps = [step * data.itemsize for step in contiguous(data.shape)]
    outer = range(data.rank - 1)
    return ElementsArguments(
        data=data,
        indices=indices,
        y=y,
        size=data.shape[axis],
        along=steps[axis],
        row_size=indices.shape[-1],
        row_step=0 if axis == data.rank - 1 else steps[-1],
        report=low.report("indices"),
        outer=len(outer),
        dims=[n for d in outer for n in (indices.shape[d], 0 if d == axis else steps[d])],
    )


@lowering("GatherElements")
def gather_elements(node: Node, low: Lowering) -> None:
    """Gather single elements along an axis."""
    x, indices, y = low.input(0), low.input(1), low.output()
    emit_gather_elements(low, x, indices, y, normal_axis(int(node.attrs.get("axis", 0)), x.rank))


def emit_gather_elements(
    low: Lowering, x: Operand, indices: Operand, y: Operand, axis: int
) -> None:
    """Emit the step that gathers single elements along an axis (GatherElements).

    Args:
        low: The lowering that gets the step.
        x: The data.
        indices: An index along the axis for each output element, int32 or int64.
        y: The output, with the indices' shape.
        axis: The axis, not negative.
    """
    dtype = _unsigned_dtype(x)
    if y.size == 0:
        return
    kernel = Kernel(
        "subgraph.ops.indexing.kernels",
        "elements",
        dtype=dtype,
        index=indices.dtype,
        scatter=False,
        reduction="none",
    )
    rows = indices.size // indices.shape[-1]
    grain = max(1, _MIN_ELEMENTS_PER_THREAD // indices.shape[-1])
    arguments = _element_arguments(low, x, indices, y, axis)
    low.emit(kernel, arguments, rows, grain=grain, bytes=2 * y.nbytes + indices.nbytes)


def _reduction(node: Node, dtype: str) -> str:
    """Return the reduction of a Scatter."""
    reduction = decoded(node.attrs.get("reduction", "none"))
    if reduction != "none" and dtype not in (*FLOATS, *INTEGERS, *HALF_FLOATS):
        raise Unsupported(f"{node.op_type} with reduction {reduction} of {dtype}")
    return reduction


@contextmanager
def _scattered(
    low: Lowering, reduction: str
) -> Generator[tuple[Operand, Operand, Operand, Operand]]:
    """Yield data, indices, updates and result of a Scatter; half precision is reduced in float32.

    A sum in half precision would stop growing at a few hundreds or thousands of terms.
    """
    x, indices, updates, y = low.input(0), low.input(1), low.input(2), low.output()
    if reduction == "none" or x.dtype not in HALF_FLOATS:
        yield x, indices, updates, y
        return
    made = temporary(low, "float32", y.shape)
    yield cast_to(low, x, "float32"), indices, cast_to(low, updates, "float32"), made
    emit_cast(low, made, y)


def _copy_data(low: Lowering, x: Operand, y: Operand) -> None:
    """Emit the copy of the data to the output, into which updates are then scattered.

    The output may overwrite data that no later step reads, which then need no copy.
    """
    steps = contiguous(x.shape)
    low.in_place(y, x)
    emit_copy(low, x, y, x.shape, steps, steps, item=element_bytes(x))


@lowering("ScatterElements", "Scatter")
def scatter_elements(node: Node, low: Lowering) -> None:
    """Scatter single elements along an axis of a copy of the data."""
    reduction = _reduction(node, low.input(0).dtype)
    with _scattered(low, reduction) as (x, indices, updates, y):
        axis = normal_axis(int(node.attrs.get("axis", 0)), x.rank)
        _copy_data(low, x, y)
        if indices.size == 0 or y.size == 0:
            return
        kernel = Kernel(
            "subgraph.ops.indexing.kernels",
            "elements",
            dtype=_unsigned_dtype(x) if reduction == "none" else x.dtype,
            index=indices.dtype,
            scatter=True,
            reduction=reduction,
        )
        arguments = _element_arguments(low, y, indices, updates, axis)
        low.emit(kernel, arguments, 1, bytes=3 * updates.nbytes)


def _tuple_arguments(
    low: Lowering, data: Operand, indices: Operand, y: Operand, batch_dims: int
) -> TuplesArguments:
    """Return the arguments of `nd`; ``data`` is gathered from or scattered to."""
    depth = indices.shape[-1]
    tuples = indices.size // depth if depth else math.prod(indices.shape[:-1])
    steps = [step * data.itemsize for step in contiguous(data.shape)]
    batches = math.prod(data.shape[:batch_dims])
    indexed = range(batch_dims, batch_dims + depth)
    return TuplesArguments(
        data=data,
        indices=indices,
        y=y,
        tuples=tuples,
        inner=math.prod(data.shape[batch_dims + depth :]),
        batch_tuples=max(1, tuples // max(batches, 1)),
        batch_step=math.prod(data.shape[batch_dims:]) * data.itemsize,
        report=low.report("indices"),
        depth=depth,
        dims=[n for d in indexed for n in (data.shape[d], steps[d])],
    )


def _require_no_indices(indices: Operand) -> None:
    """Leave indices of slices without elements to the reference: they are checked even so."""
    if indices.size:
        raise Unsupported("indices of slices without elements")


@lowering("GatherND")
def gather_nd(node: Node, low: Lowering) -> None:
    """Gather slices by index tuples."""
    x, indices, y = low.input(0), low.input(1), low.output()
    dtype = _unsigned_dtype(x)
    if y.size == 0:
        _require_no_indices(indices)
        return
    arguments = _tuple_arguments(low, x, indices, y, int(node.attrs.get("batch_dims", 0)))
    kernel = Kernel(
        "subgraph.ops.indexing.kernels", "nd", dtype=dtype, scatter=False, reduction="none"
    )
    tuples = arguments.tuples
    grain = max(1, _MIN_ELEMENTS_PER_THREAD // max(y.size // tuples, 1))
    low.emit(kernel, arguments, tuples, grain=grain, bytes=2 * y.nbytes + indices.nbytes)


@lowering("ScatterND")
def scatter_nd(node: Node, low: Lowering) -> None:
    """Scatter slices by index tuples into a copy of the data."""
    reduction = _reduction(node, low.input(0).dtype)
    with _scattered(low, reduction) as (x, indices, updates, y):
        _copy_data(low, x, y)
        if updates.size == 0 or y.size == 0:
            _require_no_indices(indices)
            return
        dtype = _unsigned_dtype(x) if reduction == "none" else x.dtype
        arguments = _tuple_arguments(low, y, indices, updates, 0)
        by_vectors = dtype in ("float32", "float64") and reduction in ("add", "mul")
        kernel = Kernel(
            "subgraph.ops.indexing.kernels",
            "nd",
            dtype=dtype,
            scatter=True,
            reduction=reduction,
            lanes=low.lanes(dtype) if by_vectors else 1,
        )
        low.emit(kernel, arguments, 1, bytes=2 * updates.nbytes)


@lowering("TensorScatter", layouts=("plain", "strided"))
def tensor_scatter(node: Node, low: Lowering) -> None:
    """Copy the rows of an update into a copy of a cache, from a position of each sample on.

    Of a growing cache that nothing else reads, the rows are written to the buffer itself.
    """
    cache, update, first, y = low.input(0), low.input(1), low.optional(2), low.output()
    axis = normal_axis(int(node.attrs.get("axis", -2)), cache.rank)
    circular = decoded(node.attrs.get("mode", "linear")) == "circular"
    places = cache.capacity or cache.shape[axis]
    # A row of the update belongs to a sample, so the axis cannot be that of the samples.
    if axis == 0:
        raise Unsupported("TensorScatter along the samples")
    if cache.layout == "strided":
        # Rows that wrap around would do so at the end of the buffer.
        wraps_in_room = circular and places != cache.shape[axis]
        if axis != cache.rank - 2 or wraps_in_room or not _is_only_reader(node):
            raise Unsupported("TensorScatter of a growing cache that others read")
        if update.layout != "plain" or not low.extend(cache, y):
            raise Unsupported("TensorScatter of a cache that grows by another node")
    else:
        _copy_data(low, cache, y)
    # Rows beyond the end are an error in the linear mode; in the circular mode positions wrap
    # around.
    if first is not None and not circular:
        emit_range_check(low, first, "write_indices", 0, cache.shape[axis] - update.shape[axis])
    if update.size == 0 or y.size == 0:
        return
    row = math.prod(cache.shape[axis + 1 :]) * element_bytes(cache)
    groups = math.prod(cache.shape[1:axis])
    arguments = TensorScatterArguments(
        cache=y,
        update=update,
        firsts=first or 0,
        groups=groups,
        positions=places,
        count=update.shape[axis],
        row_bytes=row,
    )
    kernel = Kernel(
        "subgraph.ops.indexing.kernels",
        "tensor_scatter",
        circular=circular,
        indexed=first is not None,
    )
    low.emit(kernel, arguments, cache.shape[0] * groups, bytes=2 * update.nbytes)


def _is_only_reader(node: Node) -> bool:
    """Return whether a node alone reads the elements of its first input, a growing operand.

    So it must be for each shorter form of the operand, which lies in the same memory, and other
    regions must not read the first one.
    """
    reader = node
    while (reader.domain, reader.op_type) != (INTERNAL_DOMAIN, "Growing"):
        value = reader.inputs[0]
        if value is None or value.producer is None or reader.graph is None:
            return False  # an input of a fused node's inner graph may have other readers outside
        readers = [user for user in value.uses if _reads_elements(user, value)]
        if readers != [reader] or reader.graph.is_output(value):
            return False
        reader = value.producer
    return bool(reader.attrs.get("overwrites"))


def _reads_elements(node: Node, value: Value) -> bool:
    """Return whether a node reads more of a value than its shape."""
    if (node.domain, node.op_type) == (INTERNAL_DOMAIN, "Required"):
        return node.inputs[0] is value  # it checks the shapes of the others
    return not operator_of(node).by_type


@lowering("OneHot")
def one_hot(node: Node, low: Lowering) -> None:
    """Write one value at each index along a new axis, and another elsewhere."""
    indices, values, y = low.input(0), low.input(2), low.output()
    item = element_bytes(y)
    if y.size == 0:
        return
    if indices.dtype not in (*FLOATS, *INTEGERS) or item == 16:
        raise Unsupported(f"OneHot of {indices.dtype} to {y.dtype}")
    axis = normal_axis(int(node.attrs.get("axis", -1)), y.rank)
    numbers = cast_to(low, indices, "int64")
    inner = math.prod(indices.shape[axis:])
    depth = y.shape[axis]
    kernel = Kernel("subgraph.ops.indexing.kernels", "one_hot", item=item)
    units = indices.size // inner
    grain = max(1, _MIN_ELEMENTS_PER_THREAD // (depth * inner))
    arguments = OneHotArguments(
        indices=numbers, values=values, y=y, depth=depth, inner=inner, wraps=int(wraps(node))
    )
    low.emit(kernel, arguments, units, grain=grain, bytes=y.nbytes)
