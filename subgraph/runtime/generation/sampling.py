"""Sampling: tokens are chosen by chance among the most probable ones (top-p)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from subgraph.graph.graph import Node
from subgraph.graph.types import Array

from .scores import number

_FILTER_VALUE = -1e20  # score of tokens that are not among the most probable ones


class Sampler:
    """Chooses the next tokens of a Sampling."""

    def __init__(self, node: Node, operands: Mapping[str, Any]) -> None:
        """Begin with the node's seed; without one, each search chooses other tokens."""
        attrs, seed = node.attrs, operands.get("seed")
        self._limit = np.float32(attrs.get("top_p", 0.0))
        self._value = np.float32(attrs.get("filter_value", _FILTER_VALUE))
        self._least = int(attrs.get("min_tokens_to_keep", 0))
        self._keeps_crossing = bool(attrs.get("custom", 0))
        self._random = np.random.default_rng(None if seed is None else abs(int(number(seed, 0))))

    def choose(self, scores: Array) -> Array:
        """Return a token for each row of scores, which become those of the tokens that may be.

        With ``custom`` these are the best tokens up to the one at which the sum of probabilities
        exceeds ``top_p``; without it, all but the worst whose sum is at most 1 - ``top_p``.
        """
        order = np.argsort(scores, axis=1, kind="stable")
        if self._keeps_crossing:
            order = np.argsort(-scores, axis=1, kind="stable")
        sums = np.cumsum(probabilities(np.take_along_axis(scores, order, 1)), axis=1)
        if self._keeps_crossing:
            dropped = np.zeros(scores.shape, np.bool_)
            dropped[:, 1:] = sums[:, :-1] > self._limit
        else:
            dropped = sums <= np.float32(1) - self._limit
            dropped[:, max(scores.shape[1] - self._least, 1) :] = False
        row, place = np.nonzero(dropped)
        scores[row, order[row, place]] = self._value
        # A number in [0, 1) falls into the interval of a token in the sums of probabilities.
        sums = np.cumsum(probabilities(scores).astype(np.float64), axis=1)
        limits = self._random.random(len(scores)) * sums[:, -1]
        below: Array = (sums <= limits[:, None]).sum(axis=1)
        return below.clip(max=scores.shape[1] - 1)


def probabilities(scores: Array) -> Array:
    """Return the softmax of each row of scores."""
    powers: Array = np.exp(scores - scores.max(axis=1, keepdims=True))
    powers /= powers.sum(axis=1, keepdims=True)
    return powers
