"""The compiled interpreter of size expressions, for programs whose own results decide sizes.

It runs as a step between others. It reads integers that earlier steps have computed, evaluates the
expressions of a data-dependent plan (`subgraph.engine.executable.size_code`) in registers, and
writes the results to the arguments of later steps. It ends the run if a guard of the plan does not
hold or a result differs from that of Python's unbounded integers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numba.extending import register_jitable

from subgraph.engine.codegen.simd import atomic_cas, bits_f64, ld_f64, ld_i32, ld_i64, st_i64
from subgraph.engine.program import abi

# The numbers of the operations: their indices in `abi.SIZE_OPERATIONS`.
(_ADD, _SUB, _MUL, _FLOORDIV, _MOD, _MAX, _MIN, _ABS, _AND, _OR, _XOR) = range(11)
(_SHL, _SHR, _INVERT, _FLOAT, _FADD, _FSUB, _FMUL, _FDIV, _FMAX, _FMIN, _FABS) = range(11, 22)
(_CEIL, _FLOOR, _TRUNC, _SINGLE, _EQ, _LT, _LE, _FEQ, _FLT, _FLE) = range(22, 32)
# A product below this as float64 fits in int64: 2**63 less two units in its last place, which
# rounding of the product can hide.
_INT64_BOUND = 2.0**63 - 2.0**11
_FLOAT64_INTEGER_BOUND = 1 << 53  # up to here float64 represents every integer
_INT64_MIN = -(1 << 63)  # the least int64, whose negative does not fit
_STEP = abi.WORD * abi.SIZE_CODE_WORDS  # bytes of a row of code
_PATCH = abi.WORD * abi.SIZE_PATCH_WORDS  # bytes of a row of patches


@register_jitable
def _integer_result(code: int, one: int, other: int) -> Any:
    """Return the result of an operation on integers; for "float", the bits of the float64.

    Args:
        code: Number of the operation.
        one: Address of the first operand's register.
        other: Address of the second operand's register; that of the first for unary operations.
    """
    a, b = ld_i64(one), ld_i64(other)
    if code == _ADD:
        return a + b
    if code == _MUL:
        return a * b
    if code == _SUB:
        return a - b
    if code == _FLOORDIV:
        return a // b
    if code == _MOD:
        return a % b
    if code == _MAX:
        return max(a, b)
    if code == _MIN:
        return min(a, b)
    if code == _ABS:
        return abs(a)
    if code == _AND:
        return a & b
    if code == _OR:
        return a | b
    if code == _XOR:
        return a ^ b
    if code == _SHL:
        return a << b
    if code == _SHR:
        return a >> b
    if code == _INVERT:
        return ~a
    return bits_f64(float(a))


@register_jitable
def _overflows(code: int, one: int, other: int) -> Any:
    """Return whether a result is not exact in 64 bits; arguments as `_integer_result`'s.

    Python, with which the plan was made, computes sizes with unbounded integers.
    """
    a, b = ld_i64(one), ld_i64(other)
    if code == _ADD:
        return ((a ^ (a + b)) & (b ^ (a + b))) < 0
    if code == _SUB:
        return ((a ^ b) & (a ^ (a - b))) < 0
    if code == _MUL:
        return abs(float(a) * float(b)) >= _INT64_BOUND
    if _FLOORDIV <= code <= _MOD:
        return b == -1 and a == _INT64_MIN
    if code == _ABS:
        return a == _INT64_MIN
    if code == _SHL:
        return b < 0 or b > 62 or abs(float(a) * 2.0**b) >= _INT64_BOUND
    if code == _SHR:
        return b < 0 or b > 63
    if code == _FLOAT:
        return a < -_FLOAT64_INTEGER_BOUND or a > _FLOAT64_INTEGER_BOUND
    if _CEIL <= code <= _TRUNC:
        return not abs(ld_f64(one)) < _INT64_BOUND
    return False


@register_jitable
def _float_result(code: int, one: int, other: int) -> Any:
    """Return the result of an operation on floats: an integer, or the bits of a float64."""
    a, b = ld_f64(one), ld_f64(other)
    if code == _FADD:
        return bits_f64(a + b)
    if code == _FSUB:
        return bits_f64(a - b)
    if code == _FMUL:
        return bits_f64(a * b)
    if code == _FDIV:
        return bits_f64(a / b)
    if code == _FMAX:
        return bits_f64(b if b > a else a)
    if code == _FMIN:
        return bits_f64(b if b < a else a)
    if code == _FABS:
        return bits_f64(abs(a))
    if code == _CEIL:
        return math.ceil(a)
    if code == _FLOOR:
        return math.floor(a)
    if code == _SINGLE:
        return bits_f64(np.float64(np.float32(a)))
    return int(a)


@register_jitable
def _holds(code: int, one: int, other: int) -> Any:
    """Return the outcome of a comparison; arguments as `_integer_result`'s."""
    if code == _EQ:
        return ld_i64(one) == ld_i64(other)
    if code == _LT:
        return ld_i64(one) < ld_i64(other)
    if code == _LE:
        return ld_i64(one) <= ld_i64(other)
    if code == _FEQ:
        return ld_f64(one) == ld_f64(other)
    if code == _FLT:
        return ld_f64(one) < ld_f64(other)
    return ld_f64(one) <= ld_f64(other)


def compute_sizes() -> Callable[..., None]:
    """Return the kernel that reads integers, runs the code and applies the patches of a block.

    Its argument words are the address of the block (`abi.SIZE_READ` and the following) and that of
    the integers to read. It has no work units.
    """

    def kernel(args: int, _begin: int, _end: int, _worker: int) -> None:
        block, source = ld_i64(args), ld_i64(args + abi.WORD)
        register = ld_i64(block + abi.SIZE_READ)
        wide = ld_i64(block + abi.SIZE_ITEM) == abi.WORD
        for k in range(ld_i64(block + abi.SIZE_COUNT)):
            at = register + abi.WORD * k
            st_i64(at, ld_i64(source + 8 * k) if wide else ld_i32(source + 4 * k))
        row = ld_i64(block + abi.SIZE_CODE)
        stop = row + _STEP * ld_i64(block + abi.SIZE_CODE + abi.WORD)
        while row < stop:
            code, target = ld_i64(row), ld_i64(row + abi.WORD)
            one, other = ld_i64(row + 2 * abi.WORD), ld_i64(row + 3 * abi.WORD)
            if code >= _EQ:
                if _holds(code, one, other) != (target != 0):
                    atomic_cas(ld_i64(block + abi.SIZE_STOP), 0, abi.MISFIT)
                    return
            elif _overflows(code, one, other):
                atomic_cas(ld_i64(block + abi.SIZE_STOP), 0, abi.MISFIT)
                return
            elif code < _FADD:
                st_i64(target, _integer_result(code, one, other))
            else:
                st_i64(target, _float_result(code, one, other))
            row += _STEP
        row = ld_i64(block + abi.SIZE_PATCHES)
        stop = row + _PATCH * ld_i64(block + abi.SIZE_PATCHES + abi.WORD)
        while row < stop:
            base = ld_i64(row + 2 * abi.WORD)
            value = ld_i64(ld_i64(row + abi.WORD))
            st_i64(ld_i64(row), value + ld_i64(base) if base != 0 else value)
            row += _PATCH

    return kernel
