"""Type inference of one node by the onnx package, for operators that declare no ``infer``."""

from __future__ import annotations

import re
from collections.abc import Sequence

import onnx
import onnx.defs
import onnx.shape_inference

from subgraph.errors import ShapeError
from subgraph.graph.graph import Graph, Node
from subgraph.graph.types import Array, ValueType
from subgraph.operators.protobuf import (
    node_to_proto,
    tensor_to_proto,
    type_from_proto,
    type_to_proto,
)
from subgraph.operators.schema import newest_opset

_TERM = r"[A-Za-z ]*(?:\.\.\.[A-Za-z ]*)?"
_EQUATION = re.compile(rf"{_TERM}(?:,{_TERM})*(?:->{_TERM})?")


def infer_node(
    node: Node,
    input_types: Sequence[ValueType | None],
    input_values: Sequence[Array | None],
) -> list[ValueType | None]:
    """Return the output types that onnx infers; None for those that it does not know.

    Args:
        node: A node without subgraph; of bodies, only those of If are typed here.
        input_types: Types of its inputs, None for one that is omitted or not known.
        input_values: Arrays of the inputs whose elements are known, None for others.

    Raises:
        ShapeError: onnx finds that the input types do not fit the operator.
    """
    unknown: list[ValueType | None] = [None] * len(node.outputs)
    if node.bodies:
        return _types_of_bodies(node, unknown)
    version = node.version or newest_opset(node.domain)
    try:
        schema = onnx.defs.get_schema(node.op_type, version, node.domain)
    except onnx.defs.SchemaError:
        return unknown
    if any(v is not None and t is None for v, t in zip(node.inputs, input_types, strict=True)):
        return unknown
    if node.op_type == "Einsum" and not _EQUATION.fullmatch(str(node.attrs.get("equation", ""))):
        # onnx 1.23 loops forever on an equation that is not well formed.
        raise ShapeError(
            f"node {node.name!r} (Einsum): equation {node.attrs.get('equation')!r} is not well "
            "formed; letters, commas, one '...' a term and '->' make one"
        )
    proto = node_to_proto(node, len(node.inputs))
    names = list(proto.input)
    types = {n: type_to_proto(t) for n, t in zip(names, input_types, strict=True) if t is not None}
    data = {
        n: tensor_to_proto(a)
        for n, a in zip(names, input_values, strict=True)
        if a is not None and a.size <= 4096  # larger arrays are weights, on which no shape depends
    }
    try:
        found = onnx.shape_inference.infer_node_outputs(
            schema, proto, types, data, None, [onnx.helper.make_opsetid(node.domain, version)]
        )
    except onnx.shape_inference.InferenceError as error:
        shown = ", ".join("-" if t is None else str(t) for t in input_types)
        raise ShapeError(
            f"node {node.name!r} ({node.op_type}): inputs ({shown}) do not fit: "
            f"{str(error).strip().splitlines()[-1]}"
        ) from error
    return [type_from_proto(found[name]) if name in found else None for name in proto.output]


def _types_of_bodies(node: Node, unknown: list[ValueType | None]) -> list[ValueType | None]:
    """Return the output types of an If whose branches agree; `infer_graph` types Loop and Scan."""
    if node.op_type != "If":
        return unknown
    branches: list[Graph] = node.bodies
    outputs = zip(*(body.outputs for body in branches), strict=True)
    return [
        first.type if all(v.type == first.type for v in rest) else None for first, *rest in outputs
    ]
