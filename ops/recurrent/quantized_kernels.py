"""Recurrence of QuantizedLSTM: in each step states are quantized, multiplied and scaled.

All sequences of a direction are quantized by one range, that of all their states; the integer sums
are exact. `op.quantized_lstm` is the reference.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba.extending import register_jitable

from subgraph.engine.codegen.simd import convert, ld_i32, st_i32, vec

from .arguments import ROW_SUM_BYTES, CellsArguments
from .product_kernels import product

Function = Callable[..., Any]


def quantized_recurrence(lanes: int, rows: int, nv: int, gates: int) -> Function:
    """Return ``f(arguments, weights, first_column, count, width, padded, h, sums, quantized)``.

    It quantizes the states ``h[count, padded]`` into ``quantized[count, padded + ROW_SUM_BYTES]``,
    multiplies them by the weights into int32 ``sums[count, gates, padded]`` and converts these to
    float32 in place: ``(sum - the share of zero points) * scale of the states * scale of the
    column``. ``width`` is the hidden size; ``first_column`` the bytes of 32-bit numbers of the
    columns of earlier directions.

    Args:
        lanes: Elements of a vector.
        rows: Rows of a tile of the product.
        nv: Vectors of a panel.
        gates: Gates of the cell.
    """
    v, ints = vec("float32", lanes), vec("int32", lanes)
    load, store = v.load, v.store
    load_int, splat_int = ints.load, ints.splat
    as_float, as_int = convert("int32", "float32", lanes), convert("float32", "int32", lanes)
    size = 4 * lanes
    multiply = product("int8", lanes, rows, nv)
    range_of, quantize = _state_quantizer(lanes)

    @register_jitable
    def recur(
        a: CellsArguments, weights: int, first_column: int, count: int, width: int, padded: int,
        h: int, sums: int, quantized: int,
    ) -> None:  # fmt: skip
        step, origin = range_of(h, count * padded * 4)
        row, pitch = gates * padded * 4, padded + ROW_SUM_BYTES
        for i in range(count):
            quantize(h + i * padded * 4, padded, quantized + i * pitch, step, origin)
        quads, vectors = (width + 3) // 4, gates * padded // lanes
        for i in range(0, count, rows):
            few, x, c = min(rows, count - i), quantized + i * pitch, sums + i * row
            multiply(few, x, pitch, weights, vectors, quads, 0, 0, c, row)
        scales, totals = a.scales + first_column, a.sums + first_column
        zeros, state_zero = a.zeros, as_int(origin)
        for i in range(count):
            state_sum = splat_int(ld_i32(quantized + i * pitch + padded))
            to = sums + i * row
            for at in range(0, row, size):
                # With bytes q and zero points z, the sum over k of (q_h - z_h) (q_w - z_w) is the
                # integer product less z_h times the column's sum less z_w times the sum of (q_h -
                # z_h): the product need not know the zero points.
                found = load_int(to + at) - state_zero * load_int(totals + at)
                if zeros != 0:
                    found = found - state_sum * load_int(zeros + first_column + at)
                store(to + at, as_float(found) * (step * load(scales + at)))

    return recur


def _state_quantizer(lanes: int) -> tuple[Function, Function]:
    """Return ``range_of(h, nbytes)`` and ``quantize(h, padded, to, step, origin)``.

    ``h`` are states, float32; ``step`` and ``origin`` are their scale and zero point, as vectors.
    """
    v, ints = vec("float32", lanes), vec("int32", lanes)
    load, splat, select = v.load, v.splat, v.select
    rint, maximum, minimum, zero, hmax, hmin = v.rint, v.maximum, v.minimum, v.zero, v.hmax, v.hmin
    int_zero, int_sum, as_int = ints.zero, ints.sum, convert("float32", "int32", lanes)
    as_bytes, store_bytes = convert("int32", "uint8", lanes), vec("uint8", lanes).store
    size = 4 * lanes

    @register_jitable
    def range_of(h: int, nbytes: int) -> Any:
        """Return scale and zero point of states as vectors, as DynamicQuantizeLinear does."""
        # The range contains 0, so that a state of 0, and the padding, is represented exactly.
        least, most = zero(), zero()
        for at in range(h, h + nbytes, size):
            least, most = minimum(least, load(at)), maximum(most, load(at))
        low, high = splat(hmin(least)), splat(hmax(most))
        step = select(high > low, (high - low) / splat(255.0), splat(1.0))
        return step, rint(minimum(maximum((zero() - low) / step, zero()), splat(255.0)))

    @register_jitable
    def quantize(h: int, padded: int, to: int, step: Any, origin: Any) -> None:
        """Store a row of states as bytes, followed by the sum of bytes less their zero point."""
        total = int_zero()
        for k in range(0, padded, lanes):
            value = rint(load(h + 4 * k) / step) + origin
            value = minimum(maximum(value, zero()), splat(255.0))
            total = total + as_int(value - origin)
            store_bytes(to + k, as_bytes(as_int(value)))
        st_i32(to + padded, int_sum(total))

    return range_of, quantize
