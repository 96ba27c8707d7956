"""Winograd's transforms along one axis: of an input tile, and of the products back to outputs.

`winograd_kernels` applies them along both axes; its docstring has the algorithm and its source.
"""

from __future__ import annotations

from typing import Any

from numba.extending import register_jitable

_A, _B = 2.0 / 3.0, 1.5  # F(4) evaluates at 0, A, -A, B, -B and infinity


def forward_along(v: Any, n: int) -> Any:
    """Return ``f(source, step)``, which transforms n pixels along an axis to n vectors of values.

    ``source`` is the address of the first pixel's vector, ``step`` the bytes to the next one.
    """
    load, fma, splat = v.load, v.fma, v.splat

    @register_jitable
    def forward2(s: int, ss: int) -> Any:
        d0, d1, d2, d3 = load(s), load(s + ss), load(s + 2 * ss), load(s + 3 * ss)
        return d0 - d2, d1 + d2, d2 - d1, d1 - d3

    a, b = _A, _B
    a2, b2 = a * a, b * b

    @register_jitable
    def forward4(s: int, ss: int) -> Any:
        d0, d1, d2 = load(s), load(s + ss), load(s + 2 * ss)
        d3, d4, d5 = load(s + 3 * ss), load(s + 4 * ss), load(s + 5 * ss)
        first = fma(splat(-(a2 + b2)), d2, d0 + d4)
        even_a, odd_a = fma(splat(-b2), d2, d4), fma(splat(-b2), d1, d3)
        even_b, odd_b = fma(splat(-a2), d2, d4), fma(splat(-a2), d1, d3)
        last = fma(splat(-(a2 + b2)), d3, d1 + d5)
        return (
            first,
            fma(splat(a), odd_a, even_a),
            fma(splat(-a), odd_a, even_a),
            fma(splat(b), odd_b, even_b),
            fma(splat(-b), odd_b, even_b),
            last,
        )

    @register_jitable
    def forward_strided(s: int, ss: int) -> Any:
        d0, d1, d2 = load(s), load(s + ss), load(s + 2 * ss)
        d3, d4 = load(s + 3 * ss), load(s + 4 * ss)
        # Even and odd inputs at point 0 and at point 1, even inputs at infinity.
        return d0 - d2, d1 - d3, d2, d3, d4 - d2

    return {4: forward2, 5: forward_strided, 6: forward4}[n]


def backward_along(v: Any, m: int, n: int) -> Any:
    """Return ``f(source, step, last)``, which transforms products along an axis to m outputs.

    ``source`` is the address of the vector at point 0, ``step`` the bytes to that of the next
    point, ``last`` the address of the vector at infinity, which only the last output needs.

    Args:
        v: The vector operations (``subgraph.engine.codegen.simd.vec``).
        m: Outputs of a tile along the axis.
        n: Inputs of a tile along the axis: 4, 6, or 5 with stride 2.
    """
    load, fma, splat = v.load, v.fma, v.splat

    @register_jitable
    def backward2(s: int, ss: int, last: int) -> Any:
        m0, m1, m2, m3 = load(s), load(s + ss), load(s + 2 * ss), load(last)
        return m0 + m1 + m2, m1 - m2 - m3

    a, b = _A, _B
    a2, b2, a3, b3 = a * a, b * b, a * a * a, b * b * b

    @register_jitable
    def backward4(s: int, ss: int, last: int) -> Any:
        m1, m2 = load(s + ss), load(s + 2 * ss)
        sum_a, diff_a = m1 + m2, m1 - m2
        m3, m4 = load(s + 3 * ss), load(s + 4 * ss)
        sum_b, diff_b = m3 + m4, m3 - m4
        cubes = fma(splat(b3), diff_b, load(last))
        return (
            load(s) + sum_a + sum_b,
            fma(splat(a), diff_a, splat(b) * diff_b),
            fma(splat(a2), sum_a, splat(b2) * sum_b),
            fma(splat(a3), diff_a, cubes),
        )

    @register_jitable
    def backward3(s: int, ss: int, last: int) -> Any:
        m1, m2, m3, m4 = load(s + ss), load(s + 2 * ss), load(s + 3 * ss), load(s + 4 * ss)
        sum_a, diff_a, sum_b, diff_b = m1 + m2, m1 - m2, m3 + m4, m3 - m4
        return (
            load(s) + sum_a + sum_b,
            fma(splat(a), diff_a, splat(b) * diff_b),
            fma(splat(a2), sum_a, fma(splat(b2), sum_b, load(last))),
        )

    @register_jitable
    def backward2_of_6(s: int, ss: int, last: int) -> Any:
        m1, m2, m3, m4 = load(s + ss), load(s + 2 * ss), load(s + 3 * ss), load(s + 4 * ss)
        odd = fma(splat(b), m3 - m4, load(last))
        return load(s) + (m1 + m2) + (m3 + m4), fma(splat(a), m1 - m2, odd)

    @register_jitable
    def backward_strided(s: int, ss: int, last: int) -> Any:
        m0, m1, m2 = load(s), load(s + ss), load(last)
        return m0 + m1, m1 + m2

    if n == 6:
        return {2: backward2_of_6, 3: backward3, 4: backward4}[m]
    return backward2 if n == 4 else backward_strided


def storer(v: Any, count: int) -> Any:
    """Return ``f(values, target, step, last)``, which stores ``count`` vectors.

    They are stored from address ``target`` on, ``step`` bytes apart, and the last one at ``last``.
    """
    store = v.store

    @register_jitable
    def store2(d: Any, to: int, step: int, last: int) -> None:
        store(to, d[0])
        store(last, d[1])

    @register_jitable
    def store3(d: Any, to: int, step: int, last: int) -> None:
        store2(d, to, step, to + step)
        store(last, d[2])

    @register_jitable
    def store4(d: Any, to: int, step: int, last: int) -> None:
        store2(d, to, step, to + step)
        store2(d[2:], to + 2 * step, step, last)

    @register_jitable
    def store5(d: Any, to: int, step: int, last: int) -> None:
        store4(d, to, step, to + 3 * step)
        store(last, d[4])

    @register_jitable
    def store6(d: Any, to: int, step: int, last: int) -> None:
        store4(d, to, step, to + 3 * step)
        store2(d[4:], to + 4 * step, step, last)

    return {2: store2, 3: store3, 4: store4, 5: store5, 6: store6}[count]


def finisher(v: Any, m: int) -> Any:
    """Return ``f(values, bias, low, high, y, residual, row, rows)``: the end of a tile's column.

    It adds the bias and the residual (address 0: none) to the first ``rows`` of the m values,
    clamps them to ``low`` and ``high`` and stores them from address ``y`` on, ``row`` bytes apart.
    """
    load, store, at_least, at_most = v.load, v.store, v.max, v.min

    @register_jitable
    def finish(value: Any, bias: Any, low: Any, high: Any, y: int, res: int, down: int) -> None:
        value = value + bias
        if res != 0:
            value = value + load(res + down)
        store(y + down, at_most(high, at_least(low, value)))

    @register_jitable
    def finish2(
        d: Any, bias: Any, low: Any, high: Any, y: int, res: int, row: int, rows: int
    ) -> None:
        finish(d[0], bias, low, high, y, res, 0)
        if rows > 1:
            finish(d[1], bias, low, high, y, res, row)

    @register_jitable
    def finish3(
        d: Any, bias: Any, low: Any, high: Any, y: int, res: int, row: int, rows: int
    ) -> None:
        finish2(d, bias, low, high, y, res, row, rows)
        if rows > 2:
            finish(d[2], bias, low, high, y, res, 2 * row)

    @register_jitable
    def finish4(
        d: Any, bias: Any, low: Any, high: Any, y: int, res: int, row: int, rows: int
    ) -> None:
        finish3(d, bias, low, high, y, res, row, rows)
        if rows > 3:
            finish(d[3], bias, low, high, y, res, 3 * row)

    return {2: finish2, 3: finish3, 4: finish4}[m]
