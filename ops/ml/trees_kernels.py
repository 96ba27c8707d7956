"""Kernel of tree ensembles: samples walk through the trees, a block of them at a time.

All nodes of all trees are records of six 32-bit words::

    feature, threshold, where x <= threshold leads, where x > threshold leads, where NaN leads, 0

Ways and roots are bytes from the first node on. A leaf leads to itself, whatever its feature 0 is;
it has its first vote in place of the threshold, and last how many votes it has.

A step waits for what the one before it loads: several walks, of as many samples through a tree or
of a sample through as many trees, go on side by side until all of them stand still.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba.extending import register_jitable

from subgraph.engine.codegen.argument_views import view_of
from subgraph.engine.codegen.simd import ld, st

from .arguments import EnsembleArguments
from .trees_layout import BLOCK

Function = Callable[..., Any]
_WALKS = 8  # side by side


def ensemble(*, found: str, lost: bool) -> Function:
    """Return the kernel of `EnsembleArguments`: it adds up the votes of the leaves, tree by tree.

    Args:
        found: The results: ``"scores"``; ``"labels"``: the class with the highest score too;
            ``"pair"``: one of two classes, which one score decides, and the scores of both.
        lost: Whether NaN has ways of its own; else it goes where greater numbers do.
    """
    arguments = view_of(EnsembleArguments)
    labels, pair = found == "labels", found == "pair"
    add_votes = _voter(labels, lost)
    best_of, one_of_two = _finishers(labels)
    store, put_label, label_of, put_flag = st("float32"), st("int64"), ld("int64"), st("uint8")

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        a = arguments(args)
        samples, features, count = a.samples, a.features, a.count
        spoken = a.scratch + worker * a.scratch_bytes
        for unit in range(begin, end):
            first = unit * BLOCK
            size = min(BLOCK, samples - first)
            block = a.scores + 4 * first * count
            for k in range(size * count):
                store(block + 4 * k, np.float32(0))
                if labels:
                    put_flag(spoken + k, np.uint8(a.base_votes))
            add_votes(a, a.x + 4 * first * features, size, block, spoken)
            for k in range(size):
                scores = block + 4 * k * count
                best = one_of_two(a, scores) if pair else best_of(a, scores, spoken + k * count)
                if labels or pair:
                    put_label(a.labels + 8 * (first + k), label_of(a.class_labels + 8 * best))

    return kernel


def _walker(lost: bool) -> Function:
    """Return ``f(nodes, starts, rows)``: the leaves at which eight walks from some nodes end.

    ``starts`` and ``rows`` are two tuples of four addresses each: of nodes and of samples. With
    ``lost``, NaN has ways of its own.
    """
    number, load = ld("int32"), ld("float32")

    @register_jitable
    def step(nodes: int, node: int, row: int) -> int:
        """Return where a node leads with a sample."""
        value = load(row + 4 * number(node))
        way = 8 + 4 * int(not value <= load(node + 4))
        if lost and value != value:
            way = 16
        led: int = nodes + number(node + way)
        return led

    @register_jitable
    def four(nodes: int, at: Any, rows: Any) -> Any:
        """Return where four nodes lead with samples, and something else than 0 if anywhere."""
        a, b, c, d = at
        p, q, r, s = rows
        e, f, g, h = step(nodes, a, p), step(nodes, b, q), step(nodes, c, r), step(nodes, d, s)
        return (e, f, g, h), (a ^ e) | (b ^ f) | (c ^ g) | (d ^ h)

    @register_jitable
    def leaves(nodes: int, starts: Any, rows: Any) -> Any:
        """Return where walks from some nodes end."""
        low, high = starts
        moved = 1
        while moved != 0:
            low, moved_low = four(nodes, low, rows[0])
            high, moved_high = four(nodes, high, rows[1])
            moved = moved_low | moved_high
        return low + high

    return leaves


@register_jitable
def _apart(first: int, step: int) -> Any:
    return first, first + step, first + 2 * step, first + 3 * step


def _voter(labels: bool, lost: bool) -> Function:
    """Return ``f(a, rows, size, block, spoken)``: the votes of all trees on a block of samples.

    Args:
        labels: Whether a byte for each score, at ``spoken``, becomes 1 where a leaf votes.
        lost: Whether NaN has ways of its own.
    """
    number, load, store, put_flag = ld("int32"), ld("float32"), st("float32"), st("uint8")
    leaves = _walker(lost)

    @register_jitable
    def vote(a: EnsembleArguments, leaf: int, scores: int, spoken: int) -> None:
        """Add a leaf's votes to the scores of a sample."""
        at, votes = 4 * number(leaf + 4), number(leaf + 20)
        for i in range(at, at + 4 * votes, 4):
            target = number(a.targets + i)
            store(scores + 4 * target, load(scores + 4 * target) + load(a.weights + i))
            if labels:
                put_flag(spoken + target, np.uint8(1))

    @register_jitable
    def roots_of(nodes: int, first: int, left: int) -> Any:
        """Return the roots of the next trees, the last one again where there are no more."""
        last = 4 * (left - 1)
        return (
            nodes + number(first + min(0, last)),
            nodes + number(first + min(4, last)),
            nodes + number(first + min(8, last)),
            nodes + number(first + min(12, last)),
        )

    @register_jitable
    def add_votes(a: EnsembleArguments, rows: int, size: int, block: int, spoken: int) -> None:
        """Let samples walk through all trees: those of whole groups together, the rest alone."""
        nodes, roots = a.nodes, a.roots
        trees, row, count = a.trees, 4 * a.features, a.count
        together = size // _WALKS * _WALKS
        for tree in range(trees if together else 0):
            root = nodes + number(roots + 4 * tree)
            starts = root, root, root, root
            for k in range(0, together, _WALKS):
                x, y, z = rows + k * row, block + 4 * k * count, spoken + k * count
                low, high = _apart(x, row), _apart(x + 4 * row, row)
                for leaf in leaves(nodes, (starts, starts), (low, high)):
                    vote(a, leaf, y, z)
                    y, z = y + 4 * count, z + count
        for k in range(together, size):
            x, y, z = rows + k * row, block + 4 * k * count, spoken + k * count
            for tree in range(0, trees, _WALKS):
                left = trees - tree
                low = roots_of(nodes, roots + 4 * tree, left)
                high = roots_of(nodes, roots + 4 * tree + 16, left - 4)
                for leaf in leaves(nodes, (low, high), (_apart(x, 0), _apart(x, 0))):
                    if left > 0:
                        vote(a, leaf, y, z)
                    left -= 1

    return add_votes


def _finishers(labels: bool) -> tuple[Function, Function]:
    """Return what finishes the scores of a sample and returns its class: of all, and of two."""
    load, store, flag = ld("float32"), st("float32"), ld("uint8")

    @register_jitable
    def best_of(a: EnsembleArguments, scores: int, spoken: int) -> int:
        """Finish the scores of a sample; return its class."""
        count, divisor = a.count, np.float32(a.divisor)
        best, highest, any_spoken = 0, np.float32(-np.inf), False
        if labels:
            for target in range(count):
                any_spoken = any_spoken or flag(spoken + target) != 0
        for target in range(count):
            at = scores + 4 * target
            score = load(at) / divisor + load(a.base + 4 * target)
            store(at, score)
            if labels:
                stands = not any_spoken or flag(spoken + target) != 0
                if stands and score > highest:
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
