"""Checks of what the ``compute`` of a user's operator returns.

The operators of Subgraph keep the contract, which their tests check, and need no check in each run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeGuard

import numpy as np

from subgraph.errors import DeviceError, ShapeError
from subgraph.graph.graph import Node
from subgraph.graph.result_arrays import is_array, is_list, read_only
from subgraph.graph.types import TensorType, dtype_of
from subgraph.operators.operator import Operator, Reference
from subgraph.operators.schema import Schema


def is_foreign(operator: Operator) -> bool:
    """Return whether an operator is a user's, with a schema and a ``compute`` of its own."""
    return isinstance(operator.schema, Schema) and operator.body is None


def call_foreign(
    operator: Operator, compute: Reference, node: Node, inputs: Sequence[Any]
) -> Sequence[Any]:
    """Return the checked results of a user's ``compute``, which gets its inputs read-only.

    Args:
        operator: The operator.
        compute: Its ``compute``.
        node: The node.
        inputs: As for ``compute``.

    Raises:
        DeviceError: it returned anything but one value of the right type for each output.
    """
    answer: Any = compute(node, [read_only(item) for item in inputs])
    if not is_list(answer):
        raise _error(node, f"a {type(answer).__name__}", "return a list, one item for each output")
    results: Sequence[Any] = answer
    if len(results) < len(node.outputs):
        wanted = f"the node has {len(node.outputs)} outputs"
        raise _error(node, f"{len(results)} results", wanted)
    for position, result in enumerate(results[: len(node.outputs)]):
        # Without ``infer`` the type is what a file declares, which may be wrong.
        type_ = node.outputs[position].type if operator.infer is not None else None
        if type_ is None or isinstance(type_, TensorType):
            _check(node, position, result, type_)
    return results


def _check(node: Node, position: int, result: Any, type_: TensorType | None) -> None:
    if type_ is None and (result is None or is_list(result) or isinstance(result, dict)):
        return  # an optional, a sequence or a map, as far as is known
    array: Any = np.asarray(result) if is_scalar(result) else result
    place = f"for output {position}"
    if not is_array(array):
        wanted = "an array" if type_ is None else str(type_)
        raise _error(node, f"a {type(result).__name__} {place}", f"return {wanted}")
    try:
        found = TensorType(dtype_of(array), array.shape)
    except ShapeError as error:
        raise _error(node, f"an array of {array.dtype} {place}", str(error)) from error
    # A run may have other sizes than the node was typed for, but no other dtype or rank.
    if type_ is None:
        return
    if found.dtype != type_.dtype or type_.rank not in (None, found.rank):
        raise _error(node, f"{found} {place}", f"its infer said {type_}")


def is_scalar(value: object) -> TypeGuard[Any]:
    """Return whether a value is a scalar of NumPy."""
    return isinstance(value, np.generic)


def _error(node: Node, got: str, wanted: str) -> DeviceError:
    name = f"{node.domain}.{node.op_type}" if node.domain else node.op_type
    error = DeviceError(f"node {node.name!r}: compute of {name} returned {got}; {wanted}")
    error.lost = False
    return error
