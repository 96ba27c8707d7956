"""Kernels of NonZero, Compress, Unique and NonMaxSuppression, whose output sizes depend on values.

They fill buffers of the largest possible size and write the number of valid elements; see
``ops/selection/padded.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba.extending import register_jitable

from subgraph.engine.codegen.argument_views import view_of
from subgraph.engine.codegen.simd import ld, ld_i64, memcpy, memset, st, st_i64, vec
from subgraph.graph.types import numpy_dtype
from subgraph.ops.movement.kernels import WORDS, row_copy

from .arguments import (
    CompressArguments,
    GatherPickedArguments,
    NonZeroArguments,
    SuppressArguments,
    UniqueArguments,
)

Function = Callable[..., Any]
_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 divided by the golden ratio (Knuth's multiplicative hash)


def non_zero(*, dtype: str, half: bool) -> Function:
    """Return the kernel of `NonZeroArguments`.

    Args:
        dtype: Dtype of the elements; uint16 for 16-bit floats.
        half: Whether the elements are 16-bit floats: their sign bit is ignored, as -0 is zero.
    """
    arguments = view_of(NonZeroArguments)
    load, get, store = ld(dtype), ld("int64"), st("int64")
    item = numpy_dtype(dtype).itemsize

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        a = arguments(args)
        x, places, size, rank = a.x, a.indices, a.size, a.rank
        count = 0
        for i in range(size):
            value = load(x + i * item)
            # Only the sign bit of -0 is set, and -0 is not counted as nonzero.
            if half:
                value &= 0x7FFF
            if value != 0:
                rest = i
                for d in range(rank - 1, -1, -1):
                    extent = get(a.dims + 8 * d)
                    store(places + 8 * (d * size + count), rest % extent)
                    rest //= extent
                count += 1
        store(a.count, count)

    return kernel


def compress(*, item: int) -> Function:
    """Return the kernel of `CompressArguments`.

    Args:
        item: Bytes of an element, at most 8.
    """
    arguments = view_of(CompressArguments)
    load, get, store = ld("uint8"), ld("int64"), st("int64")
    take, put, copy = ld(WORDS[item]), st(WORDS[item]), row_copy(item)

    @register_jitable
    def find(conditions: int, sought: int, places: int) -> int:
        """Write the indices of the true conditions; return how many there are.

        Each index is written, and overwritten by the next unless its condition is true: no
        branches.
        """
        count = 0
        for i in range(sought):
            store(places + 8 * count, i)
            count += int(load(conditions + i) != 0)
        return count

    @register_jitable
    def keep_elements(x: int, conditions: int, sought: int, y: int) -> int:
        """Copy the elements with a true condition, without branches as in ``find``."""
        count = 0
        for i in range(sought):
            put(y + count * item, take(x + i * item))
            count += int(load(conditions + i) != 0)
        return count

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        a = arguments(args)
        conditions, size, step, room = a.conditions, a.size, a.slice_bytes, a.room
        x, y, places = a.x, a.y, a.scratch
        sought, count, outside = min(size, a.sought), 0, a.outer
        if step != item or outside == 0:
            count = find(conditions, sought, places)
        for outer in range(outside):
            source, target = x + outer * size * step, y + outer * room * step
            if step == item:
                count = keep_elements(source, conditions, sought, target)
            else:
                for i in range(count):
                    copy(target + i * step, source + get(places + 8 * i) * step, step)
        store(a.count, count)

    return kernel


def unique(*, dtype: str, in_order: bool) -> Function:
    """Return the kernel of `UniqueArguments`: equal rows are grouped by a hash table, then sorted.

    The table grows with the number of distinct rows, so that it stays in the L1 cache for few of
    them.

    Args:
        dtype: Dtype of the elements; NaN equals NaN and comes last.
        in_order: Whether the result is sorted; else it has the order of first appearance.
    """
    arguments = view_of(UniqueArguments)
    group, sort = _grouper(dtype), _group_sorter(dtype)

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        a = arguments(args)
        groups = group(a)
        if in_order:
            sort(a, groups)
        st_i64(a.count, groups)

    return kernel


def _row_hash(dtype: str) -> Function:
    """Return ``f(row, length, bits)``: the index of a row in a hash table of 2**bits entries."""
    load, item = ld(dtype), numpy_dtype(dtype).itemsize
    load_bits = ld(WORDS[item])

    @register_jitable
    def place_of(row: int, length: int, bits: int) -> Any:
        """Equal rows have equal indices: -0 hashes as 0, and all NaN hash alike."""
        found = np.uint64(0)
        for i in range(0, length * item, item):
            value, number = load(row + i), np.uint64(load_bits(row + i))
            # The comparison of rows takes 0 and -0, or two NaN, as equal; their hashes must be
            # equal as well.
            if value == 0:
                number = np.uint64(0)
            if value != value:
                number = np.uint64(1)
            found = (found ^ number) * np.uint64(_GOLDEN)
        return np.int64(found >> np.uint64(64 - bits))

    return place_of


def _grouper(dtype: str) -> Function:
    """Return ``f(arguments)``: it numbers distinct rows as they appear, and returns how many."""
    load, get, put = ld(dtype), ld_i64, st_i64
    item, place_of = numpy_dtype(dtype).itemsize, _row_hash(dtype)

    @register_jitable
    def same(x: int, y: int, length: int) -> bool:
        """Return whether two rows, given by their addresses, are equal; NaN equals NaN."""
        for i in range(0, length * item, item):
            p, q = load(x + i), load(y + i)
            if p != q and (p == p or q == q):
                return False
        return True

    @register_jitable
    def refill(y: int, length: int, groups: int, table: int, bits: int) -> None:
        """Insert the groups into an empty table of 2**bits entries."""
        memset(table, np.int8(-1), 8 << bits)
        for k in range(groups):
            at = place_of(y + k * length * item, length, bits)
            while get(table + 8 * at) >= 0:
                at = (at + 1) & ((1 << bits) - 1)
            put(table + 8 * at, k)

    @register_jitable
    def group(a: UniqueArguments) -> int:
        """Number the groups of equal rows as they appear; return how many there are."""
        x, y, first, inverse = a.x, a.y, a.first, a.inverse
        counts, rows, length, table = a.counts, a.rows, a.length, a.table
        step, groups, bits = length * item, 0, 6
        refill(y, length, 0, table, bits)
        for i in range(rows):
            row = x + i * step
            at = place_of(row, length, bits)
            number = get(table + 8 * at)
            while number >= 0 and not same(row, y + number * step, length):
                at = (at + 1) & ((1 << bits) - 1)
                number = get(table + 8 * at)
            if number < 0:
                number = groups
                groups += 1
                put(table + 8 * at, number)
                put(first + 8 * number, i)
                put(counts + 8 * number, 0)
                memcpy(y + number * step, row, step)
                # At most half of the table is filled: searches stay short and always meet an empty
                # entry.
                if 2 * groups > 1 << bits:
                    bits += 1
                    refill(y, length, groups, table, bits)
            put(inverse + 8 * i, number)
            put(counts + 8 * number, get(counts + 8 * number) + 1)
        return groups

    return group


def _group_sorter(dtype: str) -> Function:
    """Return ``f(arguments, groups)``: it renumbers distinct rows in ascending order."""
    load, get, put = ld(dtype), ld_i64, st_i64
    item = numpy_dtype(dtype).itemsize

    @register_jitable
    def before(x: int, a: int, b: int, length: int) -> bool:
        """Return whether row a sorts before row b; NaN is last."""
        for i in range(length):
            p, q = load(x + (a * length + i) * item), load(x + (b * length + i) * item)
            if p < q or (q != q and p == p):
                return True
            if q < p or (p != p and q == q):
                return False
        return False

    @register_jitable
    def merge(x: int, length: int, source: int, target: int, low: int, mid: int, high: int) -> None:
        """Merge the sorted runs [low, mid) and [mid, high) of row numbers from source to target."""
        i, j = low, mid
        for k in range(low, high):
            take = i < mid
            if take and j < high:
                # Of equal rows the left one is first, which keeps the sort stable.
                take = not before(x, get(source + 8 * j), get(source + 8 * i), length)
            if take:
                put(target + 8 * k, get(source + 8 * i))
                i += 1
            else:
                put(target + 8 * k, get(source + 8 * j))
                j += 1

    @register_jitable
    def sort(a: UniqueArguments, groups: int) -> None:
        """Renumber the groups in the order of their rows."""
        x, y, first, inverse = a.x, a.y, a.first, a.inverse
        counts, rows, length, order = a.counts, a.rows, a.length, a.order
        spare, step = order + 8 * rows, length * item
        for k in range(groups):
            put(order + 8 * k, k)
        width = 1
        while width < groups:
            for low in range(0, groups, 2 * width):
                middle, high = min(low + width, groups), min(low + 2 * width, groups)
                merge(y, length, order, spare, low, middle, high)
            order, spare = spare, order
            width *= 2
        for k in range(groups):
            put(spare + 8 * k, get(first + 8 * get(order + 8 * k)))
        for k in range(groups):
            put(first + 8 * k, get(spare + 8 * k))
            memcpy(y + k * step, x + get(spare + 8 * k) * step, step)
        for k in range(groups):
            # The inverse permutation: from the number of a group by appearance to its sorted
            # number.
            put(spare + 8 * get(order + 8 * k), k)
            put(counts + 8 * k, 0)
        for i in range(rows):
            number = get(spare + 8 * get(inverse + 8 * i))
            put(inverse + 8 * i, number)
            put(counts + 8 * number, get(counts + 8 * number) + 1)

    return sort


def suppress(*, centred: bool, lanes: int) -> Function:
    """Return the kernel of `SuppressArguments`: it selects boxes of one class, the best first.

    A candidate is compared with as many selected boxes at once as a vector has lanes.

    Args:
        centred: Whether a box is (x, y, width, height) of its centre; else it is two corners.
        lanes: Lanes of a vector.
    """
    arguments = view_of(SuppressArguments)
    v = vec("float32", lanes)
    splat, zero, load, get, put = v.splat, v.zero, ld("float32"), ld_i64, st_i64
    keep, covered = _picked_boxes(centred, lanes)
    sink = _score_heap()

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        a = arguments(args)
        boxes, classes, room = a.number, a.classes, a.room
        # ONNX: without max_output_boxes_per_class no box is selected, and the default of
        # iou_threshold is 0.
        most = min(get(a.most), room) if a.most != 0 else 0
        limit = splat(load(a.overlap)) if a.overlap != 0 else zero()
        heap = a.scratch + worker * a.scratch_bytes
        kept, row = heap + 8 * boxes, 4 * (boxes + lanes)
        for unit in range(begin, end):
            at = a.boxes + unit // classes * boxes * 16
            scores = a.scores + unit * boxes * 4
            picked = a.picked + unit * room * 8
            count = 0
            for i in range(boxes):
                # ONNX drops scores that are not above the threshold; a NaN is dropped with them.
                if a.least == 0 or load(scores + 4 * i) > load(a.least):
                    put(heap + 8 * count, i)
                    count += 1
            for i in range(count // 2 - 1, -1, -1):
                sink(scores, heap, i, count)
            taken = 0
            while count > 0 and taken < most:
                best = get(heap)
                count -= 1
                put(heap, get(heap + 8 * count))
                sink(scores, heap, 0, count)
                if not covered(at + 16 * best, kept, row, taken, limit):
                    put(picked + 8 * taken, best)
                    keep(at + 16 * best, kept + 4 * taken, row)
                    taken += 1
            put(a.counts + 8 * unit, taken)

    return kernel


def _picked_boxes(centred: bool, lanes: int) -> tuple[Function, Function]:
    """Return two functions over the boxes that were selected.

    ``keep(box, place, row)`` adds a box; ``covered(box, kept, row, count, limit)`` returns whether
    the intersection over union of a box with one of them exceeds ``limit``. Their left, top, right,
    bottom and area are five rows of ``row`` bytes each.
    """
    v = vec("float32", lanes)
    fetch, splat, zero, select = v.load, v.splat, v.zero, v.select
    least, most_of, first_lanes, any_of = v.min, v.max, v.mask_n, v.any
    load, store = ld("float32"), st("float32")

    @register_jitable
    def corners(box: int) -> tuple[Any, Any, Any, Any]:
        """Return left, top, right and bottom of a box."""
        a, b, c, d = load(box), load(box + 4), load(box + 8), load(box + 12)
        if centred:
            half_width, half_height = c / 2, d / 2
            return a - half_width, b - half_height, a + half_width, b + half_height
        # ONNX allows the corners of any diagonal in any order.
        return min(a, c), min(b, d), max(a, c), max(b, d)

    @register_jitable
    def keep(box: int, place: int, row: int) -> None:
        """Store the corners and the area of a selected box, each in its row."""
        left, top, right, bottom = corners(box)
        store(place, left)
        store(place + row, top)
        store(place + 2 * row, right)
        store(place + 3 * row, bottom)
        store(place + 4 * row, (right - left) * (bottom - top))

    @register_jitable
    def covered(box: int, kept: int, row: int, count: int, limit: Any) -> bool:
        """Return whether a selected box suppresses this one."""
        left, top, right, bottom = corners(box)
        area = splat((right - left) * (bottom - top))
        a, b, c, d, none, bound = (
            splat(left),
            splat(top),
            splat(right),
            splat(bottom),
            zero(),
            limit,
        )
        for k in range(0, count, lanes):
            at = kept + 4 * k
            other = fetch(at + 4 * row)
            width = least(c, fetch(at + 2 * row)) - most_of(a, fetch(at))
            height = least(d, fetch(at + 3 * row)) - most_of(b, fetch(at + row))
            shared = width * height
            meets = (width > none) & (height > none) & (area > none) & (other > none)
            # Boxes without an area have no intersection over union; the selection also discards the
            # NaN of zero divided by zero.
            part = select(meets, shared / (area + other - shared), none)
            # The lanes beyond the count hold memory that was never written; the mask excludes them.
            if any_of((part > bound) & first_lanes(count - k)):
                return True
        return False

    return keep, covered


def _score_heap() -> Function:
    """Return ``f(scores, heap, at, count)``, which restores a heap of boxes below ``at``.

    The box with the highest score is on top, of equal ones the one with the lowest number.
    """
    load, get, put = ld("float32"), ld_i64, st_i64

    @register_jitable
    def before(scores: int, a: int, b: int) -> bool:
        p, q = load(scores + 4 * a), load(scores + 4 * b)
        return p > q or (p == q and a < b)

    @register_jitable
    def sink(scores: int, heap: int, at: int, count: int) -> None:
        """Move an entry down until none of its children is better."""
        moving = get(heap + 8 * at)
        while True:
            child = 2 * at + 1
            if child >= count:
                break
            if child + 1 < count and before(
                scores, get(heap + 8 * (child + 1)), get(heap + 8 * child)
            ):
                child += 1
            place = get(heap + 8 * child)
            if not before(scores, place, moving):
                break
            put(heap + 8 * at, place)
            at = child
        put(heap + 8 * at, moving)

    return sink


def gather_picked() -> Function:
    """Return the kernel of `GatherPickedArguments`: it joins the selected boxes of all classes."""
    arguments = view_of(GatherPickedArguments)
    get, put = ld("int64"), st("int64")

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        a = arguments(args)
        y, count = a.y, 0
        for unit in range(a.units):
            picked = a.picked + unit * a.room * 8
            for k in range(get(a.counts + 8 * unit)):
                put(y + 24 * count, unit // a.classes)
                put(y + 24 * count + 8, unit % a.classes)
                put(y + 24 * count + 16, get(picked + 8 * k))
                count += 1
        put(a.count, count)

    return kernel
