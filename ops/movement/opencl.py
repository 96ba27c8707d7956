"""Operators that move elements on OPENCL: the CPU's lowerings over OpenCL's kernels of copies."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from subgraph.dtypes import UNSIGNED
from subgraph.engine.planner.lowering import Lowering, Unsupported
from subgraph.engine.planner.operands import Argument, Operand, Scratch, Weight
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.graph.types import Array
from subgraph.opencl.lowering import ClLowering, cl_kernel, cl_primitive, cl_shared
from subgraph.opencl.runtime import ClSource
from subgraph.ops.shared.opencl_code import line, program, variant_of, word

from .arguments import FillArguments, ReverseSequenceArguments, TakeArguments, TriluArguments
from .copies_cpu import Place, StridedCopy
from .tables_cpu import emit_take, table_size
from .types import Repeats

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
    "Split",
    "Squeeze",
    "Tile",
    "Transpose",
    "Trilu",
    "Unsqueeze",
)


def as_unsigned(memory: Place, item: int) -> Place:
    """Return memory as an operand of unsigned integers of ``item`` bytes.

    Launches pass offsets in elements of an operand's dtype.
    """
    if isinstance(memory, Weight) or (isinstance(memory, Operand) and memory.itemsize == item):
        return memory
    offset = memory.offset if isinstance(memory, Operand) else 0
    name = memory.name if isinstance(memory, Operand) else "scratch"
    shape = (memory.nbytes // item,)
    return Operand(name, UNSIGNED[item], shape, storage=memory.storage, offset=offset)


def _program(item: int, levels: int = 2, **flags: int) -> ClSource:
    """Return the program for elements of ``item`` bytes, and copies over ``levels`` dimensions."""
    return program("movement/kernels", T=word(item), LEVELS=levels, **flags)


@cl_primitive
def emit_strided_copy(low: Lowering, copy: StridedCopy) -> None:
    """Launch a copy.

    Raises:
        Unsupported: It has more than 7 dimensions.
    """
    assert isinstance(low, ClLowering)
    dims, origin, goal, item = copy.dims, copy.origin, copy.goal, copy.item
    size, step, stride = dims[-1], origin[-1], goal[-1]
    if len(dims) > _MAX_DIMENSIONS:
        raise Unsupported(f"a copy over {len(dims)} dimensions that do not merge")
    # A program for few dimensions saves the divisions of the missing ones.
    levels = 2 if len(dims) <= 2 else 3 if len(dims) == 3 else _MAX_DIMENSIONS
    source, count = _program(item, levels), math.prod(dims)
    ends: list[Argument] = [
        as_unsigned(copy.source, item),
        copy.source_offset // item,
        as_unsigned(copy.target, item),
        copy.target_offset // item,
    ]
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
        low.launch(source, "copy_rows", words, (rows,), (1,), bytes=copy.moved)
        return
    words = [count, *_innermost_first(dims, levels, 1)[:-1]]
    words += [*_innermost_first(origin, levels, 0), *_innermost_first(goal, levels, 0), *ends]
    low.launch(source, "copy", words, *line(low, count), bytes=copy.moved)


def _innermost_first(
    values: Sequence[int], levels: int, fill: int, slots: int = _MAX_DIMENSIONS
) -> list[int]:
    """Return values of dimensions as the kernels expect: innermost first, the outermost last.

    ``fill`` stands for missing ones, up to ``slots`` values; kernels read ``levels`` of them.
    """
    padded = [fill] * (levels - len(values)) + list(values)
    inner = padded[:0:-1]
    return [*inner, *[fill] * (slots - 1 - len(inner)), padded[0]]


def _item(kernel: Kernel) -> int:
    """Return the bytes of a kernel's elements.

    Raises:
        Unsupported: An element has more than 8 bytes.
    """
    item = int(variant_of(kernel)["item"])
    if item not in UNSIGNED:
        raise Unsupported(f"{kernel.factory} with elements of {item} bytes")
    return item


@cl_kernel("subgraph.ops.movement.kernels", "fill")
def fill(low: ClLowering, kernel: Kernel, a: FillArguments) -> None:
    """Launch a fill with one value."""
    item = _item(kernel)
    words = [a.size, as_unsigned(a.target, item), as_unsigned(a.value, item)]
    low.launch(_program(item), "fill", words, *line(low, a.size))


@cl_kernel("subgraph.ops.movement.kernels", "take")
def take(low: ClLowering, kernel: Kernel, a: TakeArguments) -> None:
    """Launch the selection of slices by a table."""
    item, count = _item(kernel), a.outer * a.taken * a.inner
    words = [count, as_unsigned(a.x, item), as_unsigned(a.y, item), a.table]
    words += [as_unsigned(a.pad, item), a.axis_size, a.taken, a.inner]
    low.launch(_program(item), "take", words, *line(low, count))


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
    """Launch a selection along each of the last two axes; see ``tables_cpu``.

    Args:
        low: Collects the plan's launches and constants.
        source_: The array.
        target: The result.
        shape: Sizes of the source.
        tables: The table of each axis.
        item: Bytes of an element.
    """
    axes = [axis for axis in (len(shape) - 2, len(shape) - 1) if axis in tables]
    axes.sort(key=lambda axis: table_size(tables[axis]) / shape[axis])  # shrink first, enlarge last
    for axis in axes:
        table = tables[axis]
        after = [*shape[:axis], table_size(table), *shape[axis + 1 :]]
        memory = target if axis == axes[-1] else low.scratch(math.prod(after) * item)
        emit_take(low, source_, memory, shape, axis, table, item=item)
        source_, shape = memory, after


@cl_kernel("subgraph.ops.movement.kernels", "trilu")
def trilu(low: ClLowering, kernel: Kernel, a: TriluArguments) -> None:
    """Launch Trilu."""
    source = _program(_item(kernel), UPPER=int(variant_of(kernel)["upper"]))
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
    low.launch(_program(item), "reverse_sequence", arguments, *line(low, count))
