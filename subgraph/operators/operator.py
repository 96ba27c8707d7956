"""Declarations of operators: those of ONNX, of other runtimes, of passes and of users.

The file ``op.py`` of each family in ``ops/`` declares its operators (`declare`); a declaration
overrides the onnx package. A user's operator is one `Operator` object, registered by
``core.add_extension``. All are in one registry, `OPERATORS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from subgraph.errors import ConfigError, UnsupportedOpError, require_type
from subgraph.graph.graph import Node
from subgraph.graph.types import Array, ValueType
from subgraph.operators.batch_axes import BatchRule
from subgraph.operators.requirements import Rule, rule_from_signature
from subgraph.operators.schema import (
    ATTRIBUTE_KINDS,
    CUSTOM_SCHEMAS,
    FAMILIES,
    Attribute,
    Schema,
)
from subgraph.system.registry import Registry, declared_at, defined_at, nearest

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
        view: Whether the result is the first input in another shape, without moving data; or a
            function that says it of a node.
        light: Whether to compute a result is little more than to make an array of its size.
        grows: Whether a result can be larger than all inputs together: its size is then checked
            before it is computed.
        by_type: Whether the result follows from the input's type alone, as that of Shape.
        dtype_at: Position of an input of which only the dtype matters, as of CastLike's second one.
        speculatable: Whether no content of operands that fit makes the operator fail, so that it
            may be computed although its result may not be needed; or a function that says it of a
            node.
        shape_at: Position of the input that states a shape, axes or repeats and has no other
            effect. Passes may fold a Parameter there. If only a part of its elements is known,
            ``infer`` gets an array of objects: numbers, names of dimensions, None.
        sized_by: Positions of all inputs whose content decides the sizes of results; the default
            is ``shape_at``.
        batch: ``(call) -> batches``: how the rows of a batch pass from the inputs to the outputs
            (see `subgraph.operators.batch_axes`); None: the operator may mix rows.
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
    view: bool | Callable[[Node], bool] = False
    light: bool = False
    grows: bool = False
    by_type: bool = False
    dtype_at: int | None = None
    speculatable: bool | Callable[[Node], bool] = False
    shape_at: int | None = None
    sized_by: tuple[int, ...] = attrs.field(
        default=attrs.Factory(lambda self: _only(self.shape_at), takes_self=True)
    )
    batch: BatchRule | None = None
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


OPERATORS: Registry[Operator] = Registry("operator", UnsupportedOpError, FAMILIES)


def _only(position: int | None) -> tuple[int, ...]:
    return () if position is None else (position,)


def operator_key(op_type: str, domain: str = "") -> str:
    """Return the name of an operator in the registries."""
    return f"{domain}::{op_type}" if domain else op_type


def find_operator(key: str) -> Operator | None:
    """Return the declaration of an operator by its `operator_key`, or None."""
    return OPERATORS.find(key, named_only=True)


def family_of(key: str) -> str | None:
    """Return the package in ``ops/`` that declares an operator; None if none does.

    Args:
        key: The `operator_key` of the operator.
    """
    return None if find_operator(key) is None else FAMILIES.package_of(OPERATORS.owner(key))


def declare(*op_types: str, domain: str = "", **fields: Any) -> None:
    """Declare operators of the standard, or operators that only passes write, in all versions.

    Args:
        *op_types: Their names, as string literals: the registry finds the file by its text.
        domain: Their domain; "" is ONNX's own.
        **fields: Fields of `Operator`. ``infer`` replaces the onnx package's type inference, and is
            faster; ``compute`` replaces ``onnx.reference``, where that lacks the operator or errs.
    """
    owner = declared_at()
    fields.setdefault("compute", None)
    for op_type in op_types:
        operator = Operator(OperatorName(op_type, domain), **fields)
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


def check_operator(operator: Operator) -> None:
    """Check the types of the fields that a user has written.

    Raises:
        ConfigError: a field of the operator, or of its schema, has a wrong type.
    """
    schema: Any = operator.schema
    require_type(schema, Schema, ConfigError, "an sg.Schema as the schema of the operator")
    given: list[tuple[str, object]] = [("compute", operator.compute), ("infer", operator.infer)]
    given += [("requires", operator.requires), ("batch", operator.batch)]
    kernels: Any = operator.kernels
    require_type(kernels, Mapping, ConfigError, f"the kernels of {operator.key} by device, a dict")
    given += [(f"kernel for {name}", kernel) for name, kernel in kernels.items()]
    for name, function in given:
        if function is not None and not callable(function):
            raise ConfigError(f"{operator.key}: {name} is {function!r}; give a function")
    for names in (schema.inputs, schema.outputs):
        require_type(names, (tuple, list), ConfigError, f"the names of {operator.key}, a tuple")
    attributes = schema.attributes
    wanted = f'the attributes of {operator.key}, a dict: {{"k": sg.Attribute("k", "float")}}'
    require_type(attributes, Mapping, ConfigError, wanted)
    for name, attribute in attributes.items():
        require_type(attribute, Attribute, ConfigError, f"an sg.Attribute for {name!r}")
        if attribute.name != name:
            raise ConfigError(f"{operator.key}: attribute {name!r} is named {attribute.name!r}")
        if attribute.kind not in ATTRIBUTE_KINDS:
            hint = nearest(attribute.kind, ATTRIBUTE_KINDS)
            raise ConfigError(
                f"{operator.key}: attribute {name!r} has type {attribute.kind!r}; {hint}"
            )


def unregister_operator(operator: Operator) -> None:
    """Undo `register_operator`."""
    OPERATORS.unregister(operator.key)
    CUSTOM_SCHEMAS.pop((operator.schema.domain, operator.schema.op_type), None)


_UNDECLARED = Operator(OperatorName(""), None)


def operator_of(node: Node) -> Operator:
    """Return the declaration of a node's operator; one that says nothing if there is none."""
    return find_operator(operator_key(node.op_type, node.domain)) or _UNDECLARED


def is_foreign(operator: Operator) -> bool:
    """Return whether an operator is a user's, with a schema and a ``compute`` of its own."""
    return isinstance(operator.schema, Schema) and operator.body is None


def largest_outputs(operator: Operator, node: Node) -> int:
    """Return how many outputs a node may have: as the schema says, at least those it has."""
    return max(getattr(operator.schema, "max_outputs", 0), len(node.outputs))


def is_random(node: Node) -> bool:
    """Return whether results may differ for equal inputs, as the operator's declaration says."""
    return _says(operator_of(node).random, node)


def is_view(node: Node) -> bool:
    """Return whether a node's result is its first input in another shape, without moving data."""
    return _says(operator_of(node).view, node)


def is_speculatable(node: Node) -> bool:
    """Return whether a node may be computed although its result may not be needed."""
    return _says(operator_of(node).speculatable, node)


def _says(trait: bool | Callable[[Node], bool], node: Node) -> bool:
    return trait(node) if callable(trait) else trait
