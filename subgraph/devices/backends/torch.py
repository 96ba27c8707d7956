"""TORCH: regions run by PyTorch, node by node or by its compiler, on one of its devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import attrs
import numpy as np

from subgraph.devices.backends.base import (
    Backend,
    BackendOptions,
    LibraryModel,
    writable_view,
)
from subgraph.devices.backends.torch_operators import OPERATORS, Call, Function
from subgraph.devices.backends.translation import node_attributes, parsed_model
from subgraph.errors import ConfigError
from subgraph.graph.graph import Node
from subgraph.graph.types import Array
from subgraph.runtime.settings import option


@attrs.frozen
class TorchOptions(BackendOptions):
    """Options of TORCH."""

    DEVICE: str = option("cpu", "device of PyTorch, such as cpu, cuda or cuda:1")
    COMPILE: bool = option(
        False, "compile regions by torch.compile, which needs a C++ compiler, at their first run"
    )


class TorchDevice(Backend):
    """Runs the operators of ``torch_operators.py`` by PyTorch."""

    options_class = TorchOptions
    module = "torch"
    requirement = "torch >= 2.4"
    title = "PyTorch"
    checks_operands = True
    empty_tensors = False
    writes_outputs = False
    dtypes = frozenset(("float32", "float64", "int32", "int64", "bool"))

    def refusal(self, node: Node) -> str:
        """Refuse operators that are not translated, and means of integers."""
        if node.op_type not in OPERATORS or node.domain:
            return f"{node.op_type} is not translated to PyTorch"
        dtype = getattr(node.outputs[0].type, "dtype", "")
        if node.op_type in ("ReduceL2", "ReduceMean") and not dtype.startswith("float"):
            return f"{node.op_type} of {dtype} is not translated to PyTorch"
        return ""

    def compile_library_model(self, model: bytes, options: Any) -> LibraryModel:
        """Return the model as a sequence of PyTorch's functions.

        Raises:
            ConfigError: PyTorch has no such device here.
        """
        try:
            self.library.empty(1, device=options.DEVICE).cpu()
        except (AssertionError, RuntimeError) as error:
            said = str(error).splitlines()[0]
            message = f"device {self.name}: DEVICE is {options.DEVICE!r}; PyTorch says: {said}"
            raise ConfigError(message) from error
        return _TorchModel(self.library, model, options)


@attrs.frozen
class _Step:
    """A node of the model.

    Attributes:
        function: Computes its outputs.
        inputs: Names of its operands; "" for an omitted one.
        outputs: Names of its outputs.
        released: Names of the operands that no later step reads.
    """

    function: Function
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    released: tuple[str, ...]


class _TorchModel:
    """A program of PyTorch's functions; several threads may run it at the same time."""

    def __init__(self, torch: Any, model: bytes, options: Any) -> None:
        body, version, weights = parsed_model(model)
        self._torch = torch
        self._threads = options.INFERENCE_NUM_THREADS
        self._device = torch.device(options.DEVICE)
        self._weights = {name: self._tensor(array) for name, array in weights.items()}
        self._held = frozenset(map(_memory, self._weights.values()))
        self._inputs = [port.name for port in body.input if port.name not in self._weights]
        self._outputs = [port.name for port in body.output]
        needed = {*self._outputs, *self._weights}
        steps: list[_Step] = []
        for node in reversed(body.node):
            call = Call(torch, node_attributes(node), version, len(node.output))
            function = OPERATORS[node.op_type](call)
            released = tuple({*node.input} - needed - {""})
            needed.update(released)
            steps.append(_Step(function, tuple(node.input), tuple(node.output), released))
        self._steps = steps[::-1]
        self._run = torch.compile(self._values, dynamic=False) if options.COMPILE else self._values

    def _tensor(self, array: Array) -> Any:
        """Return an array as a tensor on the device; on the processor they share memory."""
        return self._torch.from_numpy(array).to(self._device)

    def _values(self, values: dict[str, Any]) -> list[Any]:
        """Return the outputs, computed from the inputs and weights by name."""
        for step in self._steps:
            made = step.function(*[values[name] if name else None for name in step.inputs])
            made = (made,) if len(step.outputs) == 1 else made
            values.update(zip(step.outputs, made, strict=True))
            for name in step.released:
                del values[name]
        return [values[name] for name in self._outputs]

    def runner(self) -> Callable[[Sequence[Array], Sequence[Array | None]], Sequence[Array]]:
        """Return a function that runs the model; results on the processor are not copied."""
        torch, names = self._torch, self._inputs

        def call(arrays: Sequence[Array], into: Sequence[Array | None]) -> Sequence[Array]:
            if self._threads:
                torch.set_num_threads(self._threads)
            tensors = (self._tensor(writable_view(array)) for array in arrays)
            values = dict(zip(names, tensors, strict=True))
            # cuDNN rounds the operands of convolutions to TensorFloat-32 by default.
            exact = torch.backends.cudnn.flags(allow_tf32=False)
            with torch.inference_mode(), exact if self._device.type == "cuda" else nullcontext():
                results = self._run({**self._weights, **values})
            held = {*self._held, *map(_memory, values.values())}
            made: list[Array] = []
            for result in results:
                found: Array = result.cpu().numpy()
                # A result may be a view of an input, a weight or another result.
                memory = _memory(result)
                made.append(found.copy() if memory in held else np.asarray(found, order="C"))
                held.add(memory)
            return made

        return call


def _memory(tensor: Any) -> int:
    """Return the address of the memory of a tensor, which views of it share."""
    address: int = tensor.untyped_storage().data_ptr()
    return address
