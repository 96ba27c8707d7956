"""The Graph API of oneDNN, reached by ctypes, and the operators of ONNX in its terms.

The numbers of operations and attributes, and the layout of a logical tensor, are those of oneDNN's
C interface (dnnl_graph_types.h), which are the same in all releases of version 3.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from ctypes import POINTER, byref, c_float, c_int, c_int64, c_size_t, c_uint8, c_void_p
from typing import Any, TypeAlias

import attrs
import numpy as np

from subgraph.devices.backends.libraries.translation import NodeForm

_FLOAT32 = 3  # dnnl_f32, as the following a value of oneDNN's C interface
_CPU = 1  # dnnl_cpu
_UNKNOWN_RANK, _UNKNOWN_SIZE = -1, -(1 << 63)  # DNNL_GRAPH_UNKNOWN_NDIMS, DNNL_GRAPH_UNKNOWN_DIM
_ANY, _STRIDED = 1, 2  # layouts: chosen by the library, given by strides
_VARIABLE, _CONSTANT = 1, 2  # properties of a tensor
# Operations by name; their numbers in the C interface.
_KINDS = {
    **{"abs": 0, "add": 2, "avg_pool": 3, "batch_norm_inference": 7, "clamp": 10, "concat": 12},
    **{
        "convolution": 13,
        "conv_transpose": 16,
        "divide": 20,
        "elu": 23,
        "end": 25,
        "exp": 26,
        "gelu": 27,
    },
    **{"hard_swish": 29, "layer_norm": 33, "leaky_relu": 35, "log": 36, "log_softmax": 37},
    **{"matmul": 39, "maximum": 40, "max_pool": 41, "minimum": 43, "mish": 44, "multiply": 46},
    **{"reciprocal": 50, "reduce_l1": 51, "reduce_l2": 52, "reduce_mean": 54},
    **{"reduce_prod": 56, "reduce_sum": 57, "relu": 58, "round": 61},
    **{"sigmoid": 62, "softmax": 64, "sqrt": 68, "static_reshape": 72},
    **{"static_transpose": 73, "subtract": 74, "tanh": 75},
}
# Attributes by name, in groups that count up from a number of the C interface.
_GROUPS: tuple[tuple[int, tuple[str, ...]], ...] = (
    (0x1, ("alpha", "beta", "epsilon", "max", "min")),
    (0x30, ("axis", "begin_norm_axis", "groups")),
    (0x40, ("axes", "dilations", "dst_shape", "kernel", "order", "output_padding", "pads_begin")),
    (0x47, ("pads_end", "shape", "sizes", "src_shape", "strides")),
    (0x60, ("exclude_pad", "keep_dims", "keep_stats", "per_channel_broadcast", "special_zero")),
    (0x65, ("transpose_a", "transpose_b", "use_affine")),
    (0x80, ("auto_broadcast", "auto_pad", "coordinate_transformation_mode", "data_format")),
    (0x86, ("rounding_type", "weights_format")),
)
_ATTRIBUTES = {name: first + k for first, names in _GROUPS for k, name in enumerate(names)}


class LogicalTensor(ctypes.Structure):
    """``dnnl_graph_logical_tensor_t``: identity, shape, dtype and layout of a tensor."""

    _fields_ = (
        ("id", c_size_t),
        ("rank", c_int),
        ("dims", c_int64 * 12),
        ("dtype", c_int),
        ("property", c_int),
        ("layout", c_int),
        ("strides", c_int64 * 12),
    )

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes."""
        return tuple(self.dims[: self.rank])


class Library:
    """Functions of a loaded library; each raises RuntimeError if it fails.

    Attributes:
        engine: Handle of the library's CPU engine.
    """

    def __init__(self, path: str) -> None:
        """Load a library.

        Raises:
            OSError: It, or a library that it needs, cannot be loaded.
        """
        self._functions = ctypes.CDLL(path)
        self("graph_set_constant_tensor_cache", c_int(1))  # reordered weights stay in a partition
        self.engine = self.made("engine_create", c_int(_CPU), c_size_t(0))

    def __call__(self, name: str, *arguments: Any) -> None:
        """Call ``dnnl_`` and the name."""
        status = getattr(self._functions, f"dnnl_{name}")(*arguments)
        if status:
            raise RuntimeError(f"dnnl_{name} returned status {status}")

    def set_threads(self, count: int) -> None:
        """Set how many threads of OpenMP the calling thread's runs may use."""
        self._functions.omp_set_num_threads(c_int(count))

    def made(self, name: str, *arguments: Any) -> c_void_p:
        """Call a function of the library, and return the handle that it wrote for its caller.

        Args:
            name: Name of the function; its first parameter is the address of the handle.
            *arguments: Its other arguments.
        """
        handle = c_void_p()
        self(name, byref(handle), *arguments)
        return handle

    def number(self, name: str, *arguments: Any) -> int:
        """Return the number that a function writes into its last argument."""
        found = c_size_t()
        self(name, *arguments, byref(found))
        return found.value


def logical(number: int, shape: Sequence[int] | None, *, constant: bool = False) -> LogicalTensor:
    """Return a contiguous float32 tensor.

    Args:
        number: Its identity in a graph.
        shape: Sizes; None if unknown.
        constant: Whether its elements never change.
    """
    tensor = LogicalTensor(id=number, rank=_UNKNOWN_RANK, dtype=_FLOAT32, layout=_STRIDED)
    tensor.property = _CONSTANT if constant else _VARIABLE
    if shape is None:
        tensor.dims[:] = tensor.strides[:] = [_UNKNOWN_SIZE] * 12
        return tensor
    tensor.rank, step = len(shape), 1
    for axis in reversed(range(len(shape))):
        tensor.dims[axis], tensor.strides[axis] = shape[axis], step
        step *= shape[axis]
    return tensor


def free_layout(tensor: LogicalTensor) -> LogicalTensor:
    """Return the tensor with a layout that the library chooses."""
    tensor.layout = _ANY
    return tensor


@attrs.frozen
class Form(NodeForm):
    """A node of ONNX that is translated to an operation.

    Attributes:
        ranks: Rank of each input.
        constants: Elements of small weights by the position of the input.
        outputs: Number of its outputs.
    """

    ranks: Sequence[int]
    constants: Mapping[int, Sequence[float]]
    outputs: int

    def require(self, fits: bool, what: str) -> None:
        """Raise NotImplementedError, which names ``what``, unless ``fits``."""
        if not fits:
            raise NotImplementedError(f"oneDNN has no form with {what}")


# Name of an operation, positions of its inputs, and its attributes.
Operation: TypeAlias = tuple[str, Sequence[int], dict[str, Any]]


def _windows(form: Form, rank: int) -> dict[str, Any]:
    form.only("auto_pad", "NOTSET")
    pads = list(form.get("pads", [0] * 2 * rank)) or [0] * 2 * rank
    return {
        "strides": list(form.get("strides", ())) or [1] * rank,
        "dilations": list(form.get("dilations", ())) or [1] * rank,
        "pads_begin": pads[:rank],
        "pads_end": pads[rank:],
        "data_format": "NCX",
    }


def _conv(form: Form) -> Operation:
    found = _windows(form, form.ranks[0] - 2)
    rest = {"groups": int(form.get("group", 1)), "weights_format": "OIX"}
    return "convolution", range(len(form.ranks)), {**found, **rest}


def _conv_transpose(form: Form) -> Operation:
    rank = form.ranks[0] - 2
    form.require(not form.get("output_shape", ()), "output_shape")
    found = _windows(form, rank)
    found["output_padding"] = list(form.get("output_padding", ())) or [0] * rank
    rest = {"groups": int(form.get("group", 1)), "weights_format": "IOX"}
    return "conv_transpose", range(len(form.ranks)), {**found, **rest}


def _pool(form: Form) -> Operation:
    form.require(not form.get("ceil_mode", 0) and form.outputs == 1, "ceil_mode or indices")
    found = _windows(form, form.ranks[0] - 2)
    found["kernel"] = list(form.get("kernel_shape", ()))
    return "max_pool", (0,), {**found, "rounding_type": "floor"}


def _average(form: Form) -> Operation:
    _, inputs, found = _pool(form)
    form.require(all(d == 1 for d in found.pop("dilations")), "dilations of an average")
    return "avg_pool", inputs, {**found, "exclude_pad": not form.get("count_include_pad", 0)}


def _matmul(form: Form) -> Operation:
    form.require(min(form.ranks) > 1, "vectors")
    return "matmul", (0, 1), {}


def _gemm(form: Form) -> Operation:
    form.require(form.get("alpha", 1.0) == form.get("beta", 1.0) == 1.0, "alpha or beta")
    form.require(len(form.ranks) < 3 or form.ranks[2] == 1, "C of other ranks than 1")
    sides = {"transpose_a": bool(form.get("transA", 0)), "transpose_b": bool(form.get("transB", 0))}
    return "matmul", range(len(form.ranks)), sides


def _both(name: str) -> Callable[[Form], Operation]:
    """Return the translation of an operator with two operands that broadcast."""

    def entry(form: Form) -> Operation:
        form.require(len(form.ranks) == 2, "other than two operands")
        return name, (0, 1), {"auto_broadcast": "numpy"}

    return entry


def _one(name: str, **defaults: float) -> Callable[[Form], Operation]:
    """Return the translation of an operator with one operand and float attributes."""
    return lambda form: (name, (0,), {k: float(form.get(k, v)) for k, v in defaults.items()})


def _gelu(form: Form) -> Operation:
    form.only("approximate", "none")
    return "gelu", (0,), {}


def _clip(form: Form) -> Operation:
    bounds: list[float] = []
    for k, name in ((1, "min"), (2, "max")):
        number = form.get(name, None)
        if k < len(form.ranks) and form.ranks[k] >= 0:
            form.require(k in form.constants, "bounds that are computed")
            number = form.constants[k][0]
        limit = float(np.finfo(np.float32).max) * (1 if k == 2 else -1)
        bounds.append(limit if number is None else float(number))
    form.require(bounds[0] <= bounds[1], "bounds in reverse order")
    return "clamp", (0,), {"min": bounds[0], "max": bounds[1]}


def _softmax(name: str) -> Callable[[Form], Operation]:
    def entry(form: Form) -> Operation:
        axis = int(form.get("axis", -1 if form.version > 12 else 1))
        last = axis in (-1, form.ranks[0] - 1)
        form.require(form.version > 12 or last, "several axes")
        return name, (0,), {"axis": axis}

    return entry


def _reduce(name: str) -> Callable[[Form], Operation]:
    def entry(form: Form) -> Operation:
        computed = len(form.ranks) > 1 and 1 not in form.constants
        form.require(not computed, "axes that are computed")
        axes = [int(axis) for axis in form.constants.get(1, form.get("axes", ()))]
        form.require(bool(axes) or not form.get("noop_with_empty_axes", 0), "no axes")
        axes = axes or list(range(form.ranks[0]))
        return name, (0,), {"axes": axes, "keep_dims": bool(form.get("keepdims", 1))}

    return entry


def _global_average(form: Form) -> Operation:
    axes = list(range(2, form.ranks[0]))
    return "reduce_mean", (0,), {"axes": axes, "keep_dims": True}


def _batch_norm(form: Form) -> Operation:
    form.require(not form.get("training_mode", 0) and form.outputs == 1, "statistics")
    found = {"epsilon": float(form.get("epsilon", 1e-5)), "data_format": "NCX"}
    return "batch_norm_inference", range(5), found


def _layer_norm(form: Form) -> Operation:
    form.require(form.outputs == 1 and len(form.ranks) == 3, "statistics, or without bias")
    axis = int(form.get("axis", -1))
    form.require(axis in (-1, form.ranks[0] - 1), "several axes")
    found: dict[str, Any] = {"epsilon": float(form.get("epsilon", 1e-5)), "keep_stats": False}
    return "layer_norm", range(3), {**found, "begin_norm_axis": -1, "use_affine": True}


def _reshape(form: Form) -> Operation:
    form.require(1 in form.constants and not form.get("allowzero", 0), "a computed shape")
    shape = [int(n) for n in form.constants[1]]
    return "static_reshape", (0,), {"shape": shape, "special_zero": True}


def _flatten(form: Form) -> Operation:
    form.require(form.get("axis", 1) == 1, "other axes than 1")
    return "static_reshape", (0,), {"shape": [0, -1], "special_zero": True}


def _transpose(form: Form) -> Operation:
    order = list(form.get("perm", ())) or list(range(form.ranks[0] - 1, -1, -1))
    return "static_transpose", (0,), {"order": order}


def _concat(form: Form) -> Operation:
    return "concat", range(len(form.ranks)), {"axis": int(form.get("axis", 1))}  # 1 in opset 1


# Not Softplus, which loses the digits of small results, nor ReduceMax and ReduceMin, which make
# finite numbers of infinities.
OPERATORS: dict[str, Callable[[Form], Operation]] = {
    **{name: _one(name.lower()) for name in ("Abs", "Exp", "Log", "Mish", "Relu", "Round")},
    **{name: _one(name.lower()) for name in ("Reciprocal", "Sigmoid", "Sqrt", "Tanh")},
    **{"Elu": _one("elu", alpha=1.0), "LeakyRelu": _one("leaky_relu", alpha=0.01)},
    **{"Gelu": _gelu, "HardSwish": _one("hard_swish"), "Clip": _clip},
    **{"Add": _both("add"), "Sub": _both("subtract"), "Mul": _both("multiply")},
    **{"Div": _both("divide"), "Max": _both("maximum"), "Min": _both("minimum")},
    **{f"Reduce{name}": _reduce(f"reduce_{name.lower()}") for name in ("L1", "L2", "Mean")},
    **{f"Reduce{name}": _reduce(f"reduce_{name.lower()}") for name in ("Prod", "Sum")},
    **{"Softmax": _softmax("softmax"), "LogSoftmax": _softmax("log_softmax")},
    **{"Conv": _conv, "ConvTranspose": _conv_transpose, "MaxPool": _pool, "AveragePool": _average},
    **{"GlobalAveragePool": _global_average, "MatMul": _matmul, "Gemm": _gemm, "Concat": _concat},
    **{"BatchNormalization": _batch_norm, "LayerNormalization": _layer_norm},
    **{"Reshape": _reshape, "Flatten": _flatten, "Transpose": _transpose},
}


def add_operation(
    library: Library,
    graph: c_void_p,
    operation: tuple[str, dict[str, Any]],
    number: int,
    ports: tuple[Sequence[LogicalTensor], Sequence[LogicalTensor]],
) -> None:
    """Add an operation to a graph.

    Args:
        library: The library.
        graph: The graph's handle.
        operation: Name and attributes.
        number: Identity of the operation.
        ports: Its inputs and its outputs.

    Raises:
        RuntimeError: The library refuses it.
    """
    kind, attributes = operation
    made = library.made("graph_op_create", c_size_t(number), c_int(_KINDS[kind]), kind.encode())
    try:
        for name, value in attributes.items():
            _set_attribute(library, made, _ATTRIBUTES[name], value)
        for way, tensors in zip(("input", "output"), ports, strict=True):
            for tensor in tensors:
                library(f"graph_op_add_{way}", made, byref(tensor))
        library("graph_add_op", graph, made)
    finally:
        library("graph_op_destroy", made)


def _set_attribute(library: Library, operation: c_void_p, number: int, value: Any) -> None:
    if isinstance(value, str):
        text = value.encode()
        library("graph_op_set_attr_str", operation, c_int(number), text, c_size_t(len(text)))
        return
    values: list[Any] = [*value] if isinstance(value, list) else [value]
    kinds: dict[type, tuple[str, Any]] = {
        bool: ("bool", c_uint8),
        float: ("f32", c_float),
        int: ("s64", c_int64),
    }
    suffix, kind = kinds[type(values[0])] if values else ("s64", c_int64)
    elements = (kind * len(values))(*values)
    arguments = c_int(number), elements, c_size_t(len(values))
    library(f"graph_op_set_attr_{suffix}", operation, *arguments)


def partitions_of(library: Library, graph: c_void_p) -> list[c_void_p]:
    """Return the partitions of a complete graph that compute something, fused where possible.

    Raises:
        NotImplementedError: The library has no kernel for one of them.
    """
    library("graph_graph_finalize", graph)
    library("graph_graph_filter", graph, c_int(1))  # dnnl_graph_partition_policy_fusion
    count = library.number("graph_graph_get_partition_num", graph)
    handles = (c_void_p * count)()
    library("graph_graph_get_partitions", graph, c_size_t(count), handles)
    found = [p for p in map(c_void_p, handles) if ports_of(library, p, "output")]
    for partition in found:
        supported = c_uint8()
        library("graph_partition_is_supported", partition, byref(supported))
        if not supported.value:
            raise NotImplementedError("oneDNN has no kernel for this form")
    return found


def ports_of(library: Library, partition: c_void_p, way: str) -> list[int]:
    """Return the identities of a partition's tensors.

    Args:
        library: The library.
        partition: The partition's handle.
        way: "input" or "output".
    """
    count = library.number(f"graph_partition_get_{way}_ports_num", partition)
    ports = (LogicalTensor * count)()
    library(f"graph_partition_get_{way}_ports", partition, c_size_t(count), ports)
    return [port.id for port in ports]


def compiled(
    library: Library,
    partition: c_void_p,
    inputs: Sequence[LogicalTensor],
    outputs: Sequence[LogicalTensor],
) -> tuple[c_void_p, list[LogicalTensor]]:
    """Compile a partition for the sizes and layouts of its inputs.

    Args:
        library: The library.
        partition: The partition's handle.
        inputs: Its inputs.
        outputs: Its outputs; unknown sizes and free layouts are filled in.

    Returns:
        The handle of the compiled partition, and the outputs.

    Raises:
        RuntimeError: The library cannot compile it.
    """
    made = library.made("graph_compiled_partition_create", partition)
    pointers = [
        (POINTER(LogicalTensor) * len(row))(*map(ctypes.pointer, row)) for row in (inputs, outputs)
    ]
    sizes = c_size_t(len(inputs)), c_size_t(len(outputs))
    library(
        "graph_partition_compile",
        partition,
        made,
        sizes[0],
        pointers[0],
        sizes[1],
        pointers[1],
        library.engine,
    )
    for tensor in outputs:
        library(
            "graph_compiled_partition_query_logical_tensor",
            made,
            c_size_t(tensor.id),
            byref(tensor),
        )
    return made, list(outputs)


def with_biases(
    body: Any, shapes: Mapping[str, tuple[int, ...]]
) -> list[tuple[Any, str, Sequence[str]]]:
    """Return the nodes of a model, each MatMul together with the Add of its bias.

    oneDNN would add the bias in the product's loop by itself. If a residual is added, too, it has
    no fast kernel on AVX2 for both, and takes 1000 times as long.

    Args:
        body: An ``onnx.GraphProto``.
        shapes: Shapes of its values; 0 for an unknown size.

    Returns:
        For each operation its node, the name of its bias or "", and the names of its results.
    """
    uses = Counter(name for node in body.node for name in node.input)
    uses.update(port.name for port in body.output)
    given = {tensor.name for tensor in (*body.initializer, *body.input)}
    adds: dict[str, tuple[Any, str]] = {}
    for node in body.node:
        if node.op_type == "Add":
            for name, other in (node.input, node.input[::-1]):
                if other in given and uses[name] == 1:
                    adds[name] = (node, other)
    operations: list[tuple[Any, str, Sequence[str]]] = []
    joined: set[str] = set()
    for node in body.node:
        product = node.output[0]
        add, bias = adds.get(product, (None, ""))
        columns = shapes.get(product, ())[-1:]
        if node.op_type == "MatMul" and bias and all(columns) and shapes[bias] == columns != ():
            operations.append((node, bias, add.output))
            joined.add(add.output[0])
        elif product not in joined:
            operations.append((node, "", node.output))
    return operations
