"""Schemas: an operator's inputs, outputs and attributes, in every version.

Schemas of the standard come from ``onnx.defs`` or, while that is not imported, from a text of them
(`subgraph.operators.schema_cache`). Custom operators (`subgraph.operators.operator.Operator`) and
operators that runtimes have added (`subgraph.operators.functions`) have schemas of their own.
"""

from __future__ import annotations

import inspect
import sys
from functools import cache
from typing import Any

from subgraph.errors import UnsupportedOpError
from subgraph.graph.graph import Node
from subgraph.operators.schema_cache import SchemaCache, cached_schemas
from subgraph.operators.schema_types import ATTRIBUTE_KINDS as ATTRIBUTE_KINDS
from subgraph.operators.schema_types import Attribute as Attribute
from subgraph.operators.schema_types import AttributeKind as AttributeKind
from subgraph.operators.schema_types import Schema as Schema
from subgraph.operators.schema_types import canonical_domain as canonical_domain
from subgraph.operators.schema_types import from_onnx, newest_of_package
from subgraph.system.registry import Files, Registry, nearest

# Custom operators by (domain, name); filled by subgraph.operators.operator.register_operator.
CUSTOM_SCHEMAS: dict[tuple[str, str], Schema] = {}


def _declares(module: str) -> bool:
    return module.endswith(".op") or ".contrib." in module


# The files of ``ops/`` that declare operators.
FAMILIES = Files("subgraph.ops", _declares)
# Operators of other runtimes by their key; filled by subgraph.operators.functions.function.
CONTRIBUTED: Registry[Schema] = Registry("operator", UnsupportedOpError, FAMILIES)
MICROSOFT = "com.microsoft"
NCHWC = "com.microsoft.nchwc"  # operators on blocked layouts
# Operators of ONNX Runtime in the standard's domain; all but the first are from its beginnings.
_ADDED = frozenset({
    "SimplifiedLayerNormalization", "Affine", "Crop", "DynamicSlice", "ImageScaler",
    "ParametricSoftplus", "Scale", "ScaledTanh",
})  # fmt: skip
# Domain of operators that passes write for the devices' kernels; no model file has them.
INTERNAL_DOMAIN = "subgraph.cpu"


def find_schema(op_type: str, domain: str = "", version: int = 0) -> Schema | None:
    """Return the schema in force in an operator set, None if there is no such operator.

    Args:
        op_type: Name of the operator.
        domain: Its domain; "" is ONNX's own.
        version: Version of the domain's operator set; 0: the newest.
    """
    custom = CUSTOM_SCHEMAS.get((domain, op_type))
    if custom is not None:
        return custom
    if contributed(op_type, domain):
        return CONTRIBUTED.find(f"{domain}::{op_type}" if domain else op_type)
    if op_type == "LayerNormalization" and not domain and version:
        version = max(version, 17)  # ONNX Runtime writes this operator in files of any opset
    return _standard(op_type, domain, version)


def is_before(node: Node, version: int) -> bool:
    """Return whether a node has a form of its operator from before a version of the operator set.

    Args:
        node: The node; one that was made without a version (0) has the newest form.
        version: The version of the operator set that introduced a later form.
    """
    return 0 < node.version < version


def contributed(op_type: str, domain: str) -> bool:
    """Return whether ONNX Runtime has added the operator to ONNX, judged by its name."""
    return domain in (MICROSOFT, NCHWC) or (not domain and op_type in _ADDED)


def get_schema(op_type: str, domain: str = "", version: int = 0) -> Schema:
    """Return the schema in force in an operator set.

    Args:
        op_type: Name of the operator.
        domain: Its domain; "" is ONNX's own.
        version: Version of the domain's operator set; 0: the newest.

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
            f"operator {shown!r} came after opset {version}, which the model states; convert the "
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


def domains_of(op_type: str) -> list[str]:
    """Return the domains that have an operator of a name: those of the standard, then others."""
    standard = [domain for name, domain in standard_operators() if name == op_type]
    others = {domain for domain, name in CUSTOM_SCHEMAS if name == op_type}
    if f"{MICROSOFT}::{op_type}" in CONTRIBUTED:
        others.add(MICROSOFT)
    return [*standard, *sorted(others - {*standard})]


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
    cached = _cached()
    return newest_of_package(domain) if cached is None else cached.newest.get(domain, 1)


@cache
def _standard(op_type: str, domain: str, version: int) -> Schema | None:
    cached = _cached()
    if cached is not None:
        return cached.find(op_type, domain, version or newest_opset(domain))
    found = onnx_schema(op_type, domain, version)
    return None if found is None else from_onnx(found)


@cache
def onnx_schema(op_type: str, domain: str, version: int) -> Any:
    """Return the onnx package's own object for a schema, which has the operator's function body.

    Args:
        op_type: Name of the operator.
        domain: Its domain; "" is ONNX's own.
        version: Version of the domain's operator set; 0: the newest.

    Returns:
        An ``onnx.defs.OpSchema``, None if the package has no such operator.
    """
    import onnx.defs

    try:
        return onnx.defs.get_schema(op_type, version or newest_opset(domain), domain)
    except onnx.defs.SchemaError:
        return None


def _cached() -> SchemaCache | None:
    """Return the cached schemas; None if ``onnx.defs`` is imported and has them itself."""
    return None if "onnx.defs" in sys.modules else cached_schemas()


def describe(schema: Schema) -> str:
    """Return an operator's signature and, for one of ONNX, the standard's description."""
    optional = {*schema.inputs[schema.min_inputs :], *(schema.optional or ())}
    call = [f"{name}=None" if name in optional else name for name in schema.inputs]
    attributes = sorted(schema.attributes.values(), key=lambda each: (not each.required, each.name))
    named = [a.name if a.required else f"{a.name}={a.default!r}" for a in attributes]
    if schema.max_inputs > len(schema.inputs):
        call[-1:] = [f"*{name}" for name in schema.inputs[-1:]]
    elif named:
        call.append("*")
    text = f"{schema.op_type}({', '.join(call + named)}) -> {', '.join(schema.outputs)}"
    found = onnx_schema(schema.op_type, schema.domain, schema.since_version)
    return text if found is None else f"{text}\n\n{inspect.cleandoc(found.doc or '')}"
