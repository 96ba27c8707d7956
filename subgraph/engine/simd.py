"""Numba building blocks that kernels are written with: scalars in memory, vectors, register tiles.

Addresses are int64 bytes. ``vec(dtype, lanes)`` returns the operations of one vector type; a kernel
factory takes the ones it needs into local names and its kernel closes over them::

    def double(*, lanes: int):
        v = vec("float32", lanes)
        load, store, load_n, store_n = v.load, v.store, v.load_n, v.store_n

        def kernel(args, begin, end, worker):
            x, y = ld_i64(args), ld_i64(args + 8)
            ...
            t = load(x + 4 * i)
            store(y + 4 * i, t + t)

Vectors know ``+ - * / & | ^ ~``, negation and comparisons (which give a mask) among themselves.
Every operation also works when a vector is wider than the machine's registers. This module is
imported only when something must be compiled.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.imputils import lower_builtin
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import intrinsic, models, register_model

from subgraph.engine import host

I1, I8, I16, I32, I64 = (ir.IntType(n) for n in (1, 8, 16, 32, 64))
F16, F32, F64 = ir.HalfType(), ir.FloatType(), ir.DoubleType()
VOID = types.void
INT64 = types.int64

# dtype -> (numba type of one element in a register, LLVM type, bytes)
_ELEMENTS: dict[str, tuple[Any, Any, int]] = {
    "float64": (types.float64, F64, 8),
    "float32": (types.float32, F32, 4),
    "int64": (types.int64, I64, 8),
    "uint64": (types.uint64, I64, 8),
    "int32": (types.int32, I32, 4),
    "uint32": (types.uint32, I32, 4),
    "int16": (types.int16, I16, 2),
    "uint16": (types.uint16, I16, 2),
    "int8": (types.int8, I8, 1),
    "uint8": (types.uint8, I8, 1),
}
FLOATS = ("float32", "float64")
Emit = Callable[[Any, Any, Sequence[Any]], Any]


def is_float(dtype: str) -> bool:
    """Return whether a vector dtype is a floating-point one."""
    return dtype in FLOATS


def is_signed(dtype: str) -> bool:
    """Return whether an integer dtype is signed."""
    return not dtype.startswith("uint")


class VecType(types.Type):
    """Numba type of ``<lanes x dtype>``; dtype ``"mask"`` is a vector of bits."""

    def __init__(self, dtype: str, lanes: int) -> None:
        self.dtype_name = dtype
        self.lanes = lanes
        super().__init__(name=f"vec({dtype},{lanes})")

    @property
    def llvm(self) -> Any:
        element = I1 if self.dtype_name == "mask" else _ELEMENTS[self.dtype_name][1]
        return ir.VectorType(element, self.lanes)


@register_model(VecType)
class _VecModel(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: VecType) -> None:
        super().__init__(dmm, fe_type, fe_type.llvm)


class TileType(types.Type):
    """Numba type of a register tile: ``rows x columns`` vectors."""

    def __init__(self, vector: VecType, rows: int, columns: int) -> None:
        self.vector = vector
        self.rows = rows
        self.columns = columns
        super().__init__(name=f"tile({vector.name},{rows},{columns})")


@register_model(TileType)
class _TileModel(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: TileType) -> None:
        array = ir.ArrayType(fe_type.vector.llvm, fe_type.rows * fe_type.columns)
        super().__init__(dmm, fe_type, array)


def define(restype: Any, argtypes: Sequence[Any], emit: Emit) -> Any:
    """Make an intrinsic from its types and what it emits.

    Args:
        restype: Numba type of the result, ``VOID`` for none.
        argtypes: Numba types of the arguments (at most 10); numba converts scalars to them.
        emit: ``emit(builder, context, values)`` returns the LLVM value, or anything when void.
    """
    sig = restype(*argtypes)

    def codegen(context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        result = emit(builder, context, args)
        return context.get_dummy_value() if restype is VOID else result

    def typed() -> Any:
        return sig, codegen

    makers: list[Any] = [
        lambda _t: typed(),
        lambda _t, a: typed(),
        lambda _t, a, b: typed(),
        lambda _t, a, b, c: typed(),
        lambda _t, a, b, c, d: typed(),
        lambda _t, a, b, c, d, e: typed(),
        lambda _t, a, b, c, d, e, f: typed(),
        lambda _t, a, b, c, d, e, f, g: typed(),
        lambda _t, a, b, c, d, e, f, g, h: typed(),
        lambda _t, a, b, c, d, e, f, g, h, i: typed(),
        lambda _t, a, b, c, d, e, f, g, h, i, j: typed(),
    ]
    return intrinsic(makers[len(argtypes)])


def pointer(builder: Any, address: Any, ty: Any) -> Any:
    """Turn an int64 address into a pointer to ``ty``."""
    return builder.inttoptr(address, ir.PointerType(ty))


def load_at(builder: Any, address: Any, ty: Any, align: int) -> Any:
    """Emit a load of an LLVM type from an address with a known alignment in bytes."""
    loaded = builder.load(pointer(builder, address, ty), typ=ty)
    loaded.align = align
    return loaded


def store_at(builder: Any, address: Any, value: Any, align: int) -> None:
    """Emit a store of a value to an address with a known alignment in bytes."""
    stored = builder.store(value, pointer(builder, address, value.type))
    stored.align = align


def call_intrinsic(builder: Any, name: str, ty: Any, args: Sequence[Any]) -> Any:
    """Emit a call of an LLVM intrinsic (or C function) that returns ``ty``."""
    fnty = ir.FunctionType(ty, [a.type for a in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, fnty, name), args)


def suffix(ty: Any) -> str:
    """Return LLVM's name of a type inside intrinsic names, such as ``v16f32``."""
    if isinstance(ty, ir.VectorType):
        return f"v{ty.count}{suffix(ty.element)}"
    if isinstance(ty, ir.IntType):
        return f"i{ty.width}"
    return {ir.HalfType: "f16", ir.FloatType: "f32", ir.DoubleType: "f64"}[type(ty)]


def splat_value(builder: Any, value: Any, lanes: int) -> Any:
    """Emit a vector with one scalar in every lane."""
    ty = ir.VectorType(value.type, lanes)
    undef = ir.Constant(ty, ir.Undefined)
    first = builder.insert_element(undef, value, I32(0))
    return builder.shuffle_vector(first, undef, ir.Constant(ir.VectorType(I32, lanes), [0] * lanes))


# ---------------------------------------------------------------- scalars in memory


def _scalar_load(dtype: str) -> Any:
    numba_type, ty, size = _ELEMENTS[dtype]
    return define(numba_type, [INT64], lambda b, c, a: load_at(b, a[0], ty, size))


def _scalar_store(dtype: str) -> Any:
    numba_type, _, size = _ELEMENTS[dtype]
    return define(VOID, [INT64, numba_type], lambda b, c, a: store_at(b, a[0], a[1], size))


_LOADS = {dtype: _scalar_load(dtype) for dtype in _ELEMENTS}
_STORES = {dtype: _scalar_store(dtype) for dtype in _ELEMENTS}
ld_i64, ld_i32, ld_i16, ld_i8 = (_LOADS[d] for d in ("int64", "int32", "int16", "int8"))
ld_u64, ld_u32, ld_u16, ld_u8 = (_LOADS[d] for d in ("uint64", "uint32", "uint16", "uint8"))
ld_f32, ld_f64 = _LOADS["float32"], _LOADS["float64"]
st_i64, st_i32, st_i16, st_i8 = (_STORES[d] for d in ("int64", "int32", "int16", "int8"))
st_u64, st_u32, st_u16, st_u8 = (_STORES[d] for d in ("uint64", "uint32", "uint16", "uint8"))
st_f32, st_f64 = _STORES["float32"], _STORES["float64"]


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


ld_bool = define(types.boolean, [INT64], _load_bool)
st_bool = define(VOID, [INT64, types.boolean], _store_bool)


def _bf16_to_f32(builder: Any, bits: Any) -> Any:
    """Emit the widening of bfloat16 bits (i16 or a vector of it): exact."""
    wide, real = (_vector_like(bits.type, t) for t in (I32, F32))
    return builder.bitcast(builder.shl(builder.zext(bits, wide), wide(_fill(wide, 16))), real)


def _f32_to_bf16(builder: Any, value: Any) -> Any:
    """Emit the rounding of float32 to bfloat16 bits, to nearest even; NaN stays a quiet NaN."""
    wide, narrow = (_vector_like(value.type, t) for t in (I32, I16))
    bits = builder.bitcast(value, wide)
    odd = builder.and_(builder.lshr(bits, wide(_fill(wide, 16))), wide(_fill(wide, 1)))
    rounded = builder.add(bits, builder.add(odd, wide(_fill(wide, 0x7FFF))))
    quiet = builder.or_(bits, wide(_fill(wide, 0x400000)))
    nan = builder.fcmp_unordered("uno", value, value)
    chosen = builder.select(nan, quiet, rounded)
    return builder.trunc(builder.lshr(chosen, wide(_fill(wide, 16))), narrow)


def _vector_like(ty: Any, element: Any) -> Any:
    return ir.VectorType(element, ty.count) if isinstance(ty, ir.VectorType) else element


def _fill(ty: Any, value: Any) -> Any:
    return [value] * ty.count if isinstance(ty, ir.VectorType) else value


ld_bf16 = define(types.float32, [INT64], lambda b, c, a: _bf16_to_f32(b, load_at(b, a[0], I16, 2)))
st_bf16 = define(
    VOID,
    [INT64, types.float32],
    lambda b, c, a: store_at(b, a[0], _f32_to_bf16(b, a[1]), 2),
)
ld_f16 = define(types.float32, [INT64], lambda b, c, a: b.fpext(load_at(b, a[0], F16, 2), F32))
st_f16 = define(
    VOID, [INT64, types.float32], lambda b, c, a: store_at(b, a[0], b.fptrunc(a[1], F16), 2)
)
bits_f32 = define(types.int32, [types.float32], lambda b, c, a: b.bitcast(a[0], I32))
f32_bits = define(types.float32, [types.int32], lambda b, c, a: b.bitcast(a[0], F32))
bits_f64 = define(types.int64, [types.float64], lambda b, c, a: b.bitcast(a[0], I64))
f64_bits = define(types.float64, [types.int64], lambda b, c, a: b.bitcast(a[0], F64))


# ---------------------------------------------------------------- control, atomics, memory

KERNEL_FN = ir.FunctionType(ir.VoidType(), [I64, I64, I64, I64])


def _call_kernel(builder: Any, _context: Any, args: Sequence[Any]) -> None:
    builder.call(builder.inttoptr(args[0], KERNEL_FN.as_pointer()), list(args[1:]))


call_kernel = define(VOID, [INT64] * 5, _call_kernel)


def _atomic(operation: str) -> Any:
    def emit(builder: Any, _context: Any, args: Sequence[Any]) -> Any:
        return builder.atomic_rmw(operation, pointer(builder, args[0], I64), args[1], "seq_cst")

    return define(INT64, [INT64, INT64], emit)


atomic_add, atomic_xchg, atomic_max = _atomic("add"), _atomic("xchg"), _atomic("max")


def _cas(builder: Any, _context: Any, args: Sequence[Any]) -> Any:
    pair = builder.cmpxchg(pointer(builder, args[0], I64), args[1], args[2], "seq_cst", "seq_cst")
    return builder.extract_value(pair, 0)


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


def _pause(builder: Any, _context: Any, _args: Sequence[Any]) -> None:
    text = {"x86_64": "pause", "aarch64": "yield"}.get(host.architecture(), "")
    fnty = ir.FunctionType(ir.VoidType(), [])
    builder.call(ir.InlineAsm(fnty, text, "~{memory}", side_effect=True), [])


pause = define(VOID, [], _pause)


def _prefetch(write: int, locality: int) -> Any:
    def emit(builder: Any, _context: Any, args: Sequence[Any]) -> None:
        where = pointer(builder, args[0], I8)
        flags = [I32(write), I32(locality), I32(1)]
        call_intrinsic(builder, "llvm.prefetch.p0", ir.VoidType(), [where, *flags])

    return define(VOID, [INT64], emit)


prefetch, prefetch_l2, prefetch_w = _prefetch(0, 3), _prefetch(0, 2), _prefetch(1, 3)


def _memcpy(builder: Any, _context: Any, args: Sequence[Any]) -> None:
    to, source = (pointer(builder, a, I8) for a in args[:2])
    call_intrinsic(builder, "llvm.memcpy.p0.p0.i64", ir.VoidType(), [to, source, args[2], I1(0)])


def _memset(builder: Any, _context: Any, args: Sequence[Any]) -> None:
    to = pointer(builder, args[0], I8)
    call_intrinsic(builder, "llvm.memset.p0.i64", ir.VoidType(), [to, args[1], args[2], I1(0)])


memcpy = define(VOID, [INT64, INT64, INT64], _memcpy)
memset = define(VOID, [INT64, types.int8, INT64], _memset)


# ---------------------------------------------------------------- vectors


class Vec:
    """The operations of one vector type; every attribute but the first five is an intrinsic.

    ``max(a, b)`` is ``a if a > b else b`` and ``min`` likewise, one instruction each: ``b`` when
    either is NaN. ``maximum`` and ``minimum`` pass on the NaN of either operand.

    Attributes:
        dtype: Element dtype name.
        lanes: Number of elements.
        itemsize: Bytes of one element.
        type: Numba type of the vector.
        mask_type: Numba type of a mask with as many lanes.
        zero: ``() -> vec``.
        splat: ``(scalar) -> vec``.
        iota: ``() -> vec`` of 0, 1, 2, ….
        load: ``(address) -> vec``; the address need only be aligned to one element.
        store: ``(address, vec)``.
        stream: ``(address, vec)`` past the caches; the address must be aligned to the vector.
        bcast: ``(address) -> vec`` with the element there in every lane.
        load_n: ``(address, n) -> vec`` of the first n elements, 0 elsewhere; reads no further.
        store_n: ``(address, n, vec)``: stores the first n elements only.
        load_m: ``(address, mask) -> vec``; store_m: ``(address, mask, vec)``.
        gather: ``(base, indices int32 vec, mask) -> vec``: elements base[index], 0 where masked.
        fma: ``(a, b, c) -> a * b + c``, fused where the machine can; floats only.
        max, min, maximum, minimum: ``(a, b) -> vec``.
        select: ``(mask, a, b) -> vec``.
        abs, sqrt, floor, ceil, trunc, rint, copysign: as their names say.
        isnan: ``(vec) -> mask``.
        shl, shr: ``(vec, scalar or vec count)``; shr keeps the sign of signed dtypes.
        sum, hmax, hmin: ``(vec) -> scalar`` in a fixed order (halves folded together).
        prod: the same for products.
        get: ``(vec, lane) -> scalar``; put: ``(vec, lane, scalar) -> vec``.
        bits: float vec -> int vec of the same bytes; from_bits: back.
        mask_n: ``(n) -> mask`` of the first n lanes; any, all: ``(mask) -> bool``.
    """

    def __init__(self, dtype: str, lanes: int) -> None:
        self.dtype = dtype
        self.lanes = lanes
        self.scalar, self.element, self.itemsize = _ELEMENTS[dtype]
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
        self.load_m = define(v, [INT64, m], lambda b, c, a: self.emit_load(b, a[0], a[1]))
        self.store_m = define(
            VOID, [INT64, m, v], lambda b, c, a: self.emit_store(b, a[0], a[1], a[2])
        )
        self.load_n = define(
            v,
            [INT64, INT64],
            lambda b, c, a: self.emit_load(b, a[0], first_lanes(b, a[1], lanes)),
        )
        self.store_n = define(
            VOID,
            [INT64, INT64, v],
            lambda b, c, a: self.emit_store(b, a[0], first_lanes(b, a[1], lanes), a[2]),
        )
        index = vec_type("int32", lanes)
        self.gather = define(v, [INT64, index, m], self._gather)
        self.get = define(s, [v, INT64], lambda b, c, a: b.extract_element(a[0], a[1]))
        self.put = define(v, [v, INT64, s], lambda b, c, a: b.insert_element(a[0], a[2], a[1]))

    def _stream(self, builder: Any, _context: Any, args: Sequence[Any]) -> None:
        stored = builder.store(args[1], pointer(builder, args[0], self.llvm))
        stored.align = self.itemsize * self.lanes
        stored.set_metadata("nontemporal", builder.module.add_metadata([I32(1)]))

    def emit_load(self, builder: Any, address: Any, mask: Any) -> Any:
        """Emit a masked load from an int64 address; masked lanes are 0 and not read."""
        args = [pointer(builder, address, self.llvm), I32(self.itemsize), mask, self.llvm(None)]
        return call_intrinsic(builder, f"llvm.masked.load.{suffix(self.llvm)}.p0", self.llvm, args)

    def emit_store(self, builder: Any, address: Any, mask: Any, value: Any) -> None:
        """Emit a masked store to an int64 address."""
        args = [value, pointer(builder, address, self.llvm), I32(self.itemsize), mask]
        call_intrinsic(builder, f"llvm.masked.store.{suffix(self.llvm)}.p0", ir.VoidType(), args)

    def _gather(self, builder: Any, _context: Any, args: Sequence[Any]) -> Any:
        base, index, mask = args
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

        def pick(op: str, propagate: bool) -> Any:
            def emit(builder: Any, _context: Any, args: Sequence[Any]) -> Any:
                chosen = builder.select(
                    emit_compare(builder, op, dtype, args[0], args[1]), args[0], args[1]
                )
                if propagate and is_float(dtype):
                    nan = builder.fcmp_unordered("uno", args[0], args[0])
                    chosen = builder.select(nan, args[0], chosen)
                return chosen

            return define(v, [v, v], emit)

        self.max, self.min = pick(">", False), pick("<", False)
        self.maximum, self.minimum = pick(">", True), pick("<", True)
        self.select = define(v, [m, v, v], lambda b, c, a: b.select(a[0], a[1], a[2]))
        self.any = define(types.boolean, [m], lambda b, c, a: _mask_any(b, a[0]))
        self.all = define(types.boolean, [m], lambda b, c, a: b.not_(_mask_any(b, b.not_(a[0]))))

    def _reductions(self) -> None:
        def reduction(combine: Callable[[Any, Any, Any], Any]) -> Any:
            def emit(builder: Any, _context: Any, args: Sequence[Any]) -> Any:
                return fold(builder, args[0], combine)

            return define(self.scalar, [self.type], emit)

        def extreme(op: str) -> Callable[[Any, Any, Any], Any]:
            def combine(builder: Any, a: Any, b: Any) -> Any:
                chosen = builder.select(emit_compare(builder, op, self.dtype, a, b), a, b)
                if is_float(self.dtype):
                    nan = builder.fcmp_unordered("uno", a, a)
                    chosen = builder.select(nan, a, chosen)
                return chosen

            return combine

        self.sum = reduction(lambda b, x, y: emit_binary(b, "+", self.dtype, x, y))
        self.prod = reduction(lambda b, x, y: emit_binary(b, "*", self.dtype, x, y))
        self.hmax, self.hmin = reduction(extreme(">")), reduction(extreme("<"))

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
def vec_type(dtype: str, lanes: int) -> VecType:
    """Return the numba type of a vector (dtype ``"mask"``: of a mask)."""
    return VecType(dtype, lanes)


@cache
def vec(dtype: str, lanes: int) -> Vec:
    """Return the operations of vectors with that many elements of a dtype."""
    return Vec(dtype, lanes)


def first_lanes(builder: Any, count: Any, lanes: int) -> Any:
    """Emit the mask of the first ``count`` (int64, any value) of some lanes."""
    # Narrow lane numbers compare in one instruction; clamping first keeps large counts right.
    low = builder.select(builder.icmp_signed("<", count, I64(0)), I64(0), count)
    capped = builder.select(builder.icmp_signed(">", low, I64(lanes)), I64(lanes), low)
    width = I32 if lanes <= 16 else I16
    wanted = splat_value(builder, builder.trunc(capped, width), lanes)
    steps = ir.Constant(ir.VectorType(width, lanes), [width(i) for i in range(lanes)])
    return builder.icmp_signed("<", steps, wanted)


def _mask_any(builder: Any, mask: Any) -> Any:
    whole = ir.IntType(mask.type.count)
    return builder.icmp_unsigned("!=", builder.bitcast(mask, whole), whole(0))


def fold(builder: Any, value: Any, combine: Callable[[Any, Any, Any], Any]) -> Any:
    """Emit a horizontal reduction: halves of the vector are combined until one lane is left."""
    lanes = value.type.count
    while lanes > 1:
        half = lanes // 2
        undef = ir.Constant(value.type, ir.Undefined)
        picks = [
            ir.Constant(ir.VectorType(I32, half), [I32(start + i) for i in range(half)])
            for start in (0, half)
        ]
        low, high = (builder.shuffle_vector(value, undef, p) for p in picks)
        value, lanes = combine(builder, low, high), half
    return builder.extract_element(value, I32(0))


def emit_fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """Emit ``a * b + c``, fused where the instruction set can (never a library call)."""
    name = "fma" if host.isa().fma else "fmuladd"
    return call_intrinsic(builder, f"llvm.{name}.{suffix(a.type)}", a.type, [a, b, c])


_FLOAT_BINARY = {"+": "fadd", "-": "fsub", "*": "fmul", "/": "fdiv"}
_INT_BINARY = {"+": "add", "-": "sub", "*": "mul", "&": "and_", "|": "or_", "^": "xor"}


def emit_binary(builder: Any, op: str, dtype: str, a: Any, b: Any) -> Any:
    """Emit an element-wise operator of two vectors."""
    if is_float(dtype):
        return getattr(builder, _FLOAT_BINARY[op])(a, b)
    if op == "/":
        return (builder.sdiv if is_signed(dtype) else builder.udiv)(a, b)
    return getattr(builder, _INT_BINARY[op])(a, b)


def emit_compare(builder: Any, op: str, dtype: str, a: Any, b: Any) -> Any:
    """Emit a comparison of two vectors; with NaN only ``!=`` holds."""
    if is_float(dtype):
        compare = builder.fcmp_unordered if op == "!=" else builder.fcmp_ordered
        return compare(op, a, b)
    return (builder.icmp_signed if is_signed(dtype) else builder.icmp_unsigned)(op, a, b)


@cache
def convert(source: str, target: str, lanes: int) -> Any:
    """Return the intrinsic that converts a vector's elements, as C does.

    Floats beyond the target integer's range give an unspecified value; see ``convert_sat``.
    """
    to = vec_type(target, lanes)

    def emit(builder: Any, _context: Any, args: Sequence[Any]) -> Any:
        return emit_convert(builder, args[0], source, target)

    return define(to, [vec_type(source, lanes)], emit)


@cache
def convert_sat(source: str, target: str, lanes: int) -> Any:
    """Return the float to integer conversion that clamps to the range; NaN gives 0."""
    to = vec_type(target, lanes)

    def emit(builder: Any, _context: Any, args: Sequence[Any]) -> Any:
        kind = "fptosi" if is_signed(target) else "fptoui"
        name = f"llvm.{kind}.sat.{suffix(to.llvm)}.{suffix(args[0].type)}"
        return call_intrinsic(builder, name, to.llvm, args)

    return define(to, [vec_type(source, lanes)], emit)


def emit_convert(builder: Any, value: Any, source: str, target: str) -> Any:
    """Emit the conversion of a vector between two dtypes."""
    ty = ir.VectorType(_ELEMENTS[target][1], value.type.count)
    before, after = _ELEMENTS[source][2], _ELEMENTS[target][2]
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


@cache
def load_as(storage: str, dtype: str, lanes: int) -> Any:
    """Return ``(address) -> vec of dtype`` that reads elements stored in another dtype.

    ``storage`` may also be ``"float16"``, ``"bfloat16"`` or ``"bool"``.
    """

    def emit(builder: Any, _context: Any, args: Sequence[Any]) -> Any:
        if storage in ("bfloat16", "float16"):
            bits = load_at(builder, args[0], ir.VectorType(I16, lanes), 2)
            return _widen(builder, bits, storage, dtype)
        name = "uint8" if storage == "bool" else storage
        raw = load_at(
            builder, args[0], ir.VectorType(_ELEMENTS[name][1], lanes), _ELEMENTS[name][2]
        )
        return emit_convert(builder, raw, name, dtype)

    return define(vec_type(dtype, lanes), [INT64], emit)


@cache
def store_as(dtype: str, storage: str, lanes: int) -> Any:
    """Return ``(address, vec of dtype)`` that stores elements in another dtype (rounded, cut)."""

    def emit(builder: Any, _context: Any, args: Sequence[Any]) -> None:
        if storage in ("bfloat16", "float16"):
            store_at(builder, args[0], _narrow_bits(builder, args[1], dtype, storage), 2)
            return
        name = "uint8" if storage == "bool" else storage
        value = emit_convert(builder, args[1], dtype, name)
        store_at(builder, args[0], value, _ELEMENTS[name][2])

    return define(VOID, [INT64, vec_type(dtype, lanes)], emit)


def _widen(builder: Any, bits: Any, storage: str, dtype: str) -> Any:
    lanes = bits.type.count
    if storage == "bfloat16":
        value = _bf16_to_f32(builder, bits)
    else:
        half = builder.bitcast(bits, ir.VectorType(F16, lanes))
        value = builder.fpext(half, ir.VectorType(F32, lanes))
    return emit_convert(builder, value, "float32", dtype)


def _narrow_bits(builder: Any, value: Any, dtype: str, storage: str) -> Any:
    lanes = value.type.count
    single = emit_convert(builder, value, dtype, "float32")
    if storage == "bfloat16":
        return _f32_to_bf16(builder, single)
    half = builder.fptrunc(single, ir.VectorType(F16, lanes))
    return builder.bitcast(half, ir.VectorType(I16, lanes))


def shuffle(dtype: str, lanes: int, picks: Sequence[int]) -> Any:
    """Return ``(a, b) -> vec`` of the elements ``picks`` of a followed by b."""
    mask = ir.Constant(ir.VectorType(I32, len(picks)), [I32(i) for i in picks])
    v = vec_type(dtype, lanes)
    return define(
        vec_type(dtype, len(picks)), [v, v], lambda b, c, a: b.shuffle_vector(a[0], a[1], mask)
    )


# ---------------------------------------------------------------- operators


def _same_vectors(args: Sequence[Any], count: int) -> bool:
    return len(args) == count and all(isinstance(a, VecType) and a == args[0] for a in args)


def _register_operator(function: Any, arity: int, emit: Any, result_is_mask: bool) -> None:
    class Template(AbstractTemplate):
        def generic(self, args: Any, _kws: Any) -> Any:
            if not _same_vectors(args, arity):
                return None
            mask = vec_type("mask", args[0].lanes)
            return signature(mask if result_is_mask else args[0], *args)

    infer_global(function)(Template)

    def lowered(_context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return emit(builder, sig.args[0].dtype_name, args)

    lower_builtin(function, *([VecType] * arity))(lowered)


def _negate(builder: Any, dtype: str, args: Sequence[Any]) -> Any:
    return builder.fneg(args[0]) if is_float(dtype) else builder.neg(args[0])


def _register_operators() -> None:
    def binary(op: str) -> Any:
        return lambda b, dtype, a: emit_binary(b, op, dtype, a[0], a[1])

    def compare(op: str) -> Any:
        return lambda b, dtype, a: emit_compare(b, op, dtype, a[0], a[1])

    arithmetic = {
        "+": operator.add,
        "-": operator.sub,
        "*": operator.mul,
        "/": operator.truediv,
        "&": operator.and_,
        "|": operator.or_,
        "^": operator.xor,
    }
    for op, function in arithmetic.items():
        _register_operator(function, 2, binary(op), False)
    comparisons = {
        "<": operator.lt,
        "<=": operator.le,
        ">": operator.gt,
        ">=": operator.ge,
        "==": operator.eq,
        "!=": operator.ne,
    }
    for op, function in comparisons.items():
        _register_operator(function, 2, compare(op), True)
    _register_operator(operator.neg, 1, _negate, False)
    _register_operator(operator.invert, 1, lambda b, dtype, a: b.not_(a[0]), False)


_register_operators()
