"""ONEDNN: regions run by oneDNN, through the Graph API of its C interface."""

from __future__ import annotations

from importlib.metadata import distribution
from typing import Any

from subgraph.devices.backends.base import (
    Backend,
    BackendOptions,
    LibraryModel,
)
from subgraph.devices.backends.libraries import onednn_graph
from subgraph.devices.backends.libraries.onednn_graph import Library
from subgraph.devices.backends.libraries.onednn_model import OnednnModel
from subgraph.devices.backends.libraries.translation import refusal_of_operands
from subgraph.graph.graph import Node
from subgraph.graph.types import TensorType

_MAX_RANK = 6  # of most operations of oneDNN


class OnednnDevice(Backend):
    """Runs the operators of ``libraries/onednn_graph.py`` by oneDNN, in float32."""

    options_class = BackendOptions
    module = "onednn"
    requirement = "onednn-cpu-gomp >= 2023.2"
    title = "oneDNN"
    empty_tensors = False
    keeps_nan = False  # Relu of NaN is 0, for one
    dtypes = frozenset(("float32", "int64"))

    def load(self) -> Library:
        """Return the library of the installed package, which has no Python module."""
        try:
            files = distribution(self.requirement.partition(">=")[0].strip()).files or ()
            path = next(file for file in files if file.name == "libdnnl.so.3")
            return Library(str(path.locate()))
        except (StopIteration, OSError, RuntimeError) as error:
            raise ImportError(f"libdnnl.so.3 cannot be loaded: {error}") from error

    def refusal(self, node: Node) -> str:
        """Refuse operators without a form, scalars, and integers that are not constants."""
        if reason := refusal_of_operands(node, onednn_graph.OPERATORS, self.title):
            return reason
        for value in (*[*node.sources][:1], *node.outputs):
            rank = value.type.rank if isinstance(value.type, TensorType) else None
            if rank is None or not 1 <= rank <= _MAX_RANK:
                return f"{value.name!r} is {value.type}; oneDNN takes 1 to {_MAX_RANK} axes"
        return ""

    def compile_library_model(self, model: bytes, options: Any) -> LibraryModel:
        """Return the model as a graph of oneDNN; its partitions are compiled for each shape."""
        return OnednnModel(self.library, model, options.INFERENCE_NUM_THREADS)
