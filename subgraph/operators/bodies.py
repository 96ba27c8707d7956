"""Checks of the bodies of If, Loop, Scan and SequenceMap: numbers of inputs and outputs.

Type inference, passes, plans and the executor rely on these numbers and do not check them again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from subgraph.errors import ModelError, ShapeError
from subgraph.graph.graph import Graph, Node
from subgraph.operators.inference import check_operands, check_values, scanned_inputs


def check_bodies(node: Node) -> None:
    """Check the bodies of a node of the standard against its inputs, outputs and attributes.

    Raises:
        ModelError: a number of inputs, outputs or axes is wrong; the message has both numbers.
    """
    check = None if node.domain else _CHECKS.get(node.op_type)
    if check is not None and node.bodies:
        check(node)


def check_node(node: Node) -> None:
    """Check the bodies of a node, and the types of its inputs as far as they are known.

    Raises:
        ModelError: the bodies do not fit.
        ShapeError: the inputs do not fit.
    """
    check_bodies(node)
    try:
        check_operands(node, [None if v is None else v.type for v in node.inputs])
    except ShapeError as error:
        raise _named(error, node) from error


def check_input_values(node: Node, values: Sequence[Any]) -> None:
    """Check the input values of a node, like `check_values`; an error names the node.

    Raises:
        ShapeError: the values do not fit.
    """
    try:
        check_values(node, values)
    except ShapeError as error:
        raise _named(error, node) from error


def _named(error: ShapeError, node: Node) -> ShapeError:
    return ShapeError(f"node {node.name!r} ({node.op_type}): {error}")


def captures_of(node: Node, first: int = 0) -> dict[str, slice]:
    """Return for each attribute that is a body where its captures are among the node's.

    Args:
        node: The node.
        first: Position of the node's first capture.
    """
    found: dict[str, slice] = {}
    for name, value in node.attrs.items():
        if isinstance(value, Graph):
            # A node lists the captures of its bodies one after the other, in the order of the
            # attributes.
            end = first + len(value.captures)
            found[name] = slice(first, end)
            first = end
    return found


def _require(node: Node, what: str, found: int, wanted: int) -> None:
    if found != wanted:
        raise ModelError(
            f"node {node.name!r} ({node.op_type}): it has {found} {what}, {wanted} are needed"
        )


def _check_if(node: Node) -> None:
    _require(node, "bodies", len(node.bodies), 2)
    _require(node, "inputs", len(node.inputs), 1)
    for body in node.bodies:
        _require(node, f"inputs of body {body.name!r}", len(body.inputs), 0)
        _require(node, f"outputs of body {body.name!r}", len(body.outputs), len(node.outputs))


def _check_loop(node: Node) -> None:
    body = node.bodies[0]
    if len(node.inputs) < 2:
        raise ModelError(f"node {node.name!r} (Loop): inputs M and cond may be empty, not missing")
    _require(node, "inputs of its body", len(body.inputs), len(node.inputs))
    # A body's outputs: the condition, then the carried values, then the scan outputs.
    _require(node, "outputs of its body", len(body.outputs), 1 + len(node.outputs))
    # ONNX: the first two inputs of a Loop are the trip count and the condition; the others are
    # carried, and each carried value is an output.
    if len(node.outputs) < len(node.inputs) - 2:
        raise ModelError(
            f"node {node.name!r} (Loop): {len(node.inputs) - 2} values are carried, but it has "
            f"{len(node.outputs)} outputs"
        )


def _check_scan(node: Node) -> None:
    body = node.bodies[0]
    given = len(node.inputs) - int(node.version == 8)  # the first input of opset 8: lengths
    scans = scanned_inputs(node, given)
    states = given - scans
    _require(node, "inputs of its body", len(body.inputs), given)
    _require(node, "outputs of its body", len(body.outputs), len(node.outputs))
    results = len(body.outputs) - states
    if results < 0:
        raise ModelError(
            f"node {node.name!r} (Scan): {states} states, but {len(body.outputs)} outputs"
        )
    counts = {"directions": scans, "scan_input_axes": scans, "scan_input_directions": scans}
    counts |= {"scan_output_axes": results, "scan_output_directions": results}
    for name, count in counts.items():
        numbers = node.attrs.get(name)
        if numbers:
            _require(node, name, len(numbers), count)
            if name.endswith("directions") and not set(numbers) <= {0, 1}:
                raise ModelError(f"node {node.name!r} (Scan): {name} {numbers}; each is 0 or 1")


def _check_map(node: Node) -> None:
    body = node.bodies[0]
    _require(node, "inputs of its body", len(body.inputs), len(node.inputs))
    _require(node, "outputs of its body", len(body.outputs), len(node.outputs))


_CHECKS = {"If": _check_if, "Loop": _check_loop, "Scan": _check_scan, "SequenceMap": _check_map}
