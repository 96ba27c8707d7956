"""The kernel that writes what Attention adds to its scores: masks, frontiers, windows, padding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from subgraph.engine.codegen.simd import ld, st
from subgraph.ops.movement.kernels import arg

_ITEM = {"bool": 1, "float32": 4, "float64": 8}


def bias(*, dtype: str, mask: str) -> Callable[..., Any]:
    """Return the kernel; a position that is not seen gets minus infinity.

    Args:
        dtype: Dtype of the scores.
        mask: Dtype of the mask: bool (True is seen), or ``dtype``, which is added; "" for none.

    Words::

        0 y [batch, heads, queries, keys]  1 mask  2..5 elements between the mask's batches, heads,
        queries, keys  6 keys that the mask knows; later ones are not seen  7 heads of y  8 queries
        9 keys  10 causal  11 keys before the first query  12, 13 window to the left and right, or
        -1  14 int64 keys of each batch that count, or 0; the queries are then the last of them
        15 flags of dtype for each row: whether it sees anything

    Units: rows of y.
    """
    load, store, count_of = ld(mask or "uint8"), st(dtype), ld("int64")
    item, step = _ITEM[dtype], _ITEM[mask or "bool"]
    unseen = float("-inf")
    given, boolean = mask != "", mask == "bool"

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        heads, queries, keys = arg(args, 7), arg(args, 8), arg(args, 9)
        left, right, causal = arg(args, 12), arg(args, 13), arg(args, 10)
        for unit in range(begin, end):
            query = unit % queries
            head, batch = unit // queries % heads, unit // queries // heads
            row = arg(args, 1)
            if given:
                at = batch * arg(args, 2) + head * arg(args, 3) + query * arg(args, 4)
                row += at * step
            before, last = arg(args, 11), keys
            if arg(args, 14) != 0:
                last = count_of(arg(args, 14) + 8 * batch)
                before = last - queries
            y = arg(args, 0) + unit * keys * item
            seen = 0.0
            for key in range(keys):
                distance = query + before - key
                free = key < last and (causal == 0 or distance >= 0)
                free = free and (left < 0 or distance <= left)
                free = free and (right < 0 or -distance <= right)
                value = 0.0
                if given:
                    if key >= arg(args, 6):
                        free = False
                    elif boolean:
                        free = free and load(row + key * arg(args, 5) * step)
                    else:
                        value = float(load(row + key * arg(args, 5) * step))
                value = value if free else unseen
                if value != unseen:
                    seen = 1.0
                store(y + key * item, value)
            store(arg(args, 15) + unit * item, seen)

    return kernel
