"""A model as a sequence of PyTorch's functions, or compiled from them for each shape."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import attrs
import numpy as np

from subgraph.devices.backends.libraries.torch_operators import (
    OPERATORS,
    WITH_NUMBERS,
    Call,
    Function,
)
from subgraph.devices.backends.libraries.translation import (
    Programs,
    Shapes,
    node_attributes,
    openmp_threads,
    parsed_model,
    writable_view,
)
from subgraph.graph.types import DTYPE_OF_ONNX, Array


@attrs.frozen
class _Step:
    """A node of the model.

    Attributes:
        function: Computes its outputs.
        inputs: Names of its operands; "" for an omitted one.
        outputs: Names of its outputs.
        released: Names of the operands that no later step reads.
        numbers: The second operand if it is a weight that holds axes or sizes.
    """

    function: Function
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    released: tuple[str, ...]
    numbers: list[int] | None


class TorchModel:
    """A program of PyTorch's functions; several threads may run it at the same time."""

    def __init__(self, torch: Any, model: bytes, options: Any) -> None:
        """Translate a model.

        Args:
            torch: The package.
            model: A serialized ONNX model.
            options: The options of TORCH.
        """
        body, version, weights = parsed_model(model)
        self._torch = torch
        self._threads = options.INFERENCE_NUM_THREADS
        self._device = torch.device(options.DEVICE)
        self._weights = {name: self._tensor(array) for name, array in weights.items()}
        self._held = frozenset(map(_memory, self._weights.values()))
        ports = [port for port in body.input if port.name not in self._weights]
        self._inputs = [port.name for port in ports]
        kinds = (DTYPE_OF_ONNX[port.type.tensor_type.elem_type] for port in ports)
        self._dtypes = [getattr(torch, kind) for kind in kinds]
        self._outputs = [port.name for port in body.output]
        needed = {*self._outputs, *self._weights}
        steps: list[_Step] = []
        for node in reversed(body.node):
            call = Call(node_attributes(node), version, torch, len(node.output))
            function = OPERATORS[node.op_type](call)
            released = tuple({*node.input} - needed - {""})
            needed.update(released)
            numbers = _numbers_of(node, weights, options.COMPILE)
            steps.append(_Step(function, tuple(node.input), tuple(node.output), released, numbers))
        self._steps = steps[::-1]
        self._compiles: bool = options.COMPILE
        self._programs: Programs[Callable[..., list[Any]]] = Programs()

    def _tensor(self, array: Array) -> Any:
        """Return an array as a tensor on the device; on the processor they share memory."""
        return self._torch.from_numpy(array).to(self._device)

    def _compiled(self, shapes: Shapes) -> Callable[..., list[Any]]:
        """Return `_values` compiled for shapes of the inputs."""
        make_fx = importlib.import_module("torch.fx.experimental.proxy_tensor").make_fx
        zeros, device = self._torch.zeros, self._device
        examples = [
            zeros(shape, dtype=dtype, device=device)
            for shape, dtype in zip(shapes, self._dtypes, strict=True)
        ]
        # torch.compile compiles one Python function at most eight times; a trace is a new one.
        traced = make_fx(self._values)(*examples)
        found: Callable[..., list[Any]] = self._torch.compile(traced, dynamic=False)
        return found

    def _values(self, *inputs: Any) -> list[Any]:
        """Return the outputs, computed from one tensor for each input."""
        values = {**self._weights, **dict(zip(self._inputs, inputs, strict=True))}
        for step in self._steps:
            operands = [values[name] if name else None for name in step.inputs]
            if step.numbers is not None:
                operands[1] = step.numbers
            made = step.function(*operands)
            made = (made,) if len(step.outputs) == 1 else made
            values.update(zip(step.outputs, made, strict=True))
            for name in step.released:
                del values[name]
        return [values[name] for name in self._outputs]

    def runner(self) -> Callable[[Sequence[Array], Sequence[Array | None]], Sequence[Array]]:
        """Return a function that runs the model; results on the processor are not copied."""
        torch = self._torch

        def call(arrays: Sequence[Array], into: Sequence[Array | None]) -> Sequence[Array]:
            threads = openmp_threads(self._threads)
            if threads:
                torch.set_num_threads(threads)
            tensors = [self._tensor(writable_view(array)) for array in arrays]
            # cuDNN rounds the operands of convolutions to TensorFloat-32 by default.
            exact = torch.backends.cudnn.flags(allow_tf32=False)
            with torch.inference_mode(), exact if self._device.type == "cuda" else nullcontext():
                run = self._values
                if self._compiles:
                    shapes = tuple(array.shape for array in arrays)
                    run = self._programs.get(shapes, self._compiled)
                results = run(*tensors)
            held = {*self._held, *map(_memory, tensors)}
            made: list[Array] = []
            for result in results:
                found: Array = result.cpu().numpy()
                # A result may be a view of an input, a weight or another result.
                memory = _memory(result)
                made.append(found.copy() if memory in held else np.asarray(found, order="C"))
                held.add(memory)
            return made

        return call


def _numbers_of(node: Any, weights: Mapping[str, Array], compiles: bool) -> list[int] | None:
    """Return the axes or sizes of a node that are a weight; None if it has none.

    Args:
        node: An ``onnx.NodeProto``.
        weights: The weights by name.
        compiles: Whether the model is compiled, which is possible only if they are a weight.

    Raises:
        NotImplementedError: They are computed, and the model is compiled.
    """
    if node.op_type not in WITH_NUMBERS or len(node.input) < 2 or not node.input[1]:
        return None
    array = weights.get(node.input[1])
    if array is not None:
        found: list[int] = array.reshape(-1).tolist()
        return found
    if compiles:
        raise NotImplementedError("COMPILE is not for axes and sizes that are computed")
    return None


def _memory(tensor: Any) -> int:
    """Return the address of the memory of a tensor, which views of it share."""
    address: int = tensor.untyped_storage().data_ptr()
    return address
