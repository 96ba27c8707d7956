"""ConvTranspose on the CPU device: a direct convolution for each phase of the strides.

Output ``o`` of one dimension sums ``x[i] * w[t]`` over the taps with ``i * stride + t * dilation =
o + pad``. The outputs ``o = phase + stride * q`` all use the same taps, and consecutive q use
consecutive inputs: each phase is a convolution of stride 1 that writes every stride-th pixel. With
few output channels a matrix product computes the contributions of all taps, and Col2Im sums them.
So do weights computed at run time, which are not packed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial

import attrs
import numpy as np

from subgraph.engine.codegen.tiling import MATRIX_DEPTH
from subgraph.engine.planner.constants import derived_operand
from subgraph.engine.planner.lowering import Lowering, Unsupported, lowering
from subgraph.engine.planner.operands import Argument, Operand
from subgraph.graph.graph import Node
from subgraph.graph.types import Array
from subgraph.ops.elementwise.cpu import temporary
from subgraph.ops.movement.geometry import (
    Geometry,
    auto_pad,
    blocked_vector,
    depthwise_weights,
    direct_weights,
    ints,
    merge,
    merged,
    triple,
)
from subgraph.ops.movement.layout_conversion import (
    blocked,
    blocked_target,
    convert_output,
    plain,
    widened,
)
from subgraph.ops.movement.packed_conv import ConvOutput, PackedConv
from subgraph.ops.shared.delegation import delegate, viewed
from subgraph.ops.shared.tile_planning import (
    FLOATS,
    Activation,
    Tiles,
    activation,
    product_tiles,
    tiles,
)
from subgraph.ops.unfold.cpu import emit_column_sums

from .bfloat16.cpu import emit_matrix_convolution, round_image
from .choice import has_matrix_tiles, stores_bfloat16
from .depthwise import emit_depthwise
from .direct import emit_direct

# Most combinations of phases; each is a step with its own weights, which take time to plan
# (estimate).
_MOST_PHASES = 4096


@attrs.frozen
class Phase:
    """One phase of one dimension, as a convolution of stride 1.

    Attributes:
        first: First output.
        count: Number of outputs.
        taps: Taps in the order of the inputs that they read; empty: the outputs are zero.
        dilation: Inputs from a tap to the next one; 1 with fewer than two taps.
        pad: Pads before the first input.
    """

    first: int
    count: int
    taps: tuple[int, ...]
    dilation: int
    pad: int


def phases(outputs: int, kernel: int, stride: int, dilation: int, pad: int) -> list[Phase]:
    """Return the phases of a dimension that have outputs.

    Args:
        outputs: Outputs along the dimension.
        kernel: Taps along the dimension.
        stride: Outputs from an input to the next one.
        dilation: Outputs from a tap to the next one.
        pad: Pads before, which cut off outputs.
    """
    found: list[Phase] = []
    for first in range(min(stride, outputs)):
        # The input that tap t reads, (first + pad - t * dilation) / stride, must be a whole number.
        taps = [t for t in range(kernel) if (first + pad - t * dilation) % stride == 0]
        taps.reverse()  # the last tap reads the first input
        start = (first + pad - taps[0] * dilation) // stride if taps else 0
        # One tap has dilation 1: kernels treat dilated rows differently.
        # The taps of a phase are stride / gcd apart, hence their inputs dilation / gcd.
        step = dilation // math.gcd(dilation, stride) if len(taps) > 1 else 1
        count = -(-(outputs - first) // stride)
        found.append(Phase(first, count, tuple(taps), step, -start))
    return found


def transpose_pads(node: Node, x: Operand, w: Operand, y: Operand) -> list[int]:
    """Return the pads before each spatial dimension of a ConvTranspose.

    With ``output_shape`` or ``auto_pad`` they follow from the sizes (ONNX ConvTranspose).

    Args:
        node: The node.
        x: Input, ``[N, C, *spatial]``.
        w: Weights, ``[C, M / group, *kernel]``.
        y: Output, ``[N, M, *spatial]``.
    """
    rank = x.rank - 2
    mode = auto_pad(node)
    if mode == "VALID":
        return [0] * rank
    if mode == "NOTSET" and "output_shape" not in node.attrs:
        return ints(node, "pads", 2 * rank, 0)[:rank]
    strides, dilations = ints(node, "strides", rank, 1), ints(node, "dilations", rank, 1)
    extra = ints(node, "output_padding", rank, 0)
    before: list[int] = []
    for axis in range(rank):
        reach = (w.shape[2 + axis] - 1) * dilations[axis] + 1
        full = strides[axis] * (x.shape[2 + axis] - 1) + extra[axis] + reach
        total = full - y.shape[2 + axis]
        # ONNX puts an odd pixel of padding behind the output for SAME_UPPER, and in front of it in
        # all other cases, also for ``output_shape`` with NOTSET.
        before.append(total // 2 if mode == "SAME_UPPER" else total - total // 2)
    return before


def _phase_weights(
    weight: Array,
    *,
    pack: Callable[[Array], Array],
    groups: int,
    parts: Sequence[Phase],
    kernel: tuple[int, int, int],
) -> Array:
    """Return the packed taps of one phase per axis of ``[I, O / groups, *kernel]``."""
    whole = _taps_of(weight, parts, kernel)
    inputs, outputs = weight.shape[:2]
    split = whole.reshape(groups, inputs // groups, *whole.shape[1:])
    return pack(split.swapaxes(1, 2).reshape(groups * outputs, -1, *whole.shape[2:]))


def _taps_of(weight: Array, parts: Sequence[Phase], kernel: tuple[int, int, int]) -> Array:
    """Return the taps of one phase per axis; a single zero tap along an axis without taps."""
    whole = weight.reshape(*weight.shape[:2], *kernel)
    for axis, phase in enumerate(parts):
        if phase.taps:
            whole = np.take(whole, phase.taps, 2 + axis)
        else:
            # The outputs of such a phase still need the bias and the activation. A kernel has at
            # least one tap, so that a tap of zeros computes them.
            whole = np.zeros_like(np.take(whole, [0], 2 + axis))
    return whole


@lowering("ConvTranspose", dtypes=FLOATS, layouts=("plain", "blocked", "bfloat16"))
def conv_transpose(node: Node, low: Lowering) -> None:
    """Lower ConvTranspose."""
    x, w, y, bias = low.input(0), low.input(1), low.output(), low.optional(2)
    if not y.size:
        return
    sizes = transposed_geometry(node, x, w, y)
    constant = w.constant and (bias is None or bias.constant)
    if not constant or math.prod(map(min, sizes.strides, sizes.target)) > _MOST_PHASES:
        _emit_columns(low, sizes, widened(low, x), w, bias)
        return
    of = tiles(x.dtype, low.block_lanes(x.dtype))
    per_axis = [
        phases(*numbers)
        for numbers in zip(
            sizes.target, sizes.kernel, sizes.strides, sizes.dilations, sizes.pads, strict=True
        )
    ]
    # The kernel `direct` has two loops over taps. A kernel row without dilation is a run of steps;
    # with dilation one loop is for its taps, and none is left for planes.
    if sizes.kernel[0] > 1 and any(p.dilation > 1 for p in per_axis[2]):
        raise Unsupported("a 3-D transposed convolution dilated along its last dimension")
    act = activation(node, of, low)
    if _multiplies_matrices(low, of, sizes, w):
        _emit_phases(low, product_tiles(of, low, w), sizes, per_axis, x, w, bias, act)
        return
    x = widened(low, x)
    # The sums of columns add the bias but have no activation. Their cost is that of a single group.
    alone = sizes.groups == 1 and act.kernel == 0 and not act.flags
    plain = x.layout == y.layout == "plain"
    if alone and x.size and _sums_taps(of, sizes, per_axis, plain=plain):
        _emit_columns(low, sizes, x, w, bias)
    else:
        _emit_phases(low, of, sizes, per_axis, x, w, bias, act)


def _multiplies_matrices(low: Lowering, of: Tiles, sizes: Geometry, w: Operand) -> bool:
    """Return whether a transposed convolution multiplies matrix tiles of bfloat16."""
    flat = sizes.source[0] == sizes.target[0] == sizes.kernel[0] == 1
    # The input is rounded in blocks of 32 channels, which must not cross groups.
    whole = sizes.groups == 1 or sizes.inputs % MATRIX_DEPTH == 0
    # With fewer output channels most of a panel would be zeros.
    return flat and whole and sizes.outputs >= of.lanes and has_matrix_tiles(low, of, sizes, w)


def transposed_geometry(node: Node, x: Operand, w: Operand, y: Operand) -> Geometry:
    """Return the sizes of a ConvTranspose, with the pads of its output."""
    rank, groups = x.rank - 2, int(node.attrs.get("group", 1))
    return Geometry(
        x.shape[0],
        groups,
        x.shape[1] // groups,
        w.shape[1],
        triple(x.shape[2:], 1),
        triple(y.shape[2:], 1),
        triple(w.shape[2:], 1),
        triple(ints(node, "strides", rank, 1), 1),
        triple(ints(node, "dilations", rank, 1), 1),
        triple(transpose_pads(node, x, w, y), 0),
    )


def _emit_phases(
    low: Lowering,
    of: Tiles,
    sizes: Geometry,
    per_axis: Sequence[Sequence[Phase]],
    x: Operand,
    w: Operand,
    bias: Operand | None,
    act: Activation,
) -> None:
    """Emit a convolution for each combination of phases.

    Args:
        low: Collects the plan's steps.
        of: The contraction tiles; with matrix tiles both operands are rounded to bfloat16.
        sizes: Sizes of the transposed convolution.
        per_axis: The phases of each dimension.
        x: The input.
        w: Weights, constant.
        bias: Bias, constant; None: none.
        act: The activation.
    """
    groups, together, target = sizes.groups, merged(sizes, of.lanes), sizes.target
    packed_bias: Argument = 0
    if bias is not None:
        packed_bias = low.weight(f"conv bias of {of.lanes}", blocked_vector(of), bias)
    source: Argument = blocked(low, of.lanes, x)
    emit: Callable[..., None] = emit_direct
    if of.operands:
        source, emit = round_image(low, of, sizes, source), emit_matrix_convolution
        if stores_bfloat16(low, low.output(), sizes.outputs):
            low.output().store_as("bfloat16")
    y = blocked_target(low, of.lanes, low.output())
    depthwise = groups > 1 and sizes.inputs == sizes.outputs == 1
    pack, packed_as = depthwise_weights(of), f"depthwise {of.lanes} groups {groups}"
    if not depthwise:
        pack = direct_weights(sizes, of, together, plain=False)
        packed_as = f"{of.nv}x{of.lanes} {of.packed_as} groups {groups}/{together}"
    for parts in itertools.product(*per_axis):
        d, h, width = parts
        g = attrs.evolve(
            sizes if depthwise else merge(sizes, together),
            target=(d.count, h.count, width.count),
            kernel=(max(len(d.taps), 1), max(len(h.taps), 1), max(len(width.taps), 1)),
            strides=(1, 1, 1),
            dilations=(d.dilation, h.dilation, width.dilation),
            pads=(d.pad, h.pad, width.pad),
        )
        first = (d.first * target[1] + h.first) * target[2] + width.first
        out = ConvOutput(y, 0, sizes.strides, first, target)
        make = partial(_phase_weights, pack=pack, groups=groups, parts=parts, kernel=sizes.kernel)
        recipe = f"conv transpose {packed_as} taps {d.taps} {h.taps} {width.taps}"
        weight = low.weight(recipe, make, w)
        conv = PackedConv(of, g, source, weight, packed_bias, out, act)
        if depthwise:
            emit_depthwise(low, conv)
        else:
            emit(low, conv, plain=False, flops=g.flops)
    convert_output(low, low.output(), y, keeps_zero=act.keeps_zero)


def _emit_columns(
    low: Lowering, sizes: Geometry, x: Operand, w: Operand, bias: Operand | None
) -> None:
    """Emit a matrix product in the plain layout and the sum of its columns (Col2Im)."""
    if not x.size or low.node.attrs.get("activation"):
        raise Unsupported("weights of a transposed convolution that are computed at run time")
    groups, pixels, y = sizes.groups, math.prod(sizes.source), low.output()
    # Col2Im sums the rows [output channel][tap] of the product of each image.
    transposed = _transposed_weights(low, w, groups)
    shape = (sizes.images, groups, sizes.outputs * sizes.taps, pixels)
    columns = temporary(low, x.dtype, shape)
    image = viewed(low, plain(low, x), (sizes.images, groups, sizes.inputs, pixels))
    delegate(low, "MatMul", [transposed, image], columns)
    target = y if y.layout == "plain" else temporary(low, y.dtype, y.shape)
    emit_column_sums(low, columns, target, sizes, bias)
    convert_output(low, y, target)


def _transposed_weights(low: Lowering, w: Operand, groups: int) -> Operand:
    """Return the weights as the left side of a product: [groups, outputs * taps, inputs]."""
    inputs, flat = w.shape[0] // groups, math.prod(w.shape[1:])
    if not w.constant:
        transposed = temporary(low, w.dtype, (groups, flat, inputs))
        grouped = viewed(low, w, (groups, inputs, flat))
        delegate(low, "Transpose", [grouped], transposed, perm=(0, 2, 1))
        return transposed

    def make(weight: Array) -> Array:
        return np.ascontiguousarray(weight.reshape(groups, inputs, flat).swapaxes(1, 2))

    weight = low.weight(f"conv transpose columns of {groups} groups", make, w)
    return derived_operand(f"{w.name}.transposed", w.dtype, (groups, flat, inputs), weight)


# Cost of adding one tap's contribution to an output, in products of a pixel's channel and a block:
# in the plain layout, and with conversions from and to the blocked one (estimates).
_PLAIN_SUM_COST, _SUM_COST = 0.7, 1.5


def _sums_taps(
    of: Tiles, sizes: Geometry, per_axis: Sequence[Sequence[Phase]], *, plain: bool
) -> bool:
    """Return whether a product for all taps and the sums of its columns cost clearly less."""
    products = sizes.outputs * sizes.taps
    each = _PLAIN_SUM_COST if plain else _SUM_COST
    # Products of a pixel and a block, and the sums, both for each input channel and input pixel.
    cost = -(-products // of.lanes) + products * each / max(sizes.inputs, 1)
    cost *= math.prod(sizes.source)
    # Products of a pixel and a block of weights in the convolutions of all phases.
    phased = -(-sizes.outputs // of.lanes) * math.prod(
        sum(p.count * max(len(p.taps), 1) for p in parts) for parts in per_axis
    )
    # The costs are estimates: the matrix product, with its scratch memory for all taps, must be
    # better by a fifth.
    return cost < 0.8 * phased
