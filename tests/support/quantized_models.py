"""QDQ models for tests: writing them, and running them on devices, in ONNX Runtime and in float64.

ONNX Runtime itself computes some of the same models in floats: signed bytes, an activation that is
not absorbed by the zero point. What lies within the errors of float32 of a tie between two bytes
may become either; float64 tells which do. Behind further operators such a byte is one step apart.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime as ort
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import subgraph as sg
from subgraph.graph.types import Array
from subgraph.transform.pass_manager import apply_pass

KINDS = {"uint8": TensorProto.UINT8, "int8": TensorProto.INT8}
# Without a dot product of bytes, Winograd's algorithm in float32 runs convolutions of 3 x 3.
INTEGERS = {"WINOGRAD": False}


class Builder:
    """Writes a QDQ model as quantisers do. Weights have seven bits.

    ONNX Runtime's kernels for machines without a dot product of bytes saturate with more.
    """

    def __init__(self, seed: int, dtype: str = "uint8") -> None:
        self.rng = np.random.default_rng(seed)
        self.dtype = dtype
        self.nodes: list[Any] = []
        self.weights: list[Any] = []
        self.scales: dict[str, tuple[str, str]] = {}

    def constant(self, name: str, array: Any) -> str:
        self.weights.append(numpy_helper.from_array(np.asarray(array), name))
        return name

    def node(self, op_type: str, inputs: list[str], name: str, **attributes: Any) -> str:
        self.nodes.append(helper.make_node(op_type, inputs, [name], **attributes))
        return name

    def scale(self, name: str, scale: float) -> tuple[str, str]:
        info = np.iinfo(self.dtype)
        zero = np.array(self.rng.integers(info.min, info.max + 1), self.dtype)
        pair = (
            self.constant(f"{name}_scale", np.float32(scale)),
            self.constant(f"{name}_zero", zero),
        )
        self.scales[name] = pair
        return pair

    def quantize(self, real: str, name: str, scale: float, like: str = "") -> str:
        """Quantise a real value and give it back as a real value."""
        pair = self.scales[like] if like else self.scale(name, scale)
        self.scales[name] = pair
        self.node("QuantizeLinear", [real, *pair], name)
        return self.dequantize(name)

    def dequantize(self, name: str) -> str:
        return self.node("DequantizeLinear", [name, *self.scales[name]], f"{name}_real")

    def weight(self, name: str, shape: tuple[int, ...], axis: int | None) -> tuple[str, Any]:
        count = 1 if axis is None else shape[axis]
        scale = self.rng.uniform(0.01, 0.03, count).astype(np.float32)
        scale = scale[0] if axis is None else scale
        held = [
            self.constant(name, self.rng.integers(-63, 64, shape).astype(np.int8)),
            self.constant(f"{name}_scale", scale),
            self.constant(f"{name}_zero", np.zeros(np.shape(scale), np.int8)),
        ]
        axes = {} if axis is None else {"axis": axis}
        return self.node("DequantizeLinear", held, f"{name}_real", **axes), scale

    def bias(self, name: str, count: int, scale: Any) -> str:
        scale = np.broadcast_to(np.asarray(scale, np.float32), count)
        held = [
            self.constant(name, self.rng.integers(-3000, 3000, count).astype(np.int32)),
            self.constant(f"{name}_scale", scale.copy()),
            self.constant(f"{name}_zero", np.zeros(count, np.int32)),
        ]
        return self.node("DequantizeLinear", held, f"{name}_real", axis=0)

    def model(self, inputs: dict[str, tuple[str, tuple[int, ...]]], output: str) -> ModelProto:
        given_ = [
            helper.make_tensor_value_info(k, KINDS.get(d, TensorProto.FLOAT), s)
            for k, (d, s) in inputs.items()
        ]
        kind = KINDS[self.dtype] if output in self.scales else TensorProto.FLOAT
        result = helper.make_tensor_value_info(output, kind, None)
        graph = helper.make_graph(self.nodes, "g", given_, [result], self.weights)
        opsets = [helper.make_opsetid("", 17)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=9)


def operators(model: ModelProto) -> list[str]:
    return [node.op_type for node in apply_pass(sg.load(model), "CpuFusion").nodes]


def by_onnxruntime(model: ModelProto, inputs: dict[str, Array]) -> Array:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return np.asarray(session.run(None, inputs)[0])


def tensors(model: ModelProto) -> dict[str, Array]:
    return {held.name: numpy_helper.to_array(held) for held in model.graph.initializer}


def as_bytes(real: Array, held: list[Array]) -> Array:
    """Round real numbers by a scale and a zero point, as QuantizeLinear says."""
    scale, zero = held
    info = np.iinfo(zero.dtype)
    return np.clip(np.rint(real / scale) + zero, info.min, info.max).astype(zero.dtype)


def by_integers(model: ModelProto, inputs: dict[str, Array]) -> Array:
    """Run the model's one product on ONNX Runtime's integer kernel; activations cut its bytes."""
    (node,) = (n for n in model.graph.node if n.op_type in ("Conv", "MatMul", "Gemm"))
    of = {n.output[0]: list(n.input) for n in model.graph.node if n.op_type == "DequantizeLinear"}
    left, right, *bias = (of[name] for name in node.input)
    added, end = [name for b in bias for name in b[:1]], ["y_scale", "y_zero"]
    rest = [*added, *end] if node.op_type == "Gemm" else [*end, *added]
    name = "QGemm" if node.op_type == "Gemm" else f"QLinear{node.op_type}"
    one = NodeProto()
    one.CopyFrom(node)
    one.op_type, one.domain = name, "com.microsoft" if name == "QGemm" else ""
    del one.input[:]
    one.input.extend([*left, *right, *rest])
    one.output[0] = "y"
    alone = ModelProto()
    alone.CopyFrom(model)
    del alone.graph.node[:]
    alone.graph.node.append(one)
    alone.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    result, held = by_onnxruntime(alone, inputs), tensors(model)
    pair = [held[name] for name in end]
    for cut in model.graph.node:
        if cut.op_type == "Relu":
            result = np.maximum(result, as_bytes(np.zeros(()), pair))
        elif cut.op_type == "Clip":
            result = np.clip(result, *(as_bytes(held[name], pair) for name in cut.input[1:]))
    return result


def by_reference(node: NodeProto, inputs: list[Array]) -> Array:
    (result,) = ReferenceEvaluator(node).run(None, dict(zip(node.input, inputs, strict=True)))
    return np.asarray(result)


def steps(model: ModelProto, inputs: dict[str, Array]) -> Array:
    """Return what the last QuantizeLinear rounds, in float64 throughout but for the weights'."""
    held = {**tensors(model), **inputs}
    for node in model.graph.node:
        given_ = [held[name] for name in node.input]
        if node.op_type == "DequantizeLinear":
            whole, scale, zero = (a.astype(np.float64) for a in given_)
            if scale.ndim:
                sides = [1] * whole.ndim
                sides[node.attribute[0].i] = -1
                scale, zero = scale.reshape(sides), zero.reshape(sides)
            made = (whole - zero) * scale
        elif node.op_type == "QuantizeLinear" and node.output[0] != "y":
            made = by_reference(node, given_)
        elif node.op_type == "QuantizeLinear":
            info = np.iinfo(given_[2].dtype)
            made = np.clip(given_[0] / np.float64(given_[1]) + given_[2], info.min, info.max)
        else:
            made = by_reference(node, [a.astype(np.float64) for a in given_])
        held[node.output[0]] = made
    return held["y"]


def by_devices(model: ModelProto, inputs: dict[str, Array]) -> list[Array]:
    configs: dict[str, dict[str, Any]] = {"CPU": INTEGERS, "REFERENCE": {}}
    compiled = [sg.compile_model(sg.load(model), *each) for each in configs.items()]
    return [next(iter(one(inputs).values())) for one in compiled]


def check(model: ModelProto, inputs: dict[str, Array], *, exact: bool = True) -> None:
    """Check a model of one product: rounded to nearest, its ties as ``exact`` integers have them.

    Float32 rounds scales and scaled sums four times: 1e-4 of a step. Floats round every sum.
    """
    got, real = by_devices(model, inputs)
    assert got.dtype == real.dtype
    if exact:
        np.testing.assert_array_equal(got, by_integers(model, inputs))
    wanted = steps(model, inputs)
    floats = "FusedQLinear" not in "".join(operators(model))
    np.testing.assert_allclose(got, wanted, rtol=0, atol=0.5 + (1e-2 if floats else 1e-4))
    np.testing.assert_allclose(real, wanted, rtol=0, atol=0.5 + 1e-2)


def drawn(b: Builder, shape: tuple[int, ...]) -> Array:
    info = np.iinfo(b.dtype)
    return b.rng.integers(info.min, info.max + 1, shape).astype(b.dtype)
