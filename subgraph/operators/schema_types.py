"""Types of schemas, and their conversion from the onnx package."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any, Literal, cast, get_args

import attrs

from subgraph.errors import ShapeError
from subgraph.graph.types import ONNX_DTYPE, canonical_dtype

AttributeKind = Literal[
    "float",
    "int",
    "string",
    "tensor",
    "graph",
    "sparse_tensor",
    "type_proto",
    "floats",
    "ints",
    "strings",
    "tensors",
    "graphs",
    "sparse_tensors",
    "type_protos",
]
ATTRIBUTE_KINDS: tuple[AttributeKind, ...] = get_args(AttributeKind)


@attrs.frozen
class Attribute:
    """An attribute of an operator.

    Attributes:
        name: Name of the attribute.
        kind: Its type, ONNX's AttributeType in lower case.
        required: Whether every node must have it.
        default: Its value where a node omits it; None: it has no default.
    """

    name: str
    kind: AttributeKind
    required: bool = False
    default: Any = None


def _count(names: str) -> Any:
    """Return a field whose default is the number of names in another field of `Schema`."""
    default = attrs.Factory(lambda schema: len(getattr(schema, names)), takes_self=True)
    return attrs.field(default=default)


@attrs.frozen
class Schema:
    """The signature of an operator: inputs, outputs and attributes.

    Attributes:
        op_type: Name of the operator.
        domain: Its domain; "" is ONNX's own.
        since_version: First operator set of the domain with this version of the operator.
        inputs: Names of the inputs; the last one may be variadic.
        outputs: Names of the outputs; the last one may be variadic.
        min_inputs: Smallest number of inputs; by default that of ``inputs``.
        max_inputs: Largest number of inputs, 2**31 - 1 if variadic; by default that of ``inputs``.
        min_outputs: Smallest number of outputs; by default that of ``outputs``.
        max_outputs: Largest number of outputs; by default that of ``outputs``.
        attributes: The attributes by name.
        deprecated: Whether the standard has withdrawn the operator.
        input_dtypes: For each of ``inputs`` the dtypes of the tensors that it takes; empty if they
            are not known.
        one_dtype: For each of ``inputs`` the name of a group whose inputs must have one dtype; "":
            none.
        optional: The names in ``inputs`` that a node may omit although others follow; None: not
            known, as of the standard's operators, whose requirements say it.
    """

    op_type: str
    domain: str = ""
    since_version: int = 1
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    min_inputs: int = _count("inputs")
    max_inputs: int = _count("inputs")
    min_outputs: int = _count("outputs")
    max_outputs: int = _count("outputs")
    attributes: dict[str, Attribute] = attrs.field(factory=dict[str, Attribute])
    deprecated: bool = False
    input_dtypes: tuple[frozenset[str], ...] = ()
    one_dtype: tuple[str, ...] = ()
    optional: frozenset[str] | None = None

    def missing(self, inputs: Iterable[object]) -> str:
        """Return the name of the first input that a node must not omit and does; "" if none is.

        Args:
            inputs: The node's inputs; one that is false is omitted.
        """
        if self.optional is None:
            return ""
        given = zip(self.inputs, inputs, strict=False)
        return next((name for name, one in given if not one and name not in self.optional), "")

    def dtypes_of(self, position: int) -> frozenset[str]:
        """Return the item of ``input_dtypes`` for an input; a variadic one is the last."""
        last = len(self.input_dtypes) - 1
        return self.input_dtypes[min(position, last)] if last >= 0 else frozenset()


def canonical_domain(domain: str) -> str:
    """Return "" for both spellings of ONNX's own domain."""
    return "" if domain == "ai.onnx" else domain


def newest_of_package(domain: str) -> int:
    """Return the newest operator set version of ``domain`` that the onnx package defines."""
    import onnx.defs

    if domain == "":
        return onnx.defs.onnx_opset_version()
    if domain == "subgraph":  # onnx has none of this domain; the loop below is slow
        return 1
    versions = [
        s.since_version
        for s in onnx.defs.get_all_schemas_with_history()
        if canonical_domain(s.domain) == domain
    ]
    return max(versions, default=1)


def from_onnx(found: Any) -> Schema:
    """Return the schema that the onnx package describes by ``found``."""
    import onnx
    import onnx.helper

    attributes: dict[str, Attribute] = {}
    for name, attribute in found.attributes.items():
        default: Any = attribute.default_value
        has_default = bool(default) and default.type != onnx.AttributeProto.UNDEFINED
        kind = cast("AttributeKind", attribute.type.name.lower())
        value: Any = onnx.helper.get_attribute_value(default) if has_default else None
        if isinstance(value, bytes):
            value = value.decode()
        elif isinstance(value, list):
            items = cast("list[Any]", value)
            value = tuple(v.decode() if isinstance(v, bytes) else v for v in items)
        attributes[name] = Attribute(name, kind, bool(attribute.required), value)
    return Schema(
        op_type=found.name,
        domain=canonical_domain(found.domain),
        since_version=found.since_version,
        inputs=tuple(i.name for i in found.inputs),
        outputs=tuple(o.name for o in found.outputs),
        min_inputs=found.min_input,
        max_inputs=found.max_input,
        min_outputs=found.min_output,
        max_outputs=found.max_output,
        attributes=attributes,
        deprecated=bool(found.deprecated),
        input_dtypes=tuple(_dtypes(i.types) for i in found.inputs),
        # The items of a heterogeneous variadic input may differ in dtype: no group.
        one_dtype=tuple(i.type_str if i.is_homogeneous else "" for i in found.inputs),
    )


def _dtypes(types: Iterable[str]) -> frozenset[str]:
    """Return the dtypes of the tensors among types such as ``tensor(float)``.

    A dtype that a newer onnx package allows and `subgraph.dtypes.DTYPES` lacks is left out: no
    value has it.
    """
    tensors = (name[len("tensor(") : -1] for name in types if name.startswith("tensor("))
    return frozenset(found for name in tensors if (found := _dtype_of(name)) is not None)


@cache
def _dtype_of(name: str) -> str | None:
    """Return Subgraph's name of a dtype for that of schemas: float8e4m3fn, float4e2m1, double.

    None: `subgraph.dtypes.DTYPES` lacks the dtype.
    """
    known = {ours.replace("_", ""): ours for ours in ONNX_DTYPE}
    longer = (full for full in known if full.startswith(f"{name}fn"))  # float4e2m1: float4_e2m1fn
    try:
        return canonical_dtype(known.get(name) or known.get(next(longer, name), name))
    except ShapeError:
        return None
