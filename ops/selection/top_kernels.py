"""The kernels of TopK: keys are integers that order as the elements do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba.extending import register_jitable

from subgraph.engine.codegen.simd import bits_f32, ld, memcpy, st, vec
from subgraph.graph.types import numpy_dtype
from subgraph.ops.movement.kernels import arg

Function = Callable[..., Any]


def keys(*, dtype: str, lanes: int, largest: bool) -> Function:
    """Return the kernel of TopK of up to 32 bits: sorted, of equals the lower index first.

    The upper half of a key is an integer that orders as the elements do (NaN is larger than all),
    the lower one grows as the index falls. The best keys so far form a heap, the worst on top;
    elements one after the other are compared with it by vectors. Keys are sorted by merging.

    Words: ``0 x, 1 values, 2 indices, 3 size of the axis, 4 elements inside it, 5 k, 6 scratch of
    two int64 for each of k, 7 bytes of it for each worker``. Units: elements outside the axis.
    """
    load, store, put_place = ld(dtype), st(dtype), st("int64")
    get, put = ld("int64"), st("int64")
    item, real = numpy_dtype(dtype).itemsize, dtype.startswith("float")
    shift = 1 << 31 if dtype == "uint32" else 0
    v = vec(dtype, lanes)
    fetch, splat, some = v.load, v.splat, v.any

    @register_jitable
    def order(x: Any) -> int:
        """Return an integer of 32 bits: the larger, the earlier an element comes."""
        if real:
            number = 0x7FFFFFFF
            if x == x:
                bits = int(bits_f32(x + type(x)(0)))  # both zeros are one
                number = bits ^ 0x7FFFFFFF if bits < 0 else bits
        else:
            number = int(x) - shift
        return number if largest else -1 - number

    @register_jitable
    def key_of(x: int, step: int, index: int) -> int:
        return (order(load(x + index * step)) << 32) | (0xFFFFFFFF - index)

    @register_jitable
    def index_of(key: int) -> int:
        return 0xFFFFFFFF - (key & 0xFFFFFFFF)

    @register_jitable
    def sink(heap: int, at: int, count: int, moving: int) -> None:
        """Put a key where ``at`` is or below, so that none stands over a smaller one."""
        while True:
            child = 2 * at + 1
            if child >= count:
                break
            key = get(heap + 8 * child)
            if child + 1 < count and get(heap + 8 * child + 8) < key:
                child += 1
                key = get(heap + 8 * child)
            if key >= moving:
                break
            put(heap + 8 * at, key)
            at = child
        put(heap + 8 * at, moving)

    @register_jitable
    def try_one(x: int, step: int, index: int, heap: int, k: int) -> bool:
        key = key_of(x, step, index)
        if key <= get(heap):
            return False
        sink(heap, 0, k, key)
        return True

    @register_jitable
    def select(x: int, step: int, size: int, heap: int, k: int) -> None:
        """Bring the best keys into the heap."""
        for i in range(k):
            put(heap + 8 * i, key_of(x, step, i))
        if k == size:
            return
        for i in range(k // 2 - 1, -1, -1):
            sink(heap, i, k, get(heap + 8 * i))
        i = k
        if step == item:
            worst = splat(load(x + index_of(get(heap)) * item))
            while i + lanes <= size:
                value = fetch(x + i * item)
                # What is no number is looked at, too.
                behind = value <= worst if largest else value >= worst
                if some(~behind):
                    found = False
                    for j in range(i, i + lanes):
                        found |= try_one(x, step, j, heap, k)
                    if found:
                        worst = splat(load(x + index_of(get(heap)) * item))
                i += lanes
        for j in range(i, size):
            try_one(x, step, j, heap, k)

    @register_jitable
    def merge(source: int, target: int, low: int, mid: int, high: int) -> None:
        a, b, to = source + 8 * low, source + 8 * mid, target + 8 * low
        a_end, b_end = b, source + 8 * high
        while a < a_end and b < b_end:
            p, q = get(a), get(b)
            first = p > q
            put(to, p if first else q)
            a += 8 if first else 0
            b += 0 if first else 8
            to += 8
        memcpy(to, a, a_end - a)
        memcpy(to + (a_end - a), b, b_end - b)

    @register_jitable
    def by_insertion(table: int, low: int, high: int) -> None:
        for i in range(low + 1, high):
            key = get(table + 8 * i)
            at = i
            while at > low and get(table + 8 * at - 8) < key:
                put(table + 8 * at, get(table + 8 * at - 8))
                at -= 1
            put(table + 8 * at, key)

    @register_jitable
    def sort(table: int, k: int) -> int:
        """Sort keys, the largest first; return where they are then."""
        spare = table + 8 * k
        for low in range(0, k, 8):
            by_insertion(table, low, min(low + 8, k))
        width = 8
        while width < k:
            for low in range(0, k, 2 * width):
                merge(table, spare, low, min(low + width, k), min(low + 2 * width, k))
            table, spare = spare, table
            width *= 2
        return table

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        size, inner, k = arg(args, 3), arg(args, 4), arg(args, 5)
        heap = arg(args, 6) + worker * arg(args, 7)
        step = inner * item
        for unit in range(begin, end):
            x = arg(args, 0) + (unit // inner * size * inner + unit % inner) * item
            select(x, step, size, heap, k)
            table = sort(heap, k)
            at = unit // inner * k * inner + unit % inner
            for i in range(k):
                place = index_of(get(table + 8 * i))
                store(arg(args, 1) + (at + i * inner) * item, load(x + place * step))
                put_place(arg(args, 2) + (at + i * inner) * 8, place)

    return kernel


def wide_keys(*, dtype: str, largest: bool) -> Function:
    """Return the kernel of TopK of 64 bits, or along axes of more elements than 32 bits count.

    An entry is a key and the place of its element. As in ``keys`` the best so far form a heap, and
    are sorted by merging.

    Words: as ``keys``; the scratch has four int64 for each of k.
    """
    item, real = numpy_dtype(dtype).itemsize, dtype.startswith("float")
    word = f"int{8 * item}"
    bits = ld(word if real or item == 8 else dtype)
    load, store, get, put = ld(word), st(word), ld("int64"), st("int64")
    least, most = -(1 << (8 * item - 1)), (1 << (8 * item - 1)) - 1
    infinite = {4: 0x7F800000, 8: 0x7FF0000000000000}.get(item, 0)
    unsigned = dtype == "uint64"

    @register_jitable
    def key_of(x: int) -> int:
        """Return an integer: the larger, the earlier an element comes."""
        number: Any = np.int64(bits(x))
        if real:
            if number < 0:
                number = -(number ^ least)  # both zeros are one
            if number > infinite or number < -infinite:
                number = np.int64(most)  # what is no number is larger than all
        elif unsigned:
            number ^= least
        key: int = number if largest else ~number
        return key

    @register_jitable
    def put_entry(entry: int, key: int, place: int) -> None:
        put(entry, key)
        put(entry + 8, place)

    @register_jitable
    def before(key: int, place: int, entry: int) -> bool:
        """Whether a key and its place come before an entry."""
        other = get(entry)
        ahead: bool = (key > other) | ((key == other) & (place < get(entry + 8)))
        return ahead

    @register_jitable
    def sink(heap: int, at: int, count: int, key: int, place: int) -> None:
        """Put an entry where ``at`` is or below, so that none stands over one after it."""
        while True:
            child = 2 * at + 1
            if child >= count:
                break
            below = heap + 16 * child
            if child + 1 < count and before(get(below), get(below + 8), below + 16):
                child += 1
                below += 16
            if not before(key, place, below):
                break
            put_entry(heap + 16 * at, get(below), get(below + 8))
            at = child
        put_entry(heap + 16 * at, key, place)

    @register_jitable
    def select(x: int, step: int, size: int, heap: int, k: int) -> None:
        """Bring the best entries into the heap."""
        for i in range(k):
            put_entry(heap + 16 * i, key_of(x + i * step), i)
        if k == size:
            return
        for i in range(k // 2 - 1, -1, -1):
            sink(heap, i, k, get(heap + 16 * i), get(heap + 16 * i + 8))
        worst = get(heap)
        for i in range(k, size):
            key = key_of(x + i * step)
            if key > worst:  # of equals the earlier one is there
                sink(heap, 0, k, key, i)
                worst = get(heap)

    @register_jitable
    def by_insertion(table: int, low: int, high: int) -> None:
        for i in range(low + 1, high):
            key, place = get(table + 16 * i), get(table + 16 * i + 8)
            at = table + 16 * i
            while at > table + 16 * low and before(key, place, at - 16):
                put_entry(at, get(at - 16), get(at - 8))
                at -= 16
            put_entry(at, key, place)

    @register_jitable
    def merge(source: int, target: int, low: int, mid: int, high: int) -> None:
        a, b, to = source + 16 * low, source + 16 * mid, target + 16 * low
        a_end, b_end = b, source + 16 * high
        while a < a_end and b < b_end:
            first = before(get(a), get(a + 8), b)
            put_entry(to, get(a if first else b), get((a if first else b) + 8))
            a += 16 if first else 0
            b += 0 if first else 16
            to += 16
        memcpy(to, a, a_end - a)
        memcpy(to + (a_end - a), b, b_end - b)

    @register_jitable
    def sort(table: int, k: int) -> int:
        """Sort entries, the first in order first; return where they are then."""
        spare = table + 16 * k
        for low in range(0, k, 8):
            by_insertion(table, low, min(low + 8, k))
        width = 8
        while width < k:
            for low in range(0, k, 2 * width):
                merge(table, spare, low, min(low + width, k), min(low + 2 * width, k))
            table, spare = spare, table
            width *= 2
        return table

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        size, inner, k = arg(args, 3), arg(args, 4), arg(args, 5)
        heap = arg(args, 6) + worker * arg(args, 7)
        step = inner * item
        for unit in range(begin, end):
            x = arg(args, 0) + (unit // inner * size * inner + unit % inner) * item
            select(x, step, size, heap, k)
            table = sort(heap, k)
            at = unit // inner * k * inner + unit % inner
            for i in range(k):
                place = get(table + 16 * i + 8)
                store(arg(args, 1) + (at + i * inner) * item, load(x + place * step))
                put(arg(args, 2) + (at + i * inner) * 8, place)

    return kernel
