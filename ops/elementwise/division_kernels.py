"""Division and remainder of vectors, as LLVM IR; integers divided by zero give 0, never a trap."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from subgraph.dtypes import item_bytes
from subgraph.engine.codegen.irtools import (
    F32,
    F64,
    call_intrinsic,
    emit_binary,
    emit_compare,
    emit_fma,
    is_float,
    is_signed,
    mask_any,
    suffix,
)
from subgraph.system import host

from .vector_kernels import like, merge

Value = Any


def _safe_divisor(builder: Any, dtype: str, b: Value) -> tuple[Value, Value, Value]:
    """Return a divisor that cannot trap, and masks of lanes where the given one is 0 and -1."""
    zero, one = like(b, dtype, 0), like(b, dtype, 1)
    is_zero = builder.icmp_signed("==", b, zero)
    safe = builder.select(is_zero, one, b)
    is_minus = builder.icmp_signed("==", b, like(b, dtype, -1))
    # The division of the least integer by -1 overflows, which traps on x86 like a division by 0.
    if is_signed(dtype):
        safe = builder.select(is_minus, one, safe)
    return safe, is_zero, is_minus


def _quotient(builder: Any, dtype: str, a: Value, b: Value) -> Value:
    """Return the quotient of integers, truncated; the divisor is safe.

    Processors have no division of vectors of integers. That of floats gives the same: numbers of up
    to 16 bits are exact in float32, those of 32 in float64, and a quotient that is no integer is
    further from the next one than it is rounded (relative to it by ``2**-16``, or ``2**-32``). The
    same holds for those of 64 bits while they are below ``2**51``, as indices are.
    """
    signed, bits = is_signed(dtype), item_bytes(dtype) * 8

    def exact() -> Value:
        return builder.sdiv(a, b) if signed else builder.udiv(a, b)

    def by_floats() -> Value:
        wide = ir.VectorType(F64 if bits >= 32 else F32, a.type.count)
        to_float, to_integer = (
            (builder.sitofp, builder.fptosi) if signed else (builder.uitofp, builder.fptoui)
        )
        return to_integer(builder.fdiv(to_float(a, wide), to_float(b, wide)), a.type)

    if not isinstance(a.type, ir.VectorType):
        return exact()
    if bits < 64:
        return by_floats()
    # Of signed numbers, those from -most on become the least unsigned ones.
    most = like(a, dtype, 1 << 51)
    least = like(a, dtype, 1 << 51 if signed else 0)
    bound = builder.add(most, least)
    beyond = [builder.icmp_unsigned(">=", builder.add(each, least), bound) for each in (a, b)]
    is_small = builder.not_(mask_any(builder, builder.or_(*beyond)))
    return merge(builder, is_small, by_floats, exact)


def divide(builder: Any, dtype: str, a: Value, b: Value) -> Value:
    """Divide; integers truncate towards zero, and division by zero gives 0."""
    if is_float(dtype):
        return builder.fdiv(a, b)
    safe, is_zero, is_minus = _safe_divisor(builder, dtype, b)
    if is_signed(dtype):
        result = builder.select(is_minus, builder.neg(a), _quotient(builder, dtype, a, safe))
    else:
        result = _quotient(builder, dtype, a, safe)
    return builder.select(is_zero, like(a, dtype, 0), result)


def c_remainder(builder: Any, dtype: str, a: Value, b: Value) -> Value:
    """Return the remainder with the sign of the dividend (C)."""
    if is_float(dtype):
        return _float_remainder(builder, dtype, a, b)
    safe, _, _ = _safe_divisor(builder, dtype, b)
    # The safe divisor is 1 instead of 0 and -1: the remainder is 0 for all three.
    return builder.sub(a, builder.mul(_quotient(builder, dtype, a, safe), safe))


def _float_remainder(builder: Any, dtype: str, a: Value, b: Value) -> Value:
    """Return C's fmod: computed from the quotient while quotients are small, else lane by lane.

    A rounded quotient is at most the next integer; the remainder then has the wrong sign and is
    corrected by one divisor. The remainder is exact with a fused multiply-add; without one, float32
    is computed in float64.
    """
    fused, single = host.isa().fma, dtype == "float32"
    if not fused and not single:
        return builder.frem(a, b)
    wide = a.type if fused else ir.VectorType(F64, a.type.count)
    x, y = (v if fused else builder.fpext(v, wide) for v in (a, b))
    work = dtype if fused else "float64"

    def unary(name: str, *values: Value) -> Value:
        return call_intrinsic(builder, f"llvm.{name}.{suffix(wide)}", wide, values)

    quotient = builder.fdiv(x, y)
    # Quotients below this bound are at most 1/2 apart, so that rounding can carry one to the next
    # integer, but not beyond it.
    most = like(x, work, 2.0 ** (22 if single else 51))
    small = builder.fcmp_ordered("<", unary("fabs", quotient), most)
    zero = like(x, work, 0.0)

    def common() -> Value:
        rest = emit_fma(builder, builder.fneg(unary("trunc", quotient)), y, x)
        # A dividend smaller than the divisor is the remainder, also if the divisor is infinite.
        below = builder.fcmp_ordered("<", unary("fabs", x), unary("fabs", y))
        rest = builder.select(below, x, rest)
        signed = builder.fmul(rest, unary("copysign", like(x, work, 1.0), x))
        wrong = builder.fcmp_ordered("<", signed, zero)
        rest = builder.select(wrong, builder.fadd(rest, unary("copysign", y, x)), rest)
        rest = unary("copysign", rest, x)
        return rest if fused else builder.fptrunc(rest, a.type)

    beyond = mask_any(builder, builder.not_(small))
    return merge(builder, builder.not_(beyond), common, lambda: builder.frem(a, b))


def python_remainder(builder: Any, dtype: str, a: Value, b: Value) -> Value:
    """Return the remainder with the sign of the divisor (Python)."""
    rest = c_remainder(builder, dtype, a, b)
    if not is_float(dtype) and not is_signed(dtype):
        return rest
    zero = like(a, dtype, 0)
    unequal = emit_compare(builder, "!=", dtype, rest, zero)
    differ = builder.xor(
        emit_compare(builder, "<", dtype, rest, zero), emit_compare(builder, "<", dtype, b, zero)
    )
    moved = emit_binary(builder, "+", dtype, rest, b)
    result = builder.select(builder.and_(unequal, differ), moved, rest)
    if is_float(dtype):  # a zero has the sign of the divisor
        signed = call_intrinsic(builder, f"llvm.copysign.{suffix(a.type)}", a.type, [zero, b])
        result = builder.select(emit_compare(builder, "==", dtype, rest, zero), signed, result)
    return result
