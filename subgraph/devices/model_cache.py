"""Cache of compiled models in a folder: the option ``CACHE_DIR``.

The key of an entry is a hash of the graph, its weights, the device string, its options, the options
in force for the devices that compile it, the versions and the host. If an entry is damaged, of
another model, or not signed by this user, the model is compiled and the entry replaced. Several
processes may share the folder.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from subgraph._version import __version__
from subgraph.devices.affinity_cut import affinities_in
from subgraph.devices.calls import capability_of, known_properties, property_of
from subgraph.devices.device import Config, Device
from subgraph.devices.export import ALLOW_RECOMPILE, export_model, import_model
from subgraph.devices.virtual import device_names
from subgraph.errors import BlobError, ModelError, SubgraphError
from subgraph.graph.graph import Graph
from subgraph.graph.parameters import transaction
from subgraph.runtime.compiled_model import CompiledModel
from subgraph.runtime.executor_plan import all_parameters
from subgraph.runtime.settings import unsaved_options

_OPAQUE = ' = opaque "'  # the text form of an attribute that is a Python object
_log = logging.getLogger("subgraph")
Compile = Callable[[Device, Graph, Config], CompiledModel]


def compile_cached(
    folder: str,
    device: Device,
    device_name: str,
    graph: Graph,
    config: Mapping[str, Any],
    compile_model: Compile,
) -> CompiledModel:
    """Return a compiled model from the cache; if it is not there, compile and add it.

    A model from the cache uses the parameters of ``graph``, so that their updates reach it.

    Args:
        folder: Path of the cache; created if it does not exist.
        device: The device that compiles or imports.
        device_name: The full device string, part of the key.
        graph: The graph to compile.
        config: Options of the device, part of the key except CACHE_DIR.
        compile_model: Called on a miss with device, graph and options.
    """
    # The folder may be moved or named differently; its files stay valid.
    options = {key: value for key, value in config.items() if key != "CACHE_DIR"}
    key = ""
    try:
        with transaction():  # no parameter changes between the hash and the import
            key = cache_key(device, device_name, graph, options)
            path = Path(folder) / f"{key}.subgraph"
            if path.exists():
                return _found(path, key, device, graph, options)
    except (SubgraphError, OSError) as error:
        _log.info("model %r is compiled anew: %s", graph.name, error)
        # Without a key the model can be neither found nor stored.
        if not key:
            return compile_model(device, graph, options)
    path = Path(folder) / f"{key}.subgraph"
    model = compile_model(device, graph, options)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        export_model(model, path, key)
    except (SubgraphError, OSError) as error:
        _log.warning("model %r cannot be cached in %s: %s", graph.name, folder, error)
    return model


def _found(
    path: Path, key: str, device: Device, graph: Graph, options: Mapping[str, Any]
) -> CompiledModel:
    parameters = all_parameters(graph)
    known = {p.name: p for p in parameters}
    # The file has no weights. Names connect it with the parameters of the graph, so that they must
    # be unique.
    if len(known) != len(parameters):
        raise BlobError("two parameters have the same name")
    return import_model(device, path, {**options, ALLOW_RECOMPILE: False}, known, key)


def cache_key(device: Device, device_name: str, graph: Graph, config: Mapping[str, Any]) -> str:
    """Return the key of a model in the cache, 40 hexadecimal digits.

    Args:
        device: The device; its capability is part of the key.
        device_name: The full device string.
        graph: The graph, hashed by its text form with digests of its weights.
        config: Options of the device.

    Raises:
        ModelError: an attribute is a Python object without a text form.
    """
    from subgraph.text_form.writer import print_graph

    state = hashlib.sha256()
    facts = {
        "subgraph": __version__,
        "numpy": np.__version__,
        "python": sys.version_info[:2],
        "device": device_name,
        "capability": capability_of(device),
        "options": {k: str(v) for k, v in config.items()},
        "settings": {each.name: _settings(each) for each in _devices_behind(device, graph, config)},
    }
    state.update(json.dumps(facts, sort_keys=True, default=str).encode())
    text = print_graph(graph, "digest")
    # Two different objects may have the same text.
    if _OPAQUE in text:
        raise ModelError("an attribute is an object that only its own process knows")
    state.update(text.encode())
    # 160 bits of SHA-256: no two models share a key by chance, and file names stay short.
    return state.hexdigest()[:40]


def _devices_behind(device: Device, graph: Graph, config: Config) -> list[Device]:
    """Return a device and those whose options decide parts of a model that it compiles.

    Args:
        device: The device.
        graph: The graph, whose nodes may have affinities.
        config: Options of the device.

    Raises:
        DeviceError: one of them is unknown or cannot start.
    """
    names = ["HETERO", *device.fallback] if device.fallback else []
    if device.is_virtual:
        listed = config.get("DEVICE_PRIORITIES") or property_of(device, "DEVICE_PRIORITIES")
        names += [*device_names(str(listed), device.name), *affinities_in(graph)]
    return [device, *(device.peer_named(name) for name in dict.fromkeys(names))]


def _settings(device: Device) -> dict[str, str]:
    """Return the options in force for a device, without those that exported models do not have."""
    values: dict[str, Any] = attrs.asdict(device.options_for(None))
    if type(device).get_property is not Device.get_property:  # it has settings of its own
        known = known_properties(device)
        values |= {name: property_of(device, name) for name in known if known[name] == "RW"}
    left_out = unsaved_options()
    return {name: str(value) for name, value in values.items() if name not in left_out}
