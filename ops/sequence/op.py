"""Optional values and sequences, for the reference: an optional is its content, or None.

onnx.reference wraps the content in a list, so that an optional tensor looks like a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from subgraph.errors import ShapeError
from subgraph.graph.graph import Node
from subgraph.operators.operator import reference
from subgraph.operators.reference import standard


@reference("Optional")
def optional(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return the input, or nothing (None) without one."""
    return [inputs[0] if inputs else None]


@reference("SequenceInsert")
def sequence_insert(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return the sequence with one more tensor, by default behind the last.

    Raises:
        ShapeError: the position lies outside [-n, n]; a list of Python takes every number.
    """
    count, position = len(inputs[0]), inputs[2] if len(inputs) > 2 else None
    at = count if position is None else int(np.asarray(position).reshape(-1)[0])
    if not -count <= at <= count:
        raise ShapeError(f"position is {at}, outside [-{count}, {count}] of {count} tensors")
    return standard(node, inputs)


@reference("OptionalHasElement")
def optional_has_element(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return whether there is a value."""
    return [np.array(bool(inputs) and inputs[0] is not None)]


@reference("OptionalGetElement")
def optional_get_element(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return the value.

    Raises:
        ShapeError: there is none.
    """
    if not inputs or inputs[0] is None:
        raise ShapeError(f"node {node.name!r} (OptionalGetElement): the optional is empty")
    return [inputs[0]]
