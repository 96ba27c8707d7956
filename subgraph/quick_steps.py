"""Nodes between regions that only hand values on, for the default executor: no checks to pay for.

Each gives what the reference gives. What does not fit goes to the reference, which says why.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from subgraph.graph import Node
from subgraph.reference import evaluate
from subgraph.types import TensorType

Run = Callable[[Sequence[Any]], Sequence[Any]]


def quick_step(node: Node) -> Run | None:
    """Return what runs ``node`` at once; None where the reference has to."""
    make = None if node.domain else _QUICK.get(node.op_type)
    return None if make is None else make(node)


def _is_result(node: Node) -> bool:
    """Return whether the graph gives away what the node makes; it must be an array of its own."""
    return node.graph is None or any(value in node.graph.outputs for value in node.outputs)


def _constant(node: Node) -> Run | None:
    if _is_result(node):
        return None
    kept: list[Sequence[Any]] = []

    def run(inputs: Sequence[Any]) -> Sequence[Any]:
        if not kept:
            kept.append(evaluate(node, inputs))
        return kept[0]

    return run


def _identity(node: Node) -> Run | None:
    return None if _is_result(node) else list


def _cast(node: Node) -> Run | None:
    """A Cast to what the value is already, which exporters write around conditions."""
    source, made = node.inputs[0], node.outputs[0]
    if source is None or not isinstance(source.type, TensorType):
        return None
    same = isinstance(made.type, TensorType) and made.type.dtype == source.type.dtype
    return _identity(node) if same and source.type.dtype != "string" else None


def _empty(node: Node) -> Run:
    return lambda inputs: [[]]


def _construct(node: Node) -> Run:
    return lambda inputs: [list(inputs)]


def _length(node: Node) -> Run:
    return lambda inputs: [np.array(len(inputs[0]), np.int64)]


def _at(node: Node) -> Run | None:
    return None if _is_result(node) else partial(_item, node)


def _item(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    items, at = inputs[0], int(inputs[1])
    return [items[at]] if -len(items) <= at < len(items) else evaluate(node, inputs)


def _insert(node: Node) -> Run:
    def run(inputs: Sequence[Any]) -> Sequence[Any]:
        if len(inputs) == 2 or inputs[2] is None:
            return [[*inputs[0], inputs[1]]]
        return evaluate(node, inputs)

    return run


_QUICK: dict[str, Callable[[Node], Run | None]] = {
    "Cast": _cast,
    "Constant": _constant,
    "Identity": _identity,
    "SequenceAt": _at,
    "SequenceConstruct": _construct,
    "SequenceEmpty": _empty,
    "SequenceInsert": _insert,
    "SequenceLength": _length,
}
