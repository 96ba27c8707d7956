"""Dot products of 32 bits of each lane: of four bytes, or of two elements of bfloat16.

Those of bytes, the inner step of the int8 GEMM, are one instruction with VNNI (vpdpbusd); otherwise
bytes are widened to 16 bits and multiplied and added pairwise into 32 bits (vpmaddwd). The results
are the same: nothing saturates. Those of bfloat16 are one instruction of AVX512_BF16 (vdpbf16ps),
in which a subnormal element is 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from llvmlite import ir

from subgraph.engine.codegen.irtools import (
    I8,
    I16,
    I32,
    call_intrinsic,
    concatenate,
    define,
    emit_fma,
    shuffle_vectors,
    vec_type,
)
from subgraph.system import host


@cache
def dot4(lanes: int) -> Any:
    """Return the intrinsic ``(sums, a, b) -> sums`` that adds four products of bytes to each sum.

    All are int32 vectors of ``lanes`` elements. Bytes of ``a`` are unsigned, those of ``b`` signed:
    lane i of the result is ``sums[i] + a[i].byte0 * b[i].byte0 + ... + a[i].byte3 * b[i].byte3``,
    modulo 2**32.
    """
    v = vec_type("int32", lanes)

    def emit(builder: Any, _context: Any, args: Sequence[Any]) -> Any:
        return emit_dot4(builder, args[0], args[1], args[2])

    return define(v, [v, v, v], emit)


def emit_dot4(builder: Any, sums: Any, a: Any, b: Any) -> Any:
    """Emit the operation of `dot4`, for loops written in IR.

    Args:
        builder: LLVM's builder.
        sums: LLVM vector of i32.
        a: Vector of as many i32, each four unsigned bytes.
        b: Vector of as many i32, each four signed bytes.
    """
    lanes = int(sums.type.count)
    most = 16 if host.has_512_bit_vectors() else 8
    if not host.has_vnni() or lanes < 4 or lanes % 4:
        return _dot4_by_pairs(builder, sums, a, b)
    if lanes <= most:
        if host.is_emulated():
            return _dot4_by_pairs(builder, sums, a, b)
        name = f"llvm.x86.avx512.vpdpbusd.{32 * lanes}"
        return call_intrinsic(builder, name, sums.type, [sums, a, b])
    parts: list[Any] = []
    for start in range(0, lanes, most):
        lanes_of_part = range(start, start + most)
        operands = [shuffle_vectors(builder, each, None, lanes_of_part) for each in (sums, a, b)]
        parts.append(emit_dot4(builder, *operands))
    return concatenate(builder, parts)


def _dot4_by_pairs(builder: Any, sums: Any, a: Any, b: Any) -> Any:
    """Emit `emit_dot4` without VNNI: the products of even bytes, then those of odd ones."""
    words = ir.VectorType(I16, 2 * int(sums.type.count))
    eight = ir.Constant(words, [8] * words.count)
    a, b = builder.bitcast(a, words), builder.bitcast(b, words)
    # Bytes of A are unsigned and those of B signed: A's are extended by zeros, B's by an arithmetic
    # shift of the upper half.
    even = builder.and_(a, ir.Constant(words, [255] * words.count))
    sums = builder.add(
        sums, emit_pair_products(builder, even, builder.ashr(builder.shl(b, eight), eight))
    )
    odd = builder.lshr(a, eight)
    return builder.add(sums, emit_pair_products(builder, odd, builder.ashr(b, eight)))


def emit_dot2(builder: Any, sums: Any, a: Any, b: Any) -> Any:
    """Emit the sums plus, for each lane, the products of its low and of its high bfloat16.

    Args:
        builder: LLVM's builder.
        sums: LLVM vector of 16 float32.
        a: Vector of as many i32, each two elements of bfloat16.
        b: The same of the other factor.
    """
    if not host.is_emulated():
        # llvmlite has no type of LLVM's bfloat, which the intrinsic takes.
        kind = ir.FunctionType(sums.type, [a.type, b.type, sums.type])
        return builder.call(ir.InlineAsm(kind, "vdpbf16ps $2, $1, $0", "=v,v,v,0"), [a, b, sums])
    count = int(a.type.count)
    upper, shift = (ir.Constant(a.type, [value] * count) for value in (0xFFFF0000, 16))
    low_a, low_b = (builder.bitcast(builder.shl(v, shift), sums.type) for v in (a, b))
    high_a, high_b = (builder.bitcast(builder.and_(v, upper), sums.type) for v in (a, b))
    return emit_fma(builder, high_a, high_b, emit_fma(builder, low_a, low_b, sums))


def emit_saturating_pairs(builder: Any, a: Any, b: Any) -> Any:
    """Emit ``a[2i] * b[2i] + a[2i+1] * b[2i+1]``, saturated to 16 bits, as (v)pmaddubsw does.

    Args:
        builder: LLVM's builder.
        a: Vector of i32, each four unsigned bytes.
        b: Vector of as many i32, each four signed bytes.

    Returns:
        Vector of i16, two for each i32.
    """
    lanes = a.type.count
    bytes_, words = ir.VectorType(I8, 4 * lanes), ir.VectorType(I16, 2 * lanes)
    a, b = (builder.bitcast(value, bytes_) for value in (a, b))
    names = {4: "ssse3.pmadd.ub.sw.128", 8: "avx2.pmadd.ub.sw", 16: "avx512.pmaddubs.w.512"}
    if lanes in names and lanes <= host.pmaddwd_lanes():
        return call_intrinsic(builder, f"llvm.x86.{names[lanes]}", words, [a, b])
    full = ir.VectorType(I32, 4 * lanes)
    sums = _add_pairs(builder, builder.mul(builder.zext(a, full), builder.sext(b, full)))
    for order, bound in (("<", 32767), (">", -32768)):
        limit = ir.Constant(sums.type, [bound] * 2 * lanes)
        sums = builder.select(builder.icmp_signed(order, sums, limit), sums, limit)
    return builder.trunc(sums, words)


def emit_sums_of_pairs(builder: Any, words: Any) -> Any:
    """Emit the sums of adjacent pairs of i16, as i32."""
    return emit_pair_products(builder, words, ir.Constant(words.type, [1] * words.type.count))


def emit_pair_products(builder: Any, a: Any, b: Any) -> Any:
    """Emit ``a[2i] * b[2i] + a[2i+1] * b[2i+1]``, the vector of i32 that (v)pmaddwd returns.

    Args:
        builder: LLVM's builder.
        a: Vector of i16, signed.
        b: Vector of as many i16, signed.
    """
    lanes = a.type.count // 2
    wide = ir.VectorType(I32, lanes)
    names = {4: "sse2.pmadd.wd", 8: "avx2.pmadd.wd", 16: "avx512.pmaddw.d.512"}
    if lanes in names and lanes <= host.pmaddwd_lanes():
        return call_intrinsic(builder, f"llvm.x86.{names[lanes]}", wide, [a, b])
    # Without the instruction: the product of two 16-bit integers fits in 32 bits.
    full = ir.VectorType(I32, 2 * lanes)
    return _add_pairs(builder, builder.mul(builder.sext(a, full), builder.sext(b, full)))


def _add_pairs(builder: Any, values: Any) -> Any:
    """Emit the sums of adjacent pairs of a vector."""
    even, odd = (
        shuffle_vectors(builder, values, None, range(first, values.type.count, 2))
        for first in (0, 1)
    )
    return builder.add(even, odd)
