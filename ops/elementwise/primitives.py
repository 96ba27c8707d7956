"""Primitives: steps that most operators are made of, which each device emits in its own way.

A function marked `primitive` is the CPU's way; it says what it does in terms that hold anywhere
(copy this array with strides to those strides). A lowering of another device that has a function of
the same name in its ``primitives`` gets that called, so that the shape work of Transpose, Pad or
ReduceSum is written once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec

from subgraph.engine.planner.lowering import Lowering

_P = ParamSpec("_P")


def primitive(
    function: Callable[Concatenate[Lowering, _P], None],
) -> Callable[Concatenate[Lowering, _P], None]:
    """Decorate the function that emits a step on the CPU."""

    @wraps(function)
    def emit(low: Lowering, /, *args: _P.args, **kwargs: _P.kwargs) -> None:
        chosen = low.primitives.get(function.__name__, function)
        chosen(low, *args, **kwargs)

    return emit
