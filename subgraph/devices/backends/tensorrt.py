"""TENSORRT: regions run on NVIDIA cards by TensorRT or TensorRT-RTX."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np

from subgraph.devices.backends.base import (
    Backend,
    BackendOp,
    BackendOptions,
    LibraryModel,
    library_version,
)
from subgraph.devices.backends.libraries.cuda import Card
from subgraph.devices.backends.libraries.tensorrt_engine import Builder, EngineModel
from subgraph.graph.graph import Graph, Node
from subgraph.operators.subgraph_op import ExportFile, ImportFile, SubgraphOp
from subgraph.runtime.settings import option

# TensorRT-RTX, for the cards of personal computers, has the same interface under another name.
_RTX = not library_version("tensorrt", "tensorrt") and bool(
    library_version("tensorrt_rtx", "tensorrt-rtx")
)
# Operators whose models were parsed in tests. The parser aborts the process for some models with
# other operators, such as TopK with the number of elements as an input.
_OPERATORS = frozenset(
    {
        *("Abs", "Add", "And", "ArgMax", "ArgMin", "AveragePool", "BatchNormalization", "Cast"),
        *("Ceil", "Clip", "Concat", "Conv", "ConvTranspose", "Cos", "DepthToSpace", "Div", "Elu"),
        *("Equal", "Erf", "Exp", "Expand", "Flatten", "Floor", "Gather", "GatherElements"),
        *("Gelu", "Gemm", "GlobalAveragePool", "GlobalMaxPool", "Greater", "GreaterOrEqual"),
        *("HardSigmoid", "HardSwish", "Identity", "InstanceNormalization", "LRN"),
        *("LayerNormalization", "LeakyRelu", "Less", "LessOrEqual", "Log", "LogSoftmax", "MatMul"),
        *("Max", "MaxPool", "Min", "Mish", "Mul", "Neg", "Not", "Or", "PRelu", "Pow", "Reciprocal"),
        *("ReduceL1", "ReduceL2", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd"),
        *("ReduceSum", "ReduceSumSquare", "Relu", "Reshape", "Round", "Selu", "Sigmoid", "Sign"),
        *("Sin", "Slice", "Softmax", "Softplus", "Softsign", "SpaceToDepth", "Split", "Sqrt"),
        *("Squeeze", "Sub", "Sum", "Tan", "Tanh", "Transpose", "Unsqueeze", "Where", "Xor"),
    }
)


@attrs.frozen
class TensorrtOptions(BackendOptions):
    """Options of TENSORRT."""

    WEIGHTS: str = option(
        "inside",
        "'inside' builds weights into the engine, which is built again for new values; 'refit' "
        "replaces them in a copy of the engine where TensorRT can, and builds it again elsewhere; "
        "'inputs' passes them at every run",
        values=("inside", "refit", "inputs"),
    )
    PRECISION: str = option(
        "f32",
        "how products of float32 are computed: f32, or tf32, which drops 13 of the 23 bits",
        values=("f32", "tf32"),
    )
    SHAPES: str = option(
        "range",
        "for inputs of unknown sizes, 'range' builds one engine for the sizes seen so far, again "
        "when another is outside; 'exact' builds one for each set of sizes",
        values=("range", "exact"),
    )


class TensorrtDevice(Backend):
    """Runs regions by engines, which are built at the first run of a shape."""

    options_class = TensorrtOptions
    module = "tensorrt_rtx" if _RTX else "tensorrt"
    requirement = "tensorrt-rtx >= 1.4" if _RTX else "tensorrt >= 10.1"
    title = "TensorRT-RTX" if _RTX else "TensorRT"
    empty_tensors = False
    dtypes = frozenset(("float32", "float16", "int32", "int64", "bool"))

    def load(self) -> Any:
        """Import the library, whose shared libraries are loaded with it."""
        try:
            return super().load()
        except (OSError, RuntimeError) as error:
            raise ImportError(f"its shared libraries cannot be loaded: {error}") from error

    def start(self) -> None:
        """Import the library and find the card."""
        super().start()
        self._builder = Builder(self.library)
        self._card = self.find_card()

    def find_card(self) -> Card | None:
        """Return the card; only without one, engines can be built but not run."""
        return Card(self.title)

    def refusal(self, node: Node) -> str:
        """Refuse operators with which TensorRT's parser was not tested."""
        known = node.op_type in _OPERATORS and not node.domain
        return "" if known else f"{node.op_type} is not left to TensorRT's parser"

    def try_library_model(self, model: bytes, options: Any) -> None:
        """Parse a model without building it, because a build takes much longer."""
        import onnx

        proto = onnx.load_from_string(model)  # the parser aborts for operands of wrong types
        onnx.shape_inference.infer_shapes(proto, check_type=True)
        self._builder.parsed(model)

    def compile_library_model(self, model: bytes, options: Any) -> LibraryModel:
        """Return the parsed model, whose engines are built when a shape is first run."""
        return EngineModel(self._builder, self._card, model, options)

    def create_op(self, graph: Graph, options: Any) -> SubgraphOp:
        """Return the op that runs a region, which exports its engines."""
        return TensorrtOp(graph, self, options)

    def capability(self) -> dict[str, str]:
        """Return the facts of the base class and the card, which an engine is built for."""
        return {**super().capability(), "card": "" if self._card is None else self._card.name}


class TensorrtOp(BackendOp):
    """Runs a region by TensorRT; an exported model has the engines."""

    def _engines(self) -> EngineModel:
        model = self.compiled()
        assert isinstance(model, EngineModel)
        return model

    def to_export(self, file: ExportFile) -> dict[str, Any] | None:
        """Write the engines that were built, and that of a region whose sizes are all known."""
        plans = self._engines().plans()
        return {
            "engines": [
                [low, high, file.array(np.frombuffer(plan, np.uint8))] for low, high, plan in plans
            ]
        }

    def restore(self, saved: Mapping[str, Any], file: ImportFile) -> None:
        """Take the engines, which are loaded at the first run."""
        for low, high, plan in saved["engines"]:
            shapes = [tuple(tuple(shape) for shape in shapes) for shapes in (low, high)]
            self._engines().stored.append((shapes[0], shapes[1], file.array(plan).tobytes()))
