"""Kernels of Resize: weighted sums of neighbours along one axis, by tables made with the plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba.extending import register_jitable

from subgraph.engine.codegen.simd import ld_i32, picked, vec
from subgraph.ops.movement.kernels import arg

Function = Callable[..., Any]


def across(*, dtype: str, lanes: int) -> Function:
    """Return the kernel for an axis with elements inside it.

    ``y[o, j, :] = added[j] + sum over k of weights[k, j] * x[o, places[k, j], :]``

    Words::

        0 x  1 y  2 places (int32)  3 weights  4 added  5 neighbours  6 size of the axis in x
        7 in y  8 elements inside it  9 rows of y in a unit

    Units: sizes outside the axis * tiles of rows.
    """
    v = vec(dtype, lanes)
    load, store, load_m, store_m, mask_n = v.load, v.store, v.load_m, v.store_m, v.mask_n
    bcast, fma, item = v.bcast, v.fma, v.itemsize
    step = lanes * item

    @register_jitable
    def row_of_two(args: int, x: int, y: int, j: int, whole: int) -> None:
        """Write the whole vectors of a row from its two neighbours."""
        places, weights, taken = arg(args, 2), arg(args, 3), arg(args, 7)
        row = arg(args, 8) * item
        a, b = bcast(weights + j * item), bcast(weights + (taken + j) * item)
        start = bcast(arg(args, 4) + j * item)
        p, q = x + ld_i32(places + 4 * j) * row, x + ld_i32(places + 4 * (taken + j)) * row
        for i in range(0, whole, step):
            store(y + i, fma(b, load(q + i), fma(a, load(p + i), start)))

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        places, weights, added = arg(args, 2), arg(args, 3), arg(args, 4)
        count, size, taken = arg(args, 5), arg(args, 6), arg(args, 7)
        inner, block = arg(args, 8), arg(args, 9)
        tiles = (taken + block - 1) // block
        row = inner * item
        whole = inner // lanes * step
        mask = mask_n(inner - inner // lanes * lanes)
        for unit in range(begin, end):
            outer, first = unit // tiles, unit % tiles * block
            x = arg(args, 0) + outer * size * row
            for j in range(first, min(taken, first + block)):
                y = arg(args, 1) + (outer * taken + j) * row
                start = bcast(added + j * item)
                if count == 2:
                    row_of_two(args, x, y, j, whole)
                for i in range(0, whole if count != 2 else 0, step):
                    total = start
                    for k in range(count):
                        at = k * taken + j
                        source = x + ld_i32(places + 4 * at) * row
                        total = fma(bcast(weights + at * item), load(source + i), total)
                    store(y + i, total)
                if whole < row:
                    total = start
                    for k in range(count):
                        at = k * taken + j
                        source = x + ld_i32(places + 4 * at) * row
                        value = load_m(source + whole, mask)
                        total = fma(bcast(weights + at * item), value, total)
                    store_m(y + whole, mask, total)

    return kernel


def along(*, dtype: str, lanes: int) -> Function:
    """Return the kernel for an axis with nothing inside it; words 0 to 7 as of `across`.

    Units: sizes outside the axis.
    """
    v, places_of = vec(dtype, lanes), vec("int32", lanes)
    load, load_n, store_n, mask_n, gather, fma = (
        v.load,
        v.load_n,
        v.store_n,
        v.mask_n,
        v.gather,
        v.fma,
    )
    load_places, load_places_n, item = places_of.load, places_of.load_n, v.itemsize
    store, every = v.store, lanes

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        places, weights, added = arg(args, 2), arg(args, 3), arg(args, 4)
        count, size, taken = arg(args, 5), arg(args, 6), arg(args, 7)
        whole = taken // lanes * lanes
        rest = taken - whole
        for unit in range(begin, end):
            x, y = arg(args, 0) + unit * size * item, arg(args, 1) + unit * taken * item
            mask = mask_n(every)
            for j in range(0, whole, lanes):
                total = load(added + j * item)
                for k in range(count):
                    at = k * taken + j
                    value = gather(x, load_places(places + 4 * at), mask)
                    total = fma(load(weights + at * item), value, total)
                store(y + j * item, total)
            if rest > 0:
                mask = mask_n(rest)
                total = load_n(added + whole * item, rest)
                for k in range(count):
                    at = k * taken + whole
                    value = gather(x, load_places_n(places + 4 * at, rest), mask)
                    total = fma(load_n(weights + at * item, rest), value, total)
                store_n(y + whole * item, rest, total)

    return kernel


def nearby(*, dtype: str, lanes: int) -> Function:
    """Return the kernel of `along` where few vectors hold all neighbours of ``lanes`` results.

    Words: 0 to 7 as of `across`, but the places count from that of a block's first neighbour, and
    ``8 places of the first neighbours`` (int32), one for each ``lanes`` results: never so far
    behind that the vectors from there end beyond a row of x, unless the row is shorter;
    ``9 vectors``.

    Units: sizes outside the axis.
    """
    v, places_of, pick = vec(dtype, lanes), vec("int32", lanes), picked(dtype, lanes)
    load, load_n, load_m, store, store_n = v.load, v.load_n, v.load_m, v.store, v.store_n
    mask_n, fma, select = v.mask_n, v.fma, v.select
    load_places, load_places_n, item = places_of.load, places_of.load_n, v.itemsize
    splat_place = places_of.splat

    @register_jitable
    def neighbours(args: int, x: int, places: Any) -> Any:
        """Pick elements by their places from ``x`` on."""
        size = arg(args, 6)
        value = pick(load_m(x, mask_n(size)), places)
        for k in range(1, arg(args, 9)):
            near = load_m(x + k * lanes * item, mask_n(size - k * lanes))
            value = select(places >= splat_place(k * lanes), pick(near, places), value)
        return value

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        places, weights, added = arg(args, 2), arg(args, 3), arg(args, 4)
        count, size, taken = arg(args, 5), arg(args, 6), arg(args, 7)
        whole = taken // lanes * lanes
        rest = taken - whole
        for unit in range(begin, end):
            x, y = arg(args, 0) + unit * size * item, arg(args, 1) + unit * taken * item
            firsts = arg(args, 8)
            for j in range(0, whole, lanes):
                first = x + ld_i32(firsts) * item
                total = load(added + j * item)
                for k in range(count):
                    at = k * taken + j
                    value = neighbours(args, first, load_places(places + 4 * at))
                    total = fma(load(weights + at * item), value, total)
                store(y + j * item, total)
                firsts += 4
            if rest > 0:
                first = x + ld_i32(firsts) * item
                total = load_n(added + whole * item, rest)
                for k in range(count):
                    at = k * taken + whole
                    value = neighbours(args, first, load_places_n(places + 4 * at, rest))
                    total = fma(load_n(weights + at * item, rest), value, total)
                store_n(y + whole * item, rest, total)

    return kernel
