"""The pass "AddConvolutions": a sum of convolutions of one value becomes one convolution.

Networks that are trained with parallel branches are exported with them: RepVGG, MobileOne, RepViT,
FastViT and the detectors that use their blocks add a 3 x 3 convolution, a 1 x 1 convolution and the
scaled input itself. A convolution is linear in its weight, so that the smaller weights, and the
scale as a 1 x 1 weight with zeros beside its diagonal, are added to the largest one. (Source: Ding
et al., "RepVGG: Making VGG-style ConvNets Great Again", 2021, section 3.3.) The pass computes
nothing: the sum of the weights is a node on parameters, which the weight cache computes.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from subgraph.errors import ShapeError
from subgraph.graph.graph import Graph, Node, Value
from subgraph.operators.schema import INTERNAL_DOMAIN
from subgraph.ops.pool.windows import windows_of
from subgraph.passes.patterns import (
    FLOATS,
    Context,
    dtype_of,
    fusion_pass,
    is_op,
    is_per_channel,
    merge_sums,
    part_of,
    produced_by,
    reshaped,
    shape_of,
    weight_node,
)
from subgraph.passes.simplify.fold_scale import fold_scale


@fusion_pass("AddConvolutions", "transformer", "Conv")
def add_convolutions(graph: Graph) -> Graph:
    """Return ``graph``, or a copy in which convolutions whose results are added are one."""
    merged = merge_sums(graph, _sum, _made)
    # A normalization of the sum can be folded into the weight now.
    return graph if merged is graph else fold_scale(merged)


@attrs.frozen
class _Geometry:
    """The windows of a convolution, a number for each spatial axis.

    Attributes:
        channels: Number of channels of the result.
        group: Number of groups.
        kernel: Sizes of the kernel.
        strides: Strides.
        dilations: Distances between taps.
        begins: Padding before the image.
        ends: Padding behind the image.
    """

    channels: int
    group: int
    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    begins: tuple[int, ...]
    ends: tuple[int, ...]

    def attributes(self) -> dict[str, object]:
        """Return the attributes of the operator Conv."""
        return {
            "group": self.group,
            "kernel_shape": self.kernel,
            "strides": self.strides,
            "dilations": self.dilations,
            "pads": (*self.begins, *self.ends),
        }

    def offset(self, other: _Geometry) -> tuple[int, ...] | None:
        """Return the tap of this kernel at which the smaller kernel ``other`` begins, or None."""
        same = self.channels, self.group, self.strides
        if same != (other.channels, other.group, other.strides):
            return None
        found: list[int] = []
        for axis, (size, own) in enumerate(zip(other.kernel, self.kernel, strict=True)):
            step = self.dilations[axis] if own > 1 else 1
            tap, rest = divmod(self.begins[axis] - other.begins[axis], step)
            behind = self.ends[axis] - other.ends[axis]
            if rest or not 0 <= tap <= own - size or behind != (own - size - tap) * step:
                return None
            if size > 1 and other.dilations[axis] != step:
                return None
            found.append(tap)
        return tuple(found)


@attrs.frozen
class _Branch:
    """A convolution, or a scaled value.

    Attributes:
        x: The value.
        geometry: Windows of the convolution, those of a 1 x 1 one for a scaled value.
        weight: Weight of the convolution, or the factors, [channels]; None: the value itself.
        shift: Bias, [channels], or None.
    """

    x: Value
    geometry: _Geometry
    weight: Value | None
    shift: Value | None


def _sum(
    context: Context, sums: Mapping[Node, _Branch], node: Node, first: Value, second: Value
) -> _Branch | None:
    """Return the convolution that computes an addition; see `merge_sums`."""
    for value, other in ((first, second), (second, first)):
        convolution = _convolution(context, sums, node, value)
        if convolution is None:
            continue
        added = _convolution(context, sums, node, other)
        added = added or _scaled(context, node, other, convolution)
        merged = None if added is None else _merged(convolution, added)
        if merged is not None:
            return merged
    return None


def _made(node: Node, found: _Branch, replaced: Mapping[Value, Value]) -> Value:
    """Return the result of the convolution that replaces an addition."""
    inputs = (replaced.get(found.x, found.x), found.weight, found.shift)
    return part_of(node, "Conv", *inputs, version=11, **found.geometry.attributes())


def _convolution(
    context: Context, sums: Mapping[Node, _Branch], user: Node, value: Value
) -> _Branch | None:
    """Return a convolution, or a sum of some, whose result only ``user`` reads."""
    node = value.producer
    if node is None or context.sole_user(value) is not user or dtype_of(value) not in FLOATS:
        return None
    if node in sums or not is_op(node, "Conv"):
        return sums.get(node)
    x, weight, shift = (*node.inputs, None)[:3]
    shape = shape_of(weight)
    if x is None or weight is None or not context.is_weight(weight) or shape is None:
        return None
    if shift is not None and not (context.is_weight(shift) and shape_of(shift) == shape[:1]):
        return None
    kernel = tuple(dim for dim in shape[2:] if isinstance(dim, int))
    rank = len(shape) - 2
    if rank < 1 or len(kernel) != rank or not isinstance(shape[0], int):
        return None
    try:
        windows = windows_of(node, rank)
    except ShapeError:
        return None  # wrong attributes, which the planner reports
    if windows.auto != "NOTSET":
        return None
    begins, ends = zip(*windows.pads, strict=True)
    group = int(node.attrs.get("group", 1))
    geometry = _Geometry(shape[0], group, kernel, windows.strides, windows.dilations, begins, ends)
    return _Branch(x, geometry, weight, shift)


def _scaled(context: Context, user: Node, value: Value, convolution: _Branch) -> _Branch | None:
    """Return ``value`` as a scaled and shifted input of a convolution.

    Args:
        context: The graph.
        user: The addition, the only user of ``value``.
        value: One of its operands.
        convolution: The other operand.
    """
    x, of = convolution.x, convolution.geometry
    rank = 2 + len(of.kernel)
    weights: dict[str, Value] = {}
    for op_type in ("Add", "Mul"):
        node = produced_by(value, op_type)
        if node is None or context.sole_user(value) is not user:
            continue
        operands = [v for v in node.inputs if v is not None and context.is_weight(v)]
        if len(operands) != 1 or not is_per_channel(shape_of(operands[0]), of.channels, rank):
            return None
        other = context.other_operand(node, operands[0])
        if other is None:
            return None
        weights[op_type] = reshaped(operands[0], (of.channels,))
        user, value = node, other
    # Other convolutions add the unscaled input in their epilogue, at no cost.
    is_wanted = "Mul" in weights or of.group == of.channels
    if value is not x or not is_wanted or (shape_of(x) or (None,) * 2)[1] != of.channels:
        return None
    ones, zeros = (1,) * (rank - 2), (0,) * (rank - 2)
    geometry = _Geometry(of.channels, of.group, ones, ones, ones, zeros, zeros)
    return _Branch(x, geometry, weights.get("Mul"), weights.get("Add"))


def _merged(first: _Branch, second: _Branch) -> _Branch | None:
    """Return the convolution that computes the sum of two branches; None if there is none.

    Args:
        first: A convolution.
        second: Another one, or the input of the first one, scaled.
    """
    if first.x is not second.x:
        return None
    for large, small in ((first, second), (second, first)):
        offset = large.geometry.offset(small.geometry)
        if offset is None:
            continue
        weight = weight_node(
            "AddConvWeights",
            [large.weight, small.weight],
            shape_of(large.weight),
            INTERNAL_DOMAIN,
            {"offset": offset},
        )
        shifts = [each.shift for each in (large, small) if each.shift is not None]
        shift = shifts[0] if shifts else None
        if len(shifts) == 2:
            shift = weight_node("Add", shifts, (large.geometry.channels,))
        return _Branch(large.x, large.geometry, weight, shift)
    return None
