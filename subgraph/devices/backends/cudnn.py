"""CUDNN: regions run on NVIDIA cards by cuDNN, one graph for each node."""

from __future__ import annotations

from typing import Any

import attrs

from subgraph.devices.backends.base import (
    Backend,
    BackendOptions,
    LibraryModel,
)
from subgraph.devices.backends.libraries.cuda import Card
from subgraph.devices.backends.libraries.cudnn_graph import OPERATORS, Shape, steps_of
from subgraph.devices.backends.libraries.cudnn_model import CudnnModel
from subgraph.devices.backends.libraries.cudnn_plans import Planner
from subgraph.devices.backends.libraries.translation import (
    parsed_model,
    refusal_of_operands,
)
from subgraph.graph.graph import Node
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
    """Runs the operators of ``libraries/cudnn_graph.py`` by cuDNN, in float32."""

    options_class = CudnnOptions
    module = "cudnn"
    requirement = "nvidia-cudnn-frontend >= 1.30"
    title = "cuDNN"
    empty_tensors = False
    passes_weights = False  # a new value is copied to the card once, and no plan depends on it
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

    def capability(self) -> dict[str, str]:
        """Return the facts of the base class and the card."""
        return {**super().capability(), "card": "" if self.card is None else self.card.name}


def _typical_shape(port: Any) -> Shape:
    """Return the shape of a port of an ONNX model, with a number for each unknown size."""
    dims = port.type.tensor_type.shape.dim
    return tuple(d.dim_value if d.HasField("dim_value") else _TYPICAL_SIZE for d in dims)
