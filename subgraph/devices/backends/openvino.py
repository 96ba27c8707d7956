"""OPENVINO: regions run by OpenVINO, on its CPU, GPU or NPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import numpy as np

from subgraph.devices.backends.base import (
    Backend,
    BackendOptions,
    LibraryModel,
    writable_view,
)
from subgraph.graph.graph import Node
from subgraph.graph.types import Array
from subgraph.runtime.settings import option

# Positions of operands that are indices or sizes, by operator. OpenVINO computes int64 in int32,
# which is right for these operands only.
_INT64_OPERANDS = {
    "Gather": (1,),
    "GatherElements": (1,),
    "GatherND": (1,),
    "ReduceL1": (1,),
    "ReduceL2": (1,),
    "ReduceLogSum": (1,),
    "ReduceLogSumExp": (1,),
    "ReduceMax": (1,),
    "ReduceMean": (1,),
    "ReduceMin": (1,),
    "ReduceProd": (1,),
    "ReduceSum": (1,),
    "ReduceSumSquare": (1,),
    "Reshape": (1,),
    "Slice": (1, 2, 3, 4),
    "Split": (1,),
    "Squeeze": (1,),
    "Tile": (1,),
    "Expand": (1,),
    "Pad": (1, 3),
    "Unsqueeze": (1,),
}


@attrs.frozen
class OpenvinoOptions(BackendOptions):
    """Options of OPENVINO."""

    DEVICE: str = option("CPU", "device of OpenVINO, such as CPU, GPU or NPU")
    PRECISION: str = option(
        "f32",
        "precision that OpenVINO computes in; empty: its own choice, bfloat16 on some processors",
        values=("", "f32", "bf16", "f16"),
    )


class OpenvinoDevice(Backend):
    """Runs regions by OpenVINO, in float32 unless PRECISION says otherwise."""

    options_class = OpenvinoOptions
    module = "openvino"
    requirement = "openvino >= 2025.0"
    title = "OpenVINO"
    empty_tensors = False
    dtypes = frozenset(("float32", "int8", "uint8", "int32", "int64", "bool"))

    def start(self) -> None:
        """Import OpenVINO and make its core."""
        super().start()
        library: Any = self.library
        self._core = library.Core()

    def refusal(self, node: Node) -> str:
        """Refuse int64 other than as an index or size, and forms that OpenVINO computes otherwise.

        It computes int64 in int32, which is right for indices and sizes only.
        """
        if _computes_otherwise(node):
            return f"OpenVINO computes this form of {node.op_type} otherwise than ONNX"
        allowed = _INT64_OPERANDS.get(node.op_type, ())
        values = [v for k, v in enumerate(node.inputs) if k not in allowed]
        for value in (*values, *node.outputs):
            if value is not None and getattr(value.type, "dtype", "") == "int64":
                return f"OpenVINO computes int64 in int32, and {value.name!r} is no index"
        return ""

    def try_library_model(self, model: bytes, options: Any) -> None:
        """Query OpenVINO, which is fast; compile a model that it refuses, for the reason."""
        read = self._core.read_model(model)
        supported = self._core.query_model(read, options.DEVICE)
        if any(op.friendly_name not in supported for op in read.get_ops()):
            self.compile_library_model(model, options)

    def compile_library_model(self, model: bytes, options: Any) -> LibraryModel:
        """Return a compiled model of OpenVINO."""
        settings: dict[str, Any] = {"PERFORMANCE_HINT": "LATENCY"}
        if options.INFERENCE_NUM_THREADS:
            settings["INFERENCE_NUM_THREADS"] = options.INFERENCE_NUM_THREADS
        if options.PRECISION:
            settings["INFERENCE_PRECISION_HINT"] = options.PRECISION
        read = self._core.read_model(model)
        return _CompiledModel(
            self._core.compile_model(read, options.DEVICE, settings), self.library
        )


class _CompiledModel:
    """A compiled model; each runner has an infer request of its own."""

    def __init__(self, compiled: Any, library: Any) -> None:
        self._compiled = compiled
        self._tensor = library.Tensor

    def runner(self) -> Callable[[Sequence[Array], Sequence[Array | None]], Sequence[Array]]:
        request, tensor = self._compiled.create_infer_request(), self._tensor

        def call(arrays: Sequence[Array], into: Sequence[Array | None]) -> Sequence[Array]:
            # The request does not hold its arrays: the copies of this list live until it has run.
            passed = [array if array.dtype != np.int64 else _clipped(array) for array in arrays]
            for k, array in enumerate(passed):
                request.set_input_tensor(k, tensor(writable_view(array), shared_memory=True))
            for k, target in enumerate(into):
                if target is not None:
                    request.set_output_tensor(k, tensor(target, shared_memory=True))
            request.infer()
            return [
                np.array(request.get_output_tensor(k).data) if target is None else target
                for k, target in enumerate(into)
            ]

        return call


def _computes_otherwise(node: Node) -> bool:
    """Return whether results would be wrong (OpenVINO 2026.4, on its CPU).

    The bias of LRN is ignored, LpNormalization adds a small number to the norm, and the Softmax of
    opset 11 is along one axis where ONNX counts all from this one on as one.
    """
    if node.op_type == "LRN":
        return bool(node.attrs.get("bias", 1.0) != 1.0)
    if node.op_type == "Softmax" and node.version == 11:
        rank = getattr(node.outputs[0].type, "rank", None)
        return rank is None or node.attrs.get("axis", 1) not in (-1, rank - 1)
    return node.op_type == "LpNormalization"


def _clipped(array: Array) -> Array:
    """Return indices or sizes, those beyond int32, in which OpenVINO computes, clipped."""
    return np.clip(array, -(1 << 31), (1 << 31) - 1)
