"""Product of a matrix of few rows and a matrix that is read once, without packing."""

from __future__ import annotations

from typing import Any

from numba.extending import register_jitable

from subgraph.dtypes import item_bytes
from subgraph.engine.codegen.simd import ld, st, vec


def row_products(dtype: str, lanes: int) -> tuple[Any, Any]:
    """Return two functions that add ``alpha * A @ B`` to C, for contiguous rows or columns of B.

    Their arguments are addresses, and distances in bytes: ``m`` rows of A (``ars`` apart; with rows
    of B its elements are ``aks`` apart, else contiguous), ``depth`` terms of each sum, rows or
    columns of B (``ldb`` apart), rows of C (``crs`` apart), ``count`` columns of C.
    """
    item = item_bytes(dtype)
    (add_eight, add_one), (dot_four, dot_one) = _row_adders(dtype, lanes), _dots(dtype, lanes)

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
        """Add the product, eight rows of B at a time while they are in the cache."""
        whole = depth // 8 * 8
        for k in range(0, whole, 8):
            for i in range(m):
                add_eight(c + i * crs, a + i * ars + k * aks, aks, b + k * ldb, ldb, count, alpha)
        for k in range(whole, depth):
            for i in range(m):
                add_one(c + i * crs, a + i * ars + k * aks, b + k * ldb, count, alpha)

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
        """Add the product, four columns of B at a time."""
        whole = count // 4 * 4
        for j in range(0, whole, 4):
            for i in range(m):
                dot_four(c + i * crs + j * item, a + i * ars, b + j * ldb, ldb, depth, alpha)
        for j in range(whole, count):
            for i in range(m):
                dot_one(c + i * crs + j * item, a + i * ars, b + j * ldb, depth, alpha)

    return along_rows, along_columns


def _row_adders(dtype: str, lanes: int) -> tuple[Any, Any]:
    """Return two functions that add products of elements of a row of A with their rows of B to C.

    ``add_eight(c, a, aks, b, ldb, count, alpha)`` adds those of eight elements of A, which are
    ``aks`` bytes apart, and ``add_one(c, a, b, count, alpha)`` those of one. Rows have ``count``
    elements; those of B are ``ldb`` bytes apart.
    """
    v = vec(dtype, lanes)
    load, store, load_n, store_n = v.load, v.store, v.load_n, v.store_n
    splat, fma, load1, item = v.splat, v.fma, ld(dtype), item_bytes(dtype)

    @register_jitable
    def add_eight(c: int, a: int, aks: int, b: int, ldb: int, count: int, alpha: float) -> None:
        """Add the products of eight elements of a row of A with their rows of B."""
        a0, a1 = splat(load1(a) * alpha), splat(load1(a + aks) * alpha)
        a2, a3 = splat(load1(a + 2 * aks) * alpha), splat(load1(a + 3 * aks) * alpha)
        a4, a5 = splat(load1(a + 4 * aks) * alpha), splat(load1(a + 5 * aks) * alpha)
        a6, a7 = splat(load1(a + 6 * aks) * alpha), splat(load1(a + 7 * aks) * alpha)
        b3, b6 = b + 3 * ldb, b + 6 * ldb
        whole = count // lanes * lanes * item
        for at in range(0, whole, lanes * item):
            # Eight products share a load and a store of C. They depend on one another, but not on
            # those of the next vectors, which the processor computes at the same time.
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
        """Add the product of one element of A with its row of B."""
        factor = splat(load1(a) * alpha)
        for j in range(0, count, lanes):
            n, at = min(lanes, count - j), j * item
            store_n(c + at, n, fma(factor, load_n(b + at, n), load_n(c + at, n)))

    return add_eight, add_one


def _dots(dtype: str, lanes: int) -> tuple[Any, Any]:
    """Return two functions that add dot products of a row of A with columns of B to a row of C.

    ``dot_four(c, a, b, ldb, depth, alpha)`` multiplies by four columns, ``ldb`` bytes apart, and
    ``dot_one(c, a, b, depth, alpha)`` by one. Rows of A and columns of B have ``depth`` elements.
    """
    v = vec(dtype, lanes)
    load, load_n, zero, fma, total = v.load, v.load_n, v.zero, v.fma, v.sum
    load1, store1, item = ld(dtype), st(dtype), item_bytes(dtype)

    @register_jitable
    def dot_four(c: int, a: int, b: int, ldb: int, depth: int, alpha: float) -> None:
        """Add the products of a row of A with four columns of B."""
        # Eight independent sums hide the latency of multiply-adds, and four columns share each
        # vector of A. Their order depends on sizes only.
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
        # Elements after the end are loaded as 0 from both operands, and add nothing.
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

    return dot_four, dot_one
