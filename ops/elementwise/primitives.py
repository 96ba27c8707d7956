"""Primitives: steps that many lowerings share and that each device emits with kernels of its own.

A function marked `primitive` is the CPU's implementation; its contract holds on any device (copy
an array with strides to other strides). If the lowering of another device has a function of the
same name in ``primitives``, that one is called, so the shape computations of Transpose, Pad or
ReduceSum are written once.
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
    """Decorate the CPU implementation of a step; calls dispatch on the device of the lowering."""

    @wraps(function)
    def emit(low: Lowering, /, *args: _P.args, **kwargs: _P.kwargs) -> None:
        chosen = low.primitives.get(function.__name__, function)
        chosen(low, *args, **kwargs)

    return emit
