"""Selectors whose answers depend only on a seed and on names; some break the contract.

A `Recipe` is a factory of such selectors, whose ``repr`` is the call that makes it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from zlib import crc32

import attrs

from subgraph.graph.graph import Node
from subgraph.partition.selector import ContainOpSelector, Reject, SubgraphSelector


def _hash_fraction(*parts: object) -> float:
    """Return a hash of ``parts`` as a number in [0, 1)."""
    # Python salts ``hash`` of strings in every process; a counterexample has to fail again.
    return crc32(repr(parts).encode()) / 2**32


class ByOperator(ContainOpSelector):
    """Takes all nodes of some operators."""

    def __init__(self, seed: int) -> None:
        """Choose the operators by ``seed``."""
        names = ("Relu", "Tanh", "Sin", "Neg", "Sigmoid", "Sum", "Max", "Mean", "Min", "Add", "Mul")
        super().__init__(name for name in names if _hash_fraction(seed, name) < 0.7)


class ByNode(SubgraphSelector):
    """Takes three of four nodes; the answer depends on the node only."""

    def __init__(self, seed: int) -> None:
        """Choose the nodes by ``seed``."""
        self.seed = seed

    def _takes(self, node: Node) -> bool | Reject:
        return _hash_fraction(self.seed, node.name) < 0.75 or Reject("not one of mine")

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
    """Answers by edge: it may take a node over one edge and refuse it over another."""

    def select_input(self, node: Node, input_node: Node) -> bool | Reject:
        """Answer by both names."""
        return _hash_fraction(self.seed, node.name, "in", input_node.name) < 0.5

    def select_output(self, node: Node, output_node: Node) -> bool | Reject:
        """Answer by both names."""
        return _hash_fraction(self.seed, node.name, "out", output_node.name) < 0.6


class TowardsConsumers(ByNode):
    """Grows only towards consumers."""

    def select_input(self, node: Node, input_node: Node) -> bool:
        """Refuse."""
        return False


class TowardsProducers(ByNode):
    """Starts at few nodes and grows only towards producers."""

    def select(self, node: Node) -> bool | Reject:
        """Start seldom."""
        return _hash_fraction(self.seed, "start", node.name) < 0.4

    def select_output(self, node: Node, output_node: Node) -> bool:
        """Refuse."""
        return False


class Budget(ByNode):
    """Takes at most one to five nodes for a region."""

    def __init__(self, seed: int) -> None:
        """Choose the largest number of nodes by ``seed``."""
        super().__init__(seed)
        self.reset()

    def _takes(self, node: Node) -> bool | Reject:
        if not self.left:
            return Reject("the region is full")
        if super()._takes(node):
            self.left -= 1
            return True
        return False

    def reset(self) -> None:
        """Restore the number of nodes that may be taken."""
        self.left = 1 + crc32(str(self.seed).encode()) % 5


class RemovingFilter(ByNode):
    """Its filter removes some candidates, so that a region may fall into several parts."""

    def filter(self, candidates: list[Node]) -> list[Node]:
        """Remove candidates by name."""
        return [node for node in candidates if _hash_fraction(self.seed, "keep", node.name) < 0.7]


class AllOrNothing(ByNode):
    """Its filter returns all candidates if there are at least three, else none."""

    def filter(self, candidates: list[Node]) -> list[Node]:
        """Return all or none."""
        return candidates if len(candidates) > 2 else []


class Raising(ByNode):
    """Raises for some nodes."""

    def _takes(self, node: Node) -> bool | Reject:
        if _hash_fraction(self.seed, "raise", node.name) < 0.3:
            raise RuntimeError(f"cannot think about {node.name}")
        return super()._takes(node)


class RaisingFilter(ByNode):
    """Its filter raises."""

    def filter(self, candidates: list[Node]) -> list[Node]:
        """Raise."""
        raise ZeroDivisionError("no filter today")


class ForeignNodes(ByNode):
    """Its filter returns nodes that are no candidates."""

    def filter(self, candidates: list[Node]) -> list[Node]:
        """Add neighbours of the candidates and a node of no graph."""
        around = [n for c in candidates for n in (*c.predecessors(), *c.successors())]
        return [*candidates, *around, Node("Relu", name="never seen")]


class Inconsistent(ByNode):
    """Inconsistent: the answer for one node differs from call to call."""

    # A class attribute: fresh selectors for every start would otherwise begin with the same
    # answers.
    asked = 0

    def _takes(self, node: Node) -> bool | Reject:
        Inconsistent.asked += 1
        return _hash_fraction(self.seed, Inconsistent.asked) < 0.6

    def filter(self, candidates: list[Node]) -> list[Node]:
        """Remove candidates independently of their names."""
        return [node for node in candidates if self._takes(node)]


class NonBoolean(ByNode):
    """Answers with objects that are no bools."""

    def _takes(self, node: Node) -> Any:
        answers: tuple[Any, ...] = (None, 0, "yes", (), 1.5)
        return answers[crc32(f"{self.seed}{node.name}".encode()) % 5]


@attrs.frozen
class Recipe:
    """A factory of selectors.

    Attributes:
        make: Class of the selectors.
        seed: Seed of their answers.
    """

    make: Callable[[int], SubgraphSelector]
    seed: int

    def __call__(self) -> SubgraphSelector:
        """Return a new selector."""
        return self.make(self.seed)

    def __repr__(self) -> str:
        return f"{getattr(self.make, '__name__', self.make)}({self.seed})"


WELL_BEHAVED = (
    *(ByOperator, ByNode, ByEdge, TowardsConsumers, TowardsProducers),
    *(Budget, RemovingFilter, AllOrNothing),
)
MISBEHAVING = (Raising, RaisingFilter, ForeignNodes, Inconsistent, NonBoolean)
