"""The `Core` of the process, and the functions of ``sg`` that call its methods."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from os import PathLike
from typing import IO, Any

from subgraph.devices.core import Core
from subgraph.devices.device import Config
from subgraph.devices.model_input import Model
from subgraph.devices.query import QueryResult
from subgraph.runtime.compiled_model import CompiledModel


@cache
def default_core() -> Core:
    """Return the Core of the process."""
    return Core()


def compile_model(
    model: Model,
    device_name: str = "AUTO",
    config: Config | None = None,
    *,
    preprocess: Mapping[str, Any] | None = None,
) -> CompiledModel:
    """Compile a model on the default core: see `Core.compile_model` for errors.

    Args:
        model: A graph, the path or bytes of an ONNX file, or an ``onnx.ModelProto``.
        device_name: A device, or "HETERO:A,B", "MULTI:A,B", "AUTO", "AUTO:A,B".
        config: The device's options.
        preprocess: `Preprocess` by input name, put into the graph before it.
    """
    return default_core().compile_model(model, device_name, config, preprocess=preprocess)


def import_model(
    source: str | PathLike[str] | bytes | IO[bytes],
    device_name: str = "",
    config: Config | None = None,
) -> CompiledModel:
    """Import an exported model on the default core: see `Core.import_model` for errors.

    Args:
        source: Path, bytes or binary stream of the exported model.
        device_name: The device to run it; empty: the one that it was compiled for.
        config: The device's options, and ``ALLOW_RECOMPILE``.
    """
    return default_core().import_model(source, device_name, config)


def get_versions(device_name: str = "") -> dict[str, str]:
    """Return the versions of Subgraph and of devices: see `Core.get_versions`."""
    return default_core().get_versions(device_name)


def query_model(
    model: Model,
    device_name: str = "AUTO",
    config: Config | None = None,
    *,
    preprocess: Mapping[str, Any] | None = None,
) -> QueryResult:
    """Return which nodes a device supports: see `Core.query_model` for errors.

    Args:
        model: A graph, the path or bytes of an ONNX file, or an ``onnx.ModelProto``.
        device_name: A device, or "HETERO:A,B", "MULTI:A,B", "AUTO", "AUTO:A,B".
        config: The device's options.
        preprocess: `Preprocess` by input name, put into the graph before it.
    """
    return default_core().query_model(model, device_name, config, preprocess=preprocess)
