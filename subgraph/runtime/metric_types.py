"""Types of the standard metrics of devices and compiled models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard, cast

from subgraph.errors import DeviceError


def _is_sequence(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_bool(value: object) -> bool:
    return isinstance(value, bool)


def _is_positive(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_count(value: object) -> bool:
    return _is_positive(value) or (isinstance(value, int) and value == 0)


def _are_texts(value: object) -> bool:
    return _is_sequence(value) and all(map(_is_text, value))


def _is_range(size: int) -> Callable[[object], bool]:
    """Return a check for (first, last) or (first, last, step), all positive whole numbers."""

    def accepts(value: object) -> bool:
        if not _is_sequence(value) or len(value) != size or not all(map(_is_positive, value)):
            return False
        return bool(value[0] <= value[1])

    return accepts


def _is_access(value: object) -> bool:
    """Return whether a value is {name: "RW" or "RO"}, or a list of names."""
    if not isinstance(value, Mapping):
        return _are_texts(value)
    table = cast("Mapping[Any, Any]", value)
    return all(map(_is_text, table)) and all(each in ("RW", "RO") for each in table.values())


_TEXTS = ("a list of str", _are_texts)
_TEXT = ("a str", _is_text)
_BOOL = ("a bool", _is_bool)
_COUNT = ("a whole number", _is_count)
_TYPES: dict[str, tuple[str, Callable[[object], bool]]] = {
    "AVAILABLE_DEVICES": _TEXTS,
    "CONCURRENT_REGIONS": _BOOL,
    "DEVICE_ARCHITECTURE": _TEXT,
    "DEVICE_TYPE": _TEXT,
    "EXECUTION_DEVICES": _TEXTS,
    "EXPORT_IMPORT": _BOOL,
    "FULL_DEVICE_NAME": _TEXT,
    "NETWORK_NAME": _TEXT,
    "NUMBER_OF_SUBGRAPHS": _COUNT,
    "OPTIMAL_NUMBER_OF_INFER_REQUESTS": ("a positive whole number", _is_positive),
    "OPTIMIZATION_CAPABILITIES": _TEXTS,
    "RANGE_FOR_ASYNC_INFER_REQUESTS": ("(first, last, step), positive numbers", _is_range(3)),
    "RANGE_FOR_STREAMS": ("(first, last), positive numbers", _is_range(2)),
    "SUPPORTED_CONFIG_KEYS": _TEXTS,
    "SUPPORTED_METRICS": _TEXTS,
    "SUPPORTED_PROPERTIES": ('a dict from names to "RW" or "RO", or a list of names', _is_access),
    "TRANSFERS": _COUNT,
    "TRANSFER_BYTES": _COUNT,
    "VERSION": _TEXT,
}


def checked_metric(owner: str, name: str, value: Any) -> Any:
    """Return the value of a metric or option, whose type is checked if it is a standard metric.

    Args:
        owner: The device or model, for the message.
        name: Name of the metric or option.
        value: The value.

    Raises:
        DeviceError: a standard metric has a value of another type.
    """
    wanted = _TYPES.get(name)
    if wanted is not None and not wanted[1](value):
        raise DeviceError(f"{owner}: metric {name!r} is {value!r}; it has to be {wanted[0]}")
    return value
