"""Nodes that hold a size of the model's inputs as a constant, and their forms for other sizes.

Each rule looks at one node, a `Site`, typed for the present sizes and for others, and returns how
the node is replaced (a `Change`), or None if it need not or cannot be. Sizes that change are
multiplied by primes (see `subgraph.passes.shapes.constant_sizes`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

import attrs
import numpy as np

from subgraph.errors import ShapeError
from subgraph.graph.graph import Node, Value
from subgraph.graph.types import Array, TensorType, ValueType
from subgraph.operators.batch_axes import BatchAxis
from subgraph.operators.inference import infer_types
from subgraph.passes.patterns import part_of

Sizes = tuple[int, ...]
# A size of a target: a number, or the product of the sizes of these axes of the node's first input,
# times the second number, divided by the third.
Size = int | tuple[Sizes, int, int]
# Axes of a Reshape's input, and of its result, of equal products.
_Group = tuple[list[int], list[int]]


@attrs.frozen
class Site:
    """A node between its types for the present sizes and those for others.

    Attributes:
        node: The node.
        before: The old shapes of its inputs, None for those not known or omitted.
        after: The new ones.
        constants: The elements of the inputs that are constants, None for the others.
        bases: The old size by the prime that multiplies it.
        batch: The batch axis of the first input, if only a batch of 1 changes; None: not known.
    """

    node: Node
    before: Sequence[Sizes | None]
    after: Sequence[Sizes | None]
    constants: Sequence[Array | None]
    bases: Mapping[int, int]
    batch: BatchAxis | None = None

    def constant(self, k: int) -> Array | None:
        """Return the elements of an input; None if it is omitted or no constant."""
        return self.constants[k] if k < len(self.constants) else None

    def grows(self, size: int) -> bool:
        """Return whether a size is that of a batch of 1 that became larger."""
        return any(base == 1 and size % prime == 0 for prime, base in self.bases.items())


class Change(Protocol):
    """How a node is replaced.

    Attributes:
        result: The new shape of the node's only result; None: it follows from ``operands``.
        operands: New shapes by the position of an input.
    """

    @property
    def result(self) -> Sizes | None: ...
    @property
    def operands(self) -> Mapping[int, Sizes]: ...

    def node(self, node: Node, inputs: Sequence[Value | None]) -> Node:
        """Return the replacement of a node; the types of its results are not set.

        Args:
            node: The node.
            inputs: Its inputs.
        """
        ...


@attrs.frozen
class _NewTarget:
    """A Reshape, Resize or Expand with another target.

    Attributes:
        result: See `Change`.
        sizes: The target.
        position: The target's position among the inputs.
        operands: See `Change`.
    """

    result: Sizes
    sizes: Sequence[Size]
    position: int = 1
    operands: Mapping[int, Sizes] = attrs.field(factory=dict[int, Sizes])

    def node(self, node: Node, inputs: Sequence[Value | None]) -> Node:
        """Return the node with the new target."""
        sizes = list(self.sizes)
        if node.op_type == "Reshape":
            left = [k for k, size in enumerate(sizes) if not isinstance(size, int)]
            for k in left:
                if sizes[k] == ((k,), 1, 1):
                    sizes[k] = 0  # the size of the same axis of the input
            rest = next((k for k in left if sizes[k] != 0), None)
            if rest is not None:
                sizes[rest] = -1
        parts: list[Value] = []
        numbers: list[int] = []
        for size in [*sizes, None]:
            if isinstance(size, int):
                numbers.append(size)
                continue
            if numbers:
                parts.append(_numbers(node, numbers))
                numbers = []
            if size is not None:
                parts.append(_computed(node, inputs[0], *size))
        target = parts[0] if len(parts) == 1 else part_of(node, "Concat", *parts, axis=0)
        made = _copied(node, [target if k == self.position else v for k, v in enumerate(inputs)])
        made.attrs.pop("allowzero", None)
        return made


def _reshape(site: Site) -> Change | None:
    """Give a Reshape a target that follows its input."""
    before, after, stated = site.before[0], site.after[0], site.constant(1)
    if before is None or after is None or stated is None or before == after:
        return None
    if 0 in before or 0 in after:
        return None
    stated = stated.astype(np.int64)
    target = _resolved(site, stated, before)
    if target is None:
        return None
    found, shape = list[Size](target), list(target)
    for axes, results in _with_batches(_groups(before, after, target), site):
        total = math.prod(after[a] for a in axes)
        _scale(shape, results, total, site, before)
        if len(results) == 1:
            shape[results[0]] = total
        if math.prod(shape[k] for k in results) != total:
            return None  # several sizes, and one changed in another way than by a factor
        changed = [k for k in results if shape[k] != target[k]]
        for k in changed:
            same = [a for a in axes if after[a] == shape[k]]
            if not same and len(changed) > 1:
                return None  # two unknown sizes of one group
            held = math.prod(target[j] for j in results if j != k)
            found[k] = ((same[0],), 1, 1) if same else (tuple(axes), 1, held)
    if tuple(shape) == _resolved(site, stated, after):
        return None
    return _NewTarget(tuple(shape), found)


def _scale(shape: list[int], results: list[int], total: int, site: Site, before: Sizes) -> None:
    """Multiply sizes of a group of results by the primes in the size of the input's axes.

    A prime belongs to the size that equals its base, else to the first multiple of it. Sizes that
    would mix the batch with elements outside of it do not count.

    Args:
        shape: The result's old sizes, in which those of the group are multiplied.
        results: The positions of the group.
        total: The product of the group's new sizes.
        site: The node.
        before: The old shape of its input.
    """
    old = list(shape)
    for prime, base in site.bases.items():
        while results and total % prime == 0:
            total //= prime
            fitting = [k for k in results if _keeps_batch(old, k, site.batch, before)]
            among = fitting or results
            exact = [k for k in among if old[k] == base]
            multiples = [k for k in among if old[k] % base == 0]
            shape[(exact or multiples or among)[0]] *= prime


def _keeps_batch(target: Sequence[int], k: int, batch: BatchAxis | None, before: Sizes) -> bool:
    """Return whether a batch of 1 of a Reshape's input may stand in an axis of its result.

    Args:
        target: The old sizes of the result.
        k: The axis.
        batch: The batch axis of the input; None: not known.
        before: The old shape of the input.
    """
    if batch is None:
        return True
    outer, rest = divmod(math.prod(before[: batch.axis]) * batch.outer, math.prod(target[:k]) or 1)
    return not rest and outer > 0 and target[k] % outer == 0


def _resolved(site: Site, target: Array, shape: Sizes) -> Sizes | None:
    """Return the shape of a Reshape's result for a shape of its input; None if they do not fit."""
    types = [TensorType("float32", shape), TensorType("int64", target.shape)]
    try:
        return static_shape(infer_types(site.node, types, [None, target])[0])
    except ShapeError:
        return None


def static_shape(type_: ValueType | None) -> Sizes | None:
    """Return a shape of numbers; None if the type has none."""
    return type_.sizes if isinstance(type_, TensorType) and type_.is_static else None


def _groups(before: Sizes, after: Sizes, target: Sizes) -> list[_Group]:
    """Align the axes of a Reshape's input and result into the smallest groups of equal products.

    An axis of size 1 without a counterpart belongs to the next group if that divides an axis, as
    in (tokens, batch, width) to (tokens, batch * heads, width of a head) with a batch of 1, and
    otherwise to the group before it, as in (tokens, batch, width) to (tokens * batch, width).

    Args:
        before: The old shape of the input.
        after: Its new shape.
        target: The old shape of the result.
    """
    groups: list[_Group] = []
    i = j = 0
    while i < len(before) or j < len(target):
        if groups and before[i : i + 1] == (1,) and target[j : j + 1] != (1,):
            following = next((size for size in before[i:] if size != 1), 1)
            if j == len(target) or target[j] >= following:
                groups[-1][0].append(i)
                i += 1
                continue
        unchanged = before[i : i + 1] == after[i : i + 1]
        if groups and target[j : j + 1] == (1,) and before[i : i + 1] != (1,) and unchanged:
            groups[-1][1].append(j)
            j += 1
            continue
        axes: list[int] = []
        results: list[int] = []
        left = right = 1
        while not axes or not results or left != right:
            if i < len(before) and (not axes or left < right or j == len(target)):
                axes.append(i)
                left *= before[i]
                i += 1
            elif j < len(target):
                results.append(j)
                right *= target[j]
                j += 1
            else:
                break
        groups.append((axes, results))
    return groups


def _with_batches(groups: list[_Group], site: Site) -> list[_Group]:
    """Join groups between which a batch of 1 may stand, the axis that takes it first.

    In (tokens, batch * heads, width of a head) to (tokens * batch, width) the batch belongs to the
    tokens: the last axis is the width that weights have.
    """
    joined: list[_Group] = []
    for axes, results in groups:
        grows = len(axes) > 1 and site.grows((site.after[0] or ())[axes[0]])
        if joined and joined[-1][1] and len(results) == 1 and grows:
            *others, last = joined[-1][1]
            joined[-1] = [*joined[-1][0], *axes], [last, *others, *results]
        else:
            joined.append((axes, results))
    return joined


def _resize(site: Site) -> Change | None:
    """Give a Resize with constant sizes sizes that are the same multiples of its input's."""
    before, after, stated = site.before[0], site.after[0], site.constant(3)
    if before is None or after is None or stated is None or before == after or 0 in before:
        return None
    axes = site.node.attrs.get("axes") or range(len(before))
    if len(axes) != stated.size:
        return None
    sizes: list[Size] = []
    shape = list(after)
    for axis, size in zip(axes, map(int, stated.ravel()), strict=True):
        if before[axis] == after[axis]:
            sizes.append(size)
        else:
            common = math.gcd(size, before[axis])
            sizes.append(((axis % len(before),), size // common, before[axis] // common))
        shape[axis] = size * after[axis] // before[axis]
    return _NewTarget(tuple(shape), sizes, 3)


def _expand(site: Site) -> Change | None:
    """Let an Expand keep the sizes of its input that it held."""
    before, after, stated = site.before[0], site.after[0], site.constant(1)
    if before is None or after is None or stated is None or before == after:
        return None
    sizes = [int(size) for size in stated.ravel()]
    lead = len(sizes) - len(before)
    if lead < 0:
        return None
    shape = list(sizes)
    for axis, (old, new) in enumerate(zip(before, after, strict=True)):
        if old != new and sizes[lead + axis] in (old, 1):
            sizes[lead + axis] = 1
            shape[lead + axis] = new
        elif sizes[lead + axis] == 1:
            shape[lead + axis] = new
    return _NewTarget(tuple(shape), list[Size](sizes))


@attrs.frozen
class _Repeated:
    """Operands that are repeated along an axis.

    Attributes:
        operands: See `Change`.
        axes: By the position of an operand and its axis, the operand and the axis of which the size
            is taken.
        result: See `Change`.
    """

    operands: Mapping[int, Sizes]
    axes: Mapping[tuple[int, int], tuple[int, int]]
    result: Sizes | None = None

    def node(self, node: Node, inputs: Sequence[Value | None]) -> Node:
        """Return the node with an Expand before each of these operands."""
        made = list(inputs)
        for (k, axis), (source, along) in self.axes.items():
            rank = len(self.operands[k])
            ends = (_numbers(node, [number]) for number in (0, 1, axis))
            first = part_of(node, "Slice", made[k], *ends)
            parts = [_numbers(node, [1] * count) for count in (axis, rank - axis - 1)]
            parts.insert(1, _computed(node, inputs[source], (along,), 1, 1))
            shape = part_of(node, "Concat", *parts, axis=0)
            made[k] = part_of(node, "Expand", first, shape)
        return _copied(node, made)


def _repeated(
    site: Site, pairs: Sequence[tuple[tuple[int, int], tuple[int, int]]]
) -> Change | None:
    """Repeat operands that have the old size where others have the new one.

    Args:
        site: The node.
        pairs: An operand and its axis, and the operand and axis whose size it has to have.
    """
    axes: dict[tuple[int, int], tuple[int, int]] = {}
    operands: dict[int, Sizes] = {}
    for (k, axis), (source, along) in pairs:
        shape, old, new = site.after[k], site.before[source], site.after[source]
        if shape is None or old is None or new is None or old[along] == new[along]:
            continue
        if axis >= len(shape) or shape[axis] != old[along]:
            continue
        array = site.constant(k)
        equal = array is not None and (array == array.take([0], axis)).all()
        if shape[axis] == 1 or equal:
            axes[k, axis] = source, along
            before = operands.get(k, shape)
            operands[k] = (*before[:axis], new[along], *before[axis + 1 :])
    return _Repeated(operands, axes) if axes else None


def _concat(site: Site) -> Change | None:
    """Repeat operands of a Concat along the other axes than its own."""
    shapes = [shape for shape in site.after if shape is not None]
    ranks = {len(shape) for shape in shapes}
    if len(shapes) < len(site.after) or len(ranks) != 1:
        return None
    rank = ranks.pop()
    pairs: list[tuple[tuple[int, int], tuple[int, int]]] = []
    for axis in set(range(rank)) - {int(site.node.attrs["axis"]) % rank}:
        sizes = [shape[axis] for shape in shapes]
        largest = sizes.index(max(sizes))
        pairs += [((k, axis), (largest, axis)) for k in range(len(shapes))]
    return _repeated(site, pairs)


def _recurrent(site: Site) -> Change | None:
    """Repeat the initial states of a GRU, LSTM or RNN along the batch."""
    batch = 0 if site.node.attrs.get("layout", 0) else 1
    states = [k for k in (5, 6) if k < len(site.after)]
    return _repeated(site, [((k, batch), (0, batch)) for k in states])


@attrs.frozen
class _EachItem:
    """A Gather or GatherND that takes the same elements of each item of a batch.

    Attributes:
        result: See `Change`.
        item: The shape of an item.
        indices: The indices inside an item.
        operands: See `Change`.
    """

    result: Sizes
    item: Sizes
    indices: Array
    operands: Mapping[int, Sizes] = attrs.field(factory=dict[int, Sizes])

    def node(self, node: Node, inputs: Sequence[Value | None]) -> Node:
        """Return a Gather along the axis behind the batch, or a GatherND of the batch."""
        indices = part_of(node, "Constant", value=self.indices)
        if node.op_type == "Gather":
            items = part_of(node, "Reshape", inputs[0], _numbers(node, [-1, *self.item]))
            made = _copied(node, [items, indices])
            made.attrs["axis"] = 1
            return made
        inside = _numbers(node, self.indices.shape[1:])
        count = _computed(node, inputs[0], (0,), 1, 1)
        shape = part_of(node, "Concat", count, inside, axis=0)
        made = _copied(node, [inputs[0], part_of(node, "Expand", indices, shape)])
        made.attrs["batch_dims"] = 1
        return made


def _gather(site: Site) -> Change | None:
    """Take the same elements of each item, if a Gather takes elements of a batch of 1."""
    before, after, indices = site.before[0], site.after[0], site.constant(1)
    if before is None or after is None or indices is None or not before:
        return None
    if int(site.node.attrs.get("axis", 0)) % len(before) or before[1:] != after[1:]:
        return None
    if not site.grows(after[0]) or indices.shape[:1] != (1,) or 0 in before:
        return None
    result = (after[0] // before[0], *indices.shape[1:], *before[1:])
    return _EachItem(result, before, indices[0].astype(np.int64))


def _gather_nd(site: Site) -> Change | None:
    """Take the same elements of each item, if a GatherND takes elements of item 0."""
    after, indices = site.after[0], site.constant(1)
    if after is None or indices is None or site.node.attrs.get("batch_dims", 0):
        return None
    if not site.grows(after[0]) or indices.ndim < 2 or indices.shape[0] != 1:
        return None
    if indices.shape[-1] < 2 or indices[..., 0].any():
        return None
    inside = indices[..., 1:].astype(np.int64)
    result = (after[0], *inside.shape[1:-1], *after[1 + inside.shape[-1] :])
    return _EachItem(result, after[1:], inside)


RULES: Mapping[str, Callable[[Site], Change | None]] = {
    "Concat": _concat,
    "Expand": _expand,
    "GRU": _recurrent,
    "Gather": _gather,
    "GatherND": _gather_nd,
    "LSTM": _recurrent,
    "RNN": _recurrent,
    "Reshape": _reshape,
    "Resize": _resize,
}


def _copied(node: Node, inputs: Sequence[Value | None]) -> Node:
    """Return a copy of a node with other inputs, whose results have no types yet."""
    made = Node(
        node.op_type,
        inputs,
        outputs=len(node.outputs),
        name=node.name,
        version=node.version,
        attrs=node.attrs,
        metadata=node.metadata,
    )
    for value, old in zip(made.outputs, node.outputs, strict=True):
        value.name = old.name
    return made


def _numbers(node: Node, numbers: Sequence[int]) -> Value:
    return part_of(node, "Constant", value=np.array(numbers, np.int64))


def _computed(
    node: Node, value: Value | None, axes: Sequence[int], factor: int, divisor: int
) -> Value:
    """Return the product of sizes of a value, times ``factor``, divided by ``divisor``."""
    of = partial(part_of, node)
    found = of("Gather", of("Shape", value), _numbers(node, axes))
    if len(axes) > 1:
        found = of("ReduceProd", found, keepdims=1)
    if factor != 1:
        found = of("Mul", found, _numbers(node, [factor]))
    return found if divisor == 1 else of("Div", found, _numbers(node, [divisor]))
