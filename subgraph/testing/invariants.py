"""`check_partition`: checks the invariants of a partition from the graphs before and after.

The check takes time linear in nodes and edges, and uses nothing of the code that partitions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from subgraph.errors import PartitionError, SubgraphError, require_type
from subgraph.graph.graph import Graph, Node, Value
from subgraph.graph.parameters import Parameter
from subgraph.graph.types import Array
from subgraph.operators.operator import operator_of
from subgraph.operators.reference import evaluate
from subgraph.partition.record import KEY, MADE, PartitionRecord

Source = Value | Parameter | None
# A body before and after, and what the captures of the first stand for if they are constant.
_Bodies = tuple[Graph, Graph, Mapping[Value, Parameter | Array]]


def check_partition(
    before: Graph,
    after: Graph,
    *,
    inputs: Mapping[str, Any] | Sequence[Any] | None = None,
    rtol: float = 1e-5,
    atol: float = 1e-6,
) -> None:
    """Check that ``after`` is a correct partition of ``before``, in linear time.

    The invariants, by number:

    1. Regions are disjoint, and no node is missing.
    2. Each region is weakly connected.
    3. Each region is convex.
    4. The graph in which every region is one node has no cycle.
    5. A selector chose every node of a region, according to the partition's record if there is one.
    6. Subgraph nodes list each output once, and those with an op of their own each input; the
       graph's own inputs and outputs are unchanged.
    7. Every node computes the same from the same values; a parameter may replace a constant
       subgraph of equal value, also where a body captures it.

    Bodies of control-flow nodes are checked, too.

    Args:
        before: The graph that was partitioned.
        after: The partitioned graph.
        inputs: If not None, both graphs run on these inputs on the device REFERENCE, and the
            results must agree.
        rtol: Relative tolerance of that comparison.
        atol: Absolute tolerance of that comparison.

    Raises:
        PartitionError: an invariant is broken; the message has its number and the node or value.
    """
    for graph in (before, after):
        require_type(graph, Graph, PartitionError, "the graphs before and after the partition")
    work: list[_Bodies] = [(before, after, {})]
    while work:
        checker = _Checker(*work.pop())
        checker.check()
        work += checker.bodies
    if inputs is not None:
        names = [value.name for value in before.outputs]
        expected, got = run_reference(before, inputs), run_reference(after, inputs)
        check_results(expected, got, names, rtol, atol)


def _fail(number: int, text: str) -> NoReturn:
    raise PartitionError(f"invariant {number}: {text}")


class _Checker:
    """Check of one graph, without its bodies.

    Attributes:
        before: The graph that was partitioned.
        after: The partitioned graph.
        bodies: Bodies of control-flow nodes that are still to be checked.
    """

    def __init__(
        self, before: Graph, after: Graph, captured: Mapping[Value, Parameter | Array]
    ) -> None:
        self.before = before
        self.after = after
        self.bodies: list[_Bodies] = []
        self._captured = captured
        self._nodes = {node.name: node for node in before.nodes}
        self._ends = frozenset(before.inputs)
        self._region: dict[Node, Node] = {}  # node before -> subgraph node after
        self._seen: set[Node] = set()
        self._known: dict[Value, Array] | None = None

    def check(self) -> None:
        """Check all invariants, and collect the bodies.

        Raises:
            PartitionError: an invariant is broken.
        """
        try:
            self.after.verify()
        except SubgraphError as error:
            raise PartitionError(f"the partitioned graph does not verify: {error}") from error
        self._check_ends()
        self._walk()
        lost = [
            node.name
            for node in self.before.nodes
            if node not in self._seen
            and not all(value in self._constants() for value in node.outputs)
        ]
        if lost:
            _fail(1, f"node {lost[0]!r} is gone; {len(lost)} of {len(self._nodes)} are missing")
        self._check_connected()
        self._check_order()
        self._check_record()

    def _check_ends(self) -> None:
        for what, old, new in (
            ("inputs", self.before.inputs, self.after.inputs),
            ("outputs", self.before.outputs, self.after.outputs),
            ("captures", self._kept_captures(), self.after.captures),
        ):
            if [v.name for v in old] != [v.name for v in new]:
                _fail(6, f"{what} were {[v.name for v in old]}, are {[v.name for v in new]}")
        for was, now in zip(self.before.inputs, self.after.inputs, strict=True):
            if was.type != now.type or was.parameter is not now.parameter:
                _fail(6, f"input {was.name!r} changed from {was.type} to {now.type}")

    def _kept_captures(self) -> list[Value]:
        """Return the old captures but for the constant ones that the new graph does not have."""
        there = {value.name for value in self.after.captures}
        return [v for v in self.before.captures if v.name in there or v not in self._captured]

    def _canonical(self, value: Value | None) -> Source:
        held = None if value is None else self._captured.get(value)
        if isinstance(held, Parameter):
            return held
        if value is not None and value.parameter is not None and value not in self._ends:
            return value.parameter
        return value

    def _walk(self) -> None:
        """Map every value of the new graph to the old value that it stands for; check all nodes."""
        env: dict[Value, Source] = {}
        for old, new in (
            *zip(self.before.inputs, self.after.inputs, strict=True),
            *zip(self._kept_captures(), self.after.captures, strict=True),
        ):
            env[new] = self._canonical(old)
        # (node, subgraph node around it, whether the nodes inside it have been checked)
        # An explicit stack, because regions may be nested deeply.
        stack: list[tuple[Node, Node | None, bool]] = [
            (node, None, False) for node in reversed(self.after.nodes)
        ]
        while stack:
            node, holder, entered = stack.pop()
            if node.subgraph is None or self._was_there(node):
                self._check_node(node, holder, env)
            elif entered:
                for outer, inner in zip(node.outputs, node.subgraph.outputs, strict=True):
                    env[outer] = self._carried(inner, env)
            else:
                self._enter(node, env)
                stack.append((node, holder, True))
                inside = reversed(node.subgraph.nodes)
                stack += [(inner, holder or node, False) for inner in inside]
        for old, new in zip(self.before.outputs, self.after.outputs, strict=True):
            if self._carried(new, env) is not self._canonical(old):
                _fail(7, f"output {old.name!r} is now another value")

    def _was_there(self, node: Node) -> bool:
        old = self._nodes.get(node.name)
        return old is not None and old.subgraph is not None and old.subgraph is node.subgraph

    def _carried(self, value: Value | None, env: Mapping[Value, Source]) -> Source:
        if value is None or value in env:
            return None if value is None else env[value]
        if value.parameter is None:
            _fail(7, f"value {value.name!r} has no source in the partitioned graph")
        return value.parameter

    def _enter(self, node: Node, env: dict[Value, Source]) -> None:
        inner = node.subgraph
        assert inner is not None
        given = [self._carried(value, env) for value in node.inputs]
        # The inputs of a fused operator are its operands by position, one of which may be omitted,
        # or be the same value as another: ``x + MatMul(x, w)``.
        listed = [*([] if node.op is None else given), *inner.outputs]
        if len({id(item) for item in listed}) != len(listed):
            what = "output" if len(set(inner.outputs)) != len(inner.outputs) else "input"
            _fail(6, f"subgraph node {node.name!r} lists an {what} twice")
        for value, source in zip(inner.inputs, given, strict=True):
            if value.parameter is not None and value.parameter is not source:
                _fail(
                    7,
                    f"input {value.name!r} of subgraph node {node.name!r} stands for parameter "
                    f"{value.parameter.name!r}, but another value is connected",
                )
            env[value] = source

    def _check_node(self, node: Node, holder: Node | None, env: dict[Value, Source]) -> None:
        old = self._nodes.get(node.name)
        where = "" if holder is None else f" in subgraph node {holder.name!r}"
        if old is None:
            _fail(1, f"node {node.name!r}{where} was not in the graph")
        if old in self._seen:
            _fail(1, f"node {node.name!r}{where} is there twice: regions are not disjoint")
        self._seen.add(old)
        if holder is not None:
            self._region[old] = holder
        kind = (node.op_type, node.domain, node.version, len(node.outputs), node.metadata)
        if kind != (old.op_type, old.domain, old.version, len(old.outputs), old.metadata):
            _fail(7, f"node {node.name!r}{where} is now another operator: {kind}")
        self._check_attrs(old, node, where)
        for what, mine, theirs in (
            ("input", node.inputs, old.inputs),
            ("capture", node.captures, self._captures_left(old, node)),
        ):
            carried = [self._carried(value, env) for value in mine]
            expected = [self._canonical(value) for value in theirs]
            for position, (got, wanted) in enumerate(zip(carried, expected, strict=False)):
                if got is not wanted and not self._is_folded(got, wanted):
                    name = getattr(got, "name", None)
                    right = getattr(wanted, "name", None)
                    text = f"{what} {position} of node {node.name!r}{where}"
                    _fail(7, f"{text} is {name!r}, was {right!r}")
            if len(carried) != len(expected):
                _fail(7, f"node {node.name!r}{where} has another number of {what}s")
        for result, source in zip(node.outputs, old.outputs, strict=True):
            env[result] = source

    def _captures_left(self, old: Node, new: Node) -> list[Value]:
        """Return the old captures but for the constant ones that the new node's bodies lost."""
        outer = iter(old.captures)
        left: list[Value] = []
        for theirs, mine in _body_pairs(old, new):
            there = {value.name for value in mine.captures}
            pairs = list(zip(theirs.captures, outer, strict=False))
            constant = self._constant_values([value for _, value in pairs])
            left += [o for v, o in pairs if v.name in there or o not in constant]
        return left

    def _constant_values(self, values: Iterable[Value]) -> dict[Value, Parameter | Array]:
        """Return the Parameters or arrays of those old values that are constant."""
        found: dict[Value, Parameter | Array] = {}
        for value in values:
            source = self._canonical(value)
            if isinstance(source, Parameter):
                found[value] = source
            elif value in self._constants():
                found[value] = self._constants()[value]
        return found

    def _is_folded(self, got: Source, wanted: Source) -> bool:
        """Return whether ``got`` is a Parameter with the value of a constant old value."""
        if not isinstance(got, Parameter) or not isinstance(wanted, Value):
            return False
        array = self._constants().get(wanted)
        return array is not None and _equal(got.array, array)

    def _constants(self) -> Mapping[Value, Array]:
        """Return the values of the old graph's nodes that depend on constants and shapes only."""
        if self._known is None:
            self._known = {v: a for v, a in self._captured.items() if isinstance(a, np.ndarray)}
            for node in self.before.nodes:
                for value, array in zip(node.outputs, _results(node, self._known), strict=False):
                    if array is not None:
                        self._known[value] = np.asarray(array)
        return self._known

    def _check_attrs(self, old: Node, new: Node, where: str) -> None:
        if old.attrs.keys() != new.attrs.keys():
            _fail(7, f"node {new.name!r}{where} has other attributes: {sorted(new.attrs)}")
        for key, theirs in old.attrs.items():
            mine = new.attrs[key]
            if isinstance(theirs, Graph) and isinstance(mine, Graph):
                continue
            if mine is not theirs and not _equal(mine, theirs):
                _fail(7, f"attribute {key!r} of node {new.name!r}{where} changed")
        outer = iter(old.captures)
        for theirs, mine in _body_pairs(old, new):
            pairs = list(zip(theirs.captures, outer, strict=False))
            constant = self._constant_values([value for _, value in pairs])
            captured = {v: constant[o] for v, o in pairs if o in constant}
            self.bodies.append((theirs, mine, captured))

    def _check_connected(self) -> None:
        group = {node: node for node in self._region}

        def find(node: Node) -> Node:
            while group[node] is not node:
                # Union-find with path halving: near linear time for any shape of region.
                group[node] = group[group[node]]
                node = group[node]
            return node

        for node, holder in self._region.items():
            for other in node.predecessors():
                if self._region.get(other) is holder:
                    group[find(node)] = find(other)
        first: dict[Node, Node] = {}
        for node, holder in self._region.items():
            root = find(node)
            if first.setdefault(holder, root) is not root:
                _fail(
                    2,
                    f"subgraph node {holder.name!r} is not connected: nothing links "
                    f"{node.name!r} with {first[holder].name!r} inside",
                )

    def _check_order(self) -> None:
        """Sort the graph in which every region is one node topologically (Kahn's algorithm)."""
        waits: dict[Node, set[Node]] = {}
        feeds: dict[Node, list[Node]] = {}
        for node in self.before.nodes:
            here = self._region.get(node, node)
            mine = waits.setdefault(here, set())
            for other in node.predecessors():
                there = self._region.get(other, other)
                if there is not here and there not in mine:
                    mine.add(there)
                    feeds.setdefault(there, []).append(here)
        left = {node: len(sources) for node, sources in waits.items()}
        ready = [node for node, count in left.items() if not count]
        while ready:
            node = ready.pop()
            del left[node]
            for other in feeds.get(node, ()):
                left[other] -= 1
                if not left[other]:
                    ready.append(other)
        # Nodes that are left wait for each other. A region that is not convex waits for itself over
        # a node outside, so one sort finds both faults.
        if left:
            self._fail_cycle(left, waits)

    def _fail_cycle(self, left: Mapping[Node, int], waits: Mapping[Node, set[Node]]) -> NoReturn:
        # By name, so that the message is the same in every run.
        node = min(left, key=lambda n: n.name)
        passed: dict[Node, int] = {}
        path: list[Node] = []
        while node not in passed:
            passed[node] = len(path)
            path.append(node)
            node = min((n for n in waits[node] if n in left), key=lambda n: n.name)
        cycle = path[passed[node] :][::-1]
        regions = [n for n in cycle if n.subgraph is not None and n.name not in self._nodes]
        shown = " -> ".join(repr(n.name) for n in (*cycle, cycle[0]))
        if len(regions) == 1:
            _fail(3, f"region {regions[0].name!r} is not convex: {shown}")
        _fail(4, f"regions wait for each other: {shown}")

    def _check_record(self) -> None:
        record = self.after.attrs.get(KEY)
        if not isinstance(record, PartitionRecord):
            return
        members: dict[str, set[str]] = {}
        for node, holder in self._region.items():
            members.setdefault(holder.name, set()).add(node.name)
        for run in record.runs:
            found: dict[int, set[str]] = {}
            for number, position in enumerate(run.region):
                if position >= 0:
                    found.setdefault(position, set()).add(run.names[number])
                    if run.via[number] < 0:
                        _fail(5, f"no selector chose node {run.names[number]!r}")
            for position, note in enumerate(run.regions):
                if note.status == MADE and note.node in members:
                    strange = members[note.node] ^ found.get(position, set())
                    if strange:
                        _fail(
                            5,
                            f"subgraph node {note.node!r} differs from the region that was chosen: "
                            f"{sorted(strange)[0]!r}",
                        )


def _body_pairs(old: Node, new: Node) -> Iterator[tuple[Graph, Graph]]:
    """Yield the bodies of two nodes that have attributes of the same names."""
    for key, theirs in old.attrs.items():
        mine = new.attrs[key]
        if isinstance(theirs, Graph) and isinstance(mine, Graph):
            yield theirs, mine


def _results(node: Node, known: Mapping[Value, Array]) -> Sequence[Any]:
    """Return the outputs of a node whose inputs are all constant; none for other nodes."""
    if node.domain or node.subgraph is not None or node.bodies:
        return ()
    given: list[Array | None] = []
    for position, value in enumerate(node.inputs):
        array = None if value is None else known.get(value)
        if value is not None and array is None:
            # Parameters that are shapes may be folded by passes: they cannot be assigned.
            if value.parameter is None or position != operator_of(node).shape_at:
                return ()
            array = value.parameter.array
        given.append(array)
    if node.op_type != "Constant" and not any(array is not None for array in given):
        return ()
    try:
        return evaluate(node, given)
    except SubgraphError:
        return ()


def _equal(one: Any, two: Any) -> bool:
    if np.ndarray in (type(one), type(two)):
        left, right = np.asarray(one), np.asarray(two)
        return (
            left.dtype == right.dtype
            and left.shape == right.shape
            and bool(
                # Bytes, because NaN equals itself there and 0.0 differs from -0.0.
                left.tobytes() == right.tobytes() if left.dtype != object else (left == right).all()
            )
        )
    return bool(one == two)


def run_reference(graph: Graph, inputs: Mapping[str, Any] | Sequence[Any]) -> list[Any]:
    """Return the results of ``graph`` on the device REFERENCE, by position."""
    from subgraph.devices.default_core import compile_model

    results = compile_model(graph, "REFERENCE", {"RUNTIME_FALLBACK": False})(inputs)
    return [results[position] for position in range(len(graph.outputs))]


def check_results(
    expected: Iterable[Any], got: Iterable[Any], names: Iterable[str], rtol: float, atol: float
) -> None:
    """Compare results output by output; NaN equals NaN.

    Args:
        expected: The results of the reference.
        got: The results to check.
        names: Names of the outputs.
        rtol: Relative tolerance, of floats only.
        atol: Absolute tolerance, of floats only.

    Raises:
        PartitionError: they differ (invariant 7); the message has the output and an element.
    """
    for name, one, two in zip(names, expected, got, strict=True):
        if all(hasattr(item, "append") for item in (one, two)):  # sequences
            parts = [f"{name}[{k}]" for k in range(len(one))]
            check_results(one, two, parts, rtol, atol)
            continue
        left: Array = np.asarray(one)
        right: Array = np.asarray(two)
        if left.dtype != right.dtype or left.shape != right.shape:
            _fail(
                7,
                f"output {name!r} was {left.dtype}{list(left.shape)}, is "
                f"{right.dtype}{list(right.shape)}",
            )
        if left.dtype.kind in "fc" or left.dtype.name.startswith(("bfloat", "float")):
            wide = np.complex128 if left.dtype.kind == "c" else np.float64
            left, right = left.astype(wide), right.astype(wide)
            same = np.isclose(left, right, rtol=rtol, atol=atol, equal_nan=True)
        else:
            same = np.asarray(left == right)
        if not same.all():
            where = tuple(int(k) for k in np.argwhere(~same)[0])
            _fail(
                7,
                f"output {name!r} differs at {where}: {left[where]} was expected, got "
                f"{right[where]} ({int((~same).sum())} of {same.size} elements)",
            )
