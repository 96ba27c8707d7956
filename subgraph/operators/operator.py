"""Operators: type inference, reference corrections, and operators of a user's own.

For the standard's operators a family file in ``ops/`` may add a fast shape rule (`shape_rule`) and
a corrected reference (`reference`); everything else comes from the onnx package. A custom operator
is one `Operator` object with all of it, registered by ``core.add_extension``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import attrs

from subgraph.errors import ModelError, ShapeError, SubgraphError, UnsupportedOpError
from subgraph.graph.graph import Node
from subgraph.graph.types import Array, TensorType, ValueType
from subgraph.operators.op_checks import output_types, region_types
from subgraph.operators.requirements import REQUIREMENTS, check_operands, made_rule
from subgraph.operators.schema import CUSTOM_SCHEMAS, FAMILIES, Schema
from subgraph.system.registry import Registry, defined_at

# (node, types of its inputs, arrays of the inputs whose value is known) -> types of its outputs
ShapeRule = Callable[
    [Node, Sequence[ValueType | None], Sequence[Array | None]], Sequence[ValueType | None]
]
# (node, input values) -> output values; None for an omitted input
Reference = Callable[[Node, Sequence[Any]], Sequence[Any]]
_F = TypeVar("_F", bound=Callable[..., Any])


SHAPE_RULES: Registry[ShapeRule] = Registry("shape rule", UnsupportedOpError, FAMILIES)
REFERENCES: Registry[Reference] = Registry("reference", UnsupportedOpError, FAMILIES)


@attrs.frozen
class Operator:
    """A custom operator: everything that Subgraph must know to load, check and run it.

    Attributes:
        schema: Names and numbers of inputs and outputs, attributes.
        compute: ``(node, inputs) -> outputs``: the operator in NumPy, its definition.
        infer: ``(node, input types, known input values) -> output types``; None leaves the
            types of the outputs unknown.
        kernels: What devices run it by, by the device's name: see `Device.add_kernel`. For CPU and
            OPENCL a function ``(node, low)`` that lowers a node to steps. Every other device
            leaves the node to ``compute``.
        requires: ``(node, *operands) -> None``: raises ShapeError for operands that do not fit
            (see `subgraph.operators.requirements.requires`), before any kernel sees them.
    """

    schema: Schema
    compute: Reference
    infer: ShapeRule | None = None
    kernels: Mapping[str, Callable[..., Any]] = attrs.field(factory=dict[str, Callable[..., Any]])
    requires: Callable[..., None] | None = None

    @property
    def key(self) -> str:
        """Name in the registries."""
        return operator_key(self.schema.op_type, self.schema.domain)


def operator_key(op_type: str, domain: str = "") -> str:
    """Return the name under which an operator stands in the registries."""
    return f"{domain}::{op_type}" if domain else op_type


def register_operator(operator: Operator) -> None:
    """Make a custom operator known in the process.

    Raises:
        UnsupportedOpError: another owner has the name.
    """
    owner = defined_at(operator.compute)
    REFERENCES.register(operator.key, operator.compute, owner)
    if operator.infer is not None:
        SHAPE_RULES.register(operator.key, operator.infer, owner)
    if operator.requires is not None:
        REQUIREMENTS.register(operator.key, made_rule(operator.requires), owner)
    CUSTOM_SCHEMAS[operator.schema.domain, operator.schema.op_type] = operator.schema


def forget_operator(operator: Operator) -> None:
    """Undo `register_operator`."""
    for registry in (REFERENCES, SHAPE_RULES, REQUIREMENTS):
        registry.unregister(operator.key)
    CUSTOM_SCHEMAS.pop((operator.schema.domain, operator.schema.op_type), None)


def shape_rule(*op_types: str, domain: str = "") -> Callable[[_F], _F]:
    """Decorate the function that infers the output types of these operators, for every version."""

    def register(function: _F) -> _F:
        for op_type in op_types:
            SHAPE_RULES.register(operator_key(op_type, domain), function, defined_at(function))
        return function

    return register


def reference(*op_types: str, domain: str = "") -> Callable[[_F], _F]:
    """Decorate the function that computes these operators where onnx.reference is not right."""

    def register(function: _F) -> _F:
        for op_type in op_types:
            REFERENCES.register(operator_key(op_type, domain), function, defined_at(function))
        return function

    return register


def infer_types(
    node: Node,
    input_types: Sequence[ValueType | None],
    input_values: Sequence[Array | None] = (),
) -> list[ValueType | None]:
    """Return the types of the node's outputs for these types (and known values) of its inputs.

    Raises:
        ShapeError: the input types do not fit the operator.
    """
    unknown: list[ValueType | None] = [None] * len(node.outputs)
    if node.subgraph is not None:
        if node.op is not None:
            return output_types(node.op, input_types)
        return region_types(node.subgraph, input_types)
    values = list(input_values) or [None] * len(input_types)
    rule = SHAPE_RULES.find(operator_key(node.op_type, node.domain))
    try:
        check_operands(node, input_types, values)
        if rule is None:
            return infer_by_onnx(node, input_types, values)
        found = list(rule(node, input_types, values))
    except SubgraphError as error:
        if not isinstance(error, ShapeError) or str(error).startswith("node "):
            raise
        raise _misfit(node, input_types, error) from error
    except Exception as error:
        raise _misfit(node, input_types, error) from error
    return (found + unknown)[: len(node.outputs)]


def _misfit(node: Node, types: Sequence[ValueType | None], error: Exception) -> ShapeError:
    shown = ", ".join("-" if t is None else str(t) for t in types)
    where = f"node {node.name!r} ({node.op_type})" if node.name else node.op_type
    origin = (node.metadata or {}).get("origin")
    if origin:
        where += f", made of node {origin!r}"
    return ShapeError(f"{where}: inputs ({shown}) do not fit: {error}")


def infer_by_onnx(
    node: Node, input_types: Sequence[ValueType | None], input_values: Sequence[Array | None]
) -> list[ValueType | None]:
    """Return the output types that onnx infers, for operators without a rule of ours."""
    from subgraph.operators.onnx_inference import infer_node
    from subgraph.operators.shape_values import settled

    values = [
        settled(value, type_.dtype)
        if value is not None and isinstance(type_, TensorType)
        else value
        for value, type_ in zip(input_values, input_types, strict=True)
    ]
    return infer_node(node, input_types, values)


def scanned_inputs(node: Node, given: int) -> int:
    """Return how many of a Scan's ``given`` states and inputs are scanned.

    Raises:
        ModelError: its attribute says more than it has, or none.
    """
    count = int(node.attrs["num_scan_inputs"])
    if not 0 < count <= given:
        raise ModelError(
            f"node {node.name!r} (Scan): num_scan_inputs is {count}; it has {given} inputs"
        )
    return count
