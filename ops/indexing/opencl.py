"""Operators that gather and scatter by index, on OPENCL: the CPU's lowerings, other kernels."""

from __future__ import annotations

import math

import numpy as np

from subgraph.dtypes import HALF_FLOATS
from subgraph.engine.planner.lowering import Unsupported
from subgraph.engine.planner.operands import Argument
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.graph.types import numpy_dtype
from subgraph.opencl.lowering import ClLowering, cl_kernel, cl_shared
from subgraph.opencl.runtime import ClSource
from subgraph.ops.movement.opencl import as_unsigned
from subgraph.ops.shared.opencl_code import line, program, require, storage, variant_of, word
from subgraph.ops.shared.strides import collapse

from .arguments import (
    ElementsArguments,
    GatherArguments,
    OneHotArguments,
    TensorScatterArguments,
    TuplesArguments,
)

_REDUCTIONS = {"none": 0, "add": 1, "mul": 2, "max": 3, "min": 4}
_MAX_DIMS = 6  # dimensions in the arguments of the kernel of single elements (kernels.cl)
_MIN_GPU_WORK_ITEMS = 256  # of a scatter with reduction; an estimate

cl_shared(
    *("Gather", "GatherElements", "GatherND", "ScatterElements", "Scatter", "ScatterND", "OneHot"),
    "TensorScatter",
)


def _program(kernel: Kernel, depth: int = 0) -> tuple[ClSource, int]:
    """Return the program for a kernel's variant, and the bytes of an element."""
    variant = variant_of(kernel)
    dtype = variant.get("dtype")
    item = int(variant["item"]) if dtype is None else numpy_dtype(dtype).itemsize
    source = program(
        "indexing/kernels",
        T=word(item) if dtype is None else storage(dtype),
        I=storage(variant.get("index", "int64")),
        REDUCTION=_REDUCTIONS[variant.get("reduction", "none")],
        FROM=int(not variant.get("scatter", False)),
        DEPTH=depth,
    )
    return source, item


@cl_kernel("subgraph.ops.indexing.kernels", "gather")
def gather(low: ClLowering, kernel: Kernel, a: GatherArguments) -> None:
    """Launch Gather."""
    source, item = _program(kernel)
    count = a.y.nbytes // item
    arguments = [count, as_unsigned(a.data, item), a.indices, as_unsigned(a.y, item)]
    arguments += [a.size, a.count, a.inner, a.report]
    low.launch(source, "gather", arguments, *line(low, count))


def _reduces(low: ClLowering, kernel: Kernel) -> bool:
    """Return whether updates are combined with the elements of the data."""
    variant = variant_of(kernel)
    if variant["reduction"] == "none":
        return False
    if variant["dtype"] in HALF_FLOATS:
        raise Unsupported(f"a scatter that combines elements of {variant['dtype']}")
    require(low, variant["dtype"])
    return True


@cl_kernel("subgraph.ops.indexing.kernels", "elements")
def elements(low: ClLowering, kernel: Kernel, a: ElementsArguments) -> None:
    """Launch GatherElements or ScatterElements."""
    source, item = _program(kernel)
    sizes = [*a.dims[::2], a.row_size]
    steps = [*a.dims[1::2], a.row_step]
    items, many, apart = math.prod(sizes), 1, 1
    if _reduces(low, kernel):
        along = steps.index(0)  # the axis: its stride in the data is the argument ``along``
        items, many, apart = items // sizes[along], sizes[along], math.prod(sizes[along + 1 :])
    dims, (merged,) = collapse(sizes, [steps])
    sizes, steps = list(dims), list(merged)
    missing = _MAX_DIMS - len(sizes)
    if missing < 0:
        raise Unsupported(f"indices with {len(sizes)} dimensions that do not merge")
    places = [as_unsigned(a.data, item), a.indices, as_unsigned(a.y, item)]
    arguments = [items, many, apart, *places, a.size, a.along // item]
    arguments += [*[1] * missing, *sizes][1:]
    arguments += [*[0] * missing, *(s // item for s in steps), a.report]
    low.launch(source, "elements", arguments, *line(low, items))


@cl_kernel("subgraph.ops.indexing.kernels", "nd")
def nd(low: ClLowering, kernel: Kernel, a: TuplesArguments) -> None:
    """Launch GatherND or ScatterND."""
    source, item = _program(kernel, a.depth)
    sizes = np.array([*a.dims[::2], 0], np.int32)
    steps = np.array([*(s // item for s in a.dims[1::2]), 0], np.int32)
    tables: list[Argument] = [low.weight("table32", np.array, t) for t in (sizes, steps)]
    items, shares = a.tuples * a.inner, 1
    if _reduces(low, kernel):
        # Each element of a slice has ``shares`` work-items, as many as give the device enough of
        # them.
        shares = -(-(_MIN_GPU_WORK_ITEMS if low.traits.is_gpu else low.traits.units) // a.inner)
        items = shares * a.inner
    arguments = [
        items,
        a.tuples,
        shares,
        as_unsigned(a.data, item),
        a.indices,
        as_unsigned(a.y, item),
    ]
    arguments += [a.inner, a.batch_tuples, a.batch_step // item, *tables, a.report]
    low.launch(source, "nd", arguments, *line(low, items))


@cl_kernel("subgraph.ops.indexing.kernels", "one_hot")
def one_hot(low: ClLowering, kernel: Kernel, a: OneHotArguments) -> None:
    """Launch OneHot."""
    source, item = _program(kernel)
    arguments = [a.y.size, a.indices, as_unsigned(a.values, item), as_unsigned(a.y, item)]
    arguments += [a.depth, a.inner, a.wraps]
    low.launch(source, "one_hot", arguments, *line(low, a.y.size))


@cl_kernel("subgraph.ops.indexing.kernels", "tensor_scatter")
def tensor_scatter(low: ClLowering, kernel: Kernel, a: TensorScatterArguments) -> None:
    """Launch TensorScatter."""
    variant = variant_of(kernel)
    item = min(a.cache.itemsize, 8)
    flags = {name.upper(): int(variant[name]) for name in ("circular", "indexed")}
    rest: dict[str, str | int] = {"DEPTH": 0, "FROM": 1, "I": "long", "REDUCTION": 0}
    items = a.update.nbytes // item
    arguments = [
        items,
        as_unsigned(a.cache, item),
        as_unsigned(a.update, item),
        a.firsts or a.update,
    ]
    arguments += [a.groups, a.positions, a.count, a.row_bytes // item]
    source = program("indexing/kernels", T=word(item), **rest, **flags)
    low.launch(source, "tensor_scatter", arguments, *line(low, items))
