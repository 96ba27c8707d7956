"""Checked calls of a device's methods.

Core, the virtual devices and the import of files call a device through these functions, because a
device may be a third party's. An exception of a method becomes one error that names device and
method, and every result is checked for its type and its names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, cast, runtime_checkable

from subgraph.devices.device import Config, Device, class_name
from subgraph.devices.model_input import without_defaults
from subgraph.devices.query import QueryResult
from subgraph.errors import ConfigError, DeviceError, SubgraphError, UnsupportedOpError, described
from subgraph.graph.graph import Graph
from subgraph.partition.constants import constant_nodes, constants_to_weights
from subgraph.runtime.compiled_model import CompiledModel
from subgraph.runtime.metric_types import checked_metric
from subgraph.system.registry import nearest
from subgraph.transform.pass_manager import Unchanged


@runtime_checkable
class CompilesWithFallback(Protocol):
    """Interface of HETERO: a device that compiles a graph for a list of devices."""

    def compile_with_fallback(
        self,
        graph: Graph,
        devices: Sequence[Device],
        config: Config,
        supported: QueryResult,
    ) -> CompiledModel:
        """Compile a graph for several devices.

        Args:
            graph: The graph to compile.
            devices: The devices in order of priority; a node goes to the first that supports it.
            config: Options of the first device.
            supported: Result of `query_on` for the first device.

        Raises:
            UnsupportedOpError: no device supports some node.
        """
        ...


def known_properties(device: Device) -> dict[str, str]:
    """Return ``{name: "RO" or "RW"}`` of a device's SUPPORTED_PROPERTIES; empty without them."""
    try:
        found = property_of(device, "SUPPORTED_PROPERTIES")
    except SubgraphError:
        return {}
    if isinstance(found, Mapping):
        return {str(key): str(access) for key, access in cast("Mapping[Any, Any]", found).items()}
    # A list of names says nothing of access. A device refuses itself what cannot be set.
    return dict.fromkeys(_texts(found), "RW")


def ids_of(device: Device) -> list[str]:
    """Return the metric AVAILABLE_DEVICES of a device; ``[""]`` if it has none."""
    try:
        return _texts(property_of(device, "AVAILABLE_DEVICES")) or [""]
    except SubgraphError:
        return [""]


def _texts(found: Any) -> list[str]:
    """Return the items of an iterable as strings; an empty list for a string or a scalar."""
    listed = isinstance(found, Iterable) and not isinstance(found, str)
    return [str(each) for each in cast("Iterable[Any]", found)] if listed else []


def require_support(supported: QueryResult, graph: Graph, device: str) -> None:
    """Check that a query covers every node of a graph.

    Args:
        supported: Result of `query_on`, whose ``reasons`` are shown.
        graph: The graph that was queried.
        device: Name of the device, for the message.

    Raises:
        UnsupportedOpError: some nodes are not supported; it lists their names and reasons.
    """
    missing = [node for node in graph.nodes if node.name not in supported]
    if not missing:
        return
    lines = [
        f"  {n.name!r} ({n.op_type}): {supported.reasons.get(n.name, 'not in its query result')}"
        for n in missing[:8]
    ]
    more = f"\n  and {len(missing) - 8} more" if len(missing) > 8 else ""
    listed = device if device.startswith("HETERO:") else f"HETERO:{device}"
    raise UnsupportedOpError(
        f"device {device} does not support {len(missing)} of the {len(graph.nodes)} nodes of "
        f"{graph.name!r}:\n" + "\n".join(lines) + f"{more}\n"
        f"Compile for '{listed},REFERENCE' to run these on the reference device"
    )


def compile_checked(device: Device, graph: Graph, config: Config | None) -> CompiledModel:
    """Compile a graph by a device's query and `Device.compile_supported`.

    Args:
        device: The device.
        graph: The graph.
        config: Options of the device; None for its defaults.

    Raises:
        UnsupportedOpError: some nodes are not supported; it lists their names and reasons.
    """
    found = query_on(device, graph, config)
    require_support(found, graph, device.name)
    return device.compile_supported(graph, config, found)


def compile_queried(
    device: Device, graph: Graph, config: Config | None, result: QueryResult | None = None
) -> CompiledModel:
    """Compile a graph whose nodes are all supported by the device.

    Args:
        device: The device.
        graph: The graph.
        config: The device's options.
        result: Its query result for this graph; None if it was queried for a graph that contains
            this one.
    """
    if type(device).compile_model is Device.compile_model:
        with _named(device, "compile_model", graph):
            model: Any = device.compile_supported(graph, config, result)
        return _checked_model(device, "compile_supported", model)
    return _compiled(device, graph if result is None else result.lifted or graph, config)


class _named:
    """A ``with`` block that converts a foreign exception to an error that names device and method.

    A class: ``contextlib.contextmanager`` takes a RuntimeError raised from a StopIteration, which a
    hook may raise, for one of Python's own, and lets the StopIteration pass.
    """

    def __init__(self, device: Device, method: str, argument: object) -> None:
        """Run a hook of a device.

        Args:
            device: The device.
            method: The hook.
            argument: What it is given, for the message.
        """
        self._device, self._method, self._argument = device, method, argument

    def __enter__(self) -> None:
        """Begin the call."""

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        """Convert the exception of the call.

        Raises:
            DeviceError: the hook raised an exception that is not Subgraph's.
            ConfigError: it looked up a property that it does not know.
        """
        # Errors of Subgraph name their cause. A lack of memory is no fault of the device.
        if not isinstance(error, Exception) or isinstance(error, (SubgraphError, MemoryError)):
            return
        argument, method = self._argument, self._method
        shown = f"graph {argument.name!r}" if isinstance(argument, Graph) else repr(argument)
        raised = f"raised {described(error)}, given {shown}"
        about_properties = method in ("get_property", "set_property")
        # A simple device looks an option up in a dict, so that its KeyError means an unknown
        # option.
        wrong_key = about_properties and isinstance(error, (LookupError, ValueError))
        kind = ConfigError if wrong_key else DeviceError
        raise kind(f"device {self._device.name}: {method} {raised}") from error


def query_on(device: Device, graph: Graph, config: Config | None) -> QueryResult:
    """Return the checked result of a device's ``query_model``.

    A Constant node that the device refuses counts as supported if it feeds a supported node: the
    graph is then compiled with a Parameter in place of the Constant.

    Args:
        device: The device to query.
        graph: The graph.
        config: Options of the device; None for its defaults.

    Returns:
        ``{node name: device name}``, with reasons and lifted constants where these are known.

    Raises:
        DeviceError: ``query_model`` raised, returned no dict, or names an unknown node or device.
    """
    found = _answer_of(device, graph, config)
    # A virtual device asks its devices by this function, so that their constants have been lifted.
    return found if device.is_virtual else _with_constants(device, graph, config, found)


def _with_constants(
    device: Device, graph: Graph, config: Config | None, found: QueryResult
) -> QueryResult:
    """Add refused constants that feed supported nodes to a query result, as weights.

    The device is queried a second time, for the graph with Parameters in place of these constants,
    since it may support more nodes there. If it supports fewer, the first result is returned.
    """
    if all(node.op_type != "Constant" or node.name in found for node in graph.nodes):
        return found
    if type(device).transform is Device.transform:
        names = {node.name for node in constant_nodes(graph) if node.name not in found}
    else:  # the device transforms graphs itself; lift only constants that its own result needs
        names = _constants_feeding(graph, found)
    if not names:
        return found
    lifted = graph.clone()
    names = constants_to_weights(lifted, names)
    again = _answer_of(device, lifted, config)
    if not names or any(node.name in found and node.name not in again for node in lifted.nodes):
        return found
    names &= _constants_feeding(graph, {**found, **again})
    reasons = {**found.reasons, **again.reasons}
    supported = {n.name: device.name for n in graph.nodes if n.name in again or n.name in found}
    supported.update(dict.fromkeys(names, device.name))
    refusals = {name: text for name, text in reasons.items() if name not in supported}
    return QueryResult(supported, refusals, again.prepared, names, lifted)


def _constants_feeding(graph: Graph, found: Mapping[str, str]) -> set[str]:
    """Return the names of constants outside ``found`` that feed nodes in ``found``.

    A constant may feed such a node directly or through other constants of the result.
    """
    names: set[str] = set()
    # Users come first: a constant feeds a supported node also through another constant.
    for node in reversed(constant_nodes(graph)):
        users = {user.name for user in node.successors()}
        if node.name not in found and any(name in found or name in names for name in users):
            names.add(node.name)
    return names


def _answer_of(device: Device, graph: Graph, config: Config | None) -> QueryResult:
    """Call ``query_model`` of a device and return its checked result."""
    found: Any = _of_graph(device, "query_model", graph, config)
    if not isinstance(found, Mapping):
        raise DeviceError(
            f"device {device.name}: query_model gave {found!r}; it must return a dict from node "
            "names to the device's name"
        )
    # The result of the base class needs no check.
    if type(device).query_model is not Device.query_model:
        return _checked_query(device, graph, cast("Mapping[Any, Any]", found))
    return cast("QueryResult", found)


def _checked_query(device: Device, graph: Graph, found: Mapping[Any, Any]) -> QueryResult:
    """Return the result of an overridden ``query_model``, reduced to names of the graph's nodes.

    Names of inputs, outputs, weights and nodes in bodies are dropped: these follow their users. The
    device may use its full name, its base name or the name of its class.
    """
    nodes = {node.name for node in graph.nodes}
    own = {device.name, device.name.partition(".")[0], class_name(type(device))}
    others: set[str] = set()
    if device.is_virtual and device.core is not None:
        others.update(device.core.registered_devices, device.core.registered_backends)
    names: dict[str, str] = {}
    for name, home in found.items():
        if name not in nodes:
            if name in _other_names(graph):
                continue
            raise DeviceError(
                f"device {device.name}: query_model names a node {name!r}, which graph "
                f"{graph.name!r} does not have; {nearest(str(name), nodes)}"
            )
        homes = home.split(",") if isinstance(home, str) else ()  # several may run a user's region
        if not homes or not all(h in own or h.partition(".")[0] in others for h in homes):
            raise DeviceError(
                f"device {device.name}: query_model places node {name!r} on {home!r}, which is no "
                f"device here; it must give the device's own name, {device.name!r}"
            )
        names[name] = device.name if home in own else home
    if isinstance(found, QueryResult):
        return QueryResult(names, found.reasons, found.prepared, refused=found.refused)
    return QueryResult(names, {})


def _other_names(graph: Graph) -> set[str]:
    """Return the names of a graph's values, and of the nodes in bodies."""
    bodies = [body for node in graph.nodes if node.attrs for body in node.bodies]
    inner = [{n.name for n in body.nodes} | _other_names(body) for body in bodies]
    return {value.name for value in graph.values()}.union(*inner)


def property_of(device: Device, name: str) -> Any:
    """Return an option or metric of a device.

    Raises:
        ConfigError: the device has no property of that name.
        DeviceError: ``get_property`` raised another exception, or returned a standard metric of
            a wrong type.
    """
    if not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"a property is named by a string, such as 'CACHE_DIR'; got {name!r}")
    with _named(device, "get_property", name):
        found = device.get_property(name)
    return checked_metric(f"device {device.name}", name, found)


def set_properties(device: Device, properties: Config) -> None:
    """Set options of a device.

    Raises:
        ConfigError: a key is unknown or a value not allowed.
        DeviceError: ``set_property`` raised another exception.
    """
    with _named(device, "set_property", dict(properties)):
        device.set_property(properties)


def capability_of(device: Device) -> dict[str, str]:
    """Return the versions and hardware features that an exported model of a device depends on.

    Raises:
        DeviceError: ``capability`` raised an exception or returned something else.
    """
    with _named(device, "capability", device.name):
        found: Any = device.capability()
    if not isinstance(found, dict) or not all(isinstance(text, str) for text in found.values()):  # pyright: ignore[reportUnknownVariableType]
        raise DeviceError(
            f"device {device.name}: capability gave {found!r}; it must return a dict of texts by "
            'name, such as {"driver": "1.2"}'
        )
    return cast("dict[str, str]", found)


def import_on(device: Device, source: Any, config: Config | None, shown: str) -> CompiledModel:
    """Return the model that a device imports from an exported file.

    Args:
        device: The device.
        source: Path or binary stream, as `Device.import_model` takes it.
        config: Options of the device; None for those of the file.
        shown: Name of the source in messages.

    Raises:
        BlobError: the file is damaged or does not fit the device.
        DeviceError: ``import_model`` raised another exception or returned no CompiledModel.
    """
    with _named(device, "import_model", shown):
        model: Any = device.import_model(source, config)
    return _checked_model(device, "import_model", model)


def compile_on(device: Device, graph: Graph, config: Config | None) -> CompiledModel:
    """Compile a graph on a device, with the constants that `query_on` lifts as Parameters.

    Args:
        device: The device.
        graph: The graph.
        config: Options of the device; None for its defaults.

    Raises:
        DeviceError: ``compile_model`` raised an exception or returned no CompiledModel.
    """
    # `Device.compile_model` queries the graph and lifts its constants itself.
    own = type(device).compile_model is not Device.compile_model and not device.is_virtual
    if own and any(node.op_type == "Constant" for node in graph.nodes):
        graph = query_on(device, graph, config).lifted or graph
    return _compiled(device, graph, config)


def _compiled(device: Device, graph: Graph, config: Config | None) -> CompiledModel:
    if type(device).compile_model is not Device.compile_model:
        graph = without_defaults(graph)  # the inner graph of a region lists weights as inputs
    return _checked_model(
        device, "compile_model", _of_graph(device, "compile_model", graph, config)
    )


def _of_graph(device: Device, method: str, graph: Graph, config: Config | None) -> Any:
    """Return what a device's method returns for a graph, which it must not change."""
    # The base class checks the hooks to which it gives the graph.
    own = getattr(type(device), method) is not getattr(Device, method)
    promise = Unchanged(graph) if own else None
    with _named(device, method, graph):
        found: Any = getattr(device, method)(graph, config)
    if promise is not None:
        promise.check(f"device {device.name}: {method}", DeviceError)
    return found


def _checked_model(device: Device, method: str, model: Any) -> CompiledModel:
    if not isinstance(model, CompiledModel):
        raise DeviceError(
            f"device {device.name}: {method} gave {model!r}; it must return a CompiledModel"
        )
    return model
