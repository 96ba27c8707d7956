"""Kernels of products that need no blocks: of few rows, and of few steps (`shallow`).

Few rows by a matrix computed at run time, which is read once, as it lies:
Blocked kernels would pack it first, or walk down it in narrow columns, a page for each row; with
few rows of A the product takes no longer than reading B does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba.extending import register_jitable

from subgraph.engine.codegen.argument_views import view_of
from subgraph.engine.codegen.simd import ld, st, vec

from .arguments import UnpackedArguments
from .kernels import batch_offset

_ITEM = {"float32": 4, "float64": 8}


def row_products(dtype: str, lanes: int) -> tuple[Any, Any]:
    """Return what adds ``alpha * A @ B`` to C: B by its rows, and B by its columns.

    Both take addresses and bytes between rows: M, K, A, its row step (by rows of B also the step
    between its elements), B, its row or column step, C, its row step, columns, alpha.
    """
    v = vec(dtype, lanes)
    load, store, load_n, store_n = v.load, v.store, v.load_n, v.store_n
    zero, splat, fma, total = v.zero, v.splat, v.fma, v.sum
    load1, store1 = ld(dtype), st(dtype)
    item = _ITEM[dtype]

    @register_jitable
    def add_eight(c: int, a: int, aks: int, b: int, ldb: int, count: int, alpha: float) -> None:
        """Add eight elements of a row of A times their rows of B."""
        a0, a1 = splat(load1(a) * alpha), splat(load1(a + aks) * alpha)
        a2, a3 = splat(load1(a + 2 * aks) * alpha), splat(load1(a + 3 * aks) * alpha)
        a4, a5 = splat(load1(a + 4 * aks) * alpha), splat(load1(a + 5 * aks) * alpha)
        a6, a7 = splat(load1(a + 6 * aks) * alpha), splat(load1(a + 7 * aks) * alpha)
        b3, b6 = b + 3 * ldb, b + 6 * ldb
        whole = count // lanes * lanes * item
        for at in range(0, whole, lanes * item):
            value = fma(a0, load(b + at), load(c + at))
            value = fma(a1, load(b + ldb + at), value)
            value = fma(a2, load(b + 2 * ldb + at), value)
            value = fma(a3, load(b3 + at), value)
            value = fma(a4, load(b3 + ldb + at), value)
            value = fma(a5, load(b3 + 2 * ldb + at), value)
            value = fma(a6, load(b6 + at), value)
            store(c + at, fma(a7, load(b6 + ldb + at), value))
        n = count % lanes
        if n > 0:
            value = load_n(c + whole, n)
            for k in range(8):
                value = fma(
                    splat(load1(a + k * aks) * alpha), load_n(b + k * ldb + whole, n), value
                )
            store_n(c + whole, n, value)

    @register_jitable
    def add_one(c: int, a: int, b: int, count: int, alpha: float) -> None:
        """Add an element of a row of A times its row of B."""
        factor = splat(load1(a) * alpha)
        for j in range(0, count, lanes):
            n, at = min(lanes, count - j), j * item
            store_n(c + at, n, fma(factor, load_n(b + at, n), load_n(c + at, n)))

    @register_jitable
    def along_rows(
        m: int,
        depth: int,
        a: int,
        ars: int,
        aks: int,
        b: int,
        ldb: int,
        c: int,
        crs: int,
        count: int,
        alpha: float,
    ) -> None:
        """Add all rows of B to ``count`` columns."""
        whole = depth // 8 * 8
        for k in range(0, whole, 8):
            for i in range(m):
                add_eight(c + i * crs, a + i * ars + k * aks, aks, b + k * ldb, ldb, count, alpha)
        for k in range(whole, depth):
            for i in range(m):
                add_one(c + i * crs, a + i * ars + k * aks, b + k * ldb, count, alpha)

    @register_jitable
    def dot_four(c: int, a: int, b: int, ldb: int, depth: int, alpha: float) -> None:
        """Add the products of a row of A with four columns of B."""
        s0, s1, s2, s3 = zero(), zero(), zero(), zero()
        t0, t1, t2, t3 = zero(), zero(), zero(), zero()
        b1, b2, b3 = b + ldb, b + 2 * ldb, b + 3 * ldb
        step = lanes * item
        whole = depth // (2 * lanes) * 2 * step
        for at in range(0, whole, 2 * step):
            x, z, on = load(a + at), load(a + at + step), at + step
            s0, t0 = fma(x, load(b + at), s0), fma(z, load(b + on), t0)
            s1, t1 = fma(x, load(b1 + at), s1), fma(z, load(b1 + on), t1)
            s2, t2 = fma(x, load(b2 + at), s2), fma(z, load(b2 + on), t2)
            s3, t3 = fma(x, load(b3 + at), s3), fma(z, load(b3 + on), t3)
        for k in range(whole // item, depth, lanes):
            n, at = min(lanes, depth - k), k * item
            x = load_n(a + at, n)
            s0, s1 = fma(x, load_n(b + at, n), s0), fma(x, load_n(b1 + at, n), s1)
            s2, s3 = fma(x, load_n(b2 + at, n), s2), fma(x, load_n(b3 + at, n), s3)
        store1(c, load1(c) + total(s0 + t0) * alpha)
        store1(c + item, load1(c + item) + total(s1 + t1) * alpha)
        store1(c + 2 * item, load1(c + 2 * item) + total(s2 + t2) * alpha)
        store1(c + 3 * item, load1(c + 3 * item) + total(s3 + t3) * alpha)

    @register_jitable
    def dot_one(c: int, a: int, b: int, depth: int, alpha: float) -> None:
        """Add the product of a row of A with a column of B."""
        s, t = zero(), zero()
        step = lanes * item
        whole = depth // (2 * lanes) * 2 * step
        for at in range(0, whole, 2 * step):
            s = fma(load(a + at), load(b + at), s)
            t = fma(load(a + at + step), load(b + at + step), t)
        for k in range(whole // item, depth, lanes):
            n, at = min(lanes, depth - k), k * item
            s = fma(load_n(a + at, n), load_n(b + at, n), s)
        store1(c, load1(c) + total(s + t) * alpha)

    @register_jitable
    def along_columns(
        m: int,
        depth: int,
        a: int,
        ars: int,
        b: int,
        ldb: int,
        c: int,
        crs: int,
        count: int,
        alpha: float,
    ) -> None:
        """Add the products with ``count`` columns, each contiguous as rows of A are."""
        whole = count // 4 * 4
        for j in range(0, whole, 4):
            for i in range(m):
                dot_four(c + i * crs + j * item, a + i * ars, b + j * ldb, ldb, depth, alpha)
        for j in range(whole, count):
            for i in range(m):
                dot_one(c + i * crs + j * item, a + i * ars, b + j * ldb, depth, alpha)

    return along_rows, along_columns


def few_rows(*, dtype: str, lanes: int, turned: bool) -> Callable[..., None]:
    """Return the kernel of `UnpackedArguments` for few rows of A.

    It computes ``C = init + alpha * A @ B + residual``.

    Args:
        dtype: ``"float32"`` or ``"float64"``.
        lanes: Elements of a vector.
        turned: B is transposed: its columns are contiguous, not its rows. Rows of A are, too.
    """
    arguments = view_of(UnpackedArguments)
    v = vec(dtype, lanes)
    load_n, store_n, zero = v.load_n, v.store_n, v.zero
    along_rows, along_columns = row_products(dtype, lanes)
    item = _ITEM[dtype]

    @register_jitable
    def start(c: int, count: int, init: int, res: int) -> None:
        """Write what the sums of a row begin with."""
        for j in range(0, count, lanes):
            n, at = min(lanes, count - j), j * item
            value = zero()
            if init != 0:
                value = load_n(init + at, n)
            if res != 0:
                value = value + load_n(res + at, n)
            store_n(c + at, n, value)

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        product = arguments(args)
        m, n, depth, block = product.m, product.n, product.k, product.block
        ars, aks, ldb = product.a_row, product.a_column, product.b_step
        alpha = product.alpha
        blocks = (n + block - 1) // block
        for unit in range(begin, end):
            batch, first = unit // blocks, unit % blocks * block
            b2 = batch % product.size2
            b1 = batch // product.size2 % product.size1
            b0 = batch // product.size2 // product.size1
            count = min(block, n - first)
            a = product.a + batch_offset(
                b0, b1, b2, product.a_step0, product.a_step1, product.a_step2
            )
            b = product.b + batch_offset(
                b0, b1, b2, product.b_step0, product.b_step1, product.b_step2
            )
            b += first * (product.b_step if turned else item)
            beyond = (
                batch_offset(b0, b1, b2, product.c_step0, product.c_step1, product.c_step2)
                + first * item
            )
            c, init, res = product.c + beyond, product.init, product.residual
            for i in range(m):
                row = i * n * item
                at = init + first * item if init != 0 else 0
                start(c + row, count, at, res + beyond + row if res != 0 else 0)
            if turned:
                along_columns(m, depth, a, ars, b, ldb, c, n * item, count, alpha)
            else:
                along_rows(m, depth, a, ars, aks, b, ldb, c, n * item, count, alpha)

    return kernel


def shallow(*, dtype: str, lanes: int, depth: int) -> Callable[..., None]:
    """Return the kernel of `UnpackedArguments` for few steps along K, bound by what it writes.

    It computes ``C = init + alpha * A @ B``.

    Args:
        dtype: ``"float32"`` or ``"float64"``.
        lanes: Elements of a vector.
        depth: K, 1 to 8; up to 4 two rows share what is read of B.
    """
    arguments = view_of(UnpackedArguments)
    v = vec(dtype, lanes)
    load, store, load_n, store_n = v.load, v.store, v.load_n, v.store_n
    zero, splat, fma = v.zero, v.splat, v.fma
    load1 = ld(dtype)
    item = _ITEM[dtype]
    wide = lanes * item

    @register_jitable
    def factors(a: int, aks: int, alpha: float) -> Any:
        """Return the elements of a row of A, zero beyond K."""
        p0, p1, p2, p3 = splat(load1(a) * alpha), zero(), zero(), zero()
        p4, p5, p6, p7 = zero(), zero(), zero(), zero()
        if depth > 1:
            p1 = splat(load1(a + aks) * alpha)
        if depth > 2:
            p2 = splat(load1(a + 2 * aks) * alpha)
        if depth > 3:
            p3 = splat(load1(a + 3 * aks) * alpha)
        if depth > 4:
            p4 = splat(load1(a + 4 * aks) * alpha)
        if depth > 5:
            p5 = splat(load1(a + 5 * aks) * alpha)
        if depth > 6:
            p6 = splat(load1(a + 6 * aks) * alpha)
        if depth > 7:
            p7 = splat(load1(a + 7 * aks) * alpha)
        return p0, p1, p2, p3, p4, p5, p6, p7

    @register_jitable
    def part(b: int, n: int) -> Any:
        return load(b) if n >= lanes else load_n(b, n)

    @register_jitable
    def mix(p: Any, b: int, ldb: int, n: int, total: Any) -> Any:
        """Add a row's products with up to a vector of columns."""
        total = fma(p[0], part(b, n), total)
        if depth > 1:
            total = fma(p[1], part(b + ldb, n), total)
        if depth > 2:
            total = fma(p[2], part(b + 2 * ldb, n), total)
        if depth > 3:
            total = fma(p[3], part(b + 3 * ldb, n), total)
        if depth > 4:
            total = fma(p[4], part(b + 4 * ldb, n), total)
        if depth > 5:
            total = fma(p[5], part(b + 5 * ldb, n), total)
        if depth > 6:
            total = fma(p[6], part(b + 6 * ldb, n), total)
        if depth > 7:
            total = fma(p[7], part(b + 7 * ldb, n), total)
        return total

    @register_jitable
    def start(init: int, at: int, n: int) -> Any:
        return part(init + at, n) if init != 0 else zero()

    @register_jitable
    def one_row(c: int, p: Any, b: int, ldb: int, n: int, room: int, init: int) -> None:
        """Write a row, and anything behind it into the room."""
        whole = n // lanes * wide
        for at in range(0, whole, wide):
            store(c + at, mix(p, b + at, ldb, lanes, start(init, at, lanes)))
        rest = n % lanes
        if rest > 0:
            total = mix(p, b + whole, ldb, rest, start(init, whole, rest))
            if n - rest + lanes <= room:
                store(c + whole, total)
            else:
                store_n(c + whole, rest, total)

    @register_jitable
    def two_rows(c: int, p: Any, q: Any, b: int, ldb: int, n: int, init: int) -> None:
        whole, crs = n // lanes * wide, n * item
        for at in range(0, whole, wide):
            first = start(init, at, lanes)
            one = mix(p, b + at, ldb, lanes, first)
            two = mix(q, b + at, ldb, lanes, first)
            store(c + at, one)
            store(c + crs + at, two)
        rest = n % lanes
        if rest > 0:
            first = start(init, whole, rest)
            store_n(c + whole, rest, mix(p, b + whole, ldb, rest, first))
            store_n(c + crs + whole, rest, mix(q, b + whole, ldb, rest, first))

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        product = arguments(args)
        m, n, block, init = product.m, product.n, product.block, product.init
        ars, aks, ldb = product.a_row, product.a_column, product.b_step
        alpha = product.alpha
        blocks = (m + block - 1) // block
        for unit in range(begin, end):
            batch, i = unit // blocks, unit % blocks * block
            b2 = batch % product.size2
            b1 = batch // product.size2 % product.size1
            b0 = batch // product.size2 // product.size1
            a = (
                product.a
                + batch_offset(b0, b1, b2, product.a_step0, product.a_step1, product.a_step2)
                + i * ars
            )
            b = product.b + batch_offset(
                b0, b1, b2, product.b_step0, product.b_step1, product.b_step2
            )
            c = (
                product.c
                + batch_offset(b0, b1, b2, product.c_step0, product.c_step1, product.c_step2)
                + i * n * item
            )
            left = min(block, m - i)
            while left > 0:
                p = factors(a, aks, alpha)
                if depth <= 4 and left > 1 and n >= lanes:
                    two_rows(c, p, factors(a + ars, aks, alpha), b, ldb, n, init)
                    done = 2
                else:
                    one_row(c, p, b, ldb, n, left * n, init)
                    done = 1
                a += done * ars
                c += done * n * item
                left -= done

    return kernel
