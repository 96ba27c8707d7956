"""The pass "SinkTransposes": transposes around elementwise operators that undo each other go.

Models in which every convolution stands between two transposes (as TensorFlow's and Keras's
exporters write them) do what lies between in the other order of axes. Here it is done in the
convolution's own order, with weights turned to fit, where that leaves fewer transposes. Matrices
that are transposed before their batches are reshaped are transposed afterwards, beside the product
that takes them so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from subgraph.graph.graph import Graph, Node, Value
from subgraph.graph.types import TensorType
from subgraph.operators.inference import BEYOND
from subgraph.passes._patterns import Context, is_op, produced_by, reshaped, shape_of, weight_node
from subgraph.transform.pass_manager import register_pass

Perm = tuple[int, ...]
_UNARY = frozenset(
    {
        *("Abs", "Cast", "Ceil", "Celu", "Clip", "Elu", "Erf", "Exp", "Floor", "Gelu"),
        *("HardSigmoid", "HardSwish", "Identity", "LeakyRelu", "Log", "Mish", "Neg", "Reciprocal"),
        *("Relu", "Round", "Selu", "Sigmoid", "Sign", "Softplus", "Softsign", "Sqrt", "Swish"),
        *("Tanh", "ThresholdedRelu"),
    }
)
_OLD = ".transposed"  # what is added to the name of a node that goes
_BROADCAST = frozenset({"Add", "Div", "Max", "Min", "Mul", "PRelu", "Pow", "Sub", "Sum"})


@register_pass("SinkTransposes")
def sink_transposes(graph: Graph) -> Graph:
    """Return a copy of ``graph`` with fewer transposes."""
    graph = graph.clone()
    graph.rewire(_reshaped_first(graph))
    while any(is_op(node, "Transpose") for node in graph.nodes):
        replaced = _Search(graph).replacements()
        if not replaced:
            break
        graph.rewire(replaced)
    return graph


def _reshaped_first(graph: Graph) -> dict[Value, Value]:
    """Return what stands for matrices whose batches are reshaped after they were transposed."""
    replaced: dict[Value, Value] = {}
    context = Context(graph)
    for node in graph.nodes:
        turn = produced_by(node.inputs[0], "Transpose") if is_op(node, "Reshape") else None
        if turn is None or turn.inputs[0] is None or context.user(turn.outputs[0]) is None:
            continue
        before, after = shape_of(turn.outputs[0]) or (), shape_of(node.outputs[0]) or ()
        sizes = [dim for dim in after if isinstance(dim, int)]
        rank = len(sizes)
        if rank != len(after) or rank < 2 or before[-2:] != after[-2:]:
            continue
        if _perm(turn) != _swap(len(before)):
            continue
        perm = _swap(rank)
        source = reshaped(turn.inputs[0], tuple(sizes[axis] for axis in perm))
        made = Node("Transpose", [source], version=13, attrs={"perm": perm}, name=node.name)
        made.metadata = {"origin": (node.metadata or {}).get("origin") or node.name}
        if source.producer is not None and source is not turn.inputs[0]:
            source.producer.metadata = made.metadata
        node.name += _OLD
        made.outputs[0].type = node.outputs[0].type
        replaced[node.outputs[0]] = made.outputs[0]
    return replaced


def _swap(rank: int) -> Perm:
    """Return the order that transposes matrices."""
    return (*range(rank - 2), rank - 1, rank - 2)


def _perm(node: Node) -> Perm | None:
    """Return the order of a Transpose's axes, None if it is not known."""
    source = node.inputs[0]
    rank = source.type.rank if source is not None and isinstance(source.type, TensorType) else None
    if rank is None:
        return None
    return tuple(node.attrs.get("perm") or range(rank)[::-1])


def _inverse(perm: Perm) -> Perm:
    return tuple(sorted(range(len(perm)), key=perm.__getitem__))


class _Search:
    """The groups of operators between transposes of one order of axes."""

    def __init__(self, graph: Graph) -> None:
        self._context = Context(graph)
        self._perms: dict[Value, Perm] = {}  # of what is a transposed value, or follows from ones
        self._groups: dict[Node, list[Node]] = {}  # the transposes before it among them
        self._position = {node: k for k, node in enumerate(graph.nodes)}
        for node in graph.nodes:
            if is_op(node, "Transpose"):
                perm = _perm(node)
                if perm is not None:
                    self._perms[node.outputs[0]] = perm
                    self._groups[node] = [node]
            elif self._fits(node):
                self._join(node)

    def _turned(self, node: Node) -> list[Value]:
        return [value for value in node.inputs if value in self._perms]

    def _fits(self, node: Node) -> bool:
        """Return whether a node may do the same on its inputs before they are transposed."""
        turned = self._turned(node)
        perms = {self._perms[value] for value in turned}
        if node.domain or len(perms) != 1 or len(node.outputs) != 1 or "broadcast" in node.attrs:
            return False
        rank = len(next(iter(perms)))
        rest = [value for value in node.inputs if value is not None and value not in self._perms]
        type_ = node.outputs[0].type
        if not isinstance(type_, TensorType) or type_.rank != rank:
            return False
        if node.op_type in _UNARY:
            return node.inputs[0] in turned and len(turned) == 1
        if node.op_type == "Concat":
            return not rest
        if node.op_type == "PRelu" and node.inputs[0] not in turned:
            return False
        return node.op_type in _BROADCAST and all(self._is_weight(v, rank) for v in rest)

    def _is_weight(self, value: Value, rank: int) -> bool:
        type_ = value.type
        known = isinstance(type_, TensorType) and type_.is_static and (type_.rank or 0) <= rank
        return known and self._context.is_weight(value)

    def _join(self, node: Node) -> None:
        turned = self._turned(node)
        self._perms[node.outputs[0]] = self._perms[turned[0]]
        found = [self._groups[value.producer] for value in turned if value.producer is not None]
        # The largest group takes in the others, so that no node moves often.
        groups = sorted({id(group): group for group in found}.values(), key=len, reverse=True)
        largest = groups[0]
        for member in [node, *(member for group in groups[1:] for member in group)]:
            largest.append(member)
            self._groups[member] = largest

    def replacements(self) -> dict[Value, Value]:
        """Return what stands for the values of the groups that are better done otherwise."""
        replaced: dict[Value, Value] = {}
        busy: set[Node] = set()
        for members in {id(group): group for group in self._groups.values()}.values():
            group = _Group(self._context, self._perms, self._position, members)
            touched = {*members, *group.undone}
            # What two groups share is left for the next round.
            if group.is_better() and busy.isdisjoint(touched):
                busy |= touched
                replaced.update(group.sunk())
        return replaced


class _Group:
    """Transposes of one order, and the operators that follow from nothing but them and weights.

    Attributes:
        undone: The transposes after it that bring back the order before it.
    """

    def __init__(
        self,
        context: Context,
        perms: dict[Value, Perm],
        position: dict[Node, int],
        members: Sequence[Node],
    ) -> None:
        self._context = context
        self._members = set(members)
        self._perm = perms[next(iter(self._members)).outputs[0]]
        self._order = sorted(members, key=position.__getitem__)
        back = _inverse(self._perm)
        self.undone = {
            user
            for node in self._order
            for user in node.outputs[0].uses
            if user not in self._members and is_op(user, "Transpose") and _perm(user) == back
        }

    def _is_needed(self, value: Value) -> bool:
        """Return whether a value is needed in the order of axes that it has."""
        inside = self._members | self.undone
        return value in self._context.outputs or any(user not in inside for user in value.uses)

    def is_better(self) -> bool:
        """Return whether fewer transposes are left."""
        gone = len(self.undone)
        added = 0
        for node in self._order:
            needed = self._is_needed(node.outputs[0])
            if node.op_type == "Transpose":
                gone += not needed
            else:
                added += needed
        return bool(self.undone) and gone > added

    def sunk(self) -> dict[Value, Value]:
        """Return what stands for the values that the group gives away."""
        before: dict[Value, Value] = {}
        replaced: dict[Value, Value] = {}
        for node in self._order:
            value = node.outputs[0]
            if node.op_type == "Transpose":
                source = node.inputs[0]
                assert source is not None, "it is required"
                before[value] = source
            else:
                before[value] = self._moved(node, before)
                if self._is_needed(value):
                    replaced[value] = self._transposed(node, before[value])
        for node in self.undone:
            source = node.inputs[0]
            assert source is not None, "it is required"
            replaced[node.outputs[0]] = before[source]
        return replaced

    def _moved(self, node: Node, before: dict[Value, Value]) -> Value:
        """Return what a node gives on inputs that are not transposed."""
        attributes = dict(node.attrs)
        if node.op_type == "Concat":
            attributes["axis"] = self._perm[int(node.attrs["axis"])]
        inputs: list[Value | None] = []
        for position, value in enumerate(node.inputs):
            if value is None or value in before:
                inputs.append(None if value is None else before[value])
            else:
                bound = node.op_type in _UNARY and position > 0
                inputs.append(value if bound else self._weight(value))
        made = Node(
            node.op_type,
            inputs,
            name=node.name,
            version=node.version,
            attrs=attributes,
            # What a body requires of its operands holds for their axes as they were.
            metadata={k: note for k, note in (node.metadata or {}).items() if k != BEYOND},
        )
        node.name += _OLD
        made.outputs[0].type = self._type(node.outputs[0])
        return made.outputs[0]

    def _type(self, value: Value) -> TensorType:
        type_ = value.type
        assert isinstance(type_, TensorType), "it is a tensor whose rank is known"
        assert type_.shape is not None, "it is a tensor whose rank is known"
        return TensorType(type_.dtype, self._back(type_.shape))

    def _back(self, dims: Sequence[Any]) -> list[Any]:
        return [dims[axis] for axis in _inverse(self._perm)]

    def _weight(self, value: Value) -> Value:
        """Return a weight whose axes fit values that are not transposed."""
        type_ = value.type
        assert isinstance(type_, TensorType), "_is_weight looked"
        dims = [dim for dim in type_.shape or () if isinstance(dim, int)]
        if math.prod(dims) == 1:
            return value
        full = (*(1,) * (len(self._perm) - len(dims)), *dims)
        turned = self._back(full)
        if sum(dim != 1 for dim in full) == 1:
            return reshaped(value, tuple(turned))
        perm = {"perm": _inverse(self._perm)}
        return weight_node("Transpose", [reshaped(value, full)], turned, attributes=perm)

    def _transposed(self, node: Node, value: Value) -> Value:
        origin = (node.metadata or {}).get("origin") or node.name.removesuffix(_OLD)
        made = Node("Transpose", [value], version=13, attrs={"perm": self._perm})
        made.metadata = {"origin": origin}
        made.outputs[0].type = node.outputs[0].type
        return made.outputs[0]
