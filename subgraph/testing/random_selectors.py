"""Hypothesis strategies for selectors: legal ones of every temper, and ones that misbehave.

A drawn item is a `Recipe`: a factory of fresh selectors that answers the same questions the same
way, from its seed alone, and prints as the call that makes it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from zlib import crc32

import attrs
from hypothesis import strategies as st

from subgraph.graph.graph import Node
from subgraph.partition.selector import ContainOpSelector, Reject, SubgraphSelector


def _share(*parts: object) -> float:
    """Return a number in [0, 1) that depends on ``parts`` alone."""
    return crc32(repr(parts).encode()) / 2**32


class ByOperator(ContainOpSelector):
    """Takes some operators, everywhere."""

    def __init__(self, seed: int) -> None:
        """Choose the operators by ``seed``."""
        names = ("Relu", "Tanh", "Sin", "Neg", "Sigmoid", "Sum", "Max", "Mean", "Min", "Add", "Mul")
        super().__init__(name for name in names if _share(seed, name) < 0.7)


class ByNode(SubgraphSelector):
    """Takes most nodes, whichever way they are reached."""

    def __init__(self, seed: int) -> None:
        """Choose the nodes by ``seed``."""
        self.seed = seed

    def _takes(self, node: Node) -> bool | Reject:
        return _share(self.seed, node.name) < 0.75 or Reject("not one of mine")

    def select(self, node: Node) -> bool | Reject:
        """Answer by name."""
        return self._takes(node)

    def select_input(self, node: Node, input_node: Node) -> bool | Reject:
        """Answer by the producer's name."""
        return self._takes(input_node)

    def select_output(self, node: Node, output_node: Node) -> bool | Reject:
        """Answer by the consumer's name."""
        return self._takes(output_node)


class ByEdge(ByNode):
    """Takes most edges: a node refused over one may be taken over another."""

    def select_input(self, node: Node, input_node: Node) -> bool | Reject:
        """Answer by both names."""
        return _share(self.seed, node.name, "in", input_node.name) < 0.5

    def select_output(self, node: Node, output_node: Node) -> bool | Reject:
        """Answer by both names."""
        return _share(self.seed, node.name, "out", output_node.name) < 0.6


class Downwards(ByNode):
    """Grows only towards consumers."""

    def select_input(self, node: Node, input_node: Node) -> bool:
        """Refuse."""
        return False


class Upwards(ByNode):
    """Starts at few nodes and grows only towards producers."""

    def select(self, node: Node) -> bool | Reject:
        """Start seldom."""
        return _share(self.seed, "start", node.name) < 0.4

    def select_output(self, node: Node, output_node: Node) -> bool:
        """Refuse."""
        return False


class Budget(ByNode):
    """Keeps count: takes only so many nodes."""

    def __init__(self, seed: int) -> None:
        """Choose the size by ``seed``."""
        super().__init__(seed)
        self.left = 1 + crc32(str(seed).encode()) % 5

    def _takes(self, node: Node) -> bool | Reject:
        if not self.left:
            return Reject("the region is full")
        if super()._takes(node):
            self.left -= 1
            return True
        return False

    def reset(self) -> None:
        """Start over."""
        self.left = 1 + crc32(str(self.seed).encode()) % 5


class Dropping(ByNode):
    """Its filter drops some candidates, and so tears regions apart."""

    def filter(self, candidates: list[Node]) -> list[Node]:
        """Drop by name."""
        return [node for node in candidates if _share(self.seed, "keep", node.name) < 0.7]


class AllOrNothing(ByNode):
    """Its filter keeps candidates only if there are at least three."""

    def filter(self, candidates: list[Node]) -> list[Node]:
        """Keep all or none."""
        return candidates if len(candidates) > 2 else []


class Raising(ByNode):
    """Raises when asked about some node."""

    def _takes(self, node: Node) -> bool | Reject:
        if _share(self.seed, "raise", node.name) < 0.3:
            raise RuntimeError(f"cannot think about {node.name}")
        return super()._takes(node)


class RaisingFilter(ByNode):
    """Raises when it should filter."""

    def filter(self, candidates: list[Node]) -> list[Node]:
        """Raise."""
        raise ZeroDivisionError("no filter today")


class Foreign(ByNode):
    """Its filter gives nodes that were not offered."""

    def filter(self, candidates: list[Node]) -> list[Node]:
        """Add the neighbours."""
        around = [n for c in candidates for n in (*c.predecessors(), *c.successors())]
        return [*candidates, *around, Node("Relu", name="never seen")]


class Moody(ByNode):
    """Changes its mind: answers differ from one question to the next."""

    asked = 0

    def _takes(self, node: Node) -> bool | Reject:
        Moody.asked += 1
        return _share(self.seed, Moody.asked) < 0.6

    def filter(self, candidates: list[Node]) -> list[Node]:
        """Drop whatever."""
        return [node for node in candidates if self._takes(node)]


class Odd(ByNode):
    """Answers with things that are no bools."""

    def _takes(self, node: Node) -> Any:
        answers: tuple[Any, ...] = (None, 0, "yes", (), 1.5)
        return answers[crc32(f"{self.seed}{node.name}".encode()) % 5]


@attrs.frozen
class Recipe:
    """A factory of fresh selectors that prints as it is called."""

    make: Callable[[int], SubgraphSelector]
    seed: int

    def __call__(self) -> SubgraphSelector:
        """Return a fresh selector."""
        return self.make(self.seed)

    def __repr__(self) -> str:
        return f"{getattr(self.make, '__name__', self.make)}({self.seed})"


LEGAL = (*(ByOperator, ByNode, ByEdge, Downwards, Upwards, Budget, Dropping, AllOrNothing),)
MISBEHAVING = (Raising, RaisingFilter, Foreign, Moody, Odd)
_SEEDS = st.integers(0, 10_000)


def selectors() -> st.SearchStrategy[Recipe]:
    """Draw factories of legal selectors, stateless and stateful."""
    return st.builds(Recipe, st.sampled_from(LEGAL), _SEEDS)


def misbehaving_selectors() -> st.SearchStrategy[Recipe]:
    """Draw factories of selectors that raise, give foreign candidates, or change their mind."""
    return st.builds(Recipe, st.sampled_from(MISBEHAVING), _SEEDS)
