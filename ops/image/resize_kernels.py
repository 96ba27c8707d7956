"""Kernels of Resize: weighted sums of neighbours along one axis, by tables made with the plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba.extending import register_jitable

from subgraph.engine.codegen.argument_views import view_of
from subgraph.engine.codegen.simd import ld_i32, permute, vec

from .arguments import BlendAcrossArguments, BlendArguments, BlendNearbyArguments

Function = Callable[..., Any]


def across(*, dtype: str, lanes: int) -> Function:
    """Return the kernel of `BlendAcrossArguments`, for an axis with dimensions inside it.

    ``y[o, j, :] = added[j] + sum over k of weights[k, j] * x[o, indices[k, j], :]``

    Args:
        dtype: ``"float32"`` or ``"float64"``.
        lanes: Elements of a vector.
    """
    arguments = view_of(BlendAcrossArguments)
    v = vec(dtype, lanes)
    load, store, load_m, store_m, mask_n = v.load, v.store, v.load_m, v.store_m, v.mask_n
    bcast, fma, item = v.bcast, v.fma, v.itemsize
    step = lanes * item

    @register_jitable
    def row_of_two(a: BlendAcrossArguments, x: int, y: int, j: int, whole: int) -> None:
        """Write the whole vectors of row ``j`` from its two neighbours (mode "linear")."""
        indices, weights, taken = a.indices, a.weights, a.taken
        row = a.inner * item
        one, other = bcast(weights + j * item), bcast(weights + (taken + j) * item)
        start = bcast(a.added + j * item)
        p, q = x + ld_i32(indices + 4 * j) * row, x + ld_i32(indices + 4 * (taken + j)) * row
        for i in range(0, whole, step):
            store(y + i, fma(other, load(q + i), fma(one, load(p + i), start)))

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        a = arguments(args)
        indices, weights, added = a.indices, a.weights, a.added
        count, size, taken = a.neighbours, a.size, a.taken
        inner, block = a.inner, a.rows
        tiles = (taken + block - 1) // block
        row = inner * item
        whole = inner // lanes * step
        # The elements behind a row belong to the next one, which another thread may be writing.
        mask = mask_n(inner - inner // lanes * lanes)
        for unit in range(begin, end):
            outer, first = unit // tiles, unit % tiles * block
            x = a.x + outer * size * row
            for j in range(first, min(taken, first + block)):
                y = a.y + (outer * taken + j) * row
                start = bcast(added + j * item)
                if count == 2:
                    row_of_two(a, x, y, j, whole)
                for i in range(0, whole if count != 2 else 0, step):
                    total = start
                    for k in range(count):
                        at = k * taken + j
                        source = x + ld_i32(indices + 4 * at) * row
                        total = fma(bcast(weights + at * item), load(source + i), total)
                    store(y + i, total)
                if whole < row:
                    total = start
                    for k in range(count):
                        at = k * taken + j
                        source = x + ld_i32(indices + 4 * at) * row
                        value = load_m(source + whole, mask)
                        total = fma(bcast(weights + at * item), value, total)
                    store_m(y + whole, mask, total)

    return kernel


def along(*, dtype: str, lanes: int) -> Function:
    """Return the kernel of `BlendArguments`: `across` for the last axis; neighbours are gathered.

    Args:
        dtype: ``"float32"`` or ``"float64"``.
        lanes: Elements of a vector.
    """
    gather, mask_n = vec(dtype, lanes).gather, vec(dtype, lanes).mask_n

    @register_jitable
    def gathered(a: BlendArguments, x: int, block: int, indices: Any, count: int) -> Any:
        """Return the elements of a line at ``indices``."""
        return gather(x, indices, mask_n(count))

    return _line_kernel(view_of(BlendArguments), dtype, lanes, gathered)


def nearby(*, dtype: str, lanes: int) -> Function:
    """Return the kernel of `BlendNearbyArguments`: `along` with neighbours permuted from vectors.

    Args:
        dtype: ``"float32"`` or ``"float64"``.
        lanes: Elements of a vector, and results of a block.
    """
    v, pick = vec(dtype, lanes), permute(dtype, lanes)
    load_m, mask_n, select, item = v.load_m, v.mask_n, v.select, v.itemsize
    splat_index = vec("int32", lanes).splat

    @register_jitable
    def permuted(a: BlendNearbyArguments, x: int, block: int, indices: Any, count: int) -> Any:
        """Return the elements of a line at ``indices``, counted from the block's first one."""
        first, size = x + ld_i32(a.firsts + 4 * block) * item, a.size
        # The masks only matter where the axis is shorter than the vectors; otherwise the lowering
        # chose the first index so that all vectors of a block lie inside the axis.
        value = pick(load_m(first, mask_n(size)), indices)
        for k in range(1, a.vectors):
            near = load_m(first + k * lanes * item, mask_n(size - k * lanes))
            # The permutation uses an index modulo the lanes, so the right vector is selected
            # afterwards.
            value = select(indices >= splat_index(k * lanes), pick(near, indices), value)
        return value

    return _line_kernel(view_of(BlendNearbyArguments), dtype, lanes, permuted)


def _line_kernel(arguments: Any, dtype: str, lanes: int, neighbours: Function) -> Function:
    """Return a kernel over lines along the resized axis.

    Args:
        arguments: The view of its arguments.
        dtype: ``"float32"`` or ``"float64"``.
        lanes: Elements of a vector, and results of a block.
        neighbours: ``f(arguments, line, block, indices, count)``: the elements at a vector of
            indices, of which ``count`` exist.
    """
    v, ints = vec(dtype, lanes), vec("int32", lanes)
    load, load_n, store, store_n, fma = v.load, v.load_n, v.store, v.store_n, v.fma
    load_indices, load_indices_n, item = ints.load, ints.load_n, v.itemsize

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        a = arguments(args)
        indices, weights, added = a.indices, a.weights, a.added
        count, size, taken = a.neighbours, a.size, a.taken
        whole = taken // lanes * lanes
        rest = taken - whole
        for unit in range(begin, end):
            x, y = a.x + unit * size * item, a.y + unit * taken * item
            for j in range(0, whole, lanes):
                total = load(added + j * item)
                for k in range(count):
                    at = k * taken + j
                    value = neighbours(a, x, j // lanes, load_indices(indices + 4 * at), lanes)
                    total = fma(load(weights + at * item), value, total)
                store(y + j * item, total)
            if rest > 0:
                total = load_n(added + whole * item, rest)
                for k in range(count):
                    at = k * taken + whole
                    near = load_indices_n(indices + 4 * at, rest)
                    value = neighbours(a, x, whole // lanes, near, rest)
                    total = fma(load_n(weights + at * item, rest), value, total)
                store_n(y + whole * item, rest, total)

    return kernel
