"""QuantizeLinear to 8 bits in registers, for machines where a division takes most of its time.

A vector of 512 bits is divided in 16 cycles on Intel's processors. The quotient by a number that is
the same for all elements takes four multiplications instead, and is rounded as by a division.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from subgraph.engine.codegen.irtools import F32, I8, I32, call_intrinsic, emit_fma
from subgraph.engine.codegen.vmath import emit_quotient

from .vector_kernels import like, merge

Value = Any
# Between these scales no intermediate result of a quotient that matters is subnormal or infinite.
_LEAST_SCALE, _MOST_SCALE = 2.0**-96, 2.0**96
_ROUNDING = float(3 << 22)  # 1.5 * 2**23: a number that is added is rounded to an integer
_ROUNDING_BITS = 0x4B400000  # its bits; an integer that was added is in the low ones
BOUNDS = {"uint8": (0.0, 255.0), "int8": (-128.0, 127.0)}


def quantized(builder: Any, x: Value, scale: Value, zero: Value | None, dtype: str) -> Value:
    """Emit ``clip(rint(x / scale) + zero)`` as a vector of 8-bit integers; 0 for NaN.

    Args:
        builder: LLVM's builder.
        x: Vector of float32.
        scale: Vector of float32, the same number in all lanes, which does not change in a loop.
        zero: Vector of zero points of ``dtype``; None: 0.
        dtype: ``"uint8"`` or ``"int8"``.
    """
    first = builder.extract_element(scale, I32(0))
    size = call_intrinsic(builder, "llvm.fabs.f32", F32, [first])
    usual = builder.and_(
        builder.fcmp_ordered(">=", size, F32(_LEAST_SCALE)),
        builder.fcmp_ordered("<=", size, F32(_MOST_SCALE)),
    )
    quotient = merge(
        builder, usual, lambda: _quotient(builder, x, scale), lambda: builder.fdiv(x, scale)
    )
    whole = ir.VectorType(I32, x.type.count)
    low, high = (like(x, "float32", bound) for bound in BOUNDS[dtype])
    point = like(x, "int32", 0)
    if zero is not None:
        point = (builder.zext if dtype == "uint8" else builder.sext)(zero, whole)
        real = builder.sitofp(point, x.type)
        low, high = builder.fsub(low, real), builder.fsub(high, real)
    # To clip before rounding is the same, as the bounds are integers.
    value = builder.select(builder.fcmp_ordered("<", quotient, high), quotient, high)
    value = builder.select(builder.fcmp_ordered(">", value, low), value, low)
    bits = builder.bitcast(builder.fadd(value, like(x, "float32", _ROUNDING)), whole)
    number = builder.add(builder.sub(bits, like(x, "int32", _ROUNDING_BITS)), point)
    bytes_ = builder.trunc(number, ir.VectorType(I8, x.type.count))
    known = builder.fcmp_ordered("ord", quotient, quotient)
    return builder.select(known, bytes_, bytes_.type(None))


def _quotient(builder: Any, x: Value, divisor: Value) -> Value:
    """Emit ``x / divisor``, rounded once, for a divisor between the scales above."""
    one = like(x, "float32", 1.0)
    inverse = builder.fdiv(one, divisor)
    rest = builder.fmul(emit_fma(builder, inverse, builder.fneg(divisor), one), inverse)
    result = emit_quotient(builder, x, divisor, inverse, rest)
    # An infinite estimate has no remainder.
    known = builder.fcmp_ordered("ord", result, result)
    return builder.select(known, result, builder.fmul(x, inverse))
