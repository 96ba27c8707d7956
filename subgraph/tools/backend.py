"""ONNX's backend interface over Subgraph's devices: ``prepare``, ``run_model``, ``run_node``.

The module implements `onnx.backend.base.Backend`, for ``onnx.backend.test.BackendTest`` and others.
Device strings are Subgraph's ("CPU", "REFERENCE", "HETERO:OPENCL,CPU", ...).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx.backend.base import Backend, BackendRep, namedtupledict

from subgraph.devices.default_core import default_core
from subgraph.errors import DeviceError
from subgraph.graph.types import Array, OptionalType, SequenceType, TensorType, ValueType, dtype_of
from subgraph.operators.protobuf import type_to_proto
from subgraph.operators.schema import newest_opset
from subgraph.runtime.compiled_model import CompiledModel


class SubgraphRep(BackendRep):
    """A model that `SubgraphBackend.prepare` has compiled.

    Attributes:
        compiled: The compiled model.
    """

    def __init__(self, compiled: CompiledModel) -> None:
        """Wrap a compiled model."""
        self.compiled = compiled
        self._names = [port.name for port in compiled.outputs]

    def run(self, inputs: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Run the model.

        Args:
            inputs: A sequence of values by position, a mapping by name, or one array.
            kwargs: Not used.

        Returns:
            The outputs as a tuple that also takes names as indices.
        """
        if isinstance(inputs, np.ndarray):
            inputs = [inputs]  # pyright: ignore[reportUnknownVariableType]
        results = self.compiled(inputs)
        outputs: tuple[Any, ...] = namedtupledict("Outputs", self._names)(
            *(results[k] for k in range(len(self._names)))
        )
        return outputs


class SubgraphBackend(Backend):
    """Runs ONNX models on Subgraph's devices."""

    @classmethod
    def prepare(cls, model: Any, device: str = "CPU", **kwargs: Any) -> SubgraphRep:
        """Return the model compiled for a device.

        Args:
            model: An ``onnx.ModelProto``, its bytes, a path, or a Graph.
            device: A device string.
            kwargs: Options of the device.

        Raises:
            SubgraphError: the model is not valid, or there is no such device.
        """
        return SubgraphRep(default_core().compile_model(model, device, kwargs or None))

    @classmethod
    def run_model(cls, model: Any, inputs: Any, device: str = "CPU", **kwargs: Any) -> Any:
        """Compile a model, run it once and return its outputs.

        Args:
            model: An ``onnx.ModelProto``, its bytes, a path, or a Graph.
            inputs: A sequence of values by position, a mapping by name, or one array.
            device: A device string.
            kwargs: Options of the device.
        """
        return cls.prepare(model, device, **kwargs).run(inputs)

    @classmethod
    def run_node(
        cls,
        node: onnx.NodeProto,
        inputs: Any,
        device: str = "CPU",
        outputs_info: Sequence[tuple[np.dtype[Any], tuple[int, ...]]] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run one node.

        Args:
            node: The node.
            inputs: Values of its inputs that are not omitted, by position or by name.
            device: A device string.
            outputs_info: Dtype and shape of each output; not used.
            kwargs: ``opset_version``, the operator set of the node's domain (default: the newest);
                the others are options of the device.

        Returns:
            The outputs, as of `SubgraphRep.run`.
        """
        domain = "" if node.domain == "ai.onnx" else node.domain
        version = int(kwargs.pop("opset_version", 0) or newest_opset(domain))
        names = list(dict.fromkeys(name for name in node.input if name))
        values: list[Any] = list(inputs)
        if isinstance(inputs, Mapping):
            values = [inputs[name] for name in names]
        model = _model_of(node, dict(zip(names, values, strict=True)), domain, version)
        return cls.run_model(model, values, device, **kwargs)

    @classmethod
    def supports_device(cls, device: str) -> bool:
        """Return whether all devices of a device string can start on this machine."""
        try:
            default_core().split(device)
        except DeviceError:
            return False
        return True


def _model_of(
    node: onnx.NodeProto, values: Mapping[str, Any], domain: str, version: int
) -> onnx.ModelProto:
    opsets = {domain: version}
    opsets.setdefault("", newest_opset())
    graph = onnx.GraphProto(name="node")
    graph.node.append(node)
    for name, value in values.items():
        graph.input.add(name=name).type.CopyFrom(type_to_proto(_type_of(value)))
    for name in node.output:
        if name:
            graph.output.add(name=name)
    imports = [onnx.helper.make_opsetid(of, number) for of, number in opsets.items()]
    return onnx.helper.make_model(graph, opset_imports=imports)


def _type_of(value: Any) -> ValueType | None:
    if value is None:
        return OptionalType(None)
    if isinstance(value, (list, tuple)):
        items: Sequence[Any] = value  # pyright: ignore[reportUnknownVariableType]
        return SequenceType(_type_of(items[0]) if items else None)
    array: Array = np.asarray(value)
    return TensorType(dtype_of(array), array.shape)


prepare = SubgraphBackend.prepare
run_model = SubgraphBackend.run_model
run_node = SubgraphBackend.run_node
supports_device = SubgraphBackend.supports_device
is_compatible = SubgraphBackend.is_compatible
