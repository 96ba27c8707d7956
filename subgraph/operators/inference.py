"""Operand checks and type inference of one node.

`check_operands` and `check_values` check operands against the operator's requirement. The reference
and type inference (at load, and for the concrete sizes of a plan, nodes inside fused nodes
included) call them, so that no kernel sees the address of an operand whose sizes were not compared.
Output types are those of the operator's ``infer`` or, without one, the onnx package's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from subgraph.errors import ModelError, ShapeError, SubgraphError, described, message_of
from subgraph.graph.graph import Graph, Node, Value
from subgraph.graph.result_arrays import is_list
from subgraph.graph.symbolic import is_symbolic
from subgraph.graph.types import (
    Array,
    MapType,
    SequenceType,
    TensorType,
    ValueType,
    dtype_of,
    with_sizes,
)
from subgraph.operators.op_checks import output_types, region_types
from subgraph.operators.operator import (
    find_operator,
    is_foreign,
    largest_outputs,
    operator_key,
    operator_of,
)
from subgraph.operators.requirements import ANY_SIZE, Rule, Tensor
from subgraph.operators.schema import newest_opset, onnx_schema
from subgraph.operators.shape_values import concretized, is_partial

# Attributes of ONNX's operators for which the standard defines only 0 and 1. Runtimes differ in
# their meaning of other numbers, so that these are refused.
SWITCHES = frozenset(
    {
        *("align_corners", "allowzero", "antialias", "broadcast", "ceil_mode", "center_point_box"),
        *("count_include_pad", "detect_negative", "detect_positive", "exclude_outside"),
        *("exclusive", "fmod", "input_forget", "interleaved", "inverse", "is_case_sensitive"),
        *("is_causal", "is_test", "keepdims", "largest", "layout", "linear_before_reset"),
        *("new_axis", "noop_with_empty_axes", "onesided", "output_sequence", "periodic"),
        *("reverse", "saturate", "select_last_index", "sorted", "spatial", "storage_order"),
        *("training_mode", "transA", "transB", "upper"),
    }
)
_INTERNAL_PREFIX = "subgraph."
# Metadata key of a node in a function's body: the name, in the domain "body", of a requirement that
# holds besides its operator's own.
EXTRA_REQUIREMENT = "subgraph.requires"


def check_operands(
    node: Node,
    types: Sequence[ValueType | None],
    values: Sequence[Array | None] = (),
) -> None:
    """Check the operands of a node against what its operator requires.

    Args:
        node: The node; one whose operator has no requirement passes.
        types: Types of its inputs, None for one that is omitted or not known.
        values: Arrays of the inputs whose elements are known, None for the others; may be shorter.

    Raises:
        ShapeError: the operands do not fit; the message says which operand, and both sizes.
    """
    _check_switches(node)
    rules = _rules_of(node)
    if not rules:
        return
    operands: list[Any] = []
    count = len(values)
    for k, type_ in enumerate(types):
        if isinstance(type_, TensorType):
            shape: Any = type_.shape
            # Requirements compare sizes one by one, which needs the ranks of all operands.
            if shape is None:
                return
            if not type_.is_static:
                shape = tuple(dim if isinstance(dim, int) else ANY_SIZE for dim in shape)
            operands.append(Tensor(type_.dtype, shape, values[k] if k < count else None))
        elif type_ is None and k < len(node.inputs) and node.inputs[k] is not None:
            return  # not known yet
        else:
            operands.append(type_)
    for rule in rules:
        rule.check(node, operands)


def check_values(node: Node, values: Sequence[Any]) -> None:
    """Check the input values of a node before it is computed, like `check_operands`.

    Args:
        node: The node; one whose operator has no requirement passes.
        values: Arrays, lists for sequences, dicts for maps, None where an input is omitted.

    Raises:
        ShapeError: the values do not fit.
    """
    _check_switches(node)
    rules = _rules_of(node)
    if not rules:
        return
    operands: list[Any] = []
    for value in values:
        if isinstance(value, np.ndarray):
            array: Array = value  # pyright: ignore[reportUnknownVariableType]
            operands.append(Tensor(dtype_of(array), array.shape, array))
        elif isinstance(value, list):
            operands.append(SequenceType(None))
        elif value is None:
            operands.append(None)
        elif isinstance(value, dict):
            operands.append(MapType("int64"))
        else:
            return  # a sparse tensor: only the reference takes them
    for rule in rules:
        rule.check(node, operands)


def _check_switches(node: Node) -> None:
    # Operators that only passes write ("subgraph.cpu") have attributes of the standard's.
    if SWITCHES.isdisjoint(node.attrs) or not (
        not node.domain or node.domain.startswith(_INTERNAL_PREFIX)
    ):
        return
    for name in node.attrs:
        if name in SWITCHES and node.attrs[name] not in (0, 1):
            raise ShapeError(f"attribute {name} is {node.attrs[name]}; it must be 0 or 1")


def is_checked_in_runs(node: Node) -> bool:
    """Return whether the node's requirement must be checked again with the sizes of each run.

    A requirement that reads only weights need not.
    """
    return any(
        value is not None
        and value.parameter is None
        and (k not in rule.unused or not _ranked(value))
        for rule in _rules_of(node)
        for k, value in enumerate(node.inputs)
    )


def _ranked(value: Value) -> bool:
    return isinstance(value.type, TensorType) and value.type.shape is not None


class _Watched(Tensor):
    """An operand that notes whether a requirement asks for its elements; they are not known."""

    asked = False

    def __getattribute__(self, name: str) -> Any:
        """Return an attribute."""
        if name == "known":
            self.asked = True
        return super().__getattribute__(name)


def elements_read(node: Node, types: Sequence[TensorType | None]) -> list[int]:
    """Return the positions of the operands whose elements the node's requirement reads.

    Args:
        node: The node.
        types: Types of its operands, all with a rank; None for one that is omitted.

    Raises:
        ShapeError: the sizes of the operands do not fit.
    """
    operands = [
        None
        if type_ is None
        else _Watched(
            type_.dtype,
            tuple(dim if isinstance(dim, int) else ANY_SIZE for dim in type_.shape or ()),
        )
        for type_ in types
    ]
    for rule in _rules_of(node):
        rule.check(node, list(operands))
    return [k for k, operand in enumerate(operands) if operand and operand.asked]


def has_requirement(node: Node) -> bool:
    """Return whether the node's operator declares what its operands must satisfy."""
    return bool(_rules_of(node))


def _rules_of(node: Node) -> tuple[Rule, ...]:
    """Return the requirements of a node: its operator's, and that of the function body around."""
    rule = operator_of(node).rule
    metadata = node.metadata
    if not metadata or EXTRA_REQUIREMENT not in metadata:
        return () if rule is None else (rule,)
    extra = find_operator(operator_key(str(metadata[EXTRA_REQUIREMENT]), "body"))
    rules = (rule, None if extra is None else extra.rule)
    return tuple(each for each in rules if each is not None)


def infer_types(
    node: Node,
    input_types: Sequence[ValueType | None],
    input_values: Sequence[Array | None] = (),
) -> list[ValueType | None]:
    """Return the types of the node's outputs, None for those not known.

    Args:
        node: The node; its own value types are not read, except those of bodies.
        input_types: Types of its inputs, None for one that is omitted or not known.
        input_values: Arrays of the inputs whose elements are known, None for others; (): none. At
            the operator's ``shape_at`` only a part of the elements may be known.

    Raises:
        ShapeError: the input types do not fit the operator.
    """
    unknown: list[ValueType | None] = [None] * len(node.outputs)
    if node.subgraph is not None:
        if node.op is not None:
            return output_types(node.op, input_types)
        return region_types(node.subgraph, input_types)
    values = list(input_values) or [None] * len(input_types)
    operator = operator_of(node)
    whole, at = values, operator.shape_at
    if at is not None and at < len(values) and is_partial(values[at]):
        whole = [*values[:at], None, *values[at + 1 :]]
    try:
        check_operands(node, input_types, whole)
        if operator.infer is None:
            return infer_by_onnx(node, input_types, whole)
        answer = operator.infer(node, input_types, values)
    except SubgraphError as error:
        if not isinstance(error, ShapeError) or str(error).startswith("node "):
            raise
        raise _error(node, input_types, f" do not fit: {message_of(error)}") from error
    except Exception as error:
        if is_foreign(operator):
            raise _error(node, input_types, f": infer raised {described(error)}") from error
        why = described(error) if isinstance(error, KeyError) else message_of(error)
        raise _error(node, input_types, f" do not fit: {why}") from error
    found: list[Any] = list(answer) if is_list(answer) else [answer]
    # The text of a type decides sizes that are left open while a plan is made: only if it is shown.
    if not is_list(answer) or not all(t is None or isinstance(t, ValueType) for t in found):
        problem = f"{answer!r}; return a list of types, None if unknown"
        raise _error(node, input_types, f": infer of {node.op_type} returned {problem}")
    if len(found) > largest_outputs(operator, node) and is_foreign(operator):
        problem = f"{len(found)} types; the node has {len(node.outputs)} outputs"
        raise _error(node, input_types, f": infer of {node.op_type} returned {problem}")
    return (found + unknown)[: len(node.outputs)]


def set_output_types(node: Node, known: Sequence[Array | None] = ()) -> None:
    """Set the types of a node's outputs, as they follow from those of its inputs.

    Args:
        node: The node.
        known: As ``input_values`` of `infer_types`.

    Raises:
        ShapeError: the input types do not fit the operator.
    """
    types = infer_types(node, [None if v is None else v.type for v in node.inputs], known)
    for value, type_ in zip(node.outputs, types, strict=True):
        value.type = type_


def part_metadata(node: Node) -> dict[str, str]:
    """Return the metadata of a new node that replaces a part of ``node``, its "origin"."""
    # The requirement belongs to one node of the body. Its parts have requirements of their own.
    notes = {key: note for key, note in (node.metadata or {}).items() if key != EXTRA_REQUIREMENT}
    return {"origin": node.name, **notes}


def _error(node: Node, types: Sequence[ValueType | None], problem: str) -> ShapeError:
    shown = ", ".join("-" if t is None else str(t) for t in types)
    where = f"node {node.name!r} ({node.op_type})" if node.name else node.op_type
    origin = (node.metadata or {}).get("origin")
    if origin:
        where += f", made of node {origin!r}"
    return ShapeError(f"{where}: inputs ({shown}){problem}")


def infer_by_onnx(
    node: Node, input_types: Sequence[ValueType | None], input_values: Sequence[Array | None]
) -> list[ValueType | None]:
    """Return the output types that the onnx package infers, None for those that it does not know.

    Args:
        node: A node whose operator declares no ``infer``, or an ``infer`` that calls this; of
            bodies, only those of If are typed here.
        input_types: As for `infer_types`.
        input_values: One item for each input; symbolic integers among them are concretized.

    Raises:
        ShapeError: the input types do not fit the operator.
    """
    unknown: list[ValueType | None] = [None] * len(node.outputs)
    if node.bodies:
        return _types_of_bodies(node, unknown)
    schema = onnx_schema(node.op_type, node.domain, node.version)
    if schema is None:
        return unknown
    import onnx.shape_inference

    from subgraph.operators.protobuf import (
        node_to_proto,
        tensor_to_proto,
        type_from_proto,
        type_to_proto,
    )

    if any(v is not None and t is None for v, t in zip(node.inputs, input_types, strict=True)):
        return unknown
    proto = node_to_proto(node, len(node.inputs))
    types = {n: t for n, t in zip(proto.input, input_types, strict=True) if t is not None}
    known = {n: a for n, a in zip(proto.input, input_values, strict=True) if a is not None}
    data = {
        name: tensor_to_proto(concretized(array, type_.dtype))
        for name, array in known.items()
        # Larger arrays are weights, on which no shape depends.
        if isinstance(type_ := types.get(name), TensorType) and array.size <= 4096
    }

    def found(types: Mapping[str, ValueType]) -> list[ValueType | None]:
        opset = onnx.helper.make_opsetid(node.domain, node.version or newest_opset(node.domain))
        try:
            made = onnx.shape_inference.infer_node_outputs(
                schema,
                proto,
                {name: type_to_proto(type_) for name, type_ in types.items()},
                data,
                None,
                [opset],
            )
        except onnx.shape_inference.InferenceError as error:
            raise ShapeError(str(error).strip().splitlines()[-1]) from error
        return [type_from_proto(made[name]) if name in made else None for name in proto.output]

    # A symbolic size that the package passes on by a name stays symbolic. From sizes that it
    # computes with it needs numbers, to which the plan is then bound.
    named, sizes = _named_sizes(types)
    if sizes:
        results = [with_sizes(type_, sizes) for type_ in found(named)]
        if all(isinstance(type_, TensorType) and type_.is_static for type_ in results):
            return results
    return found(types)


def _named_sizes(types: Mapping[str, ValueType]) -> tuple[dict[str, ValueType], dict[str, Any]]:
    """Return types with a name for each symbolic size, and the sizes by their names."""
    names: dict[Any, str] = {}
    sizes: dict[str, Any] = {}

    def name(dim: Any) -> Any:
        if not is_symbolic(dim):
            return dim
        found = names.setdefault(dim.expression, f"symbolic size {len(names)}")
        sizes[found] = dim
        return found

    changed = {
        key: TensorType(type_.dtype, tuple(map(name, type_.shape)))
        if isinstance(type_, TensorType) and type_.shape is not None
        else type_
        for key, type_ in types.items()
    }
    return changed, sizes


def _types_of_bodies(node: Node, unknown: list[ValueType | None]) -> list[ValueType | None]:
    """Return the output types of an If whose branches agree; `infer_graph` types Loop and Scan."""
    if node.op_type != "If":
        return unknown
    branches: list[Graph] = node.bodies
    outputs = zip(*(body.outputs for body in branches), strict=True)
    return [
        first.type if all(v.type == first.type for v in rest) else None for first, *rest in outputs
    ]


def scanned_inputs(node: Node, given: int) -> int:
    """Return how many of a Scan's ``given`` inputs (initial states included) are scanned.

    Raises:
        ModelError: num_scan_inputs is not in [1, given].
    """
    count = int(node.attrs["num_scan_inputs"])
    if not 0 < count <= given:
        raise ModelError(
            f"node {node.name!r} (Scan): num_scan_inputs is {count}; it has {given} inputs"
        )
    return count
