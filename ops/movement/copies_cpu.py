"""Strided copies as steps, for the operators that move elements (Transpose, Slice, Concat, Pad).

`emit_copy` copies any array with strides to any other; it merges dimensions and chooses the kernel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np

from subgraph.dtypes import UNSIGNED
from subgraph.engine.planner.lowering import Lowering
from subgraph.engine.planner.operands import Operand, Scratch, Weight
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.graph.symbolic import larger, smaller
from subgraph.ops.elementwise.primitives import primitive
from subgraph.ops.shared.strides import Ints, collapse
from subgraph.system.host import has_masked_stores

from .arguments import (
    ChannelsArguments,
    CopyArguments,
    FillArguments,
    TransposeArguments,
    ZipArguments,
)

Place = Operand | Scratch | Weight
UNIT_BYTES = 32768  # bytes of a unit: the size of an L1 cache
MIN_BYTES_PER_THREAD = 16384  # least bytes for which a thread is started (estimate)
# A tile of 64 x 64 float32 has 16 KiB, so source and target fill an L1 cache of 32 KiB.
_TILE_ELEMENTS = 64  # rows and columns of a unit of a transposition
_ZIPPED_ROWS = (2, 3, 4)  # numbers of rows that the kernel `zip_rows` interleaves
_MIN_ZIPPED_ELEMENTS = 8  # elements of the shortest rows for which it is used (estimate)


@attrs.frozen(eq=False)
class StridedCopy:
    """A copy of an array from strides to strides, its dimensions merged as far as possible.

    Attributes:
        source: Memory that is read.
        target: Memory that is written; each element at most once.
        source_offset: Bytes of the source before the first element that is read.
        target_offset: Bytes of the target before the first element that is written.
        item: Bytes of an element: 1, 2, 4 or 8.
        dims: Sizes of the array.
        origin: Elements between neighbours in the source, along each dimension.
        goal: Elements between neighbours in the target.
    """

    source: Place
    target: Place
    source_offset: int
    target_offset: int
    item: int
    dims: Ints
    origin: Ints
    goal: Ints

    @property
    def ends(self) -> dict[str, Any]:
        """The first arguments of all kernels that copy (`Transfer`)."""
        return {
            "source": self.source,
            "target": self.target,
            "source_offset": self.source_offset,
            "target_offset": self.target_offset,
        }

    @property
    def moved(self) -> int:
        """Bytes that are read and written."""
        return 2 * self.item * math.prod(self.dims)

    def outer(self, dimensions: Sequence[int]) -> dict[str, Any]:
        """Return the arguments of kernels for the loops over ``dimensions``."""
        dims, item = self.dims, self.item
        words = [
            w for d in dimensions for w in (dims[d], self.origin[d] * item, self.goal[d] * item)
        ]
        return {"outer": len(dimensions), "dims": words}


def is_contiguous(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether elements lie one after the other in row-major order."""
    step = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != step:
            return False
        step *= size
    return True


def emit_copy(
    low: Lowering,
    source: Place,
    target: Place,
    shape: Sequence[int],
    from_strides: Sequence[int],
    to_strides: Sequence[int],
    *,
    item: int,
    from_offset: int = 0,
    to_offset: int = 0,
) -> None:
    """Emit the step that copies an array of ``shape`` from strides to strides.

    Args:
        low: Collects the plan's steps.
        source: Memory that is read.
        target: Memory that is written; each element at most once.
        shape: Sizes of the array.
        from_strides: Elements between neighbours in the source; may be 0 or negative.
        to_strides: Elements between neighbours in the target.
        item: Bytes of an element: 1, 2, 4, 8 or 16.
        from_offset: Elements of the source before the first that is read.
        to_offset: Elements of the target before the first that is written.
    """
    if 0 in shape:
        return
    offsets = from_offset * item, to_offset * item
    if item == 16:
        # Complex numbers: pairs of 8 bytes.
        shape, item = (*shape, 2), 8
        from_strides = (*(2 * s for s in from_strides), 1)
        to_strides = (*(2 * s for s in to_strides), 1)
    dims, (origin, goal) = collapse(shape, [from_strides, to_strides])
    emit_strided_copy(low, StridedCopy(source, target, *offsets, item, dims, origin, goal))


@primitive
def emit_strided_copy(low: Lowering, copy: StridedCopy) -> None:
    """Emit the step of a copy."""
    # A single element has no neighbour, so its strides are arbitrary; 1 selects the kernel of
    # contiguous rows.
    if len(copy.dims) == 1 and copy.dims[0] == 1:
        copy = attrs.evolve(copy, origin=(1,), goal=(1,))
    if _emit_zip(low, copy) or _emit_transpose(low, copy):
        return
    copy = _widen(copy)
    dims, origin, goal, item = copy.dims, copy.origin, copy.goal, copy.item
    size, rows = dims[-1], dims[-2] if len(dims) > 1 else 1
    block = smaller(size, UNIT_BYTES // item)
    row_block = larger(1, smaller(rows, UNIT_BYTES // (block * item)))
    whole = origin[-1] == goal[-1] == 1
    kernel = Kernel(
        "subgraph.ops.movement.kernels", "copy", item=item, kind="rows" if whole else "strided"
    )
    arguments = CopyArguments(
        **copy.ends,
        row_size=size,
        row_block=block,
        rows=rows,
        rows_block=row_block,
        source_row=origin[-2] * item if len(dims) > 1 else 0,
        target_row=goal[-2] * item if len(dims) > 1 else 0,
        source_step=origin[-1] * item,
        target_step=goal[-1] * item,
        **copy.outer(range(len(dims) - 2)),
    )
    units = math.prod(dims[:-2]) * -(-rows // row_block) * -(-size // block)
    grain = larger(1, MIN_BYTES_PER_THREAD // (block * row_block * item))
    low.emit(kernel, arguments, units, grain=grain, bytes=copy.moved)


def emit_channels(
    low: Lowering,
    source: Operand,
    target: Operand,
    count: int,
    *,
    source_first: int = 0,
    target_first: int = 0,
) -> None:
    """Emit the step that copies channels between two images in blocks of as many channels.

    Args:
        low: Collects the plan's steps.
        source: ``[N, C, *spatial]``.
        target: Another image of the same layout, dtype, N and spatial sizes.
        count: Number of channels, at least 1.
        source_first: Channel of the source that is read first.
        target_first: Channel of the target that is written first.
    """
    pixels, lanes, item = math.prod(target.shape[2:]), target.lanes, target.itemsize
    part = larger(1, smaller(pixels, UNIT_BYTES // (lanes * item)))
    arguments = ChannelsArguments(
        source=source,
        target=target,
        source_blocks=source.blocks,
        target_blocks=target.blocks,
        source_first=source_first,
        target_first=target_first,
        count=count,
        target_channels=target.shape[1],
        pixels=pixels,
        part=part,
    )
    blocks = (target_first + count - 1) // lanes - target_first // lanes + 1
    units = target.shape[0] * blocks * -(-pixels // part) if target.size else 0
    kernel = Kernel("subgraph.ops.movement.kernels", "channels", item=item, lanes=lanes)
    grain = larger(1, MIN_BYTES_PER_THREAD // (part * lanes * item))
    moved = 2 * target.shape[0] * count * pixels * item
    low.emit(kernel, arguments, units, grain=grain, bytes=moved)


def _transposed_dimension(copy: StridedCopy) -> int | None:
    """Return the dimension that is contiguous in the source, if the copy is a transposition."""
    dims, origin = copy.dims, copy.origin
    if len(dims) < 2 or copy.goal[-1] != 1 or origin[-1] in (0, 1) or dims[-1] < 4:
        return None
    found = [d for d in range(len(dims) - 1) if origin[d] == 1]
    # A few columns (the channels of an image) are faster copied one after the other.
    return found[0] if len(found) == 1 and dims[found[0]] > 4 else None


def _emit_zip(low: Lowering, copy: StridedCopy) -> bool:
    """Emit the copy if it only interleaves a few rows or takes them apart; return whether it does.

    The channels of an image between the layouts NCHW and NHWC are such rows.
    """
    dims, origin, goal, item = copy.dims, copy.origin, copy.goal, copy.item
    last = len(dims) - 1
    for d in range(last):
        together = (origin[d], goal[d], goal[last]) == (1, dims[last], 1) and dims[
            last
        ] in _ZIPPED_ROWS
        apart = (origin[d], origin[last], goal[last]) == (1, dims[d], 1) and dims[d] in _ZIPPED_ROWS
        few, long = (last, d) if together else (d, last)
        if together or apart:
            break
    else:
        return False
    lanes = min(16, low.lanes(UNSIGNED[item]))
    # With more lanes than elements in a row, the loop for the rest would copy all of them singly.
    while lanes > dims[long]:
        lanes //= 2
    if lanes < min(_MIN_ZIPPED_ELEMENTS, low.lanes(UNSIGNED[item])):
        return False
    rest = [e for e in range(last) if e != d]
    block = UNIT_BYTES // (dims[few] * item) // lanes * lanes
    kernel = Kernel(
        "subgraph.ops.movement.kernels",
        "zip_rows",
        item=item,
        lanes=lanes,
        count=dims[few],
        apart=not together,
    )
    arguments = ZipArguments(
        **copy.ends,
        row_size=dims[long],
        row_block=block,
        row_step=(origin if together else goal)[few] * item,
        **copy.outer(rest),
    )
    units = math.prod(dims[e] for e in rest) * -(-dims[long] // block)
    grain = max(1, MIN_BYTES_PER_THREAD // (min(block, dims[long]) * dims[few] * item))
    low.emit(kernel, arguments, units, grain=grain, bytes=copy.moved)
    return True


def _emit_transpose(low: Lowering, copy: StridedCopy) -> bool:
    """Emit the copy if it transposes matrices; return whether it does."""
    transposed = _transposed_dimension(copy)
    if transposed is None:
        return False
    dims, item = copy.dims, copy.item
    rest = [d for d in range(len(dims) - 1) if d != transposed]
    # Neighbouring units read neighbouring memory, which arrives in pages and lines: a block of the
    # target is contiguous for longer (5 axes of 32, of which 3 change places: 0.6 of the time).
    rest.sort(key=lambda d: -copy.origin[d])
    columns, rows = dims[transposed], dims[-1]
    lanes = min(16, low.lanes(UNSIGNED[item]))
    if not has_masked_stores():
        # Without masked stores a partial block costs as much as several whole ones.
        while lanes > min(columns, rows):
            lanes //= 2
    kernel = Kernel("subgraph.ops.movement.kernels", "transpose", item=item, lanes=lanes)
    arguments = TransposeArguments(
        **copy.ends,
        columns=columns,
        rows=rows,
        source_row=copy.origin[-1] * item,
        target_row=copy.goal[transposed] * item,
        columns_block=_TILE_ELEMENTS,
        rows_block=_TILE_ELEMENTS,
        **copy.outer(rest),
    )
    count = math.prod(dims[d] for d in rest)
    units = count * -(-columns // _TILE_ELEMENTS) * -(-rows // _TILE_ELEMENTS)
    tile = smaller(columns, _TILE_ELEMENTS) * smaller(rows, _TILE_ELEMENTS)
    grain = larger(1, MIN_BYTES_PER_THREAD // (tile * item))
    low.emit(kernel, arguments, units, grain=grain, bytes=copy.moved)
    return True


def _widen(copy: StridedCopy) -> StridedCopy:
    """Return the copy with each short contiguous row as one wider element, if that is possible."""
    dims, origin, goal = copy.dims, copy.origin, copy.goal
    size, item = dims[-1], dims[-1] * copy.item
    if len(dims) < 2 or origin[-1] != 1 or goal[-1] != 1 or item not in (2, 4, 8):
        return copy
    # Every row must start at a whole multiple of the wider element, since strides count elements.
    if size == 1 or any(s % size for s in (*origin[:-1], *goal[:-1])):
        return copy
    origin, goal = tuple(s // size for s in origin[:-1]), tuple(s // size for s in goal[:-1])
    return attrs.evolve(copy, item=item, dims=dims[:-1], origin=origin, goal=goal)


def emit_fill(
    low: Lowering,
    target: Place,
    size: int,
    value: np.ndarray[tuple[int], np.dtype[np.generic]] | Operand,
) -> None:
    """Emit the step that sets elements to one value.

    Args:
        low: Collects the plan's steps and constants.
        target: Memory that is written.
        size: Number of elements.
        value: The element, an array or operand of one element.
    """
    item = value.itemsize
    element = value if isinstance(value, Operand) else low.weight("element", np.array, value)
    if item == 16:  # complex numbers, which the kernel below does not load
        emit_copy(low, element, target, (size,), (0,), (1,), item=item)
        return
    kernel = Kernel("subgraph.ops.movement.kernels", "fill", item=item)
    block = UNIT_BYTES // item
    arguments = FillArguments(target=target, size=size, block=block, value=element)
    low.emit(kernel, arguments, -(-size // block), grain=1, bytes=size * item)
