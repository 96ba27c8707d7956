"""Vectors of the elementwise kernels, as LLVM IR: types, loads and stores, constants, branches.

Values of dtype ``bool`` are vectors of bits; float16 and bfloat16 are computed in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from subgraph.dtypes import HALF_FLOATS, compute_dtype
from subgraph.engine.codegen.irtools import (
    ELEMENTS,
    F16,
    I1,
    I8,
    I16,
    bf16_to_f32,
    f32_to_bf16,
)

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


def like(value: Value, dtype: str, number: float) -> Value:
    """Return a number in all lanes of a vector as long as ``value``; see `constant`."""
    return constant(dtype, number, value.type.count)


def merge(
    builder: Any, condition: Value, common: Callable[[], Value], rare: Callable[[], Value]
) -> Value:
    """Emit a branch on a scalar condition, and return the value of the branch that is taken.

    Args:
        builder: The IR builder.
        condition: The condition, i1, which is true as a rule.
        common: Emits the branch for true.
        rare: Emits the branch for false.
    """
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
