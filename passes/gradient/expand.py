"""The pass "ExpandGradient": Gradient nodes of ai.onnx.preview.training become ordinary nodes.

A Gradient node names values of the graph around it (``xs``, ``zs``, ``y``), so its meaning would
change with their names; ``sg.load`` runs the pass at once. The nodes between the named values are
copied if the node's inputs are other values; then reverse-mode differentiation visits them from
``y`` to ``xs`` (see `rules`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from subgraph.errors import ModelError, UnsupportedOpError
from subgraph.graph.graph import Graph, Node, Value, copy_nodes
from subgraph.graph.order import visit
from subgraph.transform.pass_manager import register_pass

from .rules import CONSTANT, Vjp, ones_like, op, zeros_like
from .windows import RULES

_DOMAIN = "ai.onnx.preview.training"


@register_pass("ExpandGradient")
def expand_gradient(graph: Graph) -> Graph:
    """Return a copy in which ordinary nodes compute the derivatives.

    Raises:
        ModelError: a name is not a value of the graph, or Gradient nodes depend on each other.
        UnsupportedOpError: an operator between the named values has no derivative rule.
    """
    graph = graph.clone()
    waiting = [node for node in graph.nodes if _is_gradient(node)]
    if not waiting:
        return graph
    named = {value.name: value for value in graph.values()}
    done: dict[Value, Value] = {}
    while waiting:
        ready = [node for node in waiting if not _waits(node, waiting, named, done)]
        if not ready:
            raise ModelError(
                f"Gradient nodes {[n.name for n in waiting][:4]} wait for each other's results"
            )
        for node in ready:
            for output, value in zip(node.outputs, _expanded(node, named, done), strict=False):
                done[output] = value
            waiting.remove(node)
    graph.rewire(done)
    graph.remove_unused()
    return graph


def _is_gradient(node: Node) -> bool:
    return node.op_type == "Gradient" and node.domain == _DOMAIN


def _names(node: Node, attribute: str) -> list[str]:
    held = node.attrs.get(attribute, ())
    return [str(held)] if isinstance(held, (str, bytes)) else [str(name) for name in held]


def _find(node: Node, name: str, named: dict[str, Value], done: dict[Value, Value]) -> Value:
    """Return the value of a name.

    Args:
        node: The Gradient node, for the message.
        name: The name.
        named: The graph's values by name.
        done: Replacements of the outputs of Gradient nodes that were expanded before.

    Raises:
        ModelError: no value has the name.
    """
    value = named.get(name)
    if value is None:
        raise ModelError(f"node {node.name!r} (Gradient): the graph has no value named {name!r}")
    # A name may be that of another Gradient node's output: derivatives of derivatives.
    return done.get(value, value)


def _waits(
    node: Node, waiting: Sequence[Node], named: dict[str, Value], done: dict[Value, Value]
) -> bool:
    """Return whether ``y`` of a Gradient node depends on another one that is not expanded yet."""
    target = _find(node, _names(node, "y")[0], named, done)
    between = _between(target, ())
    return any(other in between for other in waiting)


def _between(target: Value, stops: Iterable[Value]) -> list[Node]:
    """Return the nodes between ``stops`` and ``target``, in topological order."""
    stop = set(stops)

    def needed(node: Node) -> Iterator[Node]:
        return (v.producer for v in node.sources if v not in stop and v.producer is not None)

    order: list[Node] = []
    if target.producer is not None and target not in stop:
        visit(target.producer, needed, {}, order)
    return order


def _expanded(node: Node, named: dict[str, Value], done: dict[Value, Value]) -> list[Value]:
    """Return the derivatives that replace the outputs of a Gradient node; see `_find`."""
    names = _names(node, "xs")
    wanted = [_find(node, name, named, done) for name in (*names, *_names(node, "zs"))]
    target = _find(node, _names(node, "y")[0], named, done)
    inputs = [done.get(v, v) if v is not None else None for v in node.inputs]
    if len(inputs) != len(wanted) or None in inputs:
        raise ModelError(
            f"node {node.name!r} (Gradient): {len(inputs)} inputs for {len(wanted)} names"
        )
    at = {old: new for old, new in zip(wanted, inputs, strict=True) if new is not None}
    steps = _between(target, wanted)
    # The standard lets the inputs be other values than the named ones: the derivative is then taken
    # at these values, by a copy of the graph between them.
    if any(old is not new for old, new in at.items()):
        steps, target = _copied(steps, target, at)
    xs = [at[value] for value in wanted[: len(names)]]
    return _backwards(node, steps, target, xs)


def _copied(
    steps: Sequence[Node], target: Value, at: dict[Value, Value]
) -> tuple[list[Node], Value]:
    """Return copies of nodes over other values of the variables, and the copied target.

    Args:
        steps: The nodes, in topological order.
        target: The value to differentiate.
        at: The new value of each variable.
    """
    values = dict(at)
    for step in steps:
        for source in step.sources:
            values.setdefault(source, source)  # values from outside, as constants, stay the same
    for step in steps:
        for output in step.outputs:
            values[output] = Value("", output.type)
    return [_unnamed(copy) for copy in copy_nodes(steps, values)], values[target]


def _unnamed(node: Node) -> Node:
    node.name = ""
    return node


def _backwards(
    gradient: Node, steps: Sequence[Node], target: Value, xs: Sequence[Value]
) -> list[Value]:
    """Return the derivative of the target's sum with respect to each variable.

    Args:
        gradient: The Gradient node, for messages.
        steps: The nodes from the variables to the target, in topological order.
        target: The value to differentiate.
        xs: The variables.

    Raises:
        UnsupportedOpError: an operator has no derivative rule.
    """
    active = set(xs)
    for step in steps:
        # Nodes that do not depend on the variables need no rule, and none is built for them.
        if step.op_type not in CONSTANT and any(value in active for value in step.sources):
            active.update(step.outputs)
    grads: dict[Value, Value] = {target: ones_like(target)}
    # When a node is visited, all its users have added their derivatives, since the nodes are in
    # topological order.
    for step in reversed(steps):
        arrived = [grads.get(output) for output in step.outputs]
        if not any(output in active for output in step.outputs) or not any(arrived):
            continue
        rule = RULES.get(step.op_type) if not step.domain else None
        if rule is None or step.captures:
            raise UnsupportedOpError(
                f"node {gradient.name!r} (Gradient): the derivative of {step.op_type} "
                f"(node {step.name!r}) is not defined; known: {', '.join(sorted(RULES))}"
            )
        found = rule(Vjp(step, arrived))
        for value, grad in zip(step.inputs, found, strict=False):
            if value is None or grad is None or value not in active:
                continue
            known = grads.get(value)
            # A value that several nodes read gets the sum of their derivatives.
            grads[value] = grad if known is None else op("Add", known, grad)
    return [grads[x] if x in grads else zeros_like(x) for x in xs]
