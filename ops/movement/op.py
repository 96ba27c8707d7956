"""Views and operators that move elements."""

from __future__ import annotations

import numpy as np

from subgraph.graph.graph import Node
from subgraph.operators.operator import declare
from subgraph.ops.elementwise.op import first_type

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


# The operators of this family, each in all its versions.
declare("CenterCropPad", requires=operands.center_crop_pad_operands, by_body=True, grows=True)
declare("Concat", requires=operands.concat_operands, infer=types.concat, compute=reference.concat)
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
)
declare(
    "Expand",
    requires=operands.expand_operands,
    infer=types.expand,
    compute=reference.expand,
    light=True,
    grows=True,
    shape_at=1,
)
declare("EyeLike", requires=operands.eye_like_operands, grows=True)
declare(
    "Flatten",
    requires=operands.flatten_operands,
    infer=types.flatten,
    compute=reference.flatten,
    view=True,
)
declare(
    "Identity", requires=operands.identity_operands, infer=first_type, view=True, speculatable=True
)
declare(
    "Pad",
    requires=operands.pad_operands,
    infer=types.pad,
    compute=reference.pad,
    grows=True,
    sized_by=(1, 3),
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
)
declare("ReverseSequence", requires=operands.reverse_sequence_operands, infer=first_type)
declare(
    "Shape",
    requires=operands.shape_operands,
    infer=types.shape,
    compute=reference.shape,
    by_type=True,
)
declare(
    "Size", requires=operands.size_operands, infer=types.size, compute=reference.size, by_type=True
)
declare(
    "Slice",
    requires=operands.slice_operands,
    infer=types.slice_,
    compute=reference.sliced,
    light=True,
    speculatable=True,
    sized_by=(1, 2, 3, 4),
)
declare(
    "Split",
    requires=operands.split_operands,
    infer=types.split,
    compute=reference.split,
    sized_by=(1,),
)
declare(
    "Squeeze",
    requires=operands.squeeze_operands,
    infer=types.squeeze,
    compute=reference.squeeze,
    view=True,
    speculatable=True,
    sized_by=(1,),
)
declare(
    "Tile",
    requires=operands.tile_operands,
    infer=types.tile,
    compute=reference.tile,
    grows=True,
    shape_at=1,
)
declare(
    "Transpose",
    requires=operands.transpose_operands,
    infer=types.transpose,
    compute=reference.transpose,
    view=keeps_order,
    speculatable=True,
)
declare("Trilu", requires=operands.trilu_operands, infer=first_type, compute=reference.trilu)
declare(
    "Unsqueeze",
    requires=operands.unsqueeze_operands,
    infer=types.unsqueeze,
    compute=reference.unsqueeze,
    view=True,
    speculatable=True,
    shape_at=1,
)
declare("BitCast", requires=operands.bit_cast_operands)
declare(
    "Dropout",
    requires=operands.dropout_operands,
    infer=types.dropout,
    compute=reference.dropout,
    random=may_train,
)
