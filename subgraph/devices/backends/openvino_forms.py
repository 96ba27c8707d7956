"""What OpenVINO computes otherwise than ONNX, and is therefore not given.

The lists are those of OpenVINO 2026.4 on its CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from subgraph.devices.backends.operand_checks import depends_on_scales, has_input
from subgraph.graph.graph import Node
from subgraph.operators.schema import find_schema

# Version of ONNX's operators. OpenVINO ignores attributes that operators got later (found by ONNX's
# test suite).
_KNOWN_OPSET = 24
# Positions of operands that are indices or sizes, by operator. OpenVINO computes int64 in int32,
# which is right for these operands only.
_INT64_OPERANDS = {
    **dict.fromkeys(("Gather", "GatherElements", "GatherND"), (1,)),
    **dict.fromkeys(("ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp"), (1,)),
    **dict.fromkeys(("ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd"), (1,)),
    **dict.fromkeys(("ReduceSum", "ReduceSumSquare"), (1,)),
    **dict.fromkeys(("Expand", "Reshape", "Split", "Squeeze", "Tile", "Unsqueeze"), (1,)),
    **{"Pad": (1, 3), "Slice": (1, 2, 3, 4)},
}
# Operators that OpenVINO computes in float32 for int32, which loses digits above 2**24.
_INT32_IN_FLOAT32 = frozenset(
    {
        *(
            "Div",
            "Einsum",
            "Gemm",
            "MatMul",
            "Mod",
            "PRelu",
            "Pow",
            "ReduceL1",
            "ReduceL2",
            "ReduceLogSum",
        ),
        *("ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum"),
        *("ReduceSumSquare", "Relu", "Resize"),
    }
)
# Operators whose results of int8 and uint8 end at the largest number instead of wrapping around.
_BYTES_SATURATE = frozenset(("Abs", "Add", "BitShift", "Einsum", "Mul", "Neg", "Sub"))
# Operators whose results are wrong, with the reason.
_WRONG = {
    **dict.fromkeys(("DFT", "STFT"), "loses digits"),
    "LpNormalization": "adds a small number to the norm",
    **dict.fromkeys(("Shrink", "ThresholdedRelu"), "makes NaN of infinities"),
    "Softplus": "loses the digits of small results",
}


def refusal(node: Node) -> str:
    """Return why a node must not run on OpenVINO; "" if it may."""
    if reason := _WRONG.get(node.op_type):
        return f"OpenVINO's {node.op_type} {reason}"
    differs = _DIFFERENT.get(node.op_type)
    if (differs is not None and differs(node)) or _is_newer(node):
        return f"OpenVINO computes this form of {node.op_type} otherwise than ONNX"
    dtype = getattr(node.outputs[0].type, "dtype", "")
    if dtype == "int32" and node.op_type in _INT32_IN_FLOAT32:
        return f"OpenVINO computes {node.op_type} of int32 in float32"
    if dtype in ("int8", "uint8") and node.op_type in _BYTES_SATURATE:
        return f"OpenVINO saturates {node.op_type} of {dtype}"
    allowed = _INT64_OPERANDS.get(node.op_type, ())
    values = [v for k, v in enumerate(node.inputs) if k not in allowed]
    for value in (*values, *node.outputs):
        if value is not None and getattr(value.type, "dtype", "") == "int64":
            return f"OpenVINO computes int64 in int32, and {value.name!r} is no index"
    return ""


def _is_newer(node: Node) -> bool:
    """Return whether a node has attributes or a dtype that its operator got after OpenVINO."""
    known = find_schema(node.op_type, node.domain, _KNOWN_OPSET)
    if known is None or node.domain:
        return False
    allowed = known.dtypes_of(0)
    first = getattr(node.inputs[0].type, "dtype", "") if node.inputs and node.inputs[0] else ""
    newer_dtype = bool(allowed and first) and first not in allowed
    return newer_dtype or not node.attrs.keys() <= known.attributes.keys()


def _is_causal_after_past(node: Node) -> bool:
    return bool(node.attrs.get("is_causal", 0)) and has_input(node, 4)


def _is_batchwise_or_peeps(node: Node) -> bool:
    return bool(node.attrs.get("layout", 0)) or (node.op_type == "LSTM" and has_input(node, 7))


def _may_have_no_axes(node: Node) -> bool:
    """Return whether a reduction along no axes computes its function of single elements.

    OpenVINO returns the elements as they are.
    """
    return bool(node.attrs.get("noop_with_empty_axes", 0))


def _reads_floats(node: Node) -> bool:
    """Return whether results are float32: infinite extrema and large remainders are wrong then."""
    return getattr(node.outputs[0].type, "dtype", "float32") == "float32"


def _has_bias_or_even_size(node: Node) -> bool:
    return bool(node.attrs.get("bias", 1.0) != 1.0) or node.attrs["size"] % 2 == 0


def _samples_otherwise(node: Node) -> bool:
    weighed = any(node.attrs.get(name, 0) for name in ("antialias", "exclude_outside"))
    return weighed or depends_on_scales(node)


def _has_computed_counts(node: Node) -> bool:
    """Return whether the counts of a Tile are no weight; results are then not written."""
    counts = node.inputs[1]
    return counts is not None and counts.parameter is None


def _has_many_axes(node: Node) -> bool:
    """Return whether a Softmax counts all axes from its own on as one, as before opset 13."""
    if not 0 < node.version < 13:
        return False
    rank = getattr(node.outputs[0].type, "rank", None)
    return rank is None or node.attrs.get("axis", 1) not in (-1, rank - 1)


# By operator: whether a node is of a form that is computed otherwise.
_DIFFERENT: dict[str, Callable[[Node], bool]] = {
    "Attention": _is_causal_after_past,
    **dict.fromkeys(("GRU", "LSTM", "RNN"), _is_batchwise_or_peeps),
    "LRN": _has_bias_or_even_size,
    **dict.fromkeys(("ReduceL1", "ReduceL2", "ReduceLogSum"), _may_have_no_axes),
    **dict.fromkeys(("ReduceLogSumExp", "ReduceSumSquare"), _may_have_no_axes),
    **dict.fromkeys(("Mod", "ReduceMax", "ReduceMin"), _reads_floats),
    "Resize": _samples_otherwise,
    **dict.fromkeys(("Hardmax", "LogSoftmax", "Softmax"), _has_many_axes),
    "Tile": _has_computed_counts,
}


def check_model(library: Any, read: Any, model: bytes) -> None:
    """Compare OpenVINO's form of a model with the model.

    Args:
        library: The package.
        read: What OpenVINO made of the model.
        model: The model.

    Raises:
        NotImplementedError: It has other inputs or other shapes than the model.
    """
    from onnx import load_from_string

    body = load_from_string(model).graph
    weights = {tensor.name for tensor in body.initializer}
    names = [port.name for port in body.input if port.name not in weights]
    if [name for name in names for port in read.inputs if name in port.get_names()] != names:
        raise NotImplementedError("OpenVINO leaves an operand out")
    # The constants that belong to a node may have the name of its result.
    ops = [op for op in read.get_ops() if op.get_type_name() != "Constant"]
    shapes = {
        name: port.get_partial_shape()
        for op in ops
        for port in op.outputs()
        for name in port.get_names()
    }
    for info in (*body.value_info, *body.output):
        shape, found = info.type.tensor_type.shape, shapes.get(info.name)
        if found is None or not info.type.tensor_type.HasField("shape"):
            continue
        sizes = [n.dim_value if n.HasField("dim_value") else -1 for n in shape.dim]
        if not found.compatible(library.PartialShape(sizes)):
            raise NotImplementedError(f"OpenVINO gives {info.name!r} the shape {found}")


def passed_through(read: Any) -> dict[int, int]:
    """Return the positions of results that are inputs, and the positions of these.

    OpenVINO does not write them.

    Args:
        read: The model before OpenVINO compiles it.
    """
    inputs = [port.get_node().friendly_name for port in read.inputs]
    sources = [result.input_value(0).get_node() for result in read.get_results()]
    return {
        k: inputs.index(source.friendly_name)
        for k, source in enumerate(sources)
        if source.get_type_name() == "Parameter"
    }
