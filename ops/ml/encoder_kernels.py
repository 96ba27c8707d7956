"""Kernel of the encoders of ai.onnx.ml: binary search of each element among sorted keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from subgraph.engine.codegen.argument_views import view_of
from subgraph.engine.codegen.simd import ld, st
from subgraph.ops.movement.kernels import WORDS

from .arguments import SearchArguments

Function = Callable[..., Any]


def search(*, dtype: str, item: int) -> Function:
    """Return the kernel of `SearchArguments`: it writes the value of each element's key.

    Args:
        dtype: Of the elements.
        item: Bytes of a value.
    """
    arguments = view_of(SearchArguments)
    load = ld(dtype)
    take, put = ld(WORDS[item]), st(WORDS[item])
    size = 8 if dtype.endswith("64") else 4

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        a = arguments(args)
        x, y, keys, values, count = a.x, a.y, a.keys, a.values, a.count
        for unit in range(begin, end):
            value = load(x + unit * size)
            # Branch-free: the last key that is at most the value stays in [at, at + left).
            at, left = 0, count
            while left > 1:
                half = left >> 1
                at += half * int(load(keys + (at + half) * size) <= value)
                left -= half
            index = at if load(keys + at * size) == value else count
            # A NaN equals no key; its value lies behind that of unknown keys.
            if value != value:
                index = count + 1
            put(y + unit * item, take(values + index * item))

    return kernel
