"""Typed options of devices: each key declared once, with type, default, range and text.

A device's options are one attrs class, a child of `DeviceOptions`, whose fields are made by
`option`. Values come, in order of precedence, from the compile call, from ``set_property``, from
the environment (``SUBGRAPH_<DEVICE>_<KEY>``), and from the default.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, TypeVar

import attrs

from subgraph.errors import ConfigError
from subgraph.graph.limits import NODES, parse_bytes
from subgraph.system.registry import nearest

_log = logging.getLogger("subgraph")

# Earlier OpenVINO names of options and metrics, with their present names.
OLD_NAMES = {
    "PERF_COUNT": "ENABLE_PROFILING",
    "CPU_THREADS_NUM": "INFERENCE_NUM_THREADS",
    "CPU_THROUGHPUT_STREAMS": "NUM_STREAMS",
    "THROUGHPUT_STREAMS": "NUM_STREAMS",
    "INFERENCE_PRECISION_HINT": "INFERENCE_PRECISION",
    "TARGET_FALLBACK": "DEVICE_PRIORITIES",
    "MULTI_DEVICE_PRIORITIES": "DEVICE_PRIORITIES",
    "IMPORT_EXPORT_SUPPORT": "EXPORT_IMPORT",
    "MODEL_NAME": "NETWORK_NAME",
}
_O = TypeVar("_O", bound="DeviceOptions")
_KINDS: dict[str, type] = {"int": int, "float": float, "bool": bool, "str": str}
_TRUE = ("1", "yes", "true", "on")
_FALSE = ("0", "no", "false", "off")


def option(
    default: Any,
    doc: str,
    *,
    values: Sequence[Any] | None = None,
    minimum: float | None = None,
    maximum: float | None = None,
    read_only: bool = False,
    check: Callable[[Any, str], Any] | None = None,
    saved: bool = True,
) -> Any:
    """Declare an option: a field of a `DeviceOptions` class, typed by its annotation.

    Args:
        default: Its default, of the type of the annotation: int, float, bool or str.
        doc: Its effect, in one line.
        values: The allowed values; None: all within the range.
        minimum: Least allowed number.
        maximum: Greatest allowed number.
        read_only: Whether users may only read it.
        check: Called with a value and a text that names the option; raises ConfigError for a value
            that is not allowed.
        saved: Whether exported models contain it; False for names of files and folders, and for
            options that only the importing process can decide.
    """
    facts: dict[str, Any] = {"doc": doc, "values": values, "minimum": minimum, "maximum": maximum}
    facts.update(check=check, saved=saved)
    return attrs.field(default=default, metadata={**facts, "read_only": read_only})


@attrs.frozen
class DeviceOptions:
    """Options that every device has."""

    ENABLE_PROFILING: bool = option(False, "measure each node of a run, for request.profile()")
    PERFORMANCE_HINT: str = option(
        "LATENCY", "what to optimize for", values=("LATENCY", "THROUGHPUT")
    )
    PERFORMANCE_HINT_NUM_REQUESTS: int = option(
        0, "number of requests that will run at a time; 0: the device's choice", minimum=0
    )
    EXCLUSIVE_ASYNC_REQUESTS: bool = option(
        False,
        "run asynchronous requests of all models of the device with this option one at a time",
    )
    INFERENCE_PRECISION: str = option(
        "",
        "float32: compute float16 and bfloat16 in float32; bfloat16: matrix products and "
        "convolutions of float32 may round their operands to bfloat16, with sums in float32, where "
        "that is faster (on CPU with AMX or AVX512_BF16); empty: in the model's dtypes",
        values=("", "float32", "bfloat16"),
    )
    CACHE_DIR: str = option(
        "", "folder of the cache of compiled models, keyed by content; empty: none", saved=False
    )
    DEVICE_ID: str = option("", "id of one of several devices: the part after the point in NAME.0")
    MEMORY_LIMIT: str = option(
        "",
        "bytes of the values of a run at any time, such as '8G'; empty: SUBGRAPH_MEMORY_LIMIT, "
        "else half of the machine's memory",
        check=parse_bytes,
        saved=False,
    )
    RUNTIME_FALLBACK: bool = option(
        True, "run a region on the next device that can if its own device fails"
    )
    FALLBACK_FAILURES: int = option(
        3, "failures of a region in a row after which the next device runs it", minimum=1
    )
    FALLBACK_RETRY: float = option(
        30.0,
        "seconds after which the device of a failed region is tried again; 0: never",
        minimum=0,
    )
    FALLBACK_CHECK: bool = option(
        False, "count results with NaN or Inf that the reference does not give as failures"
    )
    PARALLEL_REGIONS: bool = option(
        True, "run regions of different devices that do not depend on each other at the same time"
    )
    NODE_LIMIT: int = option(
        NODES, "nodes that expanding functions may add to a model", minimum=1, saved=False
    )
    COMPILE_TIMEOUT: float = option(
        3600.0,
        "most seconds of loading and compiling, and of preparing new shapes; 0: no limit",
        minimum=0,
        saved=False,
    )


def current_name(name: str, known: Container[str]) -> str:
    """Return the present name of an option or metric that has an old name.

    Args:
        name: Any name.
        known: The present names.

    Returns:
        The present name, or ``name`` itself if it is not an old name of a known one.
    """
    if name in known:
        return name
    today = OLD_NAMES.get(name, name)
    return today if today in known else name


def options_among(cls: type[DeviceOptions], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a configuration that are options of a class, by present names."""
    fields = attrs.fields_dict(cls)
    named = ((current_name(name, fields), value) for name, value in config.items())
    return {name: value for name, value in named if name in fields}


def option_names(cls: type[DeviceOptions]) -> list[str]:
    """Return the names of a class's options in the order of declaration."""
    return list(attrs.fields_dict(cls))


def unsaved_options() -> set[str]:
    """Return the names of the options, of all devices, that exported models do not contain."""
    found: set[str] = set()
    work: list[type[DeviceOptions]] = [DeviceOptions]
    while work:
        cls = work.pop()
        work.extend(cls.__subclasses__())
        found.update(
            name for name, f in attrs.fields_dict(cls).items() if not f.metadata.get("saved", True)
        )
    return found


def property_access(options: DeviceOptions | type[DeviceOptions]) -> dict[str, str]:
    """Return "RW" or "RO" for each option."""
    cls = options if isinstance(options, type) else type(options)
    return {
        k: "RO" if f.metadata.get("read_only") else "RW" for k, f in attrs.fields_dict(cls).items()
    }


def describe_options(cls: type[DeviceOptions]) -> dict[str, tuple[str, str]]:
    """Return for each option its allowed values, or else its type, and its effect, for tables."""
    return {
        name: (_allowed(field) or _kind(field).__name__, field.metadata.get("doc", ""))
        for name, field in attrs.fields_dict(cls).items()
    }


def _kind(field: attrs.Attribute[Any]) -> type:
    kind = field.type
    return _KINDS.get(kind, str) if isinstance(kind, str) else (kind or str)


def _allowed(field: attrs.Attribute[Any]) -> str:
    facts = field.metadata
    if facts.get("values"):
        return ", ".join(str(value) or "empty" for value in facts["values"])
    low, high = facts.get("minimum"), facts.get("maximum")
    if low is None and high is None:
        return ""
    return f"{'' if low is None else low}..{'' if high is None else high}"


def check_option(cls: type[DeviceOptions], device: str, name: str, value: Any) -> Any:
    """Return the value of an option, converted from text if necessary.

    Args:
        cls: The device's options class.
        device: The device's name, for errors.
        name: Present or old name of the option.
        value: The value, of the option's type or as text.

    Raises:
        ConfigError: The name is unknown (the nearest are listed), the option is read-only, or the
            value has the wrong type or is out of range.
    """
    fields = attrs.fields_dict(cls)
    field = fields.get(current_name(name, fields))
    if field is None:
        raise ConfigError(f"{device} has no option {name!r}; {nearest(name, fields)}")
    if field.metadata.get("read_only"):
        raise ConfigError(f"{device}: option {name!r} can only be read")
    converted = _converted(_kind(field), value)
    if converted is None or not _in_range(field, converted):
        allowed = _allowed(field)
        raise ConfigError(
            f"{device}: option {name!r} takes {_kind(field).__name__}"
            f"{f' ({allowed})' if allowed else ''}, got {value!r}"
        )
    check = field.metadata.get("check")
    if check is not None:
        check(converted, f"{device}: option {name!r}")
    return converted


def _converted(kind: type, value: Any) -> Any:
    """Return a value converted to a type; None if it cannot be."""
    if kind is bool:
        text = str(value).lower() if isinstance(value, (str, int)) else ""
        return True if text in _TRUE else False if text in _FALSE else None
    if kind is str:
        if isinstance(value, str):
            return value
        return str(value) if hasattr(value, "__fspath__") else None
    # In Python, bool is a subclass of int: True would pass for 1.
    if isinstance(value, bool):
        return None
    try:
        if kind is int:
            # `__index__` refuses floats, which `int` would truncate.
            return int(value) if isinstance(value, str) else value.__index__()
        return float(value)
    except (TypeError, ValueError, AttributeError):
        return None


def _in_range(field: attrs.Attribute[Any], value: Any) -> bool:
    facts = field.metadata
    values, low, high = facts.get("values"), facts.get("minimum"), facts.get("maximum")
    if values is not None and value not in values:
        return False
    return (low is None or value >= low) and (high is None or value <= high)


def resolve_options(
    cls: type[_O], device: str, levels: Iterable[Mapping[str, Any]], base: str = ""
) -> _O:
    """Return the options in force.

    Args:
        cls: The device's options class.
        device: The device's name, for errors.
        levels: Explicit values in order of precedence: of the compile call, of the device.
        base: The device's name in environment variables; empty: ``device``.

    Raises:
        ConfigError: A key or value is not allowed.
    """
    chosen = environment_options(cls, base or device)
    # Levels of higher precedence come last and overwrite the others.
    for level in reversed(list(levels)):
        for name, value in level.items():
            chosen[current_name(name, attrs.fields_dict(cls))] = check_option(
                cls, device, name, value
            )
    return cls(**chosen)


def environment_options(cls: type[DeviceOptions], device: str) -> dict[str, Any]:
    """Return the options that environment variables ``SUBGRAPH_<DEVICE>_<KEY>`` set."""
    found: dict[str, Any] = {}
    fields = attrs.fields_dict(cls)
    prefix = f"SUBGRAPH_{device.upper()}_"
    for variable, text in sorted(os.environ.items()):
        if not variable.startswith(prefix):
            continue
        name = current_name(variable.removeprefix(prefix), fields)
        if name not in fields:
            _warn_of_unknown(variable, device, nearest(name, fields))
        # The variable with the present name takes precedence over one with an old name.
        elif name == variable.removeprefix(prefix) or name not in found:
            found[name] = check_option(cls, f"environment variable {variable}", name, text)
    return found


@cache
def _warn_of_unknown(variable: str, device: str, hint: str) -> None:
    """Log, once, that an environment variable looks like an option but is not one."""
    _log.warning(
        "environment variable %s is ignored: %s has no such option; %s", variable, device, hint
    )
