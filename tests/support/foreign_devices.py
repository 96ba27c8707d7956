"""Two devices written as third parties would: one over ONNX Runtime, one of NumPy functions.

The first says and does everything in its own way (query, compile, runner); the second fills in what
`sg.Device` asks for, with an op of its own that keeps what it makes of weights.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from typing import Any

import attrs
import numpy as np
import onnxruntime
from onnxruntime.capi.onnxruntime_pybind11_state import RuntimeException

import subgraph as sg
from subgraph.devices.query import QueryResult
from subgraph.graph.parameters import Parameter
from subgraph.graph.types import Array
from subgraph.runtime.cancel import Cancel
from subgraph.runtime.compiled_model import CompiledModel
from subgraph.runtime.runner import Runner

_VERSION = version("onnxruntime")
_ORT_TAKES = frozenset(
    {
        *("Add", "Conv", "Gemm", "MatMul", "MaxPool", "Mul", "Neg", "Relu", "Sigmoid", "Softmax"),
        *("Sub", "Tanh", "Transpose"),
    }
)


@attrs.frozen
class OrtOptions(sg.DeviceOptions):
    """Options of the device over ONNX Runtime."""

    INFERENCE_NUM_THREADS: int = sg.option(1, "threads of an operator", minimum=1)


def _weights(graph: sg.Graph) -> list[sg.Value]:
    """Return the values of a graph that are weights and no inputs."""
    given = set(graph.inputs)
    return [v for v in graph.values() if v.parameter is not None and v not in given]


def _session(graph: sg.Graph, threads: int) -> onnxruntime.InferenceSession:
    """Return a session of a graph, its weights as further inputs."""
    inner = graph.clone()
    weights = _weights(inner)
    for value in weights:
        assert value.parameter is not None
        value.type, value.parameter = value.parameter.type, None
    inner = sg.Graph(
        [*inner.inputs, *weights], inner.outputs, inner.name, nodes=inner.nodes, opsets=graph.opsets
    )
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    model = sg.to_onnx(inner).SerializeToString()
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


class OrtDevice(sg.Device):
    """Runs whole graphs by ONNX Runtime; weights are inputs of its session."""

    options_class = OrtOptions

    def query_model(self, graph: sg.Graph, config: Any = None) -> QueryResult:
        self.options_for(config)
        reasons = {node.name: text for node in graph.nodes if (text := self._why_not(node))}
        taken = {node.name: self.name for node in graph.nodes if node.name not in reasons}
        return QueryResult(taken, reasons)

    def _why_not(self, node: sg.Node) -> str:
        if node.domain or node.op_type not in _ORT_TAKES:
            return f"{node.op_type} is not offered by this device"
        values = [v for v in (*node.inputs, *node.outputs) if v is not None]
        if not all(isinstance(v.type, sg.TensorType) and v.type.shape is not None for v in values):
            return "a shape is not known"
        inputs = {v: sg.input(v.name, type=v.type) for v in values if v not in node.outputs}
        alone = sg.Node(
            node.op_type,
            [None if v is None else inputs[v] for v in node.inputs],
            outputs=[sg.Value(v.name, v.type) for v in node.outputs],
            version=node.version,
            attrs=node.attrs,
        )
        graph = sg.Graph(list(inputs.values()), alone.outputs, "alone", opsets=_opsets(node))
        try:
            _session(graph, 1)
        except (RuntimeException, RuntimeError, ValueError) as error:
            return f"ONNX Runtime: {error}"
        except Exception as error:  # its other classes are children of Exception alone
            return f"ONNX Runtime: {type(error).__name__}: {error}"
        return ""

    def compile_model(self, graph: sg.Graph, config: Any = None) -> CompiledModel:
        options = self.options_for(config)
        found = self.query_model(graph, config)
        if found.reasons:
            told = "; ".join(f"{name!r}: {text}" for name, text in found.reasons.items())
            raise sg.UnsupportedOpError(f"{self.name} does not run {graph.name!r}: {told}")
        return OrtModel(graph, self, options)

    def metrics(self) -> dict[str, Any]:
        return {
            **super().metrics(),
            "FULL_DEVICE_NAME": f"ONNX Runtime {_VERSION}",
            "DEVICE_ARCHITECTURE": f"{platform.machine()} ort {_VERSION}",
        }


def _opsets(node: sg.Node) -> dict[str, int]:
    return {} if node.graph is None else dict(node.graph.opsets)


class OrtModel(CompiledModel):
    """A session and the weights that it is given."""

    def __init__(self, graph: sg.Graph, device: OrtDevice, options: OrtOptions) -> None:
        super().__init__(graph.clone(), device=device.name, options=options, core=device.core)
        self.session = _session(graph, options.INFERENCE_NUM_THREADS)
        self.weights = {v.name: v.parameter for v in _weights(self.graph) if v.parameter}

    def create_runner(self, cancel: Cancel) -> Runner:
        return OrtRunner(self, cancel)


class OrtRunner(Runner):
    def __init__(self, model: OrtModel, cancel: Cancel) -> None:
        super().__init__(cancel)
        self._model = model

    def run(self, inputs: Sequence[Any]) -> Sequence[Any]:
        model = self._model
        feeds = {v.name: item for v, item in zip(model.graph.inputs, inputs, strict=True)}
        feeds.update((name, weight.array) for name, weight in model.weights.items())
        wanted = {port.name for port in model.session.get_inputs()}
        given = {k: np.asarray(v, order="C") for k, v in feeds.items() if k in wanted}
        results = [np.array(each) for each in model.session.run(None, given)]
        if self.outputs is None:
            return results
        for position, target in enumerate(self.outputs):
            if target is not None:
                np.copyto(target, results[position])
                results[position] = target
        return results


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "Add": np.add,
    "Mul": np.multiply,
    "Neg": np.negative,
    "Abs": np.abs,
    "Relu": lambda x: np.maximum(x, 0),
    "Tanh": np.tanh,
    "MatMul": np.matmul,
}


class NumpyDevice(sg.Device):
    """Runs what NumPy has a function for, on float32; MatMul with a weight that it transposes."""

    def supports(self, node: sg.Node, options: Any) -> bool | sg.Reject:
        if node.domain or node.op_type not in _FUNCTIONS:
            return sg.Reject(f"NumPy has no function for {node.op_type}")
        types = [None if value is None else value.type for value in node.inputs]
        for type_ in types:
            if not isinstance(type_, sg.TensorType) or type_.dtype != "float32":
                return sg.Reject(f"{node.op_type} of {type_}; it computes in float32")
        weight = node.inputs[-1]
        if node.op_type == "MatMul" and (weight is None or weight.parameter is None):
            return sg.Reject("the second operand of MatMul is to be a weight")
        return True

    def create_op(self, graph: sg.Graph, options: Any) -> sg.SubgraphOp:
        return NumpyOp(graph)


class NumpyOp(sg.SubgraphOp):
    """Calls the functions node by node; a weight of MatMul is kept as its transpose."""

    def forward(self, inputs: list[Any]) -> list[Array]:
        values: dict[sg.Value, Any] = dict(zip(self.subgraph.inputs, inputs, strict=True))
        for node in self.subgraph.nodes:
            given = [self._operand(node, values[v]) for v in node.inputs if v is not None]
            made = _FUNCTIONS[node.op_type](*given)
            values[node.outputs[0]] = np.asarray(made, np.float32)
        return [np.array(values[value]) for value in self.subgraph.outputs]

    def _operand(self, node: sg.Node, given: Any) -> Array:
        if not isinstance(given, Parameter):
            return np.asarray(given)
        if node.op_type != "MatMul" or given.array.ndim < 2:
            return given.array
        made: Array = self.weights.get("transposed", _transposed, given)
        return np.swapaxes(made, -1, -2)


def _transposed(array: Array) -> Array:
    return np.ascontiguousarray(np.swapaxes(array, -1, -2))


FOREIGN: Mapping[str, type[sg.Device]] = {"ORT": OrtDevice, "NUMPY": NumpyDevice}
