"""Kernels that gather and scatter elements by computed indices.

A negative index counts from the end. An index out of range is reported as an error (see
`subgraph.engine.program.reports`) and replaced by the nearest end of the axis, so that no memory
outside the tensors is ever read or written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba.extending import register_jitable

from subgraph.dtypes import HALF_FLOATS, item_bytes
from subgraph.engine.codegen.argument_views import view_of
from subgraph.engine.codegen.simd import (
    ld,
    ld_i64,
    load_as,
    memcpy,
    st,
    store_as,
    vec,
)
from subgraph.ops.checks.kernels import report_value
from subgraph.ops.movement.kernels import WORDS

from .arguments import (
    ElementsArguments,
    GatherArguments,
    OneHotArguments,
    TensorScatterArguments,
    TuplesArguments,
)

Function = Callable[..., Any]


@register_jitable
def checked(index: int, size: int, slot: int, number: int) -> int:
    """Return an index as a position in [0, size); report and clamp one that is out of range.

    Args:
        index: The index; a negative one counts from the end.
        size: Elements of the axis, at least 1.
        slot: Address of the report slot; see `report_value`.
        number: Number of the report, at least 1.
    """
    if 0 <= index < size:
        return index
    if -size <= index < 0:
        return index + size
    # The index is clamped even though the run fails: its address must not leave the tensor before
    # the report is read.
    report_value(slot, number, index, -size, size - 1)
    return 0 if index < 0 else size - 1


def _combiner(reduction: str) -> Function:
    """Return ``f(old, new)``, the element that a scatter with this reduction stores."""

    @register_jitable
    def put(old: Any, new: Any) -> Any:
        return new

    @register_jitable
    def add(old: Any, new: Any) -> Any:
        return old + new

    @register_jitable
    def multiply(old: Any, new: Any) -> Any:
        return old * new

    @register_jitable
    def largest(old: Any, new: Any) -> Any:
        # A NaN in either operand is the result: it is kept if it is old, and no comparison with a
        # new one is true.
        return old if old > new or old != old else new

    @register_jitable
    def smallest(old: Any, new: Any) -> Any:
        return old if old < new or old != old else new

    return {"add": add, "mul": multiply, "max": largest, "min": smallest}.get(reduction, put)


def _access(dtype: str) -> tuple[Function, Function]:
    """Return functions that load and store an element; 16-bit floats are computed in float32."""
    if dtype not in HALF_FLOATS:
        return ld(dtype), st(dtype)
    load_one, store_one = load_as(dtype, "float32", 1), store_as("float32", dtype, 1)
    get, splat = vec("float32", 1).get, vec("float32", 1).splat

    @register_jitable
    def load(address: int) -> Any:
        return get(load_one(address), 0)

    @register_jitable
    def store(address: int, value: Any) -> None:
        store_one(address, splat(value))

    return load, store


def gather(*, item: int, index: str) -> Function:
    """Return the kernel of `GatherArguments`: slices along an axis.

    Args:
        item: Bytes of an element.
        index: Dtype of the indices, int32 or int64.
    """
    arguments = view_of(GatherArguments)
    load, store = ld(WORDS[item]), st(WORDS[item])
    load_index, index_bytes = ld(index), item_bytes(index)

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        a = arguments(args)
        indices, size, count = a.indices, a.size, a.count
        inner, block = a.inner, a.block
        slot, number = ld_i64(a.report), ld_i64(a.report + 8)
        tiles = (count + block - 1) // block
        step = inner * item
        for unit in range(begin, end):
            outer, first = unit // tiles, unit % tiles * block
            x = a.data + outer * size * step
            y = a.y + (outer * count + first) * step
            for j in range(first, min(count, first + block)):
                index = load_index(indices + j * index_bytes)
                source = x + checked(index, size, slot, number) * step
                # A call of memcpy costs more than copying a few elements.
                if inner <= 8:
                    for i in range(0, step, item):
                        store(y + i, load(source + i))
                else:
                    memcpy(y, source, step)
                y += step

    return kernel


def elements(*, dtype: str, index: str, scatter: bool, reduction: str) -> Function:
    """Return the kernel of `ElementsArguments`: GatherElements and ScatterElements.

    Args:
        dtype: Dtype of the elements (an unsigned one of the same size if they are only copied).
        index: Dtype of the indices, int32 or int64.
        scatter: Whether updates are scattered into the data; else elements are gathered from it.
        reduction: ``none add mul max min``, when scattering.
    """
    arguments = view_of(ElementsArguments)
    load, store = _access(dtype)
    load_index, index_bytes = ld(index), item_bytes(index)
    combine = _combiner(reduction)
    item = item_bytes(dtype)

    @register_jitable
    def one_row(a: ElementsArguments, row: int) -> None:
        size, along, length, last = a.size, a.along, a.row_size, a.row_step
        count = a.outer
        slot, number = ld_i64(a.report), ld_i64(a.report + 8)
        data, rest = a.data, row
        for d in range(count - 1, -1, -1):
            extent = ld_i64(a.dims + 16 * d)
            data += rest % extent * ld_i64(a.dims + 16 * d + 8)
            rest //= extent
        indices = a.indices + row * length * index_bytes
        y = a.y + row * length * item
        for j in range(length):
            index = load_index(indices + j * index_bytes)
            at = data + checked(index, size, slot, number) * along + j * last
            # Indices may repeat, and ONNX applies a reduction to all of them: one thread applies
            # the updates in order, without atomic operations.
            if scatter:
                store(at, combine(load(at), load(y + j * item)))
            else:
                store(y + j * item, load(at))

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        a = arguments(args)
        if scatter:
            rows = 1
            for d in range(a.outer):
                rows *= ld_i64(a.dims + 16 * d)
            for row in range(rows):
                one_row(a, row)
        else:
            for row in range(begin, end):
                one_row(a, row)

    return kernel


def nd(*, dtype: str, scatter: bool, reduction: str, lanes: int = 1) -> Function:
    """Return the kernel of `TuplesArguments`: GatherND and ScatterND.

    Args:
        dtype: Dtype of the elements (an unsigned one of the same size if they are only copied).
        scatter: Whether slices are scattered into the data; else they are gathered from it.
        reduction: ``none add mul max min``, when scattering.
        lanes: Elements of a slice that are combined at a time; 1 unless the reduction is ``add`` or
            ``mul`` of floats.
    """
    arguments = view_of(TuplesArguments)
    load, store = _access(dtype)
    v = vec(dtype, lanes) if lanes > 1 else None
    load_vector, store_vector = (v.load, v.store) if v is not None else (load, store)
    load_index = ld("int64")
    combine = _combiner(reduction)
    item = item_bytes(dtype)
    computes = reduction not in ("", "none")

    @register_jitable
    def one(a: TuplesArguments, number: int) -> None:
        depth, inner = a.depth, a.inner
        data = a.data + number // a.batch_tuples * a.batch_step
        indices = a.indices + number * depth * 8
        slot, report = ld_i64(a.report), ld_i64(a.report + 8)
        for d in range(depth):
            at = checked(load_index(indices + 8 * d), ld_i64(a.dims + 16 * d), slot, report)
            data += at * ld_i64(a.dims + 16 * d + 8)
        y = a.y + number * inner * item
        if computes:
            whole = inner // lanes * lanes * item
            for i in range(0, whole, lanes * item):
                store_vector(data + i, combine(load_vector(data + i), load_vector(y + i)))
            for i in range(whole, inner * item, item):
                store(data + i, combine(load(data + i), load(y + i)))
        elif scatter:
            memcpy(data, y, inner * item)
        else:
            memcpy(y, data, inner * item)

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        a = arguments(args)
        if scatter:
            for number in range(a.tuples):
                one(a, number)
        else:
            for number in range(begin, end):
                one(a, number)

    return kernel


def one_hot(*, item: int) -> Function:
    """Return the kernel of `OneHotArguments`.

    Args:
        item: Bytes of an element.
    """
    arguments = view_of(OneHotArguments)
    load, store = ld(WORDS[item]), st(WORDS[item])
    load_index = ld("int64")

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        a = arguments(args)
        off, on = load(a.values), load(a.values + item)
        depth, inner = a.depth, a.inner
        for unit in range(begin, end):
            y = a.y + unit * depth * inner * item
            # All elements are set first, since an index may lie outside the depth and then sets
            # none.
            for i in range(depth * inner):
                store(y + i * item, off)
            for i in range(inner):
                index = load_index(a.indices + 8 * (unit * inner + i))
                if index < 0 and a.wraps:
                    index += depth
                if 0 <= index < depth:
                    store(y + (index * inner + i) * item, on)

    return kernel


def tensor_scatter(*, circular: bool, indexed: bool) -> Function:
    """Return the kernel of `TensorScatterArguments`: it copies rows into a longer cache.

    Args:
        circular: Whether positions beyond the end wrap around; else their rows are left out.
        indexed: Whether each sample has a position of its first row; else that is 0.
    """
    arguments = view_of(TensorScatterArguments)
    first_of = ld("int64")

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        a = arguments(args)
        groups, places, count, row = a.groups, a.positions, a.count, a.row_bytes
        for unit in range(begin, end):
            first = first_of(a.firsts + unit // groups * 8) if indexed else 0
            for k in range(count):
                to = first + k
                if circular:
                    # The remainder is never negative here, as in Python.
                    to %= places
                if to >= 0 and to < places:
                    target = a.cache + (unit * places + to) * row
                    memcpy(target, a.update + (unit * count + k) * row, row)

    return kernel
