"""A model as graphs of cuDNN, one for each node: plans, weights on the card, and their runs."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from subgraph.devices.backends.libraries.cuda import Card, CardMemory, Stream
from subgraph.devices.backends.libraries.cudnn_graph import Step, steps_of
from subgraph.devices.backends.libraries.cudnn_plans import Kernel, Planner
from subgraph.devices.backends.libraries.translation import (
    Programs,
    Shapes,
    parsed_model,
    result_array,
)
from subgraph.graph.types import Array


class CudnnModel:
    """A model and its weights on the card; several requests use it together."""

    def __init__(self, planner: Planner, card: Card | None, model: bytes, precision: str) -> None:
        """Parse the model.

        Args:
            planner: The plans of the card.
            card: The card; None on a machine that only plans.
            model: A serialized ONNX model.
            precision: "f32" or "tf32".
        """
        self._body, self._version, self._weights = parsed_model(model)
        self.planner = planner
        self.card = card
        self._precision = precision
        self._programs: Programs[list[tuple[Step, Kernel | None]]] = Programs()
        self._uploaded: dict[tuple[Any, ...], CardMemory] = {}
        self._lock = threading.Lock()
        self.inputs = [p.name for p in self._body.input if p.name not in self._weights]
        self.outputs = [port.name for port in self._body.output]

    def program(self, shapes: Shapes) -> list[tuple[Step, Kernel | None]]:
        """Return the steps and their compiled plans for shapes of the inputs."""
        return self._programs.get(shapes, self._compiled)

    def _compiled(self, shapes: Shapes) -> list[tuple[Step, Kernel | None]]:
        known = dict(zip(self.inputs, shapes, strict=True))
        steps = steps_of(self._body, self._version, self._weights, known)
        return [(step, self.planner.kernel(step, self._precision)) for step in steps]

    def constant(self, step: Step, position: int, stream: Stream) -> int | None:
        """Return the address on the card of an operand that is a weight; None if it is none.

        Args:
            step: The step.
            position: Position of the operand.
            stream: Copies the weight at its first use.
        """
        source = step.part.operands[position].source
        name = step.inputs[source] if isinstance(source, int) else ""
        array = self._weights.get(name) if isinstance(source, int) else source
        if array is None:
            return None
        # What is computed from weights may depend on the sizes of a run, such as the batch.
        key = (name,) if name else (step.output, position, array.shape)
        with self._lock:
            memory = self._uploaded.get(key)
            if memory is None:
                array = np.ascontiguousarray(array)
                memory = stream.memory()
                stream.upload(array, memory.reserve(array.nbytes))
                stream.wait()
                self._uploaded[key] = memory
            return memory.reserve(0)

    def runner(self) -> Callable[[Sequence[Array], Sequence[Array | None]], Sequence[Array]]:
        """Return a function that runs the model, with a stream and memory of its own."""
        return _Run(self)


class _Run:
    """One request's handle, stream and memory."""

    def __init__(self, model: CudnnModel) -> None:
        library = model.planner.library
        assert model.card is not None, "CUDNN starts only with a card"
        self._model = model
        self._card = model.card
        self._stream = Stream(self._card)
        self._handle = library.create_handle()
        library.set_stream(handle=self._handle, stream=self._stream.handle)
        weakref.finalize(self, library.destroy_handle, self._handle)
        self._workspace = self._stream.memory()
        self._free: list[CardMemory] = []

    def __call__(self, arrays: Sequence[Array], into: Sequence[Array | None]) -> Sequence[Array]:
        model, stream = self._model, self._stream
        self._card.use()
        shapes = tuple(array.shape for array in arrays)
        program = model.program(shapes)
        uses = Counter(name for step, _ in program for name in step.inputs)
        uses.update(model.outputs)
        values: dict[str, CardMemory] = {}
        sizes = dict(zip(model.inputs, shapes, strict=True))
        for name, array in zip(model.inputs, arrays, strict=True):
            values[name] = self._take(array.nbytes)
            stream.upload(array, values[name].reserve(array.nbytes))
        for step, kernel in program:
            self._launch(step, kernel, values)
            sizes[step.output] = step.part.shape
            for name in step.inputs:
                uses[name] -= 1
                if not uses[name] and name in values:
                    self._give(values.pop(name), values)
        results: list[Array] = []
        for name, target in zip(model.outputs, into, strict=True):
            results.append(result_array(target, sizes[name]))
            stream.download(results[-1], values[name].reserve(0))
        stream.wait()
        self._free += {id(memory): memory for memory in values.values()}.values()
        return results

    def _launch(self, step: Step, kernel: Kernel | None, values: dict[str, CardMemory]) -> None:
        """Queue a step; its inputs are in ``values``, to which the output is added."""
        if kernel is None:
            values[step.output] = values[step.inputs[0]]
            return
        pack: dict[Any, int] = {}
        for k, (tensor, operand) in enumerate(zip(kernel.tensors, step.part.operands, strict=True)):
            address = self._model.constant(step, k, self._stream)
            if address is None:
                assert isinstance(operand.source, int), "an array is a constant"
                address = values[step.inputs[operand.source]].reserve(0)
            pack[tensor] = address
        output = self._take(4 * int(np.prod(step.part.shape)))
        pack[kernel.output] = output.reserve(0)
        workspace = self._workspace.reserve(kernel.workspace)
        with self._model.planner.lock:
            kernel.graph.execute(pack, workspace, handle=self._handle)
        values[step.output] = output

    def _take(self, size: int) -> CardMemory:
        """Return the smallest free memory of at least this size, new memory if there is none."""
        fitting = [memory for memory in self._free if memory.size >= size]
        if fitting:
            found = min(fitting, key=lambda memory: memory.size)
            self._free.remove(found)
        else:
            found = self._stream.memory()
            found.reserve(size)
        return found

    def _give(self, memory: CardMemory, values: dict[str, CardMemory]) -> None:
        """Let later steps use the memory of a value, unless another value has the same elements."""
        if all(other is not memory for other in values.values()):
            self._free.append(memory)
