"""Constants of a plan: values that follow from weights alone, and the entries that hold them.

A node all of whose inputs are constant is not run: its result is a `Weight` over the sources of
its inputs (`derive`), made when a kernel asks for it and redone when a parameter changes. What is
made on the way is not kept. `Weights` turns every weight of a plan into an entry of the cache, or,
when no parameter is in it, into an array.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from subgraph.engine.planner.lowering import Operand, Weight
from subgraph.errors import ShapeError, UnsupportedOpError
from subgraph.graph.graph import Graph, Node
from subgraph.graph.parameters import Parameter
from subgraph.graph.types import Array, TensorType, dtype_of
from subgraph.operators.evaluation import evaluate
from subgraph.weights.cache import WeightCache, WeightEntry, recipe_id

_ALIGN = 64


class _Derivation:
    """Computes one output of a node on weights; the make function of a derived weight."""

    def __init__(self, node: Node, output: int, given: Sequence[bool], type_: TensorType) -> None:
        self.node = node
        self.output = output
        self.given = tuple(given)
        self.type = type_

    def __call__(self, *arrays: Array) -> Array:
        arguments = iter(arrays)
        inputs = [next(arguments) if there else None for there in self.given]
        result = np.asarray(evaluate(self.node, inputs)[self.output])
        if TensorType(dtype_of(result), result.shape) != self.type:
            raise ShapeError(
                f"node {self.node.name!r} ({self.node.op_type}): output {self.output} is planned "
                f"as {self.type}, but its weights give {result.dtype}{list(result.shape)}"
            )
        return result


class _Composition:
    """Makes a weight of the parameters' arrays, and once each weight on the way to it.

    Attributes:
        slots: Places of the arrays: the parameters', constants, and what the steps make.
        steps: In order: the function, the slots it reads, its own, those not read again.
    """

    def __init__(self, weight: Weight, positions: dict[Parameter, int]) -> None:
        self.slots: list[Array | None] = [None] * len(positions)
        self.steps: list[tuple[Callable[..., Array], list[int], int, list[int]]] = []
        place_of: dict[int, int] = {}
        order = _inner_first(weight)
        for inner in order:
            reads: list[int] = []
            for source in inner.sources:
                if isinstance(source, Parameter):
                    reads.append(positions[source])
                elif isinstance(source, Weight):
                    reads.append(place_of[id(source)])
                else:
                    reads.append(len(self.slots))
                    self.slots.append(source)
            place_of[id(inner)] = len(self.slots)
            self.steps.append((inner.make, reads, len(self.slots), []))
            self.slots.append(None)
        needed: set[int] = {place_of[id(weight)]}
        for _, reads, _, dead in reversed(self.steps):
            dead += {slot for slot in reads if slot not in needed}
            needed.update(reads)

    def __call__(self, *arrays: Array) -> Array:
        slots: list[Any] = [*arrays, *self.slots[len(arrays) :]]
        for make, reads, own, dead in self.steps:
            slots[own] = make(*(slots[slot] for slot in reads))
            for slot in dead:
                slots[slot] = None
        result: Array = slots[-1]
        return result


def _inner_first(weight: Weight) -> list[Weight]:
    """Return the weights that one is made of, itself last, each once and after its sources."""
    order: list[Weight] = []
    done: set[int] = set()
    work = [weight]
    while work:
        top = work[-1]
        if id(top) in done:
            work.pop()
            continue
        waiting = [s for s in top.sources if isinstance(s, Weight) and id(s) not in done]
        if waiting:
            work += reversed(waiting)
        else:
            done.add(id(top))
            order.append(work.pop())
    return order


def derive(
    node: Node, operands: Sequence[Operand | None], output: int, type_: TensorType
) -> Weight:
    """Return the weight that a node makes of constant operands.

    Args:
        node: The node.
        operands: Its inputs, None where one is omitted.
        output: Which of its outputs.
        type_: The output's concrete type, for which the plan has room.
    """
    sources: list[Parameter | Array | Weight] = []
    for operand in operands:
        if operand is None:
            continue
        held = operand.origin
        assert held is not None, "derive is called for constant operands"
        sources.append(held)
    attributes = ",".join(f"{k}={_text(v)}" for k, v in sorted(node.attrs.items()))
    name = f"{node.domain}:{node.op_type}:{node.version}.{output}({attributes})"
    given = [operand is not None for operand in operands]
    return Weight(name, _Derivation(node, output, given, type_), tuple(sources))


def _text(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return _digest(value)  # pyright: ignore[reportUnknownArgumentType]
    if isinstance(value, Graph):
        raise UnsupportedOpError("a node with a body is not computed ahead")
    return repr(value)


def _digest(array: Array) -> str:
    content = hashlib.blake2b(np.ascontiguousarray(array).tobytes(), digest_size=12).hexdigest()
    return f"{array.dtype}{list(array.shape)}{content}"


def parameters_of(weight: Weight) -> tuple[Parameter, ...]:
    """Return all parameters that a weight is made of, each once, inner ones first."""
    found = dict.fromkeys(
        source
        for inner in _inner_first(weight)
        for source in inner.sources
        if isinstance(source, Parameter)
    )
    return tuple(found)


def made(weight: Weight) -> Array:
    """Return a weight's array for the versions that this thread sees, without the cache."""
    parameters = parameters_of(weight)
    positions = {parameter: k for k, parameter in enumerate(parameters)}
    return np.asarray(_Composition(weight, positions)(*(p.array for p in parameters)))


def _recipe(weight: Weight, positions: dict[Parameter, int]) -> str:
    """Return a text that tells everything a weight depends on but its parameters' content."""
    texts: dict[int, str] = {}
    text = ""
    for inner in _inner_first(weight):
        parts: list[str] = []
        for source in inner.sources:
            if isinstance(source, Parameter):
                parts.append(f"p{positions[source]}")
            elif isinstance(source, Weight):
                parts.append(texts[id(source)])
            else:
                parts.append(_digest(source))
        text = f"{recipe_id(inner.recipe, inner.make)}<{','.join(parts)}>"
        texts[id(inner)] = hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
    return text


class Weights:
    """The weights of a plan: entries of the cache, and arrays that never change.

    Attributes:
        entries: Entries of the cache, to be asked again when a parameter has changed.
    """

    def __init__(self, cache: WeightCache) -> None:
        """Begin with none; ``cache`` is the op's door to the cache."""
        self.entries: list[WeightEntry] = []
        self._cache = cache
        self._index: dict[WeightEntry, int] = {}

    def add(self, weight: Weight) -> int | Array:
        """Return the position of the weight's entry, or its array when no parameter is in it."""
        parameters = parameters_of(weight)
        if not parameters:
            return np.ascontiguousarray(made(weight))
        plain = all(isinstance(source, Parameter) for source in weight.sources)
        if plain and len(parameters) == len(weight.sources):
            entry = self._cache.entry(weight.recipe, weight.make, *parameters, align=_ALIGN)
        else:
            positions = {parameter: k for k, parameter in enumerate(parameters)}
            make = _Composition(weight, positions)
            entry = self._cache.entry(_recipe(weight, positions), make, *parameters, align=_ALIGN)
        return self._position(entry)

    def add_parameter(self, parameter: Parameter) -> int:
        """Return the position of the entry of a parameter's own array."""
        # An array that is read as it is stays where the model's file was mapped.
        return self._position(self._cache.entry("plain", _contiguous, parameter))

    def _position(self, entry: WeightEntry) -> int:
        position = self._index.get(entry)
        if position is None:
            position = self._index[entry] = len(self.entries)
            self.entries.append(entry)
        return position


def _contiguous(array: Array) -> Array:
    return np.ascontiguousarray(array)


def as_it_is(array: Array) -> Array:
    """Return the array: the recipe of a derived weight that a kernel reads in the plain layout."""
    return np.ascontiguousarray(array)
