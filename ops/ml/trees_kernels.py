"""Kernel of tree ensembles: a block of samples traverses all trees.

A node of a packed tree is six 32-bit numbers (`NODE_BYTES`)::

    feature, threshold, child if x <= threshold, child if x > threshold, child if NaN, 0

Children and roots are bytes from the first node on. A leaf is its own child for all values, and
has the index of its first vote as threshold and the number of its votes as last number.

Each step of a traversal depends on the load of the one before. To hide the latency, eight
traversals run side by side, of eight samples through one tree or of one sample through eight trees,
until all of them are at leaves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba.extending import register_jitable

from subgraph.engine.codegen.argument_views import view_of
from subgraph.engine.codegen.simd import ld, st

from .arguments import BLOCK_SAMPLES, EnsembleArguments

Function = Callable[..., Any]
# A step of a traversal waits for the load of its node; eight independent ones overlap their waits
# (estimate).
_TRAVERSALS = 8  # traversals side by side


def ensemble(*, results: str, nan_child: bool) -> Function:
    """Return the kernel of `EnsembleArguments`: it adds up the votes of the leaves, tree by tree.

    Args:
        results: ``"scores"``; ``"labels"``: also the class with the highest score; ``"pair"``: one
            of two classes, decided by one score, and the scores of both.
        nan_child: NaN has a child of its own; else it has that of numbers above the threshold.
    """
    arguments = view_of(EnsembleArguments)
    labels, pair = results == "labels", results == "pair"
    add_votes = _vote_adder(labels, nan_child)
    best_of, one_of_two = _finishers(labels)
    store, put_label, label_of, put_flag = st("float32"), st("int64"), ld("int64"), st("uint8")

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        a = arguments(args)
        samples, features, count = a.samples, a.features, a.count
        voted = a.scratch + worker * a.scratch_bytes
        for unit in range(begin, end):
            first = unit * BLOCK_SAMPLES
            size = min(BLOCK_SAMPLES, samples - first)
            block = a.scores + 4 * first * count
            for k in range(size * count):
                store(block + 4 * k, np.float32(0))
                if labels:
                    put_flag(voted + k, np.uint8(a.base_votes))
            add_votes(a, a.x + 4 * first * features, size, block, voted)
            for k in range(size):
                scores = block + 4 * k * count
                best = one_of_two(a, scores) if pair else best_of(a, scores, voted + k * count)
                if labels or pair:
                    put_label(a.labels + 8 * (first + k), label_of(a.class_labels + 8 * best))

    return kernel


def _leaf_finder(nan_child: bool) -> Function:
    """Return ``f(nodes, starts, rows)``: the leaves at which eight traversals end.

    ``starts`` are the nodes at which they begin, ``rows`` their samples, both two tuples of four
    addresses. ``nan_child`` is that of `ensemble`.
    """
    number, load = ld("int32"), ld("float32")

    @register_jitable
    def step(nodes: int, node: int, row: int) -> int:
        """Return the child of a node for a sample."""
        value = load(row + 4 * number(node))
        # Selecting the child by arithmetic avoids a branch that a random sample would make
        # unpredictable. The negated comparison sends NaN the way of large numbers.
        offset = 8 + 4 * int(not value <= load(node + 4))
        if nan_child and value != value:
            offset = 16
        child: int = nodes + number(node + offset)
        return child

    @register_jitable
    def four(nodes: int, at: Any, rows: Any) -> Any:
        """Return the children of four nodes, and a number that is 0 if all are leaves."""
        a, b, c, d = at
        p, q, r, s = rows
        e, f, g, h = step(nodes, a, p), step(nodes, b, q), step(nodes, c, r), step(nodes, d, s)
        return (e, f, g, h), (a ^ e) | (b ^ f) | (c ^ g) | (d ^ h)

    @register_jitable
    def leaves(nodes: int, starts: Any, rows: Any) -> Any:
        """Return the eight leaves."""
        low, high = starts
        # The children of a leaf are the leaf itself, so traversals of different depths run on
        # together until none moves.
        moved = 1
        while moved != 0:
            low, moved_low = four(nodes, low, rows[0])
            high, moved_high = four(nodes, high, rows[1])
            moved = moved_low | moved_high
        return low + high

    return leaves


@register_jitable
def _rows_at(first: int, step: int) -> Any:
    """Return four addresses, ``step`` bytes apart."""
    return first, first + step, first + 2 * step, first + 3 * step


def _vote_adder(labels: bool, nan_child: bool) -> Function:
    """Return ``f(a, rows, size, block, voted)``: adds all votes to the scores of a block.

    The block has ``size`` samples, at ``rows``, and its scores at ``block``.

    Args:
        labels: Set the byte of each score at ``voted`` to 1 where a leaf votes.
        nan_child: That of `ensemble`.
    """
    number, load, store, put_flag = ld("int32"), ld("float32"), st("float32"), st("uint8")
    leaves = _leaf_finder(nan_child)

    @register_jitable
    def vote(a: EnsembleArguments, leaf: int, scores: int, voted: int) -> None:
        """Add a leaf's votes to the scores of a sample."""
        at, votes = 4 * number(leaf + 4), number(leaf + 20)
        for i in range(at, at + 4 * votes, 4):
            target = number(a.targets + i)
            store(scores + 4 * target, load(scores + 4 * target) + load(a.weights + i))
            if labels:
                put_flag(voted + target, np.uint8(1))

    @register_jitable
    def roots_of(nodes: int, first: int, left: int) -> Any:
        """Return four roots, at ``first``, of ``left`` trees; past the end the last one repeats."""
        last = 4 * (left - 1)
        return (
            nodes + number(first + min(0, last)),
            nodes + number(first + min(4, last)),
            nodes + number(first + min(8, last)),
            nodes + number(first + min(12, last)),
        )

    @register_jitable
    def add_votes(a: EnsembleArguments, rows: int, size: int, block: int, voted: int) -> None:
        """Traverse all trees: eight samples at a time, and the rest by eight trees at a time."""
        nodes, roots = a.nodes, a.roots
        trees, row, count = a.trees, 4 * a.features, a.count
        grouped = size // _TRAVERSALS * _TRAVERSALS
        for tree in range(trees if grouped else 0):
            root = nodes + number(roots + 4 * tree)
            starts = root, root, root, root
            for k in range(0, grouped, _TRAVERSALS):
                x, y, z = rows + k * row, block + 4 * k * count, voted + k * count
                low, high = _rows_at(x, row), _rows_at(x + 4 * row, row)
                for leaf in leaves(nodes, (starts, starts), (low, high)):
                    vote(a, leaf, y, z)
                    y, z = y + 4 * count, z + count
        # Few samples do not fill eight traversals, so these take eight trees of one sample.
        for k in range(grouped, size):
            x, y, z = rows + k * row, block + 4 * k * count, voted + k * count
            for tree in range(0, trees, _TRAVERSALS):
                left = trees - tree
                low = roots_of(nodes, roots + 4 * tree, left)
                high = roots_of(nodes, roots + 4 * tree + 16, left - 4)
                for leaf in leaves(nodes, (low, high), (_rows_at(x, 0), _rows_at(x, 0))):
                    # Traversals beyond the last tree repeat it, and their leaves must not vote
                    # again.
                    if left > 0:
                        vote(a, leaf, y, z)
                    left -= 1

    return add_votes


def _finishers(labels: bool) -> tuple[Function, Function]:
    """Return two functions that complete a sample's scores and return its class.

    ``best_of(a, scores, voted)`` divides sums and adds base values; with ``labels`` it finds the
    best class. ``one_of_two(a, scores)`` decides between two classes by one score.
    """
    load, store, flag = ld("float32"), st("float32"), ld("uint8")

    @register_jitable
    def best_of(a: EnsembleArguments, scores: int, voted: int) -> int:
        """Complete the scores of a sample; return its class."""
        count, divisor = a.count, np.float32(a.divisor)
        best, highest, any_voted = 0, np.float32(-np.inf), False
        if labels:
            for target in range(count):
                any_voted = any_voted or flag(voted + target) != 0
        for target in range(count):
            at = scores + 4 * target
            score = load(at) / divisor + load(a.base + 4 * target)
            store(at, score)
            if labels:
                # A class without votes wins only where no class has any, although its score 0 may
                # be the highest.
                counts = not any_voted or flag(voted + target) != 0
                if counts and score > highest:
                    best, highest = target, score
        return best

    @register_jitable
    def one_of_two(a: EnsembleArguments, scores: int) -> int:
        """Write the scores of both classes; return the class."""
        score = load(scores + 4 * a.voted) + load(a.base)
        other = np.float32(a.first_constant) + np.float32(a.first_factor) * score
        store(scores, other)
        store(scores + 4, score)
        return int(score > np.float32(a.second_above))

    return best_of, one_of_two
