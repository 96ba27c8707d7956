"""Broadcasting, strides and merging of dimensions, for shape inference and lowerings."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from subgraph.errors import ShapeError
from subgraph.graph.types import Dim, Shape

Ints = tuple[int, ...]
_INTS = frozenset({int})


def contiguous(shape: Sequence[int]) -> Ints:
    """Return the strides, in elements, of a row-major array."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def broadcast_strides(shape: Sequence[int], target: Sequence[int]) -> Ints:
    """Return the strides, in elements, with which a row-major array is read as ``target``.

    Leading dimensions of size 1 may exceed the rank of ``target``: a bound of Clip may have shape
    [1] if the input is a scalar.

    Raises:
        ShapeError: The shape does not broadcast to the target.
    """
    while len(shape) > len(target) and shape[0] == 1:
        shape = shape[1:]
    lead = len(target) - len(shape)
    if lead < 0:
        raise ShapeError(f"shape {list(shape)} does not broadcast to {list(target)}")
    strides = [0] * lead
    for size, step, wanted in zip(shape, contiguous(shape), target[lead:], strict=True):
        if size not in (1, wanted):
            raise ShapeError(f"shape {list(shape)} does not broadcast to {list(target)}")
        strides.append(0 if size == 1 else step)
    return tuple(strides)


def broadcast_shapes(shapes: Iterable[Sequence[Dim] | None]) -> Shape | None:
    """Return the shape to which shapes broadcast together; None if a rank is unknown.

    A symbolic dimension is assumed to equal a number other than 1 in the same position; two
    different symbols give an unknown dimension (None).

    Raises:
        ShapeError: Two numbers differ and neither is 1.
    """
    known: list[Shape] = []
    for shape in shapes:
        if shape is None:
            return None
        known.append(tuple(shape))
    if len(known) == 1:
        return known[0]
    if known and _INTS.issuperset(map(type, known[0])) and known.count(known[0]) == len(known):
        return known[0]  # fast path: most operands have equal shapes
    longest = max(known, key=len, default=())
    result: list[Dim] = []
    for position in range(-len(longest), 0):
        dims = [shape[position] for shape in known if len(shape) >= -position]
        alone = len(dims) == 1 and type(dims[0]) is int
        result.append(dims[0] if alone else _broadcast_dim(dims, known))
    return tuple(result)


def broadcast_sizes(*shapes: Ints) -> Ints:
    """Return the shape to which concrete shapes broadcast together.

    Raises:
        ShapeError: Two sizes differ and neither is 1.
    """
    found = broadcast_shapes(shapes)
    assert found is not None, "their ranks are known"
    return tuple(dim for dim in found if isinstance(dim, int))


def _broadcast_dim(dims: Sequence[Dim], shapes: Sequence[Sequence[Dim]]) -> Dim:
    numbers = [dim for dim in dims if isinstance(dim, int) and dim != 1]
    if any(number != numbers[0] for number in numbers):
        shown = " and ".join(str(list(shape)) for shape in shapes)
        raise ShapeError(f"shapes {shown} do not broadcast together")
    if numbers:
        return numbers[0]
    names = {dim for dim in dims if not isinstance(dim, int)}
    if not names:
        return 1
    return names.pop() if len(names) == 1 else None


def collapse(shape: Sequence[int], strides: Sequence[Sequence[int]]) -> tuple[Ints, list[Ints]]:
    """Drop dimensions of size 1 and merge neighbours whose strides allow it in every operand.

    Args:
        shape: Sizes of the dimensions.
        strides: The strides of each operand.

    Returns:
        The new sizes (at least one dimension) and the new strides of each operand.
    """
    sizes: list[int] = []
    steps: list[list[int]] = [[] for _ in strides]
    for d, size in enumerate(shape):
        if size == 1:
            continue
        here = [operand[d] for operand in strides]
        # Two dimensions are one if a step of the outer is as far as all steps of the inner, in
        # every operand; stride 0 fits as well.
        if sizes and all(s[-1] == h * size for s, h in zip(steps, here, strict=True)):
            sizes[-1] *= size
            for s, h in zip(steps, here, strict=True):
                s[-1] = h
            continue
        sizes.append(size)
        for s, h in zip(steps, here, strict=True):
            s.append(h)
    if not sizes:
        return (1,), [(0,) for _ in strides]
    return tuple(sizes), [tuple(s) for s in steps]


def normal_axis(axis: int, rank: int) -> int:
    """Return ``axis`` counted from the front.

    Raises:
        ShapeError: The axis does not exist.
    """
    if not -rank <= axis < max(rank, 1) and not (rank == 0 and axis in (0, -1)):
        raise ShapeError(f"axis {axis} does not exist in rank {rank}")
    return axis % rank if rank else 0


def product(dims: Sequence[Dim]) -> Dim:
    """Return the product of dimensions; None if one is unknown and none is 0."""
    numbers = [dim for dim in dims if isinstance(dim, int)]
    if len(numbers) == len(dims) or 0 in numbers:
        return math.prod(numbers)
    names = [dim for dim in dims if not isinstance(dim, int)]
    # A product is only a symbol if no factor other than 1 changes it.
    return names[0] if len(names) == 1 and math.prod(numbers) == 1 else None
