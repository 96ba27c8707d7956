"""The recurrence of an LSTM whose weights are bytes: states quantised, multiplied, scaled, a step.

All sequences of a direction are quantised together, by the range of their states; sums are exact.
See `op`, QuantizedLSTM.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba.extending import register_jitable

from subgraph.engine.codegen.simd import convert, ld_i32, st_i32, vec

from .arguments import CellsArguments
from .op import BESIDE
from .product_kernels import product

Function = Callable[..., Any]


def byte_recurrence(lanes: int, rows: int, nv: int, gates: int) -> Function:
    """Return ``f(arguments, weights, before, count, width, padded, h, sums, held)``.

    It quantises the states ``h[count, padded]`` into ``held[count, padded + BESIDE]``, multiplies
    them by the weights into int32 ``sums[count, gates, padded]`` and brings these to float32 in
    place: ``(sum - what zero points add) * scale of the states * scale of the column``.

    Args:
        lanes: Elements of a vector.
        rows: Rows of a tile of the product.
        nv: Vectors of a panel.
        gates: Gates of the cell.
    """
    v, whole = vec("float32", lanes), vec("int32", lanes)
    load, store, splat, select = v.load, v.store, v.splat, v.select
    rint, maximum, minimum, none, hmax, hmin = v.rint, v.maximum, v.minimum, v.zero, v.hmax, v.hmin
    load_whole, splat_whole, no_total, add_up = whole.load, whole.splat, whole.zero, whole.sum
    as_float, as_whole = convert("int32", "float32", lanes), convert("float32", "int32", lanes)
    as_bytes, store_bytes = convert("int32", "uint8", lanes), vec("uint8", lanes).store
    size = 4 * lanes
    times = product("int8", lanes, rows, nv)

    @register_jitable
    def range_of(h: int, nbytes: int) -> Any:
        """Return scale and zero point of states as vectors, as DynamicQuantizeLinear does."""
        least, most = none(), none()
        for at in range(h, h + nbytes, size):
            least, most = minimum(least, load(at)), maximum(most, load(at))
        low, high = splat(hmin(least)), splat(hmax(most))
        step = select(high > low, (high - low) / splat(255.0), splat(1.0))
        return step, rint(minimum(maximum((none() - low) / step, none()), splat(255.0)))

    @register_jitable
    def quantize(h: int, padded: int, to: int, step: Any, origin: Any) -> None:
        """Store a row of states as bytes, and behind them their sum less their zero points."""
        total = no_total()
        for k in range(0, padded, lanes):
            value = rint(load(h + 4 * k) / step) + origin
            value = minimum(maximum(value, none()), splat(255.0))
            total = total + as_whole(value - origin)
            store_bytes(to + k, as_bytes(as_whole(value)))
        st_i32(to + padded, add_up(total))

    @register_jitable
    def recur(
        a: CellsArguments, weights: int, before: int, count: int, width: int, padded: int, h: int,
        sums: int, held: int,
    ) -> None:  # fmt: skip
        step, origin = range_of(h, count * padded * 4)
        row, apart = gates * padded * 4, padded + BESIDE
        for i in range(count):
            quantize(h + i * padded * 4, padded, held + i * apart, step, origin)
        quads, vectors = (width + 3) // 4, gates * padded // lanes
        for i in range(0, count, rows):
            few, x, c = min(rows, count - i), held + i * apart, sums + i * row
            times(few, x, apart, weights, vectors, quads, 0, 0, c, row)
        scales, totals = a.scales + before, a.sums + before
        zeros, zero = a.zeros, as_whole(origin)
        for i in range(count):
            own = splat_whole(ld_i32(held + i * apart + padded))
            to = sums + i * row
            for at in range(0, row, size):
                found = load_whole(to + at) - zero * load_whole(totals + at)
                if zeros != 0:
                    found = found - own * load_whole(zeros + before + at)
                store(to + at, as_float(found) * (step * load(scales + at)))

    return recur
