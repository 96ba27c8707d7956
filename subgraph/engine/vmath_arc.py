"""Inverse trigonometric functions over vectors, for ``vmath``: float32 as arithmetic, else by call.

The polynomials are Chebyshev interpolants computed for this file. Arguments beyond 1 (atan) and 1/2
(asin, acos) are brought below by the angle that is left to a right one, pi / 2 in two parts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .vmath import Expr

_RIGHT, _RIGHT_REST = 1.57079637, -4.37113883e-8  # pi / 2 in float32, and what it is short of it
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


def _rest(angle: Expr) -> Expr:
    """Return pi / 2 minus an angle."""
    return angle.const(_RIGHT) - (angle - _RIGHT_REST)


def _halves(x: Expr) -> tuple[Expr, Expr]:
    """Return asin of |x| up to 1/2, and acos of |x| beyond."""
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
    t = (1.0 / a).where(large, a)
    square = t * t
    angle = (square * t).fma(square.polynomial(_ATAN), t)
    return _rest(angle).where(large, angle).copysign(x)


def asin(x: Expr) -> Expr:
    """Emit the arc sine; NaN beyond -1 and 1."""
    if not x.format.single:
        return x.libm("asin")
    near, far = _halves(x)
    return near.where(x.abs().compare("<=", 0.5), _rest(far)).copysign(x)


def acos(x: Expr) -> Expr:
    """Emit the arc cosine; NaN beyond -1 and 1."""
    if not x.format.single:
        return x.libm("acos")
    near, far = _halves(x)
    opposite = _rest(far) + x.const(_RIGHT)
    far = opposite.where(x.compare("<", 0.0), far)
    return _rest(near.copysign(x)).where(x.abs().compare("<=", 0.5), far)
