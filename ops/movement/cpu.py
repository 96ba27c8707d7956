"""Operators that move elements or only change shapes, on the CPU device: views and copies.

An operator that keeps the order of elements is an alias without a step; most others are one strided
copy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from subgraph.engine.planner.layout_arguments import ReorderArguments
from subgraph.engine.planner.lowering import (
    Lowering,
    Unsupported,
    ValueNeeded,
    lowering,
)
from subgraph.engine.planner.operands import Operand
from subgraph.engine.planner.views import (
    MAX_RUNS,
    View,
    expanded,
    in_blocks,
    is_in_blocks,
    reshaped,
    runs,
)
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.graph.graph import Node
from subgraph.graph.symbolic import is_symbolic, larger, smaller
from subgraph.graph.types import Array, numpy_dtype
from subgraph.operators.operator import operator_of
from subgraph.operators.schema import INTERNAL_DOMAIN, is_before
from subgraph.operators.shape_values import has_symbolic, slice_ends
from subgraph.ops.checks.cpu import emit_range_check
from subgraph.ops.elementwise.cpu import emit_expression, source
from subgraph.ops.elementwise.expressions import Expression
from subgraph.ops.shared.strides import contiguous, normal_axis
from subgraph.partition.constants import constant_array

from .arguments import (
    ReverseSequenceArguments,
    SequenceArguments,
    TriluArguments,
)
from .copies_cpu import (
    MIN_BYTES_PER_THREAD,
    UNIT_BYTES,
    emit_channels,
    emit_copy,
    emit_fill,
    is_contiguous,
)
from .layout_conversion import first_order, last_order, read_in_blocks, reads_view
from .types import whole_numbers

_ITEMS = (1, 2, 4, 8, 16)  # bytes of the elements that kernels move
_MOST_READERS = 16  # nodes behind an Expand that are searched (estimate)


def known(low: Lowering, index: int) -> Array:
    """Return the content of an input on which the plan depends.

    Raises:
        ValueNeeded: The plan does not know it yet.
    """
    operand = low.input(index)
    if operand.known is None:
        raise ValueNeeded(index)
    return operand.known


def known_ints(low: Lowering, index: int, attribute: str) -> list[int] | None:
    """Return integers that are an attribute in old versions of an operator and now an input.

    Args:
        low: The node's lowering.
        index: Position of the input.
        attribute: Name of the attribute, if there is no input.

    Returns:
        The integers, None if the node has neither.

    Raises:
        ValueNeeded: The plan does not know the input's content yet.
    """
    operand = low.optional(index)
    if operand is not None:
        return whole_numbers(known(low, index))
    value = low.node.attrs.get(attribute)
    if value is None:
        return None
    return [int(v) for v in np.asarray(value).reshape(-1)]


def element_bytes(operand: Operand) -> int:
    """Return the bytes of an element.

    Raises:
        Unsupported: Elements are strings.
    """
    if operand.dtype == "string" or operand.itemsize not in _ITEMS:
        raise Unsupported(f"elements of dtype {operand.dtype} cannot be moved")
    return operand.itemsize


def emit_view(
    low: Lowering, strides: Sequence[int], offset: int = 0, output: Operand | None = None
) -> None:
    """Emit an output as input 0 read with other strides: an alias if contiguous, else a copy.

    Args:
        low: Collects the plan's steps and aliases.
        strides: Elements of the input between neighbours along each dimension of the output in
            memory.
        offset: Element of the input that is the first of the output.
        output: The output; None: output 0.
    """
    x, y = low.input(0), output or low.output()
    item, shape = element_bytes(x), y.memory_shape
    if y.size == 0:
        return
    if is_contiguous(shape, strides):
        low.alias(y, x, offset * item)
        return
    emit_copy(low, x, y, shape, strides, contiguous(shape), item=item, from_offset=offset)


@lowering("BitCast", "Flatten")
@lowering("Identity", "Reshape", "Squeeze", "Unsqueeze", layouts=("plain", "blocked", "strided"))
def view(node: Node, low: Lowering) -> None:
    """Lower operators that change only the shape, or the dtype: an alias.

    A change of the spatial dimensions leaves blocks of channels as they are.
    """
    x, y = low.input(0), low.output()
    if x.layout == "strided":
        if not _alias_view(low, y, x, reshaped(x.view, y.shape)):
            raise Unsupported(f"no view of {x.shape} has the shape {y.shape}")
        return
    if x.layout != y.layout or (x.layout == "blocked" and x.shape[:2] != y.shape[:2]):
        raise Unsupported(f"{node.op_type} of blocks of channels that changes batch or channels")
    low.alias(y, x)


def _alias_view(low: Lowering, y: Operand, x: Operand, view: View | None) -> bool:
    """Make an output a view of the memory of an input, if kernels can also copy the view.

    Args:
        low: The lowering.
        y: The output.
        x: The input.
        view: Where the elements of the output are; None: there is no such view.

    Returns:
        Whether the output is a view.
    """
    joined = [] if view is None else runs(view)
    if view is None or not joined or len(joined) > MAX_RUNS or joined[-1][1] != 1 or not y.size:
        return False
    low.alias(y, x)
    y.layout, y.view = "strided", view
    return True


@lowering("Expand", layouts=("plain", "strided"))
def expand(node: Node, low: Lowering) -> None:
    """Lower Expand; heads of keys that are repeated for an attention are a view.

    The shape is read even if the output's type is known, so that one that does not fit is an error.
    """
    x, y = low.input(0), low.output()
    known(low, 1)
    if x.layout == "plain" and x.size == y.size:
        low.alias(y, x)
        return
    repeats_heads = low.views and x.rank > 2 and _read_by_attention(node)
    if repeats_heads and _alias_view(low, y, x, expanded(x.parts, y.shape)):
        return
    if x.layout != "plain":
        raise Unsupported("Expand of a view that is no attention's operand")
    repeat(low, x, y)


def _read_by_attention(node: Node) -> bool:
    """Return whether all readers of the output, behind changes of its shape, are attentions."""
    behind = [node.outputs[0]]
    for value in behind:  # which grows
        if not value.uses or node.graph is None or node.graph.is_output(value):
            return False
        for user in value.uses:
            if user.op_type in ("Reshape", "Squeeze", "Unsqueeze"):
                behind.append(user.outputs[0])
            elif "Attention" in user.op_type:
                if value not in user.inputs[1:3]:
                    return False
            elif not operator_of(user).by_type:
                return False
        if len(behind) > _MOST_READERS:
            return False
    return True


@lowering("Growing", domain=INTERNAL_DOMAIN)
def growing(_node: Node, low: Lowering) -> None:
    """Lower Growing: its output is the first positions of the buffer."""
    buffer, y = low.input(1), low.output()
    assert buffer.storage is not None, "it is an input"
    y.grow_in(buffer.storage, buffer.shape[-2])


@lowering("Dropout")
def dropout(node: Node, low: Lowering) -> None:
    """Lower Dropout without training: an alias, and a mask of ones."""
    training = low.optional(2)
    if training is not None and (training.known is None or bool(training.known.any())):
        raise Unsupported("Dropout may be in training mode")
    # Before opset 7 the attribute is_test chose inference, and its default of 0 means training.
    if is_before(node, 7) and not node.attrs.get("is_test", 0):
        raise Unsupported("Dropout may be in training mode")
    low.alias(low.output(), low.input(0))
    if len(low.outputs) > 1:
        mask = low.output(1)
        low.set_constant(mask, np.ones(mask.shape, numpy_dtype(mask.dtype)))


@lowering("Constant")
def constant(node: Node, low: Lowering) -> None:
    """Lower Constant: the plan knows its value."""
    value = constant_array(node)
    if value is None:
        raise Unsupported("Constant of strings or a sparse tensor")
    low.set_constant(low.output(), value)


@lowering("Shape")
def shape(node: Node, low: Lowering) -> None:
    """Lower Shape: the plan knows its value."""
    dims = low.input(0).shape[node.attrs.get("start", 0) : node.attrs.get("end")]
    low.set_constant(low.output(), np.array(dims, np.int64))


@lowering("Size")
def size(node: Node, low: Lowering) -> None:
    """Lower Size: the plan knows its value."""
    low.set_constant(low.output(), np.array(low.input(0).size, np.int64))


@lowering("ConstantOfShape")
def constant_of_shape(node: Node, low: Lowering) -> None:
    """Lower ConstantOfShape: a value of the plan if it is small, else a fill."""
    y = low.output()
    value = np.asarray(node.attrs.get("value", np.zeros(1, np.float32))).reshape(-1)[:1]
    if not is_symbolic(y.size) and y.size <= 1024:
        low.set_constant(y, np.full(y.shape, value[0], numpy_dtype(y.dtype)))
    else:
        element_bytes(y)
        emit_fill(low, y, y.size, value)


@lowering("EyeLike")
def eye_like(node: Node, low: Lowering) -> None:
    """Lower EyeLike: the plan knows its value."""
    y = low.output()
    dtype = numpy_dtype(y.dtype)
    rows, columns = y.shape
    diagonal = np.eye(rows, columns, int(node.attrs.get("k", 0)))
    low.set_constant(y, diagonal.astype(dtype))


@lowering("Range")
def range_(node: Node, low: Lowering) -> None:
    """Lower Range: a value of the plan, or a step if the plan is symbolic."""
    start, _, delta = (known(low, k) for k in range(3))
    y = low.output()
    if is_symbolic(y.size) or has_symbolic(start) or has_symbolic(delta):
        block = UNIT_BYTES // y.itemsize
        kernel = Kernel("subgraph.ops.movement.kernels", "sequence", dtype=y.dtype)
        arguments = SequenceArguments(
            target=y, size=y.size, block=block, start=low.input(0), delta=low.input(2)
        )
        low.emit(kernel, arguments, -(-y.size // block), grain=1, bytes=y.nbytes)
        return
    dtype = numpy_dtype(y.dtype)
    # Integers wrap around and floats overflow silently in the kernel as well.
    with np.errstate(all="ignore"):
        low.set_constant(y, (start[()] + np.arange(y.size, dtype=dtype) * delta[()]).astype(dtype))


@lowering("Transpose", layouts=("plain", "blocked", "strided"), makes_blocks=read_in_blocks)
def transpose(node: Node, low: Lowering) -> None:
    """Lower Transpose.

    Between blocks of channels and channels in the last axis it copies whole vectors.
    """
    x, y = low.input(0), low.output()
    order = tuple(axis % x.rank for axis in node.attrs.get("perm") or range(x.rank)[::-1])
    last, first = last_order(x.rank), first_order(x.rank)
    if x.layout == "strided":
        lanes = low.float_block
        if order != first or not is_in_blocks(x.view, x.shape, lanes):
            raise Unsupported("Transpose of a view that is no image in blocks to channels first")
        low.alias(y, x)
        y.layout, y.lanes = "blocked", lanes
    elif x.layout == "blocked":
        if order != last:
            raise Unsupported("Transpose of blocks of channels to another order than channels last")
        if reads_view(low, y, x.lanes):
            low.alias(y, x)
            y.layout, y.view = "strided", in_blocks(y.shape, x.lanes)
            return
        y.store_as("plain")
        _emit_channels_last(low, "to_channels_last", x, x, y)
    elif y.layout == "blocked":
        if order != first:
            raise Unsupported("Transpose to blocks of channels from other than channels last")
        _emit_channels_last(low, "from_channels_last", y, x, y)
    else:
        steps = contiguous(x.shape)
        emit_view(low, [steps[axis] for axis in order])


def _emit_channels_last(
    low: Lowering, kernel: str, blocked: Operand, source: Operand, target: Operand
) -> None:
    """Emit a kernel between channels last and blocks of channels, the layout of ``blocked``."""
    if blocked.size == 0:
        return
    batch, channels, *spatial = blocked.shape
    pixels = math.prod(spatial)
    part = smaller(pixels, larger(1, UNIT_BYTES // (channels * blocked.itemsize)))
    parts = -(-pixels // part)
    size = source.nbytes + target.nbytes
    low.emit(
        Kernel(
            "subgraph.ops.movement.reorder_kernels",
            kernel,
            dtype=blocked.dtype,
            lanes=blocked.lanes,
        ),
        ReorderArguments(
            source=source,
            target=target,
            channels=channels,
            pixels=pixels,
            blocks=blocked.blocks,
            part=part,
            parts=parts,
        ),
        batch * parts,
        grain=larger(1, MIN_BYTES_PER_THREAD // (part * channels * blocked.itemsize)),
        bytes=size,
    )


@lowering("Slice", layouts=("plain", "blocked"))
def slice_(node: Node, low: Lowering) -> None:
    """Lower Slice; steps may be negative."""
    x, y = low.input(0), low.output()
    starts, ends = known_ints(low, 1, "starts"), known_ints(low, 2, "ends")
    if starts is None or ends is None:
        raise Unsupported("Slice without starts or ends")
    axes = known_ints(low, 3, "axes") or list(range(len(starts)))
    axes = [normal_axis(axis, x.rank) for axis in axes]
    steps = known_ints(low, 4, "steps") or [1] * len(starts)
    firsts = {
        axis: slice_ends(x.shape[axis], start, end, step)[0]
        for start, end, axis, step in zip(starts, ends, axes, steps, strict=True)
    }
    _emit_part(low, y, firsts, dict(zip(axes, steps, strict=True)))


def _emit_part(
    low: Lowering, y: Operand, firsts: Mapping[int, int], steps: Mapping[int, int]
) -> None:
    """Emit an output as a part of input 0: an alias if it is contiguous there, else a copy.

    Args:
        low: Collects the plan's steps and aliases.
        y: The output, in the layout of the input.
        firsts: Index of the first element along each axis that is not read from its beginning.
        steps: Distance of the elements along each axis whose elements are not neighbours.

    Raises:
        Unsupported: The layout is blocked, and no kernel copies this part.
    """
    x = low.input(0)
    if y.size == 0:
        return
    firsts, lanes = dict(firsts), x.lanes
    if lanes > 1:
        first, end = firsts.get(1, 0), firsts.get(1, 0) + y.shape[1]
        if steps.get(1, 1) != 1 or 2 * y.shape[1] < lanes:
            raise Unsupported(f"{low.node.op_type} of few channels, or in steps, in blocks")
        # Padding lanes of the output would be other channels of the input.
        if first % lanes or (end % lanes and end != x.shape[1]):
            whole = (y.shape[0], *y.shape[2:]) == (x.shape[0], *x.shape[2:])
            if not whole or any(step != 1 for step in steps.values()):
                raise Unsupported(f"{low.node.op_type} of parts of blocks along several axes")
            emit_channels(low, x, y, y.shape[1], source_first=first)
            return
        firsts[1] = first // lanes
    strides = list(contiguous(x.memory_shape))
    offset = sum(first * strides[axis] for axis, first in firsts.items())
    for axis, step in steps.items():
        strides[axis] *= step
    emit_view(low, strides, offset, y)


def repeat(low: Lowering, x: Operand, y: Operand) -> None:
    """Emit the step that broadcasts ``x`` to ``y``.

    Args:
        low: Collects the plan's steps.
        x: The source; its shape broadcasts to that of ``y``.
        y: The target, of the same dtype.

    Raises:
        Unsupported: No kernel moves this dtype.
    """
    e = Expression()
    emit_expression(low, e, [source(x)], [(e.input(x.dtype), y)])


@lowering("Tile")
def tile(node: Node, low: Lowering) -> None:
    """Lower Tile: a copy from a source whose repeated dimensions have stride 0."""
    x, y = low.input(0), low.output()
    item = element_bytes(x)
    if x.size == y.size:
        low.alias(y, x)
        return
    counts = [b // a if a else 0 for a, b in zip(x.shape, y.shape, strict=True)]
    dims = [d for pair in zip(counts, x.shape, strict=True) for d in pair]
    steps = [s for step in contiguous(x.shape) for s in (0, step)]
    emit_copy(low, x, y, dims, steps, contiguous(dims), item=item)


@lowering("Concat", layouts=("plain", "blocked", "bfloat16", "strided"))
def concat(node: Node, low: Lowering) -> None:
    """Lower Concat: operands are computed in place in the result if they are contiguous there.

    Of a growing first operand the result is the longer form, to which the others are copied.
    """
    y = low.output()
    axis = normal_axis(int(node.attrs.get("axis", 1)), y.rank)
    operands = [x for x in low.inputs if x is not None]
    if y.layout == "blocked" and all(x.layout == "bfloat16" for x in operands):
        y.store_as("bfloat16")
    item = element_bytes(y)
    grows = axis == y.rank - 2 and low.extend(operands[0], y)
    if any(x.layout != ("plain" if grows else y.layout) for x in operands[grows:]):
        raise Unsupported("Concat of operands in different layouts")
    target = contiguous(y.memory_shape)
    if len(operands) == 1:
        low.alias(y, operands[0])
        return
    joined = math.prod(y.memory_shape[:axis]) == 1
    lanes = y.lanes if axis == 1 else 1
    if lanes > 1 and any(x.shape[1] % lanes for x in operands[:-1]) and not read_in_blocks(node):
        raise Unsupported(f"Concat of channels that are no multiples of {lanes}, read in plain")
    at = operands[0].shape[axis] if grows else 0
    for x in operands[grows:]:
        first, at = at, at + x.shape[axis]
        # Padding lanes behind the channels of an operand would lie between channels of the result.
        if lanes > 1 and (first % lanes or (at % lanes and at != y.shape[axis])):
            if x.size:
                emit_channels(low, x, y, x.shape[1], target_first=first)
            continue
        shape = x.memory_shape
        offset = first // lanes * target[axis]
        # Without dimensions before the axis, an operand's producer can write it into the result.
        if not joined or not low.place(x, y, offset * item):
            emit_copy(low, x, y, shape, contiguous(shape), target, item=item, to_offset=offset)


@lowering("Split", layouts=("plain", "blocked"))
def split(node: Node, low: Lowering) -> None:
    """Lower Split: aliases if there are no dimensions before the axis, else copies."""
    axis = normal_axis(int(node.attrs.get("axis", 0)), low.input(0).rank)
    at = 0
    for y in low.outputs:
        _emit_part(low, y, {axis: at}, {})
        at += y.shape[axis]


@lowering("Trilu")
def trilu(node: Node, low: Lowering) -> None:
    """Lower Trilu, which keeps the upper or lower triangle of matrices."""
    x, y = low.input(0), low.output()
    diagonal = int(known(low, 1).reshape(-1)[0]) if low.optional(1) else 0
    item = element_bytes(x)
    if item == 16:
        raise Unsupported("Trilu of complex numbers")
    rows, columns = x.shape[-2:]
    # ONNX allows any int64 as the diagonal. Beyond the matrix all of them keep the same triangle,
    # and a small one cannot overflow when a row number is added.
    diagonal = max(min(diagonal, columns + rows), -rows - columns)
    kernel = Kernel(
        "subgraph.ops.movement.kernels", "trilu", item=item, upper=bool(node.attrs.get("upper", 1))
    )
    count = math.prod(x.shape[:-1]) if x.size else 0
    arguments = TriluArguments(
        x=x, y=y, rows=rows, columns=columns, diagonal=diagonal, all_rows=count
    )
    low.emit(kernel, arguments, count, grain=max(1, 16384 // max(columns, 1)), bytes=2 * x.nbytes)


@lowering("ReverseSequence")
def reverse_sequence(node: Node, low: Lowering) -> None:
    """Lower ReverseSequence, which reverses the first elements of each sequence of a batch."""
    x, lengths, y = low.input(0), low.input(1), low.output()
    batch, time = int(node.attrs.get("batch_axis", 1)), int(node.attrs.get("time_axis", 0))
    emit_range_check(low, lengths, "sequence_lens", 0, x.shape[time])
    item = element_bytes(x)
    steps = contiguous(x.shape)
    arguments = ReverseSequenceArguments(
        x=x,
        y=y,
        lengths=lengths,
        batch=x.shape[batch],
        steps=x.shape[time],
        inner=math.prod(x.shape[2:]),
        batch_step=steps[batch] * item,
        time_step=steps[time] * item,
    )
    kernel = Kernel("subgraph.ops.movement.kernels", "reverse_sequence", item=item)
    low.emit(
        kernel,
        arguments,
        x.shape[batch] if x.size else 0,
        bytes=2 * x.nbytes,
    )
