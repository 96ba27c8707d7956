"""TfIdfVectorizer, for the reference: onnx.reference loops over counts that nothing has checked."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from subgraph.errors import ShapeError
from subgraph.graph import Node
from subgraph.limits import memory_limit
from subgraph.op import reference
from subgraph.reference import attributes, standard, variant


@reference("TfIdfVectorizer")
def tfidf_vectorizer(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return the frequencies of n-grams; counts must lie within the pool."""
    given = attributes(node)
    pool = given.get("pool_int64s") or given.get("pool_strings") or ()
    starts = [0, *(int(n) for n in given["ngram_counts"]), len(pool)]
    if any(a > b for a, b in itertools.pairwise(starts)):
        raise ShapeError(f"ngram_counts {starts[1:-1]} are no places in a pool of {len(pool)}")
    skip, x = int(given["max_skip_count"]), inputs[0]
    if skip < 0:
        raise ShapeError(f"max_skip_count is {skip}; it must not be negative")
    indexes = [int(n) for n in given["ngram_indexes"]]
    rows = x.shape[0] if x.ndim > 1 else 1
    if min(indexes, default=0) < 0 or rows * (max(indexes, default=0) + 1) * 16 > memory_limit():
        raise ShapeError(f"ngram_indexes up to {max(indexes, default=0)} ask for too much memory")
    # Words further apart than a row is long form no n-gram.
    return standard(variant(node, max_skip_count=min(skip, x.size)), inputs)
