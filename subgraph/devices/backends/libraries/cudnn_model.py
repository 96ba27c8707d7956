"""A model as graphs of cuDNN, one for each node: plans, weights on the card, and their runs."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import attrs
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


@attrs.frozen(eq=False)
class _Program:
    """A model for certain shapes of its inputs.

    Attributes:
        steps: The steps and their compiled plans; None for a step that computes nothing.
        computed: Operands on the card that were computed from weights, by `CudnnModel.constant`.
    """

    steps: list[tuple[Step, Kernel | None]]
    computed: dict[tuple[Any, ...], CardMemory] = attrs.field(
        factory=dict[tuple[Any, ...], CardMemory]
    )


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
        self._programs: Programs[_Program] = Programs()
        self._uploaded: dict[str, CardMemory] = {}  # weights by name
        # Operands that were computed from weights; programs that are dropped free theirs.
        self._computed = weakref.WeakValueDictionary[tuple[Any, ...], CardMemory]()
        self._lock = threading.Lock()
        self.inputs = [p.name for p in self._body.input if p.name not in self._weights]
        self.outputs = [port.name for port in self._body.output]

    def program(self, shapes: Shapes) -> _Program:
        """Return the steps and their compiled plans for shapes of the inputs."""
        return self._programs.get(shapes, self._compiled)

    def _compiled(self, shapes: Shapes) -> _Program:
        known = dict(zip(self.inputs, shapes, strict=True))
        steps = steps_of(self._body, self._version, self._weights, known)
        return _Program([(step, self.planner.kernel(step, self._precision)) for step in steps])

    def constant(self, program: _Program, step: Step, position: int, stream: Stream) -> int | None:
        """Return the address on the card of an operand that is a weight; None if it is none.

        Args:
            program: The program of the step.
            step: The step.
            position: Position of the operand.
            stream: Copies the weight at its first use.
        """
        source = step.part.operands[position].source
        name = step.inputs[source] if isinstance(source, int) else ""
        array = self._weights.get(name) if isinstance(source, int) else source
        if array is None:
            return None
        with self._lock:
            if name:
                memory = self._uploaded.get(name)
                if memory is None:
                    memory = self._uploaded[name] = _on_card(array, stream)
                return memory.reserve(0)
            # What is computed from weights may depend on the sizes of a run, such as the batch.
            key = (step.output, position, array.shape)
            memory = self._computed.get(key)
            if memory is None:
                memory = self._computed[key] = _on_card(array, stream)
            program.computed[key] = memory
            return memory.reserve(0)

    def runner(self) -> Callable[[Sequence[Array], Sequence[Array | None]], Sequence[Array]]:
        """Return a function that runs the model, with a stream and memory of its own."""
        return _Run(self)


def _on_card(array: Array, stream: Stream) -> CardMemory:
    """Return memory of the card with a copy of an array."""
    array = np.ascontiguousarray(array)
    memory = stream.memory()
    stream.upload(array, memory.reserve(array.nbytes))
    stream.wait()
    return memory


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
        uses = Counter(name for step, _ in program.steps for name in step.inputs)
        uses.update(model.outputs)
        values: dict[str, CardMemory] = {}
        sizes = dict(zip(model.inputs, shapes, strict=True))
        for name, array in zip(model.inputs, arrays, strict=True):
            values[name] = self._take(array.nbytes)
            stream.upload(array, values[name].reserve(array.nbytes))
        for step, kernel in program.steps:
            self._launch(program, step, kernel, values)
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

    def _launch(
        self,
        program: _Program,
        step: Step,
        kernel: Kernel | None,
        values: dict[str, CardMemory],
    ) -> None:
        """Queue a step; its inputs are in ``values``, to which the output is added."""
        if kernel is None:
            values[step.output] = values[step.inputs[0]]
            return
        pack: dict[Any, int] = {}
        for k, (tensor, operand) in enumerate(zip(kernel.tensors, step.part.operands, strict=True)):
            address = self._model.constant(program, step, k, self._stream)
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
        """Return the smallest free memory of at least this size.

        If there is none, the largest free memory grows, so that inputs of ever other sizes need no
        more pieces of memory than there are values at a time.
        """
        fitting = [memory for memory in self._free if memory.size >= size]
        if fitting:
            found = min(fitting, key=lambda memory: memory.size)
        elif self._free:
            found = max(self._free, key=lambda memory: memory.size)
            self._stream.wait()  # steps that are queued may still use it
        else:
            found = self._stream.memory()
        if found in self._free:
            self._free.remove(found)
        found.reserve(size)
        return found

    def _give(self, memory: CardMemory, values: dict[str, CardMemory]) -> None:
        """Let later steps use the memory of a value, unless another value has the same elements."""
        if all(other is not memory for other in values.values()):
            self._free.append(memory)
