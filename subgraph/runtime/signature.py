"""The ports of a compiled model, the check of its inputs, and the results of a call.

A set of shapes and dtypes is checked once; later calls with the same set need only a look-up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import attrs
import numpy as np

from subgraph.dtypes import DTYPES
from subgraph.errors import MissingInputError, OutputIndexError, ShapeError
from subgraph.graph.graph import Value
from subgraph.graph.parameters import Parameter
from subgraph.graph.types import (
    Array,
    OptionalType,
    SequenceType,
    Shape,
    TensorType,
    ValueType,
    canonical_dtype,
    dtype_of,
    numpy_dtype,
)
from subgraph.system.registry import nearest

_MAX_ACCEPTED = 64  # sets of shapes and dtypes that are remembered as accepted (estimate)


@attrs.frozen
class Port:
    """An input or output of a model.

    Attributes:
        name: Its name.
        type: Its type; None if unknown.
        default: The Parameter whose array an omitted input has; None for a required input.
    """

    name: str
    type: ValueType | None
    default: Parameter | None = None

    @property
    def shape(self) -> Shape | None:
        """Sizes, names of sizes, or None for unknown ones; None if the rank is unknown."""
        return self.type.shape if isinstance(self.type, TensorType) else None

    @property
    def dtype(self) -> str | None:
        """The elements' dtype, such as ``"float32"``; None if unknown, and for sequences."""
        return self.type.dtype if isinstance(self.type, TensorType) else None

    def __str__(self) -> str:
        return f"{self.name}: {self.type or '?'}{'' if self.default is None else ' (optional)'}"


def port_position(ports: Sequence[Port], key: str | int, kind: str) -> int:
    """Return the position of a port.

    Args:
        ports: The model's inputs or outputs.
        key: Name or position of one.
        kind: "input" or "output", for the message.

    Raises:
        MissingInputError: there is no such port.
    """
    names = [port.name for port in ports]
    if isinstance(key, int) and 0 <= key < len(names):
        return key
    if not isinstance(key, str) or key not in names:
        raise MissingInputError(f"the model has no {kind} {key!r}; {nearest(str(key), names)}")
    return names.index(key)


class Results(Mapping[str, Any]):
    """The results of a run: a mapping by output name that also accepts positions.

    A value that a graph lists several times among its outputs has one name and several positions.
    """

    __slots__ = ("_positions", "_values")

    def __init__(self, positions: Mapping[str, int], values: Sequence[Any]) -> None:
        """Wrap the results of a run.

        Args:
            positions: Position of each output by name.
            values: The results in the order of the outputs.
        """
        self._positions = positions
        self._values = values

    def __getitem__(self, key: str | int | Port | Value) -> Any:
        if isinstance(key, int):
            try:
                return self._values[key]
            except IndexError:
                raise OutputIndexError(
                    f"there is no output {key}; the model has {len(self._values)}, counted from 0"
                ) from None
        name: Any = key if isinstance(key, str) else getattr(key, "name", key)
        position = self._positions.get(name) if isinstance(name, str) else None
        if position is None:
            raise MissingInputError(
                f"the model has no output {name!r}; {nearest(str(name), self._positions)}"
            )
        return self._values[position]

    def __iter__(self) -> Iterator[str]:
        return iter(self._positions)

    def __len__(self) -> int:
        return len(self._positions)

    def __contains__(self, key: object) -> bool:
        return key in self._positions or (isinstance(key, int) and 0 <= key < len(self._values))

    def to_tuple(self) -> tuple[Any, ...]:
        """Return the outputs in order."""
        return tuple(self._values)

    def to_dict(self) -> dict[str, Any]:
        """Return the outputs by name."""
        return {name: self._values[position] for name, position in self._positions.items()}

    def __repr__(self) -> str:
        return f"Results({self.to_dict()!r})"


class Signature:
    """The ports of a model, and the check of the inputs of a call.

    Attributes:
        name: The model's name, for errors.
        inputs: Ports of the inputs.
        outputs: Ports of the outputs.
        output_positions: Position of each output by name.
        has_defaults: Whether some input has a default.
    """

    def __init__(self, inputs: Sequence[Port], outputs: Sequence[Port], name: str) -> None:
        """Check the inputs of a model with these ports.

        Args:
            inputs: Ports of the inputs.
            outputs: Ports of the outputs.
            name: The model's name, for errors.
        """
        self.name = name
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)
        self.output_positions = {port.name: k for k, port in enumerate(self.outputs)}
        self.has_defaults = any(port.default is not None for port in self.inputs)
        self._positions = {port.name: k for k, port in enumerate(self.inputs)}
        self._dtypes = [
            numpy_dtype(p.type.dtype) if isinstance(p.type, TensorType) else None
            for p in self.inputs
        ]
        self._shapes = [port.shape for port in self.inputs]
        self._texts = [k for k, dtype in enumerate(self._dtypes) if dtype and dtype.kind == "O"]
        self._accepted: set[tuple[Any, ...]] = set()
        self._latest: list[tuple[int, tuple[int, ...], np.dtype[Any]]] = []  # accepted last

    def bind(self, args: Sequence[Any], named: Mapping[str, Any]) -> list[Any]:
        """Return the arguments of a call, checked, in the order of the inputs.

        Args:
            args: One item for each input, or one sequence or mapping of all of them.
            named: Items by the name of their input.

        Returns:
            One item for each input; None where the input has a default.

        Raises:
            MissingInputError: An input is missing, or a name is not that of an input.
            ShapeError: The dtype or shape of an input is wrong; the message says what is expected.
        """
        items = self._ordered(args, named)
        latest = self._latest  # read once, because other threads replace it
        for position, shape, dtype in latest:
            # Dtypes are compared by identity, because hashing them is slow.
            item = items[position]
            if type(item) is not np.ndarray or item.dtype is not dtype or item.shape != shape:
                break
        else:
            if latest and not (self._texts and self._holds_bytes(items)):
                return items
        key: list[Any] = []
        for item in items:
            if type(item) is not np.ndarray:
                return self._convert(items)
            key.append(item.shape)
            key.append(item.dtype)
        if tuple(key) not in self._accepted or self._holds_bytes(items):
            return self._convert(items)
        self._latest = [(k, item.shape, item.dtype) for k, item in enumerate(items)]
        return items

    def _holds_bytes(self, items: Sequence[Any]) -> bool:
        """Return whether an item, of those for inputs of strings, is an object array of bytes."""
        return any(_is_of_bytes(items[k]) for k in self._texts)

    def _ordered(self, args: Sequence[Any], named: Mapping[str, Any]) -> list[Any]:
        if len(args) == 1 and not named:
            only: Any = args[0]
            kind: Any = only.__class__
            # The exact type is tested first, which is faster than `isinstance`; the tests below
            # accept subclasses, too.
            if kind is np.ndarray and len(self.inputs) == 1:
                return [only]
            if kind is dict and len(only) == len(self._positions):
                try:
                    return list(map(only.__getitem__, self._positions))
                except KeyError:
                    return self._by_name((), only)
            if _is(only, list, tuple):
                args = only
            elif _is(only, Mapping):
                args, named = (), only
        if not named and len(args) == len(self.inputs):
            return list(args)
        return self._by_name(args, named)

    def _by_name(self, args: Sequence[Any], named: Mapping[Any, Any]) -> list[Any]:
        if len(args) > len(self.inputs):
            number = f"{len(self.inputs)} input{'s' * (len(self.inputs) != 1)}"
            raise MissingInputError(
                f"model {self.name!r} takes {number}, got {len(args)}; it takes {self._shown()}. A "
                "list gives one item per input: wrap one array as [array]"
            )
        items: list[Any] = list(args) + [None] * (len(self.inputs) - len(args))
        for key, item in named.items():
            position = self._position(key)
            if position < len(args):
                raise MissingInputError(f"input {self.inputs[position].name!r} was given twice")
            items[position] = item
        return items

    def _position(self, key: Any) -> int:
        if isinstance(key, int) and 0 <= key < len(self.inputs):
            return key
        name: Any = key if isinstance(key, (str, int)) else getattr(key, "name", key)
        position = self._positions.get(name)
        if position is None:
            raise MissingInputError(
                f"model {self.name!r} has no input {name!r}; "
                f"{nearest(str(name), self._positions)}; it takes {self._shown()}"
            )
        return position

    def _shown(self) -> str:
        return ", ".join(map(str, self.inputs)) or "no inputs"

    def _convert(self, items: Sequence[Any]) -> list[Any]:
        missing = [
            port.name
            for port, item in zip(self.inputs, items, strict=True)
            if item is None and port.default is None and not isinstance(port.type, OptionalType)
        ]
        if missing:
            raise MissingInputError(
                f"model {self.name!r} was not given input {', '.join(map(repr, missing))}; it "
                f"takes {self._shown()}"
            )
        arrays = [
            None if item is None else _converted(port, dtype, item)
            for port, dtype, item in zip(self.inputs, self._dtypes, items, strict=True)
        ]
        self._check_shapes(arrays)
        known = [a for a in arrays if type(a) is np.ndarray]
        if len(known) == len(arrays):
            if len(self._accepted) >= _MAX_ACCEPTED:
                # A model with ever new shapes would otherwise let the set grow without end; the
                # check of a set that was dropped is merely repeated.
                self._accepted.clear()
            self._accepted.add(tuple(part for a in known for part in (a.shape, a.dtype)))
            self._latest = [(k, a.shape, a.dtype) for k, a in enumerate(known)]
        return arrays

    def _check_shapes(self, arrays: Sequence[Any]) -> None:
        sizes: dict[str, tuple[int, Port]] = {}
        for port, expected, array in zip(self.inputs, self._shapes, arrays, strict=True):
            if array is None or expected is None:
                continue
            shape = array.shape
            if len(expected) != len(shape):
                raise ShapeError(
                    f"input {port.name!r} is {port.type}, got {_shape_shown(array)}; give an array "
                    f"of {len(expected)} dimensions"
                )
            for axis, dim in enumerate(expected):
                if dim is None:
                    continue
                size = shape[axis]
                if isinstance(dim, int):
                    if dim != size:
                        raise ShapeError(
                            f"input {port.name!r} is {port.type}, got {_shape_shown(array)}; "
                            f"dimension {axis} must be {dim}"
                        )
                    continue
                # In ONNX, dimensions of one name have the same size in all inputs.
                known, where = sizes.setdefault(dim, (size, port))
                if known != size:
                    raise ShapeError(
                        f"dimension {dim!r} is {known} in input {where.name!r} and {size} in input "
                        f"{port.name!r} ({port.type}, got {_shape_shown(array)})"
                    )


def _shape_shown(array: Array) -> str:
    return f"{dtype_of(array)}[{', '.join(map(str, array.shape))}]"


def _converted(port: Port, dtype: np.dtype[Any] | None, item: Any) -> Any:
    """Return the value of an input in the form in which it runs.

    Args:
        port: The input.
        dtype: Its dtype; None if it is not a tensor.
        item: The value.

    Raises:
        ShapeError: The value is not of the input's type.
    """
    if dtype is None:
        return _of_other_type(port, item)
    array = as_array(item, dtype, port)
    if array.dtype == dtype and not _is_of_bytes(array):
        return array
    # Kernels read numbers in the byte order of the machine.
    if array.dtype != object and array.dtype.newbyteorder("=") == dtype:
        return array.astype(dtype)  # from the other byte order
    if dtype.kind == "O" and array.dtype.kind in "OUST":
        try:
            return _text(array)
        except UnicodeDecodeError as error:
            raise ShapeError(f"input {port.name!r} is {port.type}, got bytes: {error}") from error
    raise ShapeError(
        f"input {port.name!r} is {port.type}, got {_shape_shown(array)}; convert it, for "
        f"example with array.astype({dtype.name!r})"
    )


def _text(array: Array) -> Array:
    """Return an array of text with str objects; bytes are UTF-8, as in ONNX files."""
    if array.dtype == object:
        parts = [part.decode() if isinstance(part, bytes) else part for part in array.ravel()]
        return np.array(parts, object).reshape(array.shape)
    text = np.char.decode(array, "utf-8") if array.dtype.kind == "S" else array
    return text.astype(object)


def _is_of_bytes(array: Array) -> bool:
    """Return whether an array is an object array of bytes, by its first element alone."""
    return array.dtype == object and array.size > 0 and isinstance(array.flat[0], bytes)


def _of_other_type(port: Port, item: Any) -> Any:
    """Check and convert the value of an input that is not a tensor.

    Args:
        port: The input. A sequence is passed as a list, an optional as its element or None.
        item: The value.

    Raises:
        ShapeError: The value is not of the input's type.
    """
    if isinstance(port.type, SequenceType):
        if not isinstance(item, (list, tuple)):
            raise ShapeError(
                f"input {port.name!r} is {port.type}, got {type(item).__name__}; give a list"
            )
        inner = Port(port.name, port.type.element)
        return [_of_other_type(inner, part) for part in cast("Sequence[Any]", item)]
    if isinstance(port.type, OptionalType):
        return None if item is None else _of_other_type(Port(port.name, port.type.element), item)
    if isinstance(port.type, TensorType):  # an item of a sequence, or the element of an optional
        return _converted(port, numpy_dtype(port.type.dtype), item)
    value: Any = item
    # Types other than tensors, sequences and optionals, such as maps, and dicts for inputs of
    # unknown type are passed as they are.
    if port.type is not None or isinstance(item, dict):
        return value
    if isinstance(item, (list, tuple)) and any(isinstance(part, np.ndarray) for part in value):
        return list(value)
    try:
        return np.asarray(value)
    except ValueError as error:
        raise ShapeError(f"input {port.name!r}: no array can be made of it: {error}") from error


def as_array(item: Any, dtype: np.dtype[Any], port: Port) -> Array:
    """Return a value as an array, without a copy if its memory can be shared.

    Args:
        item: A NumPy array, a DLPack tensor or a buffer, whose dtype is not changed, or Python
            numbers.
        dtype: The dtype to which Python numbers are converted if only precision is lost.
        port: The input, for errors.

    Raises:
        ShapeError: The value is none of these, or a Python number does not fit ``dtype``.
    """
    if _is(item, np.ndarray):
        return np.asarray(item)
    try:
        python = _is(item, bool, int, float, complex, str, list, tuple)
        if python and not _is(item, np.generic):
            return _from_python(item, dtype)
        if hasattr(item, "__dlpack__"):
            return np.from_dlpack(item)
        if hasattr(item, "__array_interface__") or hasattr(item, "__array__"):
            return np.asarray(item)
        return np.asarray(memoryview(item))
    except (TypeError, ValueError, OverflowError, RuntimeError, BufferError) as error:
        raise ShapeError(
            f"input {port.name!r} is {port.type}, got a {type(item).__name__} that cannot be read "
            f"as that: {error}"
        ) from error


def _is(item: Any, *types: type) -> bool:
    """Return whether a value is of one of these types, without narrowing its static type."""
    return isinstance(item, types)


def _from_python(item: Any, dtype: np.dtype[Any]) -> Array:
    array = np.asarray(item)
    # The kind of the dtype's element type, since that of NumPy's dtype is V for bfloat16 and int4.
    kind = DTYPES[canonical_dtype(dtype)].kind
    kinds = {"i": ("int", "uint", "float", "complex"), "f": ("float", "complex")}
    kinds |= {"u": kinds["i"], "b": ("bool", *kinds["i"]), "c": ("complex",)}
    kinds |= {"U": ("string",), "S": ("string",)}
    if array.dtype != object and kind not in kinds.get(array.dtype.kind, ()):
        # An empty list has NumPy's default dtype, float64, which says nothing about its elements.
        if array.size == 0:
            return array.astype(dtype)
        raise TypeError(f"values of kind {array.dtype.name} would change as {dtype.name}")
    converted = _text(array) if array.dtype.kind == "S" else array.astype(dtype)
    if kind in ("int", "uint"):
        # `astype` wraps integers that do not fit without an error.
        wide = converted.astype(np.int8) if DTYPES[canonical_dtype(dtype)].bits < 8 else converted
        if not np.array_equal(wide, array):
            raise OverflowError(f"a value does not fit {dtype.name}")
    return converted
