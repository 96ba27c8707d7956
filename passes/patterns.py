"""Base of the pattern fusions: matchers and their registry, selector, property, fused nodes.

A matcher looks at one node and returns the nodes around it that become one fused node (`Match`).
The selector grows a region of exactly these nodes. The property makes the fused node with the
region as its inner graph, so that a device without a kernel for the fused node runs the inner
graph. Activations become plain nodes of the standard instead, so that elementwise chains can
include them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import wraps
from typing import Any, Generic, Literal, TypeVar, get_args

import attrs

from subgraph.errors import PartitionError, PassError, SubgraphError, described
from subgraph.graph.graph import Graph, Node, Value
from subgraph.graph.parameters import Parameter
from subgraph.graph.types import Array, Shape, TensorType
from subgraph.operators.inference import part_metadata, set_output_types
from subgraph.operators.operator import is_random
from subgraph.operators.schema import INTERNAL_DOMAIN
from subgraph.ops.elementwise.op import aligns_axes
from subgraph.partition.property import SubgraphProperty
from subgraph.partition.selector import Reject, SubgraphSelector
from subgraph.system.registry import Files, Registry, defined_at, nearest
from subgraph.transform.pass_manager import register_pass

FLOATS = frozenset({"float32", "float64"})
_B = TypeVar("_B")


@attrs.frozen(eq=False)
class Match:
    """The nodes of a pattern, and the fused node that replaces them.

    Attributes:
        nodes: The nodes; the first output of the last one is the result.
        op_type: The fused operator.
        inputs: Values in the fused operator's order, None where one is omitted.
        attrs: The fused node's attributes.
        domain: The fused operator's domain.
        version: The fused operator's version.
        arity: Largest number of inputs of the fused operator. Further inputs of the region, which
            ``inputs`` does not list, are appended behind this position.
        reads: Parameters whose content the match depends on.
        opaque: Whether the fused node keeps the region as its inner graph, which no later pass
            changes. If not, it is a plain node of the standard and may be part of larger patterns.
    """

    nodes: tuple[Node, ...]
    op_type: str
    inputs: tuple[Value | None, ...]
    attrs: Mapping[str, Any] = attrs.field(factory=dict[str, Any])
    domain: str = INTERNAL_DOMAIN
    version: int = 1
    arity: int = 0
    reads: tuple[Parameter, ...] = ()
    opaque: bool = True


class Context:
    """Questions about a graph that matchers ask.

    Attributes:
        graph: The graph.
        outputs: The graph's outputs.
        reads: Parameters whose content was read since `begin`.
    """

    def __init__(self, graph: Graph) -> None:
        """Find the values of ``graph`` that follow from weights."""
        self.graph = graph
        self.outputs = frozenset(graph.outputs)
        self.reads: list[Parameter] = []
        self._weights = weight_values(graph)
        self._positions = {node: k for k, node in enumerate(graph.nodes)}

    def begin(self) -> None:
        """Begin a new match, which has read no parameter."""
        self.reads = []

    def sole_user(self, value: Value, *op_types: str) -> Node | None:
        """Return the node with the only use of a value; None for more uses or a graph output.

        Args:
            value: The value.
            op_types: If given, the node must be a standard operator with one of these names.
        """
        if len(value.uses) != 1 or value in self.outputs:
            return None
        user = value.uses[0]
        return user if not op_types or is_op(user, *op_types) else None

    def ordered(self, nodes: Iterable[Node]) -> tuple[Node, ...]:
        """Return nodes of the graph, each once, in the graph's order."""
        return tuple(sorted(set(nodes), key=self._positions.__getitem__))

    def is_weight(self, value: Value | None) -> bool:
        """Return whether a value is a parameter or computed from parameters alone."""
        return value is not None and (value.parameter is not None or value in self._weights)

    def array(self, value: Value | None) -> Array | None:
        """Return the content of a parameter, and note that the match depends on it."""
        if value is None or value.parameter is None:
            return None
        self.reads.append(value.parameter)
        return value.parameter.array

    def scalar(self, value: Value | None) -> float | None:
        """Return the number in a parameter of one element; None for any other value."""
        if value is None or value.parameter is None:
            return None
        shape = value.parameter.type.shape or ()
        if any(dim != 1 for dim in shape):
            return None
        array = self.array(value)
        if array is None or array.dtype.kind not in "fiu":
            return None
        return float(array.reshape(-1)[0])

    def axes(self, node: Node) -> list[int] | None:
        """Return the axes of a reduction, an attribute or a parameter; None for any others."""
        axes = node.attrs.get("axes")
        if axes is None and len(node.inputs) > 1:
            array = self.array(node.inputs[1])
            axes = None if array is None else array.reshape(-1)
        return None if axes is None else [int(axis) for axis in axes]

    def weighted(self, at: Value, op_type: str) -> tuple[Node, Value] | None:
        """Return the sole user of a value if it is this operator with a weight, and the weight."""
        user = self.sole_user(at, op_type)
        weight = None if user is None else self.other_operand(user, at)
        if user is None or weight is None or not self.is_weight(weight):
            return None
        return user, weight

    def other_operand(self, node: Node, value: Value) -> Value | None:
        """Return the operand of a node with two inputs that is not ``value``."""
        if len(node.inputs) != 2:
            return None
        first, second = node.inputs
        return second if first is value else first

    def split_scale(self, node: Node) -> tuple[Value, float] | None:
        """Return the operands of a Mul of a value and a constant number; None for any other Mul."""
        for k in (0, 1):
            number = self.scalar(node.inputs[1 - k])
            value = node.inputs[k]
            if number is not None and value is not None:
                return value, number
        return None

    def is_closed(self, nodes: Sequence[Node]) -> bool:
        """Return whether only the first output of the last node is used outside of ``nodes``."""
        inside = frozenset(nodes)
        for node in nodes[:-1]:
            for value in node.outputs:
                if value in self.outputs or any(user not in inside for user in value.uses):
                    return False
        return not any(v.uses or v in self.outputs for v in nodes[-1].outputs[1:])


def weight_values(graph: Graph) -> set[Value]:
    """Return the outputs of all nodes that are computed from parameters alone."""
    found: set[Value] = set()
    for node in graph.nodes:
        if not node.inputs or node.captures or is_random(node) or node.bodies:
            continue
        if all(v in found or v.parameter is not None for v in node.sources):
            found.update(node.outputs)
    return found


def is_op(node: Node | None, *op_types: str) -> bool:
    """Return whether a node is a standard operator with one of these names.

    One whose operands broadcast as in old opsets only is none: patterns expect NumPy's rules.
    """
    if node is None or node.domain or node.op_type not in op_types:
        return False
    return not aligns_axes(node)


def produced_by(value: Value | None, *op_types: str) -> Node | None:
    """Return the producer of a value if it is a standard operator with one of these names."""
    if value is None or value.producer is None:
        return None
    return value.producer if is_op(value.producer, *op_types) else None


def shape_of(value: Value | None) -> Shape | None:
    """Return the shape of a value, None while unknown."""
    return value.type.shape if value is not None and isinstance(value.type, TensorType) else None


def dtype_of(value: Value | None) -> str:
    """Return the dtype of a value, "" while unknown."""
    return value.type.dtype if value is not None and isinstance(value.type, TensorType) else ""


def order_of_axes(transpose: Node) -> tuple[int, ...] | None:
    """Return the order of axes of a Transpose; None if the rank is unknown."""
    source = transpose.inputs[0]
    rank = source.type.rank if source is not None and isinstance(source.type, TensorType) else None
    if rank is None:
        return None
    return tuple(axis % rank for axis in transpose.attrs.get("perm") or range(rank)[::-1])


def is_per_channel(shape: Shape | None, channels: int, rank: int, axis: int = 1) -> bool:
    """Return whether an operand has one number for each channel.

    Args:
        shape: The operand's shape.
        channels: Number of channels.
        rank: Rank of the result.
        axis: The axis of channels in the result.
    """
    if shape is None or len(shape) > rank:
        return False
    full = [1] * (rank - len(shape)) + list(shape)
    return full[axis] == channels and all(dim == 1 for k, dim in enumerate(full) if k != axis)


def same_shape(a: Value | None, b: Value | None) -> bool:
    """Return whether two values are known to have the same shape."""
    first, second = shape_of(a), shape_of(b)
    return first is not None and first == second and None not in first


def reshaped(value: Value, shape: Shape, unknown: int = 0) -> Value:
    """Return a value in another shape.

    Args:
        value: The value.
        shape: The shape.
        unknown: What stands for a dimension that is no number in the Reshape: -1 to compute it.
    """
    if shape_of(value) == shape:
        return value
    sizes = tuple(dim if isinstance(dim, int) else unknown for dim in shape)
    return weight_node("Reshape", [value], shape, attributes={"shape": sizes}, version=1)


def weight_node(
    op_type: str,
    inputs: Sequence[Value | None],
    shape: Sequence[Any] | None,
    domain: str = "",
    attributes: dict[str, Any] | None = None,
    version: int = 14,
) -> Value:
    """Return the output of a new node on weights, computed again when one of them changes.

    Args:
        op_type: The operator.
        inputs: Weights in the operator's order, None where one is omitted.
        shape: Shape of the output; its dtype is that of the first input.
        domain: The operator's domain.
        attributes: The node's attributes.
        version: The operator's version.
    """
    node = Node(op_type, inputs, domain=domain, version=version, attrs=attributes)
    dtype = next(dtype_of(v) for v in inputs if v is not None)
    node.outputs[0].type = TensorType(dtype, shape)
    return node.outputs[0]


def part_of(
    node: Node, op_type: str, *inputs: Value | None, version: int = 13, **attributes: object
) -> Value:
    """Return the typed output of a new standard node that replaces a part of another.

    Args:
        node: The other node, for the metadata.
        op_type: The operator.
        *inputs: The inputs, None where one is omitted.
        version: The operator's version.
        **attributes: The attributes.
    """
    made = Node(op_type, inputs, version=version, attrs=attributes, metadata=part_metadata(node))
    set_output_types(made)
    return made.outputs[0]


def merge_sums(
    graph: Graph,
    merge: Callable[[Context, Mapping[Node, _B], Node, Value, Value], _B | None],
    make: Callable[[Node, _B, Mapping[Value, Value]], Value],
) -> Graph:
    """Return ``graph``, or a copy in which one branch computes what additions add.

    Args:
        graph: The graph.
        merge: ``merge(context, sums, node, first, second)`` returns the branch that computes both
            operands of the Add ``node``, or None. ``sums`` has the branches of earlier additions.
        make: ``make(node, branch, replaced)`` returns the value that replaces the result of
            ``node``. ``replaced`` has those of earlier additions.
    """
    if not _merged_sums(graph, merge):
        return graph
    graph = graph.clone()
    replaced: dict[Value, Value] = {}
    for node, branch in _merged_sums(graph, merge).items():
        replaced[node.outputs[0]] = make(node, branch, replaced)
    graph.rewire(replaced)
    return graph


def _merged_sums(
    graph: Graph, merge: Callable[[Context, Mapping[Node, _B], Node, Value, Value], _B | None]
) -> dict[Node, _B]:
    """Return the largest sums that ``merge`` finds, each with its branch."""
    context = Context(graph)
    sums: dict[Node, _B] = {}
    for node in graph.nodes:
        first, second = (*node.inputs, None, None)[:2]
        if not is_op(node, "Add") or first is None or second is None or first is second:
            continue
        merged = merge(context, sums, node, first, second)
        if merged is not None:
            for part in (first.producer, second.producer):
                if part is not None:
                    sums.pop(part, None)
            sums[node] = merged
    return sums


def static_size(shape: Sequence[object] | None) -> int | None:
    """Return the number of elements of a shape; None if it or a dimension is unknown."""
    sizes = [dim for dim in shape or () if isinstance(dim, int)]
    return None if shape is None or len(sizes) < len(shape) else math.prod(sizes)


Matcher = Callable[[Context, Node], Match | None]
# When a fusion runs, in this order: on integer operators of the model; on groups of operators
# between DequantizeLinear and QuantizeLinear (QDQ); the other stages after scales are folded.
Stage = Literal["integers", "quantized", "transformer", "epilogue", "activation"]
_FUSIONS = Files("subgraph.passes.fuse", lambda _: True)
_T = TypeVar("_T", bound=Callable[..., Any])


@attrs.frozen
class Fusion(Generic[_T]):
    """A matcher or a pass, as its file declares it.

    Attributes:
        stage: When it runs.
        run: The matcher or the pass.
        starts: Only a graph with one of these operators can have something to fuse.
        needs: A graph must have all of these operators besides.
    """

    stage: Stage
    run: _T
    starts: frozenset[str]
    needs: frozenset[str] = frozenset()


MATCHERS: Registry[Fusion[Matcher]] = Registry("pattern", PassError, _FUSIONS)
FUSION_PASSES: Registry[Fusion[Callable[..., Graph]]] = Registry("fusion", PassError, _FUSIONS)


def pattern(stage: Stage, *starts: str, needs: Iterable[str] = ()) -> Callable[[Matcher], Matcher]:
    """Decorate a matcher that `CpuFusion` runs in this stage.

    Args:
        stage: The stage.
        starts: Operators of the standard; the matcher is called for their nodes with a float
            result.
        needs: Other operators without which a graph has no match.

    Raises:
        PassError: there is no such stage, or no operator.
    """
    _check_fusion(stage, starts)

    def register(matcher: Matcher) -> Matcher:
        owner = defined_at(matcher)

        @wraps(matcher)
        def match(context: Context, node: Node) -> Match | None:
            fits = is_op(node, *starts) and dtype_of(node.outputs[0]) in FLOATS
            if not fits:
                return None
            try:
                found: Any = matcher(context, node)
            except SubgraphError:
                raise
            except Exception as error:
                raise PassError(f"pattern {owner} raised {described(error)} at {node!r}") from error
            if found is not None and not isinstance(found, Match):
                raise PassError(f"pattern {owner} gave {found!r} at {node!r}; give a Match or None")
            return found

        name = f"{stage} {getattr(matcher, '__name__', matcher)}"
        fusion = Fusion[Matcher](stage, match, frozenset(starts), frozenset(needs))
        MATCHERS.register(name, fusion, owner)
        return match

    return register


def fusion_pass(name: str, stage: Stage, *starts: str) -> Callable[[_T], _T]:
    """Decorate a pass that `CpuFusion` runs before the matchers of a stage.

    Args:
        name: The pass's name.
        stage: The stage.
        starts: See `Fusion`.

    Raises:
        PassError: there is no such stage, or no operator.
    """
    _check_fusion(stage, starts)

    def register(function: _T) -> _T:
        owner = defined_at(function)
        FUSION_PASSES.register(name, Fusion(stage, function, frozenset(starts)), owner)
        return register_pass(name)(function)

    return register


def _check_fusion(stage: str, starts: Sequence[str]) -> None:
    """Raise a PassError for a fusion that would never run."""
    if stage not in get_args(Stage):
        raise PassError(
            f"no stage of fusions is named {stage!r}; {nearest(stage, get_args(Stage))}"
        )
    if not starts:
        raise PassError("name the operators without which a graph has nothing for the fusion")


def fusions(
    registry: Registry[Fusion[_T]], stage: Stage, present: AbstractSet[str] | None = None
) -> list[_T]:
    """Return the matchers or passes of a stage, sorted by name.

    Args:
        registry: `MATCHERS` or `FUSION_PASSES`.
        stage: The stage.
        present: Operators of the graph; fusions that need others are left out. None: all fusions.
    """
    found = [each for _, each in registry.items() if each.stage == stage]
    return [
        each.run
        for each in found
        if present is None or (each.starts & present and each.needs <= present)
    ]


class GroupSelector(SubgraphSelector):
    """Selects all nodes that are fused with a start node, or none if one of them is missing."""

    def __init__(self, members: Callable[[Node], frozenset[Node]]) -> None:
        """Use a function that returns the nodes for a start node; empty if there are none."""
        self._members_of = members
        self._members: frozenset[Node] = frozenset()

    def select(self, node: Node) -> bool | Reject:
        """Return whether there are nodes to fuse at ``node``."""
        self._members = self._members_of(node)
        return bool(self._members)

    def select_input(self, node: Node, input_node: Node) -> bool | Reject:
        """Return whether the producer is among the nodes."""
        return input_node in self._members

    def select_output(self, node: Node, output_node: Node) -> bool | Reject:
        """Return whether the consumer is among the nodes."""
        return output_node in self._members

    def filter(self, candidates: list[Node]) -> list[Node]:
        """Return all the nodes, or none."""
        return candidates if len(candidates) == len(self._members) else []


class PatternProperty(SubgraphProperty):
    """Replaces every match of its matchers by a fused node."""

    constant_weights = False  # the pass ConstantsToParameters came before

    def __init__(
        self, name: str, matchers: Iterable[Matcher], guards: dict[Parameter, int] | None = None
    ) -> None:
        """Make a property.

        Args:
            name: The property's name.
            matchers: Matchers, tried in this order.
            guards: Filled with the parameters that matches read and their versions, for a device
                that fuses again when one of them changes. None: every fused node keeps its region
                as inner graph, and a device fuses it when it compiles the node.
        """
        self.name = name
        self.guards = guards
        self._matchers = tuple(matchers)
        self._context: Context | None = None
        self._matches: dict[frozenset[str], Match] = {}

    def pre_partition(self, graph: Graph, options: Mapping[str, Any]) -> Graph | None:
        """Prepare to match in ``graph``."""
        self._context = None
        return None

    def create_subgraph_selector(self) -> SubgraphSelector:
        """Return a fresh selector."""
        return GroupSelector(self.members)

    def members(self, node: Node) -> frozenset[Node]:
        """Return the nodes of the first match at a node; empty for a node without a match.

        The inner results of a match are not used outside of it.
        """
        context = self._context
        if context is None or context.graph is not node.graph:
            if node.graph is None:
                return frozenset()
            context = self._context = Context(node.graph)
        for matcher in self._matchers:
            context.begin()
            found = matcher(context, node)
            if found is not None and context.is_closed(found.nodes):
                found = attrs.evolve(found, reads=tuple(context.reads))
                self._matches[frozenset(n.name for n in found.nodes)] = found
                return frozenset(found.nodes)
        return frozenset()

    def create_subgraph_node(self, subgraph: Graph, subgraph_id: int) -> Node | None:
        """Return the fused node of a match; None for a region that is only a part of a match."""
        match = self._matches.get(frozenset(node.name for node in subgraph.nodes))
        if match is None:
            return None
        if self.guards is None:
            return fused_node(subgraph, attrs.evolve(match, opaque=True, domain=INTERNAL_DOMAIN))
        for parameter in match.reads:
            self.guards[parameter] = parameter.version
        return fused_node(subgraph, match)


def fused_node(inner: Graph, match: Match) -> Node:
    """Return the fused node of a match; its inputs are in the fused operator's order.

    Args:
        inner: The region as the inner graph that the partition cut out.
        match: The match that the region implements.

    Raises:
        PartitionError: an input of the match is no input of the region.
    """
    by_name = {value.name: value for value in inner.inputs}
    roles: list[Value | None] = []
    for value in match.inputs:
        found = None if value is None else by_name.get(value.name)
        if value is not None and found is None:
            raise PartitionError(
                f"input {value.name!r} of fused {match.op_type} is no input of its region"
            )
        roles.append(found)
    used = {value for value in roles if value is not None}
    # Inputs of the inner graph that the fused operator does not have, such as computed shapes.
    rest = [v for v in inner.inputs if v not in used and v.parameter is None]
    while roles and roles[-1] is None and not rest:
        roles.pop()
    if rest:
        roles += [None] * (match.arity - len(roles))
    inputs = [*roles, *rest]
    placeholders = [
        Value(f"omitted_{k}") if v is None or v in inputs[:k] else v for k, v in enumerate(inputs)
    ]
    # The region belongs to the partition; the node gets a copy with inputs of its own.
    body = Graph(placeholders, inner.outputs, inner.name, nodes=inner.nodes, opsets=inner.opsets)
    return Node(
        match.op_type,
        [None if v is None else Value(v.name, v.type, parameter=v.parameter) for v in inputs],
        outputs=[Value("", v.type) for v in inner.outputs],
        name=match.nodes[-1].name,
        domain=match.domain,
        version=match.version,
        attrs=dict(match.attrs),
        subgraph=body if match.opaque else None,
    )
