"""Building graphs in Python: inputs, parameters, and a function for every operator.

``subgraph.ops.<Operator>`` gives the function that `operator` makes here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from subgraph.errors import ModelError, ShapeError, require_type
from subgraph.graph.graph import Capture, Graph, Node, Value
from subgraph.graph.parameters import Parameter
from subgraph.graph.types import (
    ONNX_DTYPE,
    Array,
    TensorType,
    ValueType,
    canonical_dtype,
    dtype_of,
    numpy_dtype,
)
from subgraph.operators.inference import set_output_types
from subgraph.operators.schema import Schema, describe, get_schema
from subgraph.system.registry import nearest

# Attributes that hold ONNX's number of a dtype; the builder takes the dtype's name, too.
_DTYPE_ATTRIBUTES = frozenset({"to", "dtype", "output_dtype"})


Builder = Callable[..., Any]  # the functions that `operator` returns


def input(
    name: str,
    shape: Iterable[int | str | None] | None = None,
    dtype: Any = "float32",
    *,
    type: ValueType | None = None,
) -> Value:
    """Return a graph input.

    Args:
        name: Name of the input; not empty.
        shape: Dimensions: numbers, names (symbolic) or None (unknown). None instead of a shape
            means that the rank is unknown.
        dtype: ONNX's name of the dtype ("float32"), or a NumPy dtype.
        type: The whole type, for inputs that are no tensors (sequences, optionals, maps); replaces
            ``shape`` and ``dtype``.

    Raises:
        ModelError: the name is empty or no string.
        ShapeError: a dimension or the dtype is not allowed.
    """
    _check_name(name, "an input")
    return Value(name, TensorType(dtype, shape) if type is None else type)


def parameter(name: str, array: npt.ArrayLike | Parameter) -> Value:
    """Return a value over a new Parameter with a copy of ``array``, or over ``array`` if it is one.

    Raises:
        ModelError: the name is empty or no string.
    """
    _check_name(name, "a parameter")
    held = array if isinstance(array, Parameter) else Parameter(name, array)
    return Value(name, held.type, parameter=held)


def _check_name(name: Any, whose: str) -> None:
    if not isinstance(name, str) or not name:
        raise ModelError(f"{whose} needs a name, a string; got {name!r}")


def capture(outer: Value) -> Value:
    """Return a value by which the body of a control-flow node uses ``outer`` of the graph around.

    For a value over a Parameter it is a new value over the same Parameter, not a capture.

    Raises:
        ModelError: ``outer`` is no value.
    """
    require_type(outer, Value, ModelError, "a value of the graph around, as sg.input returns")
    if outer.parameter is not None:
        return Value(outer.name, outer.type, parameter=outer.parameter)
    return Capture(outer)


def operator(op_type: str, domain: str = "") -> Builder:
    """Return the function that applies an operator.

    The function takes inputs by position or by their names in the standard: values, None for an
    omitted optional input, and numbers and arrays, which become constants; a Python number gets the
    dtype of the first tensor among the inputs. It takes attributes by name; a dtype may be a name
    ("float16") or a NumPy dtype. It returns the output value, or a tuple of several. More keywords:

    - ``outputs``: number of outputs, for operators that have a variable number;
    - ``name``: name of the node; ``metadata``: its metadata;
    - ``version``: an operator set whose version of the operator is used; 0: the newest.

    Args:
        op_type: Name of the operator.
        domain: Its domain; "" is ONNX's own.

    Raises:
        UnsupportedOpError: there is no such operator.
    """
    newest = get_schema(op_type, domain)

    def build(
        *inputs: Any,
        name: str = "",
        outputs: int | None = None,
        version: int = 0,
        metadata: Mapping[str, str] | None = None,
        **attributes: Any,
    ) -> Any:
        schema = get_schema(op_type, domain, version)
        given = _inputs(schema, inputs, attributes)
        attrs = {key: _attribute(schema, key, value) for key, value in attributes.items()}
        _check_attributes(schema, attrs)
        values = _constants(schema, given)
        _check_dtypes(schema, values)
        bodies = [value for value in attrs.values() if isinstance(value, Graph)]
        node = Node(
            op_type,
            values,
            outputs=_output_count(schema, attrs) if outputs is None else outputs,
            name=name,
            domain=domain,
            # The version in which the operator last changed, so that the graph can be saved for
            # older operator sets as well (`onnx_format.opsets`).
            version=version or schema.since_version,
            attrs=attrs,
            captures=[_outer(value) for body in bodies for value in body.captures],
            metadata=metadata,
        )
        known = [None if v is None or v.parameter is None else v.parameter.array for v in values]
        set_output_types(node, known)
        return node.outputs[0] if len(node.outputs) == 1 else node.outputs

    build.__name__ = build.__qualname__ = op_type
    build.__doc__ = describe(newest)
    return build


def _inputs(schema: Schema, given: Sequence[Any], attributes: dict[str, Any]) -> list[Any]:
    values = list(given)
    for position, formal in enumerate(schema.inputs):
        if formal in attributes and formal not in schema.attributes:
            value = attributes.pop(formal)
            if position < len(values) and values[position] is not None:
                raise ModelError(f"{schema.op_type}: input {formal!r} was given twice")
            values += [None] * (position + 1 - len(values))
            values[position] = value
    if not schema.min_inputs <= len(values) <= schema.max_inputs:
        shown = (
            f"{schema.min_inputs}"
            if schema.min_inputs == schema.max_inputs
            else f"{schema.min_inputs} to {schema.max_inputs}"
        )
        raise ModelError(
            f"{schema.op_type} takes {shown} input{'s' * (shown != '1')} "
            f"({', '.join(schema.inputs)}), got {len(values)}"
        )
    missing = schema.missing(value is not None for value in values)
    if missing:
        raise ModelError(f"{schema.op_type} needs the input {missing!r}")
    return values


def _check_dtypes(schema: Schema, values: Sequence[Value | None]) -> None:
    """Raise ShapeError if the schema does not allow an input's dtype, or two different ones."""
    first: dict[str, tuple[str, str]] = {}
    for position, value in enumerate(values if schema.input_dtypes else ()):
        if value is None or not isinstance(value.type, TensorType):
            continue
        place = min(position, len(schema.inputs) - 1)  # a variadic input is the last one
        name, dtype, allowed = schema.inputs[place], value.type.dtype, schema.dtypes_of(position)
        if allowed and dtype not in allowed:
            raise ShapeError(
                f"{schema.op_type} (opset {schema.since_version}): input {name!r} is {dtype}; it "
                f"takes {', '.join(sorted(allowed))}: convert it with ops.Cast"
            )
        group = schema.one_dtype[place]
        known, other = first.setdefault(group, (dtype, name)) if group else (dtype, name)
        if known != dtype:
            which = f"all {name!r}" if name == other else f"inputs {other!r} and {name!r}"
            raise ShapeError(
                f"{schema.op_type}: {which} must have one dtype, got {known} and {dtype}: convert "
                "one with ops.Cast"
            )


def _constants(schema: Schema, given: Sequence[Any]) -> list[Value | None]:
    dtype = next(
        (v.type.dtype for v in given if isinstance(v, Value) and isinstance(v.type, TensorType)),
        None,
    )
    out: list[Value | None] = []
    for item in given:
        if item is None or isinstance(item, Value):
            out.append(item)
            continue
        if isinstance(item, tuple) and any(isinstance(part, Value) for part in item):  # pyright: ignore[reportUnknownVariableType]
            raise ModelError(
                f"{schema.op_type}: an input is a tuple of values; unpack it, or pick one of them"
            )
        array: Array = np.asarray(cast("Any", item))
        if array.dtype == object and not all(isinstance(part, str) for part in array.flat):
            raise ModelError(
                f"{schema.op_type}: an input is {item!r}; give a value, a number or an array"
            )
        # Arrays and scalars of NumPy have the dtype that the user chose. A Python number has none.
        if not isinstance(item, (np.ndarray, np.generic)) and array.dtype.kind in "fiu":
            array = _cast_literal(array, dtype)
        held = Parameter("", array)
        # Versions of parameters are unique in the process, so names of constants are, too.
        held.name = f"constant_{held.version}"
        out.append(Value(held.name, held.type, parameter=held))
    return out


def _cast_literal(array: Array, dtype: str | None) -> Array:
    """Return a Python number in ``dtype``; lists of ints (axes, shapes) are int64."""
    if dtype is None or array.ndim:
        return array.astype(np.float32) if array.dtype.kind == "f" else array.astype(np.int64)
    return array.astype(numpy_dtype(dtype)) if dtype != "string" else array


def _outer(inner: Value) -> Value:
    if not isinstance(inner, Capture):
        raise ModelError(
            f"a body captures {inner.name!r}, but which outer value is meant is not known; "
            "make it with sg.capture(value)"
        )
    return inner.outer


def _attribute(schema: Schema, key: str, value: Any) -> Any:
    known = schema.attributes.get(key)
    if known is None:
        raise ModelError(
            f"{schema.op_type} has no attribute or input {key!r}; "
            f"{nearest(key, [*schema.attributes, *schema.inputs])}"
        )
    try:
        if known.kind == "int" and key in _DTYPE_ATTRIBUTES and not hasattr(value, "__index__"):
            return ONNX_DTYPE[canonical_dtype(value)]
        return _convert(known.kind, value)
    except (TypeError, ValueError) as error:
        raise ModelError(
            f"{schema.op_type}: attribute {key!r} takes {known.kind}, got {value!r}: {error}"
        ) from error


def _convert(kind: str, value: Any) -> Any:
    match kind:
        case "float":
            return float(value)
        case "int":
            return _whole(value)
        case "floats":
            return tuple(float(v) for v in value)
        case "ints":
            return tuple(_whole(v) for v in value)
        case "string":
            return value if isinstance(value, (str, bytes)) else str(value)
        case "strings":
            return tuple(value)
        case "tensor":
            array = np.array(value)
            dtype_of(array)
            array.flags.writeable = False
            return array
        case _:
            return tuple(value) if isinstance(value, list) else value  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]


def _whole(value: Any) -> int:
    whole = int(value)
    if whole != value:
        raise ValueError("no whole number")
    return whole


def _check_attributes(schema: Schema, attrs: Mapping[str, Any]) -> None:
    for attribute in schema.attributes.values():
        if attribute.required and attribute.name not in attrs:
            raise ModelError(f"{schema.op_type} needs the attribute {attribute.name!r}")


def _output_count(schema: Schema, attrs: Mapping[str, Any]) -> int:
    if schema.op_type == "Split" and not schema.domain:
        if "num_outputs" in attrs:
            return int(attrs["num_outputs"])
        if "split" in attrs:
            return len(attrs["split"])
        raise ModelError("Split needs the number of its outputs: num_outputs=n, or outputs=n")
    for key, extra in (("then_branch", 0), ("body", -1)):
        body = attrs.get(key)
        if isinstance(body, Graph):
            # The first output of a Loop's body is the condition, which is no output of the Loop.
            return len(body.outputs) + (extra if schema.op_type == "Loop" else 0)
    if schema.min_outputs == 0:
        # A variadic output, of which the standard allows 2**31 - 1, is one unless ``outputs`` says
        # more.
        return max(schema.max_outputs if schema.max_outputs < 64 else 1, 1)
    return schema.min_outputs


def tensor_type(value: Value) -> TensorType:
    """Return the value's tensor type.

    Raises:
        ShapeError: it is unknown, or not a tensor.
    """
    if not isinstance(value.type, TensorType):
        raise ShapeError(f"value {value.name!r} has type {value.type or 'unknown'}, not a tensor")
    return value.type
