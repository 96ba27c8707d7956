"""cuDNN's graphs and plans of parts of models, shared by all models of a card."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import attrs

from subgraph.devices.backends.libraries.cudnn_graph import Part, Step, strides_of

_MAX_KERNELS = 1024  # compiled plans that a process holds; an estimate


def graph_of(library: Any, part: Part, **where: Any) -> tuple[Any, list[Any], Any]:
    """Return a graph of cuDNN that computes a part.

    Args:
        library: The module of cuDNN.
        part: The part, which computes something.
        **where: For what the graph is planned: a handle, or properties of a card.

    Returns:
        The graph, the tensors of the operands, and the tensor of the output.
    """
    assert part.compute is not None, "the part computes something"
    real = library.data_type.FLOAT
    graph = library.pygraph(
        io_data_type=real, intermediate_data_type=real, compute_data_type=real, **where
    )
    tensors = [
        graph.tensor(
            dim=list(operand.dims),
            stride=strides_of(operand.dims),
            data_type=real,
        )
        for operand in part.operands
    ]
    output = part.compute(graph, *tensors)
    output.set_output(True).set_data_type(real)
    output.set_dim(list(part.dims)).set_stride(strides_of(part.dims))
    return graph, tensors, output


@attrs.frozen(eq=False)
class Kernel:
    """A compiled plan of a graph.

    Attributes:
        graph: The graph.
        tensors: Tensors of the operands.
        output: Tensor of the output.
        workspace: Bytes that a run needs besides.
    """

    graph: Any
    tensors: Sequence[Any]
    output: Any
    workspace: int


class Planner:
    """The plans of a card, which do not depend on weights and are shared by all models.

    Attributes:
        library: The module of cuDNN.
        lock: Held while plans are made, and while they are launched.
    """

    def __init__(self, library: Any, **where: Any) -> None:
        """Create the planner.

        Args:
            library: The module of cuDNN.
            **where: For what graphs are planned: a handle, or properties of a card.
        """
        self.library = library
        self.lock = threading.Lock()
        self._where = where
        self._supported: set[Any] = set()
        self._kernels: dict[Any, Kernel] = {}

    def _planned(self, part: Part, precision: str) -> tuple[Any, list[Any], Any]:
        """Return a graph with plans, which are not compiled, and its tensors as `graph_of`."""
        library = self.library
        graph, tensors, output = graph_of(library, part, **self._where)
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([library.heur_mode.A, library.heur_mode.FALLBACK])
        if part.product and precision == "f32":
            note = library.numerical_note
            lossy = (note.TENSOR_CORE, note.DOWN_CONVERT_INPUTS, note.REDUCED_PRECISION_REDUCTION)
            graph.deselect_numeric_notes(list(lossy))
        return graph, tensors, output

    def require(self, step: Step, precision: str) -> None:
        """Ask cuDNN for a plan of a step, without compiling it.

        Args:
            step: The step.
            precision: "f32", or "tf32" for plans that drop bits of the operands.

        Raises:
            Exception: the library has no plan; its text is the reason.
        """
        key = (step.key(), precision)
        with self.lock:
            if step.part.compute is None or key in self._supported:
                return
            graph, _, _ = self._planned(step.part, precision)
            if "handle" in self._where:  # cuDNN asks the card itself
                graph.check_support()
            self._supported.add(key)

    def kernel(self, step: Step, precision: str) -> Kernel | None:
        """Return the compiled plan of a step; None if its output is its first input.

        Args:
            step: The step.
            precision: "f32", or "tf32" for plans that drop bits of the operands.

        Raises:
            Exception: the library has no plan; its text is the reason.
        """
        if step.part.compute is None:
            return None
        key = (step.key(), precision)
        with self.lock:
            found = self._kernels.pop(key, None)
            if found is None:
                graph, tensors, output = self._planned(step.part, precision)
                graph.build_plans()
                found = Kernel(graph, tensors, output, int(graph.get_workspace_size()))
            while len(self._kernels) >= _MAX_KERNELS:
                del self._kernels[next(iter(self._kernels))]  # the one that was not used longest
            self._kernels[key] = found
            return found
