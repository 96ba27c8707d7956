"""Views and operators that move elements."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from subgraph.graph.graph import Node
from subgraph.operators.batch_axes import (
    Batch,
    BatchAxis,
    BatchCall,
    elementwise,
    except_axes,
    first_input,
    reshaped,
)
from subgraph.operators.operator import declare
from subgraph.operators.requirements import any_tensor, any_value
from subgraph.operators.schema import INTERNAL_DOMAIN
from subgraph.operators.shape_values import slice_ends
from subgraph.ops.elementwise.op import first_type
from subgraph.ops.shared.strides import normal_axis

from . import operands, reference, types


def keeps_order(node: Node) -> bool:
    """Return whether a Transpose states an order of the axes that is the one they have."""
    perm = list(node.attrs.get("perm", ()))
    return bool(perm) and perm == sorted(perm)


def may_train(node: Node) -> bool:
    """Return whether a Dropout is in training mode, or ``training_mode`` is not a constant."""
    if node.version and node.version < 7:
        return not node.attrs.get("is_test", 0)
    if len(node.inputs) < 3 or node.inputs[2] is None:
        return False
    mode = node.inputs[2].producer
    # A value that is not known before the run may be true.
    if mode is None or mode.op_type != "Constant" or "value" not in mode.attrs:
        return True
    return bool(np.asarray(mode.attrs["value"]).any())


# The least end of a slice that stands for the end of the axis, as ONNX recommends.
_TO_THE_END = 2**31 - 1


def transpose_batch(call: BatchCall) -> Sequence[Batch]:
    """The batch moves with its axis."""
    batch = call.axis_of(0)
    rank = len(call.shapes[0])
    perm = call.node.attrs.get("perm") or range(rank)[::-1]
    return [None if batch is None else batch.at([axis % rank for axis in perm].index(batch.axis))]


def squeeze_batch(call: BatchCall) -> Sequence[Batch]:
    """The elements stay in their order; without axes a batch of 1 would lose its axis."""
    return reshaped(call) if call.integers(1, "axes") else [None]


def concat_batch(call: BatchCall) -> Sequence[Batch]:
    """All inputs have the batch; in the axis of the Concat they are parts outside of it."""
    found = [batch for batch in call.inputs if isinstance(batch, BatchAxis)]
    axis = normal_axis(int(call.node.attrs.get("axis", 1)), len(call.shapes[0]))
    first = found[0]
    if len(found) < len(call.inputs):
        return [None]
    if first.axis != axis:
        return [first if len(set(found)) == 1 else None]
    if len({(batch.axis, batch.inner) for batch in found}) > 1:
        return [None]
    return [BatchAxis(axis, sum(batch.outer for batch in found), first.inner)]


def _part(call: BatchCall, batch: BatchAxis, start: int, size: int) -> Batch:
    """Return the batch of consecutive elements of the batch axis, if they are whole batches.

    Args:
        call: The node.
        batch: The batch axis.
        start: The first element.
        size: The number of elements.
    """
    whole = call.rows * batch.inner
    if start % whole or size % whole:
        return None
    return BatchAxis(batch.axis, size // whole, batch.inner)


def slice_batch(call: BatchCall) -> Sequence[Batch]:
    """Slices of other axes keep the batch; of its own axis whole batches may be selected."""
    batch = call.axis_of(0)
    starts, ends = call.integers(1, "starts"), call.integers(2, "ends")
    axes, steps = call.integers(3, "axes"), call.integers(4, "steps")
    if batch is None or starts is None or ends is None or axes is None or steps is None:
        return [None]
    rank = len(call.shapes[0])
    found: Batch = batch
    for k, axis in enumerate(axes or range(len(starts))):
        start, end = starts[k], ends[k]
        of_rows = [number != 0 and number % call.rows == 0 for number in (start, end)]
        if axis % rank != batch.axis:
            if any(of_rows):
                return [None]  # another size may be more or less than the number of rows
            continue
        if (steps and steps[k] != 1) or (start and not of_rows[0]):
            return [None]
        if end < _TO_THE_END and not of_rows[1]:
            return [None]  # a number of elements, whatever the number of rows
        begin, stop = slice_ends(call.shapes[0][batch.axis], start, end, 1)
        found = _part(call, batch, begin, stop - begin)
    return [found]


def split_batch(call: BatchCall) -> Sequence[Batch]:
    """Parts of other axes keep the batch; its own axis may be split into whole batches."""
    batch = call.axis_of(0)
    if batch is None or not call.only(0):
        return call.everywhere(None)
    axis = normal_axis(int(call.node.attrs.get("axis", 0)), len(call.shapes[0]))
    if axis != batch.axis:
        return call.everywhere(batch)
    found: list[Batch] = []
    start = 0
    for shape in call.results:
        found.append(_part(call, batch, start, shape[axis]))
        start += shape[axis]
    return found


def expand_batch(call: BatchCall) -> Sequence[Batch]:
    """The input is repeated along axes, without a batch of its own also along the result's."""
    if call.axis_of(0) is not None:
        return elementwise(call)
    return [call.filled(0)]


def tile_batch(call: BatchCall) -> Sequence[Batch]:
    """Repetitions of the batch axis are outside of the batch."""
    if len(call.node.inputs) > 2:
        return [None]  # version 1
    batch, repeats = call.axis_of(0), call.integers(1, "repeats")
    if repeats is None:
        return [None]
    if batch is not None:
        return [BatchAxis(batch.axis, batch.outer * repeats[batch.axis], batch.inner)]
    found = call.filled(0)
    if not isinstance(found, BatchAxis):
        return [found]
    times = repeats[found.axis] // call.rows
    return [BatchAxis(found.axis, times, call.shapes[0][found.axis])]


def pad_batch(call: BatchCall) -> Sequence[Batch]:
    """All axes but the batch may be padded."""
    batch = call.axis_of(0)
    name = "paddings" if "paddings" in call.node.attrs else "pads"
    pads, axes = call.integers(1, name), call.integers(3, "axes")
    if batch is None or pads is None or axes is None or not call.only(0):
        return [None]
    rank = len(call.shapes[0])
    axes = axes or list(range(rank))
    widths = zip(axes, pads, pads[len(axes) :], strict=False)
    touched = any(axis % rank == batch.axis and (a or b) for axis, a, b in widths)
    return [None if touched else batch]


def reverse_sequence_batch(call: BatchCall) -> Sequence[Batch]:
    """Sequences are reversed along the axis of time; if they are rows, so are their lengths."""
    batch, lengths = call.axis_of(0), call.axis_of(1)
    time, rows = (int(call.node.attrs.get(*each)) for each in (("time_axis", 0), ("batch_axis", 1)))
    if batch is None or batch.axis == time % len(call.shapes[0]):
        return [None]
    fits = (lengths is None) != (batch.axis == rows) and lengths in (None, batch.at(0))
    return [batch if fits else None]


def _last_two(call: BatchCall) -> Sequence[int]:
    return (-2, -1)


_of_matrices = except_axes(_last_two)


def filled_batch(call: BatchCall) -> Sequence[Batch]:
    """All elements of the result are equal."""
    return [call.filled(0)]


# The operators of this family, each in all its versions.
declare("CenterCropPad", requires=operands.center_crop_pad_operands, by_body=True, grows=True)
declare(
    "Concat",
    requires=operands.concat_operands,
    infer=types.concat,
    compute=reference.concat,
    batch=concat_batch,
)
declare(
    "Constant",
    requires=operands.constant_operands,
    infer=types.constant,
    compute=reference.constant,
    speculatable=True,
)
declare(
    "ConstantOfShape",
    requires=operands.constant_of_shape_operands,
    infer=types.constant_of_shape,
    compute=reference.constant_of_shape,
    light=True,
    grows=True,
    shape_at=0,
    batch=filled_batch,
)
declare(
    "Expand",
    requires=operands.expand_operands,
    infer=types.expand,
    compute=reference.expand,
    light=True,
    grows=True,
    shape_at=1,
    batch=expand_batch,
)
declare("EyeLike", requires=operands.eye_like_operands, grows=True)
declare(
    "Flatten",
    requires=operands.flatten_operands,
    infer=types.flatten,
    compute=reference.flatten,
    view=True,
    batch=reshaped,
)
declare(
    "Growing",
    domain=INTERNAL_DOMAIN,
    requires=operands.growing_operands,
    infer=first_type,
    compute=reference.growing,
)
declare(
    "Identity",
    requires=any_value,
    infer=first_type,
    view=True,
    speculatable=True,
    batch=reshaped,
)
declare(
    "Pad",
    requires=operands.pad_operands,
    infer=types.pad,
    compute=reference.pad,
    grows=True,
    sized_by=(1, 3),
    batch=pad_batch,
)
declare(
    "Range",
    requires=operands.range_operands,
    infer=types.range_,
    compute=reference.range_,
    light=True,
    grows=True,
    sized_by=(0, 1, 2),
)
declare(
    "Reshape",
    requires=operands.reshape_operands,
    infer=types.reshape,
    compute=reference.reshape,
    view=True,
    light=True,
    speculatable=True,
    shape_at=1,
    batch=reshaped,
)
declare(
    "ReverseSequence",
    requires=operands.reverse_sequence_operands,
    infer=first_type,
    batch=reverse_sequence_batch,
)
declare(
    "Shape",
    requires=any_value,
    infer=types.shape,
    compute=reference.shape,
    by_type=True,
)
declare("Size", requires=any_tensor, infer=types.size, compute=reference.size, by_type=True)
declare(
    "Slice",
    requires=operands.slice_operands,
    infer=types.slice_,
    compute=reference.sliced,
    light=True,
    speculatable=True,
    sized_by=(1, 2, 3, 4),
    batch=slice_batch,
)
declare(
    "Split",
    requires=operands.split_operands,
    infer=types.split,
    compute=reference.split,
    sized_by=(1,),
    batch=split_batch,
)
declare(
    "Squeeze",
    requires=operands.squeeze_operands,
    infer=types.squeeze,
    compute=reference.squeeze,
    view=True,
    speculatable=True,
    sized_by=(1,),
    batch=squeeze_batch,
)
declare(
    "Tile",
    requires=operands.tile_operands,
    infer=types.tile,
    compute=reference.tile,
    grows=True,
    shape_at=1,
    batch=tile_batch,
)
declare(
    "Transpose",
    requires=operands.transpose_operands,
    infer=types.transpose,
    compute=reference.transpose,
    view=keeps_order,
    speculatable=True,
    batch=transpose_batch,
)
declare(
    "Trilu",
    requires=operands.trilu_operands,
    infer=first_type,
    compute=reference.trilu,
    batch=_of_matrices,
)
declare(
    "Unsqueeze",
    requires=operands.unsqueeze_operands,
    infer=types.unsqueeze,
    compute=reference.unsqueeze,
    view=True,
    speculatable=True,
    shape_at=1,
    batch=reshaped,
)
declare("BitCast", requires=operands.bit_cast_operands)
declare(
    "Dropout",
    requires=operands.dropout_operands,
    infer=types.dropout,
    compute=reference.dropout,
    random=may_train,
    batch=first_input,
)
