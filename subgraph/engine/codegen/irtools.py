"""Helpers that emit LLVM IR: types, memory, vector arithmetic. The intrinsics of `simd` use them.

A function here that takes ``builder`` (llvmlite's IRBuilder) emits instructions at its position and
returns LLVM values; ``address`` is an LLVM int64, in bytes. ``define`` makes a numba intrinsic of
such a function. Importing this module also registers the operators between vectors with numba.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import cache
from inspect import Parameter, Signature
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic, lower_builtin, models, register_model

from subgraph.dtypes import DTYPES, INTEGERS, item_bytes
from subgraph.system import host
from subgraph.system.numba_internals import AbstractTemplate, cgutils, infer_global, signature

I1, I8, I16, I32, I64 = (ir.IntType(n) for n in (1, 8, 16, 32, 64))
F16, F32, F64 = ir.HalfType(), ir.FloatType(), ir.DoubleType()
VOID = types.void
INT64 = types.int64

# dtype -> (numba type of one element in a register, LLVM type, bytes)
ELEMENTS: dict[str, tuple[Any, Any, int]] = {
    "float64": (types.float64, F64, item_bytes("float64")),
    "float32": (types.float32, F32, item_bytes("float32")),
    **{
        name: (getattr(types, name), ir.IntType(DTYPES[name].bits), item_bytes(name))
        for name in INTEGERS
    },
}
FLOATS = ("float32", "float64")
# Emits the body of an intrinsic: (builder, numba's context, LLVM values of the arguments) -> value.
EmitBody = Callable[[Any, Any, Sequence[Any]], Any]


def is_float(dtype: str) -> bool:
    """Return whether a dtype of vectors is float32 or float64."""
    return dtype in FLOATS


def is_signed(dtype: str) -> bool:
    """Return whether an integer dtype is a signed one."""
    return not dtype.startswith("uint")


class VecType(types.Type):
    """Numba type of a vector.

    Attributes:
        dtype_name: Element dtype; ``"mask"`` for single bits.
        lanes: Number of elements.
    """

    def __init__(self, dtype: str, lanes: int) -> None:
        self.dtype_name = dtype
        self.lanes = lanes
        super().__init__(name=f"vec({dtype},{lanes})")

    @property
    def llvm(self) -> Any:
        """LLVM's vector type."""
        element = I1 if self.dtype_name == "mask" else ELEMENTS[self.dtype_name][1]
        return ir.VectorType(element, self.lanes)


@register_model(VecType)
class _VecModel(models.PrimitiveModel):
    """Tells numba that a vector is one LLVM value."""

    def __init__(self, dmm: Any, fe_type: VecType) -> None:
        super().__init__(dmm, fe_type, fe_type.llvm)


@cache
def vec_type(dtype: str, lanes: int) -> VecType:
    """Return the numba type of ``lanes`` elements; of a mask for dtype ``"mask"``."""
    return VecType(dtype, lanes)


def define(restype: Any, argtypes: Sequence[Any], emit: EmitBody) -> Any:
    """Return a numba intrinsic: a function for kernels whose body is emitted as LLVM IR.

    Args:
        restype: Numba type of the result, ``VOID`` for none.
        argtypes: Numba types of the arguments. Numba converts scalars to them.
        emit: ``emit(builder, context, values)`` emits the body and returns the LLVM value of the
            result; its own result is ignored for ``VOID``.
    """
    sig = restype(*argtypes)

    def codegen(context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        result = emit(builder, context, args)
        return context.get_dummy_value() if restype is VOID else result

    def typing(_context: Any, *_args: Any) -> Any:
        return sig, codegen

    # Numba reads the arity from the signature of `typing`, and does not accept ``*args`` there.
    parameters = [Parameter(f"a{i}", Parameter.POSITIONAL_OR_KEYWORD) for i in range(len(argtypes))]
    context = Parameter("context", Parameter.POSITIONAL_OR_KEYWORD)
    vars(typing)["__signature__"] = Signature([context, *parameters])
    return intrinsic(typing)


def pointer(builder: Any, address: Any, ty: Any) -> Any:
    """Emit the conversion of an address to a pointer.

    Args:
        builder: LLVM's builder.
        address: LLVM int64.
        ty: LLVM type that the pointer points to.
    """
    return builder.inttoptr(address, ir.PointerType(ty))


def load_at(builder: Any, address: Any, ty: Any, align: int) -> Any:
    """Emit a load.

    Args:
        builder: LLVM's builder.
        address: LLVM int64.
        ty: LLVM type of the value to load.
        align: Alignment of the address in bytes that LLVM may assume.
    """
    loaded = builder.load(pointer(builder, address, ty), typ=ty)
    loaded.align = align
    return loaded


def store_at(builder: Any, address: Any, value: Any, align: int) -> None:
    """Emit a store.

    Args:
        builder: LLVM's builder.
        address: LLVM int64.
        value: LLVM value to store.
        align: Alignment of the address in bytes that LLVM may assume.
    """
    stored = builder.store(value, pointer(builder, address, value.type))
    stored.align = align


def call_intrinsic(builder: Any, name: str, ty: Any, args: Sequence[Any]) -> Any:
    """Emit a call of an LLVM intrinsic or of a C function.

    Args:
        builder: LLVM's builder.
        name: The full name, such as ``"llvm.fma.v8f32"`` or ``"sched_yield"``.
        ty: LLVM type of the result.
        args: LLVM values; their types are the function's parameter types.
    """
    fnty = ir.FunctionType(ty, [a.type for a in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, fnty, name), args)


def suffix(ty: Any) -> str:
    """Return the name of an LLVM type as a suffix of intrinsics' names, such as ``v16f32``."""
    if isinstance(ty, ir.VectorType):
        return f"v{ty.count}{suffix(ty.element)}"
    if isinstance(ty, ir.IntType):
        return f"i{ty.width}"
    return {ir.HalfType: "f16", ir.FloatType: "f32", ir.DoubleType: "f64"}[type(ty)]


def splat_value(builder: Any, value: Any, lanes: int) -> Any:
    """Emit a vector with one scalar in every lane.

    Args:
        builder: LLVM's builder.
        value: LLVM scalar.
        lanes: Elements of the vector.
    """
    ty = ir.VectorType(value.type, lanes)
    # LLVM recognizes this pair of instructions as one broadcast.
    undef = ir.Constant(ty, ir.Undefined)
    first = builder.insert_element(undef, value, I32(0))
    return shuffle_vectors(builder, first, None, [0] * lanes)


def shuffle_vectors(builder: Any, a: Any, b: Any | None, picks: Sequence[int]) -> Any:
    """Emit a vector of some elements of one or two vectors.

    Args:
        builder: LLVM's builder.
        a: LLVM vector.
        b: Another of the same type; None for one whose elements are not picked.
        picks: For each element of the result its index in a followed by b.
    """
    other = ir.Constant(a.type, ir.Undefined) if b is None else b
    mask = ir.Constant(ir.VectorType(I32, len(picks)), [I32(i) for i in picks])
    return builder.shuffle_vector(a, other, mask)


def concatenate(builder: Any, vectors: Sequence[Any]) -> Any:
    """Emit one vector of several, padded by undefined elements to a power of two of them."""
    while len(vectors) > 1:
        if len(vectors) % 2:
            vectors = [*vectors, ir.Constant(vectors[0].type, ir.Undefined)]
        picks = range(2 * vectors[0].type.count)
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        vectors = [shuffle_vectors(builder, low, high, picks) for low, high in pairs]
    return vectors[0]


def half_to_f32(builder: Any, bits: Any, storage: str) -> Any:
    """Emit the exact conversion of half precision to float32.

    Args:
        builder: The builder.
        bits: A vector of i16.
        storage: ``"float16"`` or ``"bfloat16"``.
    """
    if storage == "bfloat16":
        return bf16_to_f32(builder, bits)
    half = builder.bitcast(bits, _vector_like(bits.type, F16))
    return builder.fpext(half, _vector_like(bits.type, F32))


def bf16_to_f32(builder: Any, bits: Any) -> Any:
    """Emit the exact conversion of bfloat16 to float32; ``bits``: an i16 or a vector of i16."""
    wide, real = (_vector_like(bits.type, t) for t in (I32, F32))
    return builder.bitcast(builder.shl(builder.zext(bits, wide), wide(_fill(wide, 16))), real)


def f32_to_bf16(builder: Any, value: Any) -> Any:
    """Emit the conversion of float32 (scalar or vector) to bfloat16 as i16, to nearest even.

    NaN stays a quiet NaN.
    """
    wide, narrow = (_vector_like(value.type, t) for t in (I32, I16))
    bits = builder.bitcast(value, wide)
    odd = builder.and_(builder.lshr(bits, wide(_fill(wide, 16))), wide(_fill(wide, 1)))
    # Adding just below half of the last kept bit, plus that bit, rounds ties to even.
    rounded = builder.add(bits, builder.add(odd, wide(_fill(wide, 0x7FFF))))
    # Rounding would carry a NaN of large mantissa into the sign, and truncation could make one of
    # small mantissa infinite.
    quiet = builder.or_(bits, wide(_fill(wide, 0x400000)))
    nan = builder.fcmp_unordered("uno", value, value)
    chosen = builder.select(nan, quiet, rounded)
    return builder.trunc(builder.lshr(chosen, wide(_fill(wide, 16))), narrow)


def _vector_like(ty: Any, element: Any) -> Any:
    """Return a scalar type, or the vector of it with as many lanes as ``ty`` if that is one."""
    return ir.VectorType(element, ty.count) if isinstance(ty, ir.VectorType) else element


def _fill(ty: Any, value: Any) -> Any:
    """Return the initializer of a constant of a scalar or vector type, all lanes equal."""
    return [value] * ty.count if isinstance(ty, ir.VectorType) else value


def first_lanes(builder: Any, count: Any, lanes: int) -> Any:
    """Emit a mask whose first ``count`` lanes are set.

    Args:
        builder: LLVM's builder.
        count: LLVM int64 of any value, also negative or above ``lanes``.
        lanes: Lanes of the mask.
    """
    # Lane numbers of 32 or 16 bits compare in one instruction. The count is clamped before it is
    # truncated to their width.
    low = builder.select(builder.icmp_signed("<", count, I64(0)), I64(0), count)
    capped = builder.select(builder.icmp_signed(">", low, I64(lanes)), I64(lanes), low)
    width = I32 if lanes <= 16 else I16
    wanted = splat_value(builder, builder.trunc(capped, width), lanes)
    steps = ir.Constant(ir.VectorType(width, lanes), [width(i) for i in range(lanes)])
    return builder.icmp_signed("<", steps, wanted)


def load_masked(builder: Any, address: Any, ty: Any, mask: Any, align: int) -> Any:
    """Emit a load of the lanes of a mask; the others are 0, and their memory is not accessed.

    Args:
        builder: LLVM's builder.
        address: LLVM int64, of lane 0.
        ty: LLVM vector type of the result.
        mask: LLVM vector of i1.
        align: Alignment of the address in bytes, that of one element.
    """
    args = [pointer(builder, address, ty), I32(align), mask, ty(None)]
    return call_intrinsic(builder, f"llvm.masked.load.{suffix(ty)}.p0", ty, args)


def prefetch_at(builder: Any, address: Any, *, write: bool = False, near: bool = True) -> None:
    """Emit a prefetch of the cache line at an address.

    Args:
        builder: LLVM's builder.
        address: LLVM int64, of any byte of the line.
        write: Whether the line will be written.
        near: Whether to fetch into the L1 cache; otherwise into the L2.
    """
    is_data = I32(1)
    args = [pointer(builder, address, I8), I32(int(write)), I32(3 if near else 2), is_data]
    call_intrinsic(builder, "llvm.prefetch.p0", ir.VoidType(), args)


def store_masked(builder: Any, address: Any, value: Any, mask: Any, align: int) -> None:
    """Emit a store of the lanes of a mask; the memory of the other lanes is not accessed.

    Without AVX-512 there is no such instruction, or it takes a hundred times as long as a plain
    store (vmaskmov on AMD). Then a full mask stores the vector at once, another one lane by lane.

    Args:
        builder: LLVM's builder.
        address: LLVM int64, of lane 0.
        value: LLVM vector.
        mask: LLVM vector of i1.
        align: Alignment of the address in bytes, that of one element.
    """
    ty = value.type
    if host.has_masked_stores():
        args = [value, pointer(builder, address, ty), I32(align), mask]
        call_intrinsic(builder, f"llvm.masked.store.{suffix(ty)}.p0", ir.VoidType(), args)
        return
    whole = ir.IntType(ty.count)
    bits = builder.bitcast(mask, whole)
    every = builder.icmp_unsigned("==", bits, whole(2**ty.count - 1))
    with builder.if_else(every, likely=True) as (then, otherwise):
        with then:
            store_at(builder, address, value, align)
        with otherwise:
            for lane in range(ty.count):
                bit = builder.and_(bits, whole(1 << lane))
                with builder.if_then(builder.icmp_unsigned("!=", bit, whole(0))):
                    at = builder.add(address, I64(lane * align))
                    store_at(builder, at, builder.extract_element(value, I32(lane)), align)


def zeroed_stack(builder: Any, words: int) -> Any:
    """Emit an allocation of 64-bit words of 0 on the stack; return their address, LLVM int64.

    Args:
        builder: LLVM's builder.
        words: Number of words.
    """
    # The slot is allocated in the entry block, so that a call in a loop does not enlarge the stack
    # in every iteration.
    slot = cgutils.alloca_once_value(builder, ir.Constant(ir.ArrayType(I64, words), None))
    # A block that begins on a cache line (64 bytes) occupies as few lines as possible.
    slot.align = 64
    return builder.ptrtoint(slot, I64)


def align_stack(function: Any) -> None:
    """Have LLVM align the stack frame of a function to the size of a vector register.

    Callers align the stack to 16 bytes. Vectors that are spilled there would each lie across two
    cache lines, at a cost of up to half the speed of a kernel that spills many. The alignment
    occupies one general register.
    """
    function.attributes.add("nounwind")  # llvmlite writes alignstack only next to another
    function.attributes.alignstack = max(16, host.isa().vector_bytes)


def store_first(builder: Any, address: Any, value: Any, count: Any, align: int) -> None:
    """Emit a store of the first ``count`` lanes; the memory of the others is not accessed.

    Without masked stores, a bit of the count decides for each power of two whether as many lanes
    are stored: half of the vector, then a quarter, and so on.

    Args:
        builder: LLVM's builder.
        address: LLVM int64, of lane 0.
        value: LLVM vector; its lanes are a power of two.
        count: LLVM int64 of any value, also negative or above the lanes.
        align: Alignment of the address in bytes, that of one element.
    """
    lanes = value.type.count
    if host.has_masked_stores():
        store_masked(builder, address, value, first_lanes(builder, count, lanes), align)
        return
    with builder.if_else(builder.icmp_signed(">=", count, I64(lanes))) as (then, otherwise):
        with then:
            store_at(builder, address, value, align)
        with otherwise:
            count = builder.select(builder.icmp_signed("<", count, I64(0)), I64(0), count)
            while lanes > 1:
                lanes //= 2
                low, high = _halves(builder, value)
                before = builder.block
                some = builder.icmp_signed("!=", builder.and_(count, I64(lanes)), I64(0))
                with builder.if_then(some):
                    store_at(builder, address, low, align)
                    behind, inside = builder.add(address, I64(lanes * align)), builder.block
                value, at = builder.phi(low.type), builder.phi(I64)
                for phi, stored, skipped in ((value, high, low), (at, behind, address)):
                    phi.add_incoming(skipped, before)
                    phi.add_incoming(stored, inside)
                address = at


def mask_any(builder: Any, mask: Any) -> Any:
    """Emit whether any lane of a mask is set."""
    whole = ir.IntType(mask.type.count)
    return builder.icmp_unsigned("!=", builder.bitcast(mask, whole), whole(0))


def reduce_lanes(builder: Any, value: Any, combine: Callable[[Any, Any, Any], Any]) -> Any:
    """Emit the reduction of a vector to a scalar: its halves are combined until one lane is left.

    Args:
        builder: LLVM's builder.
        value: LLVM vector; its lanes are a power of two.
        combine: ``combine(builder, low, high)`` emits the operation on two vectors.
    """
    lanes = value.type.count
    while lanes > 1:
        low, high = _halves(builder, value)
        value, lanes = combine(builder, low, high), lanes // 2
    return builder.extract_element(value, I32(0))


def reduce_rows(builder: Any, rows: list[Any], combine: Callable[[Any, Any, Any], Any]) -> Any:
    """Emit the reductions of several vectors at once, each combined as `reduce_lanes` does.

    Args:
        builder: LLVM's builder.
        rows: As many LLVM vectors as each has lanes.
        combine: As in `reduce_lanes`.

    Returns:
        A vector; lane i is the reduction of row i.
    """
    lanes = rows[0].type.count
    size = lanes
    while size > 1:
        # Each run of ``size`` lanes belongs to one row. Two vectors become one of half runs.
        low, high = (
            [i for i in range(2 * lanes) if (i % size >= size // 2) == upper]
            for upper in (False, True)
        )
        rows = [
            combine(
                builder, shuffle_vectors(builder, a, b, low), shuffle_vectors(builder, a, b, high)
            )
            for a, b in zip(rows[::2], rows[1::2], strict=True)
        ]
        size //= 2
    return rows[0]


def _halves(builder: Any, value: Any) -> tuple[Any, Any]:
    """Emit the lower and the upper half of a vector's lanes."""
    half = value.type.count // 2
    low, high = range(half), range(half, 2 * half)
    return shuffle_vectors(builder, value, None, low), shuffle_vectors(builder, value, None, high)


def emit_fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """Emit ``a * b + c`` of floats.

    It is rounded once if the instruction set has FMA, else twice; never a library call.

    Args:
        builder: LLVM's builder.
        a: First factor, an LLVM float or vector of floats.
        b: Second factor.
        c: Addend.
    """
    # LLVM replaces llvm.fma by a call of the C library where there is no such instruction.
    name = "fma" if host.isa().fma else "fmuladd"
    return call_intrinsic(builder, f"llvm.{name}.{suffix(a.type)}", a.type, [a, b, c])


_FLOAT_BINARY = {"+": "fadd", "-": "fsub", "*": "fmul", "/": "fdiv"}
_INT_BINARY = {"+": "add", "-": "sub", "*": "mul", "&": "and_", "|": "or_", "^": "xor"}


def emit_binary(builder: Any, op: str, dtype: str, a: Any, b: Any) -> Any:
    """Emit an element-wise operator of two vectors.

    Args:
        builder: LLVM's builder.
        op: One of ``+ - * /``; of integers also ``& | ^``. Integer division truncates.
        dtype: Element dtype of the operands.
        a: Left operand.
        b: Right operand.
    """
    if is_float(dtype):
        return getattr(builder, _FLOAT_BINARY[op])(a, b)
    if op == "/":
        return (builder.sdiv if is_signed(dtype) else builder.udiv)(a, b)
    return getattr(builder, _INT_BINARY[op])(a, b)


def emit_compare(builder: Any, op: str, dtype: str, a: Any, b: Any) -> Any:
    """Emit the mask of an element-wise comparison; if an operand is NaN, only ``!=`` holds.

    Args:
        builder: LLVM's builder.
        op: One of ``< <= > >= == !=``.
        dtype: Element dtype of the operands.
        a: Left operand.
        b: Right operand.
    """
    if is_float(dtype):
        # Unordered comparisons hold for NaN, ordered ones do not, as IEEE 754 requires of != and
        # the others.
        compare = builder.fcmp_unordered if op == "!=" else builder.fcmp_ordered
        return compare(op, a, b)
    return (builder.icmp_signed if is_signed(dtype) else builder.icmp_unsigned)(op, a, b)


def emit_convert(builder: Any, value: Any, source: str, target: str) -> Any:
    """Emit the conversion of a vector's elements, as a cast of C does.

    Floats beyond the range of an integer target give an unspecified value.

    Args:
        builder: LLVM's builder.
        value: LLVM vector.
        source: Its element dtype.
        target: Element dtype of the result.
    """
    ty = ir.VectorType(ELEMENTS[target][1], value.type.count)
    before, after = ELEMENTS[source][2], ELEMENTS[target][2]
    if is_float(source) and is_float(target):
        if before == after:
            return value
        return builder.fpext(value, ty) if after > before else builder.fptrunc(value, ty)
    if is_float(source):
        return (builder.fptosi if is_signed(target) else builder.fptoui)(value, ty)
    if is_float(target):
        return (builder.sitofp if is_signed(source) else builder.uitofp)(value, ty)
    if before == after:
        return value
    if after < before:
        return builder.trunc(value, ty)
    return (builder.sext if is_signed(source) else builder.zext)(value, ty)


# ---------------------------------------------------------------- operators


# Functions of module `operator` by operator.
_ARITHMETIC = {
    **{"+": "add", "-": "sub", "*": "mul", "/": "truediv"},
    **{"&": "and_", "|": "or_", "^": "xor"},
}
_COMPARISONS = {"<": "lt", "<=": "le", ">": "gt", ">=": "ge", "==": "eq", "!=": "ne"}
_UNARY = {"-": "neg", "~": "invert"}


def _emit_unary(builder: Any, op: str, dtype: str, a: Any) -> Any:
    if op == "~":
        return builder.not_(a)
    return builder.fneg(a) if is_float(dtype) else builder.neg(a)


def _register(names: dict[str, str], arity: int, emit: Any, result_is_mask: bool = False) -> None:
    """Register Python's operators between vectors of one type with numba.

    Args:
        names: Names of functions of module `operator`, by operator.
        arity: Number of operands.
        emit: ``emit(builder, operator, dtype, *operands)`` emits the operation.
        result_is_mask: Whether the result is a mask; otherwise it has the operands' type.
    """

    def register(op: str, function: Any) -> None:
        class Template(AbstractTemplate):
            def generic(self, args: Any, _kws: Any) -> Any:
                if len(args) != arity or not isinstance(args[0], VecType) or len({*args}) > 1:
                    return None
                mask = vec_type("mask", args[0].lanes)
                return signature(mask if result_is_mask else args[0], *args)

        infer_global(function)(Template)

        def lowered(_context: Any, builder: Any, sig: Any, args: Any) -> Any:
            return emit(builder, op, sig.args[0].dtype_name, *args)

        lower_builtin(function, *([VecType] * arity))(lowered)

    for op, name in names.items():
        register(op, getattr(operator, name))


_register(_ARITHMETIC, 2, emit_binary)
_register(_COMPARISONS, 2, emit_compare, True)
_register(_UNARY, 1, _emit_unary)
