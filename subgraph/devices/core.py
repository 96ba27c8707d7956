"""`Core`: finds devices, compiles models for them and imports exported models."""

from __future__ import annotations

import io
import logging
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from os import PathLike
from typing import IO, Any

from subgraph._version import __version__
from subgraph.devices.calls import (
    CompilesWithFallback,
    compile_on,
    compile_queried,
    ids_of,
    import_on,
    known_properties,
    property_of,
    query_on,
    set_properties,
)
from subgraph.devices.device import Config, Device, package_version
from subgraph.devices.device_sources import (
    BACKENDS,
    PLUGINS,
    check_attributes,
    device_modules,
    device_of_module,
    installed_devices,
    starting,
    unknown_device,
)
from subgraph.devices.model_input import Model, prepared_graph, read_model, without_defaults
from subgraph.devices.query import QueryResult
from subgraph.errors import (
    BlobError,
    ConfigError,
    DeviceError,
    SubgraphError,
    cause_of,
    described,
    file_error,
    require_type,
)
from subgraph.graph.graph import Graph
from subgraph.graph.limits import limited, parse_bytes
from subgraph.graph.parameters import unstaged
from subgraph.operators.operator import (
    Operator,
    check_operator,
    find_operator,
    register_operator,
    unregister_operator,
)
from subgraph.runtime.compiled_model import CompiledModel
from subgraph.runtime.settings import check_option, current_name, option_names
from subgraph.system.environment import check_variables
from subgraph.system.forking import free_in_child
from subgraph.system.gc_control import paused_gc
from subgraph.system.registry import defined_at, nearest
from subgraph.system.trusted_files import open_regular

_log = logging.getLogger("subgraph")


class Core:
    """A registry of devices with their options, and the entry point for compiling models."""

    def __init__(self) -> None:
        """Register the built-in devices; those of other packages are registered when needed."""
        # Reentrant, because a virtual device asks this Core for others while it starts.
        self._lock = free_in_child(threading.RLock())
        self._searched_installed = False
        self._makers: dict[str, tuple[Callable[[], Device], str]] = {}
        self._devices: dict[str, Device] = {}
        self._failed: dict[str, str] = {}
        self._extensions: list[Operator] = []
        for name, module in device_modules(PLUGINS).items():
            self._makers[name] = (partial(device_of_module, module), module)

    def _find_installed(self) -> None:
        """Register the devices of other packages from their entry points, once.

        It takes milliseconds, so it is delayed until a list of all devices is needed, or a name is
        not found among the built-in ones.
        """
        with self._lock:
            if self._searched_installed:
                return
            for name, make, owner in installed_devices():
                self._claim(name, make, owner)
            self._searched_installed = True

    @property
    def registered_backends(self) -> list[str]:
        """Names of the devices over other libraries, whether these are installed or not.

        Such a device starts when it is named; `available_devices` does not list it.
        """
        return [name for name in device_modules(BACKENDS) if name not in self._makers]

    def _claim(self, name: str, make: Callable[[], Device], owner: str) -> None:
        """Register ``make`` for a name; raise DeviceError if another owner has the name."""
        known = self._makers.get(name)
        if known is not None and known[1] != owner:
            raise DeviceError(f"device {name!r} has two owners: {known[1]} and {owner}; rename one")
        self._makers[name] = (make, owner)

    def register_device(self, name: str, device: Device | type[Device]) -> None:
        """Register a device under ``name``.

        Args:
            name: Name of the device, without ".", ":", "," and spaces.
            device: The device, or its class, which is called without arguments at first use.

        Raises:
            DeviceError: the name is taken or not allowed, ``device`` is no Device, has an attribute
                of a wrong type, or is an object that another Core has started, or this one under
                another name.
        """
        untyped: Any = name
        if not isinstance(untyped, str) or not name or any(c in name for c in ".:, "):
            raise DeviceError(f"device name {name!r} is empty or has one of '.', ':', ',' or space")
        kind: Any = device if isinstance(device, type) else type(device)
        if not issubclass(kind, Device):
            raise DeviceError(f"device {name!r}: {device!r} is no sg.Device, nor a class of them")
        check_attributes(name, device)
        with self._lock:
            self._find_installed()
            if not isinstance(device, type) and self._has_started(name, device):
                return
            owner = defined_at(kind)
            self._claim(name, lambda: device() if isinstance(device, type) else device, owner)
            # A device that replaces another one starts at its first use, even if the other could
            # not start.
            self._devices.pop(name, None)
            self._failed.pop(name, None)

    def _has_started(self, name: str, device: Device) -> bool:
        """Return whether this Core has started a device, under this name.

        Raises:
            DeviceError: another Core has started it, or this one under another name. A device has
                the options, the name and the fallback devices of one Core.
        """
        core = device.core
        if not isinstance(core, Core) or core._devices.get(device.name) is not device:
            return False
        if core is self and device.name == name:
            return True
        where = "this Core" if core is self else "another Core"
        raise DeviceError(
            f"device {name!r}: this object is the device {device.name!r} of {where}; register its "
            "class, or an object for each"
        )

    def unregister_device(self, name: str) -> None:
        """Remove the device ``name``; nothing happens if no device has that name."""
        with self._lock:
            self._find_installed()
            self._makers.pop(name, None)
            for known in [k for k in self._devices if k.partition(".")[0] == name]:
                del self._devices[known]
            self._failed.pop(name, None)

    def add_extension(self, extension: Operator) -> None:
        """Register a custom operator: schema, shape rule, reference, and kernels of devices.

        The registration is atomic: if a started device refuses its kernel, nothing is registered;
        what another Core has registered before stays.
        A device that starts later and refuses its kernel runs without the kernel.

        Raises:
            UnsupportedOpError: another module has registered an operator of this name.
            DeviceError: a device named in ``kernels`` is unknown or takes no kernels.
            ConfigError: ``extension`` is no `Operator`, or a field of it has a wrong type.
        """
        require_type(extension, Operator, ConfigError, "an sg.Operator")
        check_operator(extension)
        with self._lock:
            self._find_installed()
            for name in extension.kernels:
                if name not in self._makers:
                    raise unknown_device(name, self._makers)
            known = find_operator(extension.key) is extension  # by any Core
            register_operator(extension)
            extended: list[Device] = []
            name = ""
            try:
                for name, kernel in extension.kernels.items():
                    device = self._devices.get(name)
                    if device is not None:  # other devices get theirs when they start
                        device.add_kernel(extension.key, kernel)
                        extended.append(device)
            except BaseException as error:  # an interrupt leaves nothing either
                if not known:
                    unregister_operator(extension)
                    for device in extended:
                        with suppress(Exception):  # of one device: the others have to forget it too
                            device.remove_kernel(extension.key)
                if isinstance(error, SubgraphError) or not isinstance(error, Exception):
                    raise
                raise DeviceError(
                    f"device {name} cannot take a kernel of {extension.key!r}: {described(error)}"
                ) from error
            if extension not in self._extensions:
                self._extensions.append(extension)

    @property
    def available_devices(self) -> list[str]:
        """Names of the devices that can start; "NAME.0", "NAME.1" if one has several ids."""
        names: list[str] = []
        for name in self.registered_devices:
            try:
                device = self.device(name)
            except DeviceError:
                continue
            if device.is_virtual:
                continue
            ids = ids_of(device)
            names += [f"{name}.{i}" for i in ids] if len(ids) > 1 else [name]
        return names

    def get_versions(self, device_name: str = "") -> dict[str, str]:
        """Return the versions of Subgraph and of devices by name, for reports of problems.

        Args:
            device_name: A device, or "HETERO:A,B" for A and B; empty: all that can start.

        Raises:
            DeviceError: no such device, or it cannot start.
        """
        require_type(device_name, str, DeviceError, "the name of a device")
        _, colon, rest = device_name.partition(":")
        if colon:
            names = [name.strip() for name in rest.split(",") if name.strip()]
        else:
            names = [device_name] if device_name else self.available_devices
        versions = {"subgraph": __version__}
        for name in names:
            device = self.device(name)
            try:
                versions[name] = str(property_of(device, "VERSION"))
            except ConfigError:  # its own get_property does not know VERSION
                versions[name] = package_version(type(device))
        return versions

    @property
    def registered_devices(self) -> list[str]:
        """Names of all devices, including those that cannot start, and HETERO and its like."""
        self._find_installed()
        return sorted(self._makers)

    @property
    def failed_devices(self) -> dict[str, str]:
        """The devices that could not start, with the reason."""
        return dict(self._failed)

    def device(self, name: str) -> Device:
        """Return the device of that name ("NAME" or "NAME.id"), started.

        Raises:
            DeviceError: there is none, or it cannot start; the message says why.
        """
        require_type(name, str, DeviceError, "the name of a device, such as 'CPU'")
        with self._lock:
            found = self._devices.get(name)
            if found is not None:
                return found
            base, dot, device_id = name.partition(".")
            found = _with_id(self.device(base), device_id) if dot else self._start(base)
            self._devices[name] = found
            return found

    def _start(self, name: str) -> Device:
        """Make and start a device; a failure is remembered and raised again by later calls."""
        # Looking for hardware may take seconds, so that a device which failed is not tried at every
        # call.
        if name in self._failed:
            raise DeviceError(self._failed[name])
        if name not in self._makers:
            self._find_installed()
        maker = self._makers.get(name)
        module = device_modules(BACKENDS).get(name, "")
        if maker is None and not module:
            raise unknown_device(name, [*self._makers, *device_modules(BACKENDS)])
        try:
            device = device_of_module(module) if maker is None else maker[0]()
            with starting(device):  # Cores have locks of their own
                self._has_started(name, device)  # raises if the object is a device elsewhere
                device.name = name
                device.core = self
                device.start()
                self._extend(device, name)
                self._devices[name] = device
        except Exception as error:
            message = f"device {name} cannot start: {cause_of(error)}"
            self._failed[name] = message
            # A missing optional package is normal: log it below the default level.
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, ImportError):
                cause = cause.__cause__
            optional = cause is not None
            _log.log(logging.INFO if optional else logging.WARNING, "%s", message)
            raise DeviceError(message) from error
        return device

    def _extend(self, device: Device, name: str) -> None:
        """Add the kernels of all registered extensions to a device that has just started."""
        for extension in self._extensions:
            kernel = extension.kernels.get(name)
            if kernel is None:
                continue
            try:
                device.add_kernel(extension.key, kernel)
            except Exception as error:
                _log.warning(
                    "device %s runs without the kernel of %r that an extension has for it: %s",
                    name,
                    extension.key,
                    error,
                )

    def split(self, device_name: str) -> tuple[Device, dict[str, Any]]:
        """Return the device of a device string and the options that the string sets.

        "HETERO:A,B" gives HETERO and {"DEVICE_PRIORITIES": "A,B"}.

        Raises:
            DeviceError: no such device; or a list of devices after one that takes none.
            ConfigError: an environment variable is not valid.
        """
        if not isinstance(device_name, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise DeviceError(f"a device is named by a string, such as 'CPU'; got {device_name!r}")
        check_variables()
        name, colon, rest = device_name.partition(":")
        device = self.device(name.strip())
        if not colon:
            return device, {}
        if not device.is_virtual:
            raise DeviceError(f"device {name!r} takes no list of devices, got {device_name!r}")
        return device, {"DEVICE_PRIORITIES": rest}

    def get_property(self, device_name: str, name: str) -> Any:
        """Return the value of an option or metric of a device.

        Raises:
            DeviceError: no such device.
            ConfigError: no such property; the nearest are listed.
        """
        return property_of(self.device(device_name), name)

    def set_property(self, device_name: str | Config, properties: Config | None = None) -> None:
        """Set options for later compile calls.

        Args:
            device_name: A device; or the options, which are then set for every available device
                that has them.
            properties: The options of ``device_name``.

        Raises:
            ConfigError: a key is unknown (to every device), and nothing is set; or a device does
                not allow a value.
        """
        if isinstance(device_name, str):
            if properties is None:
                raise ConfigError(f"set_property({device_name!r}) needs the properties to set")
            set_properties(self.device(device_name), _joined(properties, {}))
            return
        devices = [self.device(name) for name in self.available_devices]
        known = {device: known_properties(device) for device in devices}
        wanted: dict[Device, dict[str, Any]] = {device: {} for device in devices}
        for key, value in _joined(device_name, {}).items():
            # Each option goes to the devices that have it. An option that none has is a mistake of
            # spelling.
            takers = [d for d in devices if known[d].get(current_name(key, known[d])) == "RW"]
            if not takers:
                options = {k for row in known.values() for k, mode in row.items() if mode == "RW"}
                raise ConfigError(f"no device has a property {key!r}; {nearest(key, options)}")
            for taker in takers:
                wanted[taker][key] = value
        for device, chosen in wanted.items():
            if chosen:
                set_properties(device, chosen)

    def query_model(
        self,
        model: Model,
        device_name: str = "AUTO",
        config: Config | None = None,
        *,
        preprocess: Mapping[str, Any] | None = None,
    ) -> QueryResult:
        """Return which nodes of a model a device supports.

        The model is preprocessed and configured as by `compile_model` with the same arguments.

        Args:
            model: A graph, the path or bytes of an ONNX file, or an ``onnx.ModelProto``.
            device_name: A device, or "HETERO:A,B", "MULTI:A,B", "AUTO", "AUTO:A,B".
            config: The device's options.
            preprocess: `Preprocess` by input name, put into the graph before the query.

        Returns:
            Device names by node name; its ``reasons`` has a text for each node that is missing.

        Raises:
            DeviceError: no such device, or it cannot start.
            ConfigError: an option is unknown or its value not allowed.
        """
        device, extra = self.split(device_name)
        full = _joined(config, extra)
        with _context_of(device, full):
            read = read_model(model)
            graph = without_defaults(prepared_graph(read, _option_reader(device, full), preprocess))
            found = query_on(device, graph, full or None)
        reasons = dict(found.reasons)
        for node in graph.nodes:
            if node.name not in found:
                reasons.setdefault(node.name, f"{device.name} does not list it as supported")
        return QueryResult(found, reasons, refused=found.refused)

    def compile_model(
        self,
        model: Model,
        device_name: str = "AUTO",
        config: Config | None = None,
        *,
        preprocess: Mapping[str, Any] | None = None,
    ) -> CompiledModel:
        """Compile a model for a device.

        Args:
            model: A graph, the path or bytes of an ONNX file, or an ``onnx.ModelProto``.
            device_name: A device, or "HETERO:A,B", "MULTI:A,B", "AUTO", "AUTO:A,B".
            config: The device's options.
            preprocess: `Preprocess` by input name, put into the graph before compilation.

        Raises:
            DeviceError: no such device, or it cannot start.
            ConfigError: an option is unknown or its value not allowed.
            UnsupportedOpError: neither the device nor its fallback devices run an operator.
        """
        with paused_gc():
            device, extra = self.split(device_name)
            full = _joined(config, extra)
            # The limits of the options hold for reading and preparing the model too.
            with _context_of(device, full):
                graph = read_model(model)
                return self._compile_within(graph, device, device_name, full, preprocess)

    def _compile_within(
        self,
        graph: Graph,
        device: Device,
        device_name: str,
        full: Config,
        preprocess: Mapping[str, Any] | None,
    ) -> CompiledModel:
        """Compile a graph under the limits in force; ``full`` has the device string's options."""
        option = _option_reader(device, full)
        graph = prepared_graph(graph, option, preprocess)
        folder = str(option("CACHE_DIR") or "")
        weights = without_defaults(graph)
        if folder and device.caches:
            from subgraph.devices.model_cache import compile_cached

            model = compile_cached(folder, device, device_name, weights, full, self._compile)
        else:
            model = self._compile(device, weights, full)
        # The compiled model has these inputs as weights; the caller may still pass them.
        if weights is not graph:
            model.offer_defaults(graph.inputs)
        return model

    def _compile(self, device: Device, graph: Graph, config: Config) -> CompiledModel:
        """Compile for a device; HETERO gives the nodes that it lacks to its fallback devices."""
        if not device.fallback:
            return compile_on(device, graph, config or None)
        supported = query_on(device, graph, config or None)
        if all(node.name in supported for node in graph.nodes):
            return compile_queried(device, graph, config or None, supported)
        hetero = self.device("HETERO")
        assert isinstance(hetero, CompilesWithFallback), "the built-in HETERO has the name"
        priorities = [device, *(self.device(name) for name in device.fallback)]
        return hetero.compile_with_fallback(graph, priorities, config, supported)

    def import_model(
        self,
        source: str | PathLike[str] | bytes | IO[bytes],
        device_name: str = "",
        config: Config | None = None,
    ) -> CompiledModel:
        """Return the model that ``CompiledModel.export_model`` wrote.

        Args:
            source: Path, whose weights are mapped; bytes; or a binary stream, which is read to the
                end of the model.
            device_name: The device to run the model; empty: the one that it was compiled for.
            config: The device's options; ``{"ALLOW_RECOMPILE": False}`` refuses a file that was
                compiled for another version or other hardware, instead of compiling it anew.

        Raises:
            BlobError: the file is damaged or does not fit.
            FileError: it cannot be read; also a `BlobError` and an ``OSError``.
        """
        from subgraph.devices.export import exported_device

        require_type(device_name, str, DeviceError, "the name of a device")
        if isinstance(source, (bytes, bytearray, memoryview)):
            stream = io.BytesIO(source)
            model = self.import_model(stream, device_name, config)
            if left := len(stream.read()):
                raise BlobError(
                    f"the bytes go on for {left} after the model; give a stream to read one of "
                    "several"
                )
            return model
        device, extra = self.split(device_name or exported_device(source))
        full = _joined(config, extra)
        # A device with an import of its own may read streams only; that of the base class maps the
        # weights of a path.
        own = type(device).import_model is not Device.import_model
        with _context_of(device, full):
            if own and isinstance(source, (str, PathLike)):
                with _opened(source) as file:
                    return import_on(device, file, full or None, str(source))
            shown = source if isinstance(source, (str, PathLike)) else "a stream"
            return import_on(device, source, full or None, str(shown))


def _with_id(device: Device, device_id: str) -> Device:
    """Return the device of an id.

    Raises:
        DeviceError: there is no such id.
    """
    ids = ids_of(device)
    if not device_id or device_id not in ids:
        shown = ", ".join(repr(i) for i in ids if i) or "none: leave the id out"
        raise DeviceError(f"device {device.name} has no id {device_id!r}; ids: {shown}")
    return device.with_id(device_id)


def _option_reader(device: Device, config: Config) -> Callable[[str], Any]:
    """Return a function that reads the options that Core itself applies, such as CACHE_DIR.

    It returns the value of an option by name: from ``config``, else from the device; None if the
    device has no such option.
    """
    known = known_properties(device)
    configured = {current_name(name, known): value for name, value in config.items()}

    def value_of(name: str) -> Any:
        if name not in known:
            return None
        if name not in configured:
            return property_of(device, name)
        # The device checks its options later, and Core uses these before.
        cls, value = device.options_class, configured[name]
        return check_option(cls, device.name, name, value) if name in option_names(cls) else value

    return value_of


@contextmanager
def _context_of(device: Device, config: Config) -> Generator[None]:
    """Run a block within the limits of a device's options, on parameters that are published."""
    option = _option_reader(device, config)
    limits = limited(
        parse_bytes(str(option("MEMORY_LIMIT") or ""), "MEMORY_LIMIT"),
        int(option("NODE_LIMIT") or 0),
        float(option("COMPILE_TIMEOUT") or 0),
    )
    with limits, unstaged():
        yield


def _joined(config: Config | None, extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return a checked configuration, with the options of a device string over it."""
    if config is not None and not isinstance(config, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"the config is {config!r}; give a dict, such as {{'NUM_STREAMS': 2}}")
    for key in config or ():
        if not isinstance(key, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"an option is named by a string, such as 'NUM_STREAMS'; got {key!r}")
    return {**(config or {}), **extra}


def _opened(path: str | PathLike[str]) -> IO[bytes]:
    try:
        return open_regular(path)
    except OSError as error:
        raise file_error("read", path, error) from error
