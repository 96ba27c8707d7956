"""Devices: what runs a graph, or the part of one that it supports.

A child of `Device` says which nodes it takes (`supports`) and what runs a graph of such nodes
(`create_op`); query, compile, import, options and metrics have defaults over these two. A device
with other needs overrides `query_model` and `compile_model` themselves. Which device gets which
part of a model is not decided here: HETERO does that for all.
"""

from __future__ import annotations

import copy
import platform
import sys
from collections.abc import Callable, Mapping
from os import PathLike
from typing import IO, Any, ClassVar, Protocol, Self

from subgraph.devices.query import (
    PreparedGraph,
    QueryResult,
    origins,
    own_op_reason,
    reason_of,
    refuse_with_users,
)
from subgraph.errors import ConfigError, DeviceError, SubgraphError
from subgraph.graph.graph import Graph, Node, Value
from subgraph.operators.operator import Operator
from subgraph.operators.region_names import region_of
from subgraph.operators.subgraph_op import (
    AFFINITY,
    DefaultSubgraphOp,
    Fallback,
    SubgraphOp,
    subgraph_node,
)
from subgraph.partition.regions import without_device_regions
from subgraph.partition.selector import Reject
from subgraph.runtime.compiled_model import CompiledModel
from subgraph.runtime.settings import (
    DeviceOptions,
    check_option,
    current_name,
    property_access,
    resolve_options,
)
from subgraph.system.hooks import Hook
from subgraph.system.registry import nearest
from subgraph.weights.cache import StoredWeights

Config = Mapping[str, Any]
_compile_checked: Hook[[Device, Graph, Config | None], CompiledModel] = Hook(
    "compile a queried graph"
)
_import_model: Hook[[Device, Any, Config | None], CompiledModel] = Hook("import a model")
_fallback: Hook[[Graph, SubgraphOp, list[Device], Config, DeviceOptions], Fallback] = Hook(
    "fallback of an op"
)


class DeviceTable(Protocol):
    """The `Core` of a device, as far as a device needs it: it finds and asks other devices."""

    @property
    def available_devices(self) -> list[str]:
        """Names of the devices that can start."""
        ...

    @property
    def registered_devices(self) -> list[str]:
        """Names of all devices."""
        ...

    @property
    def registered_backends(self) -> list[str]:
        """Names of the devices over other libraries."""
        ...

    def device(self, name: str) -> Device:
        """Return the device of that name, started."""
        ...

    def compile_model(
        self, model: Graph, device_name: str, config: Config | None = None
    ) -> CompiledModel:
        """Compile a graph for a device."""
        ...

    def add_extension(self, extension: Operator) -> None:
        """Make a custom operator known."""
        ...


class Device:
    """A device; write a child, register it with ``core.register_device("NAME", MyDevice)``.

    Attributes:
        name: The name that it is registered under, with the id of one of several: "NAME.0".
        core: The Core that it is registered with.
        options_class: Its options, each declared once; a child of `DeviceOptions`.
        fallback: Devices that take the nodes which this one does not, when it is asked for alone.
        is_virtual: Whether it runs models on other devices, as HETERO does.
        concurrent_regions: Whether it runs several regions of one request at the same time, where
            they do not depend on each other; beside those of other devices they run anyway.
        caches: Whether ``CACHE_DIR`` keeps its compiled models; False leaves that to others.
    """

    options_class: ClassVar[type[DeviceOptions]] = DeviceOptions
    fallback: ClassVar[tuple[str, ...]] = ()
    is_virtual: ClassVar[bool] = False
    concurrent_regions: ClassVar[bool] = False
    caches: ClassVar[bool] = True
    name: str
    core: DeviceTable | None
    _settings: dict[str, Any]
    _start_error: str | None
    _started: bool

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Prepare the state that a child need not know of."""
        self = super().__new__(cls)
        self.name = class_name(cls)
        self.core = None
        self._settings = {}
        self._start_error = None
        self._started = False
        return self

    # ------------------------------------------------------------------ what a child writes

    def start(self) -> None:
        """Find the hardware, before the first use; raise to say why it is not there."""

    def supports(self, node: Node, options: Any) -> bool | Reject:
        """Return whether the device can run ``node``; a `Reject` says why not.

        ``options`` is an ``options_class``, here and in the following methods.
        """
        return False

    def transform(self, graph: Graph, options: Any) -> Graph:
        """Return the graph as the device wants it: fused, legalized. Query and compile use it.

        A node that stands for several original ones keeps them in its inner graph, or lists their
        names in ``metadata["origin"]``, separated by newlines.
        """
        return graph

    def create_op(self, graph: Graph, options: Any) -> SubgraphOp:
        """Return what runs ``graph``, all of whose nodes are supported; inputs include weights."""
        return DefaultSubgraphOp(graph)

    def add_kernel(self, operator: str, kernel: Callable[..., Any]) -> None:
        """Take a kernel of a custom operator, named "domain::Type"; what it is, the device says.

        Raises:
            DeviceError: the device takes none.
        """
        raise DeviceError(f"device {self.name} takes no kernels for single operators")

    def remove_kernel(self, operator: str) -> None:
        """Forget a kernel that `add_kernel` took; a device without kernels has nothing to do."""

    def device_ids(self) -> list[str]:
        """Return the ids of the devices of this kind; [""] where there is one without an id."""
        return [""]

    def metrics(self) -> dict[str, Any]:
        """Return the read-only properties; a child adds its own to ``super().metrics()``."""
        return {
            "AVAILABLE_DEVICES": self.device_ids(),
            "FULL_DEVICE_NAME": self.name,
            "OPTIMIZATION_CAPABILITIES": ["FP32"],
            "DEVICE_ARCHITECTURE": platform.machine(),
            "EXPORT_IMPORT": True,
            "CONCURRENT_REGIONS": self.concurrent_regions,
        }

    def capability(self) -> dict[str, str]:
        """Return what an exported model depends on; an import compares it with the file's."""
        return {"architecture": str(self.metrics().get("DEVICE_ARCHITECTURE", ""))}

    def version(self) -> str:
        """Return what reports of problems have to name: versions of the device's package, driver.

        The default is ``__version__`` of the package that defines the device's class.
        """
        return package_version(type(self))

    def request_range(self) -> tuple[int, int, int]:
        """Return how many requests at a time are of use: the least, the most, and the step.

        The default counts up to `optimal_requests`.
        """
        return 1, max(1, self.optimal_requests(self.options_for(None))), 1

    def optimal_requests(self, options: Any) -> int:
        """Return how many requests at a time make best use of the device."""
        return 1

    # ------------------------------------------------------------------ what users call

    def query_model(self, graph: Graph, config: Config | None = None) -> dict[str, str]:
        """Return the nodes that the device supports, as {node name: device name}.

        The graph goes through the device's own `transform`; an original node is supported only if
        everything that it became is. The result has ``.reasons`` for the others.
        """
        options = self.options_for(config)
        prepared = self._prepare(graph, options)
        known = {n.name for n in graph.nodes}
        reasons = {n.name: text for n in graph.nodes if (text := self._own_op_reason(n))}
        seen = set(reasons)
        for node in prepared.graph.nodes:
            names = set(origins(node))
            names.update((node.name, *region_of(node).split(",")))
            seen |= names
            text = self._own_op_reason(node)
            if not text and prepared.refused is not None:
                text = prepared.refused.get(node.name, "")
            elif not text:
                text = self._refusal(node, options)
            if text:
                reasons.update((name, text) for name in names if name not in reasons)
        refuse_with_users(graph, seen, reasons)
        supported = {n.name: self.name for n in graph.nodes if n.name not in reasons}
        return QueryResult(supported, {k: v for k, v in reasons.items() if k in known}, prepared)

    def compile_model(self, graph: Graph, config: Config | None = None) -> CompiledModel:
        """Compile a graph all of whose nodes are supported.

        Raises:
            UnsupportedOpError: a node is not; names and reasons.
            ConfigError: an option is unknown or its value not allowed.
        """
        return _compile_checked(self, graph, config)

    def compile_supported(
        self, graph: Graph, config: Config | None, result: QueryResult | None = None
    ) -> CompiledModel:
        """Compile a graph of which `query_model` has said that all nodes are supported."""
        options = self.options_for(config)
        prepared = None
        if result is not None:
            graph, prepared = result.lifted or graph, result.prepared

        def make_op(inner: Graph) -> SubgraphOp:
            op = self._op_for(inner, options)
            if prepared is not None:
                self._hand_over(op, prepared)
            return self._guarded(inner, op, options)

        compiled = whole_graph(graph, self.name, make_op)
        return self._model(compiled, options, source=graph)

    def _model(
        self,
        compiled: Graph,
        options: Any,
        source: Graph | None = None,
        stored: StoredWeights | None = None,
    ) -> CompiledModel:
        return CompiledModel(
            compiled,
            device=self.name,
            options=options,
            requests=self.optimal_requests(options),
            metrics=None if compiled.nodes else {"EXECUTION_DEVICES": [self.name]},
            source=source,
            stored=stored,
            core=self.core,
        )

    def _prepare(self, graph: Graph, options: DeviceOptions) -> PreparedGraph:
        return PreparedGraph(self._transformed(graph, options))

    def _transformed(self, graph: Graph, options: DeviceOptions) -> Graph:
        found: Any = self.transform(graph, options)
        if not isinstance(found, Graph):
            raise DeviceError(
                f"device {self.name}: transform gave {found!r}; it must return a Graph"
            )
        return found

    def _own_op_reason(self, node: Node) -> str:
        """Return why a node is left to its own op, "" if it has none."""
        return own_op_reason(node)

    def _refusal(self, node: Node, options: DeviceOptions) -> str:
        """Return why the device does not run a node, "" if it does."""
        try:
            answer = self.supports(node, options)
        except (SubgraphError, MemoryError):
            raise
        except Exception as error:
            raise DeviceError(
                f"device {self.name}: supports raised {type(error).__name__}: {error}, given node "
                f"{node.name!r} ({node.op_type})"
            ) from error
        return "" if answer else reason_of(answer, node, self.name)

    def _op_for(self, graph: Graph, options: DeviceOptions) -> SubgraphOp:
        op: Any = self.create_op(self._transformed(graph, options), options)
        if not isinstance(op, SubgraphOp):
            raise DeviceError(
                f"device {self.name}: create_op gave {op!r}; it must return a SubgraphOp"
            )
        if op.device == SubgraphOp.device:
            op.device = self.name
        op.concurrent = op.concurrent or self.concurrent_regions
        return op

    def _hand_over(self, op: SubgraphOp, prepared: PreparedGraph) -> None:
        """Give an op that transforms by itself what the query has made of the graph already."""

    def _guarded(self, graph: Graph, op: SubgraphOp, options: DeviceOptions) -> SubgraphOp:
        """Let the devices behind this one take over from an op that fails."""
        if self.fallback and self.core is not None and options.RUNTIME_FALLBACK:
            others = [self.core.device(name) for name in self.fallback]
            op.fallback = _fallback(graph, op, others, {}, options)
        return op

    def region_op(self, graph: Graph, options: DeviceOptions) -> SubgraphOp:
        """Return what runs a region of an imported model; its nodes are known to be supported."""
        return self._guarded(graph, self._op_for(graph, options), options)

    def import_graph(
        self, graph: Graph, config: Config, header: Mapping[str, Any], stored: StoredWeights
    ) -> CompiledModel:
        """Return the model of a partitioned graph that came from a file of this device.

        A device that compiles in its own way compiles the graph again.
        """
        if type(self).compile_model is not Device.compile_model:
            return self.compile_model(without_device_regions(graph), config)
        options = self.options_for(config)
        for node in graph.nodes:
            if node.subgraph is not None and AFFINITY in (node.metadata or {}):
                node.op = self.region_op(node.subgraph, options)
        return self._model(graph, options, stored=stored)

    def import_parts(self, parts: Mapping[str, memoryview], config: Config) -> CompiledModel:
        """Return the model of a file of several devices, each with an exported model of its own.

        Args:
            parts: These, by the device's name.
            config: The device's options, and ``ALLOW_RECOMPILE``.
        """
        return _import_model(self, parts.get(self.name) or next(iter(parts.values())), config)

    def recompile(self, graph: Graph, config: Config) -> CompiledModel:
        """Compile the graph of a file that does not fit as it is."""
        if self.core is None:
            return self.compile_model(graph, config)
        return self.core.compile_model(graph, self.name, config)

    def peer_named(self, name: str) -> Device:
        """Return this or another device by name.

        Raises:
            DeviceError: there is none.
        """
        if name == self.name:
            return self
        if self.core is None:
            raise DeviceError(f"device {self.name} does not know device {name!r}")
        return self.core.device(name)

    def import_model(
        self, stream: str | PathLike[str] | IO[bytes], config: Config | None = None
    ) -> CompiledModel:
        """Return the model that ``export_model`` wrote.

        Raises:
            BlobError: the file is damaged, foreign, or does not fit this device or version.
        """
        return _import_model(self, stream, config)

    def get_property(self, name: str) -> Any:
        """Return an option or a metric.

        Raises:
            ConfigError: there is none of that name; the nearest are listed.
        """
        name = current_name(name, self.supported_properties())
        if name in property_access(self.options_class):
            return getattr(self.options_for(None), name)
        if name == "SUPPORTED_PROPERTIES":
            return self.supported_properties()
        if name in PROPERTY_LISTS:
            return listed(name, self.supported_properties())
        metrics = self.metrics()
        if name in metrics:
            return metrics[name]
        if name in _ASKED_ALONE:
            return _ASKED_ALONE[name](self)
        known = self.supported_properties()
        raise ConfigError(f"{self.name} has no property {name!r}; {nearest(name, known)}")

    def set_property(self, properties: Config) -> None:
        """Set options for later compile calls; all or, when one is wrong, none.

        Raises:
            ConfigError: a key is unknown or read-only, or a value is not allowed.
        """
        known = self.supported_properties()
        properties = {current_name(name, known): value for name, value in properties.items()}
        for name in properties:
            if name not in property_access(self.options_class) and name in known:
                raise ConfigError(f"{self.name}: property {name!r} can only be read")
        checked = {
            name: check_option(self.options_class, self.name, name, value)
            for name, value in properties.items()
        }
        self._settings = {**self._settings, **checked}

    def supported_properties(self) -> dict[str, str]:
        """Return "RW" or "RO" by name for all options and metrics."""
        metrics = dict.fromkeys((*self.metrics(), *_ASKED_ALONE, "SUPPORTED_PROPERTIES"), "RO")
        return {**property_access(self.options_class), **metrics}

    def options_for(self, config: Config | None) -> Any:
        """Return the options in force for a call with ``config``, as ``options_class``.

        Raises:
            ConfigError: a key is unknown or a value not allowed.
        """
        base = self.name.partition(".")[0]
        return resolve_options(self.options_class, self.name, [config or {}, self._settings], base)

    # ------------------------------------------------------------------ what Core calls

    def ensure_started(self) -> None:
        """Start the device if that was not tried yet.

        Raises:
            DeviceError: it cannot start; the reason of the first try.
        """
        if not self._started:
            self._started = True
            try:
                self.start()
            except Exception as error:
                self._start_error = f"device {self.name} cannot start: {error}"
                raise DeviceError(self._start_error) from error
        if self._start_error is not None:
            raise DeviceError(self._start_error)

    def with_id(self, device_id: str) -> Device:
        """Return the device of that id: this one's options, set on their own from now on."""
        other = copy.copy(self)
        other.name = f"{self.name}.{device_id}"
        other._settings = {**self._settings, "DEVICE_ID": device_id}
        return other

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"


# Metrics that take time to find out, and are only found out when they are asked for.
_ASKED_ALONE: dict[str, Callable[[Device], Any]] = {
    "RANGE_FOR_ASYNC_INFER_REQUESTS": lambda device: device.request_range(),
    "VERSION": lambda device: device.version(),
}
# The two lists that OpenVINO's guides name, and which properties of SUPPORTED_PROPERTIES they hold.
PROPERTY_LISTS = {"SUPPORTED_METRICS": "RO", "SUPPORTED_CONFIG_KEYS": "RW"}


def listed(name: str, supported: Mapping[str, str]) -> list[str]:
    """Return the property that `PROPERTY_LISTS` calls ``name``."""
    return [key for key, access in supported.items() if access == PROPERTY_LISTS[name]]


def package_version(kind: type[Device]) -> str:
    """Return ``__version__`` of the package that defines a device; "unknown" if it has none."""
    package = sys.modules.get(kind.__module__.partition(".")[0])
    return str(getattr(package, "__version__", "unknown"))


def class_name(kind: type[Device]) -> str:
    """Return what a device is called before it is registered."""
    return kind.__name__.removesuffix("Device").upper()


def whole_graph(graph: Graph, device: str, make_op: Callable[[Graph], SubgraphOp]) -> Graph:
    """Return a graph that does the same by one subgraph node with the op ``make_op(inner)``.

    The inner graph's inputs are the graph's, then its other parameters. A graph without nodes is
    returned as it is.
    """
    if not graph.nodes:
        return graph
    inner = graph.clone()
    inputs = set(inner.inputs)
    weights = [v for v in inner.values() if v.parameter is not None and v not in inputs]
    outputs = list(dict.fromkeys(v for v in inner.outputs if v.producer is not None))
    sources = {v: Value(v.name, v.type, parameter=v.parameter) for v in (*inner.inputs, *weights)}
    outer_outputs = inner.outputs
    inner.inputs = (*inner.inputs, *weights)
    inner.outputs = tuple(outputs)
    node = subgraph_node(
        inner,
        make_op(inner),
        graph.name,
        inputs=list(sources.values()),
        metadata={AFFINITY: device},
    )
    for value, source in zip(node.outputs, outputs, strict=True):
        value.name = source.name
    made = {**sources, **dict(zip(outputs, node.outputs, strict=True))}
    return Graph(
        list(sources.values())[: len(graph.inputs)],
        [made[v] for v in outer_outputs],
        graph.name,
        nodes=[node],
        attrs=graph.attrs,
        opsets=graph.opsets,
        metadata=graph.metadata,
        doc=graph.doc,
    )
