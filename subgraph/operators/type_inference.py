"""Type inference of graphs: symbolic sizes, bodies of control-flow operators, inner graphs.

`infer_graph` fills in the types of a graph in place; ``sg.load`` and the pass "InferTypes" call
it. `subgraph.operators.inference` types one node, `subgraph.operators.shape_values` evaluates shape
arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

from subgraph.errors import ModelError, ShapeError
from subgraph.graph.graph import Graph, Node, Value
from subgraph.graph.types import (
    Array,
    Dim,
    OptionalType,
    SequenceType,
    TensorType,
    ValueType,
)
from subgraph.operators.bodies import check_bodies, check_node
from subgraph.operators.inference import infer_types, scanned_inputs
from subgraph.operators.op_checks import output_types
from subgraph.operators.operator import operator_of
from subgraph.operators.shape_values import from_array, is_partial, propagate, to_array
from subgraph.operators.subgraph_op import DefaultSubgraphOp, runs_by_default

# Inferences of a loop's body; shapes of carried values that then still change become unknown.
_MAX_INFERENCES = 3


def infer_graph(
    graph: Graph, *, strict: bool = True, known: Mapping[Value, Array | None] | None = None
) -> Mapping[Value, Array | None]:
    """Fill in the types of the values of ``graph`` and of its bodies, in place; linear.

    Args:
        graph: The graph. Types that it states stay where they are more precise than inferred ones.
        strict: Whether contradictions are errors; otherwise inferred types replace stated ones,
            and outputs of nodes whose inputs do not fit stay unknown.
        known: Shape values of inputs and captures (see `subgraph.operators.shape_values`).

    Returns:
        The shape values of the graph's values, None or absent for those not known.

    Raises:
        ShapeError: strict, and types do not fit an operator or contradict the stated types.
    """
    inference = Inference(graph, strict, set(graph.inputs), dict(known or {}))
    inference.run()
    return inference.known


def retype(
    graph: Graph,
    types: Sequence[ValueType | None],
    known: Sequence[Array | None] = (),
    *,
    strict: bool = True,
) -> tuple[Graph, list[Array | None]]:
    """Return the inner graph of a subgraph node with the types that follow from its inputs.

    Args:
        graph: The inner graph; it is not changed.
        types: Types of the node's inputs; None: the inner input's type.
        known: Shape values of the node's inputs; None for those not known.
        strict: As for `infer_graph`.

    Returns:
        ``graph`` itself if it has these types already, else a copy with the new ones; and the
        shape values of its outputs, None for those not known.

    Raises:
        ShapeError: strict, and the types do not fit an operator inside.
    """
    pairs = zip(graph.inputs, types, strict=True)
    # An inner input that is a weight has the type of its Parameter, whatever the node is given.
    given = [type_ if v.parameter is None else v.parameter.type for v, type_ in pairs]
    plain = zip(graph.inputs, known, strict=False)
    elements = [k for value, k in plain if k is not None and value.parameter is None]
    same = all(t in (None, v.type) for v, t in zip(graph.inputs, given, strict=True))
    if same and not elements and all(value.type is not None for value in graph.outputs):
        return graph, [None] * len(graph.outputs)
    copy, values = graph.clone_with_map()
    changed: dict[Value, ValueType | None] = {}
    outside: dict[Value, Array | None] = {}
    for position, (value, type_) in enumerate(zip(copy.inputs, given, strict=True)):
        held = known[position] if position < len(known) and value.parameter is None else None
        if held is not None:
            outside[value] = held
        if held is not None or type_ not in (None, value.type):
            changed[value] = value.type
            value.type = type_ or value.type
    # The Parameter of an inner graph's input is the weight itself.
    inputs = {value for value in copy.inputs if value.parameter is None}
    inference = Inference(copy, strict, inputs, outside, changed)
    inference.run()
    found = [inference.known.get(value) for value in copy.outputs]
    same = all(new.type == old.type for old, new in values.items())
    return graph if same else copy, found


def output_types_of(inner: Graph, types: Sequence[ValueType | None]) -> list[ValueType | None]:
    """Return the types of an inner graph's outputs for these types of its inputs.

    Raises:
        ShapeError: the types do not fit an operator inside.
    """
    return [value.type for value in retype(inner, types)[0].outputs]


class Inference:
    """One walk over a graph in topological order.

    Without ``changed`` all types that the graph states hold. With it, the graph was typed for other
    input types, and types of a node's outputs are inferred anew if one of its inputs is among them.

    Attributes:
        known: Shape values, None or absent for those not known.
        changed: The old type of each value whose type or elements are now different; None: see
            above.
    """

    def __init__(
        self,
        graph: Graph,
        strict: bool,
        inputs: AbstractSet[Value],
        known: dict[Value, Array | None],
        changed: dict[Value, ValueType | None] | None = None,
    ) -> None:
        """Prepare a walk.

        Args:
            graph: As for `infer_graph`.
            strict: As for `infer_graph`.
            inputs: Inputs whose elements the caller decides, also if they have a default.
            known: Shape values; more are added.
            changed: See the attribute.
        """
        self._graph = graph
        self._strict = strict
        self._inputs = inputs
        self.known = known
        self.changed = changed
        self.known.update((value, None) for value in self._inputs if value not in known)

    def run(self) -> None:
        """Set the types of all values."""
        for node in self._graph.nodes:
            types = [None if v is None else v.type for v in node.inputs]
            known = [self._elements(v) for v in node.inputs]
            changed = self.changed
            if changed is None or not any(value in changed for value in node.sources):
                self._infer(node, types, known)
                continue
            before = [value.type for value in node.outputs]
            # The old types follow from the old inputs. They would win over less precise new ones in
            # `merge`.
            for value in node.outputs:
                value.type = None
            for body in node.bodies:
                _forget_types(body)
            self._infer(node, types, known)
            same_dtypes = all(
                _shapeless(value.type) == _shapeless(changed[value])
                for value in node.sources
                if value in changed
            )
            for value, old in zip(node.outputs, before, strict=True):
                # The operator's rule failed for lack of a size. Sizes and rank may have changed;
                # the dtype follows from those of the inputs, which are the same.
                if value.type is None and same_dtypes:
                    value.type = _shapeless(old)
                if value.type != old or self.known.get(value) is not None:
                    changed[value] = old

    def _infer(
        self, node: Node, types: Sequence[ValueType | None], known: Sequence[Array | None]
    ) -> None:
        if node.subgraph is not None:
            self._region(node, node.subgraph, types, known)
            return
        try:
            found = self.node_types(node, types, known)
        except ShapeError:
            # A model that is loaded may have a node that does not fit in a branch that never runs,
            # so that only the run raises its error.
            if self._strict:
                raise
            found = [None] * len(node.outputs)
        self._set(node, found)
        elements = propagate(node, known, types)
        if elements is not None:
            self.known[node.outputs[0]] = elements

    def _region(
        self,
        node: Node,
        inner: Graph,
        types: Sequence[ValueType | None],
        known: Sequence[Array | None],
    ) -> None:
        """Type a subgraph node: by its op's ``infer_types`` or, without one, its inner graph."""
        op = node.op
        own = op is not None and op.says_types
        try:
            typed, elements = retype(inner, types, known, strict=self._strict and not own)
            found = [value.type for value in typed.outputs]
            if own and op is not None:
                found = output_types(op, types)
        except ShapeError as error:
            if self._strict:
                error.add_note(f"in subgraph node {node.name!r}")
                raise
            typed, found, elements = inner, [None] * len(node.outputs), []
        if typed is not inner:
            node.subgraph = typed
            if op is not None and runs_by_default(op):
                node.op = DefaultSubgraphOp(typed)
        for value, type_ in zip(node.outputs, found, strict=True):
            if type_ is not None:
                # Types stated outside hold only if the inner graph still has the types for which
                # they were stated.
                stated = None if own or typed is not inner else value.type
                value.type = type_ if stated is None else merge(stated, type_) or type_
        self.known.update(
            (v, k) for v, k in zip(node.outputs, elements, strict=False) if k is not None
        )

    def _elements(self, value: Value | None) -> Array | None:
        if value is None:
            return None
        if value not in self.known and value.parameter is not None:
            self.known[value] = from_array(value.parameter.array)
        return self.known.get(value)

    def _array(self, value: Value | None, known: Array | None) -> Array | None:
        if value is None:
            return None
        if value.parameter is not None and value not in self._inputs:
            return value.parameter.array
        return to_array(known, value.type)

    def node_types(
        self,
        node: Node,
        types: Sequence[ValueType | None],
        known: Sequence[Array | None],
    ) -> Sequence[ValueType | None]:
        """Return the types of the outputs of a node that is no subgraph node.

        Args:
            node: The node.
            types: Types of its inputs.
            known: Shape values of its inputs.

        Raises:
            ShapeError: the types do not fit the operator.
        """
        arrays = [self._array(v, k) for v, k in zip(node.inputs, known, strict=True)]
        if node.attrs and node.bodies:
            return self._control_flow(node, types, arrays)
        at = operator_of(node).shape_at
        if at is not None and at < len(known) and is_partial(known[at]):
            arrays[at] = known[at]
        return infer_types(node, types, arrays)

    def _set(self, node: Node, found: Sequence[ValueType | None]) -> None:
        for value, type_ in zip(node.outputs, found, strict=False):
            if type_ is None or type_ is value.type:
                continue
            if value.type is None:
                value.type = type_
                continue
            merged = merge(value.type, type_)
            if merged is not None:
                value.type = merged
            elif self._strict:
                raise ShapeError(
                    f"node {node.name!r} ({node.op_type}): output {value.name!r} is stated as "
                    f"{value.type}, but follows as {type_} from the inputs"
                )
            else:
                value.type = type_

    # Control flow

    def _control_flow(
        self,
        node: Node,
        types: Sequence[ValueType | None],
        arrays: Sequence[Array | None],
    ) -> Sequence[ValueType | None]:
        own = not node.domain and node.op_type in ("If", "Loop", "Scan")
        # Others are checked when their bodies have types.
        (check_node if own else check_bodies)(node)
        captured = iter(node.captures)
        outside: dict[Value, Array | None] = {}
        for body in node.bodies:
            for inner in body.captures:
                outer = next(captured)
                inner.type = _refined(inner.type, outer.type)
                outside[inner] = self._elements(outer)
        if node.op_type == "If" and not node.domain:
            for body in node.bodies:
                infer_graph(body, strict=self._strict, known=outside)
            branches = [[value.type for value in body.outputs] for body in node.bodies]
            for pair in zip(*branches, strict=True):
                _check_dtype(node, "the branches return", *pair)
            return [_union(*pair) for pair in zip(*branches, strict=True)]
        if node.op_type == "Loop" and not node.domain:
            return self._loop(node, node.bodies[0], types, outside)
        if node.op_type == "Scan" and not node.domain and node.version >= 9:
            return self._scan(node, node.bodies[0], types, outside)
        for body in node.bodies:
            infer_graph(body, strict=self._strict, known=outside)
        return infer_types(node, types, arrays)

    def _loop(
        self,
        node: Node,
        body: Graph,
        types: Sequence[ValueType | None],
        outside: dict[Value, Array | None],
    ) -> Sequence[ValueType | None]:
        count = len(body.inputs) - 2
        stated: Sequence[ValueType | None] = [TensorType("int64", ()), TensorType("bool", ())]
        for value, type_ in zip(body.inputs, stated, strict=False):
            value.type = _refined(value.type, type_)
        carried = self._iterate(
            node, list(types[2:]), body.inputs[2:], slice(1, 1 + count), outside
        )
        scanned = [_stacked(value.type, None, 0) for value in body.outputs[1 + count :]]
        return [*carried, *scanned]

    def _scan(
        self,
        node: Node,
        body: Graph,
        types: Sequence[ValueType | None],
        outside: dict[Value, Array | None],
    ) -> Sequence[ValueType | None]:
        scans = scanned_inputs(node, min(len(types), len(body.inputs)))
        states = len(body.inputs) - scans
        axes = node.attrs.get("scan_input_axes", (0,) * scans)
        length: Dim = None
        for value, type_, axis in zip(body.inputs[states:], types[states:], axes, strict=False):
            if isinstance(type_, TensorType) and type_.shape is not None:
                dims = list(type_.shape)
                length = dims.pop(axis)
                value.type = _refined(value.type, TensorType(type_.dtype, dims))
        initial = list(types[:states])
        carried = self._iterate(node, initial, body.inputs[:states], slice(0, states), outside)
        results = body.outputs[states:]
        axes = node.attrs.get("scan_output_axes", (0,) * len(results))
        scanned = [_stacked(v.type, length, a) for v, a in zip(results, axes, strict=False)]
        return [*carried, *scanned]

    def _iterate(
        self,
        node: Node,
        types: list[ValueType | None],
        inputs: Sequence[Value],
        results: slice,
        outside: dict[Value, Array | None],
    ) -> list[ValueType | None]:
        """Infer the body until the types of the carried values hold for every iteration.

        Args:
            node: The Loop or Scan.
            types: Types of the carried values before the first iteration.
            inputs: The body's inputs for them.
            results: Positions of their outputs among the body's.
            outside: Shape values of the body's captures.

        Returns:
            The types of the carried values after any number of iterations.
        """
        body = node.bodies[0]
        made = [value for inner in body.nodes for value in inner.outputs]
        stated = [value.type for value in made]
        for iteration in range(_MAX_INFERENCES + 1):
            for value, type_ in zip(inputs, types, strict=False):
                # A body may declare an optional for a carried value that is its element.
                if value.type is None or type(value.type) is type(type_):
                    value.type = type_
            infer_graph(body, strict=self._strict, known=outside)
            for before, value in zip(types, body.outputs[results], strict=False):
                _check_dtype(node, "an iteration begins and ends with", before, value.type)
            after = [
                _union(before, value.type) if before is not None else value.type
                for before, value in zip(types, body.outputs[results], strict=False)
            ]
            if after == types:
                break
            types = (
                after if iteration < _MAX_INFERENCES - 1 else [_shapeless(type_) for type_ in after]
            )
            # The next inference must not refine the types that this one found for smaller carried
            # shapes.
            for value, type_ in zip(made, stated, strict=True):
                value.type = type_
        return types


def _stacked(type_: ValueType | None, length: Dim, axis: int) -> ValueType | None:
    if not isinstance(type_, TensorType):
        return None
    if type_.shape is None:
        return type_
    dims = list(type_.shape)
    dims.insert(axis if axis >= 0 else len(dims) + 1 + axis, length)
    return TensorType(type_.dtype, dims)


def _forget_types(body: Graph) -> None:
    """Remove the types of captures and node outputs of a body and the bodies inside."""
    for level in body.levels():
        for value in level.captures:
            value.type = None
        for node in level.nodes:
            for value in node.outputs:
                value.type = None


def _shapeless(type_: ValueType | None) -> ValueType | None:
    return TensorType(type_.dtype) if isinstance(type_, TensorType) else type_


def _check_dtype(node: Node, what: str, *types: ValueType | None) -> None:
    """Raise ModelError if a value has several dtypes, for which its consumers have no plan."""
    found = sorted({type_.dtype for type_ in types if isinstance(type_, TensorType)})
    if len(found) > 1:
        raise ModelError(
            f"node {node.name!r} ({node.op_type}): {what} {' and '.join(found)}; it must be one"
        )


def _union(*types: ValueType | None) -> ValueType | None:
    """Return the most precise type that covers all of these types; None: not known."""
    first = types[0] if types else None
    if all(type_ == first for type_ in types):
        return first
    tensors = [type_ for type_ in types if isinstance(type_, TensorType)]
    if len(tensors) < len(types) or len({t.dtype for t in tensors}) > 1:
        return None
    shapes = [t.shape for t in tensors if t.shape is not None]
    if len(shapes) < len(tensors) or len({len(shape) for shape in shapes}) > 1:
        return TensorType(tensors[0].dtype)
    dims = [dim[0] if len(set(dim)) == 1 else None for dim in zip(*shapes, strict=True)]
    return TensorType(tensors[0].dtype, dims)


def _refined(stated: ValueType | None, found: ValueType | None) -> ValueType | None:
    if stated is None or found is None:
        return stated or found
    return merge(stated, found) or found


def merge(stated: ValueType, found: ValueType) -> ValueType | None:
    """Return the type with the known parts of both types; None if they contradict each other."""
    if isinstance(stated, TensorType) and isinstance(found, TensorType):
        if stated.dtype != found.dtype:
            return None
        if stated.shape is None or found.shape is None:
            return found if stated.shape is None else stated
        if len(stated.shape) != len(found.shape):
            return None
        dims: list[Dim] = []
        for a, b in zip(stated.shape, found.shape, strict=True):
            if isinstance(a, int) and isinstance(b, int) and a != b:
                return None
            dims.append(b if isinstance(b, int) or a is None else a)
        return stated if tuple(dims) == stated.shape else TensorType(stated.dtype, dims)
    if type(stated) is not type(found):
        return None
    if isinstance(stated, (SequenceType, OptionalType)) and isinstance(
        found, (SequenceType, OptionalType)
    ):
        if stated.element is None or found.element is None:
            return found if stated.element is None else stated
        element = merge(stated.element, found.element)
        return None if element is None else type(stated)(element)
    return found
