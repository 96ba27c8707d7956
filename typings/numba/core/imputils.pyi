from collections.abc import Callable
from typing import Any, TypeVar

_F = TypeVar("_F", bound=Callable[..., Any])

def lower_builtin(function: Any, *argtypes: Any) -> Callable[[_F], _F]: ...
