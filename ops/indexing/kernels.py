"""Kernels that take and put elements by computed indices.

A negative index counts from the end. One beyond the axis is reported as an error (see
`subgraph.engine.program.reports`), and the nearest end of the axis is used, so that nothing outside
the tensors is ever read or written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba.extending import register_jitable

from subgraph.engine.codegen.simd import atomic_cas, ld, load_as, memcpy, st, st_i64, store_as, vec
from subgraph.ops.movement.kernels import WORDS, arg

Function = Callable[..., Any]


@register_jitable
def report_value(slot: int, number: int, value: int, least: int, most: int) -> None:
    """Write a value that is out of range to a run's report slot, unless one stands there.

    Args:
        slot: Address of the slot, see `subgraph.engine.program.reports`.
        number: Number of the report, at least 1.
        value: The value.
        least: The least value that is allowed.
        most: The greatest value that is allowed.
    """
    if atomic_cas(slot, 0, number) == 0:
        st_i64(slot + 8, value)
        st_i64(slot + 16, least)
        st_i64(slot + 24, most)


@register_jitable
def checked(index: int, size: int, slot: int, number: int) -> int:
    """Return an index as a position within ``size`` elements; report one that lies outside."""
    if 0 <= index < size:
        return index
    if -size <= index < 0:
        return index + size
    report_value(slot, number, index, -size, size - 1)
    return 0 if index < 0 else size - 1


def _index(dtype: str) -> tuple[Any, int]:
    return ld(dtype), 4 if dtype == "int32" else 8


def _combiner(reduction: str) -> Function:
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
        return old if old > new or old != old else new

    @register_jitable
    def smallest(old: Any, new: Any) -> Any:
        return old if old < new or old != old else new

    return {"add": add, "mul": multiply, "max": largest, "min": smallest}.get(reduction, put)


def _access(dtype: str) -> tuple[Function, Function]:
    """Return what loads and stores an element; halves are float32 in between."""
    if dtype not in ("float16", "bfloat16"):
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
    """Return the kernel of Gather: slices along an axis.

    Args:
        item: Bytes of an element.
        index: Dtype of the indices, int32 or int64.

    Words: ``0 data, 1 indices, 2 y, 3 size of the axis, 4 indices' number, 5 elements of a slice,
    6 slices of a unit, 7 report``. Units: sizes outside the axis * tiles of indices.
    """
    load, store = ld(WORDS[item]), st(WORDS[item])
    load_index, index_bytes = _index(index)

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        indices, size, count = arg(args, 1), arg(args, 3), arg(args, 4)
        inner, block = arg(args, 5), arg(args, 6)
        slot, number = arg(args, 7), arg(args, 8)
        tiles = (count + block - 1) // block
        step = inner * item
        for unit in range(begin, end):
            outer, first = unit // tiles, unit % tiles * block
            x = arg(args, 0) + outer * size * step
            y = arg(args, 2) + (outer * count + first) * step
            for j in range(first, min(count, first + block)):
                index = load_index(indices + j * index_bytes)
                source = x + checked(index, size, slot, number) * step
                if inner <= 8:
                    for i in range(0, step, item):
                        store(y + i, load(source + i))
                else:
                    memcpy(y, source, step)
                y += step

    return kernel


def elements(*, dtype: str, index: str, scatter: bool, reduction: str) -> Function:
    """Return the kernel of GatherElements and ScatterElements.

    Args:
        dtype: Dtype of the elements (an unsigned one of their size where nothing is computed).
        index: Dtype of the indices.
        scatter: Whether elements go from y's shape into the data.
        reduction: ``none add mul max min``, when scattering.

    Words::

        0 data  1 indices  2 y (updates)  3 size of the axis  4 bytes along it in the data
        5 row: size of the last dimension  6 bytes along it in the data (0: it is the axis)
        7 outer dimensions, then (size, bytes in data) of each (0 for the axis); report

    Units: rows of the indices; one alone when elements are scattered.
    """
    load, store = _access(dtype)
    load_index, index_bytes = _index(index)
    combine = _combiner(reduction)
    item = {"8": 1, "16": 2, "32": 4, "64": 8}[dtype.lstrip("buintfloa")]

    @register_jitable
    def one_row(args: int, row: int) -> None:
        size, along, length, last = arg(args, 3), arg(args, 4), arg(args, 5), arg(args, 6)
        count = arg(args, 7)
        slot, number = arg(args, 8 + 2 * count), arg(args, 9 + 2 * count)
        data, rest = arg(args, 0), row
        for d in range(count - 1, -1, -1):
            extent = arg(args, 8 + 2 * d)
            data += rest % extent * arg(args, 9 + 2 * d)
            rest //= extent
        indices = arg(args, 1) + row * length * index_bytes
        y = arg(args, 2) + row * length * item
        if scatter:
            for j in range(length):
                index = load_index(indices + j * index_bytes)
                at = data + checked(index, size, slot, number) * along + j * last
                store(at, combine(load(at), load(y + j * item)))
            return
        first = length // 4 * 4
        for begin in range(0, first, 4):
            for k in range(4):  # unrolled
                j = begin + k
                index = load_index(indices + j * index_bytes)
                at = data + checked(index, size, slot, number) * along + j * last
                store(y + j * item, load(at))
        for j in range(first, length):
            index = load_index(indices + j * index_bytes)
            at = data + checked(index, size, slot, number) * along + j * last
            store(y + j * item, load(at))

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        if scatter:
            rows = 1
            for d in range(arg(args, 7)):
                rows *= arg(args, 8 + 2 * d)
            for row in range(rows):
                one_row(args, row)
        else:
            for row in range(begin, end):
                one_row(args, row)

    return kernel


def nd(*, dtype: str, scatter: bool, reduction: str) -> Function:
    """Return the kernel of GatherND and ScatterND; arguments as of `elements`, indices int64.

    Words::

        0 data  1 indices  2 y (updates)  3 index tuples  4 elements of a slice
        5 tuples of a batch  6 bytes of a batch in the data
        7 length of a tuple, then (size, bytes in data) for each of its indices; report

    Units: tuples; one alone when slices are scattered.
    """
    load, store = _access(dtype)
    load_index, _ = _index("int64")
    combine = _combiner(reduction)
    item = {"8": 1, "16": 2, "32": 4, "64": 8}[dtype.lstrip("buintfloa")]
    computes = reduction not in ("", "none")

    @register_jitable
    def one(args: int, number: int) -> None:
        depth, inner = arg(args, 7), arg(args, 4)
        data = arg(args, 0) + number // arg(args, 5) * arg(args, 6)
        indices = arg(args, 1) + number * depth * 8
        slot, report = arg(args, 8 + 2 * depth), arg(args, 9 + 2 * depth)
        for d in range(depth):
            at = checked(load_index(indices + 8 * d), arg(args, 8 + 2 * d), slot, report)
            data += at * arg(args, 9 + 2 * d)
        y = arg(args, 2) + number * inner * item
        if computes:
            for i in range(0, inner * item, item):
                store(data + i, combine(load(data + i), load(y + i)))
        elif scatter:
            memcpy(data, y, inner * item)
        else:
            memcpy(y, data, inner * item)

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        if scatter:
            for number in range(arg(args, 3)):
                one(args, number)
        else:
            for number in range(begin, end):
                one(args, number)

    return kernel


def in_range(*, dtype: str) -> Function:
    """Return the kernel that reports values out of range.

    Args:
        dtype: Dtype of the values: int32, int64, float32 or float64. A number of floats counts by
            its whole part, rounded down; NaN is out of range.

    Words: ``0 values, 1 how many, 2 elements from one to the next, 3 least, 4 greatest value
    allowed, 5 a value that is allowed besides, 6 report``. Units: 1.
    """
    load, item = ld(dtype), 8 if dtype.endswith("64") else 4

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        least, most = arg(args, 3), arg(args, 4)
        for k in range(arg(args, 1)):
            value = load(arg(args, 0) + k * arg(args, 2) * item)
            if not (value >= least and value < most + 1) and value != arg(args, 5):
                report_value(arg(args, 6), arg(args, 7), int(value), least, most)

    return kernel


def one_hot(*, item: int) -> Function:
    """Return the kernel of OneHot.

    Words: ``0 indices (int64), 1 values (off, on), 2 y, 3 depth, 4 indices inside the new axis,
    5 whether negative indices count from the end``.
    Units: indices outside the new axis.
    """
    load, store = ld(WORDS[item]), st(WORDS[item])
    load_index, _ = _index("int64")

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        off, on = load(arg(args, 1)), load(arg(args, 1) + item)
        depth, inner = arg(args, 3), arg(args, 4)
        for unit in range(begin, end):
            y = arg(args, 2) + unit * depth * inner * item
            for i in range(depth * inner):
                store(y + i * item, off)
            for i in range(inner):
                index = load_index(arg(args, 0) + 8 * (unit * inner + i))
                if index < 0 and arg(args, 5):
                    index += depth
                if 0 <= index < depth:
                    store(y + (index * inner + i) * item, on)

    return kernel


def into_cache(*, circular: bool, indexed: bool) -> Function:
    """Return the kernel of TensorScatter: rows of an update go into a cache that is longer.

    Args:
        circular: Whether places beyond the end begin anew; else rows that lie there are left out.
        indexed: Whether each sample says where its rows begin; else at the first place.

    Words: ``0 cache [samples, groups, places, row], 1 update [samples, groups, count, row],
    2 first places (int64, one a sample), 3 groups, 4 places, 5 count, 6 bytes of a row``.
    Units: samples * groups.
    """
    first_of = ld("int64")

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        groups, places, count, row = arg(args, 3), arg(args, 4), arg(args, 5), arg(args, 6)
        for unit in range(begin, end):
            first = first_of(arg(args, 2) + unit // groups * 8) if indexed else 0
            for k in range(count):
                to = first + k
                if circular:
                    to %= places
                if to >= 0 and to < places:
                    target = arg(args, 0) + (unit * places + to) * row
                    memcpy(target, arg(args, 1) + (unit * count + k) * row, row)

    return kernel
