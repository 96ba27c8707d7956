"""Regions whose inputs grow: caches of a request, to which a run appends in place.

An input that is a view of a buffer (`subgraph.graph.growing`) is passed with its buffer to another
form of the region. There a node Growing gives the input a layout with room, in which Concat,
TensorScatter and Attention write new positions behind the present ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from subgraph.graph.graph import Graph, Node, Value
from subgraph.graph.growing import claimed, extended
from subgraph.graph.types import Array, TensorType
from subgraph.operators.schema import INTERNAL_DOMAIN


def claimed_buffers(inputs: Sequence[Any]) -> dict[int, Array]:
    """Return the buffers in which inputs can grow, by position, each once, for this run alone."""
    found = {position: claimed(item) for position, item in enumerate(inputs)}
    return {position: buffer for position, buffer in found.items() if buffer is not None}


def release_buffers(
    inputs: Sequence[Any], buffers: Mapping[int, Array], results: Sequence[Any]
) -> None:
    """Let later runs extend the inputs whose buffers no result has.

    Args:
        inputs: The inputs of the run.
        buffers: What `claimed_buffers` returned for them.
        results: The results of the run; empty if it did not take place.
    """
    taken = {id(result.base) for result in results if isinstance(result, np.ndarray)}
    for position, buffer in buffers.items():
        if id(buffer.base) not in taken:
            extended(buffer, inputs[position].shape[-2])


def with_buffers(graph: Graph, positions: Sequence[int], *, overwrites: bool) -> Graph:
    """Return a copy of a region with a further input, a buffer, for each input that grows.

    Args:
        graph: The region.
        positions: The inputs.
        overwrites: Whether the present positions may be overwritten, not only new ones appended.
    """
    attrs = {"overwrites": int(overwrites)}
    graph = graph.clone()
    grown: dict[Value, Value] = {}
    buffers: list[Value] = []
    for position in positions:
        value = graph.inputs[position]
        buffer = Value(f"{value.name}.buffer")
        node = Node("Growing", [value, buffer], domain=INTERNAL_DOMAIN, version=1, attrs=attrs)
        node.outputs[0].type = value.type
        if isinstance(value.type, TensorType) and value.type.shape is not None:
            dims = value.type.shape
            buffer.type = TensorType(value.type.dtype, (*dims[:-2], None, dims[-1]))
        grown[value] = node.outputs[0]
        buffers.append(buffer)
    graph.inputs = (*graph.inputs, *buffers)
    graph.rewire(grown)
    return graph
