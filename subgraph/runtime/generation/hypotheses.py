"""The finished and the open hypotheses of a beam search."""

from __future__ import annotations

from bisect import insort_left
from operator import itemgetter

import numpy as np

from subgraph.graph.types import Array

_score = itemgetter(0)


class Hypotheses:
    """The best finished hypotheses of one entry of the batch.

    Attributes:
        done: Whether no open hypothesis can become better than the finished ones.
        best: Finished hypotheses, (score, tokens), the worst first.
    """

    def __init__(self, beams: int, penalty: float, early: bool) -> None:
        """Begin without hypotheses.

        Args:
            beams: How many are collected.
            penalty: Exponent of the length by which the sum of logarithms is divided.
            early: Whether the search ends with the first ``beams`` finished hypotheses.
        """
        self._beams, self._penalty, self._early = beams, np.float32(penalty), early
        self.done = False
        self.best: list[tuple[np.float32, Array]] = []

    def _average(self, total: np.float32, length: int) -> np.float32:
        return np.float32(total / np.power(np.float32(length), self._penalty))

    def add(self, tokens: Array, total: np.float32) -> None:
        """Add a finished hypothesis if it is among the best.

        Args:
            tokens: Its tokens, which are copied.
            total: The sum of the logarithms of their probabilities.
        """
        score = self._average(total, len(tokens))
        if len(self.best) < self._beams or score > self.best[0][0]:
            # Of equal ones the first remains the better.
            insort_left(self.best, (score, tokens.copy()), key=_score)
            del self.best[: -self._beams]

    def advance(
        self, tokens: Array, totals: Array, parents: Array, chosen: Array, end: int
    ) -> list[int]:
        """Take the candidates of a step; return the positions of those that continue.

        Args:
            tokens: The open hypotheses, [beams, length].
            totals: Scores of the candidates, the best first, twice as many as beams.
            parents: The open hypothesis that each candidate continues.
            chosen: The token that it adds.
            end: The token that ends a hypothesis.
        """
        alive: list[int] = []
        for k, token in enumerate(chosen.tolist()):
            if token != end or end < 0:
                alive.append(k)
                if len(alive) == self._beams:
                    break
            elif k < self._beams:
                self.add(tokens[parents[k]], totals[k])
        if len(self.best) == self._beams:
            best = self._average(totals.max(), tokens.shape[1])
            self.done = self._early or bool(self.best[0][0] >= best)
        return alive
