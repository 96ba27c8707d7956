"""Primitive operations on vectors, as LLVM IR: the instructions of the elementwise programs.

A primitive is named with the dtype in which it computes, ``add.float32``; `apply` emits one. Values
of dtype ``bool`` are vectors of bits; float16 and bfloat16 are computed in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir

from subgraph.dtypes import HALF_FLOATS, compute_dtype
from subgraph.engine.codegen import vmath
from subgraph.engine.codegen.irtools import (
    ELEMENTS,
    F16,
    F64,
    I1,
    I8,
    I16,
    I32,
    I64,
    bf16_to_f32,
    call_intrinsic,
    emit_binary,
    emit_compare,
    emit_convert,
    emit_fma,
    f32_to_bf16,
    is_float,
    is_signed,
    mask_any,
    suffix,
)
from subgraph.system import host

Value = Any


def element(dtype: str) -> Any:
    """Return the LLVM type of one element in a register."""
    return I1 if dtype == "bool" else ELEMENTS[compute_dtype(dtype)][1]


def storage(dtype: str) -> tuple[Any, int]:
    """Return the LLVM type and size in bytes of one element in memory."""
    if dtype in HALF_FLOATS:
        return I16, 2
    if dtype == "bool":
        return I8, 1
    _, ty, size = ELEMENTS[dtype]
    return ty, size


def from_memory(builder: Any, raw: Value, dtype: str) -> Value:
    """Convert a vector as it is stored to one to compute with.

    Args:
        builder: LLVM IR builder.
        raw: The loaded vector, of elements of `storage`.
        dtype: Dtype of the tensor.
    """
    if dtype == "bool":
        return builder.icmp_unsigned("!=", raw, raw.type(None))
    if dtype == "bfloat16":
        return bf16_to_f32(builder, raw)
    if dtype == "float16":
        half = builder.bitcast(raw, ir.VectorType(F16, raw.type.count))
        return builder.fpext(half, ir.VectorType(ir.FloatType(), raw.type.count))
    return raw


def to_memory(builder: Any, value: Value, dtype: str) -> Value:
    """Convert a computed vector to one to store, rounded to ``dtype``.

    Args:
        builder: LLVM IR builder.
        value: The vector, of elements of `element`.
        dtype: Dtype of the tensor.
    """
    if dtype == "bool":
        return builder.zext(value, ir.VectorType(I8, value.type.count))
    if dtype == "bfloat16":
        return f32_to_bf16(builder, value)
    if dtype == "float16":
        half = builder.fptrunc(value, ir.VectorType(F16, value.type.count))
        return builder.bitcast(half, ir.VectorType(I16, value.type.count))
    return value


def constant(dtype: str, number: float, lanes: int) -> Value:
    """Return a vector constant with one number in all lanes.

    Args:
        dtype: Dtype in which the number is used.
        number: The number; truncated for integers.
        lanes: Elements of the vector.
    """
    ty = element(dtype)
    is_real = isinstance(ty, (ir.FloatType, ir.DoubleType))
    one = ir.Constant(ty, float(number) if is_real else int(number))
    return ir.Constant(ir.VectorType(ty, lanes), [one] * lanes)


def _like(value: Value, dtype: str, number: float) -> Value:
    return constant(dtype, number, value.type.count)


# ---------------------------------------------------------------- unary


def _libm(name: str) -> Callable[[Any, str, Value], Value]:
    """Return the emitter of an LLVM intrinsic of one operand."""

    def emit(builder: Any, dtype: str, x: Value) -> Value:
        return call_intrinsic(builder, f"llvm.{name}.{suffix(x.type)}", x.type, [x])

    return emit


def _per_lane(name: str) -> Callable[[Any, str, Value], Value]:
    """Return the emitter of a function of the C library, called for each lane."""

    def emit(builder: Any, dtype: str, x: Value) -> Value:
        ty = x.type.element
        symbol = f"{name}f" if dtype == "float32" else name
        result = ir.Constant(x.type, ir.Undefined)
        for lane in range(x.type.count):
            one = builder.extract_element(x, I32(lane))
            result = builder.insert_element(
                result, call_intrinsic(builder, symbol, ty, [one]), I32(lane)
            )
        return result

    return emit


def _vmath(name: str) -> Callable[[Any, str, Value], Value]:
    return lambda builder, dtype, x: vmath.emit(name, builder, x)


def _neg(builder: Any, dtype: str, x: Value) -> Value:
    return builder.fneg(x) if is_float(dtype) else builder.neg(x)


def _abs(builder: Any, dtype: str, x: Value) -> Value:
    if is_float(dtype):
        return call_intrinsic(builder, f"llvm.fabs.{suffix(x.type)}", x.type, [x])
    if not is_signed(dtype):
        return x
    return builder.select(builder.icmp_signed("<", x, x.type(None)), builder.neg(x), x)


def _sign(builder: Any, dtype: str, x: Value) -> Value:
    zero, one = _like(x, dtype, 0), _like(x, dtype, 1)
    result = builder.select(emit_compare(builder, ">", dtype, x, zero), one, x)
    if is_float(dtype):
        below = emit_compare(builder, "<", dtype, x, zero)
        result = builder.select(below, _like(x, dtype, -1), result)
        return builder.select(emit_compare(builder, "==", dtype, x, zero), zero, result)
    if is_signed(dtype):
        below = emit_compare(builder, "<", dtype, x, zero)
        result = builder.select(below, _like(x, dtype, -1), result)
    return result


def _not(builder: Any, dtype: str, x: Value) -> Value:
    return builder.not_(x)


def _recip(builder: Any, dtype: str, x: Value) -> Value:
    return builder.fdiv(_like(x, dtype, 1), x)


def _isnan(builder: Any, dtype: str, x: Value) -> Value:
    return builder.fcmp_unordered("uno", x, x)


def _round(storage_dtype: str) -> Callable[[Any, str, Value], Value]:
    def emit(builder: Any, dtype: str, x: Value) -> Value:
        return from_memory(builder, to_memory(builder, x, storage_dtype), storage_dtype)

    return emit


UNARY: dict[str, Callable[[Any, str, Value], Value]] = {
    "neg": _neg,
    "abs": _abs,
    "sign": _sign,
    "not": _not,
    "recip": _recip,
    "isnan": _isnan,
    "round_float16": _round("float16"),
    "round_bfloat16": _round("bfloat16"),
    **{name: _vmath(name) for name in vmath.NAMES},
    **{name: _libm(name) for name in ("sqrt", "floor", "ceil", "rint", "trunc")},
    **{name: _libm(name) for name in ("tan", "sinh", "cosh")},
    **{name: _per_lane(name) for name in ("asinh", "acosh", "atanh")},
}

# ---------------------------------------------------------------- binary


def _arithmetic(op: str) -> Callable[[Any, str, Value, Value], Value]:
    return lambda builder, dtype, a, b: emit_binary(builder, op, dtype, a, b)


def _bits(op: str) -> Callable[[Any, str, Value, Value], Value]:
    return lambda builder, dtype, a, b: getattr(builder, op)(a, b)


def _compare(op: str) -> Callable[[Any, str, Value, Value], Value]:
    def emit(builder: Any, dtype: str, a: Value, b: Value) -> Value:
        if dtype == "bool":
            return builder.icmp_unsigned(op, a, b)
        return emit_compare(builder, op, dtype, a, b)

    return emit


def _number(vector: Value) -> float:
    """Return the number that a vector constant has in all lanes; NaN for any other value."""
    elements: Any = getattr(vector, "constant", None)
    return math.nan if elements is None else float(elements[0].constant)


def _pick(op: str) -> Callable[[Any, str, Value, Value], Value]:
    """Return the emitter of ``max`` (">") or ``min`` ("<"); NaN in the first operand stays NaN."""

    def emit(builder: Any, dtype: str, a: Value, b: Value) -> Value:
        bound = _number(b)
        if is_float(dtype) and not math.isnan(bound):
            # Between -0 and 0 the bound is chosen, as by the code below.
            beyond = op if bound else f"{op}="
            return builder.select(emit_compare(builder, beyond, dtype, b, a), b, a)
        chosen = builder.select(emit_compare(builder, op, dtype, a, b), a, b)
        if is_float(dtype):
            chosen = builder.select(builder.fcmp_unordered("uno", a, a), a, chosen)
        return chosen

    return emit


def _safe_divisor(builder: Any, dtype: str, b: Value) -> tuple[Value, Value, Value]:
    """Return a divisor that cannot trap, and masks of lanes where the given one is 0 and -1."""
    zero, one = _like(b, dtype, 0), _like(b, dtype, 1)
    is_zero = builder.icmp_signed("==", b, zero)
    safe = builder.select(is_zero, one, b)
    is_minus = builder.icmp_signed("==", b, _like(b, dtype, -1))
    if is_signed(dtype):
        safe = builder.select(is_minus, one, safe)
    return safe, is_zero, is_minus


def _repeats(value: Value) -> bool:
    """Return whether a vector is a broadcast of one element, so that it is loop-invariant."""
    return bool(getattr(value, "opname", "") == "shufflevector")


def _quotient(builder: Any, dtype: str, a: Value, b: Value, repeated: bool) -> Value:
    """Divide integers towards zero.

    No instruction set has a vector division of integers, so 32 bits and less are divided in
    float64: it holds the operands exactly, and a quotient of two of them is never so near to the
    next integer that rounding would reach it.

    Args:
        builder: LLVM IR builder.
        dtype: Integer dtype of both operands.
        a: Dividend.
        b: Divisor, of `_safe_divisor`.
        repeated: Whether all lanes of the divisor hold one number: then it is inverted once.
    """
    signed = is_signed(dtype)
    if a.type.element.width > 32:
        return _long_quotient(builder, signed, a, b)
    wide = ir.VectorType(ir.DoubleType(), a.type.count)
    over, under = ((builder.sitofp if signed else builder.uitofp)(v, wide) for v in (a, b))
    to_integer = builder.fptosi if signed else builder.fptoui
    if repeated:
        return to_integer(builder.fmul(over, _reciprocal(builder, under)), a.type)
    return to_integer(builder.fdiv(over, under), a.type)


def _reciprocal(builder: Any, divisor: Value) -> Value:
    """Return a float64 factor that replaces the division by an integer of 32 bits.

    The factor is slightly more than 1 / divisor: products that are integers stay at or above them
    when they are rounded, and no other product reaches the next integer, which is at least 1 /
    divisor away. For a divisor that many elements share, the one division is outside the loop.
    """
    one, more = (
        ir.Constant(divisor.type, [ir.Constant(F64, value)] * divisor.type.count)
        for value in (1.0, 1.0 + 2.0**-50)
    )
    return builder.fmul(builder.fdiv(one, divisor), more)


def _long_quotient(builder: Any, signed: bool, a: Value, b: Value) -> Value:
    """Divide integers of 64 bits: in float64 if all are below 2**51, else lane by lane.

    Below 2**51 the conversion between integer and float64 is exact by adding the bits of 1.5 *
    2**52 to the integer, or that number to the float.
    """
    wide = ir.VectorType(F64, a.type.count)
    magic = ir.Constant(wide, [ir.Constant(F64, 1.5 * 2.0**52)] * a.type.count)
    offset = builder.bitcast(magic, a.type)

    def common() -> Value:
        over, under = (
            builder.fsub(builder.bitcast(builder.add(v, offset), wide), magic) for v in (a, b)
        )
        quotient = builder.fdiv(over, under)
        whole = call_intrinsic(builder, f"llvm.trunc.{suffix(wide)}", wide, [quotient])
        return builder.sub(builder.bitcast(builder.fadd(whole, magic), a.type), offset)

    def rare() -> Value:
        return (builder.sdiv if signed else builder.udiv)(a, b)

    least = _like(a, "int64", 2**51 if signed else 0)
    both = builder.or_(builder.add(a, least), builder.add(b, least))
    spare = builder.lshr(both, _like(a, "int64", 52 if signed else 51))
    beyond = builder.icmp_unsigned("!=", spare, a.type(None))
    return _merge(builder, builder.not_(mask_any(builder, beyond)), common, rare)


def _div(builder: Any, dtype: str, a: Value, b: Value) -> Value:
    """Divide; integers truncate towards zero, and division by zero gives 0."""
    if is_float(dtype):
        return builder.fdiv(a, b)
    safe, is_zero, is_minus = _safe_divisor(builder, dtype, b)
    if not is_signed(dtype):
        return builder.select(
            is_zero, _like(a, dtype, 0), _quotient(builder, dtype, a, safe, _repeats(b))
        )
    result = builder.select(
        is_minus, builder.neg(a), _quotient(builder, dtype, a, safe, _repeats(b))
    )
    return builder.select(is_zero, _like(a, dtype, 0), result)


def _fmod(builder: Any, dtype: str, a: Value, b: Value) -> Value:
    """Return the remainder with the sign of the dividend (C)."""
    if is_float(dtype):
        return _float_remainder(builder, dtype, a, b)
    safe, _, _ = _safe_divisor(builder, dtype, b)
    # The safe divisor is 1 instead of 0 and -1: the remainder is 0 for all three.
    return builder.sub(a, builder.mul(_quotient(builder, dtype, a, safe, _repeats(b)), safe))


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
    most = _like(x, work, 2.0 ** (22 if single else 51))
    small = builder.fcmp_ordered("<", unary("fabs", quotient), most)
    zero = _like(x, work, 0.0)

    def common() -> Value:
        rest = emit_fma(builder, builder.fneg(unary("trunc", quotient)), y, x)
        # A dividend smaller than the divisor is the remainder, also if the divisor is infinite.
        below = builder.fcmp_ordered("<", unary("fabs", x), unary("fabs", y))
        rest = builder.select(below, x, rest)
        signed = builder.fmul(rest, unary("copysign", _like(x, work, 1.0), x))
        wrong = builder.fcmp_ordered("<", signed, zero)
        rest = builder.select(wrong, builder.fadd(rest, unary("copysign", y, x)), rest)
        rest = unary("copysign", rest, x)
        return rest if fused else builder.fptrunc(rest, a.type)

    beyond = mask_any(builder, builder.not_(small))
    return _merge(builder, builder.not_(beyond), common, lambda: builder.frem(a, b))


def _mod(builder: Any, dtype: str, a: Value, b: Value) -> Value:
    """Return the remainder with the sign of the divisor (Python)."""
    rest = _fmod(builder, dtype, a, b)
    if not is_float(dtype) and not is_signed(dtype):
        return rest
    zero = _like(a, dtype, 0)
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


def _shift(op: str) -> Callable[[Any, str, Value, Value], Value]:
    """Return the emitter of a shift; by the width of the dtype and more it gives 0, or the sign."""

    def emit(builder: Any, dtype: str, a: Value, b: Value) -> Value:
        width = 8 * ELEMENTS[dtype][2]
        fits = builder.icmp_unsigned("<", b, _like(b, dtype, width))
        last = _like(b, dtype, width - 1)
        if op == "shr" and is_signed(dtype):
            return builder.ashr(a, builder.select(fits, b, last))
        shifted = (builder.shl if op == "shl" else builder.lshr)(a, builder.select(fits, b, last))
        return builder.select(fits, shifted, _like(a, dtype, 0))

    return emit


def _merge(
    builder: Any, condition: Value, common: Callable[[], Value], rare: Callable[[], Value]
) -> Value:
    """Branch on a scalar condition: emit ``common`` for true, ``rare`` for false."""
    with builder.if_else(condition, likely=True) as (then, otherwise):
        with then:
            first = common()
            first_block = builder.block
        with otherwise:
            second = rare()
            second_block = builder.block
    result = builder.phi(first.type)
    result.add_incoming(first, first_block)
    result.add_incoming(second, second_block)
    return result


def _pow(builder: Any, dtypes: Sequence[str], a: Value, b: Value) -> Value:
    """Emit a power.

    A chain of branches serves the exponents of which all lanes are equal and that need few
    instructions; any others take the general power.
    """
    dtype, wide = dtypes[-1], dtypes[0]
    if not is_float(dtype):
        return _integer_power(builder, dtype, a, b)
    cases: list[tuple[float, Callable[[], Value]]] = [
        (2.0, lambda: builder.fmul(a, a)),
        (3.0, lambda: builder.fmul(builder.fmul(a, a), a)),
        (0.5, lambda: _root(builder, dtype, a)),
        (-0.5, lambda: _recip(builder, dtype, _root(builder, dtype, a))),
        (-1.0, lambda: _recip(builder, dtype, a)),
        (4.0, lambda: _square(builder, _square(builder, a))),
        (-2.0, lambda: _square(builder, _recip(builder, dtype, a))),
    ]

    def power(k: int) -> Value:
        if k == len(cases):
            return _real_power(builder, dtype, a, b)
        exponent, common = cases[k]
        other = builder.fcmp_unordered("!=", b, _like(b, wide, exponent))
        return _merge(builder, builder.not_(mask_any(builder, other)), common, lambda: power(k + 1))

    return power(0)


def _square(builder: Any, a: Value) -> Value:
    return builder.fmul(a, a)


def _root(builder: Any, dtype: str, a: Value) -> Value:
    """Emit ``a ** 0.5``, which differs from the square root at -0 and -inf."""
    endless = builder.fcmp_ordered("==", a, _like(a, dtype, float("-inf")))
    root = _libm("sqrt")(builder, dtype, builder.fadd(a, _like(a, dtype, 0.0)))
    return builder.select(endless, _like(a, dtype, float("inf")), root)


def _real_power(builder: Any, dtype: str, a: Value, b: Value) -> Value:
    """Emit the general power of floating-point numbers."""
    if dtype == "float64":
        return call_intrinsic(builder, f"llvm.pow.{suffix(a.type)}", a.type, [a, b])
    return vmath.emit_power(builder, a, b)


def _integer_power(builder: Any, dtype: str, a: Value, b: Value) -> Value:
    """Emit integer powers modulo 2**width, by squaring and multiplying.

    Negative exponents give 0, except for bases 1 and -1.
    """
    zero, one, minus = (_like(a, dtype, n) for n in (0, 1, -1))
    negative = builder.icmp_signed("<", b, zero) if is_signed(dtype) else None
    exponent = b if negative is None else builder.select(negative, zero, b)
    before = builder.block
    head, done = builder.append_basic_block("power"), builder.append_basic_block("power.done")
    builder.branch(head)
    builder.position_at_end(head)
    result, base, left = (builder.phi(a.type) for _ in range(3))
    for phi, start in ((result, one), (base, a), (left, exponent)):
        phi.add_incoming(start, before)
    odd = builder.icmp_unsigned("!=", builder.and_(left, one), zero)
    grown = builder.select(odd, builder.mul(result, base), result)
    squared, halved = builder.mul(base, base), builder.lshr(left, one)
    for phi, following in ((result, grown), (base, squared), (left, halved)):
        phi.add_incoming(following, builder.block)
    more = mask_any(builder, builder.icmp_unsigned("!=", halved, zero))
    builder.cbranch(more, head, done)
    builder.position_at_end(done)
    if negative is None:
        return grown
    odd_power = builder.icmp_unsigned("!=", builder.and_(b, one), zero)
    inverse = builder.select(builder.icmp_signed("==", a, one), one, zero)
    of_minus = builder.select(odd_power, minus, one)
    inverse = builder.select(builder.icmp_signed("==", a, minus), of_minus, inverse)
    return builder.select(negative, inverse, grown)


BINARY: dict[str, Callable[[Any, str, Value, Value], Value]] = {
    "add": _arithmetic("+"),
    "sub": _arithmetic("-"),
    "mul": _arithmetic("*"),
    "div": _div,
    "mod": _mod,
    "fmod": _fmod,
    "max": _pick(">"),
    "min": _pick("<"),
    "and": _bits("and_"),
    "or": _bits("or_"),
    "xor": _bits("xor"),
    "shl": _shift("shl"),
    "shr": _shift("shr"),
    "eq": _compare("=="),
    "ne": _compare("!="),
    "lt": _compare("<"),
    "le": _compare("<="),
    "gt": _compare(">"),
    "ge": _compare(">="),
}
_TO_BOOL = frozenset({"eq", "ne", "lt", "le", "gt", "ge", "isnan"})


def _where(builder: Any, dtype: str, condition: Value, a: Value, b: Value) -> Value:
    return builder.select(condition, a, b)


def _cast(builder: Any, source: str, target: str, x: Value) -> Value:
    if source == target:
        return x
    if target == "bool":
        if is_float(source):
            return builder.fcmp_unordered("!=", x, _like(x, source, 0))
        return builder.icmp_unsigned("!=", x, _like(x, source, 0))
    if source == "bool":
        wide = builder.zext(x, ir.VectorType(I8, x.type.count))
        return emit_convert(builder, wide, "uint8", target)
    if is_float(source) and not is_float(target):
        return _to_integer(builder, source, target, x)
    return emit_convert(builder, x, source, target)


def _to_integer(builder: Any, source: str, target: str, x: Value) -> Value:
    """Truncate a float; via a wider signed integer, as C compilers (and NumPy) do on most hosts."""
    size = ELEMENTS[target][2]
    if size <= 2:
        wide = emit_convert(builder, x, source, "int32")
        return builder.trunc(wide, ir.VectorType(ELEMENTS[target][1], x.type.count))
    if target == "uint32":
        wide = emit_convert(builder, x, source, "int64")
        return builder.trunc(wide, ir.VectorType(I32, x.type.count))
    if target == "uint64":
        least = _like(x, source, 2.0**63)
        large = builder.fcmp_ordered(">=", x, least)
        low = builder.fptosi(builder.select(large, builder.fsub(x, least), x), _longs(x))
        top = ir.Constant(I64, -(2**63))
        flipped = builder.xor(low, ir.Constant(_longs(x), [top] * x.type.count))
        return builder.select(large, flipped, low)
    return emit_convert(builder, x, source, target)


def _longs(x: Value) -> Any:
    """Return the type of a vector of int64 with as many lanes as ``x``."""
    return ir.VectorType(I64, x.type.count)


def apply(builder: Any, name: str, dtypes: Sequence[str], args: Sequence[Value]) -> Value:
    """Emit a primitive.

    Args:
        builder: LLVM IR builder.
        name: Name of the primitive.
        dtypes: The dtype in which it computes. ``cast`` has two, of source and target, and so may
            ``pow``: of the exponent, and of base and result.
        args: Its operands, vectors.

    Returns:
        The vector of results.
    """
    if name == "cast":
        return _cast(builder, dtypes[0], dtypes[1], args[0])
    if name == "where":
        return _where(builder, dtypes[0], args[0], args[1], args[2])
    if name in UNARY:
        return UNARY[name](builder, dtypes[0], args[0])
    if name == "pow":
        return _pow(builder, dtypes, args[0], args[1])
    return BINARY[name](builder, dtypes[0], args[0], args[1])


def result_dtype(name: str, dtypes: Sequence[str]) -> str:
    """Return the dtype of the result of a primitive."""
    return "bool" if name in _TO_BOOL else dtypes[-1]
