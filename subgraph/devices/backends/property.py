"""`BackendProperty`: regions of one backend, for ``sg.optimize_for(graph, "openvino")``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import attrs

from subgraph.devices.affinity_cut import NodeSelector
from subgraph.devices.backends.base import Backend, library_version
from subgraph.devices.default_core import default_core
from subgraph.devices.device_sources import BACKENDS, device_modules, device_of_module
from subgraph.errors import DeviceError
from subgraph.graph.graph import Graph, Node
from subgraph.operators.operator import is_view
from subgraph.operators.subgraph_op import subgraph_node
from subgraph.partition.property import SubgraphProperty, property_name, register_property
from subgraph.partition.selector import Reject, SubgraphSelector
from subgraph.runtime.settings import option_names


class BackendProperty(SubgraphProperty):
    """Replaces regions that a backend supports by nodes that its library runs.

    Options of the pass with the name of one of the device's options configure the device.

    Attributes:
        device: Name of the device.
    """

    device: ClassVar[str]

    def __init__(self) -> None:
        """Start the device.

        Raises:
            DeviceError: the library is not installed; the message says what to install.
        """
        started = default_core().device(self.device)
        assert isinstance(started, Backend), f"{self.device} is taken by a device of another kind"
        self._backend = started
        self._config: dict[str, Any] = {}

    def pre_partition(self, graph: Graph, options: Mapping[str, Any]) -> Graph | None:
        """Take the device's options, and infer the types of values that have none."""
        known = option_names(self._backend.options_class)
        self._config = {name: options[name] for name in known if name in options}
        ready = self._backend.transform(graph, None)
        # One question about all nodes together; `supports` then finds the answers for single nodes.
        self._backend.query_model(ready, self._config)
        return None if ready is graph else ready

    def create_subgraph_selector(self) -> SubgraphSelector:
        """Return a selector of the nodes that the device supports."""
        options = self._backend.options_for(self._config)
        return NodeSelector(lambda node: self._backend.supports(node, options))

    def create_subgraph_node(self, subgraph: Graph, subgraph_id: int) -> Node | Reject:
        """Return a node that the library runs.

        A Reject if it does not compile the region, or if the region computes nothing.
        """
        if all(map(is_view, subgraph.nodes)):
            return Reject("views alone compute nothing, and entering the library costs time")
        options = self._backend.options_for(self._config)
        try:
            op = self._backend.create_op(subgraph, options)
        except DeviceError as error:
            return Reject(str(error))
        op.device = self._backend.name
        return subgraph_node(subgraph, op, f"{property_name(self)}_{subgraph_id}")

    def saved_options(self) -> Mapping[str, Any]:
        """Return the device's options, for a saved partition."""
        return self._config


def _register(device: str) -> None:
    """Register the property of a device under the device's name in lower case."""
    about = f"Regions that the device {device} runs."
    members = {"__module__": __name__, "__doc__": about, "device": device}
    kind: type[BackendProperty] = type(f"{device.title()}Property", (BackendProperty,), members)
    register_property(device.lower(), kind)


for _name in device_modules(BACKENDS):
    _register(_name)


@attrs.frozen
class BackendState:
    """State of a backend, as `backends` returns it.

    Attributes:
        name: Name of the device, for ``sg.compile_model``; in lower case that of its property.
        title: Name of the library.
        version: Version of the installed package; empty if it is missing.
        problem: Why the device cannot start, with the command that installs the package; empty if
            it starts.
    """

    name: str
    title: str
    version: str
    problem: str


def backends() -> list[BackendState]:
    """Return the devices over other libraries, including those with missing packages.

    Installed libraries are imported, to find out whether they work.
    """
    core = default_core()
    found: list[BackendState] = []
    for name in core.registered_backends:
        kind = device_of_module(device_modules(BACKENDS)[name])
        assert isinstance(kind, Backend), "a module of the package defines a backend"
        problem = ""
        try:
            core.device(name)
        except DeviceError as error:
            problem = str(error)
        installed = library_version(kind.module, kind.requirement)
        found.append(BackendState(name, kind.title, installed, problem))
    return found
