"""Kernels of TopK: elements are compared by integer keys of the same order.

The best entries so far form a heap with the worst on top, and are sorted at the end. An entry is
one or two int64: a key, and the index of its element unless the key contains it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba.extending import register_jitable

from subgraph.engine.codegen.argument_views import view_of
from subgraph.engine.codegen.simd import bits_f32, ld, ld_i64, memcpy, st, st_i64, vec
from subgraph.graph.types import numpy_dtype

from .arguments import TopKArguments

Function = Callable[..., Any]
# Entries of a run that insertion sort sorts, before runs are merged: a cache line of keys, an
# estimate. Merging costs a pass over memory for each doubling.
_RUN = 8


def keys(*, dtype: str, lanes: int, largest: bool) -> Function:
    """Return the kernel of `TopKArguments` for elements of up to 32 bits.

    The upper half of a key is an integer that orders as the elements do (NaN is larger than all);
    the lower half is larger for lower indices, so that of equal elements the lower index comes
    first.

    Args:
        dtype: Dtype of the elements.
        lanes: Elements of a vector.
        largest: Whether to select the largest elements; else the smallest.
    """
    load = ld(dtype)
    order = _order_of_32_bits(dtype, largest)
    sink, sort = _sinker(1), _sorter(1)

    @register_jitable
    def key_of(x: int, step: int, index: int) -> int:
        # One comparison of integers orders elements and, for equal ones, their indices.
        key: int = (order(load(x + index * step)) << 32) | (0xFFFFFFFF - index)
        return key

    @register_jitable
    def index_of(entry: int) -> int:
        index: int = 0xFFFFFFFF - (ld_i64(entry) & 0xFFFFFFFF)
        return index

    @register_jitable
    def try_one(x: int, step: int, index: int, heap: int, k: int) -> bool:
        """Replace the worst entry of the heap by an element if that is better."""
        key = key_of(x, step, index)
        # The root is the worst of the k best entries found so far.
        if key <= ld_i64(heap):
            return False
        sink(heap, 0, k, key, 0)
        return True

    scan = _vector_scan(dtype, lanes, largest, try_one, index_of)

    @register_jitable
    def select(x: int, step: int, size: int, heap: int, k: int) -> None:
        """Fill the heap with the best keys of a line."""
        for i in range(k):
            st_i64(heap + 8 * i, key_of(x, step, i))
        if k == size:
            return
        for i in range(k // 2 - 1, -1, -1):
            sink(heap, i, k, ld_i64(heap + 8 * i), 0)
        for j in range(scan(x, step, size, heap, k), size):
            try_one(x, step, j, heap, k)

    return _kernel(dtype, select, sort, index_of, 8)


def wide_keys(*, dtype: str, largest: bool) -> Function:
    """Return the kernel of `TopKArguments` for any elements, and axes of 2**32 elements and more.

    Args:
        dtype: Dtype of the elements.
        largest: Whether to select the largest elements; else the smallest.
    """
    key_of = _key_of_64_bits(dtype, largest)
    sink, sort = _sinker(2), _sorter(2)

    @register_jitable
    def index_of(entry: int) -> int:
        index: int = ld_i64(entry + 8)
        return index

    @register_jitable
    def select(x: int, step: int, size: int, heap: int, k: int) -> None:
        """Fill the heap with the best entries of a line."""
        for i in range(k):
            st_i64(heap + 16 * i, key_of(x + i * step))
            st_i64(heap + 16 * i + 8, i)
        if k == size:
            return
        for i in range(k // 2 - 1, -1, -1):
            sink(heap, i, k, ld_i64(heap + 16 * i), ld_i64(heap + 16 * i + 8))
        worst = ld_i64(heap)
        for i in range(k, size):
            key = key_of(x + i * step)
            if key > worst:  # of equal elements the earlier one is in the heap
                sink(heap, 0, k, key, i)
                worst = ld_i64(heap)

    return _kernel(f"int{8 * numpy_dtype(dtype).itemsize}", select, sort, index_of, 16)


def _kernel(
    dtype: str, select: Function, sort: Function, index_of: Function, entry: int
) -> Function:
    """Return the kernel over all lines.

    Args:
        dtype: Dtype as which the elements are copied.
        select: ``f(x, step, size, heap, k)`` that fills the heap from a line.
        sort: ``f(heap, k)`` that returns the address of the sorted entries.
        index_of: ``f(entry)`` that returns the index of an entry's element.
        entry: Bytes of an entry.
    """
    arguments = view_of(TopKArguments)
    load, store, item = ld(dtype), st(dtype), numpy_dtype(dtype).itemsize

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        a = arguments(args)
        size, inner, k = a.size, a.inner, a.k
        heap = a.scratch + worker * a.scratch_bytes
        step = inner * item
        for unit in range(begin, end):
            x = a.x + (unit // inner * size * inner + unit % inner) * item
            select(x, step, size, heap, k)
            table = sort(heap, k)
            at = unit // inner * k * inner + unit % inner
            for i in range(k):
                index = index_of(table + entry * i)
                store(a.values + (at + i * inner) * item, load(x + index * step))
                st_i64(a.indices + (at + i * inner) * 8, index)

    return kernel


def _order_of_32_bits(dtype: str, largest: bool) -> Function:
    """Return ``f(element)``: a 32-bit integer that is larger for elements that come earlier."""
    real = dtype.startswith("float")
    shift = 1 << 31 if dtype == "uint32" else 0

    @register_jitable
    def order(x: Any) -> int:
        if real:
            number = 0x7FFFFFFF
            if x == x:
                # The bits of negative floats order in reverse as integers; flipping all but the
                # sign corrects that.
                bits = int(bits_f32(x + type(x)(0)))  # -0 becomes 0
                number = bits ^ 0x7FFFFFFF if bits < 0 else bits
        else:
            number = int(x) - shift
        return number if largest else -1 - number

    return order


def _key_of_64_bits(dtype: str, largest: bool) -> Function:
    """Return ``f(address)``: an int64 that is larger for elements that come earlier."""
    item, real = numpy_dtype(dtype).itemsize, dtype.startswith("float")
    bits = ld(f"int{8 * item}" if real or item == 8 else dtype)
    least, most = -(1 << (8 * item - 1)), (1 << (8 * item - 1)) - 1
    infinite = {4: 0x7F800000, 8: 0x7FF0000000000000}.get(item, 0)
    unsigned = dtype == "uint64"

    @register_jitable
    def key_of(x: int) -> int:
        number: Any = np.int64(bits(x))
        if real:
            if number < 0:
                # Negative floats are a sign and a magnitude; as a negated magnitude they order as
                # the floats do.
                number = -(number ^ least)  # -0 becomes 0
            if number > infinite or number < -infinite:
                number = np.int64(most)  # NaN is larger than all
        elif unsigned:
            # Flipping the highest bit makes the signed order that of the unsigned elements.
            number ^= least
        key: int = number if largest else ~number
        return key

    return key_of


def _vector_scan(
    dtype: str, lanes: int, largest: bool, try_one: Function, index_of: Function
) -> Function:
    """Return ``f(x, step, size, heap, k)``: it tries whole vectors of adjacent elements.

    The elements of a vector are tried one by one only if one of them may be better than the worst
    of the heap. The function returns the index of the first element that it has not tried.
    """
    v = vec(dtype, lanes)
    load, fetch, splat, some, item = ld(dtype), v.load, v.splat, v.any, v.itemsize

    @register_jitable
    def scan(x: int, step: int, size: int, heap: int, k: int) -> int:
        i = k
        if step == item:
            worst = splat(load(x + index_of(heap) * item))
            while i + lanes <= size:
                value = fetch(x + i * item)
                # An equal element has a higher index than the worst one of the heap and loses to
                # it.
                behind = value <= worst if largest else value >= worst
                if some(~behind):  # NaN is not behind
                    found = False
                    for j in range(i, i + lanes):
                        found |= try_one(x, step, j, heap, k)
                    if found:
                        worst = splat(load(x + index_of(heap) * item))
                i += lanes
        return i

    return scan


def _entries(words: int) -> tuple[Function, Function, Function]:
    """Return ``index_at(at)``, ``write(at, key, index)`` and ``before(key, index, at)``.

    They read and write the entry at address ``at``: ``words`` int64, a key, and an index if 2. The
    index of an entry of one word is 0.
    """

    @register_jitable
    def index_at(at: int) -> int:
        index: int = ld_i64(at + 8) if words == 2 else 0
        return index

    @register_jitable
    def write(at: int, key: int, index: int) -> None:
        st_i64(at, key)
        if words == 2:
            st_i64(at + 8, index)

    @register_jitable
    def before(key: int, index: int, at: int) -> bool:
        """Return whether a key and its index come before an entry."""
        other = ld_i64(at)
        ahead: bool = key > other
        if words == 2:
            ahead |= (key == other) & (index < ld_i64(at + 8))
        return ahead

    return index_at, write, before


def _sinker(words: int) -> Function:
    """Return ``sink(heap, at, count, key, index)``, which inserts an entry at ``at`` or below.

    Every entry of the heap is worse than its children; ``words`` is that of `_entries`.
    """
    entry = 8 * words
    index_at, write, before = _entries(words)

    @register_jitable
    def sink(heap: int, at: int, count: int, key: int, index: int) -> None:
        while True:
            child = 2 * at + 1
            if child >= count:
                break
            below = heap + entry * child
            if child + 1 < count and before(ld_i64(below), index_at(below), below + entry):
                child += 1
                below += entry
            if not before(key, index, below):
                break
            write(heap + entry * at, ld_i64(below), index_at(below))
            at = child
        write(heap + entry * at, key, index)

    return sink


def _sorter(words: int) -> Function:
    """Return ``sort(table, k)``: entries by descending key, equal ones by ascending index.

    Short runs are sorted by insertion and then merged. The function returns the address of the
    sorted entries: the table's, or that of the memory for ``k`` entries behind it.
    """
    entry = 8 * words
    by_insertion, merge = _run_sorters(words)

    @register_jitable
    def sort(table: int, k: int) -> int:
        spare = table + entry * k
        for low in range(0, k, _RUN):
            by_insertion(table, low, min(low + _RUN, k))
        width = _RUN
        while width < k:
            for low in range(0, k, 2 * width):
                merge(table, spare, low, min(low + width, k), min(low + 2 * width, k))
            table, spare = spare, table
            width *= 2
        return table

    return sort


def _run_sorters(words: int) -> tuple[Function, Function]:
    """Return two functions over entries of a table, whose numbers are counted from its begin.

    ``by_insertion(table, low, high)`` sorts entries ``low`` to ``high``; ``merge(source, target,
    low, mid, high)`` merges the sorted runs ``low`` to ``mid`` and ``mid`` to ``high``.
    """
    entry = 8 * words
    index_at, write, before = _entries(words)

    @register_jitable
    def by_insertion(table: int, low: int, high: int) -> None:
        for i in range(low + 1, high):
            at = table + entry * i
            key, index = ld_i64(at), index_at(at)
            while at > table + entry * low and before(key, index, at - entry):
                write(at, ld_i64(at - entry), index_at(at - entry))
                at -= entry
            write(at, key, index)

    @register_jitable
    def merge(source: int, target: int, low: int, mid: int, high: int) -> None:
        a, b, to = source + entry * low, source + entry * mid, target + entry * low
        a_end, b_end = b, source + entry * high
        while a < a_end and b < b_end:
            first = before(ld_i64(a), index_at(a), b)
            chosen = a if first else b
            write(to, ld_i64(chosen), index_at(chosen))
            # Selections instead of a branch, which random keys would make unpredictable.
            a += entry if first else 0
            b += 0 if first else entry
            to += entry
        # One of both runs is used up, so one of these copies moves nothing.
        memcpy(to, a, a_end - a)
        memcpy(to + (a_end - a), b, b_end - b)

    return by_insertion, merge
