"""Sorting part of a table, and heaps that know the place of each item; for `tables`."""

from __future__ import annotations


def sort_by(keys: list[int], items: list[int], begin: int, end: int) -> None:
    """Sort ``items[begin:end]`` by their keys, all different, in place (heapsort)."""
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
        _sift(keys, items, begin, k, count)
    for last in range(count - 1, 0, -1):
        item = items[begin]
        items[begin] = items[begin + last]
        items[begin + last] = item
        _sift(keys, items, begin, 0, last)


def _sift(keys: list[int], items: list[int], begin: int, at: int, count: int) -> None:
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


def heap_push(heap: list[int], place: list[int], keys: list[int], length: int, item: int) -> int:
    """Put ``item`` in unless it is; return the new length. The least (key, item) is ``heap[0]``.

    Args:
        heap: The heap.
        place: For each item its place in the heap plus one.
        keys: For each item its key, which stays while the item is in the heap.
        length: How many items the heap has.
        item: The item.
    """
    if place[item]:
        return length
    _rise(heap, place, keys, length, item)
    return length + 1


def heap_remove(heap: list[int], place: list[int], keys: list[int], length: int, item: int) -> int:
    """Take ``item`` out if it is in; return the new length."""
    at = place[item] - 1
    if at < 0:
        return length
    place[item] = 0
    length -= 1
    moved = heap[length]
    if at == length:
        return length
    while True:
        child = 2 * at + 1
        if child >= length:
            break
        if child + 1 < length and _before(keys, heap[child + 1], heap[child]):
            child += 1
        if not _before(keys, heap[child], moved):
            break
        heap[at] = heap[child]
        place[heap[at]] = at + 1
        at = child
    _rise(heap, place, keys, at, moved)
    return length


def _rise(heap: list[int], place: list[int], keys: list[int], at: int, item: int) -> None:
    while at > 0:
        above = (at - 1) // 2
        if not _before(keys, item, heap[above]):
            break
        heap[at] = heap[above]
        place[heap[at]] = at + 1
        at = above
    heap[at] = item
    place[item] = at + 1


def _before(keys: list[int], one: int, two: int) -> bool:
    return keys[one] < keys[two] or (keys[one] == keys[two] and one < two)
