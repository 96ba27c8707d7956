"""The pass "ReduceSegments": a loop over bags of rows becomes one operator, "SegmentSum".

PyTorch's exporter writes EmbeddingBag as a Loop whose turn ``i`` takes the rows from offset ``i``
to offset ``i + 1``, sums them, or takes zeros where there are none, and inserts what it has in a
sequence, which is joined after the loop. It is that if every number follows from constants: the
turns, so that none of them reads beyond the offsets, and what is sliced.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np

from subgraph.graph.graph import Graph, Node, Value
from subgraph.graph.parameters import Parameter
from subgraph.graph.types import TensorType
from subgraph.operators.schema import INTERNAL_DOMAIN
from subgraph.operators.type_inference import infer_graph
from subgraph.passes._patterns import is_op, produced_by
from subgraph.transform.pass_manager import register_pass

from .collect_sequences import appended

_SAME = ("Cast", "CastLike", "Identity", "Reshape", "Squeeze", "Unsqueeze")
_REDUCTIONS = {"ReduceSum": 0, "ReduceMean": 1}


@register_pass("ReduceSegments")
@attrs.frozen
class ReduceSegments:
    """Replace loops over bags of rows.

    Attributes:
        guards: Filled with the parameters whose content the result depends on, and the version
            that was read.
    """

    guards: dict[Parameter, int] = attrs.field(factory=dict[Parameter, int])

    def __call__(self, graph: Graph) -> Graph:
        """Return a copy without them."""
        graph = graph.clone()
        loops = [node for node in graph.nodes if is_op(node, "Loop")]
        if not any(appended(node, k) for node in loops for k in range(len(node.inputs) - 2)):
            return graph
        infer_graph(graph, strict=False)
        replaced: dict[Value, Value] = {}
        for node in loops:
            found = _Bags(node).replaced()
            if found is not None:
                replaced.update(found[0])
                self.guards.update((p, p.version) for p in found[1])
        graph.rewire(replaced)
        return graph


class _Bags:
    """Looks at one loop."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._body = node.bodies[0]
        self._outer = dict(zip(self._body.captures, node.captures, strict=True))
        self._turn: Value | None = None
        self._read: list[Parameter] = []

    def replaced(self) -> tuple[dict[Value, Value], list[Parameter]] | None:
        """Return what stands for what is joined, and what that depends on; None if it is not so."""
        node = self._node
        if len(node.inputs) != 4 or node.inputs[0] is not None:
            return None
        found = next((s for k in (0, 1) if (s := appended(node, k)) is not None), None)
        turns = None if found is None else self._turns(1 - found.position)
        segments = None if found is None or turns is None else self._segments(found.item, turns)
        if found is None or segments is None:
            return None
        rows, offsets, mean = segments
        note = {**(node.metadata or {}), "origin": (node.metadata or {}).get("origin", node.name)}
        made = Node(
            "SegmentSum",
            [rows, offsets],
            name=f"{node.name}.segments",
            domain=INTERNAL_DOMAIN,
            version=1,
            attrs={"mean": mean},
            metadata=note,
        )
        joined = [each for each in found.joined if not each.attrs.get("new_axis", 0)]
        if len(joined) != len(found.joined) or any(each.attrs["axis"] for each in joined):
            return None
        return {each.outputs[0]: made.outputs[0] for each in joined}, self._read

    def _number(self, value: Value | None) -> int | None:
        """Return the whole number or truth that a value is known to be."""
        while value is not None:
            value = self._outer.get(value, value)
            if value.parameter is not None:
                array = value.parameter.array
                self._read.append(value.parameter)
                whole = array.size == 1 and array.dtype.kind in "ib"
                return int(array.reshape(-1)[0]) if whole else None
            node = value.producer
            if node is not None and is_op(node, "Constant") and "value" in node.attrs:
                held = np.asarray(node.attrs["value"])
                whole = held.size == 1 and held.dtype.kind in "ib"
                return int(held.reshape(-1)[0]) if whole else None
            value = node.inputs[0] if node is not None and is_op(node, *_SAME) else None
        return None

    def _after(self, value: Value | None) -> int | None:
        """Return how much more than the number of the turn a value is, None if nobody knows."""
        if value is None or value is self._turn:
            return None if value is None else 0
        node = value.producer
        whole = isinstance(value.type, TensorType) and value.type.dtype == "int64"
        if node is None or node.domain or not whole:
            return None
        if node.op_type in _SAME:
            return self._after(node.inputs[0])
        if node.op_type != "Add":
            return None
        for one, other in (node.inputs, node.inputs[::-1]):
            base, more = self._after(one), self._number(other)
            if base is not None and more is not None:
                return base + more
        return None

    def _turns(self, position: int) -> int | None:
        """Return how many turns there are, if a carried value counts them and decides it."""
        node, body = self._node, self._body
        self._turn = body.inputs[2 + position]
        begins = self._number(node.inputs[2 + position]) == 0
        goes_on = self._after(body.outputs[1 + position]) == 1
        counted = node.outputs[position]
        unused = not counted.consumers and node.graph and not node.graph.gives(counted)
        less = body.outputs[0].producer
        if not (begins and goes_on and unused and is_op(less, "Less")) or less is None:
            return None
        if not self._number(node.inputs[1]):
            return None
        after, limit = self._after(less.inputs[0]), self._number(less.inputs[1])
        return None if after is None or limit is None else max(1, limit - after + 1)

    def _segments(self, item: Value, turns: int) -> tuple[Value, Value, int] | None:
        """Return the rows, the offsets, and whether means are taken."""
        choice = produced_by(item, "If")
        equal = None if choice is None else produced_by(choice.inputs[0], "Equal")
        if choice is None or equal is None:
            return None
        cuts = [self._cut(value) for value in equal.inputs]
        if None in cuts or [at for _, at in filter(None, cuts)] != [0, 1]:
            return None
        offsets = {source for source, _ in filter(None, cuts)}
        captured = iter(choice.captures)
        inside = {
            key: (body, {own: next(captured) for own in body.captures})
            for key, body in choice.attrs.items()
            if isinstance(body, Graph)
        }
        source = next(iter(offsets))
        type_ = source.type
        if len(offsets) != 1 or not isinstance(type_, TensorType) or type_.dtype != "int64":
            return None
        if type_.shape != (turns + 1,):
            return None
        reduced = self._reduced(*inside["else_branch"], equal.inputs)
        if reduced is None or not self._is_zero(inside["then_branch"][0], reduced[0]):
            return None
        return reduced[0], source, reduced[1]

    def _cut(self, value: Value | None) -> tuple[Value, int] | None:
        """Return of which value one element is taken, and how far after the turn's number."""
        node = produced_by(value, "Slice")
        if node is None or not self._along_rows(node):
            return None
        source = None if node.inputs[0] is None else self._outer.get(node.inputs[0])
        begin, end = (self._after(each) for each in node.inputs[1:3])
        if source is None or begin is None or end != begin + 1:
            return None
        return source, begin

    def _along_rows(self, node: Node) -> bool:
        """Return whether a Slice takes consecutive elements of the first axis."""
        axes, steps = [*node.inputs[3:], None, None][:2]
        first = axes is None or self._number(axes) == 0
        return len(node.inputs) > 2 and first and (steps is None or self._number(steps) == 1)

    def _reduced(
        self, body: Graph, inside: Mapping[Value, Value], ends: tuple[Value | None, ...]
    ) -> tuple[Value, int] | None:
        """Return the rows of which a branch reduces a slice, and whether to means."""
        reduce = produced_by(body.outputs[0], *_REDUCTIONS)
        cut = None if reduce is None else produced_by(reduce.inputs[0], "Slice")
        if reduce is None or cut is None or not self._along_rows(cut):
            return None
        axes: Any = reduce.attrs.get("axes")
        wanted = reduce.inputs[1] if len(reduce.inputs) > 1 else None
        if wanted is not None:
            axes = (self._number(inside.get(wanted, wanted)),)
        given = [inside.get(v) for v in cut.inputs[:3] if v is not None]
        rows = None if given[0] is None else self._outer.get(given[0])
        type_ = None if rows is None else rows.type
        if rows is None or tuple(given[1:]) != ends or axes is None or tuple(axes) != (0,):
            return None
        if not isinstance(type_, TensorType) or not type_.is_static or len(type_.shape or ()) != 2:
            return None
        if type_.dtype not in ("float32", "float64") or not reduce.attrs.get("keepdims", 1):
            return None
        return rows, _REDUCTIONS[reduce.op_type]

    def _is_zero(self, body: Graph, rows: Value) -> bool:
        """Return whether a branch gives one row of zeros."""
        (value,) = body.outputs
        array = None if value.parameter is None else value.parameter.array
        if array is None or value.parameter is None:
            node = value.producer
            held = None if not is_op(node, "Constant") or node is None else node.attrs.get("value")
            array = None if held is None else np.asarray(held)
        else:
            self._read.append(value.parameter)
        columns = rows.type.shape[1] if isinstance(rows.type, TensorType) and rows.type.shape else 0
        return array is not None and array.shape == (1, columns) and not array.any()
