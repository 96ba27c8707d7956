"""Elementary functions of float32 and float64 vectors, emitted as arithmetic without library calls.

``function("exp", dtype, lanes)`` is the intrinsic ``vec -> vec`` for kernels; ``emit(name, builder,
value)`` emits the same in loops written in IR. Infinities and NaN follow IEEE 754. The errors, 1 to
5 units in the last place, are stated and checked in ``tests/engine/codegen/test_vmath.py``.

Polynomials are Chebyshev interpolants computed for this file, coefficients from the constant
upwards. Arguments are reduced as by Cody and Waite ("Software Manual for the Elementary Functions",
1980); logarithms follow fdlibm.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

from llvmlite import ir

from subgraph.engine.codegen.irtools import (
    F64,
    I32,
    call_intrinsic,
    define,
    emit_fma,
    splat_value,
    suffix,
    vec_type,
)
from subgraph.errors import ConfigError
from subgraph.system import host

from .vector_expr import Expr
from .vmath_angles import acos, asin, atan, sincos

# (e**r - 1 - r) / r**2 for |r| <= ln(2) / 2.
_EXP = {
    True: (0.499999934, 0.166665204, 0.0416683909, 0.00836874557, 0.00138145356),
    False: (
        0.5,
        0.16666666666666669,
        0.04166666666662413,
        0.008333333333330062,
        0.0013888888917213717,
        0.00019841269863053618,
        2.4801521295954376e-05,
        2.7557268459997064e-06,
        2.7620088445409746e-07,
        2.510038549551032e-08,
    ),
}
# (log(1 + f) - f + f**2 / 2) / f**3 between the square roots of 1/2 and 2.
_LOG_SINGLE = (
    0.333333313,
    -0.24999997,
    0.200007156,
    -0.166678026,
    0.142490581,
    -0.124256872,
    0.116854198,
    -0.114797339,
    0.0697161183,
)
# (log((1 + s) / (1 - s)) / s - 2) / s**2 in powers of s**2, for quotients between the same roots.
_LOG_DOUBLE = (
    0.6666666666666666,
    0.4000000000000088,
    0.28571428570803614,
    0.22222222391713917,
    0.18181795640132906,
    0.15386239702814658,
    0.13268773138656886,
    0.13086626147840102,
)
# erf(x) / x - 1 in powers of x**2, |x| up to 1 (double).
_ERF_SMALL = (
    0.1283791670955126,
    -0.37612638903183754,
    0.1128379167095512,
    -0.02686617064512984,
    0.0052239776254232985,
    -0.000854832702193483,
    0.00012055332902888736,
    -1.4925647567519332e-05,
    1.6462045441468418e-06,
    -1.6364642158167616e-07,
    1.4792401209404813e-08,
    -1.216456005728345e-09,
    8.709045129053106e-11,
    -4.230945824295338e-12,
)
# -log(erfc(t)) / t - 1 for larger t, up to 6 (double).
_ERF_LARGE = (
    0.12837930324929545,
    0.6366183593979604,
    0.1027795346019184,
    -0.019149840096447227,
    -0.00016255281753077566,
    0.0016197799433163777,
    -0.0004924116640149381,
    -7.392856934456933e-05,
    0.00014708725172721374,
    -8.542127890581203e-05,
    3.3893684821510686e-05,
    -1.0447328429503091e-05,
    2.6113657009940175e-06,
    -5.37988828544478e-07,
    9.17267395120448e-08,
    -1.2899259906677758e-08,
    1.4820414048361458e-09,
    -1.3691237118123421e-10,
    9.923279927507246e-12,
    -5.43328791282143e-13,
    2.1122079183675947e-14,
    -5.193832419317427e-16,
    6.070719456365928e-18,
)
# erf(x / sqrt(2)) / x for |x| up to _GELU_MOST as a quotient of polynomials in x**2 (relative error
# 2.2e-8, found by reweighted least squares); beyond it erf is 1 in float32.
_GELU_MOST = 5.6
_GELU_OVER = (0.797884544, 0.0678496227, 0.00935414797, 3.37769948e-4, 1.25787058e-5, 4.45995785e-8)
_GELU_UNDER = (1.0, 0.25170322, 0.0286750981, 1.88523866e-3, 7.33294725e-5, 1.17969616e-6)
# tanh(x) / x for |x| up to _TANH_MOST likewise (relative error 2.1e-8); beyond it tanh is 1 in
# float32.
_TANH_MOST = 9.02
_TANH_OVER = (1.0, 0.133797273, 0.00349404593, 2.05836568e-05, 1.33192906e-08)
_TANH_UNDER = (1.0, 0.467130423, 0.0258711167, 0.000328311085, 7.7621138e-07)
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
# 2**f for f from 0 to 1 (relative error 7.5e-5).
_POWER = (0.99992526, 0.69583317, 0.2260679, 0.07802411)
_BEYOND = 200.0  # 2**200 is infinite in float32, 2**-200 is 0


def _reduced(x: Expr) -> tuple[Expr, Any, Expr]:
    """Split x = n * ln 2 + r with |r| <= ln(2) / 2; return n, n as an integer, and e**r - 1."""
    f = x.format
    n, exponent = x.nearest(1.0 / math.log(2.0))
    r = n.fma(-f.ln2_high, x)
    r = n.fma(-f.ln2_low, r)
    return n, exponent, r.polynomial(_EXP[f.single]).fma(r * r, r)


def _exp(x: Expr) -> Expr:
    """Return e**x in the full range, with subnormal results."""
    f = x.format
    n, exponent, power = _reduced(x.at_least(f.exp_least).at_most(f.exp_most))
    if host.has_vscalef():
        return (power + 1.0).scaled(n)
    # 2**n as two factors: n may lie beyond the exponents of normal numbers on both sides.
    half = x.builder.ashr(exponent, x.integer(1))
    rest = x.builder.sub(exponent, half)
    return (power + 1.0) * x.power_of_two(half) * x.power_of_two(rest)


def _exp_unbounded(x: Expr, sign: float = 1.0, *, coarse: bool = False) -> Expr:
    """Return e**(sign * x) for -87 (float64: -708) <= sign * x <= 87 (708), and NaN for NaN.

    For other x the result is unspecified. ``shifted`` holds n and the bias of exponents in its
    lowest bits, so that shifting them makes 2**n. The product with e**r is NaN for a NaN of any
    bits; adding n to the exponent bits of e**r would make numbers of some.

    Args:
        x: The argument.
        sign: 1.0 or -1.0.
        coarse: For float32 with FMA: reduce by ln 2 in one part instead of two, which adds a
            relative error of |x| * 2.8e-9.
    """
    f, builder = x.format, x.builder
    magic = 1.5 * 2.0**f.mantissa + f.bias
    shifted = x.fma(sign / math.log(2.0), magic)
    n = shifted - magic
    x = x if sign > 0 else -x
    if coarse and f.single and host.isa().fma:
        r = n.fma(-math.log(2.0), x)
    else:
        r = n.fma(-f.ln2_low, n.fma(-f.ln2_high, x))
    # Vectors of all widths have the same result on a machine: the product by 2**n is exact.
    if host.has_vscalef():
        return r.polynomial((1.0, 1.0, *_EXP[f.single])).scaled(n)
    power = r.polynomial_in_pairs((1.0, *_EXP[f.single])).fma(r, 1.0)
    return power * x.from_bits(builder.shl(shifted.bits(), x.integer(f.mantissa)))


def _exp_flushed(x: Expr) -> Expr:
    """Return e**x for x up to 87 (float64: 708), and 0 where that would be a subnormal number.

    A subnormal result takes Intel's processors hundreds of cycles: attention with a quarter of its
    keys masked took twice as long (measured, Sapphire Rapids).
    """
    below = x.compare("<", -x.format.exp_normal)
    return x.const(0.0).where(below, _exp_unbounded(x, coarse=True))


def _expm1_negative(x: Expr) -> Expr:
    """Return e**x - 1 for x <= 0, and for x so little above that 2**n does not overflow."""
    _, exponent, power = _reduced(x.at_least(x.format.expm1_least))
    scale = x.power_of_two(exponent)
    return power.fma(scale, scale - 1.0)


def _expm1(x: Expr) -> Expr:
    """Return e**x - 1 as 2**n * (e**r - 1) + (2**n - 1)."""
    f = x.format
    _, exponent, power = _reduced(x.at_least(f.expm1_least).at_most(f.exp_most))
    # With 2**(n - 1), which is doubled at the end: 2**n overflows before the result does.
    scale = x.power_of_two(x.builder.sub(exponent, x.integer(1)))
    large = power.fma(scale, scale - 0.5) * 2.0
    # For n = 0 halving and doubling would lose the lowest bits of subnormal results.
    small = x.builder.icmp_signed("==", exponent, x.integer(0))
    result = power.where(small, large)
    return x.where(x.compare("==", 0.0), result)


def _sigmoid(x: Expr) -> Expr:
    """Return 1 / (1 + e**-x)."""
    if not host.has_vscalef():
        bounded = x.at_most(x.format.exp_normal)
        quotient = x.const(1.0) / (_exp_unbounded(bounded, -1.0) + 1.0)
        return x.const(0.0).where(x.compare("<", -x.format.exp_normal), quotient)
    # The exponent is never positive, so that nothing overflows; both signs share the denominator.
    e = _exp(-x.abs())
    numerator = x.const(1.0).where(x.compare(">=", 0.0), e)
    return numerator / (e + 1.0)


def _tanh(x: Expr) -> Expr:
    """Return tanh(x): float32 by a rational function, float64 as -e / (e + 2), e = expm1(-2|x|)."""
    if x.format.single:
        bounded = x.at_least(-_TANH_MOST).at_most(_TANH_MOST)
        square = bounded * bounded
        over = bounded * square.polynomial(_TANH_OVER)
        return (over / square.polynomial(_TANH_UNDER)).at_least(-1.0).at_most(1.0)
    e = _expm1_negative(x.abs() * -2.0)
    result = (-e / (e + 2.0)).copysign(x)
    # Below 1e-9 tanh(x) rounds to x; the formula would lose subnormal numbers.
    return result.where(x.abs().compare(">=", 1e-9), x)


def _log(x: Expr) -> Expr:
    """Return the natural logarithm, for subnormal numbers, 0, infinity and NaN, too."""
    f = x.format
    tiny = x.compare("<", f.least_normal)
    lift = f.mantissa + 1
    # Subnormal numbers have no exponent of their own; they are scaled to normal ones, and the
    # exponent is corrected below.
    y = (x * 2.0**lift).where(tiny, x)
    lifted = x.const(float(-lift)).where(tiny, 0.0)
    builder = x.builder
    # Subtracting the bits of the root of 1/2 makes the exponent that of a quotient between the
    # roots of 1/2 and 2, which is where the polynomials hold.
    offset = builder.sub(y.bits(), x.integer(f.sqrt_half))
    exponent = builder.ashr(offset, x.integer(f.mantissa))
    moved = builder.sub(y.bits(), builder.shl(exponent, x.integer(f.mantissa)))
    n = x.like(builder.sitofp(exponent, x.value.type)) + lifted
    result = _log_near_one(x.from_bits(moved) - 1.0, n)
    infinity = x.const(math.inf)
    result = infinity.where(x.compare("==", math.inf), result)
    result = (-infinity).where(x.compare("==", 0.0), result)
    bad = builder.fcmp_unordered("<", x.value, x.const(0.0).value)
    return x.const(math.nan).where(bad, result)


def _log_near_one(g: Expr, n: Expr) -> Expr:
    """Return log(1 + g) + n * ln 2 for 1 + g between the square roots of 1/2 and 2."""
    f = g.format
    half_square = g * g * 0.5
    if f.single:
        cube = g * g * g
        tail = g.polynomial(_LOG_SINGLE).fma(cube, n * f.ln2_low)
        return n.fma(f.ln2_high, (tail - half_square) + g)
    s = g / (g + 2.0)
    z = s * s
    r = z * z.polynomial(_LOG_DOUBLE)
    tail = (half_square + r).fma(s, n * f.ln2_low)
    return n.fma(f.ln2_high, g - (half_square - tail))


def _log1p(x: Expr) -> Expr:
    """Return log(1 + x) as log(u) + (x - (u - 1)) / u, where u is 1 + x rounded."""
    u = x + 1.0
    # ``x - (u - 1)`` is what the rounding of ``1 + x`` lost; divided by u it is the first-order
    # change of the logarithm.
    correction = (x - (u - 1.0)) / u
    infinite = u.compare("==", math.inf)
    result = _log(u) + x.const(0.0).where(infinite, correction)
    # At the pole the correction is 0 / 0.
    pole = x.compare("==", -1.0)
    result = x.const(-math.inf).where(pole, result)
    return x.where(x.abs().compare("<", 2.0**-30 if x.format.single else 2.0**-60), result)


def _erf(x: Expr) -> Expr:
    """Return the error function; float64: a polynomial up to 1, then 1 - e**-polynomial."""
    if x.format.single:
        return _erf_single(x, math.sqrt(2.0))
    t = x.abs()
    square = x * x
    small = square.polynomial(_ERF_SMALL).fma(x, x)
    bounded = t.at_most(6.0)
    exponent = bounded.polynomial(_ERF_LARGE).fma(bounded, bounded)
    large = (-_expm1_negative(-exponent)).copysign(x)
    return large.where(t.compare(">", 1.0), small)


def _erf_single(x: Expr, scale: float) -> Expr:
    """Return erf(scale * x / sqrt(2)) of float32, the scale multiplied into the coefficients."""
    most = _GELU_MOST / scale
    bounded = x.at_least(-most).at_most(most)
    square = bounded * bounded
    over = [c * scale ** (2 * k + 1) for k, c in enumerate(_GELU_OVER)]
    under = [c * scale ** (2 * k) for k, c in enumerate(_GELU_UNDER)]
    quotient = bounded * square.polynomial_in_pairs(over) / square.polynomial_in_pairs(under)
    return x.const(1.0).copysign(x).where(x.abs().compare(">=", most), quotient)


def _silu(x: Expr) -> Expr:
    """Return x * sigmoid(x)."""
    if host.has_vscalef():
        return x * _sigmoid(x)
    most = x.format.exp_normal
    quotient = x / (_exp_unbounded(x.at_most(most), -1.0) + 1.0)
    # Where e**-x exceeds the normal numbers the result is 0; for -inf NaN, as -inf * 0 is.
    return quotient.where(x.compare(">=", -most), x * 0.0)


def _gelu(x: Expr) -> Expr:
    """Return x / 2 * (1 + erf(x / sqrt(2)))."""
    half = x * 0.5
    if not x.format.single:
        return half.fma(_erf(x * math.sqrt(0.5)), half)
    return half.fma(_erf_single(x, 1.0), half)


def _exp_bfloat16(x: Expr) -> Expr:
    """Return e**x for x up to 87, and 0 where that would be a subnormal number."""
    if not host.has_vscalef():
        return _exp_flushed(x)
    below = x.compare("<", -x.format.exp_normal)
    return x.const(0.0).where(below, _power(x * (1.0 / math.log(2.0))))


def _power(x: Expr) -> Expr:
    """Return 2**x with a relative error below 2**-13."""
    return x.fraction().polynomial(_POWER).scaled(x)


def _sigmoid_bfloat16(x: Expr) -> Expr:
    """Return 1 / (1 + e**-x)."""
    if not host.has_vscalef():
        return _sigmoid(x)
    return (_power(x * (-1.0 / math.log(2.0))) + 1.0).rough_reciprocal()


def _silu_bfloat16(x: Expr) -> Expr:
    """Return x * sigmoid(x)."""
    return x * _sigmoid_bfloat16(x) if host.has_vscalef() else _silu(x)


def _softplus(x: Expr) -> Expr:
    """Return log(1 + e**x) as max(x, 0) + log1p(e**-|x|)."""
    zero = x.const(0.0)
    positive = zero.where(x.compare("<", 0.0), x)
    return positive + _log1p(_exp(-x.abs()))


_FUNCTIONS: dict[str, Callable[[Expr], Expr]] = {
    "exp": _exp,
    "exp_flushed": _exp_flushed,
    "expm1": _expm1,
    "log": _log,
    "log1p": _log1p,
    "tanh": _tanh,
    "sigmoid": _sigmoid,
    "erf": _erf,
    "sin": lambda x: sincos(x, 0),
    "cos": lambda x: sincos(x, 1),
    "asin": asin,
    "acos": acos,
    "atan": atan,
    "silu": _silu,
    "gelu": _gelu,
    "softplus": _softplus,
    "exp_bfloat16": _exp_bfloat16,
    "sigmoid_bfloat16": _sigmoid_bfloat16,
    "silu_bfloat16": _silu_bfloat16,
}
NAMES = tuple(sorted(_FUNCTIONS))


def emit(name: str, builder: Any, value: Any) -> Any:
    """Emit an elementary function; return the LLVM value of the result.

    Args:
        name: One of ``NAMES``. ``"exp_flushed"`` is exp with a faster end of its range: the
            argument must not exceed 87 (float64: 708), and results may be 0 where exp's would be
            subnormal. A name that ends with ``_bfloat16`` is for results that are rounded to
            bfloat16, or that follow products of it, in float32: with AVX-512 their relative error
            is below 2**-12, an eighth of that rounding; ``"exp_bfloat16"`` has the range of
            ``"exp_flushed"``.
        builder: LLVM's builder.
        value: Vector or scalar of float32 or float64.

    Raises:
        ConfigError: There is no function of that name.
    """
    if name not in _FUNCTIONS:
        raise ConfigError(f"no vector function {name!r}; there are {', '.join(NAMES)}")
    if isinstance(value.type, ir.VectorType):
        return _FUNCTIONS[name](Expr(builder, value)).value
    lanes = _FUNCTIONS[name](Expr(builder, splat_value(builder, value, 1))).value
    return builder.extract_element(lanes, I32(0))


@cache
def function(name: str, dtype: str, lanes: int) -> Any:
    """Return the intrinsic ``(vec) -> vec`` of an elementary function.

    Args:
        name: As in `emit`.
        dtype: ``"float32"`` or ``"float64"``.
        lanes: Elements of the vector.
    """
    v = vec_type(dtype, lanes)
    return define(v, [v], lambda b, c, a: emit(name, b, a[0]))


@cache
def power(dtype: str, lanes: int) -> Any:
    """Return the intrinsic ``(x vec, y vec) -> vec`` of ``x ** y``, with C's special values.

    float32 is computed in float64 as 2**(y * log2|x|); float64 calls the C library lane by lane.
    """
    v = vec_type(dtype, lanes)
    return define(v, [v, v], lambda b, c, a: emit_power(b, a[0], a[1]))


def emit_power(builder: Any, x: Any, y: Any) -> Any:
    """Emit `power`; return the LLVM value of the result.

    Args:
        builder: LLVM's builder.
        x: Vector of float32 or float64.
        y: Vector of the same type; of float64 for either.
    """
    if x.type.element == F64:
        return call_intrinsic(builder, f"llvm.pow.{suffix(x.type)}", x.type, [x, y])
    return power_single(Expr(builder, x), Expr(builder, y)).value


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
    builder, mantissa, bias = x.builder, x.format.mantissa, x.format.bias

    def shifted(number: int) -> Any:
        return x.integer(number << mantissa)

    moved = builder.add(x.bits(), x.integer((bias << mantissa) - x.format.sqrt_half))
    biased = builder.lshr(moved, x.integer(mantissa))
    # An integer in the low bits of the mantissa of 2**52 becomes a float by subtracting 2**52.
    above = builder.or_(biased, shifted(bias + mantissa))
    n = x.from_bits(above) - (2.0**mantissa + bias)
    exponent = builder.shl(biased, x.integer(mantissa))
    near_one = x.from_bits(builder.add(builder.sub(x.bits(), exponent), shifted(bias)))
    s = (near_one - 1.0) / (near_one + 1.0)
    found = (s * s).polynomial(_LOG2).fma(s, n)
    found = x.const(-math.inf).where(x.compare("==", 0.0), found)
    return found.where(x.compare("<", math.inf), x)  # log2 of infinity and of NaN is the same value


def _exp2(x: Expr) -> Expr:
    """Return 2**x in float64, for |x| beyond 200 as for 200: 0 and infinity in float32."""
    builder, mantissa = x.builder, x.format.mantissa
    bounded = x.at_least(-_BEYOND).at_most(_BEYOND)
    magic = 1.5 * 2.0**mantissa
    shifted = bounded + magic
    power = (bounded - (shifted - magic)).polynomial_in_pairs(_EXP2)
    exponent = builder.shl(shifted.bits(), x.integer(mantissa))
    result = x.from_bits(builder.add(power.bits(), exponent))
    return result.where(builder.fcmp_ordered("ord", x.value, x.value), x)


def emit_quotient(builder: Any, x: Any, divisor: Any, inverse: Any, rest: Any) -> Any:
    """Emit ``x / divisor`` of vectors of float32, rounded once, without a division.

    ``inverse`` is ``1 / divisor``, rounded, and ``rest`` is ``(1 - inverse * divisor) * inverse``
    with one rounding of each operation (of which the first two are fused): what the inverse lacks.
    Then the first estimate is next to the quotient. A step by its remainder, which is exact, gives
    the rounded quotient (Markstein, "Computation of elementary functions on the IBM RISC
    System/6000 processor", 1990, theorem 8). No intermediate result may be subnormal or infinite,
    and the machine must have a fused multiply-add.
    """
    minus = builder.fneg(divisor)
    better = emit_fma(builder, x, rest, builder.fmul(x, inverse))
    remainder = emit_fma(builder, better, minus, x)
    return emit_fma(builder, remainder, inverse, better)
