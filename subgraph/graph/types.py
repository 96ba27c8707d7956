"""Types of values: dtype names, tensor, sequence, optional, map; immutable, compared by content.

A dtype is a string (`subgraph.dtypes`). `numpy_dtype` gives the array type that holds it. The text
of a type is that of the text form, which `subgraph.text_form.parser` reads back.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from functools import cache
from operator import index
from typing import Any, TypeGuard

import attrs
import numpy as np

from subgraph.dtypes import DTYPE_OF_ONNX as DTYPE_OF_ONNX
from subgraph.dtypes import ONNX_DTYPE as ONNX_DTYPE
from subgraph.errors import ShapeError
from subgraph.graph.symbolic import SymInt, is_symbolic

Array = np.ndarray[Any, Any]
Dim = int | str | None
Shape = tuple[Dim, ...]

_PLAIN = frozenset({int})
# Types of the dimensions of a converted shape that are numbers.
_NUMBERS = frozenset({int, SymInt})
_ALIASES = {"float": "float32", "double": "float64", "half": "float16", "str": "string"}


@cache
def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the NumPy dtype that holds values of dtype ``name`` (``string`` is object).

    Raises:
        ShapeError: ``name`` is not a dtype of ONNX.
    """
    name = canonical_dtype(name)
    if name == "string":
        return np.dtype(object)
    try:
        return np.dtype(name)
    except TypeError:
        # NumPy has no such dtype, for example bfloat16. The package is imported only for these: it
        # would take time in every process.
        import ml_dtypes

        held: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
        return held


@cache
def _dtype_name(dtype: np.dtype[Any]) -> str:
    if dtype.kind in "OUST":
        return "string"
    name = dtype.name
    if name not in ONNX_DTYPE:
        raise ShapeError(f"dtype {name!r} is not one of ONNX's; use one of {', '.join(ONNX_DTYPE)}")
    return name


def canonical_dtype(dtype: Any) -> str:
    """Return the name of a dtype given as name, alias ("float"), NumPy dtype or scalar type.

    Raises:
        ShapeError: ONNX has no such dtype.
    """
    if isinstance(dtype, str):
        if dtype in ONNX_DTYPE:
            return dtype
        if dtype in _ALIASES:
            return _ALIASES[dtype]
    try:
        found = np.dtype(dtype)
    except (TypeError, ValueError, SyntaxError):  # NumPy parses a str as a list of fields
        raise ShapeError(f"{dtype!r} is not a dtype; use one of {', '.join(ONNX_DTYPE)}") from None
    return _dtype_name(found)


def dtype_of(array: Array) -> str:
    """Return the dtype name of an array."""
    return _dtype_name(array.dtype)


# Most dimensions of a type. NumPy's arrays have at most 64.
MAX_RANK = 1024


def _is_plain(dims: object) -> TypeGuard[tuple[int, ...]]:
    items: Any = dims
    if items.__class__ is not tuple or len(items) > MAX_RANK:
        return False
    return _PLAIN.issuperset(map(type, items)) and min(items, default=0) >= 0


def _shape(dims: Iterable[int | str | None] | None) -> Shape | None:
    if dims is None:
        return None
    if _is_plain(dims):
        return dims  # the common case
    if isinstance(dims, str) or not hasattr(dims, "__iter__"):
        raise ShapeError(f"shape {dims!r} is not a list of dimensions; for one write ({dims!r},)")
    if isinstance(dims, (list, tuple)) and len(dims) > MAX_RANK:
        raise ShapeError(f"a shape of {len(dims)} dimensions; the most are {MAX_RANK}")
    out: list[Dim] = []
    for dim in dims:
        if type(dim) is int and dim >= 0:
            out.append(dim)
        elif dim is None or isinstance(dim, str):
            # ONNX states an unknown dimension by an empty name, too.
            out.append(dim or None)
        elif is_symbolic(dim) and dim >= 0:
            out.append(dim)
        elif not isinstance(dim, bool) and hasattr(dim, "__index__") and index(dim) >= 0:
            out.append(index(dim))
        else:
            raise ShapeError(
                f"dimension {dim!r} of shape {dims!r} is not a whole number >= 0, a name or None"
            )
    return tuple(out)


# A name that the text form reads as one: the words inf and nan are numbers there.
_BARE_DIM = re.compile(r"(?!(?:inf|nan)\Z)[A-Za-z_][A-Za-z0-9_]*")


def _dim_text(dim: Dim) -> str:
    if dim is None:
        return "?"
    bare = not isinstance(dim, str) or _BARE_DIM.fullmatch(dim)
    return str(dim) if bare else json.dumps(dim, ensure_ascii=False)


def _is_static(type_: TensorType) -> bool:
    return type_.shape is not None and _NUMBERS.issuperset(map(type, type_.shape))


@attrs.frozen(slots=True)
class TensorType:
    """Type of a tensor: a dtype, and a shape of ints, names (symbolic) or None (unknown).

    ``shape`` None means that even the rank is unknown.

    Attributes:
        dtype: Name of the element type.
        shape: The dimensions.
        is_static: Whether every dimension is a number.
    """

    dtype: str = attrs.field(converter=canonical_dtype)
    shape: Shape | None = attrs.field(converter=_shape, default=None)
    is_static: bool = attrs.field(
        default=attrs.Factory(_is_static, takes_self=True), init=False, eq=False, repr=False
    )

    @property
    def rank(self) -> int | None:
        """Number of dimensions, None if unknown."""
        return None if self.shape is None else len(self.shape)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The dimensions that are numbers: all, if ``is_static``."""
        return tuple(dim for dim in self.shape or () if isinstance(dim, int))

    def __str__(self) -> str:
        if self.shape is None:
            return f"{self.dtype}[*]"
        return f"{self.dtype}[{', '.join(map(_dim_text, self.shape))}]"


@attrs.frozen(slots=True)
class SparseTensorType:
    """Type of a sparse tensor; its fields are those of `TensorType`."""

    dtype: str = attrs.field(converter=canonical_dtype)
    shape: Shape | None = attrs.field(converter=_shape, default=None)

    def __str__(self) -> str:
        return f"sparse({TensorType(self.dtype, self.shape)})"


@attrs.frozen(slots=True)
class SequenceType:
    """Type of a sequence; ``element`` None means unknown."""

    element: ValueType | None

    def __str__(self) -> str:
        return f"seq({self.element or '?'})"


@attrs.frozen(slots=True)
class OptionalType:
    """Type of an optional value; ``element`` None means unknown."""

    element: ValueType | None

    def __str__(self) -> str:
        return f"optional({self.element or '?'})"


@attrs.frozen(slots=True)
class MapType:
    """Type of a map from ``key`` (a dtype) to ``value``."""

    key: str = attrs.field(converter=canonical_dtype)
    value: ValueType | None = None

    def __str__(self) -> str:
        return f"map({self.key}, {self.value or '?'})"


ValueType = TensorType | SparseTensorType | SequenceType | OptionalType | MapType


def with_sizes(type_: ValueType | None, sizes: Mapping[str, Dim]) -> ValueType | None:
    """Return a type with ``sizes`` for the names of its dimensions, where they are known."""
    if not isinstance(type_, TensorType) or type_.shape is None:
        return type_
    dims = (sizes.get(dim, dim) if isinstance(dim, str) else dim for dim in type_.shape)
    return TensorType(type_.dtype, tuple(dims))
