"""TENSORRT without a card: TensorRT parses the networks, and ONNX Runtime runs them."""

from __future__ import annotations

from typing import Any

import numpy as np

from subgraph.devices.backends import tensorrt
from subgraph.devices.backends.libraries.cuda import Card
from subgraph.devices.backends.libraries.cudnn_graph import strides_of
from subgraph.devices.backends.libraries.tensorrt_engine import Builder, Shapes
from subgraph.graph.types import Array
from tests.support.cards.host_card import HostCard, HostRuntime


class Cardless(tensorrt.TensorrtDevice):
    """TENSORRT on a machine without a card: it parses and builds, and runs nothing."""

    def find_card(self) -> Card | None:
        return None


class OrtTensorrt(tensorrt.TensorrtDevice):
    """TENSORRT with ONNX Runtime in the place of engines: its own code runs, engines do not."""

    def start(self) -> None:
        super().start()
        assert self._card is not None
        self._builder = _HostBuilder(self.library, self._card.runtime)

    def find_card(self) -> Card | None:
        return HostCard()


class _HostBuilder(Builder):
    """Builds engines that ONNX Runtime runs; no weights are replaced in them."""

    def __init__(self, library: Any, runtime: HostRuntime) -> None:
        super().__init__(library)
        self.built: list[tuple[Shapes, Shapes, Shapes]] = []
        self._runtime = runtime

    def plan(self, model: bytes, options: Any, shapes: tuple[Shapes, Shapes, Shapes]) -> bytes:
        self.built.append(shapes)
        return model

    def loaded(self, plan: bytes) -> Any:
        return _HostEngine(self.library, plan, self._runtime)

    def refitted(self, model: bytes, key: bytes, weights: dict[str, bytes]) -> Any:
        return None


class _HostEngine:
    """The functions of an engine that are used, over a session of ONNX Runtime."""

    def __init__(self, library: Any, model: bytes, runtime: HostRuntime) -> None:
        import onnxruntime

        self.session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
        self.runtime = runtime
        self.ports = [
            port.name for port in (*self.session.get_inputs(), *self.session.get_outputs())
        ]
        self.num_io_tensors = len(self.ports)
        self._library = library
        self._model = model
        names = {"tensor(float)": "float32", "tensor(bool)": "bool", "tensor(float16)": "float16"}
        names |= {"tensor(int64)": "int64", "tensor(int32)": "int32"}
        self.dtypes = {
            port.name: names[port.type]
            for port in (*self.session.get_inputs(), *self.session.get_outputs())
        }

    def serialize(self) -> bytes:
        return self._model

    def get_tensor_name(self, number: int) -> str:
        return self.ports[number]

    def get_tensor_dtype(self, name: str) -> Any:
        return getattr(self._library, self.dtypes[name])

    def create_execution_context(self) -> _HostContext:
        return _HostContext(self)


class _HostContext:
    """The functions of an execution context that are used."""

    def __init__(self, engine: _HostEngine) -> None:
        self._engine = engine
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self._shapes[name] = shape
        return True

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        zeros = {n: np.zeros(s, self._engine.dtypes[n]) for n, s in self._shapes.items()}
        self._shapes[name] = self._engine.session.run([name], zeros)[0].shape
        return self._shapes.pop(name)

    def set_tensor_address(self, name: str, address: int) -> bool:
        self._addresses[name] = address
        return True

    def _elements(self, name: str, shape: tuple[int, ...]) -> Array:
        dtype = self._engine.dtypes[name]
        steps = strides_of(shape)
        return self._engine.runtime.elements(self._addresses[name], shape, steps, dtype)

    def execute_async_v3(self, stream: int) -> bool:
        assert stream, "a request has a stream"
        session = self._engine.session
        inputs = {name: self._elements(name, shape).copy() for name, shape in self._shapes.items()}
        for port, result in zip(session.get_outputs(), session.run(None, inputs), strict=True):
            self._elements(port.name, result.shape)[...] = result
        return True
