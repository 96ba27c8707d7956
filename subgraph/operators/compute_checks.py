"""Checks of what the ``compute`` of a user's operator returns.

The operators of Subgraph keep the contract, which their tests check, and need no check in each run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeGuard

import numpy as np

from subgraph.errors import DeviceError, ShapeError, SubgraphError, described
from subgraph.graph.graph import Node
from subgraph.graph.result_arrays import is_array, is_list, read_only
from subgraph.graph.types import TensorType, ValueType, dtype_of
from subgraph.operators.op_checks import expected_result
from subgraph.operators.operator import Operator, Reference, largest_outputs


def call_foreign(
    operator: Operator,
    compute: Reference,
    node: Node,
    inputs: Sequence[Any],
    types: Sequence[ValueType | None],
) -> Sequence[Any]:
    """Return the checked results of a user's ``compute``, which gets its inputs read-only.

    Args:
        operator: The operator.
        compute: Its ``compute``.
        node: The node.
        inputs: As for ``compute``.
        types: The types that the operator's ``infer`` says for these inputs; () if it has none.

    Raises:
        DeviceError: it returned anything but one value of the right type for each output.
        ShapeError: it raised an error.
    """
    try:
        answer: Any = compute(node, [read_only(item) for item in inputs])
    except (SubgraphError, MemoryError, NotImplementedError):
        raise
    except Exception as error:
        raise ShapeError(f"compute raised {described(error)}") from error
    if not is_list(answer):
        raise _error(node, f"a {type(answer).__name__}", "return a list, one item for each output")
    results: Sequence[Any] = answer
    # A node may leave out optional outputs, which ``compute`` returns none the less.
    if not len(node.outputs) <= len(results) <= largest_outputs(operator, node):
        wanted = f"the node has {len(node.outputs)} outputs"
        raise _error(node, f"{len(results)} results", wanted)
    for position, result in enumerate(results[: len(node.outputs)]):
        # Without ``infer`` the type is what a file declares, which may be wrong.
        type_ = types[position] if types else None
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
    check = expected_result(type_)
    if check is not None and (found.dtype != check[0].dtype or not check[2](array.shape)):
        raise _error(node, f"{found} {place}", f"its infer said {type_}")


def is_scalar(value: object) -> TypeGuard[Any]:
    """Return whether a value is a scalar of NumPy."""
    return isinstance(value, np.generic)


def _error(node: Node, got: str, wanted: str) -> DeviceError:
    name = f"{node.domain}.{node.op_type}" if node.domain else node.op_type
    error = DeviceError(f"node {node.name!r}: compute of {name} returned {got}; {wanted}")
    error.lost = False
    return error
