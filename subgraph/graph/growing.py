"""Growing arrays: views of buffers with room for more positions, which are appended in place.

Positions are the second last axis, as in keys of a decoder, ``[batch, heads, positions, size]``.
Appending writes behind the last position of a buffer and returns a longer view of it. Earlier views
keep their content. Only the longest view can be extended in place: extending a shorter one would
change what the longer one shows, so that it needs another buffer. A run claims the buffer first, so
that of several that run at the same time one appends.
"""

from __future__ import annotations

import threading
from typing import Any
from weakref import ref

import attrs
import numpy as np

from subgraph.graph.types import Array
from subgraph.system.forking import free_in_child
from subgraph.system.large_pages import aligned_empty


@attrs.define(eq=False)
class _Buffer:
    """A buffer that some array views.

    Attributes:
        memory: The array that owns its memory.
        offset: Where in this memory it begins, in bytes.
        shape: Its shape.
        dtype: Its dtype.
        used: Positions of the longest view; -1 while a run has claimed the buffer.
    """

    memory: ref[Array]
    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    used: int


# By the identity of the array that owns the memory; without those of which no view is left.
_BUFFERS: dict[int, _Buffer] = {}
_LOCK = free_in_child(threading.Lock())


def reserved(array: Array, capacity: int) -> Array:
    """Return a copy of an array in a new buffer.

    Args:
        array: The array, of rank 2 or more.
        capacity: Positions of the buffer, at least those of the array.
    """
    *before, used, size = array.shape
    buffer = aligned_empty((*before, capacity, size), array.dtype)
    owner = _owner(buffer)
    key, offset = id(owner), buffer.ctypes.data - owner.ctypes.data
    memory = ref(owner, lambda _: _BUFFERS.pop(key, None))
    _BUFFERS[key] = _Buffer(memory, offset, buffer.shape, buffer.dtype, used)
    view = buffer[..., :used, :]
    view[...] = array
    return view


def is_growing(array: Any) -> bool:
    """Return whether an array is a view of a buffer of `reserved`."""
    return bool(_BUFFERS) and _found(array) is not None


def buffer_of(array: Any) -> Array | None:
    """Return the buffer in which an array can be extended; None if there is none."""
    found = _found(array) if _BUFFERS else None
    if found is None or found.used != array.shape[-2] or found.dtype != array.dtype:
        return None
    buffer: Array = np.ndarray(found.shape, found.dtype, array.base, found.offset)
    return buffer if array.strides == buffer.strides else None


def claimed(array: Any) -> Array | None:
    """Return the buffer of an array for the caller alone, until `extended`; None: there is none."""
    if not _BUFFERS:
        return None
    with _LOCK:
        buffer = buffer_of(array)
        if buffer is not None:
            _BUFFERS[id(buffer.base)].used = -1
    return buffer


def extended(buffer: Array, positions: int) -> Array:
    """Return a view of the first ``positions`` of a buffer, behind which none is in use."""
    _BUFFERS[id(_owner(buffer))].used = positions
    return buffer[..., :positions, :]


def _owner(array: Array) -> Array:
    """Return the array that owns the memory of an array: itself, or the base of all its views."""
    return array.base if isinstance(array.base, np.ndarray) else array


def _found(array: Any) -> _Buffer | None:
    base = array.base if isinstance(array, np.ndarray) else None
    found = None if base is None else _BUFFERS.get(id(base))
    return found if found is not None and found.memory() is base else None
