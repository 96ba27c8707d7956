from collections.abc import Callable
from typing import Any, TypeVar

_F = TypeVar("_F", bound=Callable[..., Any])

def global_compiler_lock(function: _F) -> _F: ...
