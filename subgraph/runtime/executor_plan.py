"""Plans of the default executor: a graph prepared once for all requests.

A `Plan` has a slot for each value, a step for each node, the slots that are freed after each step,
and a schedule if regions may run at the same time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs

from subgraph.graph.graph import Graph, Node, Value
from subgraph.graph.parameters import Parameter
from subgraph.operators.subgraph_op import DefaultSubgraphOp, Fallback, SubgraphOp, fallback_of
from subgraph.runtime.step_schedule import HOST, Schedule, Work, make_schedule

_NONE = 0  # the slot of an omitted input


@attrs.define(eq=False)
class Step:
    """A node with the slots of its values.

    Attributes:
        node: The node.
        op: Its subgraph op; None for other nodes.
        inputs: Slots of its inputs, and of the values that its bodies capture.
        outputs: Slots of its outputs.
        data_slots: Slots of a subgraph node's inputs that are not weights; None if a run may
            replace one of the weights.
        bodies: Plans of its bodies, in the order of its attributes.
        free: Slots that are set to None after the step.
    """

    node: Node
    op: SubgraphOp | None
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    data_slots: tuple[int, ...] | None
    bodies: list[Plan]
    free: tuple[int, ...] = ()

    @property
    def fallback(self) -> Fallback | None:
        """The devices that run the op's region if it fails; None for none."""
        return None if self.op is None else fallback_of(self.node)

    def work(self) -> Work:
        """Return the step's slots and device, for the schedule."""
        op = self.op
        if op is None or (type(op) is DefaultSubgraphOp and op.device == SubgraphOp.device):
            return Work(self.inputs, self.outputs, HOST)
        return Work(self.inputs, self.outputs, op.device, True, op.concurrent)


class Plan:
    """A graph prepared for executors; immutable, shared by all requests.

    Attributes:
        graph: The graph; it must not change any more.
        parameters: Every parameter that a run reads: of nodes, bodies and inner graphs.
        slots: Number of slots; slot 0 stands for omitted inputs and always holds None.
        arrays: Slots that hold a parameter's array, with the parameter.
        objects: Slots that hold a parameter itself, for subgraph nodes.
        inputs: For each input and capture of the graph its slot, and the slot for the Parameter
            itself if a run may pass one, else 0.
        plain_inputs: The slots of the inputs, which are consecutive, if none may be a Parameter;
            else None.
        steps: The steps in topological order.
        outputs: Slots of the outputs.
        only: If the graph is one subgraph node: positions of the graph's inputs that the node reads
            besides weights, and for each output of the graph its position among the node's outputs.
        schedule: The steps that may overlap; None if none may.
    """

    def __init__(self, graph: Graph, *, parallel: bool = True) -> None:
        """Assign slots and prepare a step for each node.

        Args:
            graph: The graph.
            parallel: Whether regions of different devices may run at the same time.
        """
        self.graph = graph
        self._parallel = parallel
        self.parameters = all_parameters(graph)
        self.slots = 1
        self._array_slot: dict[Value, int] = {}
        self._parameter_slot: dict[Value, int] = {}
        self.arrays: list[tuple[int, Parameter]] = []
        self.objects: list[tuple[int, Parameter]] = []
        self._replaceable = {*graph.inputs, *graph.captures}  # a run may replace their defaults
        self.inputs = tuple(
            (self._new_slot(value), self._slot_of_object(value) if value.parameter else _NONE)
            for value in (*graph.inputs, *graph.captures)
        )
        has_defaults = any(slot for _, slot in self.inputs)
        self.plain_inputs = None if has_defaults else slice(1, 1 + len(self.inputs))
        self.steps = [self._step(node) for node in graph.nodes]
        self.outputs = tuple(self._slot_of_array(value) for value in graph.outputs)
        self.schedule = self._schedule() if parallel else None
        self.only = self._only()
        # The schedule comes first, since it decides which slots its tasks free.
        self._mark_deaths()

    def all_steps(self) -> Iterator[Step]:
        """Yield all steps, including those of bodies."""
        for step in self.steps:
            yield step
            for body in step.bodies:
                yield from body.all_steps()

    def ops(self) -> Iterator[SubgraphOp]:
        """Yield the ops of subgraph nodes, including those in bodies."""
        return (step.op for step in self.all_steps() if step.op is not None)

    def _new_slot(self, value: Value) -> int:
        slot = self._array_slot[value] = self.slots
        self.slots += 1
        if value.parameter is not None:
            self.arrays.append((slot, value.parameter))
        return slot

    def _slot_of_array(self, value: Value) -> int:
        slot = self._array_slot.get(value)
        return self._new_slot(value) if slot is None else slot

    def _slot_of_object(self, value: Value) -> int:
        if value.parameter is None:
            return self._slot_of_array(value)
        slot = self._parameter_slot.get(value)
        if slot is None:
            slot = self._parameter_slot[value] = self.slots
            self.slots += 1
            self.objects.append((slot, value.parameter))
        return slot

    def _step(self, node: Node) -> Step:
        op = node.op
        if op is None and node.subgraph is not None:
            # A fused node or region without an op runs its inner graph in Python.
            op = DefaultSubgraphOp(node.subgraph)
        slot_of = self._slot_of_array if op is None else self._slot_of_object
        inputs = tuple(_NONE if v is None else slot_of(v) for v in node.inputs)
        data_slots = None if op is None else self._data_slots(node, op, inputs)
        inputs += tuple(self._slot_of_array(v) for v in node.captures)
        outputs = tuple(self._slot_of_array(v) for v in node.outputs)
        bodies = node.bodies if node.attrs else ()
        plans = [Plan(body, parallel=self._parallel) for body in bodies]
        return Step(node, op, inputs, outputs, data_slots, plans)

    def _schedule(self) -> Schedule | None:
        if len({step.op for step in self.steps if step.op is not None}) < 2:
            return None
        return make_schedule([step.work() for step in self.steps], set(self.outputs))

    def _data_slots(
        self, node: Node, op: SubgraphOp, slots: Sequence[int]
    ) -> tuple[int, ...] | None:
        found: list[int] = []
        for outer, inner, slot in zip(node.inputs, op.subgraph.inputs, slots, strict=True):
            if inner.parameter is None:
                found.append(slot)
            elif (
                outer is None
                or outer.parameter is not inner.parameter
                or outer in self._replaceable
            ):
                return None
        return tuple(found)

    def _only(self) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        slots = [slot for slot, _ in self.inputs]
        if len(self.steps) != 1:
            return None
        step = self.steps[0]
        if step.data_slots is None or not {*step.data_slots} <= {*slots}:
            return None
        if not {*self.outputs} <= {*step.outputs}:
            return None
        input_at, output_at = (
            {slot: k for k, slot in enumerate(each)} for each in (slots, step.outputs)
        )
        return (
            tuple(input_at[slot] for slot in step.data_slots),
            tuple(output_at[slot] for slot in self.outputs),
        )

    def _mark_deaths(self) -> None:
        """Set the slots that each step frees: those that no later step reads."""
        # Slots of inputs and parameters are not freed: the caller or the model keeps these arrays
        # alive anyway.
        made = {slot for step in self.steps for slot in step.outputs}
        seen = set(self.outputs)
        if self.schedule is not None:
            seen.update(self.schedule.readers)  # the last task that reads such a slot frees it
        for step in reversed(self.steps):
            # Walking backwards, the first step that mentions a slot is its last reader. An output
            # that nobody reads is freed by the step that makes it.
            last = {s for s in (*step.inputs, *step.outputs) if s in made and s not in seen}
            seen |= last
            step.free = tuple(sorted(last))


def all_parameters(graph: Graph) -> tuple[Parameter, ...]:
    """Return every parameter that a run of a graph reads, also in bodies and inner graphs."""
    found: dict[Parameter, None] = {}
    work = [graph]
    while work:
        current = work.pop()
        # The inner graph of an imported region is not read from its file for this; its inputs list
        # its parameters.
        if not current.is_loaded:
            found.update((v.parameter, None) for v in current.inputs if v.parameter is not None)
            continue
        found.update((p, None) for p in current.parameters.values())
        for node in current.nodes:
            if node.attrs:
                work.extend(node.bodies)
            if node.subgraph is not None:
                work.append(node.subgraph)
    return tuple(found)
