"""Types, attributes and single nodes to and from ONNX's protobuf messages.

Used by the ONNX file reader and writer and by type inference; loaded only when onnx is needed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, cast

import attrs
import numpy as np

from subgraph.errors import ModelError
from subgraph.graph.graph import Graph, Node
from subgraph.graph.types import (
    DTYPE_OF_ONNX,
    ONNX_DTYPE,
    Array,
    MapType,
    OptionalType,
    SequenceType,
    SparseTensorType,
    TensorType,
    ValueType,
)
from subgraph.operators.messages import (
    AttributeProto,
    GraphProto,
    NodeProto,
    SparseTensorProto,
    TensorProto,
    TypeProto,
)
from subgraph.operators.schema import AttributeKind, find_schema
from subgraph.operators.schema_types import ATTRIBUTE_KINDS

GraphToProto = Callable[[Graph], GraphProto]
ProtoToGraph = Callable[[GraphProto], Graph]


@attrs.frozen(eq=False, slots=True)
class SparseTensor:
    """A constant sparse tensor in ONNX's coordinate format.

    Attributes:
        values: The nnz elements that are stored, shape (nnz,).
        indices: Their positions, int64: flat (nnz,), or one row for each, (nnz, rank).
        shape: Sizes of the tensor.
    """

    values: Array
    indices: Array
    shape: tuple[int, ...]


def type_to_proto(type_: ValueType | None) -> TypeProto:
    """Return ONNX's message for a type; an empty one for None."""
    proto = TypeProto()
    _fill_type(proto, type_)
    return proto


def _fill_type(proto: TypeProto, type_: ValueType | None) -> None:
    if isinstance(type_, (TensorType, SparseTensorType)):
        target = proto.tensor_type if isinstance(type_, TensorType) else proto.sparse_tensor_type
        target.elem_type = ONNX_DTYPE[type_.dtype]
        if type_.shape is not None:
            # An empty shape is a scalar, a missing one an unknown rank. Without this call both look
            # alike.
            target.shape.SetInParent()
            for dim in type_.shape:
                entry = target.shape.dim.add()
                if isinstance(dim, str):
                    entry.dim_param = dim
                elif dim is not None:
                    entry.dim_value = dim
    elif isinstance(type_, SequenceType):
        proto.sequence_type.SetInParent()
        _fill_type(proto.sequence_type.elem_type, type_.element)
    elif isinstance(type_, OptionalType):
        proto.optional_type.SetInParent()
        _fill_type(proto.optional_type.elem_type, type_.element)
    elif isinstance(type_, MapType):
        proto.map_type.key_type = ONNX_DTYPE[type_.key]
        _fill_type(proto.map_type.value_type, type_.value)


def type_from_proto(proto: TypeProto) -> ValueType | None:
    """Return the type of a message, None if the message is empty.

    Raises:
        ModelError: the dtype number is not one of ONNX's.
    """
    kind = proto.WhichOneof("value")
    if kind in ("tensor_type", "sparse_tensor_type"):
        target: Any = getattr(proto, kind)
        if target.elem_type == 0:
            return None
        dtype = dtype_from_number(target.elem_type)
        shape = None
        if target.HasField("shape"):
            shape = tuple(_dim_from_proto(dim) for dim in target.shape.dim)
        return TensorType(dtype, shape) if kind == "tensor_type" else SparseTensorType(dtype, shape)
    if kind == "sequence_type":
        return SequenceType(type_from_proto(proto.sequence_type.elem_type))
    if kind == "optional_type":
        return OptionalType(type_from_proto(proto.optional_type.elem_type))
    if kind == "map_type":
        key = dtype_from_number(proto.map_type.key_type)
        return MapType(key, type_from_proto(proto.map_type.value_type))
    return None


def dtype_from_number(number: int) -> str:
    """Return the name of the dtype with a number of TensorProto.DataType.

    Raises:
        ModelError: ONNX has no dtype of this number.
    """
    try:
        return DTYPE_OF_ONNX[number]
    except KeyError:
        raise ModelError(
            f"element type {number} is not one of ONNX's (1 to {max(DTYPE_OF_ONNX)}); "
            "the file is damaged or newer than this version knows"
        ) from None


def _dim_from_proto(dim: Any) -> int | str | None:
    if dim.HasField("dim_value"):
        # Some exporters write -1 or a huge number for "unknown".
        return dim.dim_value if dim.dim_value >= 0 else None
    # ONNX's text form writes "?" for "unknown". Exporters write it as a name of several dimensions.
    return dim.dim_param if dim.dim_param not in ("", "?") else None


def tensor_to_proto(array: Array, name: str = "") -> TensorProto:
    """Return ONNX's message for an array; object arrays hold strings."""
    if array.dtype.kind in "OUST":
        proto = TensorProto(name=name, data_type=TensorProto.STRING, dims=array.shape)
        proto.string_data.extend(
            s if isinstance(s, bytes) else str(s).encode() for s in array.ravel().tolist()
        )
        return proto
    from onnx import numpy_helper

    # ``ascontiguousarray`` makes an array of rank 1 of a scalar.
    return numpy_helper.from_array(np.ascontiguousarray(array).reshape(array.shape), name)


def tensor_from_proto(proto: TensorProto) -> Array:
    """Return the read-only array of an inline tensor message; strings are object arrays of str.

    Raises:
        ModelError: sizes and data do not fit, or the dtype is unknown.
    """
    dtype_from_number(proto.data_type)
    try:
        if proto.data_type == TensorProto.STRING:
            strings = [_text(s) for s in proto.string_data]
            array = np.array(strings, dtype=object).reshape(tuple(proto.dims))
        else:
            array = _array(proto)
            if proto.data_type == TensorProto.BOOL:
                # Kernels rely on the bytes 0 and 1, but a file may hold any.
                array = np.asarray(array.view(np.uint8) != 0)
    except (ValueError, TypeError, OverflowError, MemoryError) as error:
        raise ModelError(
            f"tensor {proto.name!r} (dtype {DTYPE_OF_ONNX[proto.data_type]}, dims "
            f"{list(proto.dims)[:8]}) is damaged: {error}"
        ) from error
    array.flags.writeable = False
    return array


# Dtypes with the same bytes in ``raw_data`` as in an array, and the message field that may hold
# elements of this dtype instead ("": onnx decodes that field).
_RAW_DTYPES = {
    "float32": "float_data",
    "float64": "double_data",
    "int32": "int32_data",
    "int64": "int64_data",
    "uint64": "",
    "uint32": "",
    "int8": "",
    "uint8": "",
}


def _array(proto: TensorProto) -> Array:
    dtype = DTYPE_OF_ONNX[proto.data_type]
    field = _RAW_DTYPES.get(dtype)
    inside = proto.data_location != TensorProto.EXTERNAL and not proto.HasField("segment")
    if field is not None and inside and sys.byteorder == "little":
        if proto.HasField("raw_data"):
            return np.frombuffer(proto.raw_data, dtype).reshape(proto.dims)
        if field:
            return np.array(getattr(proto, field), dtype).reshape(proto.dims)
    from onnx import numpy_helper  # slow to import, and few models need it

    return numpy_helper.to_array(proto)


def _text(raw: bytes) -> str | bytes:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        # ONNX strings are bytes, mostly but not always UTF-8.
        return raw


def attr_to_proto(
    name: str,
    value: Any,
    kind: AttributeKind | None,
    graph_to_proto: GraphToProto | None = None,
) -> AttributeProto:
    """Return ONNX's message for an attribute.

    Args:
        name: Name of the attribute.
        value: Its value, as nodes hold it.
        kind: Its type in the operator's schema; None: the type follows from the value.
        graph_to_proto: Converts bodies; None: the attribute must not be a graph.

    Raises:
        ModelError: ONNX has no attribute type for the value.
    """
    proto = AttributeProto(name=name)
    if kind is None:
        kind = _guess_kind(value)
    if kind is None or (kind in ("graph", "graphs") and graph_to_proto is None):
        raise ModelError(f"attribute {name!r} of type {type(value).__name__} has no form in ONNX")
    proto.type = getattr(AttributeProto, kind.upper())
    one, field = _ONE_OF[kind], _FIELDS[kind]
    write: Any = graph_to_proto if one == "graph" else _WRITERS[one]
    if kind != one:
        getattr(proto, field).extend(map(write, value))
    elif one in ("float", "int", "string"):
        setattr(proto, field, write(value))
    else:
        getattr(proto, field).CopyFrom(write(value))
    return proto


def _bytes(value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()


def _sparse_to_proto(value: SparseTensor) -> SparseTensorProto:
    values, indices = tensor_to_proto(value.values), tensor_to_proto(value.indices)
    return SparseTensorProto(values=values, indices=indices, dims=value.shape)


_SCALAR_KINDS: Mapping[type, AttributeKind] = {
    bool: "int",
    int: "int",
    float: "float",
    str: "string",
    bytes: "string",
    np.ndarray: "tensor",
    Graph: "graph",
    SparseTensor: "sparse_tensor",
}
_TYPES = (TensorType, SequenceType, OptionalType, MapType, SparseTensorType)


def _guess_kind(value: Any) -> AttributeKind | None:
    if isinstance(value, _TYPES):
        return "type_proto"
    if isinstance(value, (tuple, list)):
        items = cast("Sequence[Any]", value)
        kinds: set[AttributeKind | None] = {_guess_kind(item) for item in items}
        # Nothing shows the type of an empty list without a schema. Axes and pads are the most
        # frequent.
        if not kinds:
            return "ints"
        if kinds == {"int", "float"}:
            return "floats"
        one = kinds.pop()
        single = not kinds and one is not None and _ONE_OF[one] == one
        return cast("AttributeKind", f"{one}s") if single else None
    for type_, kind in _SCALAR_KINDS.items():
        if isinstance(value, type_):
            return kind
    if isinstance(value, np.integer):
        return "int"
    return "float" if isinstance(value, np.floating) else None


def attr_from_proto(proto: AttributeProto, graph_from_proto: ProtoToGraph) -> Any:
    """Return an attribute message's value, as nodes hold it; ``graph_from_proto`` reads bodies.

    Raises:
        ModelError: the type is unknown or the content damaged.
    """
    kind = KIND_OF_NUMBER.get(proto.type)
    if kind is None:
        raise ModelError(f"attribute {proto.name!r} has unknown type {proto.type}")
    value, one = getattr(proto, _FIELDS[kind]), _ONE_OF[kind]
    read = graph_from_proto if one == "graph" else _READERS.get(one)
    if kind == one:
        return value if read is None else read(value)
    return tuple(value) if read is None else tuple(map(read, value))


def sparse_from_proto(proto: SparseTensorProto) -> SparseTensor:
    """Return the sparse tensor of a message."""
    values, indices = tensor_from_proto(proto.values), tensor_from_proto(proto.indices)
    return SparseTensor(values, indices, tuple(proto.dims))


# The kind of the elements of each kind of attribute, and its field in AttributeProto.
_ONE_OF: Mapping[AttributeKind, AttributeKind] = {
    kind: cast("AttributeKind", kind.removesuffix("s")) for kind in ATTRIBUTE_KINDS
}
_FIELDS: Mapping[AttributeKind, str] = {
    **{kind: kind for kind in ATTRIBUTE_KINDS},
    **{"float": "f", "int": "i", "string": "s", "tensor": "t", "graph": "g", "type_proto": "tp"},
}
KIND_OF_NUMBER: Mapping[int, AttributeKind] = {
    getattr(AttributeProto, kind.upper()): kind for kind in ATTRIBUTE_KINDS
}
# Conversions of one element to and from its form in the message; the caller converts graphs.
_WRITERS: Mapping[AttributeKind, Callable[[Any], Any]] = {
    "float": lambda value: value,
    "int": int,
    "string": _bytes,
    "tensor": lambda value: tensor_to_proto(np.asarray(value)),
    "sparse_tensor": _sparse_to_proto,
    "type_proto": type_to_proto,
}
_READERS: Mapping[AttributeKind, Callable[[Any], Any]] = {
    "string": _text,
    "tensor": tensor_from_proto,
    "sparse_tensor": sparse_from_proto,
    "type_proto": type_from_proto,
}


def node_to_proto(node: Node, count: int, ignored: Collection[str] = ()) -> NodeProto:
    """Return ONNX's message for a node alone: its values have the names i0, i1, ..., o0, ...

    Args:
        node: A node without bodies.
        count: Number of inputs of the message; omitted ones have an empty name.
        ignored: Names of attributes to leave out.

    Raises:
        ModelError: ONNX has no attribute type for an attribute's value.
    """
    omitted = {k for k, value in enumerate(node.inputs) if value is None}
    proto = NodeProto(
        name=node.name,
        op_type=node.op_type,
        domain=node.domain,
        input=["" if k in omitted else f"i{k}" for k in range(count)],
        output=[f"o{k}" for k in range(len(node.outputs))],
    )
    write_attributes(proto, node, ignored=ignored)
    return proto


def write_attributes(
    proto: NodeProto,
    node: Node,
    graph_to_proto: GraphToProto | None = None,
    ignored: Collection[str] = (),
) -> None:
    """Add a node's attributes to its message.

    Args:
        proto: The message.
        node: The node.
        graph_to_proto: Converts bodies; None: the node has none.
        ignored: Names of attributes to leave out.

    Raises:
        ModelError: ONNX has no attribute type for an attribute's value.
        TypeError, ValueError: a value is not of the attribute's type; a note names the attribute.
    """
    schema = find_schema(node.op_type, node.domain, node.version) if node.attrs else None
    kinds = {} if schema is None or node.subgraph is not None else schema.attributes
    for name, value in node.attrs.items():
        kind = kinds[name].kind if name in kinds else None
        try:
            if name not in ignored:
                proto.attribute.append(attr_to_proto(name, value, kind, graph_to_proto))
        except (TypeError, ValueError) as error:
            error.add_note(f"attribute {name!r} of node {node.name!r} ({node.op_type})")
            raise
