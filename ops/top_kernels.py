"""The kernel of TopK over numbers of up to 32 bits: one key orders an element and its place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba.extending import register_jitable

from subgraph.engine.simd import bits_f32, ld, memcpy, st, vec
from subgraph.types import numpy_dtype

from .movement_kernels import arg

Function = Callable[..., Any]


def keys(*, dtype: str, lanes: int, largest: bool) -> Function:
    """Return the kernel of TopK: sorted, of equals the one with the lower index first.

    The upper half of a key is an integer that orders as the elements do (NaN is larger than all),
    the lower one grows as the index falls. The best keys so far form a heap, the worst on top;
    elements one after the other are compared with it by vectors. Keys are sorted by merging.

    Words: as ``indexing_kernels.top``; the scratch has two int64 for each of k.
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
