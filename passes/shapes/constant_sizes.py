"""Constants of a model that hold the sizes of its inputs, and forms that follow other sizes.

The graph is typed twice with numbers only: for its present inputs, and for inputs whose changed
sizes are multiplied by large primes. A prime that divides a size of a tensor tells that the size
follows from the changed one, also after axes were merged. `subgraph.passes.shapes.size_changes` has
the rules by which nodes are replaced. An operator that takes item 0 of a batch of 1 by a constant
index, and that no rule replaces, is an error: all results would be computed from the first item.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from subgraph.errors import ShapeError
from subgraph.graph.graph import Graph, Node, Value
from subgraph.graph.result_arrays import is_array
from subgraph.graph.types import Array, Dim, TensorType, ValueType
from subgraph.operators.batch_axes import Batch, BatchAxis, NoBatch, filled
from subgraph.operators.shape_values import is_partial
from subgraph.operators.type_inference import Inference, infer_graph

from .node_batches import node_batches
from .size_changes import RULES, Change, Site, Sizes, static_shape

_FIRST_PRIME = 10007  # larger than most sizes, so that it divides none by chance
# Operators that take or replace elements by number.
_BY_NUMBER = frozenset(
    {
        *("Gather", "GatherElements", "GatherND", "Slice", "Split", "Squeeze"),
        *("Scatter", "ScatterElements", "ScatterND"),
    }
)


@attrs.frozen
class Adapted:
    """A graph in which no constant holds an old size of a changed dimension.

    Attributes:
        graph: The graph. Its types are the old ones, except those of the results of replaced nodes.
        shapes: The new shapes by the value's name, where all sizes are known.
        misfit: Why the first node does not fit all new sizes, though it may fit some; "" if all do.
    """

    graph: Graph
    shapes: Mapping[str, tuple[Dim, ...]]
    misfit: str

    def set_sizes(self, graph: Graph) -> None:
        """Set the sizes that type inference could not find in the types of a copy of the graph."""
        for value in graph.values():
            shape = self.shapes.get(value.name)
            if shape is not None and isinstance(value.type, TensorType):
                dims = value.type.shape or (None,) * len(shape)
                known = [b if a is None else a for a, b in zip(dims, shape, strict=True)]
                value.type = TensorType(value.type.dtype, known)


def adapted(graph: Graph, types: Mapping[Value, ValueType | None]) -> Adapted:
    """Return a graph for inputs of other shapes.

    Args:
        graph: The graph; it is not changed.
        types: New types of the inputs that change. The graph may hold the old sizes of dimensions
            that were numbers.

    Raises:
        ShapeError: a node takes the first item of a batch of 1, which would be more; or the graph
            is partitioned.
    """
    primes = _Primes(types)
    result = graph.clone()
    if not primes.bases:
        return Adapted(result, _shapes(graph, types, primes), "")
    region = next((node for node in graph.nodes if node.subgraph is not None), None)
    if region is not None:
        raise ShapeError(
            f"node {region.name!r} is a subgraph node, in which no constants can be adapted; "
            "reshape the graph before it is partitioned, or undo that by sg.inline_subgraphs"
        )
    typed, copies = graph.clone_with_map()
    for value in typed.values():
        value.type = primes.named(value.type)
    infer_graph(typed, strict=False)
    old = {value.name: value.type for value in typed.values()}
    changed: dict[Value, ValueType | None] = {}
    for value, type_ in types.items():
        copy = copies[value]
        changed[copy] = copy.type
        copy.type = primes.changed(value.type, type_)
    walk = _Walk(typed, primes, changed, old)
    walk.run()
    if walk.lost:
        raise ShapeError(walk.lost)
    replaced: dict[Value, Value] = {}
    for node in result.nodes:
        change = walk.changes.get(node.name)
        if change is not None:
            made = change.node(node, [replaced.get(v, v) if v else None for v in node.inputs])
            replaced.update(zip(node.outputs, made.outputs, strict=True))
    result.rewire(replaced)
    return Adapted(result, primes.shapes(typed), walk.misfit)


def _shapes(
    graph: Graph, types: Mapping[Value, ValueType | None], primes: _Primes
) -> Mapping[str, tuple[Dim, ...]]:
    """Return shapes by the value's name if no number is replaced, for `Adapted`.

    A size such as 12*N follows as a number from the primes, though no dimension can express it.

    Args:
        graph: The graph; it is not changed.
        types: New types of the inputs that change.
        primes: The primes for them.
    """
    typed, copies = graph.clone_with_map()
    for node in typed.nodes:
        for value in node.outputs:
            value.type = None
    for value in graph.inputs:
        new = types.get(value, value.type)
        copies[value].type = primes.changed(value.type, new)
    infer_graph(typed, strict=False)
    return primes.shapes(typed)


class _Primes:
    """Primes in the place of dimensions.

    Attributes:
        bases: The old size by the prime that multiplies it, for dimensions that were numbers.
    """

    def __init__(self, types: Mapping[Value, ValueType | None]) -> None:
        """Choose a prime for each pair of an old and a new size of the inputs that change."""
        self._free = filter(_is_prime, itertools.count(_FIRST_PRIME, 2))
        self._primes: dict[Any, int] = {}
        self._dims: dict[int, Dim] = {}
        self.bases: dict[int, int] = {}
        for value, type_ in types.items():
            self.changed(value.type, type_)

    def named(self, type_: ValueType | None) -> ValueType | None:
        """Return a type with primes for its names of dimensions."""
        if not isinstance(type_, TensorType) or type_.shape is None:
            return type_
        return TensorType(type_.dtype, [self._named(dim) for dim in type_.shape])

    def changed(self, old: ValueType | None, new: ValueType | None) -> ValueType | None:
        """Return the new type of an input with numbers for its names and its changed sizes."""
        if not isinstance(old, TensorType) or old.shape is None:
            return self.named(new)
        dims = zip(old.shape, getattr(new, "shape", old.shape), strict=True)
        return TensorType(old.dtype, [self._changed(*pair) for pair in dims])

    def shape(self, type_: ValueType | None) -> tuple[Dim, ...] | None:
        """Return a shape with the new dimensions for the primes; None if a size is not known."""
        sizes = static_shape(type_)
        if sizes is None:
            return None
        return tuple(self._dims.get(size, size if size < _FIRST_PRIME else None) for size in sizes)

    def shapes(self, graph: Graph) -> dict[str, tuple[Dim, ...]]:
        """Return the shapes of a graph's values by name, of those whose sizes are known."""
        found = {value.name: self.shape(value.type) for value in graph.values()}
        return {name: shape for name, shape in found.items() if shape is not None}

    def text(self, message: str) -> str:
        """Return a message with the new dimensions for the primes, as in ``12*batch``."""
        return re.sub(r"\b\d+\b", lambda found: self._product(int(found[0])), message)

    def _product(self, number: int) -> str:
        factors: list[str] = []
        for size, dim in self._dims.items():
            while number and number % size == 0:
                number //= size
                factors.append("?" if dim is None else str(dim))
        return "*".join([str(number)] * (number != 1 or not factors) + factors)

    def _named(self, dim: Dim) -> Dim:
        return self._prime(dim, 1, dim) if isinstance(dim, str) else dim

    def _changed(self, old: Dim, new: Dim) -> Dim:
        if not isinstance(old, int) or old in (new, 0):
            return self._named(old if old == 0 else new)
        prime = self._prime((old, new), old, new)
        self.bases[prime] = old
        return old * prime

    def _prime(self, key: Any, size: int, dim: Dim) -> int:
        if key not in self._primes:
            self._primes[key] = next(self._free)
            self._dims[self._primes[key] * size] = dim
        return self._primes[key]


def _is_prime(odd: int) -> bool:
    return all(odd % k for k in range(3, math.isqrt(odd) + 1, 2))


class _Walk(Inference):
    """Types a graph for the primes, and notes which nodes have to change.

    Attributes:
        changes: The change by the node's name.
        lost: The text of the error of the first node that takes the first item of a batch.
        misfit: See `Adapted`.
    """

    def __init__(
        self,
        graph: Graph,
        primes: _Primes,
        changed: dict[Value, ValueType | None],
        old: Mapping[str, ValueType | None],
    ) -> None:
        """Prepare a walk.

        Args:
            graph: The graph, with the new types of its inputs and the old types of all else.
            primes: The primes among the types.
            changed: The old types of the inputs that change.
            old: The old types of all values by name.
        """
        super().__init__(graph, False, set(graph.inputs), {}, changed)
        self._primes = primes
        self._old = old
        # The prime of a batch of 1, if no other number changes.
        bases = list(primes.bases.items())
        self._prime = bases[0][0] if len(bases) == 1 and bases[0][1] == 1 else None
        self._batches: dict[Value, Batch] = {}
        self.changes: dict[str, Change] = {}
        self.lost = ""
        self.misfit = ""

    def node_types(
        self,
        node: Node,
        types: Sequence[ValueType | None],
        known: Sequence[Array | None],
    ) -> Sequence[ValueType | None]:
        """Return the types for the primes: those of the changed node, if it has to change."""
        for value in node.inputs:
            self._batch(value)  # in the order of nodes, so that no call goes deep
        rule = None if node.domain else RULES.get(node.op_type)
        change = rule(self._site(node, types, known)) if rule is not None else None
        if change is not None:
            self.changes[node.name] = change
            types = [_resized(type_, change.operands.get(k)) for k, type_ in enumerate(types)]
            if change.result is not None:
                return [_resized(types[0], change.result)]
        try:
            found = super().node_types(node, types, known)
            self._check_batch(node, types, found)
            return found
        except ShapeError as error:
            if all(self._old[value.name] is not None for value in node.outputs):
                self.misfit = self.misfit or self._primes.text(str(error))
            raise

    def _site(
        self, node: Node, types: Sequence[ValueType | None], known: Sequence[Array | None]
    ) -> Site:
        """Return a node with what is known of its inputs before and after."""
        old = [None if v is None else static_shape(self._old[v.name]) for v in node.inputs]
        changed = self.changed or {}  # among them elements that follow from a changed shape
        constants = [
            None if value in changed else _constant(value, array)
            for value, array in zip(node.inputs, known, strict=True)
        ]
        shapes = list(map(static_shape, types))
        batch = self._batch(node.inputs[0]) if node.inputs else None
        axis = batch if isinstance(batch, BatchAxis) else None
        return Site(node, old, shapes, constants, self._primes.bases, axis)

    def _batch(self, value: Value | None) -> Batch:
        """Return the batch of a value, if only a batch of 1 changes.

        The operands of a changed node that are repeated are the same for all rows.
        """
        changed = self.changed or {}
        if self._prime is None:
            return None
        if value is None or value not in changed:
            return NoBatch.SHARED
        node, shape = value.producer, static_shape(value.type)
        if node is None:
            return None if shape is None else filled(shape, self._prime)
        if value not in self._batches:
            inputs = [self._batch(each) for each in node.inputs]
            change = self.changes.get(node.name)
            for k, shape in () if change is None else change.operands.items():
                inputs[k] = filled(shape, self._prime)
            found = node_batches(node, inputs, self.known, self._prime)
            self._batches.update(zip(node.outputs, found, strict=True))
        return self._batches[value]

    def _check_batch(
        self, node: Node, types: Sequence[ValueType | None], found: Sequence[ValueType | None]
    ) -> None:
        """Note a node that takes or replaces elements of the first item of a batch alone."""
        if node.op_type not in _BY_NUMBER or node.domain or self.lost:
            return
        data = static_shape(types[0])
        others = types[1:] if node.op_type.startswith("Scatter") else found
        shapes = list(map(static_shape, others))
        if data is None or None in shapes:
            return
        for prime, base in self._primes.bases.items():
            remains = any(math.prod(shape or ()) % prime == 0 for shape in shapes)
            if base == 1 and math.prod(data) % prime == 0 and not remains:
                self.lost = (
                    f"node {node.name!r} ({node.op_type}) takes the first item of a batch of 1, as "
                    f"the model was exported; it cannot have a batch of "
                    f"{self._primes.text(str(prime))}. Export the model with a dynamic batch"
                )


def _resized(type_: ValueType | None, shape: Sizes | None) -> ValueType | None:
    if shape is None or not isinstance(type_, TensorType):
        return type_
    return TensorType(type_.dtype, shape)


def _constant(value: Value | None, known: Array | None) -> Array | None:
    """Return the elements of a constant; None for any other value.

    Args:
        value: The value.
        known: Its shape value.
    """
    if value is None or (value.producer is None and value.parameter is None):
        return None
    if value.parameter is not None:
        return value.parameter.array
    if known is not None:
        return None if is_partial(known) else known
    held: Any = value.producer.attrs.get("value") if value.producer is not None else None
    return held if is_array(held) else None
