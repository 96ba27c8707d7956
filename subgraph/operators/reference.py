"""The reference semantics of every operator: one node applied to values in NumPy.

A node is computed by the first of these that defines it: its operator's ``compute``
(`OPERATORS`), ``onnx.reference`` (`standard`), the function body in ONNX's schema (`expand`).
The device REFERENCE, constant folding and the default executor call `evaluate`. The executor itself
runs nodes with nested graphs (If, Loop, Scan, SequenceMap).

Values: arrays (dtypes that NumPy lacks from ml_dtypes, strings as object arrays of str), lists for
sequences, dicts for maps, `SparseTensor`, None for an omitted input or an empty optional.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, TypeGuard, cast

import numpy as np

from subgraph.errors import (
    LimitError,
    ShapeError,
    SubgraphError,
    UnsupportedOpError,
    described,
    message_of,
)
from subgraph.graph.graph import Node, Value
from subgraph.graph.limits import check_memory, count_results, size_in_bytes
from subgraph.graph.result_arrays import is_array, is_list
from subgraph.graph.types import Array, TensorType, ValueType, dtype_of, numpy_dtype
from subgraph.operators.compute_checks import call_foreign, is_scalar
from subgraph.operators.inference import (
    check_values,
    infer_types,
    part_metadata,
    set_output_types,
)
from subgraph.operators.operator import Operator, is_foreign, operator_of
from subgraph.operators.schema import find_schema, newest_opset, onnx_schema

Compute = Callable[[Sequence[Any]], Sequence[Any]]
# Attributes of opset 1 about memory sharing, which has no effect on results.
_IGNORED_ATTRIBUTES = frozenset({"consumed_inputs"})
_PLAIN = (int, float, str, bytes)
_CACHE_SIZE = 4096  # entries of _COMPILED, at which all are dropped (estimate)
_COMPILED: dict[Any, tuple[Compute, Any]] = {}


def evaluate(node: Node, inputs: Sequence[Any]) -> list[Any]:
    """Return the outputs of ``node`` for these input values; None for those that do not exist.

    Args:
        node: Any operator but If, Loop, Scan, SequenceMap and subgraph nodes.
        inputs: One value for each of the node's inputs, None where it is omitted.

    Raises:
        UnsupportedOpError: the operator has no definition in this version.
        ShapeError: the inputs do not fit the operator.
        LimitError: the outputs do not fit into the memory budget.
    """
    # NumPy turns results of rank 0 into scalars; kernels and onnx.reference take arrays.
    given = [np.asarray(v) if is_scalar(v) else v for v in inputs]
    operator = operator_of(node)
    compute = operator.compute
    try:
        # Operands are checked first: onnx.reference accepts many that do not fit, and computes
        # something.
        check_values(node, given)
        types = _checked_types(node, operator, given)
        outputs = _without_elements(types)
        if outputs is None:
            with np.errstate(all="ignore"):
                if compute is None:
                    outputs = standard(node, given)
                elif is_foreign(operator):
                    outputs = call_foreign(operator, compute, node, given, types)
                else:
                    outputs = compute(node, given)
    except SubgraphError as error:
        text = message_of(error)
        # An error from inside a function body names its own node.
        if text.startswith("node "):
            raise
        raise type(error)(f"{_where(node, given)}: {text}") from error
    except NotImplementedError as error:
        raise UnsupportedOpError(f"{_where(node, given)}: {_reason(error)}") from error
    except MemoryError as error:
        raise LimitError(f"{_where(node, given)} needs too much memory: {error}") from error
    except Exception as error:
        raise ShapeError(f"{_where(node, given)} do not fit: {_reason(error)}") from error
    # onnx.reference returns all outputs of some operators, also those that the node does not have.
    found = [_normal(v) for v in outputs][: len(node.outputs)]
    count_results(found, node.name)
    return found + [None] * (len(node.outputs) - len(found))


# Product of the inputs' numbers of elements up to which results of other operators are not checked.
# An estimate: such a result has at most so many elements, which are 1 GiB in float64.
_UNCHECKED_PRODUCT = 1 << 27


def _checked_types(
    node: Node, operator: Operator, inputs: Sequence[Any]
) -> Sequence[ValueType | None]:
    """Return the types of the results if they may be large or without elements, else nothing.

    Those of a user's operator are always returned, if it has an ``infer``, for the check of what
    its ``compute`` returns.

    Raises:
        LimitError: the results are above the memory budget; nothing was allocated.
    """
    product, empty = 1, False
    for value in inputs:
        if is_array(value):
            product *= value.size or 1
            empty = empty or not value.size
    infers = is_foreign(operator) and operator.infer is not None
    if product <= _UNCHECKED_PRODUCT and not empty and not operator.grows and not infers:
        return ()
    types = [_type_of(value) for value in inputs]
    # Shapes, axes and repeats, on which the sizes of results depend, are short; 4096 is an
    # estimate.
    values = [v if is_array(v) and v.size <= 4096 else None for v in inputs]
    found = infer_types(node, types, values)
    tensors = [type_ for type_ in found if isinstance(type_, TensorType)]
    check_memory(sum(map(size_in_bytes, tensors)), _where(node, inputs))
    return found


def _without_elements(types: Sequence[ValueType | None]) -> Sequence[Any] | None:
    """Return arrays of these types if none has an element, else None.

    What onnx.reference computes for them may take memory and time of their other dimensions.
    """
    made: list[Array] = []
    for type_ in types:
        if not isinstance(type_, TensorType) or not type_.is_static or size_in_bytes(type_):
            return None
        made.append(np.empty(type_.sizes, numpy_dtype(type_.dtype)))
    return made or None


def standard(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return the outputs as ``onnx.reference`` or the operator's function body computes them.

    The ``compute`` of an operator calls this for cases that onnx computes correctly.
    """
    count = len(inputs)
    while count and inputs[count - 1] is None and _omitted(node, count - 1):
        count -= 1
    given = list(inputs[:count])
    key = _key(node, given)
    entry = _COMPILED.get(key)
    if entry is None:
        if len(_COMPILED) >= _CACHE_SIZE:
            _COMPILED.clear()
        # The entry holds the attributes, because the key has ids of those that are arrays.
        entry = (_compile(node, given), tuple(node.attrs.values()))
        _COMPILED[key] = entry
    return entry[0](given)


def _omitted(node: Node, position: int) -> bool:
    return position >= len(node.inputs) or node.inputs[position] is None


def _where(node: Node, inputs: Sequence[Any]) -> str:
    shown = ", ".join(_type_text(v) for v in inputs)
    domain = f"{node.domain}." if node.domain else ""
    return f"node {node.name!r} ({domain}{node.op_type}, opset {node.version}): inputs ({shown})"


def _type_text(value: Any) -> str:
    if value is None:
        return "-"
    if not is_array(value):
        return type(value).__name__
    try:
        return str(TensorType(dtype_of(value), value.shape))
    except ShapeError:
        return f"{value.dtype}{list(value.shape)}"


def _is_tuple(value: object) -> TypeGuard[tuple[Any, ...]]:
    return isinstance(value, tuple)


def _reason(error: BaseException) -> str:
    """Return the text of the first cause, at most 400 characters; onnx.reference wraps errors."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = message_of(error).strip() or type(error).__name__
    if isinstance(error, KeyError):  # whose text is the key alone
        text = described(error)
    return text if len(text) <= 400 else f"{text[:400]}…"


def _normal(value: Any) -> Any:
    """Return a result with arrays for NumPy scalars, and object arrays of str for strings."""
    array: Any = np.asarray(value) if is_scalar(value) else value
    if is_array(array):
        if array.dtype.kind == "S":
            decoded: Array = np.char.decode(array, "utf-8")
            return decoded.astype(object)
        return array.astype(object) if array.dtype.kind in "UT" else array
    if not is_list(value):
        return value
    return [item if type(item) is dict else _normal(item) for item in value]


def _key(node: Node, inputs: Sequence[Any]) -> Any:
    attributes = tuple(
        (name, type(value).__name__, value if _hashable(value) else id(value))
        for name, value in node.attrs.items()
    )
    types = None
    # The body of such an operator depends on the types of the inputs, so that the compiled entry
    # does.
    if _is_context_dependent(node.op_type, node.domain, node.version):
        types = tuple(_type_text(v) for v in inputs)
    given = tuple(v is None for v in inputs)
    return node.op_type, node.domain, node.version, attributes, given, len(node.outputs), types


def _hashable(value: Any) -> bool:
    if _is_tuple(value):
        return all(isinstance(v, _PLAIN) for v in value)
    return isinstance(value, _PLAIN)


def _compile(node: Node, inputs: Sequence[Any]) -> Compute:
    compute = _from_onnx_reference(node, len(inputs))
    if compute is None:
        compute = expand(node, inputs)
    if compute is None:
        domain = f"{node.domain}." if node.domain else ""
        raise UnsupportedOpError(
            f"node {node.name!r}: operator {domain}{node.op_type} of opset {node.version} has no "
            "definition to run; register one with core.add_extension(...)"
        )
    return compute


def _from_onnx_reference(node: Node, count: int) -> Compute | None:
    implementation = _implementation(node.domain, node.op_type, _version(node))
    if implementation is None:
        return None
    from onnx.reference import ReferenceEvaluator

    proto = _proto_with_defaults(node, count)
    parameters: dict[str, Any] = {
        "log": _silent,
        "opsets": {"": newest_opset()} | {node.domain: _version(node)},
        "verbose": 0,
        "new_ops": None,
        "existing_functions": {},
        "evaluator_cls": ReferenceEvaluator,
    }
    try:
        runner = implementation(proto, parameters)
    except Exception as error:
        raise ShapeError(
            f"node {node.name!r} ({node.op_type}): its attributes do not fit: {_reason(error)}"
        ) from error

    def compute(inputs: Sequence[Any]) -> Sequence[Any]:
        return list(runner.run(*inputs))

    return compute


def _version(node: Node) -> int:
    return node.version or newest_opset(node.domain)


def _silent(*_: Any) -> None:
    """Discard the log lines of onnx.reference."""


@cache
def _implementation(domain: str, op_type: str, version: int) -> Any:
    """Return the class of onnx.reference for an operator, None if it has none."""
    known = _implementations(domain).get(op_type)
    if known is None:
        return None
    versions = [v for v in known if v is not None]
    # onnx.reference has one class for all versions under the key None, or one for each.
    if not versions:
        return known[None]
    fitting = [v for v in versions if v <= version]
    return known[max(fitting)] if fitting else None


@cache
def _implementations(domain: str) -> Mapping[str, Mapping[int | None, Any]]:
    from importlib import import_module

    folder = {
        "": "",
        "ai.onnx.ml": ".aionnxml",
        "ai.onnx.preview": ".aionnx_preview",
        "ai.onnx.preview.training": ".aionnx_preview_training",
    }.get(domain)
    if folder is None:
        return {}
    module: Any = import_module(f"onnx.reference.ops{folder}._op_list")
    known = module._build_registered_operators()
    return cast("Mapping[str, Mapping[int | None, Any]]", known)


def _proto_with_defaults(node: Node, count: int) -> Any:
    """Return the node's message, with ``count`` inputs, and the defaults of its own version.

    onnx.reference would use the defaults of the newest version.
    """
    from subgraph.operators.protobuf import attr_to_proto, node_to_proto

    proto = node_to_proto(node, count, _IGNORED_ATTRIBUTES)
    schema = find_schema(node.op_type, node.domain, node.version)
    for name, attribute in ({} if schema is None else schema.attributes).items():
        default = attribute.default
        if name not in node.attrs and isinstance(default, (int, float, str, bytes, tuple)):
            proto.attribute.append(attr_to_proto(name, default, attribute.kind))
    return proto


@cache
def _is_context_dependent(op_type: str, domain: str, version: int) -> bool:
    if _implementation(domain, op_type, version or newest_opset(domain)) is not None:
        return False
    schema = onnx_schema(op_type, domain, version)
    return schema is not None and bool(schema.has_context_dependent_function)


def expand(node: Node, inputs: Sequence[Any]) -> Compute | None:
    """Return a function that evaluates the body in the operator's schema, None if it has none.

    Args:
        node: A node whose operator is defined by a function.
        inputs: Its input values; a body may depend on their types.

    Raises:
        UnsupportedOpError: the body holds a control-flow operator.
    """
    proto = _function_of(node, [_type_of(v) for v in inputs])
    if proto is None:
        return None
    formals = [Value(name) for name in proto.input]
    nodes, results = _instantiated(node, proto, formals)

    def compute(given: Sequence[Any]) -> Sequence[Any]:
        known: dict[Value | None, Any] = {None: None, **dict.fromkeys(formals)}
        known.update(zip(formals, given, strict=False))
        return evaluate_nodes(nodes, known, results)

    return compute


def evaluate_nodes(
    nodes: Iterable[Node], known: dict[Value | None, Any], results: Iterable[Value | None]
) -> list[Any]:
    """Return the content of values that nodes compute.

    Args:
        nodes: The nodes in topological order.
        known: The content of all values that they read and do not compute, and of None; the others
            are added.
        results: The values.
    """
    for node in nodes:
        made = evaluate(node, [known[value] for value in node.inputs])
        known.update(zip(node.outputs, made, strict=True))
    return [known[value] for value in results]


def function_outputs(node: Node, inputs: Sequence[Value | None]) -> list[Value | None] | None:
    """Instantiate the function body in the operator's schema; return its outputs.

    The metadata "origin" of the new nodes has the name of ``node``.

    Args:
        node: The node that the body replaces.
        inputs: Values that the body reads, of the types of the node's inputs.

    Returns:
        One value for each output of the body, or None if the operator has no such body.

    Raises:
        UnsupportedOpError: the body holds a control-flow operator.
    """
    proto = _function_of(node, [None if v is None else v.type for v in node.inputs])
    if proto is None:
        return None
    nodes, results = _instantiated(node, proto, inputs)
    for made in nodes:
        set_output_types(made)
    return results


def _instantiated(
    node: Node, function: Any, inputs: Sequence[Value | None]
) -> tuple[list[Node], list[Value | None]]:
    """Return new nodes for those of a function's message, and the values of its outputs."""
    from subgraph.operators.protobuf import attr_from_proto

    def no_graph(_: Any) -> Any:
        raise UnsupportedOpError(
            f"node {node.name!r} ({node.op_type}): its function body has a control-flow operator"
        )

    own = attributes(node)
    opsets = {entry.domain: entry.version for entry in function.opset_import}
    known: dict[str, Value | None] = dict.fromkeys(("", *function.input))
    known.update(zip(function.input, inputs, strict=False))
    nodes: list[Node] = []
    for number, step in enumerate(function.node):
        attrs = {
            a.name: own.get(a.ref_attr_name) if a.ref_attr_name else attr_from_proto(a, no_graph)
            for a in step.attribute
        }
        made = Node(
            step.op_type,
            [known[name] for name in step.input],
            outputs=len(step.output),
            name=f"{node.name}/{number}",
            domain=step.domain,
            version=opsets.get(step.domain, _version(node)),
            attrs={name: value for name, value in attrs.items() if value is not None},
            metadata=part_metadata(node),
        )
        known.update(zip(step.output, made.outputs, strict=True))
        nodes.append(made)
    return nodes, [known.get(name) for name in function.output]


def _function_of(node: Node, given: Sequence[ValueType | None]) -> Any:
    import onnx

    schema = onnx_schema(node.op_type, node.domain, node.version)
    if schema is None:
        return None
    if schema.has_function:
        return schema.function_body
    if not schema.has_context_dependent_function:
        return None
    from subgraph.operators.protobuf import type_to_proto

    types = [type_to_proto(type_).SerializeToString() for type_ in given]
    message = _proto_with_defaults(node, len(given)).SerializeToString()
    body = schema.get_context_dependent_function(message, types)
    if not body:
        return None
    proto = onnx.FunctionProto()
    proto.ParseFromString(body)
    return proto


def _type_of(value: Any) -> TensorType | None:
    return TensorType(dtype_of(value), value.shape) if is_array(value) else None


def attributes(node: Node) -> dict[str, Any]:
    """Return the node's attributes with the defaults of its version filled in."""
    schema = find_schema(node.op_type, node.domain, node.version)
    known = {} if schema is None else schema.attributes
    return {name: a.default for name, a in known.items()} | node.attrs


def variant(node: Node, *, version: int = 0, drop: Sequence[str] = (), **attrs: Any) -> Node:
    """Return a copy of ``node`` with another version or attributes, for `standard`.

    A ``compute`` uses it to express an old version of an operator by a newer one.

    Args:
        node: The node to copy.
        version: The copy's operator set; 0: the node's own.
        drop: Names of attributes to leave out.
        attrs: Attributes to add or replace.
    """
    kept = {name: value for name, value in node.attrs.items() if name not in drop}
    return Node(
        node.op_type,
        node.inputs,
        outputs=len(node.outputs),
        name=node.name,
        domain=node.domain,
        version=version or node.version,
        attrs=kept | attrs,
    )
