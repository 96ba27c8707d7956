"""What is asked of a device, checked: its answers, and errors that name device and method.

Core, the virtual devices and exported files call a device by these functions, since it may be a
third party's: what it raises becomes one clear error, and what it gives is looked at.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, cast, runtime_checkable

from subgraph.devices.device import Config, Device, QueryResult, class_name, without_defaults
from subgraph.errors import ConfigError, DeviceError, SubgraphError, UnsupportedOpError
from subgraph.graph.graph import Graph
from subgraph.partition.constants import constant_nodes, constants_to_weights
from subgraph.runtime.compiled_model import CompiledModel
from subgraph.runtime.metric_types import checked_metric
from subgraph.system.registry import nearest


@runtime_checkable
class CompilesWithFallback(Protocol):
    """The device that compiles for others of which the first does not support everything."""

    def compile_with_fallback(
        self,
        graph: Graph,
        devices: Sequence[Device],
        config: Config,
        supported: Mapping[str, str],
    ) -> CompiledModel:
        """Compile the graph; what a device does not support goes to the next one."""
        ...


def known_properties(device: Device) -> dict[str, str]:
    """Return what a device calls its supported properties; none if it does not say."""
    try:
        found = property_of(device, "SUPPORTED_PROPERTIES")
    except SubgraphError:
        return {}
    if isinstance(found, Mapping):
        return {str(key): str(access) for key, access in cast("Mapping[Any, Any]", found).items()}
    return dict.fromkeys(_texts(found), "RW")


def ids_of(device: Device) -> list[str]:
    """Return the ids of the devices of this kind, as its metric tells them."""
    try:
        return _texts(property_of(device, "AVAILABLE_DEVICES")) or [""]
    except SubgraphError:
        return [""]


def _texts(found: Any) -> list[str]:
    """Return the items of a list as texts; none of anything else."""
    listed = isinstance(found, Iterable) and not isinstance(found, str)
    return [str(each) for each in cast("Iterable[Any]", found)] if listed else []


def require_support(supported: Mapping[str, str], graph: Graph, device: str) -> None:
    """Check that a query covers the graph.

    Raises:
        UnsupportedOpError: it does not; names and reasons.
    """
    missing = [node for node in graph.nodes if node.name not in supported]
    if not missing:
        return
    reasons = getattr(supported, "reasons", {})
    lines = [
        f"  {n.name!r} ({n.op_type}): {reasons.get(n.name, 'not in its query result')}"
        for n in missing[:8]
    ]
    more = f"\n  and {len(missing) - 8} more" if len(missing) > 8 else ""
    listed = device if device.startswith("HETERO:") else f"HETERO:{device}"
    raise UnsupportedOpError(
        f"device {device} does not support {len(missing)} of the {len(graph.nodes)} nodes of "
        f"{graph.name!r}:\n" + "\n".join(lines) + f"{more}\n"
        f"Compile for '{listed},REFERENCE' to run these on the reference device"
    )


def compile_queried(
    device: Device, graph: Graph, config: Config | None, result: QueryResult | None = None
) -> CompiledModel:
    """Compile a graph all of whose nodes the device has said to support.

    Args:
        device: The device.
        graph: The graph.
        config: The device's options.
        result: What it said of this very graph; None: of a larger one.
    """
    if type(device).compile_model is Device.compile_model:
        with _named(device, "compile_model", graph):
            return device.compile_supported(graph, config, result)
    return _compiled(device, graph if result is None else result.lifted or graph, config)


@contextmanager
def _named(device: Device, method: str, given: object) -> Generator[None]:
    """Let an error that is not ours say which method of which device raised it, given what."""
    try:
        yield
    except (SubgraphError, MemoryError):
        raise
    except Exception as error:
        what = f"graph {given.name!r}" if isinstance(given, Graph) else repr(given)
        raised = f"raised {type(error).__name__}: {error}, given {what}"
        about_properties = method in ("get_property", "set_property")
        wrong_key = about_properties and isinstance(error, (LookupError, ValueError))
        kind = ConfigError if wrong_key else DeviceError
        raise kind(f"device {device.name}: {method} {raised}") from error


def query_on(device: Device, graph: Graph, config: Config | None) -> dict[str, str]:
    """Return what a device says that it supports.

    A constant that it refuses counts as supported where it feeds a node that the device takes: the
    model is compiled with a Parameter in its place.

    Raises:
        DeviceError: its ``query_model`` raised, gave no dict, or names what is not there.
    """
    found = _answer_of(device, graph, config)
    return found if device.is_virtual else _with_constants(device, graph, config, found)


def _with_constants(
    device: Device, graph: Graph, config: Config | None, found: dict[str, str]
) -> dict[str, str]:
    """Let constants that a device refuses follow the nodes that it takes, as their weights.

    The device is asked again about the graph that it would compile then, in which it may take nodes
    that need weights; where it takes less of that, its first answer stands.
    """
    if all(node.op_type != "Constant" or node.name in found for node in graph.nodes):
        return found
    if type(device).transform is Device.transform:
        names = {node.name for node in constant_nodes(graph) if node.name not in found}
    else:  # constants are its own matter, but for those that nodes of other devices take, too
        names = _following(graph, found)
    if not names:
        return found
    lifted = graph.clone()
    names = constants_to_weights(lifted, names)
    again = _answer_of(device, lifted, config)
    if not names or any(node.name in found and node.name not in again for node in lifted.nodes):
        return found
    names &= _following(graph, {**found, **again})
    reasons = {**getattr(found, "reasons", {}), **getattr(again, "reasons", {})}
    supported = {n.name: device.name for n in graph.nodes if n.name in again or n.name in found}
    supported.update(dict.fromkeys(names, device.name))
    left = {name: text for name, text in reasons.items() if name not in supported}
    transformed = getattr(again, "transformed", None)
    return QueryResult(supported, left, transformed, names, lifted)


def _following(graph: Graph, found: Mapping[str, str]) -> set[str]:
    """Return the names of constants not in ``found`` that nodes in ``found`` take.

    Directly, or through others of these.
    """
    names: set[str] = set()
    for node in reversed(constant_nodes(graph)):
        users = {user.name for user in node.successors()}
        if node.name not in found and any(name in found or name in names for name in users):
            names.add(node.name)
    return names


def _answer_of(device: Device, graph: Graph, config: Config | None) -> dict[str, str]:
    """Return what a device itself says that it supports, checked."""
    with _named(device, "query_model", graph):
        found: Any = device.query_model(graph, config)
    if not isinstance(found, Mapping):
        raise DeviceError(
            f"device {device.name}: query_model gave {found!r}; it must return a dict from node "
            "names to the device's name"
        )
    if type(device).query_model is not Device.query_model:
        return _checked_query(device, graph, cast("Mapping[Any, Any]", found))
    return cast("dict[str, str]", found)


def _checked_query(device: Device, graph: Graph, found: Mapping[Any, Any]) -> dict[str, str]:
    """Return what a device's own ``query_model`` gave, with names that are there.

    Names of inputs, outputs and weights are left out, as those of nodes in bodies are: these follow
    their users. The device may call itself by its base name, or by the one that its class has.
    """
    nodes = {node.name for node in graph.nodes}
    own = {device.name, device.name.partition(".")[0], class_name(type(device))}
    others: set[str] = set()
    if device.is_virtual and device.core is not None:
        others.update(device.core.registered_devices)
    names: dict[str, str] = {}
    for name, home in found.items():
        if name not in nodes:
            if name in _other_names(graph):
                continue
            raise DeviceError(
                f"device {device.name}: query_model names a node {name!r}, which graph "
                f"{graph.name!r} does not have; {nearest(str(name), nodes)}"
            )
        if not isinstance(home, str) or not (home in own or home.partition(".")[0] in others):
            raise DeviceError(
                f"device {device.name}: query_model places node {name!r} on {home!r}, which is no "
                f"device here; it must give the device's own name, {device.name!r}"
            )
        names[name] = device.name if home in own else home
    if isinstance(found, QueryResult):
        return QueryResult(names, found.reasons, found.transformed, refused=found.refused)
    return names


def _other_names(graph: Graph) -> set[str]:
    """Return the names of a graph's values, and of the nodes in bodies."""
    bodies = [body for node in graph.nodes if node.attrs for body in node.bodies]
    inner = [{n.name for n in body.nodes} | _other_names(body) for body in bodies]
    return {value.name for value in graph.values()}.union(*inner)


def property_of(device: Device, name: str) -> Any:
    """Return a property of a device.

    Raises:
        ConfigError: there is none of that name, or its ``get_property`` raised such an error.
        DeviceError: its ``get_property`` raised another one, or gave a standard metric of another
            type.
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
        DeviceError: its ``set_property`` raised another error.
    """
    with _named(device, "set_property", dict(properties)):
        device.set_property(properties)


def capability_of(device: Device) -> dict[str, str]:
    """Return what an exported model depends on; a DeviceError names the device."""
    with _named(device, "capability", device.name):
        return device.capability()


def import_on(device: Device, source: Any, config: Config | None, told: str) -> CompiledModel:
    """Return the model that a device imports.

    Raises:
        BlobError: the file does not fit.
        DeviceError: its ``import_model`` raised another error, or gave something else.
    """
    with _named(device, "import_model", told):
        model: Any = device.import_model(source, config)
    return _checked_model(device, "import_model", model)


def compile_on(device: Device, graph: Graph, config: Config | None) -> CompiledModel:
    """Return the model that a device makes of a graph; see `query_on` for constants.

    Raises:
        DeviceError: its ``compile_model`` raised, or gave something else.
    """
    own = type(device).compile_model is not Device.compile_model and not device.is_virtual
    if own and any(node.op_type == "Constant" for node in graph.nodes):
        graph = getattr(query_on(device, graph, config), "lifted", None) or graph
    return _compiled(device, graph, config)


def _compiled(device: Device, graph: Graph, config: Config | None) -> CompiledModel:
    if type(device).compile_model is not Device.compile_model:
        graph = without_defaults(graph)  # a region's weights are weights, as a whole model's are
    with _named(device, "compile_model", graph):
        model: Any = device.compile_model(graph, config)
    return _checked_model(device, "compile_model", model)


def _checked_model(device: Device, method: str, model: Any) -> CompiledModel:
    if not isinstance(model, CompiledModel):
        raise DeviceError(
            f"device {device.name}: {method} gave {model!r}; it must return a CompiledModel"
        )
    return model
