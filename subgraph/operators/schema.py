"""Schemas: what an operator's inputs, outputs and attributes are, in every version.

The standard's operators come from ``onnx.defs``, by way of the user's cache folder while that is
not imported; a custom operator (`subgraph.op.Operator`) brings its own, and so do those that
runtimes have added (`subgraph.operators.functions`). Looked up once per operator and version.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

import attrs

from subgraph.errors import UnsupportedOpError
from subgraph.system.registry import Files, Registry, nearest

if TYPE_CHECKING:
    from subgraph.operators.schema_cache import SchemaCache

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
    """An attribute of an operator; ``default`` None means that it has none."""

    name: str
    kind: AttributeKind
    required: bool = False
    default: Any = None


@attrs.frozen
class Schema:
    """An operator's form: names of inputs and outputs, how many may be given, attributes.

    ``input_dtypes`` lists for each of ``inputs`` the dtypes of tensors that it takes (None: not
    known, or more than tensors); ``one_dtype`` groups positions that must have the same one.
    """

    op_type: str
    domain: str = ""
    since_version: int = 1
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    min_inputs: int = 0
    max_inputs: int = 0
    min_outputs: int = 0
    max_outputs: int = 0
    attributes: dict[str, Attribute] = attrs.field(factory=dict[str, Attribute])
    deprecated: bool = False
    input_dtypes: tuple[frozenset[str] | None, ...] = ()
    one_dtype: tuple[str, ...] = ()


# Custom operators by (domain, name); filled by subgraph.op.register_operator.
CUSTOM_SCHEMAS: dict[tuple[str, str], Schema] = {}

# The files of ``ops/``; those of one device (`cpu`, `opencl_code`, `row_kernels`) load with it.
_DEVICES = frozenset(("cpu", "opencl", "kernels"))
FAMILIES = Files("subgraph.ops", lambda name: _DEVICES.isdisjoint(name.split("_")))
# Operators of other runtimes by their key; filled by subgraph.operators.functions.function.
CONTRIBUTED: Registry[Schema] = Registry("operator", UnsupportedOpError, FAMILIES)
MICROSOFT = "com.microsoft"
# Operators that passes write for the devices' kernels, and no model file holds.
INTERNAL_DOMAIN = "subgraph.cpu"


def canonical_domain(domain: str) -> str:
    """Return "" for both spellings of ONNX's own domain."""
    return "" if domain == "ai.onnx" else domain


def find_schema(op_type: str, domain: str = "", version: int = 0) -> Schema | None:
    """Return the schema in force at opset ``version`` of ``domain`` (0: the newest), or None."""
    custom = CUSTOM_SCHEMAS.get((domain, op_type))
    if custom is not None:
        return custom
    if contributed(op_type, domain):
        return CONTRIBUTED.find(f"{domain}::{op_type}" if domain else op_type)
    if op_type == "LayerNormalization" and not domain and version:
        version = max(version, 17)  # ONNX Runtime writes it in files of any operator set
    return _standard(op_type, domain, version)


def contributed(op_type: str, domain: str) -> bool:
    """Return whether an operator is, by its name, one that ONNX Runtime has added."""
    return domain == MICROSOFT or (op_type == "SimplifiedLayerNormalization" and not domain)


def get_schema(op_type: str, domain: str = "", version: int = 0) -> Schema:
    """Return the schema in force at opset ``version`` of ``domain`` (0: the newest).

    Raises:
        UnsupportedOpError: there is no such operator; the message lists the nearest names.
    """
    schema = find_schema(op_type, domain, version)
    if schema is not None:
        return schema
    shown = f"{domain}.{op_type}" if domain else op_type
    at = f" in opset {version}" if version else ""
    later = _standard(op_type, domain, 0) if version else None
    if later is not None:
        raise UnsupportedOpError(
            f"operator {shown!r} came after opset {version}, which the model says; convert the "
            "model (onnx.version_converter), or export it for a newer opset"
        )
    raise UnsupportedOpError(
        f"no operator {shown!r}{at}; {nearest(op_type, known_operators(domain))} A custom operator "
        "is registered with core.add_extension(...)"
    )


def known_operators(domain: str = "") -> list[str]:
    """Return the names of the standard, contributed and custom operators of a domain, sorted."""
    known = [name for name, of in standard_operators() if of == domain]
    known += [name for of, name in CUSTOM_SCHEMAS if of == domain]
    known += [s.op_type for _, s in CONTRIBUTED.items() if s.domain == domain]
    return sorted(known)


@cache
def standard_operators() -> tuple[tuple[str, str], ...]:
    """Return (name, domain) of every operator that the onnx package defines, sorted."""
    import onnx.defs

    return tuple(
        sorted({(s.name, canonical_domain(s.domain)) for s in onnx.defs.get_all_schemas()})
    )


@cache
def newest_opset(domain: str = "") -> int:
    """Return the newest operator set version of ``domain`` that the onnx package defines."""
    kept = _kept()
    if kept is not None:
        return kept.newest.get(domain, 1)
    import onnx.defs

    if domain == "":
        return onnx.defs.onnx_opset_version()
    if domain == "subgraph":  # our own; a look through all takes a while
        return 1
    versions = [
        s.since_version
        for s in onnx.defs.get_all_schemas_with_history()
        if canonical_domain(s.domain) == domain
    ]
    return max(versions, default=1)


@cache
def _standard(op_type: str, domain: str, version: int) -> Schema | None:
    kept = _kept()
    if kept is not None:
        return kept.find(op_type, domain, version or newest_opset(domain))
    import onnx.defs

    try:
        found = onnx.defs.get_schema(op_type, version or newest_opset(domain), domain)
    except onnx.defs.SchemaError:
        return None
    return from_onnx(found)


def _kept() -> SchemaCache | None:
    """Return the schemas of the cache folder; None where onnx is there to be asked itself."""
    if "onnx.defs" in sys.modules:
        return None
    from subgraph.operators.schema_cache import cached_schemas

    return cached_schemas()


def describe(schema: Schema) -> str:
    """Return an operator's call and, for one of ONNX, the text of the standard."""
    import onnx.defs

    call = list(schema.inputs[: schema.min_inputs])
    call += [f"{name}=None" for name in schema.inputs[schema.min_inputs :]]
    attributes = sorted(schema.attributes.values(), key=lambda each: (not each.required, each.name))
    named = [a.name if a.required else f"{a.name}={a.default!r}" for a in attributes]
    if schema.max_inputs > len(schema.inputs):
        call[-1:] = [f"*{name}" for name in schema.inputs[-1:]]
    elif named:
        call.append("*")
    text = f"{schema.op_type}({', '.join(call + named)}) -> {', '.join(schema.outputs)}"
    try:
        found = onnx.defs.get_schema(schema.op_type, schema.since_version, schema.domain)
    except onnx.defs.SchemaError:
        return text
    return f"{text}\n\n{inspect.cleandoc(found.doc or '')}"


def from_onnx(found: Any) -> Schema:
    """Return the schema that the onnx package describes by ``found``."""
    import onnx
    import onnx.helper

    attributes: dict[str, Attribute] = {}
    for name, attribute in found.attributes.items():
        default: Any = attribute.default_value
        has_default = bool(default) and default.type != onnx.AttributeProto.UNDEFINED
        kind = cast(AttributeKind, attribute.type.name.lower())
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
        # A variadic input of mixed types binds nothing: each use is a group of its own.
        one_dtype=tuple(i.type_str if i.is_homogeneous else "" for i in found.inputs),
    )


def _dtypes(types: Iterable[str]) -> frozenset[str] | None:
    """Return the dtypes of types such as ``tensor(float)``; None if others are among them."""
    names = [name.removeprefix("tensor(").removesuffix(")") for name in types]
    if any("(" in name for name in names):
        return None
    return frozenset(map(_dtype_of, names))


@cache
def _dtype_of(name: str) -> str:
    """Return our name of a dtype for that of schemas: float8e4m3fn, float4e2m1, double."""
    from subgraph.graph.types import ONNX_DTYPE, canonical_dtype

    known = {ours.replace("_", ""): ours for ours in ONNX_DTYPE}
    longer = (full for full in known if full.startswith(f"{name}fn"))  # float4e2m1: float4_e2m1fn
    return known[name] if name in known else canonical_dtype(known.get(next(longer, name), name))
