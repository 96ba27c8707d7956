"""Operators that move elements on OPENCL: the CPU's lowerings over OpenCL's kernels of copies."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from subgraph.engine.planner.lowering import (
    Argument,
    Lowering,
    Operand,
    Scratch,
    Unsupported,
    Weight,
)
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.graph.types import Array
from subgraph.opencl.lowering import ClLowering, cl_kernel, cl_primitive, cl_shared
from subgraph.opencl.runtime import ClSource
from subgraph.operators.schema import INTERNAL_DOMAIN
from subgraph.ops.shared.opencl_code import line, word
from subgraph.ops.shared.strides import collapse

from .arguments import ReverseSequenceArguments, TriluArguments
from .op import Repeats

Place = Operand | Scratch | Weight
_UNSIGNED = {1: "uint8", 2: "uint16", 4: "uint32", 8: "uint64"}
# A CPU's work-item copies a whole row of _MIN_ROW_ELEMENTS or more; there must be a row for each
# _ELEMENTS_PER_ROW elements of a row, or 4 rows, so that several compute units have work
# (estimates).
_MIN_ROW_ELEMENTS, _ELEMENTS_PER_ROW = 16, 4096
_MAX_DIMENSIONS = 7  # most dimensions of a copy, after merging

cl_shared(
    "BitCast",
    "Concat",
    "Constant",
    "ConstantOfShape",
    "DepthToSpace",
    "Dropout",
    "Expand",
    "EyeLike",
    "Flatten",
    "Identity",
    "Pad",
    "Range",
    "Reshape",
    "ReverseSequence",
    "Shape",
    "Size",
    "Slice",
    "SpaceToDepth",
    "Split",
    "Squeeze",
    "Tile",
    "Transpose",
    "Trilu",
    "Unsqueeze",
)

cl_shared("Required", domain=INTERNAL_DOMAIN)


def as_unsigned(memory: Place, item: int) -> Place:
    """Return memory as an operand of unsigned integers of ``item`` bytes.

    Launches pass offsets in elements of an operand's dtype.
    """
    if isinstance(memory, Weight) or (isinstance(memory, Operand) and memory.itemsize == item):
        return memory
    offset = memory.offset if isinstance(memory, Operand) else 0
    name = memory.name if isinstance(memory, Operand) else "scratch"
    parameter = memory.parameter if isinstance(memory, Operand) else None
    shape = (memory.nbytes // item,)
    return Operand(
        name, _UNSIGNED[item], shape, storage=memory.storage, offset=offset, parameter=parameter
    )


def _source(item: int, **defines: int) -> ClSource:
    return ClSource("movement/kernels", defines=(("T", word(item)), *sorted(defines.items())))


@cl_primitive
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
    """Launch a copy from strides to strides; OPENCL's form of ``copies_cpu.emit_copy``.

    Args:
        low: Collects the plan's launches.
        source: Memory that is read.
        target: Memory that is written; each element at most once.
        shape: Sizes of the array.
        from_strides: Elements between neighbours in the source; may be 0 or negative.
        to_strides: Elements between neighbours in the target.
        item: Bytes of an element: 1, 2, 4, 8 or 16.
        from_offset: Elements of the source before the first that is read.
        to_offset: Elements of the target before the first that is written.

    Raises:
        Unsupported: More than 7 dimensions remain after merging.
    """
    assert isinstance(low, ClLowering)
    if 0 in shape:
        return
    if item == 16:
        # Complex numbers: pairs of 8 bytes.
        shape, item = (*shape, 2), 8
        from_strides = (*(2 * s for s in from_strides), 1)
        to_strides = (*(2 * s for s in to_strides), 1)
        from_offset, to_offset = 2 * from_offset, 2 * to_offset
    dims, (origin, goal) = collapse(shape, [from_strides, to_strides])
    size, step, stride = dims[-1], origin[-1], goal[-1]
    if len(dims) > _MAX_DIMENSIONS:
        raise Unsupported(f"a copy over {len(dims)} dimensions that do not merge")
    levels = 2 if len(dims) <= 2 else 3 if len(dims) == 3 else _MAX_DIMENSIONS
    count = math.prod(dims)
    ends: list[Argument] = [
        as_unsigned(source, item),
        from_offset,
        as_unsigned(target, item),
        to_offset,
    ]
    moved = 2 * count * item
    rows = count // size
    if (
        not low.traits.is_gpu
        and size >= _MIN_ROW_ELEMENTS
        and rows >= min(4, size // _ELEMENTS_PER_ROW)
    ):
        outer = [*_innermost_first(dims[:-1], levels - 1, 1, _MAX_DIMENSIONS - 1)[:-1]]
        outer += _innermost_first(origin[:-1], levels - 1, 0, _MAX_DIMENSIONS - 1)
        outer += _innermost_first(goal[:-1], levels - 1, 0, _MAX_DIMENSIONS - 1)
        words: list[Argument] = [rows, size, step, stride, *outer, *ends]
        program = _source(item, LEVELS=levels)
        low.launch(program, "copy_rows", words, (rows,), (1,), bytes=moved)
        return
    words = [count, *_innermost_first(dims, levels, 1)[:-1]]
    words += [*_innermost_first(origin, levels, 0), *_innermost_first(goal, levels, 0), *ends]
    low.launch(_source(item, LEVELS=levels), "copy", words, *line(low, count), bytes=moved)


def _innermost_first(
    values: Sequence[int], levels: int, fill: int, slots: int = _MAX_DIMENSIONS
) -> list[int]:
    """Return values of dimensions as the kernels expect: innermost first, the outermost last.

    ``fill`` stands for missing ones, up to ``slots`` values; kernels read ``levels`` of them.
    """
    padded = [fill] * (levels - len(values)) + list(values)
    inner = padded[:0:-1]
    return [*inner, *[fill] * (slots - 1 - len(inner)), padded[0]]


@cl_primitive
def emit_fill(low: Lowering, target: Place, size: int, value: Array | Operand) -> None:
    """Launch a fill with one value; OPENCL's form of ``copies_cpu.emit_fill``.

    Args:
        low: Collects the plan's launches and constants.
        target: Memory that is written.
        size: Number of elements.
        value: The element, an array or operand of one element.

    Raises:
        Unsupported: An element has more than 8 bytes.
    """
    assert isinstance(low, ClLowering)
    item = value.itemsize
    if item not in _UNSIGNED:
        raise Unsupported(f"a fill with elements of {item} bytes")
    element: Place
    element = value if isinstance(value, Operand) else low.weight("element", np.array, value)
    words: list[Argument] = [size, as_unsigned(target, item), as_unsigned(element, item)]
    low.launch(_source(item, LEVELS=2), "fill", words, *line(low, size), bytes=size * item)


@cl_primitive
def emit_take(
    low: Lowering,
    source_: Operand | Scratch,
    target: Operand | Scratch,
    shape: Sequence[int],
    axis: int,
    table: Array,
    *,
    item: int,
    pad: Operand | Array | None = None,
) -> None:
    """Launch the selection of slices by a table; OPENCL's form of ``tables_cpu.emit_take``.

    Args:
        low: Collects the plan's launches and constants.
        source_: The array.
        target: The result; ``shape`` with ``len(table)`` slices along the axis.
        shape: Sizes of the source.
        axis: The axis.
        table: For each slice of the result its index in the source, or -1 for the pad element.
        item: Bytes of an element.
        pad: The pad element, an array or operand of one element; None: zero bytes.

    Raises:
        Unsupported: An element has more than 8 bytes.
    """
    assert isinstance(low, ClLowering)
    if item not in _UNSIGNED:
        raise Unsupported(f"elements of {item} bytes taken along an axis")
    outer, inner = math.prod(shape[:axis]), math.prod(shape[axis + 1 :])
    held = low.weight("table", np.array, np.ascontiguousarray(table, np.int64))
    element: Place
    if isinstance(pad, Operand):
        element = pad
    else:
        element = low.weight("element", np.array, np.zeros(16, np.uint8) if pad is None else pad)
    count = outer * len(table) * inner
    words: list[Argument] = [count, as_unsigned(source_, item), as_unsigned(target, item), held]
    words += [as_unsigned(element, item), shape[axis], len(table), inner]
    source = _source(item, LEVELS=2)
    low.launch(source, "take", words, *line(low, count), bytes=2 * count * item)


@cl_primitive
def emit_take_last_axes(
    low: Lowering,
    source_: Operand | Scratch,
    target: Operand | Scratch,
    shape: Sequence[int],
    tables: Mapping[int, Array | Repeats],
    *,
    item: int,
) -> None:
    """Launch selections along the last two axes; OPENCL's ``tables_cpu.emit_take_last_axes``.

    Args:
        low: Collects the plan's launches and constants.
        source_: The array.
        target: The result.
        shape: Sizes of the source.
        tables: For the last or the last but one axis, the index in the source of each element of
            the result; an axis without a table is copied as it is.
        item: Bytes of an element.
    """
    axes = [axis for axis in (len(shape) - 2, len(shape) - 1) if axis in tables]
    listed = {axis: tables[axis] for axis in axes}
    indices = {a: t.table() if isinstance(t, Repeats) else t for a, t in listed.items()}
    axes.sort(key=lambda axis: len(indices[axis]) / shape[axis])  # shrink first, enlarge last
    for axis in axes:
        after = [*shape[:axis], len(indices[axis]), *shape[axis + 1 :]]
        memory = target if axis == axes[-1] else low.scratch(math.prod(after) * item)
        emit_take(low, source_, memory, shape, axis, indices[axis], item=item)
        source_, shape = memory, after


def _item(kernel: Kernel) -> int:
    variant: dict[str, Any] = dict(kernel.variant)
    return int(variant["item"])


@cl_kernel("subgraph.ops.movement.kernels", "trilu")
def trilu(low: ClLowering, kernel: Kernel, a: TriluArguments) -> None:
    """Launch Trilu."""
    source = _source(_item(kernel), LEVELS=2, UPPER=int(bool(dict(kernel.variant)["upper"])))
    total = a.all_rows * a.columns
    arguments = [total, a.x, a.y, a.rows, a.columns, a.diagonal]
    low.launch(source, "trilu", arguments, *line(low, total))


@cl_kernel("subgraph.ops.movement.kernels", "reverse_sequence")
def reverse_sequence(low: ClLowering, kernel: Kernel, a: ReverseSequenceArguments) -> None:
    """Launch ReverseSequence."""
    item = _item(kernel)
    count = a.batch * a.steps * a.inner
    steps = [a.batch_step // item, a.time_step // item]
    arguments = [count, a.x, a.y, a.lengths, a.batch, a.steps, a.inner, *steps]
    low.launch(_source(item, LEVELS=2), "reverse_sequence", arguments, *line(low, count))
