"""Checks of a model against the onnx package: texts, operator sets, operators and attributes.

Used by `subgraph.onnx_format.reader`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from subgraph.errors import ModelError, UnsupportedOpError
from subgraph.operators.messages import NodeProto, OperatorSetIdProto
from subgraph.operators.protobuf import KIND_OF_NUMBER
from subgraph.operators.schema import Schema, canonical_domain, get_schema, newest_opset


def text_of(text: str) -> str:
    """Return a string of a message, checked to be UTF-8 (protobuf returns bytes if it is not)."""
    if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ModelError(f"the text {text!r} is not UTF-8; the file is damaged")
    return text


def read_opsets(imports: Iterable[OperatorSetIdProto]) -> dict[str, int]:
    """Return ``{domain: version}`` of the operator sets that a model or function imports.

    Raises:
        ModelError: two entries contradict each other.
        UnsupportedOpError: the onnx package does not know the version.
    """
    opsets: dict[str, int] = {}
    for entry in imports:
        domain = canonical_domain(text_of(entry.domain))
        # ONNX forbids two entries of one domain, and "" and "ai.onnx" are one. Equal entries are
        # harmless.
        if opsets.setdefault(domain, entry.version) != entry.version:
            raise ModelError(f"two versions of operator set {domain or 'ai.onnx'!r} are imported")
        newest = newest_opset(domain)
        # The newest version of a domain that onnx does not know counts as 1. Its versions are not
        # checked.
        if entry.version < 1 or (newest > 1 and entry.version > newest):
            raise UnsupportedOpError(
                f"opset {entry.version} of {domain or 'ai.onnx'} is not known: the onnx package "
                f"here knows 1 to {newest}; upgrade onnx, or convert the model"
            )
    return opsets


def version_of(domain: str, opsets: Mapping[str, int], proto: NodeProto) -> int:
    """Return the version of the operator set that a node belongs to.

    Args:
        domain: Canonical domain of the node's operator.
        opsets: Imported versions by domain.
        proto: The node, for the message.

    Returns:
        The imported version; 1 for a domain that neither the model nor onnx knows.

    Raises:
        ModelError: the model does not import the domain, which onnx knows.
    """
    version = opsets.get(domain)
    if version is not None:
        return version
    if domain == "" or newest_opset(domain) > 1:
        raise ModelError(
            f"node {proto.name!r} ({proto.op_type}): the model imports no operator set "
            f"{domain or 'ai.onnx'!r}"
        )
    return 1


def refuse_unknown(proto: NodeProto, domain: str, version: int, schema: Schema | None) -> None:
    """Refuse an operator that does not exist in its domain; foreign domains are not checked.

    Args:
        proto: The node.
        domain: Canonical domain of its operator.
        version: Version of the operator set.
        schema: Schema of the operator if that is deprecated; None if it has no schema.

    Raises:
        UnsupportedOpError: onnx knows the domain and does not have the operator in this version.
    """
    where = f"node {proto.name!r}: "
    if schema is not None:
        raise UnsupportedOpError(
            f"{where}operator {proto.op_type!r} was taken out of opset {schema.since_version}; "
            f"the model says opset {version}"
        )
    # onnx knows this preview domain, whose newest version is 1 like that of an unknown one.
    if domain == "" or newest_opset(domain) > 1 or domain == "ai.onnx.preview.training":
        try:
            get_schema(proto.op_type, domain, version)
        except UnsupportedOpError as error:
            raise UnsupportedOpError(f"{where}{error}") from None


def check_node(proto: NodeProto, schema: Schema, attributes: Mapping[str, Any]) -> None:
    """Check a node against the schema of its operator.

    Args:
        proto: The node.
        schema: The schema.
        attributes: The node's attributes by name, with those bound by a function call.

    Raises:
        ModelError: the number of inputs or outputs, or an attribute, does not fit.
    """
    inputs, outputs = len(proto.input), len(proto.output)
    where = f"node {proto.name!r} ({proto.op_type}, opset {schema.since_version})"
    if not schema.min_inputs <= inputs <= schema.max_inputs:
        raise ModelError(
            f"{where} has {inputs} inputs; it takes {schema.min_inputs} to {schema.max_inputs}"
        )
    missing = schema.missing(proto.input)
    if missing:
        raise ModelError(f"{where} omits its input {missing!r}, which is not optional")
    if not schema.min_outputs <= outputs <= schema.max_outputs:
        raise ModelError(
            f"{where} has {outputs} outputs; it gives {schema.min_outputs} to {schema.max_outputs}"
        )
    for attribute in proto.attribute:
        known = schema.attributes.get(attribute.name)
        if known is None:
            raise ModelError(f"{where} has no attribute {attribute.name!r}")
        if not attribute.ref_attr_name and KIND_OF_NUMBER.get(attribute.type) != known.kind:
            raise ModelError(
                f"{where}: attribute {attribute.name!r} takes {known.kind}, got "
                f"{KIND_OF_NUMBER.get(attribute.type, 'an unknown type')}"
            )
    # Since opset 18 a file states this number twice, and may contradict itself.
    if schema.op_type == "Split" and attributes.get("num_outputs", outputs) != outputs:
        raise ModelError(f"{where} has {outputs} outputs and says {attributes['num_outputs']}")
    for known in schema.attributes.values():
        if known.required and known.name not in attributes:
            raise ModelError(f"{where} needs the attribute {known.name!r}")
