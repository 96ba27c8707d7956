"""Kernel factories for tests: every vector operation, and kernels that watch the thread pool."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import literal_unroll, njit

from subgraph.engine.codegen import dot, simd, vmath
from subgraph.engine.codegen.simd import (
    atomic_add,
    atomic_cas,
    atomic_load,
    atomic_max,
    atomic_store,
    atomic_xchg,
    ld_f64,
    ld_i64,
    memcpy,
    memset,
    pause,
    prefetch,
    st_f64,
    st_i64,
)
from subgraph.engine.program.walker_kernels import yield_core

Function = Callable[..., Any]


def scalars(*, dtype: str) -> Function:
    """Copy ``end - begin`` elements one by one."""
    load, store = simd.ld(dtype), simd.st(dtype)
    size = 1 if dtype == "bool" else simd.vec(dtype, 1).itemsize

    def kernel(args: int, begin: int, end: int, _worker: int) -> None:
        source, target = ld_i64(args), ld_i64(args + 8)
        prefetch(source)
        for i in range(begin, end):
            store(target + size * i, load(source + size * i))

    return kernel


def arithmetic(*, dtype: str, lanes: int) -> Function:
    """Store the results of all operations of two vectors, one after the other."""
    v = simd.vec(dtype, lanes)
    load, store, size = v.load, v.store, v.itemsize * lanes
    low, high, low_nan, high_nan = v.min, v.max, v.minimum, v.maximum
    pick, absolute, splat, zero, iota, bcast = v.select, v.abs, v.splat, v.zero, v.iota, v.bcast
    get, put = v.get, v.put

    def kernel(args: int, _begin: int, _end: int, _worker: int) -> None:
        x, y, out = ld_i64(args), ld_i64(args + 8), ld_i64(args + 16)
        a, b = load(x), load(y)
        store(out, a + b)
        store(out + size, a - b)
        store(out + 2 * size, a * b)
        store(out + 3 * size, low(a, b))
        store(out + 4 * size, high(a, b))
        store(out + 5 * size, low_nan(a, b))
        store(out + 6 * size, high_nan(a, b))
        store(out + 7 * size, pick(a < b, a, b))
        store(out + 8 * size, pick(a <= b, a, b))
        store(out + 9 * size, pick(a > b, a, b))
        store(out + 10 * size, pick(a >= b, a, b))
        store(out + 11 * size, pick(a == b, a, zero()))
        store(out + 12 * size, pick(a != b, a, zero()))
        store(out + 13 * size, absolute(a))
        store(out + 14 * size, -a)
        store(out + 15 * size, splat(3))
        store(out + 16 * size, iota())
        store(out + 17 * size, bcast(x))
        store(out + 18 * size, pick((a < b) | ~(a <= b), a, zero()))
        store(out + 19 * size, pick((a < b) & (a != b) ^ (a == b), a, b))
        store(out + 20 * size, put(a, lanes - 1, get(b, 0)))

    return kernel


def floats(*, dtype: str, lanes: int) -> Function:
    """Store the results of all operations that only floats have."""
    v = simd.vec(dtype, lanes)
    load, store, size = v.load, v.store, v.itemsize * lanes
    fma, root, floor, ceil, trunc, rint = v.fma, v.sqrt, v.floor, v.ceil, v.trunc, v.rint
    sign, nan, bits, back, pick, zero = v.copysign, v.isnan, v.bits, v.from_bits, v.select, v.zero

    def kernel(args: int, _begin: int, _end: int, _worker: int) -> None:
        x, y, out = ld_i64(args), ld_i64(args + 8), ld_i64(args + 16)
        a, b = load(x), load(y)
        store(out, a / b)
        store(out + size, fma(a, b, a))
        store(out + 2 * size, root(a))
        store(out + 3 * size, floor(a))
        store(out + 4 * size, ceil(a))
        store(out + 5 * size, trunc(a))
        store(out + 6 * size, rint(a))
        store(out + 7 * size, sign(a, b))
        store(out + 8 * size, pick(nan(a), zero(), a))
        store(out + 9 * size, back(bits(a)))

    return kernel


def integers(*, dtype: str, lanes: int) -> Function:
    """Store the results of all operations that only integers have."""
    v = simd.vec(dtype, lanes)
    load, store, size = v.load, v.store, v.itemsize * lanes
    left, right, splat = v.shl, v.shr, v.splat

    def kernel(args: int, _begin: int, _end: int, _worker: int) -> None:
        x, y, out = ld_i64(args), ld_i64(args + 8), ld_i64(args + 16)
        a, b = load(x), load(y)
        store(out, a & b)
        store(out + size, a | b)
        store(out + 2 * size, a ^ b)
        store(out + 3 * size, ~a)
        store(out + 4 * size, left(a, splat(2)))
        store(out + 5 * size, right(a, splat(2)))

    return kernel


def reductions(*, dtype: str, lanes: int) -> Function:
    """Store sum, product, largest and smallest element, as elements."""
    v = simd.vec(dtype, lanes)
    load, store, size = v.load, simd.st(dtype), v.itemsize
    total, product, largest, smallest = v.sum, v.prod, v.hmax, v.hmin

    def kernel(args: int, _begin: int, _end: int, _worker: int) -> None:
        a, out = load(ld_i64(args)), ld_i64(args + 8)
        store(out, total(a))
        store(out + size, product(a))
        store(out + 2 * size, largest(a))
        store(out + 3 * size, smallest(a))

    return kernel


def masked(*, dtype: str, lanes: int) -> Function:
    """Copy the first n elements and gather by index, touching nothing else."""
    v = simd.vec(dtype, lanes)
    load_n, store_n, load_m, store_m, mask_n = v.load_n, v.store_n, v.load_m, v.store_m, v.mask_n
    load_index, gather, anything, everything = (
        simd.vec("int32", lanes).load_n,
        v.gather,
        v.any,
        v.all,
    )
    size = v.itemsize * lanes

    def kernel(args: int, _begin: int, end: int, _worker: int) -> None:
        x, index, out, flags = (
            ld_i64(args),
            ld_i64(args + 8),
            ld_i64(args + 16),
            ld_i64(args + 24),
        )
        mask = mask_n(end)
        store_n(out, end, load_n(x, end))
        store_m(out + size, mask, load_m(x, mask))
        store_n(out + 2 * size, end, gather(x, load_index(index, end), mask))
        st_i64(flags, 1 if anything(mask) else 0)
        st_i64(flags + 8, 1 if everything(mask) else 0)

    return kernel


def conversion(*, source: str, target: str, lanes: int, saturate: bool) -> Function:
    """Convert one vector."""
    load, store = simd.vec(source, lanes).load, simd.vec(target, lanes).store
    change = (simd.convert_sat if saturate else simd.convert)(source, target, lanes)

    def kernel(args: int, _begin: int, _end: int, _worker: int) -> None:
        store(ld_i64(args + 8), change(load(ld_i64(args))))

    return kernel


def storage(*, stored: str, dtype: str, lanes: int) -> Function:
    """Read one vector stored in another dtype, keep it, and store it back."""
    load, keep = simd.load_as(stored, dtype, lanes), simd.vec(dtype, lanes).store
    back = simd.store_as(dtype, stored, lanes)

    def kernel(args: int, _begin: int, _end: int, _worker: int) -> None:
        value = load(ld_i64(args))
        keep(ld_i64(args + 8), value)
        back(ld_i64(args + 16), value)

    return kernel


def mixed(*, lanes: int) -> Function:
    """Reverse a vector by a shuffle, and stream it out past the caches."""
    v = simd.vec("float32", lanes)
    load, stream = v.load, v.stream
    turn = simd.shuffle("float32", lanes, range(lanes - 1, -1, -1))

    def kernel(args: int, _begin: int, _end: int, _worker: int) -> None:
        a = load(ld_i64(args))
        stream(ld_i64(args + 8), turn(a, a))

    return kernel


def memory() -> Function:
    """Try the operations on memory and the atomic ones; old values go to the output."""

    def kernel(args: int, _begin: int, _end: int, _worker: int) -> None:
        cell, out = ld_i64(args), ld_i64(args + 8)
        st_i64(out, atomic_add(cell, 5))
        st_i64(out + 8, atomic_max(cell, 100))
        st_i64(out + 16, atomic_cas(cell, 100, 7))
        st_i64(out + 24, atomic_cas(cell, 100, 8))
        st_i64(out + 32, atomic_xchg(cell, 9))
        st_i64(out + 40, atomic_load(cell))
        atomic_store(cell, 11)
        pause()
        memcpy(out + 48, cell, 8)
        memset(out + 56, 1, 8)
        st_f64(out + 64, ld_f64(args + 16) * 2.0)

    return kernel


def elementary(*, name: str, dtype: str, lanes: int) -> Function:
    """Apply a function of ``vmath`` to all elements."""
    v = simd.vec(dtype, lanes)
    load_n, store_n, size = v.load_n, v.store_n, v.itemsize
    apply = vmath.function(name, dtype, lanes)

    def kernel(args: int, begin: int, end: int, _worker: int) -> None:
        x, y = ld_i64(args), ld_i64(args + 8)
        for i in range(begin, end, lanes):
            store_n(y + size * i, end - i, apply(load_n(x + size * i, end - i)))

    return kernel


def powers(*, dtype: str, lanes: int) -> Function:
    """Raise elements to powers."""
    v = simd.vec(dtype, lanes)
    load_n, store_n, size = v.load_n, v.store_n, v.itemsize
    apply = vmath.power(dtype, lanes)

    def kernel(args: int, begin: int, end: int, _worker: int) -> None:
        x, y, z = ld_i64(args), ld_i64(args + 8), ld_i64(args + 16)
        for i in range(begin, end, lanes):
            left = end - i
            store_n(
                z + size * i, left, apply(load_n(x + size * i, left), load_n(y + size * i, left))
            )

    return kernel


def contracted(*, fast: bool) -> Function:
    """Compute x * y + z in plain numba arithmetic, with or without leave to fuse."""

    def kernel(args: int, _begin: int, _end: int, _worker: int) -> None:
        x, y, z = ld_f64(args), ld_f64(args + 8), ld_f64(args + 16)
        st_f64(args + 24, x * y + z)

    if fast:
        vars(kernel)["fastmath"] = {"contract"}
    return kernel


@njit(nogil=True, error_model="numpy")
def _twice(x: int) -> int:
    return 2 * x


def nested() -> Function:
    """Call a numba function from a kernel."""

    def kernel(args: int, begin: int, end: int, _worker: int) -> None:
        st_i64(args, _twice(end - begin))

    return kernel


def broken() -> Function:
    """Make a kernel that numba refuses."""

    def kernel(args: int, _begin: int, _end: int, _worker: int) -> None:
        st_i64(args, "text")

    return kernel


def bad_assembly() -> str:
    """Return assembly that LLVM refuses."""
    return "define nonsense @entry"


def assembly_that_calls_system() -> str:
    """Return assembly of a function that calls what kernels may not."""
    return (
        "declare i32 @system(ptr)\n"
        "define void @entry() {\n  %x = call i32 @system(ptr null)\n  ret void\n}\n"
    )


def raising() -> Function:
    """Make a kernel that needs Python to raise its exception."""

    def kernel(args: int, begin: int, end: int, _worker: int) -> None:
        if begin > end:
            print(args)

    return kernel


def count() -> Function:
    """Add one to a word of each unit, and the number of units to a word of each worker."""

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        units, workers = ld_i64(args), ld_i64(args + 8)
        for i in range(begin, end):
            atomic_add(units + 8 * i, 1)
        atomic_add(workers + 128 * worker, end - begin)

    return kernel


def tally() -> Function:
    """Add the number of units to a word of each worker."""

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        atomic_add(ld_i64(args + 8) + 128 * worker, end - begin)

    return kernel


def scale(*, lanes: int) -> Function:
    """Compute y = x * x + 1 for blocks of 64 floats, a unit each."""
    v = simd.vec("float32", lanes)
    load, store, fma, splat = v.load, v.store, v.fma, v.splat

    def kernel(args: int, begin: int, end: int, _worker: int) -> None:
        x, y = ld_i64(args), ld_i64(args + 8)
        for i in range(64 * begin, 64 * end, lanes):
            a = load(x + 4 * i)
            store(y + 4 * i, fma(a, a, splat(1.0)))

    return kernel


def meet() -> Function:
    """The caller's thread waits, for some rounds, until a helper has run a unit of the same step.

    Words: how many units helpers ran, and the rounds; between two rounds another thread may run.
    """

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        if worker > 0:
            atomic_add(args, end - begin)
            return
        left = ld_i64(args + 8)
        while atomic_load(args) == 0 and left > 0:
            left -= 1
            yield_core()

    return kernel


def burn() -> Function:
    """Spin for a number of pauses per unit, and count the units done."""

    def kernel(args: int, begin: int, end: int, _worker: int) -> None:
        for _ in range(begin, end):
            for _ in range(ld_i64(args)):
                pause()
            atomic_add(args + 8, 1)

    return kernel


def round_trip(*, lanes: int) -> Function:
    """Round float32 to bfloat16 in memory and read it back."""
    v = simd.vec("float32", lanes)
    load, store = v.load, v.store
    narrow = simd.store_as("float32", "bfloat16", lanes)
    widen = simd.load_as("bfloat16", "float32", lanes)

    def kernel(args: int, _begin: int, _end: int, _worker: int) -> None:
        stored = ld_i64(args + 16)
        narrow(stored, load(ld_i64(args)))
        store(ld_i64(args + 8), widen(stored))

    return kernel


def dots(*, lanes: int) -> Function:
    """Add dot products of bytes to a vector of sums."""
    v = simd.vec("int32", lanes)
    load, store, step = v.load, v.store, dot.dot4(lanes)

    def kernel(args: int, _begin: int, _end: int, _worker: int) -> None:
        sums = load(ld_i64(args))
        store(ld_i64(args), step(sums, load(ld_i64(args + 8)), load(ld_i64(args + 16))))

    return kernel


@njit
def weighted(x: float) -> float:
    """Add multiples of x; more than our own kernels ask of numba."""
    total = 0.0
    for factor in literal_unroll((1, 2.5)):
        total += factor * x
    return total


@njit
def doubled(x: float) -> float:
    """Return x twice, for kernels and for Python."""
    return x * 2.0


def all_of_numba(*, bias: float) -> Function:
    """Store ``3.5 x^2 + 2 bias`` by a closure, a tuple of different types and njit functions."""

    def kernel(args: int, _begin: int, _end: int, _worker: int) -> None:
        x, y = ld_i64(args), ld_i64(args + 8)

        def square(value: float) -> float:
            return value * value

        st_f64(y, weighted(square(ld_f64(x))) + doubled(bias))

    return kernel
