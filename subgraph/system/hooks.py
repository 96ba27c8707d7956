"""Hooks: calls from a lower folder to a higher one, which the lower folder must not import.

The lower module declares a hook with the types of the call. `subgraph.connections`, which every
import of the package runs, has the implementation of each hook.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar, cast

P = ParamSpec("P")
R = TypeVar("R")
# For each hook a function that imports and returns its implementation, called when first needed.
_loaders: dict[str, Callable[[], Callable[..., Any]]] = {}


def implements(name: str) -> Callable[[Callable[[], Callable[..., Any]]], None]:
    """Return a decorator for the function that imports and returns a hook's implementation."""
    return lambda load: _loaders.update({name: load})


class Hook(Generic[P, R]):
    """A function that a higher folder implements; the implementation loads at the first call."""

    def __init__(self, name: str) -> None:
        """Declare the hook ``name``."""
        self._name = name
        self._function: Callable[P, R] | None = None

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if self._function is None:
            self._function = cast("Callable[P, R]", _loaders[self._name]())
        return self._function(*args, **kwargs)
