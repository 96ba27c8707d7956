"""OPENVINO: regions run by OpenVINO, on its CPU, GPU or NPU."""

from __future__ import annotations

from typing import Any

import attrs

from subgraph.devices.backends import openvino_forms
from subgraph.devices.backends.base import (
    Backend,
    BackendOptions,
    LibraryModel,
)
from subgraph.devices.backends.libraries.openvino_model import OpenvinoModel
from subgraph.errors import ConfigError
from subgraph.graph.graph import Node
from subgraph.runtime.settings import option


@attrs.frozen
class OpenvinoOptions(BackendOptions):
    """Options of OPENVINO."""

    DEVICE: str = option("CPU", "device of OpenVINO, such as CPU, GPU or NPU")
    PRECISION: str = option(
        "f32",
        "precision that OpenVINO computes in; empty: its own choice, bfloat16 on some processors",
        values=("", "f32", "bf16", "f16"),
    )


class OpenvinoDevice(Backend):
    """Runs regions by OpenVINO, in float32 unless PRECISION says otherwise."""

    options_class = OpenvinoOptions
    module = "openvino"
    requirement = "openvino >= 2025.4"
    title = "OpenVINO"
    empty_tensors = False
    keeps_nan = False  # Relu of NaN is 0, for one
    dtypes = frozenset(("float32", "int8", "uint8", "int32", "int64", "bool"))

    def start(self) -> None:
        """Import OpenVINO and make its core."""
        super().start()
        library: Any = self.library
        self._core = library.Core()
        self._names: list[str] = self._core.available_devices

    def refusal(self, node: Node) -> str:
        """Refuse a form of an operator that OpenVINO computes otherwise than ONNX."""
        return openvino_forms.refusal(node)

    def try_library_model(self, model: bytes, options: Any) -> None:
        """Query OpenVINO, which is fast; compile a model that it refuses, for the reason."""
        self._check_device(options.DEVICE)
        read = self._read(model)
        supported = self._core.query_model(read, options.DEVICE)
        if any(op.friendly_name not in supported for op in read.get_ops()):
            self.compile_library_model(model, options)

    def compile_library_model(self, model: bytes, options: Any) -> LibraryModel:
        """Return a compiled model of OpenVINO."""
        settings: dict[str, Any] = {"PERFORMANCE_HINT": "LATENCY"}
        if options.INFERENCE_NUM_THREADS:
            settings["INFERENCE_NUM_THREADS"] = options.INFERENCE_NUM_THREADS
        if options.PRECISION:
            settings["INFERENCE_PRECISION_HINT"] = options.PRECISION
        read = self._read(model)
        compiled = self._core.compile_model(read, options.DEVICE, settings)
        return OpenvinoModel(compiled, self.library, openvino_forms.passed_through(read))

    def _check_device(self, device: str) -> None:
        """Check that OpenVINO has a device, or each of those in ``HETERO:GPU,CPU`` and its like.

        Raises:
            ConfigError: It has not.
        """
        first, _, others = device.partition(":")
        known = [name.partition(".")[0] for name in self._names]
        for name in (others or first).split(","):
            if name.partition(".")[0].partition("(")[0].strip(" -") not in (*known, "AUTO"):
                raise ConfigError(
                    f"device {self.name}: DEVICE is {device!r}; OpenVINO has "
                    f"{', '.join(self._names)} on this machine"
                )

    def _read(self, model: bytes) -> Any:
        """Return OpenVINO's form of a model, which has the model's inputs and shapes."""
        read = self._core.read_model(model)
        openvino_forms.check_model(self.library, read, model)
        return read
