"""Operators that take and put elements by index, on OPENCL: the CPU's shape work, other kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from subgraph.engine.planner.lowering import Operand, Unsupported, Weight, Word
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.graph.types import numpy_dtype
from subgraph.opencl.lowering import ClLowering, cl_kernel, cl_shared
from subgraph.opencl.runtime import ClSource
from subgraph.ops.movement.opencl import as_words
from subgraph.ops.shared.opencl_code import line, require, storage, word
from subgraph.ops.shared.strides import collapse

_REDUCTIONS = {"none": 0, "add": 1, "mul": 2, "max": 3, "min": 4}
_LEVELS = 6
_SHARES = 256  # work-items of a GPU that share a scatter with reduction

cl_shared(
    *("Gather", "GatherElements", "GatherND", "ScatterElements", "Scatter", "ScatterND", "OneHot"),
    *("MaxUnpool", "TensorScatter"),
)


def _program(kernel: Kernel, **defines: int) -> tuple[ClSource, int]:
    """Return the program for a kernel's variant, and the bytes of an element."""
    variant: dict[str, Any] = dict(kernel.variant)
    dtype = variant.get("dtype")
    item = int(variant["item"]) if dtype is None else numpy_dtype(dtype).itemsize
    held: dict[str, str | int] = {
        "T": word(item) if dtype is None else storage(dtype),
        "I": storage(variant.get("index", "int64")),
        "REDUCTION": _REDUCTIONS[variant.get("reduction", "none")],
        "FROM": int(not variant.get("scatter", False)),
        "DEPTH": 0,
        **defines,
    }
    if variant.get("reduction", "none") != "none" and dtype is not None and dtype == "bool":
        raise Unsupported("a scatter that adds up booleans")
    return ClSource("indexing/kernels", defines=tuple(sorted(held.items()))), item


def _numbers(words: Sequence[Word]) -> list[int]:
    return [value for value in words if isinstance(value, int)]


def _places(words: Sequence[Word], item: int) -> list[Word]:
    """Return data, indices and the other operand, data and others as plain words."""
    data, indices, others = words[:3]
    assert isinstance(data, Operand)
    assert isinstance(others, Operand)
    return [as_words(data, item), indices, as_words(others, item)]


@cl_kernel("subgraph.ops.indexing.kernels", "gather")
def gather(low: ClLowering, kernel: Kernel, words: Sequence[Word]) -> None:
    """Launch Gather."""
    source, item = _program(kernel)
    x, indices, y = words[:3]
    assert isinstance(x, Operand)
    assert isinstance(y, Operand)
    size, taken, inner, _ = _numbers(words[3:])
    count = y.nbytes // item
    arguments: list[Word] = [count, as_words(x, item), indices, as_words(y, item)]
    low.launch(source, "gather", [*arguments, size, taken, inner, words[-1]], *line(low, count))


def _reduces(low: ClLowering, kernel: Kernel) -> bool:
    """Return whether elements are put together with those that are there."""
    variant: dict[str, Any] = dict(kernel.variant)
    if variant["reduction"] == "none":
        return False
    require(low, variant["dtype"])
    return True


@cl_kernel("subgraph.ops.indexing.kernels", "elements")
def elements(low: ClLowering, kernel: Kernel, words: Sequence[Word]) -> None:
    """Launch GatherElements or ScatterElements."""
    source, item = _program(kernel)
    size, step, last_size, last_step, _, *pairs = _numbers(words[3:])
    sizes = [*pairs[::2], last_size]
    steps = [*pairs[1::2], last_step]
    items, many, apart = math.prod(sizes), 1, 1
    if _reduces(low, kernel):
        along = steps.index(0)  # the axis of the indices; the data's has ``step``
        items, many, apart = items // sizes[along], sizes[along], math.prod(sizes[along + 1 :])
    dims, (merged,) = collapse(sizes, [steps])
    sizes, steps = list(dims), list(merged)
    missing = _LEVELS - len(sizes)
    if missing < 0:
        raise Unsupported(f"indices with {len(sizes)} dimensions that do not merge")
    arguments: list[Word] = [items, many, apart, *_places(words, item), size, step // item]
    arguments += [*[1] * missing, *sizes][1:]
    arguments += [*[0] * missing, *(s // item for s in steps), words[-1]]
    low.launch(source, "elements", arguments, *line(low, items))


@cl_kernel("subgraph.ops.indexing.kernels", "nd")
def nd(low: ClLowering, kernel: Kernel, words: Sequence[Word]) -> None:
    """Launch GatherND or ScatterND."""
    tuples, inner, per_batch, batch, depth, *pairs = _numbers(words[3:])
    source, item = _program(kernel, DEPTH=depth)
    sizes = np.array([*pairs[::2], 0], np.int32)
    steps = np.array([*(s // item for s in pairs[1::2]), 0], np.int32)
    tables: list[Word] = [low.weight("table32", np.array, t) for t in (sizes, steps)]
    items, shares = tuples * inner, 1
    if _reduces(low, kernel):
        shares = -(-(_SHARES if low.traits.is_gpu else low.traits.units) // inner)
        items = shares * inner
    arguments: list[Word] = [
        items,
        tuples,
        shares,
        *_places(words, item),
        inner,
        per_batch,
        batch // item,
    ]
    low.launch(source, "nd", [*arguments, *tables, words[-1]], *line(low, items))


@cl_kernel("subgraph.ops.indexing.kernels", "one_hot")
def one_hot(low: ClLowering, kernel: Kernel, words: Sequence[Word]) -> None:
    """Launch OneHot."""
    source, item = _program(kernel)
    indices, values, y = words[:3]
    assert isinstance(values, Operand | Weight)
    assert isinstance(y, Operand)
    arguments: list[Word] = [y.size, indices, as_words(values, item), as_words(y, item)]
    low.launch(source, "one_hot", [*arguments, *words[3:]], *line(low, y.size))


@cl_kernel("subgraph.ops.indexing.kernels", "into_cache")
def into_cache(low: ClLowering, kernel: Kernel, words: Sequence[Word]) -> None:
    """Launch TensorScatter."""
    cache, update, firsts = words[:3]
    groups, places, count, row = _numbers(words[3:])
    variant: dict[str, Any] = dict(kernel.variant)
    assert isinstance(cache, Operand)
    assert isinstance(update, Operand)
    item = min(cache.itemsize, 8)
    flags = {name.upper(): int(variant[name]) for name in ("circular", "indexed")}
    rest: dict[str, str | int] = {"DEPTH": 0, "FROM": 1, "I": "long", "REDUCTION": 0}
    defines = tuple(sorted({**rest, **flags, "T": word(item)}.items()))
    items = update.nbytes // item
    arguments: list[Word] = [items, as_words(cache, item), as_words(update, item)]
    arguments += [firsts or update, groups, places, count, row // item]
    source = ClSource("indexing/kernels", defines=defines)
    low.launch(source, "into_cache", arguments, *line(low, items))


@cl_kernel("subgraph.ops.indexing.kernels", "in_range")
def in_range(low: ClLowering, kernel: Kernel, words: Sequence[Word]) -> None:
    """Launch the check of values that other kernels clamp."""
    dtype = str(dict(kernel.variant)["dtype"])
    require(low, dtype)
    rest: dict[str, str | int] = {"DEPTH": 0, "FROM": 1, "I": "long", "REDUCTION": 0, "RANGE": 1}
    source = ClSource(
        "indexing/kernels", defines=tuple(sorted({**rest, "T": storage(dtype)}.items()))
    )
    ignored = words[5]
    assert isinstance(ignored, int)
    low.launch(source, "in_range", [*words[:5], np.int64(ignored), *words[6:]], (1,))
