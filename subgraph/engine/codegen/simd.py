"""The building blocks of kernels, as numba intrinsics: scalars in memory, atomics, vectors.

Addresses are int64, in bytes. ``ld_*`` and ``st_*`` load and store scalars. ``vec(dtype, lanes)``
returns the operations of one vector type; a factory assigns those that its kernel uses to local
names, over which the kernel closes::

    def double(*, lanes: int):
        v = vec("float32", lanes)
        load, store, load_n, store_n = v.load, v.store, v.load_n, v.store_n

        def kernel(args, begin, end, worker):
            x, y = ld_i64(args), ld_i64(args + 8)
            ...
            t = load(x + 4 * i)
            store(y + 4 * i, t + t)

Between vectors of one type there are ``+ - * / & | ^ ~``, negation, and comparisons, which return a
mask. A vector may be wider than the machine's registers. This module imports numba, so it is
imported only to compile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from llvmlite import ir
from numba import types

from subgraph.engine.codegen.irtools import (
    ELEMENTS,
    F16,
    I1,
    I8,
    I16,
    I32,
    I64,
    INT64,
    VOID,
    call_intrinsic,
    define,
    emit_binary,
    emit_compare,
    emit_convert,
    emit_fma,
    f32_to_bf16,
    first_lanes,
    half_to_f32,
    is_float,
    is_signed,
    load_at,
    load_masked,
    mask_any,
    pointer,
    prefetch_at,
    reduce_lanes,
    reduce_rows,
    shuffle_vectors,
    splat_value,
    store_at,
    store_first,
    store_masked,
    suffix,
    vec_type,
)
from subgraph.system import host

# ---------------------------------------------------------------- scalars in memory


def _scalar_load(dtype: str) -> Any:
    numba_type, ty, size = ELEMENTS[dtype]
    return define(numba_type, [INT64], lambda b, c, a: load_at(b, a[0], ty, size))


def _scalar_store(dtype: str) -> Any:
    numba_type, _, size = ELEMENTS[dtype]
    return define(VOID, [INT64, numba_type], lambda b, c, a: store_at(b, a[0], a[1], size))


_LOADS = {dtype: _scalar_load(dtype) for dtype in ELEMENTS}
_STORES = {dtype: _scalar_store(dtype) for dtype in ELEMENTS}
ld_i64, ld_i32, ld_i8, ld_u8 = (_LOADS[d] for d in ("int64", "int32", "int8", "uint8"))
ld_f32, ld_f64 = _LOADS["float32"], _LOADS["float64"]
st_i64, st_i32, st_i16, st_i8 = (_STORES[d] for d in ("int64", "int32", "int16", "int8"))
st_u8, st_f32, st_f64 = (_STORES[d] for d in ("uint8", "float32", "float64"))


def ld(dtype: str) -> Any:
    """Return the intrinsic that loads one element of a dtype: ``load(address) -> scalar``."""
    return ld_bool if dtype == "bool" else _LOADS[dtype]


def st(dtype: str) -> Any:
    """Return the intrinsic that stores one element of a dtype: ``store(address, scalar)``."""
    return st_bool if dtype == "bool" else _STORES[dtype]


def _load_bool(builder: Any, _context: Any, args: Sequence[Any]) -> Any:
    return builder.icmp_unsigned("!=", load_at(builder, args[0], I8, 1), I8(0))


def _store_bool(builder: Any, _context: Any, args: Sequence[Any]) -> None:
    store_at(builder, args[0], builder.zext(args[1], I8), 1)


# Bools are bytes, 0 or 1; any byte but 0 is read as True.
ld_bool = define(types.boolean, [INT64], _load_bool)
st_bool = define(VOID, [INT64, types.boolean], _store_bool)


# The bits of a float32 as an integer.
bits_f32 = define(types.int32, [types.float32], lambda b, c, a: b.bitcast(a[0], I32))


# ---------------------------------------------------------------- control, atomics, memory

# The C signature of kernels: see `subgraph.engine.toolchain.kernel`.
KERNEL_FN = ir.FunctionType(ir.VoidType(), [I64, I64, I64, I64])


def _call_kernel(builder: Any, _context: Any, args: Sequence[Any]) -> None:
    builder.call(builder.inttoptr(args[0], KERNEL_FN.as_pointer()), list(args[1:]))


# (address of a kernel, its four arguments)
call_kernel = define(VOID, [INT64] * 5, _call_kernel)


def _atomic(operation: str) -> Any:
    """Return the atomic intrinsic ``(address, operand) -> previous value`` of an int64 word."""

    def emit(builder: Any, _context: Any, args: Sequence[Any]) -> Any:
        return builder.atomic_rmw(operation, pointer(builder, args[0], I64), args[1], "seq_cst")

    return define(INT64, [INT64, INT64], emit)


atomic_add, atomic_xchg, atomic_max = _atomic("add"), _atomic("xchg"), _atomic("max")


def _cas(builder: Any, _context: Any, args: Sequence[Any]) -> Any:
    pair = builder.cmpxchg(pointer(builder, args[0], I64), args[1], args[2], "seq_cst", "seq_cst")
    return builder.extract_value(pair, 0)


# (address, expected, new) -> previous value: stores ``new`` if the word has the expected value.
atomic_cas = define(INT64, [INT64] * 3, _cas)
atomic_load = define(
    INT64,
    [INT64],
    lambda b, c, a: b.load_atomic(pointer(b, a[0], I64), "seq_cst", 8, typ=I64),
)
atomic_store = define(
    VOID,
    [INT64, INT64],
    lambda b, c, a: b.store_atomic(a[1], pointer(b, a[0], I64), "seq_cst", 8),
)


_YIELD = 1  # number of the instruction YIELD among AArch64's hints


def _pause(builder: Any, _context: Any, _args: Sequence[Any]) -> None:
    # Intrinsics rather than inline assembly, which llvmlite assembles for this machine only.
    architecture = host.architecture()
    if architecture == "x86_64":
        call_intrinsic(builder, "llvm.x86.sse2.pause", ir.VoidType(), [])
    elif architecture == "aarch64":
        call_intrinsic(builder, "llvm.aarch64.hint", ir.VoidType(), [I32(_YIELD)])
    else:
        fnty = ir.FunctionType(ir.VoidType(), [])
        builder.call(ir.InlineAsm(fnty, "", "~{memory}", side_effect=True), [])


pause = define(VOID, [], _pause)


prefetch = define(VOID, [INT64], lambda b, c, a: prefetch_at(b, a[0]))


def _memcpy(builder: Any, _context: Any, args: Sequence[Any]) -> None:
    to, source = (pointer(builder, a, I8) for a in args[:2])
    call_intrinsic(builder, "llvm.memcpy.p0.p0.i64", ir.VoidType(), [to, source, args[2], I1(0)])


def _memset(builder: Any, _context: Any, args: Sequence[Any]) -> None:
    to = pointer(builder, args[0], I8)
    call_intrinsic(builder, "llvm.memset.p0.i64", ir.VoidType(), [to, args[1], args[2], I1(0)])


memcpy = define(VOID, [INT64, INT64, INT64], _memcpy)  # (target, source, bytes)
# (address, byte, count)
memset = define(VOID, [INT64, types.int8, INT64], _memset)


# ---------------------------------------------------------------- vectors


class Vec:
    """The operations of one vector type: every attribute but the first five is an intrinsic.

    ``max(a, b)`` is ``a if a > b else b``, so ``b`` if either is NaN, and ``min`` likewise: one
    instruction each. ``maximum`` and ``minimum`` return NaN if either operand is NaN.

    Attributes:
        dtype: Element dtype name.
        lanes: Number of elements.
        itemsize: Bytes of one element.
        type: Numba type of the vector.
        mask_type: Numba type of a mask with as many lanes.
        zero: ``() -> vec``.
        splat: ``(scalar) -> vec``.
        iota: ``() -> vec`` of 0, 1, 2, ….
        load: ``(address) -> vec``. Here and below an address is aligned to one element.
        store: ``(address, vec)``.
        stream: ``(address, vec)`` past the caches; the address must be aligned to the vector.
        bcast: ``(address) -> vec`` with the element at the address in every lane.
        load_n: ``(address, n) -> vec`` of the first n elements, then 0; reads only these n.
        store_n: ``(address, n, vec)``: writes only the first n elements.
        load_m: ``(address, mask) -> vec``, 0 in lanes that are not set, whose memory is not read.
        store_m: ``(address, mask, vec)``.
        gather: ``(base, indices int32 vec, mask) -> vec`` of elements base[index]; 0 if not set.
        fma: ``(a, b, c) -> a * b + c``, rounded once where the machine has FMA; floats only.
        max, min, maximum, minimum: ``(a, b) -> vec``.
        select: ``(mask, a, b) -> vec``: a where set, b elsewhere.
        abs, sqrt, floor, ceil, trunc, rint, copysign: element by element; floats, and abs also of
            integers.
        isnan: ``(vec) -> mask``; unordered: ``(a, b) -> mask`` of the lanes in which either is NaN.
        shl, shr: ``(vec, vec of counts) -> vec``; shr is arithmetic for signed dtypes.
        sum, prod, hmax, hmin: ``(vec) -> scalar``, in the order of `irtools.reduce_lanes`.
        row_sum, row_max, row_min, row_prod: ``(address) -> vec``: reductions of ``lanes`` adjacent
            vectors in memory, lane i that of vector i.
        get: ``(vec, lane) -> scalar``; put: ``(vec, lane, scalar) -> vec``.
        bits: float vec -> int vec of the same bytes; from_bits: the inverse.
        mask_n: ``(n) -> mask`` of the first n lanes; any, all: ``(mask) -> bool``.
    """

    def __init__(self, dtype: str, lanes: int) -> None:
        self.dtype = dtype
        self.lanes = lanes
        self.scalar, self.element, self.itemsize = ELEMENTS[dtype]
        self.type = vec_type(dtype, lanes)
        self.mask_type = vec_type("mask", lanes)
        self.llvm = self.type.llvm
        self._memory()
        self._arithmetic()
        self._reductions()
        if is_float(dtype):
            self._floats()
        else:
            self._integers()

    def _memory(self) -> None:
        v, s, m, ty, size = self.type, self.scalar, self.mask_type, self.llvm, self.itemsize
        lanes = self.lanes
        steps = ir.Constant(ty, [self.element(i) for i in range(lanes)])
        self.zero = define(v, [], lambda b, c, a: ty(None))
        self.iota = define(v, [], lambda b, c, a: steps)
        self.splat = define(v, [s], lambda b, c, a: splat_value(b, a[0], lanes))
        self.load = define(v, [INT64], lambda b, c, a: load_at(b, a[0], ty, size))
        self.store = define(VOID, [INT64, v], lambda b, c, a: store_at(b, a[0], a[1], size))
        self.stream = define(VOID, [INT64, v], self._stream)
        self.bcast = define(
            v,
            [INT64],
            lambda b, c, a: splat_value(b, load_at(b, a[0], self.element, size), lanes),
        )
        self.mask_n = define(m, [INT64], lambda b, c, a: first_lanes(b, a[0], lanes))
        self.load_m = define(v, [INT64, m], lambda b, c, a: load_masked(b, a[0], ty, a[1], size))
        self.store_m = define(
            VOID, [INT64, m, v], lambda b, c, a: store_masked(b, a[0], a[2], a[1], size)
        )
        self.load_n = define(
            v,
            [INT64, INT64],
            lambda b, c, a: load_masked(b, a[0], ty, first_lanes(b, a[1], lanes), size),
        )
        self.store_n = define(
            VOID,
            [INT64, INT64, v],
            lambda b, c, a: store_first(b, a[0], a[2], a[1], size),
        )
        index = vec_type("int32", lanes)
        self.gather = define(v, [INT64, index, m], self._gather)
        self.get = define(s, [v, INT64], lambda b, c, a: b.extract_element(a[0], a[1]))
        self.put = define(v, [v, INT64, s], lambda b, c, a: b.insert_element(a[0], a[2], a[1]))

    def _stream(self, builder: Any, _context: Any, args: Sequence[Any]) -> None:
        stored = builder.store(args[1], pointer(builder, args[0], self.llvm))
        # Without this alignment LLVM must not use the instruction that writes past the caches.
        stored.align = self.itemsize * self.lanes
        stored.set_metadata("nontemporal", builder.module.add_metadata([I32(1)]))

    def _gather(self, builder: Any, _context: Any, args: Sequence[Any]) -> Any:
        base, index, mask = args
        # Bytes of an offset may exceed 32 bits although the index does not.
        offsets = builder.sext(index, ir.VectorType(I64, self.lanes))
        scale = splat_value(builder, I64(self.itemsize), self.lanes)
        addresses = builder.add(splat_value(builder, base, self.lanes), builder.mul(offsets, scale))
        pointers = builder.inttoptr(
            addresses, ir.VectorType(ir.PointerType(self.element), self.lanes)
        )
        name = f"llvm.masked.gather.{suffix(self.llvm)}.v{self.lanes}p0"
        args = [pointers, I32(self.itemsize), mask, self.llvm(None)]
        return call_intrinsic(builder, name, self.llvm, args)

    def _arithmetic(self) -> None:
        v, m, dtype = self.type, self.mask_type, self.dtype

        def pick(op: str) -> Any:
            def emit(builder: Any, _context: Any, args: Sequence[Any]) -> Any:
                return builder.select(emit_compare(builder, op, dtype, *args), *args)

            return define(v, [v, v], emit)

        self.max, self.min = pick(">"), pick("<")
        self.maximum = define(v, [v, v], lambda b, c, a: self._extreme(">")(b, *a))
        self.minimum = define(v, [v, v], lambda b, c, a: self._extreme("<")(b, *a))
        self.select = define(v, [m, v, v], lambda b, c, a: b.select(a[0], a[1], a[2]))
        self.any = define(types.boolean, [m], lambda b, c, a: mask_any(b, a[0]))
        self.all = define(types.boolean, [m], lambda b, c, a: b.not_(mask_any(b, b.not_(a[0]))))

    def _extreme(self, op: str) -> Callable[[Any, Any, Any], Any]:
        """Return the emitter of maximum (``">"``) or minimum; NaN if either operand is NaN."""

        def emit(builder: Any, a: Any, b: Any) -> Any:
            chosen = builder.select(emit_compare(builder, op, self.dtype, a, b), a, b)
            if is_float(self.dtype):
                # The comparison is false if either operand is NaN and then chooses b, so that only
                # a NaN in a is still missing.
                chosen = builder.select(builder.fcmp_unordered("uno", a, a), a, chosen)
            return chosen

        return emit

    def _reductions(self) -> None:
        def reduction(combine: Callable[[Any, Any, Any], Any]) -> Any:
            def emit(builder: Any, _context: Any, args: Sequence[Any]) -> Any:
                return reduce_lanes(builder, args[0], combine)

            return define(self.scalar, [self.type], emit)

        def of_rows(combine: Callable[[Any, Any, Any], Any]) -> Any:
            def emit(builder: Any, _context: Any, args: Sequence[Any]) -> Any:
                steps = (I64(k * self.lanes * self.itemsize) for k in range(self.lanes))
                at = [builder.add(args[0], step) for step in steps]
                rows = [load_at(builder, address, self.llvm, self.itemsize) for address in at]
                return reduce_rows(builder, rows, combine)

            return define(self.type, [INT64], emit)

        def binary(op: str) -> Callable[[Any, Any, Any], Any]:
            return lambda b, x, y: emit_binary(b, op, self.dtype, x, y)

        self.sum, self.prod = reduction(binary("+")), reduction(binary("*"))
        self.hmax, self.hmin = reduction(self._extreme(">")), reduction(self._extreme("<"))
        self.row_sum, self.row_prod = of_rows(binary("+")), of_rows(binary("*"))
        self.row_max, self.row_min = of_rows(self._extreme(">")), of_rows(self._extreme("<"))

    def _floats(self) -> None:
        v, ty = self.type, self.llvm

        def unary(name: str) -> Any:
            return define(
                v,
                [v],
                lambda b, c, a: call_intrinsic(b, f"llvm.{name}.{suffix(ty)}", ty, a),
            )

        self.fma = define(v, [v, v, v], lambda b, c, a: emit_fma(b, *a))
        self.abs, self.sqrt, self.floor = unary("fabs"), unary("sqrt"), unary("floor")
        self.ceil, self.trunc, self.rint = unary("ceil"), unary("trunc"), unary("rint")
        self.copysign = define(
            v,
            [v, v],
            lambda b, c, a: call_intrinsic(b, f"llvm.copysign.{suffix(ty)}", ty, a),
        )
        self.isnan = define(
            self.mask_type, [v], lambda b, c, a: b.fcmp_unordered("uno", a[0], a[0])
        )
        self.unordered = define(
            self.mask_type, [v, v], lambda b, c, a: b.fcmp_unordered("uno", a[0], a[1])
        )
        integer = vec_type(f"int{8 * self.itemsize}", self.lanes)
        self.bits = define(integer, [v], lambda b, c, a: b.bitcast(a[0], integer.llvm))
        self.from_bits = define(v, [integer], lambda b, c, a: b.bitcast(a[0], ty))

    def _integers(self) -> None:
        v = self.type
        right = "ashr" if is_signed(self.dtype) else "lshr"
        self.shl = define(v, [v, v], lambda b, c, a: b.shl(a[0], a[1]))
        self.shr = define(v, [v, v], lambda b, c, a: getattr(b, right)(a[0], a[1]))

        def absolute(builder: Any, _context: Any, args: Sequence[Any]) -> Any:
            if not is_signed(self.dtype):
                return args[0]
            negative = builder.icmp_signed("<", args[0], self.llvm(None))
            return builder.select(negative, builder.neg(args[0]), args[0])

        self.abs = define(v, [v], absolute)


@cache
def vec(dtype: str, lanes: int) -> Vec:
    """Return the operations of vectors of ``lanes`` elements of a dtype (a key of ELEMENTS)."""
    return Vec(dtype, lanes)


@cache
def convert(source: str, target: str, lanes: int) -> Any:
    """Return the intrinsic ``(vec) -> vec`` that converts elements as a cast of C does.

    Floats beyond the range of an integer give an unspecified value; see `convert_sat`.

    Args:
        source: Dtype of the argument.
        target: Dtype of the result.
        lanes: Elements of both vectors.
    """
    to = vec_type(target, lanes)

    def emit(builder: Any, _context: Any, args: Sequence[Any]) -> Any:
        return emit_convert(builder, args[0], source, target)

    return define(to, [vec_type(source, lanes)], emit)


@cache
def convert_sat(source: str, target: str, lanes: int) -> Any:
    """Return the intrinsic ``(vec) -> vec`` from floats to integers that clamps; NaN gives 0.

    Args:
        source: Dtype of the argument, float32 or float64.
        target: Dtype of the result, an integer one.
        lanes: Elements of both vectors.
    """
    to = vec_type(target, lanes)

    def emit(builder: Any, _context: Any, args: Sequence[Any]) -> Any:
        kind = "fptosi" if is_signed(target) else "fptoui"
        name = f"llvm.{kind}.sat.{suffix(to.llvm)}.{suffix(args[0].type)}"
        return call_intrinsic(builder, name, to.llvm, args)

    return define(to, [vec_type(source, lanes)], emit)


@cache
def load_as(storage: str, dtype: str, lanes: int) -> Any:
    """Return ``(address) -> vec`` that loads elements of one dtype and converts them to another.

    Args:
        storage: Dtype in memory; also ``"float16"``, ``"bfloat16"`` or ``"bool"``.
        dtype: Dtype of the result.
        lanes: Elements of the vector.
    """

    def emit(builder: Any, _context: Any, args: Sequence[Any]) -> Any:
        if storage in ("bfloat16", "float16"):
            bits = load_at(builder, args[0], ir.VectorType(I16, lanes), 2)
            return _widen(builder, bits, storage, dtype)
        name = "uint8" if storage == "bool" else storage
        raw = load_at(builder, args[0], ir.VectorType(ELEMENTS[name][1], lanes), ELEMENTS[name][2])
        return emit_convert(builder, raw, name, dtype)

    return define(vec_type(dtype, lanes), [INT64], emit)


@cache
def store_as(dtype: str, storage: str, lanes: int) -> Any:
    """Return ``(address, vec)`` that converts elements to another dtype and stores them.

    Args:
        dtype: Dtype of the vector.
        storage: Dtype in memory; also ``"float16"``, ``"bfloat16"`` (both to nearest even) or
            ``"bool"``.
        lanes: Elements of the vector.
    """

    def emit(builder: Any, _context: Any, args: Sequence[Any]) -> None:
        if storage in ("bfloat16", "float16"):
            store_at(builder, args[0], _narrow_bits(builder, args[1], dtype, storage), 2)
            return
        name = "uint8" if storage == "bool" else storage
        value = emit_convert(builder, args[1], dtype, name)
        store_at(builder, args[0], value, ELEMENTS[name][2])

    return define(VOID, [INT64, vec_type(dtype, lanes)], emit)


@cache
def rounded_as(dtype: str, storage: str, lanes: int) -> Any:
    """Return ``(vec) -> vec`` that rounds elements to the values of a narrower float format.

    Args:
        dtype: Dtype of argument and result, float32 or float64.
        storage: ``"float16"`` or ``"bfloat16"``.
        lanes: Elements of the vector.
    """

    def emit(builder: Any, _context: Any, args: Sequence[Any]) -> Any:
        return _widen(builder, _narrow_bits(builder, args[0], dtype, storage), storage, dtype)

    return define(vec_type(dtype, lanes), [vec_type(dtype, lanes)], emit)


@cache
def permute(dtype: str, lanes: int) -> Any:
    """Return ``(x, indices int32 vec) -> vec`` of elements x[index]; only if `host.permutes` it."""
    v = vec_type(dtype, lanes)
    name = "avx512.permvar.sf.512" if lanes == 16 else "avx2.permps"

    def emit(builder: Any, _context: Any, args: Sequence[Any]) -> Any:
        return call_intrinsic(builder, f"llvm.x86.{name}", v.llvm, args)

    return define(v, [v, vec_type("int32", lanes)], emit)


def _widen(builder: Any, bits: Any, storage: str, dtype: str) -> Any:
    """Emit the conversion of a vector of float16 or bfloat16, as i16, to a dtype."""
    return emit_convert(builder, half_to_f32(builder, bits, storage), "float32", dtype)


def _narrow_bits(builder: Any, value: Any, dtype: str, storage: str) -> Any:
    """Emit the conversion of a vector of a dtype to float16 or bfloat16, as i16."""
    lanes = value.type.count
    single = emit_convert(builder, value, dtype, "float32")
    if storage == "bfloat16":
        return f32_to_bf16(builder, single)
    half = builder.fptrunc(single, ir.VectorType(F16, lanes))
    return builder.bitcast(half, ir.VectorType(I16, lanes))


def shuffle(dtype: str, lanes: int, picks: Sequence[int]) -> Any:
    """Return the intrinsic ``(a, b) -> vec`` that selects elements of two vectors.

    Args:
        dtype: Dtype of all vectors.
        lanes: Elements of a and of b.
        picks: For each element of the result its index in a followed by b.
    """
    v = vec_type(dtype, lanes)
    return define(
        vec_type(dtype, len(picks)),
        [v, v],
        lambda b, c, a: shuffle_vectors(b, a[0], a[1], picks),
    )
