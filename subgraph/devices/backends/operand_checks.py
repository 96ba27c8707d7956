"""`OperandChecks`: what a region's operands must satisfy, for libraries that do not check them.

A library that takes sizes or indices on trust would access memory outside a tensor. The operands of
all nodes are therefore checked before a run: their sizes once for each set of input shapes, the
elements of indices and counts at every run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs

from subgraph.errors import ShapeError
from subgraph.graph.graph import Graph, Node, Value
from subgraph.graph.limits import check_memory, size_in_bytes
from subgraph.graph.types import Array, TensorType, dtype_of
from subgraph.operators.inference import check_operands, elements_read, has_requirement
from subgraph.operators.shape_values import LIMIT, follows_from_shapes, from_array, to_array
from subgraph.operators.type_inference import infer_graph

_MAX_FORMS = 64  # sets of input shapes whose checks are kept (estimate)
_MAX_KEYS = 64  # contents of shape operands that are kept for a set of shapes (estimate)


@attrs.frozen(eq=False)
class _NodeCheck:
    """A node whose requirement reads elements of inputs of the region.

    Attributes:
        node: The node.
        types: Types of its operands.
        known: The elements of its operands that are known without a run.
        read: Positions of the operands that are inputs of the region, and their positions there.
    """

    node: Node
    types: Sequence[TensorType | None]
    known: Sequence[Array | None]
    read: Sequence[tuple[int, int]]

    def check(self, inputs: Sequence[Any]) -> None:
        values = list(self.known)
        for k, position in self.read:
            values[k] = inputs[position]
        try:
            check_operands(self.node, self.types, values)
        except ShapeError as error:
            where = f"node {self.node.name!r} ({self.node.op_type})"
            raise ShapeError(f"{where}: {error}") from error


@attrs.frozen(eq=False)
class _Checked:
    """A region whose sizes fit.

    Attributes:
        nodes: The checks of every run.
        decides: Positions of inputs whose elements decide sizes that are not known yet.
        decided: Whether nothing is left that cannot be checked before the run.
    """

    nodes: Sequence[_NodeCheck]
    decides: frozenset[int]
    decided: bool


class OperandChecks:
    """The checks of one region; the requests of a region have one each."""

    def __init__(self, subgraph: Graph) -> None:
        """Prepare to check the operands of the nodes of ``subgraph``."""
        self._subgraph = subgraph
        self._data = [k for k, v in enumerate(subgraph.inputs) if v.parameter is None]
        self._forms: dict[Any, dict[Any, _Checked]] = {}
        self._last: tuple[Any, _Checked] | None = None

    def check(self, inputs: Sequence[Any]) -> bool:
        """Return whether all operands were checked; False if some can only be during the run.

        Args:
            inputs: The arrays for the region's inputs; those of weights are not read.

        Raises:
            ShapeError: operands do not fit.
        """
        shapes = [inputs[k].shape for k in self._data]
        if self._last is None or self._last[0] != shapes:
            self._last = shapes, self._of(shapes, inputs)
        found = self._last[1]
        if found.decides:  # a key by shapes does not suffice
            found = self._of(shapes, inputs)
        for node in found.nodes:
            node.check(inputs)
        return found.decided

    def _of(self, shapes: list[tuple[int, ...]], inputs: Sequence[Any]) -> _Checked:
        """Return the checks for inputs of these shapes."""
        forms = self._forms.setdefault(tuple(shapes), {})
        if len(self._forms) > _MAX_FORMS:
            del self._forms[next(iter(self._forms))]
        decides: frozenset[int] = frozenset()
        while True:
            key = tuple((k, inputs[k].tobytes()) for k in sorted(decides))
            found = forms.get(key)
            if found is None:
                if len(forms) > _MAX_KEYS:
                    forms.clear()
                found = forms[key] = self._checked(inputs, decides)
            if found.decides <= decides:
                return found
            decides |= found.decides

    def _checked(self, inputs: Sequence[Any], decides: frozenset[int]) -> _Checked:
        copy, _ = self._subgraph.clone_with_map()
        places = {value: k for k, value in enumerate(copy.inputs) if value.parameter is None}
        for value in copy.values():
            if value.producer is not None:
                value.type = None
        for value, k in places.items():
            value.type = TensorType(dtype_of(inputs[k]), inputs[k].shape)
        copy.inputs = tuple(places)  # weights stay parameters
        known = infer_graph(
            copy, known={v: from_array(inputs[k]) for v, k in places.items() if k in decides}
        )
        for node in copy.nodes:
            types = [v.type for v in node.outputs if isinstance(v.type, TensorType)]
            check_memory(sum(map(size_in_bytes, types)), f"node {node.name!r} ({node.op_type})")
        nodes: list[_NodeCheck] = []
        more, decided = set(decides), True
        for node in copy.nodes:
            if not has_requirement(node) and not node.bodies:
                continue
            static = all(_is_static(value) for value in node.sources)
            if node.bodies or not static:
                decided = False
                continue
            found = _node_check(node, known, places)
            if found is None:
                decided = False
            elif found.read:
                nodes.append(found)
            if found is not None and not all(map(_is_static, node.outputs)):
                more.update(k for _, k in found.read if inputs[k].size <= LIMIT)
        return _Checked(nodes, frozenset(more), decided)


def _is_static(value: Value) -> bool:
    return isinstance(value.type, TensorType) and value.type.is_static


def _node_check(
    node: Node, known: Mapping[Value, Array | None], places: Mapping[Value, int]
) -> _NodeCheck | None:
    """Return the check of a node; None if it reads elements that the region computes.

    Args:
        node: The node; the types of its operands are static.
        known: Shape values of the region.
        places: Position of each value that is an input of the region.
    """
    types = _types_of(node)
    elements: list[Array | None] = []
    read: list[tuple[int, int]] = []
    for value in node.inputs:
        if value is None:
            elements.append(None)
        elif value.parameter is not None:
            elements.append(value.parameter.array)
        else:
            elements.append(to_array(known.get(value), value.type))
    for k in elements_read(node, types):
        value = node.inputs[k]
        if value is None or elements[k] is not None:
            continue
        if value not in places:
            return None
        read.append((k, places[value]))
    return _NodeCheck(node, types, elements, read)


def computed_elements(node: Node) -> Iterator[Value]:
    """Yield the operands whose elements a node's requirement reads and other nodes compute.

    Those that follow from shapes and constants do not count.
    """
    for k in elements_read(node, _types_of(node)):
        value = node.inputs[k]
        if value is not None and value.producer is not None and not follows_from_shapes(value):
            yield value


def pools_nothing(node: Node) -> bool:
    """Return whether a node is a global pooling of an input without axes to pool.

    Libraries compile it and then fail, or pool all axes.
    """
    first = _types_of(node)[0] if node.op_type.startswith("Global") else None
    return first is not None and first.rank is not None and first.rank < 3


def has_input(node: Node, position: int) -> bool:
    """Return whether a node's input at a position is given."""
    return len(node.inputs) > position and node.inputs[position] is not None


def depends_on_scales(node: Node) -> bool:
    """Return whether the positions that a Resize samples depend on how its scales are rounded.

    Libraries round the size before they align corners by scales. They compute positions in float32,
    so that the nearest pixel is another one where scales are not whole, 1/2, 1/4, and so on.
    """
    if has_input(node, 3):
        return False
    if node.attrs.get("coordinate_transformation_mode", "half_pixel") == "align_corners":
        return True
    scales = node.inputs[-1]
    if node.attrs.get("mode", "nearest") != "nearest":
        return False
    if scales is None or scales.parameter is None:
        return True
    factors: list[float] = scales.parameter.array.reshape(-1).tolist()
    return not all(f > 0 and (f.is_integer() or (1 / f).is_integer()) for f in factors)


def has_whole_scales(node: Node) -> bool:
    """Return whether scale and bias of a LayerNormalization have the sizes of what is normalized.

    In ONNX they may be broadcast; libraries read as many elements as are normalized. Other
    operators have no such operands.
    """
    if node.op_type != "LayerNormalization":
        return True
    shapes = [type_.shape for type_ in _types_of(node) if type_ is not None]
    if any(shape is None for shape in shapes):
        return False
    first, *others = ([*shape] for shape in shapes if shape is not None)
    normalized = first[int(node.attrs.get("axis", -1)) :]
    # A known size above 1 fits no other size than itself.
    return all(
        len(shape) == len(normalized)
        and all(
            n == m or (isinstance(n, int) and n > 1) for n, m in zip(shape, normalized, strict=True)
        )
        for shape in others
    )


def has_computed_sizes(node: Node) -> bool:
    """Return whether sizes of the results follow from elements that no requirement reads.

    So do those of NonZero, and not those of a Reshape, whose operand decides them.
    """
    if any(map(_has_unknown, node.sources)) or not any(map(_has_unknown, node.outputs)):
        return False
    return not elements_read(node, _types_of(node))


def _has_unknown(value: Value) -> bool:
    shape = value.type.shape if isinstance(value.type, TensorType) else None
    return shape is None or None in shape


def _types_of(node: Node) -> list[TensorType | None]:
    """Return the types of a node's operands; None for one that is omitted or no tensor."""
    return [
        value.type if value is not None and isinstance(value.type, TensorType) else None
        for value in node.inputs
    ]
