"""Kernel that writes what Attention adds to its scores: masks, windows, causality, padding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from subgraph.dtypes import item_bytes
from subgraph.engine.codegen.argument_views import view_of
from subgraph.engine.codegen.simd import ld, st

from .arguments import BiasArguments


def bias(*, dtype: str, mask: str) -> Callable[..., Any]:
    """Return the kernel of `BiasArguments`; a key that is not seen gets minus infinity.

    Args:
        dtype: Dtype of the scores.
        mask: Dtype of the mask: "bool" (True: seen), or ``dtype`` (added); "": no mask.
    """
    arguments = view_of(BiasArguments)
    load, store, count_of = ld(mask or "uint8"), st(dtype), ld("int64")
    item, step = item_bytes(dtype), item_bytes(mask or "bool")
    unseen = float("-inf")
    given, boolean = mask != "", mask == "bool"

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        a = arguments(args)
        heads, queries, keys = a.heads, a.queries, a.keys
        left, right, causal = a.left, a.right, a.causal
        for unit in range(begin, end):
            query = unit % queries
            head, batch = unit // queries % heads, unit // queries // heads
            row = a.mask
            if given:
                at = batch * a.mask_batch + head * a.mask_head + query * a.mask_row
                row += at * step
            # With counts the queries are the last tokens before a sample's padding, so that their
            # positions differ between samples.
            before, last = a.past, keys
            if a.counts != 0:
                last = count_of(a.counts + 8 * batch)
                before = last - queries
            y = a.y + unit * keys * item
            seen = 0.0
            for key in range(keys):
                distance = query + before - key
                free = key < last and (causal == 0 or distance >= 0)
                free = free and (left < 0 or distance <= left)
                free = free and (right < 0 or -distance <= right)
                value = 0.0
                if given:
                    # A mask may have fewer keys than K; its memory ends there, and ONNX hides the
                    # others.
                    if key >= a.mask_keys:
                        free = False
                    elif boolean:
                        free = free and load(row + key * a.mask_key * step)
                    else:
                        value = float(load(row + key * a.mask_key * step))
                value = value if free else unseen
                # The mask itself may be minus infinity: what counts is the result.
                if value != unseen:
                    seen = 1.0
                store(y + key * item, value)
            store(a.flags + unit * item, seen)

    return kernel
