"""Kernels of matrix products: packing of operands, blocked GEMM over contraction tiles.

``gemm`` runs ``C = act(init + A @ B + residual)`` for a batch of products; ``pack_b`` brings B into
the panel format. A panel holds ``nv * lanes`` columns (the last one as many whole vectors as are
left), row after row, padded with zeros: ``[panel][K][columns of the panel]``.
"""

from __future__ import annotations

from collections.abc import Callable

from numba.extending import register_jitable

from subgraph.engine.codegen.simd import call_kernel, ld, ld_f64, st, vec
from subgraph.engine.codegen.tile import arg, put, rows_of, stack_words
from subgraph.engine.codegen.tiling import (
    T_A,
    T_AHEAD,
    T_AKS,
    T_ARS,
    T_B,
    T_BJS,
    T_BKS,
    T_C,
    T_CJS,
    T_CRS,
    T_FLAGS,
    T_HI,
    T_IJS,
    T_INIT,
    T_IRS,
    T_KIN,
    T_LO,
    T_N0,
    T_N1,
    T_N2,
    T_PACE,
    T_RBIAS,
    T_RES,
    T_RJS,
    T_RRS,
    T_TAIL,
    T_WORDS,
)
from subgraph.engine.codegen.transpose import transposer

_ITEM = {"float32": 4, "float64": 8}
_words = stack_words(T_WORDS)
_where = stack_words(8)


def pack_b(*, dtype: str, lanes: int, nv: int) -> Callable[..., None]:
    """Return the kernel that packs matrices into panels; one unit is one panel.

    Words: ``0 source, 1 target, 2 K, 3 N, 4 bytes between rows (k), 5 bytes between columns (n),
    6 bytes between source matrices, 7 bytes between packed matrices, 8 panels of one matrix,
    9 factor (float64)``. Units: matrices times panels.
    """
    v = vec(dtype, lanes)
    load, store, zero, splat = v.load, v.store, v.zero, v.splat
    load_n = v.load_n
    load1, store1 = ld(dtype), st(dtype)
    turn = transposer(dtype, lanes)
    item = _ITEM[dtype]
    width = nv * lanes

    @register_jitable
    def rows(source: int, target: int, depth: int, count: int, ks: int, columns: int) -> None:
        for k in range(depth):
            s, d = source + k * ks, target + k * columns * item
            for j in range(0, columns, lanes):
                if j + lanes <= count:
                    store(d + j * item, load(s + j * item))
                else:
                    store(d + j * item, load_n(s + j * item, count - j))

    @register_jitable
    def turned(source: int, target: int, depth: int, count: int, ns: int, columns: int) -> None:
        for j in range(0, columns, lanes):
            taken = min(lanes, count - j)
            to = target + j * item
            if taken < lanes:
                for k in range(depth):
                    store(to + k * columns * item, zero())
            for k in range(0, depth, lanes):
                s, d = source + j * ns + k * item, to + k * columns * item
                turn(s, ns, taken, min(lanes, depth - k), d, columns * item)

    @register_jitable
    def strided(
        source: int, target: int, depth: int, count: int, ks: int, ns: int, columns: int
    ) -> None:
        for k in range(depth):
            d = target + k * columns * item
            for j in range(0, columns, lanes):
                store(d + j * item, zero())
            for n in range(count):
                store1(d + n * item, load1(source + k * ks + n * ns))

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        depth, n, ks, ns = arg(args, 2), arg(args, 3), arg(args, 4), arg(args, 5)
        panels, factor = arg(args, 8), ld_f64(args + 8 * 9)
        for unit in range(begin, end):
            matrix, panel = unit // panels, unit % panels
            first = panel * width
            count = min(width, n - first)
            columns = (count + lanes - 1) // lanes * lanes
            source = arg(args, 0) + matrix * arg(args, 6) + first * ns
            target = arg(args, 1) + matrix * arg(args, 7) + first * depth * item
            if ns == item:
                rows(source, target, depth, count, ks, columns)
            elif ks == item:
                turned(source, target, depth, count, ns, columns)
            else:
                strided(source, target, depth, count, ks, ns, columns)
            if factor != 1.0:
                for i in range(0, depth * columns, lanes):
                    store(target + i * item, load(target + i * item) * splat(factor))

    return kernel


def gemm(*, dtype: str, lanes: int, mr: int, nv: int, weights: str = "") -> Callable[..., None]:
    """Return the kernel of a batch of matrix products; one unit is one block of C.

    ``C[b0, b1, b2] = act(init + A[...] @ B[...] + residual)``, the activation one of: nothing,
    bounds below and above, or any that kernel ``post`` applies to a finished tile. With ``weights``
    "bfloat16" B is packed in it.

    Words::

        0 A  1 packed or plain B  2 C  3 init (one element per column; 0: none)
        4 row init (one element per row; 0: none)  5 residual (0: none; not C unless kc >= K)
        6 M  7 N  8 K  9 bytes between rows of A  10 bytes between columns of A
        11 bytes between rows of C  12 bytes between rows of the residual (0: one row for all)
        13 bytes between rows of B; 0: B is packed
        14 contraction tile  15 the masked one  16 post kernel (0: none)
        17 F_* flags  18 lower bound  19 upper bound (float64)
        20 rows of a block  21 panels of a block  22 kc: depth of one pass
        23 scratch for A (0: A is read in place)  24 its bytes per worker
        25 b1 size  26 b2 size  (batch b0 is what units leave)
        27..29 bytes between matrices of A along b0, b1, b2  30..32 of B  33..35 of C
        36..38 of the residual
        39 units run over row blocks first (1) or panel blocks first (0)

    The scratch of a worker holds ``block rows x (kc + 16)`` elements (``kc x (rows + 16)`` when A
    is transposed). Units: batch * row blocks * panel blocks.
    """
    v = vec(dtype, lanes)
    load, store = v.load, v.store
    load1, store1 = ld(dtype), st(dtype)
    item = _ITEM[dtype]
    item_b = 2 if weights == "bfloat16" else item
    width = nv * lanes

    @register_jitable
    def copy_rows(source: int, target: int, rows: int, count: int, step: int, to: int) -> None:
        for r in range(rows):
            s, d = source + r * step, target + r * to
            whole = count // lanes * lanes
            for i in range(0, whole, lanes):
                store(d + i * item, load(s + i * item))
            for i in range(whole, count):
                store1(d + i * item, load1(s + i * item))

    @register_jitable
    def copy_any(
        source: int, target: int, rows: int, depth: int, ars: int, aks: int, to: int
    ) -> None:
        for r in range(rows):
            for k in range(depth):
                store1(target + r * to + k * item, load1(source + r * ars + k * aks))

    @register_jitable
    def block(args: int, t: int, a: int, b: int, c: int, res: int, where: int) -> None:
        """Run panels of one block of rows and one range of k: ``where`` are its six words."""
        k0, depth = arg(where, 0), arg(where, 1)
        row, rows = arg(where, 2), arg(where, 3)
        panel, last_panel = arg(where, 4), arg(where, 5)
        n, total = arg(args, 7), arg(args, 8)
        crs, ldb = arg(args, 11), arg(args, 13)
        last = k0 + depth >= total
        put(t, T_KIN, depth)
        put(t, T_FLAGS, arg(args, 17) if last else 0)
        for p in range(panel, last_panel):
            first = p * width
            count = min(width, n - first)
            vectors = (count + lanes - 1) // lanes
            tail = count - (vectors - 1) * lanes
            tile = arg(args, 14) if tail == lanes else arg(args, 15)
            put(t, T_TAIL, tail)
            if ldb == 0:
                step = vectors * lanes * item_b
                put(t, T_B, b + first * total * item_b + k0 * step)
            else:
                step = ldb
                put(t, T_B, b + first * item + k0 * step)
            put(t, T_BKS, step)
            # The tiles of a packed panel together bring the next one closer.
            pace = 0 if ldb != 0 else 2 * step // max(1, (rows + mr - 1) // mr)
            coming = arg(t, T_B) + (depth * step if ldb == 0 else 0)
            put(t, T_PACE, pace)
            i = 0
            while i < rows:
                m = rows_of(rows - i, mr)
                at = c + (row + i) * crs + first * item
                put(t, T_A, a + i * arg(t, T_ARS))
                put(t, T_C, at)
                put(t, T_AHEAD, coming)
                coming += depth // 2 * pace
                if k0 > 0:
                    put(t, T_INIT, at)
                    put(t, T_IRS, crs)
                elif arg(args, 3) != 0:
                    put(t, T_INIT, arg(args, 3) + first * item)
                    put(t, T_IRS, 0)
                else:
                    put(t, T_INIT, 0)
                put(t, T_RBIAS, 0)
                put(t, T_RES, 0)
                if last:
                    if arg(args, 4) != 0:
                        put(t, T_RBIAS, arg(args, 4) + (row + i) * item)
                    if res != 0:
                        put(t, T_RES, res + (row + i) * arg(args, 12) + first * item)
                call_kernel(tile, t, m, vectors, 0)
                if last and arg(args, 16) != 0:
                    call_kernel(arg(args, 16), t, m, vectors, 0)
                i += m

    @register_jitable
    def offset(args: int, index: int, b0: int, b1: int, b2: int) -> int:
        return b0 * arg(args, index) + b1 * arg(args, index + 1) + b2 * arg(args, index + 2)

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        t, where = _words(), _where()
        m, n, total = arg(args, 6), arg(args, 7), arg(args, 8)
        ars, aks = arg(args, 9), arg(args, 10)
        mb, pb, kc = arg(args, 20), arg(args, 21), arg(args, 22)
        scratch = arg(args, 23)
        if scratch != 0:
            scratch += worker * arg(args, 24)
        panels = (n + width - 1) // width
        row_blocks = (m + mb - 1) // mb
        panel_blocks = (panels + pb - 1) // pb
        put(t, T_N0, 1)
        put(t, T_N1, 1)
        put(t, T_N2, 1)
        put(t, T_BJS, lanes * item_b)
        put(t, T_CRS, arg(args, 11))
        put(t, T_CJS, lanes * item)
        put(t, T_IJS, lanes * item)
        put(t, T_RRS, arg(args, 12))
        put(t, T_RJS, lanes * item)
        put(t, T_LO, arg(args, 18))
        put(t, T_HI, arg(args, 19))
        for unit in range(begin, end):
            batch, rest = unit // (row_blocks * panel_blocks), unit % (row_blocks * panel_blocks)
            if arg(args, 39) != 0:
                rb, cb = rest % row_blocks, rest // row_blocks
            else:
                rb, cb = rest // panel_blocks, rest % panel_blocks
            b2 = batch % arg(args, 26)
            b1 = batch // arg(args, 26) % arg(args, 25)
            b0 = batch // arg(args, 26) // arg(args, 25)
            a = arg(args, 0) + offset(args, 27, b0, b1, b2)
            b = arg(args, 1) + offset(args, 30, b0, b1, b2)
            c = arg(args, 2) + offset(args, 33, b0, b1, b2)
            res = arg(args, 5)
            if res != 0:
                res += offset(args, 36, b0, b1, b2)
            row = rb * mb
            rows = min(mb, m - row)
            put(where, 2, row)
            put(where, 3, rows)
            put(where, 4, cb * pb)
            put(where, 5, min(panels, cb * pb + pb))
            k0 = 0
            while k0 < total or k0 == 0:
                depth = min(kc, total - k0)
                put(where, 0, k0)
                put(where, 1, depth)
                source = a + row * ars + k0 * aks
                if scratch == 0:
                    put(t, T_ARS, ars)
                    put(t, T_AKS, aks)
                    block(args, t, source, b, c, res, where)
                elif ars == item and aks != item:
                    to = (mb + 16) * item
                    copy_rows(source, scratch, depth, rows, aks, to)
                    put(t, T_ARS, item)
                    put(t, T_AKS, to)
                    block(args, t, scratch, b, c, res, where)
                else:
                    to = (kc + 16) * item
                    if aks == item:
                        copy_rows(source, scratch, rows, depth, ars, to)
                    else:
                        copy_any(source, scratch, rows, depth, ars, aks, to)
                    put(t, T_ARS, to)
                    put(t, T_AKS, item)
                    block(args, t, scratch, b, c, res, where)
                k0 += max(depth, 1)

    return kernel
