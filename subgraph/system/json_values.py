"""Python values as JSON and back, without code: JSON of a file that is not trusted is safe to read.

JSON has no tuples, sets, bytes, complex numbers, NumPy arrays and scalars, and no keys but text.
`to_json` writes these as a table with the one key `_KIND`, and `from_json` makes them again.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np

_KIND = "subgraph.kind"
_NUMBERS = "biufc"  # the kinds of NumPy's dtypes of numbers
_LARGEST = 65536  # bytes of an array: each region's note in a file repeats the options


def with_tuples(value: Any) -> Any:
    """Return a value of `json.loads` with tuples in place of lists, also in nested lists."""
    return tuple(map(with_tuples, cast("list[Any]", value))) if isinstance(value, list) else value


def to_json(value: Any) -> Any:
    """Return a value as plain JSON, from which `from_json` makes an equal one.

    The type is the same too, except that of a child class of a builtin type.

    Raises:
        TypeError: the value, or one inside it, has a type that this form does not know, or is an
            array of other things than numbers, or of more than `_LARGEST` bytes.
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, (np.ndarray, np.generic)):
        return _tagged("array" if isinstance(value, np.ndarray) else "scalar", _content(value))
    if isinstance(value, float):
        return value
    if isinstance(value, bytes):
        return _tagged("bytes", _text(value))
    if isinstance(value, complex):
        return _tagged("complex", [value.real, value.imag])
    if isinstance(value, Mapping):
        held = cast("Mapping[Any, Any]", value)
        if _KIND not in held and all(isinstance(key, str) for key in held):
            return {key: to_json(item) for key, item in held.items()}
        return _tagged("dict", [[to_json(key), to_json(item)] for key, item in held.items()])
    if isinstance(value, list):
        return [to_json(item) for item in cast("list[Any]", value)]
    if isinstance(value, tuple):
        return _tagged("tuple", [to_json(item) for item in cast("tuple[Any, ...]", value)])
    if isinstance(value, (set, frozenset)):
        kind = "set" if isinstance(value, set) else "frozenset"
        items = [to_json(item) for item in cast("set[Any]", value)]
        return _tagged(kind, sorted(items, key=json.dumps))  # a set has no order of its own
    raise TypeError(f"{type(value).__name__} has no form in a file")


def from_json(value: Any) -> Any:
    """Return the value that `to_json` was given.

    Raises:
        ValueError: the JSON is not of `to_json`.
    """
    if isinstance(value, list):
        return [from_json(item) for item in cast("list[Any]", value)]
    if not isinstance(value, dict):
        return value
    held = cast("dict[str, Any]", value)
    if _KIND not in held:
        return {key: from_json(item) for key, item in held.items()}
    try:
        kind, content = held[_KIND]
        return _MAKERS[kind](content)
    except (TypeError, KeyError, ArithmeticError) as error:
        raise ValueError(f"{held[_KIND]!r} is no value") from error


def _tagged(kind: str, content: Any) -> dict[str, Any]:
    return {_KIND: [kind, content]}


def _content(value: Any) -> list[Any]:
    array: np.ndarray[Any, np.dtype[Any]] = np.asarray(value)
    if array.dtype.kind not in _NUMBERS or array.nbytes > _LARGEST:
        raise TypeError(f"{array.nbytes} bytes of {array.dtype} have no form in a file")
    return [array.dtype.str, list(array.shape), _text(array.tobytes())]


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _items(content: list[Any]) -> list[Any]:
    return [from_json(item) for item in content]


def _array(content: Any) -> Any:
    name, shape, data = content
    dtype = np.dtype(name)
    if dtype.kind not in _NUMBERS:
        raise ValueError(f"an array of dtype {name!r} is no value")
    return np.frombuffer(_bytes(data), dtype).reshape(shape).copy()


_MAKERS: dict[str, Callable[[Any], Any]] = {
    "array": _array,
    "bytes": _bytes,
    "complex": lambda content: complex(*content),
    "dict": lambda content: {from_json(key): from_json(item) for key, item in content},
    "frozenset": lambda content: frozenset(_items(content)),
    "scalar": lambda content: _array(content)[()],
    "set": lambda content: set(_items(content)),
    "tuple": lambda content: tuple(_items(content)),
}
