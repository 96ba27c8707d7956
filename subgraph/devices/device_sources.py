"""Sources of devices: modules of Subgraph, entry points of other packages, classes of users.

A module of `PLUGINS` or `BACKENDS` defines one device; its name in capitals is the device's name.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, cast

from subgraph.devices.device import Device
from subgraph.errors import DeviceError
from subgraph.runtime.settings import DeviceOptions
from subgraph.system.forking import free_in_child
from subgraph.system.registry import nearest

PLUGINS = "subgraph.devices.plugins"  # package of the built-in devices
BACKENDS = "subgraph.devices.backends"  # package of the devices over other libraries
_ENTRY_POINTS = "subgraph.devices"  # group of the entry points of other packages
# Modules of the packages that define no device.
HELPER_MODULES = ("base", "libraries", "openvino_forms", "operand_checks", "property")
# Device names of other frameworks for hardware that OPENCL can use.
_OPENCL_NAMES = frozenset({"GPU", "CUDA", "ROCM", "HIP", "METAL", "VULKAN"})

# The process in which a device object is being started, by the object's id.
_starting: dict[int, int] = {}
_starting_lock = free_in_child(threading.Lock())


@cache
def device_modules(package: str) -> dict[str, str]:
    """Return the module of each device that a package defines, by the device's name."""
    found = pkgutil.iter_modules(importlib.import_module(package).__path__)
    names = sorted(info.name for info in found if info.name not in HELPER_MODULES)
    return {name.upper(): f"{package}.{name}" for name in names}


def device_of_module(module_name: str) -> Device:
    """Return an instance of the one device class that a module defines.

    Raises:
        DeviceError: The module defines none or several.
    """
    module = importlib.import_module(module_name)
    found = [
        item
        for item in vars(module).values()
        if isinstance(item, type)
        and issubclass(item, Device)
        # A base class that the module imports is not its own.
        and item.__module__ == module.__name__
    ]
    if len(found) != 1:
        raise DeviceError(f"{module.__name__} must define one Device, it defines {len(found)}")
    return found[0]()


def check_attributes(name: str, device: Device | type[Device]) -> None:
    """Check the attributes that a device sets for Core.

    Args:
        name: Name of the device, for the message.
        device: The device, or its class.

    Raises:
        DeviceError: ``options_class`` or ``fallback`` is of a wrong type.
    """
    owner = (device if isinstance(device, type) else type(device)).__name__
    options: Any = device.options_class
    if not isinstance(options, type) or not issubclass(options, DeviceOptions):
        raise DeviceError(
            f"device {name!r}: options_class of {owner} is {options!r}; set it to a child class of "
            "sg.DeviceOptions"
        )
    others: Any = device.fallback
    listed = isinstance(others, (tuple, list))
    if not listed or not all(isinstance(other, str) for other in cast("list[Any]", others)):
        raise DeviceError(
            f"device {name!r}: fallback of {owner} is {others!r}; set it to a tuple of names of "
            "devices, such as ('CPU',)"
        )


def installed_devices() -> Iterator[tuple[str, Callable[[], Device], str]]:
    """Yield the devices of other packages: name, function that makes the device, and owner.

    Reading the metadata of all installed packages takes some milliseconds.
    """
    from importlib.metadata import EntryPoint, entry_points

    def load(point: EntryPoint) -> Device:
        device: Any = point.load()
        if not (isinstance(device, type) and issubclass(device, Device)):
            raise DeviceError(
                f"entry point {point.value} gives {device!r}; it must name a class of sg.Device, "
                "of which each Core makes an object of its own"
            )
        return device()

    for point in sorted(entry_points(group=_ENTRY_POINTS), key=lambda p: p.name):
        yield point.name, partial(load, point), f"entry point {point.value}"


def unknown_device(name: str, known: Iterable[str]) -> DeviceError:
    """Return the error for a name without a registered device.

    Args:
        name: The name.
        known: The names of all devices, of which the message lists the nearest.
    """
    if name.partition(".")[0].upper() in _OPENCL_NAMES:
        hint = "graphics processors are reached by OPENCL: pip install 'subgraph-ml[opencl]'"
    elif "," in name:
        hint = f"a list of devices follows a device that uses several: 'HETERO:{name}'"
    else:
        hint = nearest(name, known)
    return DeviceError(f"no device named {name!r}; {hint}")


@contextmanager
def starting(device: Device) -> Generator[None]:
    """Start a device object in the ``with`` block, while no other thread starts the same object.

    Raises:
        DeviceError: Another Core, or another device of this one, starts it.
    """
    key = id(device)
    with _starting_lock:
        # A forked child inherits the entry of a start that goes on in its parent alone.
        if _starting.get(key) == os.getpid():
            raise DeviceError(
                f"this object is being started as the device {device.name!r} of a Core; register "
                "its class, or an object for each"
            )
        _starting[key] = os.getpid()
    try:
        yield
    finally:
        with _starting_lock:
            _starting.pop(key, None)
