"""CUDNN: regions run on NVIDIA cards by cuDNN, one graph for each node."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import numpy as np

from subgraph.devices.backends.base import (
    Backend,
    BackendOp,
    BackendOptions,
    LibraryModel,
)
from subgraph.devices.backends.cuda import Card, CardMemory, Stream
from subgraph.devices.backends.cudnn_graph import OPERATORS, Shape, Step, steps_of
from subgraph.devices.backends.cudnn_plans import Kernel, Planner
from subgraph.devices.backends.translation import (
    Programs,
    Shapes,
    parsed_model,
    refusal_of_operands,
    result_array,
)
from subgraph.graph.graph import Graph, Node
from subgraph.graph.parameters import Parameter
from subgraph.graph.types import Array
from subgraph.operators.subgraph_op import SubgraphOp
from subgraph.runtime.settings import option

# Size of unknown dimensions in queries. cuDNN decides by operator and layout; an estimate.
_TYPICAL_SIZE = 4


@attrs.frozen
class CudnnOptions(BackendOptions):
    """Options of CUDNN."""

    PRECISION: str = option(
        "f32",
        "how products of float32 are computed: f32, or tf32, which drops 13 of the 23 bits",
        values=("f32", "tf32"),
    )


class CudnnDevice(Backend):
    """Runs the operators of ``cudnn_graph.py`` by cuDNN, in float32."""

    options_class = CudnnOptions
    module = "cudnn"
    requirement = "nvidia-cudnn-frontend >= 1.30"
    title = "cuDNN"
    empty_tensors = False
    dtypes = frozenset(("float32", "int64"))

    def load(self) -> Any:
        """Import the frontend, which loads cuDNN itself.

        Raises:
            ImportError: the frontend or cuDNN is missing.
        """
        found: Any = super().load()
        try:
            found.backend_version()
        except RuntimeError as error:
            raise ImportError(
                f"the frontend finds no libcudnn ({error}): pip install nvidia-cudnn-cu13"
            ) from error
        return found

    def start(self) -> None:
        """Import the library and find the card."""
        super().start()
        self.find_card()

    def find_card(self) -> None:
        """Find the card, and plan for it."""
        self.card: Card | None = Card(self.title)
        self.card.use()
        self.planner = Planner(self.library, handle=self.library.create_handle())

    def refusal(self, node: Node) -> str:
        """Refuse operators that are not translated, and integers that are not constants."""
        return refusal_of_operands(node, OPERATORS, self.title)

    def try_library_model(self, model: bytes, options: Any) -> None:
        """Plan each part without compiling the plan, which may take seconds."""
        body, version, weights = parsed_model(model)
        shapes = {port.name: _typical_shape(port) for port in body.input}
        for step in steps_of(body, version, weights, shapes):
            self.planner.require(step, options.PRECISION)

    def compile_library_model(self, model: bytes, options: Any) -> LibraryModel:
        """Return the model; the plans of its parts are compiled when a shape is first run."""
        self.try_library_model(model, options)
        return CudnnModel(self.planner, self.card, model, options.PRECISION)

    def create_op(self, graph: Graph, options: Any) -> SubgraphOp:
        """Return the op that runs a region."""
        op = CudnnOp(graph, self, options)
        op.compiled()
        return op

    def capability(self) -> dict[str, str]:
        """Return the facts of the base class and the card."""
        return {**super().capability(), "card": "" if self.card is None else self.card.name}


class CudnnOp(BackendOp):
    """Runs a region by cuDNN."""

    def _is_passed(self, parameter: Parameter) -> bool:
        """Return False: a new value is copied to the card once, and no plan depends on it."""
        return False


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
        self._uploaded: dict[tuple[str, int], CardMemory] = {}
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
        key = (name or step.output, -1 if name else position)
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


def _typical_shape(port: Any) -> Shape:
    """Return the shape of a port of an ONNX model, with a number for each unknown size."""
    dims = port.type.tensor_type.shape.dim
    return tuple(d.dim_value if d.HasField("dim_value") else _TYPICAL_SIZE for d in dims)
