"""Quantized convolutions that add a residual: sums of two quantized images, one of a convolution.

The convolution is a FusedQLinearConv or QLinearConv, and the sum, with its conversions and an
activation, a FusedElementwise. Both become one FusedQLinearConv with the two as its inner graph,
which a device runs one after the other if its kernels cannot add to the convolution. A partition
does not join nodes that are subgraphs themselves, so that this is a rewriting of its own.
"""

from __future__ import annotations

from subgraph.graph.graph import Graph, Node, Value, copy_nodes
from subgraph.graph.parameters import Parameter
from subgraph.operators.schema import INTERNAL_DOMAIN
from subgraph.passes.patterns import Context, Match, dtype_of, fused_node, is_op, same_shape

from .quantized import Conversion, chain_after, dequantize_before, zero_point

_INPUTS = 10  # inputs of a FusedQLinearConv without a residual
# Between these scales no intermediate result of a quotient is subnormal or infinite.
_LEAST_SCALE, _MOST_SCALE = 2.0**-40, 2.0**40


def add_residuals(graph: Graph, guards: dict[Parameter, int]) -> Graph:
    """Return ``graph``, or a copy in which quantized convolutions add residuals.

    Args:
        graph: The graph, whose elementwise operators are fused.
        guards: Filled with the parameters whose content the result depends on, and the version
            that was read of each.
    """
    if not any(_takes_residual(node) for node in graph.nodes):
        return graph
    graph = graph.clone()
    context, replaced = Context(graph), dict[Value, Value]()
    for node in graph.nodes:
        context.begin()
        match = _quantized_sum(context, node)
        # A convolution may be matched with one of its users only, and a sum with one convolution.
        if match is not None:
            replaced[node.outputs[0]] = _fused(match, replaced)
            guards.update((parameter, parameter.version) for parameter in context.reads)
    graph.rewire(replaced)
    return graph


def _fused(match: Match, replaced: dict[Value, Value]) -> Value:
    """Return the result of the fused node of a match, whose inputs have been replaced."""
    copies: dict[Value, Value] = {}
    nodes = copy_nodes(match.nodes, copies)
    outer = {copy.name: value for value, copy in copies.items() if copy.producer is None}
    inputs = [copy for copy in copies.values() if copy.producer is None]
    node = fused_node(Graph(inputs, nodes[-1].outputs, nodes=nodes), match)
    found = [None if value is None else outer[value.name] for value in node.inputs]
    node.inputs = tuple(None if value is None else replaced.get(value, value) for value in found)
    return node.outputs[0]


def _quantized_sum(context: Context, node: Node) -> Match | None:
    """Match a FusedElementwise that adds a quantized image to that of a quantized convolution."""
    body = node.subgraph
    if node.domain != INTERNAL_DOMAIN or node.op_type != "FusedElementwise" or body is None:
        return None
    inside = Context(body)
    adds = [each for each in body.nodes if is_op(each, "Add")]
    chain = chain_after(inside, adds[0]) if len(adds) == 1 else None
    if chain is None or chain.end.node.outputs[0] is not body.outputs[0]:
        return None
    operands = [dequantize_before(inside, value) for value in adds[0].inputs]
    parts = [each for each in operands if each is not None and each.source.producer is None]
    if len(parts) < 2 or len(body.nodes) != 3 + len(chain.nodes):
        return None
    outer = dict(zip(body.inputs, node.inputs, strict=True))
    own = _convolution(context, parts, outer)
    if own is None:
        return None
    residual = parts[0] if own is parts[1] else parts[1]
    conv, added = outer[own.source], outer[residual.source]
    scales = [inside.scalar(each.scale) for each in (own, residual, chain.end)]
    images = (conv, added, node.outputs[0])
    if conv is None or conv.producer is None or len({dtype_of(value) for value in images}) != 1:
        return None
    if not same_shape(conv, added) or not same_shape(conv, node.outputs[0]):
        return None
    if any(scale is None or not _LEAST_SCALE <= scale <= _MOST_SCALE for scale in scales):
        return None
    # The zero points of the convolution and of its dequantization must be the same.
    zero = zero_point(context, (*conv.producer.inputs, None, None)[7])
    if zero is None or zero != zero_point(inside, own.zero):
        return None
    context.reads += inside.reads
    end = chain.end
    further = [residual.source, residual.scale, residual.zero, own.scale, end.scale, end.zero]
    inputs = [*conv.producer.inputs, *[None] * (_INPUTS - len(conv.producer.inputs))]
    inputs += [None if value is None else outer[value] for value in further]
    bounds = {f"sum_{name}": bound for name, bound in chain.bounds.items()}
    return Match(
        (conv.producer, node),
        "FusedQLinearConv",
        tuple(inputs),
        {**conv.producer.attrs, **bounds},
        arity=len(inputs),
    )


def _convolution(
    context: Context, parts: list[Conversion], outer: dict[Value, Value | None]
) -> Conversion | None:
    """Return the operand that a convolution computes for this sum alone; the last of two."""
    found: dict[Node, Conversion] = {}
    for each in parts:
        value = outer[each.source]
        conv = None if value is None else value.producer
        if value is None or conv is None or len(value.uses) != 1 or value in context.outputs:
            continue
        if _takes_residual(conv):
            found[conv] = each
    return found[context.ordered(found)[-1]] if found else None


def _takes_residual(node: Node) -> bool:
    """Return whether a node is a quantized convolution to which a residual can be added."""
    fused = node.op_type == "FusedQLinearConv" and node.domain == INTERNAL_DOMAIN
    if not fused and not is_op(node, "QLinearConv"):
        return False
    quantizes = len(node.inputs) > 6 and node.inputs[6] is not None
    return quantizes and len(node.inputs) <= _INPUTS and int(node.attrs.get("group", 1)) == 1
