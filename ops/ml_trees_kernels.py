"""Kernel of tree ensembles: samples walk through the trees, a block of them at a time.

All nodes of all trees are records of six 32-bit words::

    feature, threshold, where x <= threshold leads, where x > threshold leads, where NaN leads, 0

Ways and roots are bytes from the first node on. A leaf has feature -1 and, in place of the first
two ways, its first vote and how many votes it has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from subgraph.engine.simd import ld, st

from .movement_kernels import arg

Function = Callable[..., Any]
RECORD = 24  # bytes of a node
BLOCK = 32  # samples that go through a tree one after the other, while it is in the cache


def ensemble(*, labels: bool) -> Function:
    """Return the kernel that adds up what the leaves say, tree by tree.

    Args:
        labels: Whether it tells the class with the highest score too.

    Words: ``0 samples, 1 scores, 2 labels, 3 nodes, 4 roots, 5 targets of votes (int32), 6 weights
    of votes, 7 base values, 8 class labels (int64), 9 number of samples, 10 features, 11 targets,
    12 trees, 13 divisor (float), 14 whether base values count as votes, 15 scratch, 16 bytes of it
    for each worker``. Units: blocks of samples. The scratch has a byte for each score of a block:
    whether a leaf spoke of it.
    """
    number, put_label, label_of = ld("int32"), st("int64"), ld("int64")
    load, store, real = ld("float32"), st("float32"), ld("float64")
    flag, put_flag = ld("uint8"), st("uint8")

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        x, scores, found, nodes, roots = (
            arg(args, 0),
            arg(args, 1),
            arg(args, 2),
            arg(args, 3),
            arg(args, 4),
        )
        targets, weights, base, classes = arg(args, 5), arg(args, 6), arg(args, 7), arg(args, 8)
        samples, features, count, trees = arg(args, 9), arg(args, 10), arg(args, 11), arg(args, 12)
        divisor, all_spoken = np.float32(real(args + 104)), arg(args, 14)
        spoken = arg(args, 15) + worker * arg(args, 16)
        for unit in range(begin, end):
            first = unit * BLOCK
            size = min(BLOCK, samples - first)
            block, rows = scores + 4 * first * count, x + 4 * first * features
            for k in range(size * count):
                store(block + 4 * k, np.float32(0))
                if labels:
                    put_flag(spoken + k, np.uint8(all_spoken))
            for tree in range(trees):
                root = nodes + number(roots + 4 * tree)
                for k in range(size):
                    row, node = rows + 4 * k * features, root
                    feature = number(node)
                    while feature >= 0:
                        value = load(row + 4 * feature)
                        way = 8 + 4 * int(value > load(node + 4))
                        if value != value:
                            way = 16
                        node = nodes + number(node + way)
                        feature = number(node)
                    vote, votes = number(node + 8), number(node + 12)
                    for at in range(4 * vote, 4 * (vote + votes), 4):
                        place = k * count + number(targets + at)
                        store(block + 4 * place, load(block + 4 * place) + load(weights + at))
                        if labels:
                            put_flag(spoken + place, np.uint8(1))
            for k in range(size):
                best, highest, any_spoken = 0, np.float32(-np.inf), False
                if labels:
                    for target in range(count):
                        any_spoken = any_spoken or flag(spoken + k * count + target) != 0
                for target in range(count):
                    at = block + 4 * (k * count + target)
                    score = load(at) / divisor + load(base + 4 * target)
                    store(at, score)
                    if labels:
                        stands = not any_spoken or flag(spoken + k * count + target) != 0
                        if stands and score > highest:
                            best, highest = target, score
                if labels:
                    put_label(found + 8 * (first + k), label_of(classes + 8 * best))

    return kernel
