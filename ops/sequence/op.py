"""Optional values, for the reference: an optional is its content, or None.

onnx.reference wraps the content in a list, so that an optional tensor looks like a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from subgraph.errors import ShapeError
from subgraph.graph.graph import Node
from subgraph.operators.operator import reference


@reference("Optional")
def optional(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return the input, or nothing (None) without one."""
    return [inputs[0] if inputs else None]


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
