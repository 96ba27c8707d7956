from collections.abc import Callable
from typing import Any, TypeVar, overload

from numba import types as types

__version__: str
_F = TypeVar("_F", bound=Callable[..., Any])

@overload
def njit(function: _F, /) -> _F: ...
@overload
def njit(**options: Any) -> Callable[[_F], _F]: ...
def literal_unroll(container: Any) -> Any: ...
def prange(*args: int) -> range: ...
