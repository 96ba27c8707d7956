"""Declarations of operators: those of ONNX, of other runtimes, of passes and of users.

The file ``op.py`` of each family in ``ops/`` declares its operators (`declare`); a declaration
overrides the onnx package. A user's operator is one `Operator` object, registered by
``core.add_extension``. All are in one registry, `OPERATORS`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from subgraph.errors import UnsupportedOpError
from subgraph.graph.graph import Node
from subgraph.graph.types import Array, ValueType
from subgraph.operators.requirements import Rule, rule_from_signature
from subgraph.operators.schema import CUSTOM_SCHEMAS, FAMILIES, Schema
from subgraph.system.registry import Registry, defined_at

# (node, types of its inputs, arrays of the inputs whose value is known) -> types of its outputs
ShapeRule = Callable[
    [Node, Sequence[ValueType | None], Sequence[Array | None]], Sequence[ValueType | None]
]
# (node, input values) -> output values; None for an omitted input
Reference = Callable[[Node, Sequence[Any]], Sequence[Any]]


@attrs.frozen
class OperatorName:
    """Name of an operator that is declared without a schema.

    `find_schema` has the standard's operators in each version; operators that only passes write
    have no schema.

    Attributes:
        op_type: Name of the operator.
        domain: Its domain; "" is ONNX's own.
    """

    op_type: str
    domain: str = ""


@attrs.frozen
class Operator:
    """Everything that Subgraph must know of an operator to load, check and run it.

    Attributes:
        schema: Names and numbers of inputs and outputs, attributes.
        compute: ``(node, inputs) -> outputs``: the operator in NumPy, which defines it; None for an
            operator of the standard that ``onnx.reference`` computes correctly.
        infer: ``(node, input types, known input values) -> output types``; None means type
            inference by the onnx package, which does not know a user's operator.
        kernels: Kernels by the device's name: see `Device.add_kernel`. For CPU and OPENCL a
            function ``(node, low)`` that lowers a node to steps. Devices without an entry run
            ``compute``. Kernels of `declare`d operators are in the files ``cpu.py`` and
            ``opencl.py`` of the family, which are loaded with their device.
        requires: ``(node, *operands) -> None``: raises ShapeError for operands that do not fit
            (see `subgraph.operators.requirements`), before any kernel sees them.
        body: ``(call) -> values``: adds the operators of the standard that replace a node; set by
            `subgraph.operators.functions.function`.
        by_body: Whether devices without a kernel run the function body that the standard gives for
            the operator: the pass "ExpandFunctions" replaces its nodes.
        random: Whether results may differ for equal inputs, so that nodes are neither merged nor
            computed ahead of a run; or a function that says it of a node.
        rule: ``requires`` with the numbers of operands in its signature; computed.
    """

    schema: Schema | OperatorName
    compute: Reference | None
    infer: ShapeRule | None = None
    kernels: Mapping[str, Callable[..., Any]] = attrs.field(factory=dict[str, Callable[..., Any]])
    requires: Callable[..., None] | None = None
    body: Callable[..., Any] | None = None
    by_body: bool = False
    random: bool | Callable[[Node], bool] = False
    rule: Rule | None = attrs.field(init=False, eq=False, repr=False)

    def __attrs_post_init__(self) -> None:
        """Compute ``rule``."""
        rule = None if self.requires is None else rule_from_signature(self.requires)
        # The class is frozen; this is attrs' way to compute a field.
        object.__setattr__(self, "rule", rule)

    @property
    def key(self) -> str:
        """Name of the operator in the registries."""
        return operator_key(self.schema.op_type, self.schema.domain)


# Operators whose results can be far larger than their inputs: a shape among these states the size.
EXPANDING_OPERATORS = frozenset(
    {"ConstantOfShape", "Expand", "EyeLike", "OneHot", "Pad", "Range", "Resize", "Tile", "Upsample"}
)

OPERATORS: Registry[Operator] = Registry("operator", UnsupportedOpError, FAMILIES)


def operator_key(op_type: str, domain: str = "") -> str:
    """Return the name of an operator in the registries."""
    return f"{domain}::{op_type}" if domain else op_type


def find_operator(key: str) -> Operator | None:
    """Return the declaration of an operator by its `operator_key`, or None."""
    return OPERATORS.find(key, named_only=True)


def declare(
    *op_types: str,
    domain: str = "",
    requires: Callable[..., None] | None = None,
    infer: ShapeRule | None = None,
    compute: Reference | None = None,
    by_body: bool = False,
    random: bool | Callable[[Node], bool] = False,
) -> None:
    """Declare operators of the standard, or operators that only passes write, in all versions.

    Args:
        *op_types: Their names, as string literals: the registry finds the file by its text.
        domain: Their domain; "" is ONNX's own.
        requires: Check of operands, as in `Operator`.
        infer: Type inference, as in `Operator`; replaces the onnx package's, and is faster.
        compute: Reference, as in `Operator`; replaces ``onnx.reference`` where that lacks the
            operator or is wrong.
        by_body: Whether passes replace nodes by the standard's function body, as in `Operator`.
        random: Whether results may differ for equal inputs, as in `Operator`.
    """
    caller = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]  # the declaring file
    owner = f"{caller.f_code.co_filename}:{caller.f_lineno}"
    for op_type in op_types:
        name = OperatorName(op_type, domain)
        operator = Operator(name, compute, infer, requires=requires, by_body=by_body, random=random)
        OPERATORS.register(operator.key, operator, owner)


def register_operator(operator: Operator) -> None:
    """Register a user's operator for the process.

    Raises:
        UnsupportedOpError: an operator of this name is declared elsewhere.
    """
    find_operator(operator.key)  # loads the file in ops/ that declares this name, if any
    OPERATORS.register(operator.key, operator, defined_at(operator.compute))
    if isinstance(operator.schema, Schema):
        CUSTOM_SCHEMAS[operator.schema.domain, operator.schema.op_type] = operator.schema


def unregister_operator(operator: Operator) -> None:
    """Undo `register_operator`."""
    OPERATORS.unregister(operator.key)
    CUSTOM_SCHEMAS.pop((operator.schema.domain, operator.schema.op_type), None)


def is_random(node: Node) -> bool:
    """Return whether results may differ for equal inputs, as the operator's declaration says."""
    operator = find_operator(operator_key(node.op_type, node.domain))
    random = operator is not None and operator.random
    return random(node) if callable(random) else random
