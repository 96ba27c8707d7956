"""Conversions of vectors of 16 float32 to bfloat16, alone and as pairs of two rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from subgraph.engine.codegen.irtools import (
    F32,
    I16,
    I32,
    INT64,
    VOID,
    bf16_to_f32,
    define,
    f32_to_bf16,
    load_at,
    shuffle_vectors,
    store_at,
    vec_type,
)
from subgraph.system import host

_LANES = 16


def _store_rounded(builder: Any, _context: Any, args: Sequence[Any]) -> None:
    store_at(builder, args[0], emit_bfloat16(builder, args[1]), 2)


# The intrinsic (address, vector of 16 float32), which stores the elements rounded to bfloat16.
store_bfloat16 = define(VOID, [INT64, vec_type("float32", _LANES)], _store_rounded)


def _pairs(builder: Any, _context: Any, args: Sequence[Any]) -> Any:
    both = emit_bfloat16_row(builder, args[0], args[1])
    picks = [lane + row * _LANES for lane in range(_LANES) for row in range(2)]
    mixed = shuffle_vectors(builder, both, None, picks)
    return builder.bitcast(mixed, ir.VectorType(I32, _LANES))


# The intrinsic (vector, vector of 16 float32) -> vector of int32, which are pairs of the elements,
# rounded to bfloat16.
bfloat16_pairs = define(vec_type("int32", _LANES), [vec_type("float32", _LANES)] * 2, _pairs)


def _store_pairs(builder: Any, context: Any, args: Sequence[Any]) -> None:
    vector = ir.VectorType(F32, _LANES)
    rows = [load_at(builder, address, vector, 4) for address in args[1:]]
    store_at(builder, args[0], _pairs(builder, context, rows), 4)


# The intrinsic (address, address of row 0, of row 1), which stores pairs of the elements of two
# rows of 16 float32, rounded to bfloat16: a row of a register of B.
store_bfloat16_pairs = define(VOID, [INT64, INT64, INT64], _store_pairs)


def emit_bfloat16_row(builder: Any, first: Any, second: Any) -> Any:
    """Emit the conversion of two vectors to bfloat16, as one vector of 32 elements of i16.

    Args:
        builder: LLVM's builder.
        first: Vector of 16 float32, the first elements of the result.
        second: Vector of 16 float32, its last elements.
    """
    if not host.rounds_to_bfloat16():
        rounded = [f32_to_bf16(builder, value) for value in (first, second)]
        return shuffle_vectors(builder, rounded[0], rounded[1], range(2 * _LANES))
    kind = ir.FunctionType(ir.VectorType(I16, 2 * _LANES), [first.type] * 2)
    return builder.call(ir.InlineAsm(kind, "vcvtne2ps2bf16 $2, $1, $0", "=v,v,v"), [second, first])


def emit_load_bfloat16(builder: Any, address: Any) -> Any:
    """Emit the load of 16 elements of bfloat16, as float32.

    Args:
        builder: LLVM's builder.
        address: Their address, a multiple of 2.
    """
    return bf16_to_f32(builder, load_at(builder, address, ir.VectorType(I16, _LANES), 2))


def emit_bfloat16(builder: Any, value: Any) -> Any:
    """Emit the conversion of 16 float32 to bfloat16, to nearest even, as i16.

    Subnormal numbers may become 0, as they do in products.

    Args:
        builder: LLVM's builder.
        value: Vector of 16 float32.
    """
    if not host.rounds_to_bfloat16():
        return f32_to_bf16(builder, value)
    # llvmlite has no type of LLVM's bfloat, which the intrinsic returns.
    kind = ir.FunctionType(ir.VectorType(I16, _LANES), [value.type])
    return builder.call(ir.InlineAsm(kind, "vcvtneps2bf16 $1, $0", "=v,v"), [value])
