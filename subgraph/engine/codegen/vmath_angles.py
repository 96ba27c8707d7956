"""Trigonometric functions and their inverses for `vmath`; float64 calls the C library lane by lane.

The polynomials are Chebyshev interpolants computed for this file. Arguments beyond 1 (atan) and 1/2
(asin, acos) are reduced by the complementary angle, pi / 2 less the result, with pi / 2 in two
parts.
"""

from __future__ import annotations

import math

from llvmlite import ir

from subgraph.engine.codegen.irtools import F64

from .vector_expr import Expr

_RIGHT, _RIGHT_REST = 1.57079637, -4.37113883e-8  # pi / 2 rounded to float32, and the remainder
# (atan(x) / x - 1) / x**2 in powers of x**2, |x| up to 1.
_ATAN = (
    -0.333333317,
    0.199997393,
    -0.142785687,
    0.110337641,
    -0.0865688043,
    0.0625016944,
    -0.0358715389,
    0.0135077714,
    -0.00238699731,
)
# (asin(x) / x - 1) / x**2 in powers of x**2, |x| up to 1/2.
_ASIN = (
    0.166666663,
    0.0750009454,
    0.0445994015,
    0.0311006628,
    0.0171492383,
    0.0336908473,
)

# (r - sin(r)) / r**3 and (1 - cos(r)) / r**2 in powers of r**2, |r| <= pi / 4.
_SIN = (
    0.1666666666666387,
    -0.00833333333107021,
    0.00019841266908224796,
    -2.7555988280021416e-06,
    2.4805390945766067e-08,
)
_COS = (
    0.4999999999996371,
    -0.04166666663727906,
    0.001388888508002599,
    -2.4799858750748857e-05,
    2.7236822001886194e-07,
)
# pi / 2 in two parts, the first of 33 bits, so that its products are exact (fdlibm).
_HALF_PI = (1.57079632673412561417, 6.07710050650619224932e-11)
# Up to this |x| the two parts of pi / 2 suffice, see `_beyond`: a multiple has at most 19 bits, and
# its product with the first part at most 52 of the 53 bits of float64.
_TRIG_LIMIT = 2.0**19


def _complement(angle: Expr) -> Expr:
    """Return pi / 2 - angle."""
    return angle.const(_RIGHT) - (angle - _RIGHT_REST)


def _asin_and_acos(x: Expr) -> tuple[Expr, Expr]:
    """Return asin(|x|), for |x| up to 1/2, and acos(|x|) = 2 asin(sqrt((1 - |x|) / 2)), beyond."""
    a = x.abs()
    square = a * a
    near = (square * a).fma(square.polynomial(_ASIN), a)
    square = (a * -0.5) + 0.5
    root = square.libm("sqrt")
    half = (square * root).fma(square.polynomial(_ASIN), root)
    return near, half + half


def atan(x: Expr) -> Expr:
    """Emit the arc tangent."""
    if not x.format.single:
        return x.libm("atan")
    a = x.abs()
    large = a.compare(">", 1.0)
    # ``atan(a) = pi / 2 - atan(1 / a)`` limits the polynomial's range to 1.
    t = (1.0 / a).where(large, a)
    square = t * t
    angle = (square * t).fma(square.polynomial(_ATAN), t)
    return _complement(angle).where(large, angle).copysign(x)


def asin(x: Expr) -> Expr:
    """Emit the arc sine; NaN beyond -1 and 1."""
    if not x.format.single:
        return x.libm("asin")
    near, far = _asin_and_acos(x)
    return near.where(x.abs().compare("<=", 0.5), _complement(far)).copysign(x)


def acos(x: Expr) -> Expr:
    """Emit the arc cosine; NaN beyond -1 and 1."""
    if not x.format.single:
        return x.libm("acos")
    near, far = _asin_and_acos(x)
    # For negative x, ``acos(x) = pi - acos(-x)``.
    opposite = _complement(far) + x.const(_RIGHT)
    far = opposite.where(x.compare("<", 0.0), far)
    return _complement(near.copysign(x)).where(x.abs().compare("<=", 0.5), far)


def sincos(x: Expr, quarter: int) -> Expr:
    """Return sin(x + quarter * pi / 2), for float32 computed in float64."""
    builder, ty = x.builder, x.value.type
    if not x.format.single:
        return x.libm("cos" if quarter else "sin")
    wide = ir.VectorType(F64, ty.count)
    d = x.like(builder.fpext(x.value, wide))
    n, integer = d.nearest(2.0 / math.pi)
    r = n.fma(-_HALF_PI[0], d)
    r = n.fma(-_HALF_PI[1], r)
    z = r * r
    sine = (-z.polynomial(_SIN)).fma(z * r, r)
    cosine = (-z.polynomial(_COS)).fma(z, 1.0)
    # The last two bits of the number of quarter turns select the function and the sign.
    step = builder.add(integer, d.integer(quarter))
    swap = builder.icmp_signed("!=", builder.and_(step, d.integer(1)), d.integer(0))
    flip = builder.icmp_signed("!=", builder.and_(step, d.integer(2)), d.integer(0))
    result = cosine.where(swap, sine)
    near = x.like(builder.fptrunc((-result).where(flip, result).value, ty))
    if not quarter:
        near = x.where(x.compare("==", 0.0), near)  # keeps the sign of zero
    return _beyond(x, near, "cos" if quarter else "sin")


def _beyond(x: Expr, near: Expr, name: str) -> Expr:
    """Return ``near`` where |x| is up to _TRIG_LIMIT, and the C library's result elsewhere.

    Args:
        x: The argument.
        near: The result for arguments up to the limit.
        name: The function, ``"sin"`` or ``"cos"``, called only if any lane is beyond.
    """
    builder = x.builder
    far = builder.not_(x.abs().compare("<=", _TRIG_LIMIT))
    whole = ir.IntType(x.value.type.count)
    any_far = builder.icmp_unsigned("!=", builder.bitcast(far, whole), whole(0))
    before = builder.block
    # The C library is called lane by lane, so that vectors without such an argument skip it.
    with builder.if_then(any_far, likely=False):
        called = x.libm(name)
        chosen = called.where(far, near)
        inside = builder.block
    merged = builder.phi(x.value.type)
    merged.add_incoming(near.value, before)
    merged.add_incoming(chosen.value, inside)
    return x.like(merged)
