"""TORCH: regions run by PyTorch, node by node or by its compiler, on one of its devices."""

from __future__ import annotations

from typing import Any

import attrs

from subgraph.devices.backends.base import (
    Backend,
    BackendOptions,
    LibraryModel,
)
from subgraph.devices.backends.libraries.torch_model import TorchModel
from subgraph.devices.backends.libraries.torch_operators import OPERATORS
from subgraph.devices.backends.libraries.translation import refusal_of_operator
from subgraph.errors import ConfigError
from subgraph.graph.graph import Node
from subgraph.runtime.settings import option


@attrs.frozen
class TorchOptions(BackendOptions):
    """Options of TORCH."""

    DEVICE: str = option("cpu", "device of PyTorch, such as cpu, cuda or cuda:1")
    COMPILE: bool = option(
        False, "compile regions by torch.compile, which needs a C++ compiler, at their first run"
    )


class TorchDevice(Backend):
    """Runs the operators of ``libraries/torch_operators.py`` by PyTorch."""

    options_class = TorchOptions
    module = "torch"
    requirement = "torch >= 2.4"
    title = "PyTorch"
    empty_tensors = False
    writes_outputs = False
    dtypes = frozenset(("float32", "float64", "int32", "int64", "bool"))

    def refusal(self, node: Node) -> str:
        """Refuse operators that are not translated, and means of integers."""
        if reason := refusal_of_operator(node, OPERATORS, self.title):
            return reason
        dtype = getattr(node.outputs[0].type, "dtype", "")
        if node.op_type in ("Erf", "ReduceL2", "ReduceMean") and not dtype.startswith("float"):
            return f"{node.op_type} of {dtype} is not translated to {self.title}"
        return ""

    def trusts(self, options: Any) -> bool:
        """Return whether PyTorch checks operands: only on the processor.

        An index out of range on a card ends the kernel by an assertion, after which the process
        can no longer use the card.
        """
        device: str = options.DEVICE
        return device.partition(":")[0] == "cpu"

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
        return TorchModel(self.library, model, options)
