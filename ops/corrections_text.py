"""TfIdfVectorizer, for the reference: onnx.reference walks a tree, and fills each output in Python.

Its n-grams are looked up here as tuples, and counts that nothing has checked are refused.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import numpy as np

from subgraph.errors import ShapeError
from subgraph.graph import Node
from subgraph.limits import memory_limit
from subgraph.op import reference
from subgraph.reference import attributes

from .elementwise_expressions import text
from .ml_scores import prepared

Array = np.ndarray[Any, Any]


@attrs.frozen(eq=False)
class _Pool:
    """The n-grams of a node.

    Attributes:
        places: Where each n-gram that counts is counted in a row of the output.
        lengths: The fewest and the most words of an n-gram.
        width: Numbers of a row of the output.
        weights: One for each number of a row, or empty.
    """

    places: dict[tuple[Any, ...], int]
    lengths: tuple[int, int]
    width: int
    weights: Array


def _pool_of(node: Node) -> _Pool:
    given = attributes(node)
    words = [int(word) for word in given["pool_int64s"] or ()]
    pool: Sequence[Any] = words or [text(word) for word in given["pool_strings"] or ()]
    starts = [*(int(n) for n in given["ngram_counts"]), len(pool)]
    if any(a > b for a, b in itertools.pairwise([0, *starts])):
        raise ShapeError(f"ngram_counts {starts[:-1]} are no places in a pool of {len(pool)}")
    indexes = [int(n) for n in given["ngram_indexes"]]
    width = max(indexes, default=0) + 1
    if min(indexes, default=0) < 0 or width * 16 > memory_limit():
        raise ShapeError(f"ngram_indexes up to {width - 1} ask for too much memory")
    weights = np.array(given["weights"] or (), np.float32)
    if 0 < weights.size < width:
        raise ShapeError(f"{weights.size} weights for n-grams that are counted in {width} places")
    lengths = int(given["min_gram_length"]), int(given["max_gram_length"])
    places: dict[tuple[Any, ...], int] = {}
    number = 0
    for size, (start, end) in enumerate(itertools.pairwise(starts), 1):
        for first in range(start, end - size + 1, size):
            if number >= len(indexes):
                raise ShapeError(f"ngram_indexes has {len(indexes)} places; the pool has more")
            if lengths[0] <= size <= lengths[1]:
                places[tuple(pool[first : first + size])] = indexes[number]
            number += 1
    return _Pool(places, lengths, width, weights[:width])


@reference("TfIdfVectorizer")
def tfidf_vectorizer(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return how often each n-gram of the pool occurs in a row of words, or its weight."""
    given, x = attributes(node), inputs[0]
    pool = prepared(node, _pool_of)
    skip, mode = int(given["max_skip_count"]), text(given["mode"])
    if skip < 0:
        raise ShapeError(f"max_skip_count is {skip}; it must not be negative")
    if mode not in ("TF", "IDF", "TFIDF"):
        raise ShapeError(f"mode {mode!r}; it is TF, IDF or TFIDF")
    if x.ndim > 2 or (x.ndim == 2 and not len(x)):
        raise ShapeError(f"words of shape {list(x.shape)}; they are one row or several")
    lines = (x if x.ndim == 2 else x.reshape(1, -1)).tolist()
    if len(lines) * pool.width * 16 > memory_limit():
        raise ShapeError(f"{len(lines)} rows of {pool.width} counts ask for too much memory")
    counts = np.zeros((len(lines), pool.width))
    for row, words in zip(counts, lines, strict=True):
        for gram in _grams(words, pool.lengths, skip):
            place = pool.places.get(gram)
            if place is not None:
                row[place] += 1
    if mode == "IDF":
        counts = (counts > 0).astype(np.float64)
    if mode != "TF" and pool.weights.size:
        counts *= pool.weights
    return [counts.astype(np.float32).reshape((*x.shape[:-1], pool.width))]


def _grams(words: Sequence[Any], lengths: tuple[int, int], skip: int) -> Iterator[tuple[Any, ...]]:
    """Yield the n-grams of a row, their words up to ``skip`` others apart; words alone once."""
    for size in range(max(lengths[0], 1), lengths[1] + 1):
        # Words further apart than a row is long form no n-gram.
        for apart in range(1, min(skip, len(words)) + 2 if size > 1 else 2):
            reach = apart * (size - 1)
            if reach >= len(words):
                break
            for first in range(len(words) - reach):
                yield tuple(words[first : first + reach + 1 : apart])
