"""Product of a matrix of few rows and a matrix that is read once, without packing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numba.extending import register_jitable

from subgraph.dtypes import item_bytes
from subgraph.engine.codegen.emit import Emit, Sums
from subgraph.engine.codegen.irtools import ELEMENTS, INT64, VOID, define, reduce_rows
from subgraph.engine.codegen.simd import st, vec
from subgraph.system.host import has_32_registers

# Rows of B are prefetched this many bytes ahead, or the next ones. With 4 heads of 64 elements for
# each key, 2000 keys that were not in a cache took 0.57 of the time without (Zen 5).
_AHEAD_BYTES = 4096
_MAX_PREFETCHED_ROW = 1024  # bytes; the processor itself prefetches longer rows (estimate)
_LINE = 64  # bytes of a cache line
_BLOCK_ROWS = 64  # rows of B that all rows of A read before the next ones (estimate: in the L1)


def row_products(dtype: str, lanes: int) -> tuple[Any, Any]:
    """Return two functions for ``alpha * A @ B`` with contiguous rows or columns of B.

    With rows of B the product is added to C, with columns it is written there. Their arguments are
    addresses, and distances in bytes: ``m`` rows of A (``ars`` apart; with rows of B its elements
    are ``aks`` apart, else contiguous), ``depth`` terms of each sum, rows or columns of B (``ldb``
    apart), rows of C (``crs`` apart), ``count`` columns of C.
    """
    item, block = item_bytes(dtype), max(lanes, 8)
    dot_one, dot_block = _dot(dtype, lanes), _block_dots(dtype, lanes, block)
    add_four, add_two, add_one = (_row_adder(dtype, lanes, rows) for rows in (4, 2, 1))

    @register_jitable
    def distance(ldb: int, nbytes: int, rows: int) -> int:
        """Return how far ahead to prefetch rows of ``nbytes``, at least ``rows``; 0: do not."""
        if nbytes > _MAX_PREFETCHED_ROW:
            return 0
        return max(rows, _AHEAD_BYTES // max(nbytes, 1)) * ldb

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
        """Add the product, a block of rows of B at a time while it is in the cache."""
        ahead = distance(ldb, count * item, 8)
        for k in range(0, depth, _BLOCK_ROWS):
            n, x, y, i = min(_BLOCK_ROWS, depth - k), a + k * aks, b + k * ldb, 0
            while i < m:
                far, at, row = 0 if i else ahead, c + i * crs, x + i * ars
                if i + 4 <= m:
                    add_four(at, crs, row, ars, aks, y, ldb, n, count, alpha, far)
                    i += 4
                elif i + 2 <= m:
                    add_two(at, crs, row, ars, aks, y, ldb, n, count, alpha, far)
                    i += 2
                else:
                    add_one(at, crs, row, ars, aks, y, ldb, n, count, alpha, far)
                    i += 1

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
        """Write the product, a block of columns of B at a time while it is in the cache."""
        ahead = distance(ldb, depth * item, block)
        for first in range(0, count, block):
            # The last block overlaps the one before, and computes some results again.
            j = min(first, count - block)
            if j < 0:
                break
            for i in range(m):
                far = 0 if i else ahead
                dot_block(c + i * crs + j * item, a + i * ars, b + j * ldb, ldb, depth, alpha, far)
        if count < block:
            for j in range(count):
                for i in range(m):
                    dot_one(c + i * crs + j * item, a + i * ars, b + j * ldb, depth, alpha)

    return along_rows, along_columns


def _row_adder(dtype: str, lanes: int, rows: int) -> Any:
    """Return ``f(c, crs, a, ars, aks, b, ldb, depth, count, alpha, ahead)``.

    It adds the products of ``rows`` rows of A with rows of B to C. Rows of B are prefetched
    ``ahead`` bytes before they are read; 0: they are not.
    """
    # Eight sums hide the latency of multiply-adds, sixteen also share the loads of B.
    narrow = 2 if rows == 4 and not has_32_registers() else 4
    broad = 8 if rows == 1 else narrow
    widest, wide, single = (
        _row_tile(dtype, lanes, rows, n, masked=False) for n in (broad, narrow, 1)
    )
    masked, item = _row_tile(dtype, lanes, rows, 1, masked=True), item_bytes(dtype)

    @register_jitable
    def add(
        c: int, crs: int, a: int, ars: int, aks: int, b: int, ldb: int, depth: int, count: int,
        alpha: float, ahead: int,
    ) -> None:  # fmt: skip
        j = 0
        while j + broad * lanes <= count:
            at = j * item
            widest(c + at, crs, a, ars, aks, b + at, ldb, depth, lanes, alpha, ahead)
            j += broad * lanes
        while j + narrow * lanes <= count:
            at = j * item
            wide(c + at, crs, a, ars, aks, b + at, ldb, depth, lanes, alpha, ahead)
            j += narrow * lanes
        while j + lanes <= count:
            at = j * item
            single(c + at, crs, a, ars, aks, b + at, ldb, depth, lanes, alpha, ahead)
            j += lanes
        if j < count:
            at = j * item
            masked(c + at, crs, a, ars, aks, b + at, ldb, depth, count - j, alpha, ahead)

    return add


def _row_tile(dtype: str, lanes: int, rows: int, vectors: int, *, masked: bool) -> Any:
    """Return ``f(c, crs, a, ars, aks, b, ldb, depth, count, alpha, ahead)``: a tile of C.

    The parameters are those of `_row_adder`, for a tile of ``rows`` rows and ``vectors`` vectors of
    columns; with ``masked`` one vector of ``count`` elements.
    """

    def emit(builder: Any, _context: Any, args: Sequence[Any]) -> None:
        c, crs, a, ars, aks, b, ldb, depth, count, alpha, ahead = args
        e = Emit(builder, dtype, lanes)
        mask = e.tail_mask(count) if masked else None
        size = lanes * e.item
        sums, row_of = Sums(e, rows, vectors), e.multiples(ars, rows)
        left, right = e.variable(a), e.variable(b)
        lines = range(0, vectors * size, max(_LINE, size))
        with e.loop(depth):
            x, y = e.get(left), e.get(right)
            with e.when(builder.icmp_signed("!=", ahead, e.const(0))):
                for at in lines:
                    e.prefetch(builder.add(y, builder.add(ahead, e.const(at))))
            parts = [e.load(builder.add(y, e.const(j * size)), mask) for j in range(vectors)]
            for i in range(rows):
                factor = e.broadcast(builder.add(x, row_of[i]))
                for j in range(vectors):
                    slot = sums.acc[i][j]
                    e.put(slot, e.fma(factor, parts[j], e.get(slot)))
            e.step(left, aks)
            e.step(right, ldb)
        scale, line_of = e.splat(alpha), e.multiples(crs, rows)
        for i in range(rows):
            for j in range(vectors):
                at = builder.add(builder.add(c, line_of[i]), e.const(j * size))
                e.store(e.fma(e.get(sums.acc[i][j]), scale, e.load(at, mask)), at, mask)

    return define(VOID, [*[INT64] * 9, ELEMENTS[dtype][0], INT64], emit)


def _dot(dtype: str, lanes: int) -> Any:
    """Return ``f(c, a, b, depth, alpha)``: the product of a row of A with a column of B."""
    v = vec(dtype, lanes)
    load, load_n, zero, fma, total = v.load, v.load_n, v.zero, v.fma, v.sum
    store1, item = st(dtype), item_bytes(dtype)

    @register_jitable
    def dot_one(c: int, a: int, b: int, depth: int, alpha: float) -> None:
        """Write the product of a row of A with a column of B."""
        s = zero()
        whole = depth // lanes * lanes
        for at in range(0, whole * item, lanes * item):
            s = fma(load(a + at), load(b + at), s)
        if whole < depth:
            n, at = depth - whole, whole * item
            s = fma(load_n(a + at, n), load_n(b + at, n), s)
        store1(c, total(s) * alpha)

    return dot_one


def _block_dots(dtype: str, lanes: int, block: int) -> Any:
    """Return ``f(c, a, b, ldb, depth, alpha, ahead)``: a row of A with ``block`` columns of B.

    Each column has a vector of sums; the totals of all of them are computed together. The order of
    the additions is that of `_dot`. Columns are prefetched ``ahead`` bytes before they are read; 0:
    they are not.
    """

    def emit(builder: Any, _context: Any, args: Sequence[Any]) -> None:
        c, a, b, ldb, depth, alpha, ahead = args
        e = Emit(builder, dtype, lanes)
        size, shift = lanes * e.item, lanes.bit_length() - 1
        sums = [e.variable(e.fconst(0.0)) for _ in range(block)]
        at, columns = e.variable(a), e.variable(b)
        steps = e.multiples(ldb, 8)
        eight = builder.mul(ldb, e.const(8))

        def add(mask: Any = None) -> None:
            # LLVM would otherwise hold the address of each column in a register, and spill most.
            x, column = e.load(e.get(at), mask), e.opaque(e.get(columns))
            for k, slot in enumerate(sums):
                if k and k % 8 == 0:
                    column = e.opaque(builder.add(column, eight))
                y = e.load(builder.add(column, steps[k % 8]), mask)
                e.put(slot, e.fma(x, y, e.get(slot)))

        with e.loop(builder.ashr(depth, e.const(shift))):
            with e.when(builder.icmp_signed("!=", ahead, e.const(0))):
                column = builder.add(e.get(columns), ahead)
                for k in range(block):
                    if k and k % 8 == 0:
                        column = builder.add(column, eight)
                    e.prefetch(builder.add(column, steps[k % 8]))
            add()
            e.step(at, e.const(size))
            e.step(columns, e.const(size))
        rest = builder.and_(depth, e.const(lanes - 1))
        with e.when(builder.icmp_signed(">", rest, e.const(0))):
            # Elements after the end are loaded as 0 from both operands, and add nothing.
            add(e.tail_mask(rest))
        factor = e.splat(alpha)
        for first in range(0, block, lanes):
            rows = [e.get(slot) for slot in sums[first : first + lanes]]
            totals = reduce_rows(builder, rows, lambda on, low, high: on.fadd(low, high))
            e.store(builder.fmul(totals, factor), builder.add(c, e.const(first * e.item)))

    return define(VOID, [*[INT64] * 5, ELEMENTS[dtype][0], INT64], emit)
