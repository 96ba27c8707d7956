"""Sorting part of a table, and heaps that know the position of each item; for `structures`."""

from __future__ import annotations

from subgraph.partition.search.structures import Heap


def sort_by(keys: list[int], items: list[int], begin: int, end: int) -> None:
    """Sort ``items[begin:end]`` in place: insertion sort up to 12 items, else heapsort.

    Args:
        keys: For each item its key; all keys are different.
        items: The items, which index ``keys``.
        begin: Index of the first item to sort.
        end: Index after the last item to sort.
    """
    count = end - begin
    if count <= 12:
        for k in range(begin + 1, end):
            item = items[k]
            key = keys[item]
            at = k
            while at > begin and keys[items[at - 1]] > key:
                items[at] = items[at - 1]
                at -= 1
            items[at] = item
        return
    for k in range(count // 2 - 1, -1, -1):
        _sift_down(keys, items, begin, k, count)
    for last in range(count - 1, 0, -1):
        item = items[begin]
        items[begin] = items[begin + last]
        items[begin + last] = item
        _sift_down(keys, items, begin, 0, last)


def _sift_down(keys: list[int], items: list[int], begin: int, at: int, count: int) -> None:
    """Restore the max-heap ``items[begin:begin + count]`` below its entry ``at``."""
    item = items[begin + at]
    key = keys[item]
    while True:
        child = 2 * at + 1
        if child >= count:
            break
        if child + 1 < count and keys[items[begin + child]] < keys[items[begin + child + 1]]:
            child += 1
        if keys[items[begin + child]] <= key:
            break
        items[begin + at] = items[begin + child]
        at = child
    items[begin + at] = item


def heap_push(heap: Heap, item: int) -> None:
    """Add ``item`` unless the heap has it; the least (key, item) is ``heap.items[0]``.

    ``heap.keys`` has the item's key, which must not change while the item is in the heap.
    """
    if not heap.index[item]:
        _sift_up(heap, heap.count, item)
        heap.count += 1


def heap_remove(heap: Heap, item: int) -> None:
    """Remove ``item`` if the heap has it."""
    at = heap.index[item] - 1
    if at < 0:
        return
    heap.index[item] = 0
    heap.count -= 1
    length = heap.count
    moved = heap.items[length]
    if at == length:
        return
    while True:
        child = 2 * at + 1
        if child >= length:
            break
        if child + 1 < length and _is_less(heap, heap.items[child + 1], heap.items[child]):
            child += 1
        if not _is_less(heap, heap.items[child], moved):
            break
        heap.items[at] = heap.items[child]
        heap.index[heap.items[at]] = at + 1
        at = child
    _sift_up(heap, at, moved)


def _sift_up(heap: Heap, at: int, item: int) -> None:
    """Put ``item`` at index ``at`` of a heap, or above."""
    while at > 0:
        parent = (at - 1) // 2
        if not _is_less(heap, item, heap.items[parent]):
            break
        heap.items[at] = heap.items[parent]
        heap.index[heap.items[at]] = at + 1
        at = parent
    heap.items[at] = item
    heap.index[item] = at + 1


def _is_less(heap: Heap, one: int, two: int) -> bool:
    keys = heap.keys
    return keys[one] < keys[two] or (keys[one] == keys[two] and one < two)
