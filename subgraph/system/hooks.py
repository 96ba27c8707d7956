"""Hooks: calls from a folder to one above it, which may not import that folder.

The lower module declares a hook with the types of the call. `subgraph.connections`, which every
import of the package runs, lists for each hook the function that answers it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar, cast

P = ParamSpec("P")
R = TypeVar("R")
# For each hook a function that imports and returns what answers it, so that nothing loads early.
_loaders: dict[str, Callable[[], Callable[..., Any]]] = {}


def answers(name: str) -> Callable[[Callable[[], Callable[..., Any]]], None]:
    """Decorate the function that imports and returns what answers the hook ``name``."""
    return lambda load: _loaders.update({name: load})


class Hook(Generic[P, R]):
    """A function whose code stands in a folder above; loaded at the first call."""

    def __init__(self, name: str) -> None:
        """Declare the hook ``name``."""
        self._name = name
        self._function: Callable[P, R] | None = None

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if self._function is None:
            self._function = cast("Callable[P, R]", _loaders[self._name]())
        return self._function(*args, **kwargs)
