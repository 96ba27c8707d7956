"""`Device`: the base class of everything that runs graphs, or the parts of them that it supports.

A child says which nodes it supports (`supports`) and makes the op that runs a graph of such nodes
(`create_op`); query, compilation, import, options and metrics have defaults over these two. A
device with other needs overrides `query_model` and `compile_model`. The HETERO device decides which
device runs which part of a model.
"""

from __future__ import annotations

import copy
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import IO, Any, ClassVar, Protocol, Self, cast

import attrs
import numpy as np

from subgraph.devices.query import (
    PreparedGraph,
    QueryResult,
    origins,
    own_op_reason,
    reason_of,
    refuse_behind_sequences,
    refuse_with_users,
)
from subgraph.errors import ConfigError, DeviceError, SubgraphError, described
from subgraph.graph.graph import Graph, Node
from subgraph.operators.operator import Operator
from subgraph.operators.region_names import region_of
from subgraph.operators.subgraph_op import (
    AFFINITY,
    DefaultSubgraphOp,
    Fallback,
    SubgraphOp,
)
from subgraph.partition.regions import whole_graph, without_device_regions
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
from subgraph.system.registry import Registry, defined_at, nearest
from subgraph.transform.pass_manager import Unchanged
from subgraph.weights.cache import StoredWeights

Config = Mapping[str, Any]
_compile_checked: Hook[[Device, Graph, Config | None], CompiledModel] = Hook(
    "compile a queried graph"
)
_import_model: Hook[[Device, Any, Config | None], CompiledModel] = Hook("import a model")
_fallback: Hook[[Graph, SubgraphOp, DeviceList], Fallback] = Hook("fallback of an op")


class DeviceTable(Protocol):
    """The part of `Core` that devices use: it finds other devices and compiles for them."""

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
        """Compile a graph for a device: see `Core.compile_model`.

        Args:
            model: The graph.
            device_name: A device string.
            config: The device's options.
        """
        ...

    def add_extension(self, extension: Operator) -> None:
        """Register a custom operator."""
        ...


class Device:
    """A device; a child is registered with ``core.register_device("NAME", MyDevice)``.

    Attributes:
        name: The name under which it is registered; "NAME.0" for one of several ids.
        core: The Core that it is registered with, or None.
        full_name: Its metric FULL_DEVICE_NAME; "": its name.
        options_class: Its options, a child of `DeviceOptions`.
        fallback: Names of devices that run the nodes which this one does not support if a model is
            compiled for this device alone.
        is_virtual: Whether it runs models on other devices, as HETERO does.
        concurrent_regions: Whether independent regions of one request may overlap on it. Regions of
            different devices may always overlap.
        without_regions: Whether the default executor runs its nodes one by one, without regions, as
            it does for REFERENCE.
        keeps_nan: Whether every operator keeps NaN, as ONNX defines it. If not, `check_device`
            compares no runs in which a NaN appears.
        caches: Whether its compiled models are stored in ``CACHE_DIR``; False for a device whose
            other devices store theirs.
        lowerings: The registry of lowerings of a device that runs regions by plans, else None.
    """

    full_name: ClassVar[str] = ""
    options_class: ClassVar[type[DeviceOptions]] = DeviceOptions
    fallback: ClassVar[tuple[str, ...]] = ()
    is_virtual: ClassVar[bool] = False
    concurrent_regions: ClassVar[bool] = False
    without_regions: ClassVar[bool] = False
    keeps_nan: ClassVar[bool] = True
    caches: ClassVar[bool] = True
    lowerings: ClassVar[Registry[Any] | None] = None
    name: str
    core: DeviceTable | None
    _settings: dict[str, Any]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Create the private state, so that a child need not call ``super().__init__``."""
        self = super().__new__(cls)
        self.name = class_name(cls)
        self.core = None
        self._settings = {}
        return self

    # ------------------------------------------------------------------ overridden by children

    def start(self) -> None:
        """Find the hardware, before the first use; an exception says why it cannot be used."""

    def supports(self, node: Node, options: Any) -> bool | Reject:
        """Return whether the device can run ``node``; a `Reject` says why not.

        ``options`` is an instance of ``options_class``, here and in the following methods.
        """
        return False

    def transform(self, graph: Graph, options: Any) -> Graph:
        """Return the graph in the device's own form, fused or legalized; ``graph`` is unchanged.

        Queries and compilations use the result. A node that stands for several original nodes has
        them in its inner graph, or lists their names in ``metadata["origin"]``, separated by
        newlines.
        """
        return graph

    def create_op(self, graph: Graph, options: Any) -> SubgraphOp:
        """Return the op that runs ``graph``, whose nodes are all supported.

        The graph's inputs are those of the region: values and weights.
        """
        return DefaultSubgraphOp(graph)

    def add_kernel(self, operator: str, kernel: Callable[..., Any]) -> None:
        """Register a kernel of a custom operator.

        Args:
            operator: "domain::Type".
            kernel: A callable of the kind that the device defines; of a device with ``lowerings`` a
                lowering, called with a node and the device's `Lowering`.

        Raises:
            DeviceError: the device has no kernels of single operators.
        """
        from subgraph.engine.planner.lowering import LoweringRule

        if self.lowerings is None:
            raise DeviceError(f"device {self.name} takes no kernels for single operators")
        rule = LoweringRule(kernel, None, frozenset({"plain"}), custom=True)
        self.lowerings.register(operator, rule, defined_at(kernel))

    def remove_kernel(self, operator: str) -> None:
        """Remove a kernel that `add_kernel` registered for an operator."""
        if self.lowerings is not None:
            self.lowerings.unregister(operator)

    def device_ids(self) -> list[str]:
        """Return the ids of the devices of this kind; [""] if there is one device without an id."""
        return [""]

    def metrics(self) -> dict[str, Any]:
        """Return the read-only properties; a child adds its own to ``super().metrics()``."""
        return {
            "AVAILABLE_DEVICES": self.device_ids(),
            "FULL_DEVICE_NAME": self.full_name or self.name,
            "OPTIMIZATION_CAPABILITIES": ["FP32"],
            "DEVICE_ARCHITECTURE": platform.machine(),
            "EXPORT_IMPORT": True,
            "CONCURRENT_REGIONS": self.concurrent_regions,
        }

    def capability(self) -> dict[str, str]:
        """Return the facts that an exported model depends on, which an import compares."""
        return {"architecture": str(_metrics_of(self).get("DEVICE_ARCHITECTURE", ""))}

    def version(self) -> str:
        """Return the versions of the device's package, compilers and driver, for problem reports.

        The default is ``__version__`` of the package that defines the device's class.
        """
        return package_version(type(self))

    def request_range(self) -> tuple[int, int, int]:
        """Return the useful numbers of concurrent requests: smallest, largest, and step.

        The default is 1 to `optimal_requests`.
        """
        return 1, max(1, self.optimal_requests(self.options_for(None))), 1

    def optimal_requests(self, options: Any) -> int:
        """Return the number of concurrent requests with which the device is used best."""
        return 1

    # ------------------------------------------------------------------ called by users

    def query_model(self, graph: Graph, config: Config | None = None) -> dict[str, str]:
        """Return the nodes that the device supports, as {node name: device name}.

        The graph is transformed by `transform`; an original node is supported only if all nodes
        that it has become are. The result, a `QueryResult`, has reasons for the other nodes.
        """
        options = self.options_for(config)
        prepared = self._prepare(graph, options)
        known = {n.name for n in graph.nodes}
        reasons = {n.name: text for n in graph.nodes if (text := self._own_op_reason(n))}
        seen = set(reasons)
        for node in prepared.graph.nodes:
            names = set(origins(node))
            # A user's region that the default executor would run may have been inlined by
            # `transform`. Its subgraph node is supported only if all its nodes are.
            names.update((node.name, *region_of(node).split(",")))
            seen |= names
            text = self._own_op_reason(node)
            if not text and prepared.refused is not None:
                text = prepared.refused.get(node.name, "")
            elif not text:
                text = self._refusal(node, options)
            if text:
                # One original node may become supported and refused nodes; as in OpenVINO's plugin
                # guide it then counts as refused.
                reasons.update((name, text) for name in names if name not in reasons)
        refuse_behind_sequences(graph, seen, reasons)
        refuse_with_users(graph, seen, reasons)
        supported = {n.name: self.name for n in graph.nodes if n.name not in reasons}
        return QueryResult(supported, {k: v for k, v in reasons.items() if k in known}, prepared)

    def compile_model(self, graph: Graph, config: Config | None = None) -> CompiledModel:
        """Compile a graph whose nodes are all supported.

        Raises:
            UnsupportedOpError: some nodes are not; it lists their names and reasons.
            ConfigError: an option is unknown or its value not allowed.
        """
        return _compile_checked(self, graph, config)

    def compile_supported(
        self, graph: Graph, config: Config | None, result: QueryResult | None = None
    ) -> CompiledModel:
        """Compile a graph whose nodes are all supported, without a query.

        Args:
            graph: The graph.
            config: The device's options.
            result: Its query result, whose transformed graph is used again; None if the graph was
                not queried by itself.
        """
        options = self.options_for(config)
        prepared = None
        if result is not None:
            graph, prepared = result.lifted or graph, result.prepared

        def make_op(inner: Graph) -> SubgraphOp:
            op = self._op_for(inner, options)
            if prepared is not None:
                self._use_prepared(op, prepared)
            return self._with_fallback(inner, op, options)

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
        """Transform a graph for a query; a child may find out here which nodes it refuses."""
        return PreparedGraph(self._transformed(graph, options))

    def _transformed(self, graph: Graph, options: DeviceOptions) -> Graph:
        found = self._called("transform", graph, options, f"graph {graph.name!r}")
        if not isinstance(found, Graph):
            raise DeviceError(
                f"device {self.name}: transform gave {found!r}; it must return a Graph"
            )
        return found

    def _own_op_reason(self, node: Node) -> str:
        """Return why a node has to run by its own op; "" if it has none."""
        return own_op_reason(node)

    def _refusal(self, node: Node, options: DeviceOptions) -> str:
        """Return why `supports` refuses a node; "" if it does not."""
        about = f"node {node.name!r} ({node.op_type})"
        answer: bool | Reject = self._called("supports", node, options, about)
        if not isinstance(answer, (bool, np.bool_, Reject)):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise DeviceError(
                f"device {self.name}: supports gave {answer!r} for {about}; it must return True, "
                "False or an sg.Reject"
            )
        return "" if answer else reason_of(answer, node, self.name)

    def _called(self, method: str, item: Graph | Node, options: DeviceOptions, given: str) -> Any:
        """Return what a method of a child class returns for an item, which ``given`` describes.

        Raises:
            DeviceError: the method raised an error that is not one of Subgraph's, or changed the
                graph.
        """
        promise = Unchanged(item) if isinstance(item, Graph) else None
        try:
            found = getattr(self, method)(item, options)
        except (SubgraphError, MemoryError):
            raise
        except Exception as error:
            raise DeviceError(
                f"device {self.name}: {method} raised {described(error)}, given {given}"
            ) from error
        if promise is not None:
            promise.check(f"device {self.name}: {method}", DeviceError)
        return found

    def _op_for(self, graph: Graph, options: DeviceOptions) -> SubgraphOp:
        own = self._transformed(graph, options)
        op = self._called("create_op", own, options, f"graph {graph.name!r}")
        if not isinstance(op, SubgraphOp):
            raise DeviceError(
                f"device {self.name}: create_op gave {op!r}; it must return a SubgraphOp"
            )
        # The op of an author who named no device; profiles and exported files need the name.
        if op.device == SubgraphOp.device:
            op.device = self.name
        op.concurrent = op.concurrent or self.concurrent_regions
        return op

    def _use_prepared(self, op: SubgraphOp, prepared: PreparedGraph) -> None:
        """Let an op that transforms its graph itself use the result of the query instead."""

    def _with_fallback(self, graph: Graph, op: SubgraphOp, options: DeviceOptions) -> SubgraphOp:
        """Return the op, with the device's fallback devices to run the region if the op fails."""
        if self.fallback and self.core is not None and options.RUNTIME_FALLBACK:
            others = [self.core.device(name) for name in self.fallback]
            op.fallback = _fallback(graph, op, DeviceList(others, {}, options))
        return op

    def region_op(self, graph: Graph, options: DeviceOptions) -> SubgraphOp:
        """Return the op that runs a region of an imported model, whose nodes are all supported."""
        return self._with_fallback(graph, self._op_for(graph, options), options)

    def import_graph(
        self, graph: Graph, config: Config, header: Mapping[str, Any], stored: StoredWeights
    ) -> CompiledModel:
        """Return the model of a partitioned graph from an exported file of this device.

        A device that overrides `compile_model` compiles the graph again.

        Args:
            graph: The graph, with a subgraph node for each region.
            config: The device's options.
            header: Header of the file.
            stored: The packed weights of the file.
        """
        # Such a device does not run regions by ops of its own, so the regions of the file have no
        # meaning for it.
        if type(self).compile_model is not Device.compile_model:
            return self.compile_model(without_device_regions(graph), config)
        options = self.options_for(config)
        for node in graph.nodes:
            if node.subgraph is not None and AFFINITY in (node.metadata or {}):
                node.op = self.region_op(node.subgraph, options)
        return self._model(graph, options, stored=stored)

    def import_parts(self, parts: Mapping[str, memoryview], config: Config) -> CompiledModel:
        """Return the model of a file that holds one exported model for each of several devices.

        Args:
            parts: The exported models by the device's name.
            config: The device's options, and ``ALLOW_RECOMPILE``.
        """
        return _import_model(self, parts.get(self.name) or next(iter(parts.values())), config)

    def recompile(self, graph: Graph, config: Config) -> CompiledModel:
        """Compile the graph of a file that was compiled for another machine or version."""
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
        if name in _PROPERTY_LISTS:
            wanted = _PROPERTY_LISTS[name]
            return [key for key, access in self.supported_properties().items() if access == wanted]
        metrics = _metrics_of(self)
        if name in metrics:
            return metrics[name]
        if name in _COMPUTED:
            return _COMPUTED[name](self)
        known = self.supported_properties()
        raise ConfigError(f"{self.name} has no property {name!r}; {nearest(name, known)}")

    def set_property(self, properties: Config) -> None:
        """Set options for later compile calls; if one is wrong, none is set.

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
        metrics = dict.fromkeys((*_metrics_of(self), *_COMPUTED, "SUPPORTED_PROPERTIES"), "RO")
        return {**property_access(self.options_class), **metrics}

    def options_for(self, config: Config | None) -> Any:
        """Return the options in force for a call with ``config``, as ``options_class``.

        Raises:
            ConfigError: a key is unknown or a value not allowed.
        """
        # Options of a call have priority over those of `set_property`, as in OpenVINO's plugin
        # guide.
        base = self.name.partition(".")[0]
        return resolve_options(self.options_class, self.name, [config or {}, self._settings], base)

    # ------------------------------------------------------------------ called by Core

    def with_id(self, device_id: str) -> Device:
        """Return the device of an id, with a copy of this device's options."""
        other = copy.copy(self)
        other.name = f"{self.name}.{device_id}"
        other._settings = {**self._settings, "DEVICE_ID": device_id}
        return other

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"


@attrs.frozen
class DeviceList:
    """Devices in order of priority, among which parts or runs of a model are distributed.

    Attributes:
        devices: The devices.
        configs: Options by the device's name.
        options: Options of the device that uses them.
    """

    devices: Sequence[Device]
    configs: Mapping[str, Config]
    options: Any

    def config_of(self, device: Device) -> Config | None:
        """Return the options of a device; None for its defaults."""
        return self.configs.get(device.name) or None

    def without(self, device: Device) -> DeviceList:
        """Return the other devices."""
        return attrs.evolve(self, devices=[each for each in self.devices if each is not device])


# Metrics that take time to compute; they are computed only when one is read by its name.
_COMPUTED: dict[str, Callable[[Device], Any]] = {
    "RANGE_FOR_ASYNC_INFER_REQUESTS": lambda device: device.request_range(),
    "VERSION": lambda device: device.version(),
}
# Two lists of properties from OpenVINO's guides, each with the access of the properties in it.
_PROPERTY_LISTS = {"SUPPORTED_METRICS": "RO", "SUPPORTED_CONFIG_KEYS": "RW"}


def package_version(kind: type[Device]) -> str:
    """Return ``__version__`` of the package that defines a device class; "unknown" without one."""
    package = sys.modules.get(kind.__module__.partition(".")[0])
    return str(getattr(package, "__version__", "unknown"))


def _metrics_of(device: Device) -> Mapping[str, Any]:
    """Return what `Device.metrics` returns.

    Raises:
        DeviceError: it is no dict.
    """
    found: Any = device.metrics()
    if not isinstance(found, Mapping):
        raise DeviceError(
            f"device {device.name}: metrics of {type(device).__name__} returned {found!r}; return "
            "a dict, such as {**super().metrics(), 'FULL_DEVICE_NAME': 'My accelerator'}"
        )
    return cast("Mapping[str, Any]", found)


def class_name(kind: type[Device]) -> str:
    """Return the name of a device before it is registered: "MY" for MyDevice."""
    return kind.__name__.removesuffix("Device").upper()
