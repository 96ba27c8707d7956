"""Constants of a plan: values computed from weights only, and the cache entries that hold them.

A node whose inputs are all constant is not run. Its result is a `Weight` over the sources of its
inputs (`derive`); it is computed when a kernel needs it and again when a parameter changes.
Intermediate results are not cached. `cached` returns the entry of the cache for a constant of a
plan or, if it depends on no parameter, its array.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import numpy as np

from subgraph.dtypes import HALF_FLOATS
from subgraph.engine.planner.operands import Operand, Storage, Weight
from subgraph.errors import ShapeError, UnsupportedOpError
from subgraph.graph.graph import Graph, Node
from subgraph.graph.parameters import Parameter
from subgraph.graph.types import ONNX_DTYPE, Array, Dim, TensorType, dtype_of
from subgraph.operators.reference import evaluate
from subgraph.operators.schema import INTERNAL_DOMAIN
from subgraph.system.large_pages import ALIGN
from subgraph.weights.cache import WeightCache, WeightEntry
from subgraph.weights.recipe_ids import recipe_id

# Operators of the standard whose results are elements of their first input, or of all inputs.
_MOVES = frozenset(
    {"Cast", "Concat", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"}
)


class _Derivation:
    """Computes one output of a node from weights: the function `Weight.make` of a derived weight.

    Attributes:
        node: The node.
        output: Index of the output.
        present: For each input whether it is present; arrays are passed for these only.
        type: The type for which the plan reserved memory.
    """

    def __init__(self, node: Node, output: int, present: Sequence[bool], type_: TensorType) -> None:
        self.node = node
        self.output = output
        self.present = tuple(present)
        self.type = type_

    def __call__(self, *arrays: Array) -> Array:
        arguments = iter(arrays)
        inputs = [next(arguments) if present else None for present in self.present]
        result = np.asarray(evaluate(self.node, inputs)[self.output])
        shape = self.type.shape or ()
        if (
            self.node.domain == INTERNAL_DOMAIN
            and result.shape != shape
            and _has_room(shape, result)
        ):
            # A padded output is smaller if a number that the planner did not know bounds it.
            room = np.zeros(shape, result.dtype)
            room[tuple(map(slice, result.shape))] = result
            result = room
        if TensorType(dtype_of(result), result.shape) != self.type:
            raise ShapeError(
                f"node {self.node.name!r} ({self.node.op_type}): output {self.output} is planned "
                f"as {self.type}, but its weights give {result.dtype}{list(result.shape)}"
            )
        return result


def _has_room(shape: Sequence[Dim], array: Array) -> TypeGuard[Sequence[int]]:
    """Return whether an array fits into one of a static shape."""
    pairs = zip(shape, array.shape, strict=False)
    return len(shape) == array.ndim and all(
        isinstance(room, int) and n <= room for room, n in pairs
    )


class _Composition:
    """Computes a weight, and each intermediate weight once, from the arrays of parameters.

    Attributes:
        slots: Initial values: None for parameters and results, and the arrays of constants.
        steps: In order: a function, the slots that it reads, the slot of its result, and the slots
            that no later step reads.
    """

    def __init__(self, weight: Weight, positions: dict[Parameter, int]) -> None:
        self.slots: list[Array | None] = [None] * len(positions)
        self.steps: list[tuple[Callable[..., Array], list[int], int, list[int]]] = []
        slot_of: dict[int, int] = {}
        order = _sources_first(weight)
        for inner in order:
            reads: list[int] = []
            for source in inner.sources:
                if isinstance(source, Parameter):
                    reads.append(positions[source])
                elif isinstance(source, Weight):
                    reads.append(slot_of[id(source)])
                else:
                    reads.append(len(self.slots))
                    self.slots.append(source)
            slot_of[id(inner)] = len(self.slots)
            self.steps.append((inner.make, reads, len(self.slots), []))
            self.slots.append(None)
        needed: set[int] = {slot_of[id(weight)]}
        for _, reads, _, dead in reversed(self.steps):
            dead += {slot for slot in reads if slot not in needed}
            needed.update(reads)

    def __call__(self, *arrays: Array) -> Array:
        # The slots are copied in every call: threads may compute the same weight at the same time.
        slots: list[Any] = [*arrays, *self.slots[len(arrays) :]]
        for make, reads, own, dead in self.steps:
            slots[own] = make(*(slots[slot] for slot in reads))
            for slot in dead:
                # Intermediate weights can be as large as the result; freeing them early lowers the
                # peak of memory.
                slots[slot] = None
        result: Array = slots[-1]
        return result


def _sources_first(weight: Weight) -> list[Weight]:
    """Return a weight and all weights that it is computed from, each once, after its sources."""
    order: list[Weight] = []
    done: set[int] = set()
    work = [weight]
    while work:
        top = work[-1]
        if id(top) in done:
            work.pop()
            continue
        # The depth-first search uses a list instead of recursion, since chains of derived weights
        # can be longer than Python's recursion limit.
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
    """Return the weight that a node computes from constant operands.

    Args:
        node: The node.
        operands: Its inputs, None where one is omitted.
        output: Index of the output.
        type_: The output's concrete type, for which the plan reserves memory.

    Raises:
        UnsupportedOpError: The node has a body.
    """
    sources: list[Parameter | Array | Weight] = []
    for operand in operands:
        if operand is None:
            continue
        origin = operand.origin
        assert origin is not None, "derive is called for constant operands"
        sources.append(origin)
    attributes = ",".join(f"{k}={_text(v)}" for k, v in sorted(node.attrs.items()))
    present = [operand is not None for operand in operands]
    # The same sources mean something else as other inputs: the bound of a Clip, below or above.
    given = "".join("x" if one else "-" for one in present)
    name = f"{node.domain}:{node.op_type}:{node.version}.{output}({given},{attributes}):{type_}"
    return Weight(name, _Derivation(node, output, present, type_), tuple(sources))


def half_storage(operand: Operand) -> str:
    """Return the dtype of half precision that holds a constant exactly; "" if none is known to.

    Such are weights of half precision that a model's operators only widen, move or join.
    """
    dtypes: set[str] = set()
    work = [operand.origin]
    while work:
        origin = work.pop()
        if not isinstance(origin, Weight):
            dtypes.add(origin.type.dtype if isinstance(origin, Parameter) else _dtype(origin))
            continue
        node = origin.make.node if isinstance(origin.make, _Derivation) else None
        if node is None or node.domain or node.op_type not in _MOVES:
            return ""
        if node.op_type == "Cast" and node.attrs["to"] != ONNX_DTYPE["float32"]:
            return ""
        work += origin.sources if node.op_type == "Concat" else origin.sources[:1]
    (dtype, *others) = dtypes
    return dtype if dtype in HALF_FLOATS and not others else ""


def _dtype(array: Array | None) -> str:
    return "" if array is None else dtype_of(array)


def _text(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return _digest(value)  # pyright: ignore[reportUnknownArgumentType]
    if isinstance(value, Graph):
        raise UnsupportedOpError("a node with a body is not computed during planning")
    return repr(value)


def _digest(array: Array) -> str:
    content = hashlib.blake2b(np.ascontiguousarray(array).tobytes(), digest_size=12).hexdigest()
    return f"{array.dtype}{list(array.shape)}{content}"


def parameters_of(source: Parameter | Weight) -> tuple[Parameter, ...]:
    """Return all parameters that a weight is computed from, each once, in order of first use."""
    if isinstance(source, Parameter):
        return (source,)
    found = dict.fromkeys(
        source
        for inner in _sources_first(source)
        for source in inner.sources
        if isinstance(source, Parameter)
    )
    return tuple(found)


def content_of(source: Array | Parameter | Weight) -> Array:
    """Return the array of a constant, computed for the snapshot that this thread sees, not cached.

    Args:
        source: The content; a parameter stands for its own array.
    """
    if isinstance(source, Parameter):
        return source.array
    if not isinstance(source, Weight):
        return source
    parameters = parameters_of(source)
    positions = {parameter: k for k, parameter in enumerate(parameters)}
    return np.asarray(_Composition(source, positions)(*(p.array for p in parameters)))


def _recipe(weight: Weight, positions: dict[Parameter, int]) -> str:
    """Return a text that identifies the computation of a weight, whatever its parameters hold.

    Args:
        weight: The weight.
        positions: Position of each parameter among those of the cache entry.
    """
    texts: dict[int, str] = {}
    text = ""
    for inner in _sources_first(weight):
        parts: list[str] = []
        for source in inner.sources:
            if isinstance(source, Parameter):
                parts.append(f"p{positions[source]}")
            elif isinstance(source, Weight):
                parts.append(texts[id(source)])
            else:
                parts.append(_digest(source))
        text = f"{recipe_id(inner.recipe, inner.make)}<{','.join(parts)}>"
        # A digest in place of the text keeps the recipe short: a weight that is used twice would
        # otherwise double the text at every level.
        texts[id(inner)] = hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
    return text


def cached(content: Array | Weight | Parameter, cache: WeightCache) -> WeightEntry | Array:
    """Return the cache entry of a constant's content, or its array if no parameter changes it.

    Args:
        content: The content; a parameter stands for its own array.
        cache: The op's view of the weight cache.
    """
    if isinstance(content, Parameter):
        # Without an alignment, the array stays in the mapped file of the model.
        return cache.entry("plain", contiguous_array, content)
    if not isinstance(content, Weight):
        return content
    parameters = parameters_of(content)
    if not parameters:
        return np.ascontiguousarray(content_of(content))
    # A weight of distinct parameters needs no composition, and has the recipe's own name as key,
    # which other plans and sessions share.
    plain = all(isinstance(source, Parameter) for source in content.sources)
    if plain and len(parameters) == len(content.sources):
        return cache.entry(content.recipe, content.make, *parameters, align=ALIGN)
    positions = {parameter: k for k, parameter in enumerate(parameters)}
    make = _Composition(content, positions)
    return cache.entry(_recipe(content, positions), make, *parameters, align=ALIGN)


def contiguous_array(array: Array) -> Array:
    """Return an array in C order: the recipe of a weight that kernels read in plain layout."""
    return np.ascontiguousarray(array)


def derived_operand(name: str, dtype: str, shape: Sequence[int], weight: Weight) -> Operand:
    """Return an operand whose content is ``weight``, in the plain layout.

    Args:
        name: Its name, for messages.
        dtype: Its dtype.
        shape: Its shape.
        weight: Computes an array of that dtype and shape.
    """
    made = Operand(name, dtype, tuple(shape), source=weight)
    # The kernels read the storage in C order, but the node may return a view with other strides.
    plain = Weight("plain", contiguous_array, (weight,))
    made.storage = Storage("constant", made.nbytes, content=plain)
    return made
