"""Fused attention of few queries, as when a decoder makes one token after the other.

Queries are rows here: each key and each value is read once, as it lies, for all of them. The panels
of ``attention_kernels`` would take as long as with all their queries.
"""

from __future__ import annotations

from collections.abc import Callable

from numba.extending import register_jitable

from subgraph.engine.codegen.emit import item_bytes
from subgraph.engine.codegen.simd import ld, ld_f64, st, vec
from subgraph.engine.codegen.tile import arg
from subgraph.engine.codegen.vmath import function
from subgraph.ops.matmul.row_kernels import row_products


def few_queries(*, dtype: str, lanes: int, turned: bool) -> Callable[..., None]:
    """Return the kernel; one unit is a head with all its queries.

    Args:
        dtype: ``"float32"`` or ``"float64"``.
        lanes: Elements of a vector.
        turned: The elements of a key do not lie one after the other, but those of all keys do.

    Words 0 to 13 and 22 to 28 are those of ``attention_kernels.attention``, with the elements of a
    value (and of a key, unless turned) one after the other, a mask's keys too::

        14 15 16 17 strides of K: batch, head, key, element  18 19 20 21 of V likewise
        30 scale (float64)  31 causal: 1 if query q sees keys up to q + word 32 only  32 offset
        34 scratch, aligned to 64 bytes  35 its bytes per worker
        37 a query that may look at no key gives 0 (1), not NaN (0)

    A worker's scratch holds for each query the scores of all keys, rounded up to whole vectors, and
    one element more. Units: batch * heads.
    """
    v = vec(dtype, lanes)
    load, store, load_n, store_n = v.load, v.store, v.load_n, v.store_n
    splat, zero, maximum, hmax, sum_of = v.splat, v.zero, v.maximum, v.hmax, v.sum
    load1, store1 = ld(dtype), st(dtype)
    exp = function("exp_flushed", dtype, lanes)
    along_rows, along_columns = row_products(dtype, lanes)
    item = item_bytes(dtype)
    size = lanes * item
    lowest = float("-inf")

    @register_jitable
    def soften(scores: int, mask: int, seen: int, room: int) -> float:
        """Turn the scores of a row into weights, 0 where it does not look; return their sum."""
        if mask != 0:
            for k in range(0, seen, lanes):
                n, at = min(lanes, seen - k), k * item
                store_n(scores + at, n, load(scores + at) + load_n(mask + at, n))
        for k in range(seen, room):
            store1(scores + k * item, lowest)
        top = splat(lowest)
        for at in range(0, room * item, size):
            top = maximum(top, load(scores + at))
        most = hmax(top)
        # A row of nothing but -inf: all weights are 0, none is NaN.
        base = splat(most if most != lowest else 0.0)
        total = zero()
        for at in range(0, room * item, size):
            weight = exp(load(scores + at) - base)
            store(scores + at, weight)
            total = total + weight
        whole: float = sum_of(total)
        return whole

    @register_jitable
    def score(args: int, q: int, k: int, scores: int, row: int) -> None:
        """Write the scaled scores of the queries of a head."""
        rows, keys = arg(args, 5), arg(args, 6)
        for i in range(rows):
            for at in range(0, row, size):
                store(scores + i * row + at, zero())
        depth, step, scale = arg(args, 7), arg(args, 13), ld_f64(args + 8 * 30)
        if turned:
            along_rows(rows, depth, q, step, item, k, arg(args, 17), scores, row, keys, scale)
        else:
            along_columns(rows, depth, q, step, k, arg(args, 16), scores, row, keys, scale)

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        queries, keys, values = arg(args, 5), arg(args, 6), arg(args, 8)
        heads, step = arg(args, 9), arg(args, 24)
        scores = arg(args, 34) + worker * arg(args, 35)
        room = (keys + lanes - 1) // lanes * lanes
        row = room * item
        for unit in range(begin, end):
            batch, head = unit // heads, unit % heads
            key_head = head // arg(args, 10)
            q = arg(args, 0) + batch * arg(args, 11) + head * arg(args, 12)
            k = arg(args, 1) + batch * arg(args, 14) + key_head * arg(args, 15)
            v_at = arg(args, 2) + batch * arg(args, 18) + key_head * arg(args, 19)
            out = arg(args, 3) + batch * arg(args, 22) + head * arg(args, 23)
            score(args, q, k, scores, row)
            for i in range(queries):
                for d in range(0, values, lanes):
                    store_n(out + i * step + d * item, min(lanes, values - d), zero())
                mask, seen = arg(args, 4), keys
                if mask != 0:
                    mask += batch * arg(args, 25) + head * arg(args, 26) + i * arg(args, 27)
                if arg(args, 31) != 0:
                    seen = max(min(keys, i + 1 + arg(args, 32)), 0)
                total = soften(scores + i * row, mask, seen, room)
                store1(scores + queries * row + i * item, total)
            along_rows(
                queries, keys, scores, row, item, v_at, arg(args, 20), out, step, values, 1.0
            )
            for i in range(queries):
                total = load1(scores + queries * row + i * item)
                if arg(args, 37) != 0 and total == 0.0:
                    total = 1.0
                for d in range(0, values, lanes):
                    n, at = min(lanes, values - d), out + i * step + d * item
                    store_n(at, n, load_n(at, n) / splat(total))

    return kernel
