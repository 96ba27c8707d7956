"""``x ** y`` of float32 vectors for `vmath`: 2**(y * log2|x|) in float64, its sign in float32.

The polynomials are Chebyshev interpolants computed for this file. Their errors together are less
than a tenth of a unit in the last place of float32.
"""

from __future__ import annotations

import math
from typing import Any

from llvmlite import ir

from subgraph.engine.codegen.irtools import F64

from .vector_expr import Expr

# log2((1 + s) / (1 - s)) / s in powers of s**2, quotients between the square roots of 1/2 and 2.
_LOG2 = (
    2.885390081789987,
    0.9617966734515485,
    0.5770835660048659,
    0.41167376623771057,
    0.3407120415619086,
)
# 2**r for |r| up to 1/2.
_EXP2 = (
    1.0,
    0.6931472067028326,
    0.24022650922288757,
    0.05550327226670302,
    0.009618056678524637,
    0.0013400428177615838,
    0.0001546144469856913,
)
_BEYOND = 200.0  # 2**200 is infinite in float32, 2**-200 is 0
# Of float64: explicit bits of the mantissa, bias of the exponent, bits of the root of 1/2.
_MANTISSA, _BIAS, _SQRT_HALF = 52, 1023, 0x3FE6A09E667F3BCD


def power_single(x: Expr, y: Expr) -> Expr:
    """Return ``x ** y`` in float32 with the special values of C's pow; y may be float64."""
    builder, ty = x.builder, x.value.type
    wide = ir.VectorType(F64, ty.count)

    def widened(e: Expr) -> Expr:
        return e if e.value.type == wide else e.like(builder.fpext(e.value, wide))

    size = x.like(builder.fptrunc(_exp2(widened(y) * _log2(widened(x.abs()))).value, ty))
    whole = y.compare("==", y.libm("trunc"))
    half = y * 0.5
    # A negative base keeps its sign for odd exponents; sizes are computed from |x|.
    odd = builder.and_(whole, half.compare("!=", half.libm("trunc")))
    negative = builder.icmp_signed("<", x.bits(), x.integer(0))
    result = (-size).where(builder.and_(odd, negative), size)
    finite_negative = builder.and_(x.compare("<", 0.0), x.compare("!=", -math.inf))
    # C's pow of a negative finite base is NaN unless the exponent is whole or infinite.
    between = builder.and_(builder.not_(whole), y.abs().compare("<", math.inf))
    result = x.const(math.nan).where(builder.and_(finite_negative, between), result)
    one = builder.or_(y.compare("==", 0.0), x.compare("==", 1.0))
    # C defines 1 ** y and x ** 0 as 1 also for NaN, and (-1) ** infinity as 1.
    ones = builder.and_(x.abs().compare("==", 1.0), y.abs().compare("==", math.inf))
    return x.const(1.0).where(builder.or_(one, ones), result)


def _log2(x: Expr) -> Expr:
    """Return log2 of float64 that is not negative and was float32: 0 or a normal number."""
    builder = x.builder

    def shifted(number: int) -> Any:
        return x.integer(number << _MANTISSA)

    moved = builder.add(x.bits(), x.integer((_BIAS << _MANTISSA) - _SQRT_HALF))
    biased = builder.lshr(moved, x.integer(_MANTISSA))
    # An integer in the low bits of the mantissa of 2**52 becomes a float by subtracting 2**52.
    above = builder.or_(biased, shifted(_BIAS + _MANTISSA))
    n = x.from_bits(above) - (2.0**_MANTISSA + _BIAS)
    exponent = builder.shl(biased, x.integer(_MANTISSA))
    near_one = x.from_bits(builder.add(builder.sub(x.bits(), exponent), shifted(_BIAS)))
    s = (near_one - 1.0) / (near_one + 1.0)
    found = (s * s).polynomial(_LOG2).fma(s, n)
    found = x.const(-math.inf).where(x.compare("==", 0.0), found)
    return found.where(x.compare("<", math.inf), x)  # log2 of infinity and of NaN is the same value


def _exp2(x: Expr) -> Expr:
    """Return 2**x in float64, for |x| beyond 200 as for 200: 0 and infinity in float32."""
    builder = x.builder
    bounded = x.at_least(-_BEYOND).at_most(_BEYOND)
    magic = 1.5 * 2.0**_MANTISSA
    shifted = bounded + magic
    power = (bounded - (shifted - magic)).polynomial_in_pairs(_EXP2)
    exponent = builder.shl(shifted.bits(), x.integer(_MANTISSA))
    result = x.from_bits(builder.add(power.bits(), exponent))
    return result.where(builder.fcmp_ordered("ord", x.value, x.value), x)
