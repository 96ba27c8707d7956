"""Kernels of support vector machines: distances, votes of pairs, probabilities of classes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba.extending import register_jitable

from subgraph.engine.codegen.argument_views import view_of
from subgraph.engine.codegen.simd import ld, st, vec

from .arguments import (
    ACCURACY,
    MAX_ITERATIONS,
    DistancesArguments,
    PairScoresArguments,
    ProbabilitiesArguments,
    VotesArguments,
)

Function = Callable[..., Any]


def distances(*, lanes: int) -> Function:
    """Return the kernel of `DistancesArguments`: squared distances of samples and vectors.

    A tile is four samples by two SIMD vectors of support vectors, eight independent sums.

    Args:
        lanes: Elements of a vector.
    """
    arguments = view_of(DistancesArguments)
    v = vec("float32", lanes)
    load, bcast, fma, zero, store_n = v.load, v.bcast, v.fma, v.zero, v.store_n
    width = 2 * lanes

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        # `a` is a sum below.
        w = arguments(args)
        x, y, table = w.x, w.y, w.table
        samples, features, count = w.samples, w.features, w.vectors
        padded = (count + width - 1) // width * width
        for unit in range(begin, end):
            # The last tile repeats the last sample instead of reading beyond it, and writes its row
            # again with the same sums.
            first, last = 4 * unit, samples - 1
            i0, i1, i2, i3 = first, min(first + 1, last), min(first + 2, last), min(first + 3, last)
            row = 4 * features
            x0, x1, x2, x3 = x + i0 * row, x + i1 * row, x + i2 * row, x + i3 * row
            for at in range(0, count, width):
                a0, b0, a1, b1 = zero(), zero(), zero(), zero()
                a2, b2, a3, b3 = zero(), zero(), zero(), zero()
                p = table + 4 * at
                for k in range(0, row, 4):
                    s, t = load(p), load(p + 4 * lanes)
                    p += 4 * padded
                    # The difference is squared directly: |x|^2 - 2 x y + |y|^2 would lose digits
                    # where the vectors are close.
                    e = bcast(x0 + k)
                    d, c = e - s, e - t
                    a0, b0 = fma(d, d, a0), fma(c, c, b0)
                    e = bcast(x1 + k)
                    d, c = e - s, e - t
                    a1, b1 = fma(d, d, a1), fma(c, c, b1)
                    e = bcast(x2 + k)
                    d, c = e - s, e - t
                    a2, b2 = fma(d, d, a2), fma(c, c, b2)
                    e = bcast(x3 + k)
                    d, c = e - s, e - t
                    a3, b3 = fma(d, d, a3), fma(c, c, b3)
                one, two = min(count - at, lanes), min(count - at - lanes, lanes)
                for sample in range(4):
                    i, a, b = i0, a0, b0
                    if sample == 1:
                        i, a, b = i1, a1, b1
                    elif sample == 2:
                        i, a, b = i2, a2, b2
                    elif sample == 3:
                        i, a, b = i3, a3, b3
                    to = y + 4 * (i * count + at)
                    store_n(to, one, a)
                    if two > 0:
                        store_n(to + 4 * lanes, two, b)

    return kernel


def pair_scores(*, lanes: int) -> Function:
    """Return the kernel of `PairScoresArguments`: scores of pairs of classes, added in float64.

    Args:
        lanes: Elements of a vector.
    """
    arguments = view_of(PairScoresArguments)
    v = vec("float64", lanes)
    load, load_n, fma, zero, total_of = v.load, v.load_n, v.fma, v.zero, v.sum
    number, real, put = ld("int64"), ld("float64"), st("float32")

    @register_jitable
    def dot(p: int, w: int, begin: int, end: int) -> float:
        """Return the dot product of the elements [begin, end) of two rows."""
        a, b = zero(), zero()
        i = begin
        # Two sums, so that an addition need not wait for the one before it.
        while i + 2 * lanes <= end:
            a = fma(load(p + 8 * i), load(w + 8 * i), a)
            b = fma(load(p + 8 * (i + lanes)), load(w + 8 * (i + lanes)), b)
            i += 2 * lanes
        while i < end:
            left = min(end - i, lanes)
            a = fma(load_n(p + 8 * i, left), load_n(w + 8 * i, left), a)
            i += lanes
        total: float = total_of(a + b)
        return total

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        a = arguments(args)
        found, scores, rows = a.products, a.scores, a.coefficients
        rho, ends, classes, vectors = a.constants, a.ends, a.classes, a.vectors
        for unit in range(begin, end):
            p, pair = found + 8 * unit * vectors, 0
            to = scores + 4 * unit * (classes * (classes - 1) // 2)
            for i in range(classes):
                for j in range(i + 1, classes):
                    w = rows + 8 * pair * vectors
                    score = real(rho + 8 * pair)
                    for k in (i, j):
                        score += dot(p, w, number(ends + 8 * k), number(ends + 8 * k + 8))
                    put(to + 4 * pair, np.float32(score))
                    pair += 1

    return kernel


def votes() -> Function:
    """Return the kernel of `VotesArguments`: the class with the most votes, the first on ties."""
    arguments = view_of(VotesArguments)
    load, put, count_at, put_count = ld("float32"), st("int64"), ld("int64"), st("int64")

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        a = arguments(args)
        scores, winners = a.scores, a.winners
        classes, pairs = a.classes, a.pairs
        counts = a.scratch + worker * a.scratch_bytes
        for unit in range(begin, end):
            for k in range(classes):
                put_count(counts + 8 * k, 0)
            at = scores + 4 * unit * pairs
            for i in range(classes):
                for j in range(i + 1, classes):
                    score = load(at)
                    at += 4
                    first, other = counts + 8 * i, counts + 8 * j
                    put_count(first, count_at(first) + int(score > 0))
                    put_count(other, count_at(other) + int(score <= 0))
            best = 0
            for k in range(1, classes):
                if count_at(counts + 8 * k) > count_at(counts + 8 * best):
                    best = k
            put(winners + 8 * unit, best)

    return kernel


def class_probabilities() -> Function:
    """Return the kernel of `ProbabilitiesArguments`; the method is `svm._class_probabilities`'."""
    arguments = view_of(ProbabilitiesArguments)
    load, store, put = ld("float64"), st("float64"), st("float32")

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        a = arguments(args)
        classes = a.classes
        q = a.scratch + worker * a.scratch_bytes
        p, qp = q + 8 * classes * classes, q + 8 * classes * (classes + 1)
        row = 8 * classes
        for unit in range(begin, end):
            at = a.pairs + 8 * unit * (classes * (classes - 1) // 2)
            for i in range(classes):
                store(q + i * row + 8 * i, 0.0)
                store(p + 8 * i, 1.0 / classes)
            for i in range(classes):
                for j in range(i + 1, classes):
                    one = load(at)
                    other = 1.0 - one
                    at += 8
                    store(q + i * row + 8 * j, -other * one)
                    store(q + j * row + 8 * i, -one * other)
                    store(q + i * row + 8 * i, load(q + i * row + 8 * i) + other * other)
                    store(q + j * row + 8 * j, load(q + j * row + 8 * j) + one * one)
            for _ in range(MAX_ITERATIONS):
                pqp = 0.0
                for i in range(classes):
                    total = 0.0
                    for j in range(classes):
                        total += load(q + i * row + 8 * j) * load(p + 8 * j)
                    store(qp + 8 * i, total)
                    pqp += load(p + 8 * i) * total
                deviation = 0.0
                for i in range(classes):
                    deviation = max(deviation, abs(load(qp + 8 * i) - pqp))
                # A NaN ends the iteration, as it does on the reference device.
                if pqp != pqp or deviation < ACCURACY / classes:
                    break
                for i in range(classes):
                    diagonal = load(q + i * row + 8 * i)
                    # After each coordinate p, Q p and p^T Q p are updated and normalized in place,
                    # which costs O(classes) instead of a new product with the matrix.
                    step = (pqp - load(qp + 8 * i)) / diagonal
                    store(p + 8 * i, load(p + 8 * i) + step)
                    scale = 1.0 + step
                    pqp = (pqp + step * (step * diagonal + 2.0 * load(qp + 8 * i))) / (
                        scale * scale
                    )
                    for j in range(classes):
                        store(
                            qp + 8 * j,
                            (load(qp + 8 * j) + step * load(q + i * row + 8 * j)) / scale,
                        )
                        store(p + 8 * j, load(p + 8 * j) / scale)
            for i in range(classes):
                put(a.y + 4 * (unit * classes + i), np.float32(load(p + 8 * i)))

    return kernel
