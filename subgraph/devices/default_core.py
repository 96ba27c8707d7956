"""The `Core` of the process, and the functions of ``sg`` that call its methods."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache, wraps
from io import BytesIO
from typing import Any, Concatenate, ParamSpec, TypeVar

from subgraph.devices.core import Core
from subgraph.runtime.compiled_model import CompiledModel

P = ParamSpec("P")
R = TypeVar("R")


@cache
def default_core() -> Core:
    """Return the Core of the process."""
    return Core()


def _on_default_core(method: Callable[Concatenate[Core, P], R]) -> Callable[P, R]:
    """Return a function that calls a method of the default core, with the method's docstring."""

    @wraps(method)
    def function(*args: P.args, **kwargs: P.kwargs) -> R:
        return method(default_core(), *args, **kwargs)

    signature = inspect.signature(method)
    described: Any = function
    described.__signature__ = signature.replace(parameters=[*signature.parameters.values()][1:])
    described.__module__, described.__qualname__ = __name__, method.__name__
    return function


compile_model = _on_default_core(Core.compile_model)
import_model = _on_default_core(Core.import_model)
get_versions = _on_default_core(Core.get_versions)
query_model = _on_default_core(Core.query_model)


def reduce_model(model: CompiledModel) -> tuple[Callable[..., CompiledModel], tuple[BytesIO]]:
    """Return the function and the arguments by which pickle makes a model again.

    Raises:
        BlobError: a subgraph op of the model cannot be exported.
    """
    stream = BytesIO()
    model.export_model(stream)
    stream.seek(0)
    return import_model, (stream,)
