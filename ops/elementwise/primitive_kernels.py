"""Primitive operations on vectors, as LLVM IR: the instructions of the elementwise programs.

A primitive is named with the dtype in which it computes, ``add.float32``; `apply` emits one. Values
of dtype ``bool`` are vectors of bits; float16 and bfloat16 are computed in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir

from subgraph.engine.codegen import vmath
from subgraph.engine.codegen.bfloat16 import emit_bfloat16
from subgraph.engine.codegen.irtools import (
    ELEMENTS,
    I8,
    I32,
    I64,
    call_intrinsic,
    concatenate,
    emit_binary,
    emit_compare,
    emit_convert,
    is_float,
    is_signed,
    mask_any,
    shuffle_vectors,
    suffix,
)

from .division_kernels import c_remainder, divide, python_remainder
from .expressions import TO_BOOL
from .vector_kernels import from_memory, like, merge, to_memory

Value = Any


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
    zero, one = like(x, dtype, 0), like(x, dtype, 1)
    result = builder.select(emit_compare(builder, ">", dtype, x, zero), one, x)
    if is_float(dtype) or is_signed(dtype):
        below = emit_compare(builder, "<", dtype, x, zero)
        result = builder.select(below, like(x, dtype, -1), result)
    if is_float(dtype):
        # The sign of -0 is 0, not -0. NaN fails all three comparisons and stays.
        result = builder.select(emit_compare(builder, "==", dtype, x, zero), zero, result)
    return result


def _not(builder: Any, dtype: str, x: Value) -> Value:
    return builder.not_(x)


def _recip(builder: Any, dtype: str, x: Value) -> Value:
    return builder.fdiv(like(x, dtype, 1), x)


def _isnan(builder: Any, dtype: str, x: Value) -> Value:
    return builder.fcmp_unordered("uno", x, x)


def _round(storage_dtype: str) -> Callable[[Any, str, Value], Value]:
    def emit(builder: Any, dtype: str, x: Value) -> Value:
        return from_memory(builder, to_memory(builder, x, storage_dtype), storage_dtype)

    return emit


def _bits_bfloat16(builder: Any, dtype: str, x: Value) -> Value:
    """Round to bfloat16, as uint16; subnormal numbers may become 0."""
    parts = [
        emit_bfloat16(builder, shuffle_vectors(builder, x, None, range(first, first + 16)))
        for first in range(0, x.type.count, 16)
    ]
    return concatenate(builder, parts)


UNARY: dict[str, Callable[[Any, str, Value], Value]] = {
    "neg": _neg,
    "abs": _abs,
    "sign": _sign,
    "not": _not,
    "recip": _recip,
    "isnan": _isnan,
    "bits_bfloat16": _bits_bfloat16,
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


def _shift(op: str) -> Callable[[Any, str, Value, Value], Value]:
    """Return the emitter of a shift; by the width of the dtype and more it gives 0, or the sign."""

    def emit(builder: Any, dtype: str, a: Value, b: Value) -> Value:
        width = 8 * ELEMENTS[dtype][2]
        # LLVM's result of a shift by the width or more is poison, also if it is not selected: the
        # count is bounded before the shift.
        fits = builder.icmp_unsigned("<", b, like(b, dtype, width))
        last = like(b, dtype, width - 1)
        if op == "shr" and is_signed(dtype):
            return builder.ashr(a, builder.select(fits, b, last))
        shifted = (builder.shl if op == "shl" else builder.lshr)(a, builder.select(fits, b, last))
        return builder.select(fits, shifted, like(a, dtype, 0))

    return emit


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
        other = builder.fcmp_unordered("!=", b, like(b, wide, exponent))
        return merge(builder, builder.not_(mask_any(builder, other)), common, lambda: power(k + 1))

    return power(0)


def _square(builder: Any, a: Value) -> Value:
    return builder.fmul(a, a)


def _root(builder: Any, dtype: str, a: Value) -> Value:
    """Emit ``a ** 0.5``, which differs from the square root at -0 and -inf."""
    endless = builder.fcmp_ordered("==", a, like(a, dtype, float("-inf")))
    # The addition turns -0 into 0, since the root of -0 is -0, but ``pow(-0, 0.5)`` is 0.
    root = _libm("sqrt")(builder, dtype, builder.fadd(a, like(a, dtype, 0.0)))
    return builder.select(endless, like(a, dtype, float("inf")), root)


def _real_power(builder: Any, dtype: str, a: Value, b: Value) -> Value:
    """Emit the general power of floating-point numbers."""
    if dtype == "float64":
        return call_intrinsic(builder, f"llvm.pow.{suffix(a.type)}", a.type, [a, b])
    return vmath.emit_power(builder, a, b)


def _integer_power(builder: Any, dtype: str, a: Value, b: Value) -> Value:
    """Emit integer powers modulo 2**width, by squaring and multiplying.

    Negative exponents give 0, except for bases 1 and -1.
    """
    zero, one, minus = (like(a, dtype, n) for n in (0, 1, -1))
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
    "div": divide,
    "mod": python_remainder,
    "fmod": c_remainder,
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


def _where(builder: Any, dtype: str, condition: Value, a: Value, b: Value) -> Value:
    return builder.select(condition, a, b)


def _cast(builder: Any, source: str, target: str, x: Value) -> Value:
    if source == target:
        return x
    if target == "bool":
        if is_float(source):
            # Unordered: NaN is true, as in NumPy.
            return builder.fcmp_unordered("!=", x, like(x, source, 0))
        return builder.icmp_unsigned("!=", x, like(x, source, 0))
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
        # LLVM's conversion to int64 is defined below 2**63 only: larger numbers are moved down by
        # 2**63, which is the top bit of the result.
        least = like(x, source, 2.0**63)
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
    if name == "bits_bfloat16":
        return "uint16"
    return "bool" if name in TO_BOOL else dtypes[-1]
