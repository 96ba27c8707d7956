"""Views: how the dimensions of a value lie in memory, for values that are not dense.

A view has the parts of each dimension, outermost first; a part is a size and a stride in elements.
These are the layouts of CuTe. Keys ``[B, H * G, T, D]`` in which G adjacent heads share memory, in
a buffer with room for C positions, have the view::

    (((B, H * C * D),), ((H, C * D), (G, 0)), ((T, D),), ((D, 1),))

A dimension of size 1 has no parts. Sizes and strides may be symbolic.
"""

from __future__ import annotations

from collections.abc import Sequence

Part = tuple[int, int]
View = tuple[tuple[Part, ...], ...]

MAX_RUNS = 5  # the most runs of a view that the kernel `from_strides` copies


def dense(shape: Sequence[int], memory: Sequence[int]) -> View:
    """Return the view of the first elements along each dimension of a row-major array.

    Args:
        shape: The dimensions of the value.
        memory: Those of the array, at least as large.
    """
    found: list[tuple[Part, ...]] = []
    stride = 1
    for size, whole in zip(reversed(shape), reversed(memory), strict=True):
        found.append(() if size == 1 else ((size, stride),))
        stride *= whole
    return tuple(reversed(found))


def in_blocks(shape: Sequence[int], lanes: int) -> View:
    """Return the view of values with channels last in the memory of an image in blocks of channels.

    Args:
        shape: The dimensions of the values: 1, the spatial ones, and the channels.
        lanes: Channels of a block; they divide the channels.
    """
    _, *spatial, channels = shape
    *memory, last = dense(
        (channels // lanes, *spatial, lanes), (channels // lanes, *spatial, lanes)
    )
    return ((), *memory[1:], (*memory[0], *last))


def is_in_blocks(view: View, shape: Sequence[int], lanes: int) -> bool:
    """Return whether a view of a shape is that of `in_blocks`."""
    return shape[-1] % lanes == 0 and runs(view) == runs(in_blocks(shape, lanes))


def expanded(view: View, shape: Sequence[int]) -> View:
    """Return a view broadcast to a shape; dimensions of size 1 are repeated, and new ones."""
    repeated = [() if size == 1 else ((size, 0),) for size in shape]
    first = len(shape) - len(view)
    return (
        *repeated[:first],
        *(own or new for own, new in zip(view, repeated[first:], strict=True)),
    )


def reshaped(view: View, shape: Sequence[int]) -> View | None:
    """Return a view with its elements in the same order in another shape; None if there is none.

    Args:
        view: The view.
        shape: The dimensions, with as many elements.
    """
    parts = [part for dimension in view for part in dimension]
    found = _grouped(parts, shape)
    # Sizes that are not symbolic stay so without joining parts; it is needed for others only.
    return _grouped(runs(view), shape) if found is None else found


def _grouped(parts: Sequence[Part], shape: Sequence[int]) -> View | None:
    """Return a view of a shape with these parts, some of them divided; None if there is none."""
    left = list(reversed(parts))
    found: list[tuple[Part, ...]] = []
    for dimension in shape:
        size, taken = dimension, list[Part]()
        while size != 1:
            if not left:
                return None
            count, stride = left.pop()
            if count == size:
                size = 1
            elif count == 0 or size == 0:
                return None
            elif size % count == 0:
                size //= count
            elif count % size == 0:  # the part extends to the next dimension
                inner = count // size
                left.append((inner, stride))
                count, stride, size = size, stride * inner, 1
            else:
                return None
            taken.append((count, stride))
        found.append(tuple(taken))
    return None if left else tuple(found)


def runs(view: View) -> list[Part]:
    """Return the parts of all dimensions, outermost first; those that are adjacent are joined."""
    found: list[Part] = []
    for size, stride in (part for dimension in view for part in dimension):
        if found and found[-1][1] == size * stride:
            found[-1] = found[-1][0] * size, stride
        else:
            found.append((size, stride))
    return found
