"""The subgraph op of the CPU device: an inner graph, and its plans for the shapes seen.

Plans are shared by all sessions (`region_session`), and kept for the shapes used last. When a
parameter that a fusion or a plan has looked at changes, the graph is fused or planned anew; every
other parameter only changes its weights. Where a shape only follows from values that the graph
itself computes, it is cut there, and each part planned when the values before it are known.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary

import attrs
import numpy as np

from subgraph.engine.planner.argument_layout import ArgumentLayout, lay_out
from subgraph.engine.planner.concrete_types import concrete
from subgraph.engine.planner.dry_run import Trial
from subgraph.engine.planner.plan import make_plan
from subgraph.engine.planner.plan_types import Plan, PlanOptions, UnknownShapeError
from subgraph.engine.planner.stored_program import StoredProgram
from subgraph.engine.planner.stored_program import describe as describe_program
from subgraph.engine.planner.stored_program import read as read_program
from subgraph.engine.planner.symbolic_plan import Instance, Templates
from subgraph.engine.program.pool import Pool
from subgraph.engine.region.region_session import CpuSession
from subgraph.engine.region.split_plan import cut_at
from subgraph.engine.region.stored_fusion import describe, rebuild
from subgraph.errors import SubgraphError
from subgraph.graph.graph import Graph
from subgraph.graph.parameters import Parameter, Snapshot, Versions
from subgraph.graph.types import Array, TensorType, dtype_of, numpy_dtype
from subgraph.operators.subgraph_op import (
    DefaultSubgraphOp,
    ExportFile,
    ImportFile,
    Session,
    SubgraphOp,
)
from subgraph.runtime.executor_plan import Plan as Parts
from subgraph.runtime.executor_plan import all_parameters
from subgraph.runtime.fast_ops import gives_size
from subgraph.system import guard_pages
from subgraph.system.forking import free_in_child
from subgraph.weights.cache import WeightCache, WeightEntry

Guards = tuple[tuple[Parameter, int], ...]
_Key = tuple[Any, ...]
_SELECTED = 8  # contents of an input that is taken to select a branch, or one of few sizes
# Sizes to try where weights are prepared and dimensions not known: of the first one, of others.
_SIZES = ((1, 64), (1, 224), (16, 64))


@attrs.frozen
class RegionOptions:
    """How a region is run.

    Attributes:
        plan: What plans depend on.
        pools: The threads of each stream; none for the caller's alone.
        plans: How many plans are kept.
        profiling: Whether runs are measured.
        compile_seconds: How long planning and compiling for new shapes may take; 0: any time.
    """

    plan: PlanOptions = attrs.field(factory=PlanOptions)
    pools: tuple[Pool, ...] = ()
    plans: int = 16
    profiling: bool = False
    compile_seconds: float = 0.0


class CpuSubgraphOp(SubgraphOp):
    """Runs a graph by plans of compiled kernels.

    Attributes:
        subgraph: The graph as it was given; ``fused`` is what runs.
        given: Positions of the inputs that are no weights.
        options: How it is run.
        parameters: All parameters of the graph.
        fusion: What ``fuse`` depends on beside the graph, as text.
    """

    device = "CPU"
    fusion = ""

    def __init__(
        self,
        subgraph: Graph,
        options: RegionOptions,
        fuse: Callable[[Graph], tuple[Graph, Guards]],
    ) -> None:
        """Take a graph.

        Args:
            subgraph: The graph.
            options: How it is run.
            fuse: Returns the graph to run, whose inputs are those of ``subgraph`` that are no
                weights, and the parameters whose content it depends on.
        """
        super().__init__(subgraph)
        self.options = options
        self.given = tuple(k for k, v in enumerate(subgraph.inputs) if v.parameter is None)
        self._sessions = count()
        self._fuse = fuse
        self._lock = free_in_child(threading.RLock())
        self._plans: OrderedDict[_Key, Plan | Instance] = OrderedDict()
        self._templates = Templates()
        self._laid: WeakKeyDictionary[Plan, ArgumentLayout] = WeakKeyDictionary()
        self._fused: tuple[Graph, Versions] | None = None
        self._kept: tuple[Mapping[str, Any], Guards] | None = None
        self._programs: list[StoredProgram] = []
        self._trial: Trial | None = None
        self._value_inputs: tuple[int, ...] = ()
        self._selected: tuple[UnknownShapeError, set[_Key]] | None = None
        self._parts: tuple[Graph, Parts] | None = None
        self.parameters = all_parameters(subgraph)

    @property
    def fused(self) -> Graph:
        """The graph that runs, fused for the present parameters."""
        with self._lock:
            if self._fused is None:
                self._fused = self._fused_before()
            if self._fused is None or not self._fused[1].hold():
                graph, guards = self._fuse(self.subgraph)
                self._fused = graph, Versions(guards)
                self._plans.clear()
                self._value_inputs, self._selected = (), None
            return self._fused[0]

    def _fused_before(self) -> tuple[Graph, Versions] | None:
        """Return the graph fused as the file that it came from says, None if it does not."""
        kept, self._kept = self._kept, None
        if kept is None:
            return None
        try:
            return rebuild(self.subgraph, kept[0]["nodes"]), Versions(kept[1])
        except (SubgraphError, KeyError, TypeError, ValueError, AttributeError):
            return None

    def release(self) -> None:
        """Let go of plans and weights."""
        with self._lock:
            super().release()
            self._plans.clear()
            self._laid.clear()
            self._templates = Templates()
            self._programs = []
            self._trial = self._parts = None

    def next_pool(self) -> Pool | None:
        """Return the threads of the next session: streams take turns."""
        pools = self.options.pools
        return pools[next(self._sessions) % len(pools)] if pools else None

    @property
    def depends_on_values(self) -> bool:
        """Whether plans depend on the content of inputs."""
        return bool(self._value_inputs)

    @property
    def is_one_plan(self) -> bool:
        """Whether shapes alone decide the plan, as far as is known."""
        return not self._value_inputs and self.parts() is None

    def forward(self, inputs: list[Any]) -> list[Array]:
        """Run once with memory that is given back afterwards."""
        return list(self.session()(inputs))

    def session(self) -> Session:
        """Return a session with memory of its own."""
        return CpuSession(self)

    def prepare(self) -> None:
        """Plan, and lay out the weights, for the shapes that ran or, if none did, that are known.

        Where the shapes of inputs are not known, the weights come in the form that does not
        depend on them.
        """
        programs, self._programs = self._programs, []
        known = [[TensorType(e.dtype, e.shape) for e in p.laid.inputs] for p in programs]
        if not known and not self._plans:
            stated = [self.subgraph.inputs[position].type for position in self.given]
            tensors = [t for t in stated if isinstance(t, TensorType) and t.shape is not None]
            if len(tensors) < len(stated):
                return
            if any(not t.is_static for t in tensors):
                self._prepare_for_any(tensors)
                return
            known.append(tensors)
        for types in known:
            inputs = [
                np.broadcast_to(np.zeros((), numpy_dtype(t.dtype)), concrete(t)) for t in types
            ]
            with suppress(Exception):  # what is wrong shows when it runs
                CpuSession(self).prepare(inputs)

    def _prepare_for_any(self, types: Sequence[TensorType]) -> None:
        """Hold the weights that plans for several sizes of what is not known have in common."""
        found: list[dict[WeightEntry, None]] = []
        for first, others in _SIZES:
            cache = WeightCache()
            sized = [_sized(type_, first, others) for type_ in types]
            with suppress(SubgraphError):  # a size that the graph does not take
                lay_out(make_plan(self.fused, sized, {}, self.options.plan), cache)
                found.append(dict.fromkeys(cache))
        if len(found) > 1:
            for entry in found[0]:
                if all(entry in other for other in found):
                    self.weights.hold(entry)

    def by_reference(self, inputs: Sequence[Any]) -> list[Any]:
        """Run the graph as it was given by the reference, node by node."""
        return DefaultSubgraphOp(self.subgraph).forward(list(inputs))

    def plan_for(self, inputs: Sequence[Any]) -> Plan | Instance:
        """Return the plan for the shapes of these inputs and the versions that this thread sees.

        Args:
            inputs: Arrays for the inputs that are no weights.

        Raises:
            ShapeError: the inputs do not fit the graph, or a shape only follows from values that
                are computed at run time.
        """
        with self._lock:
            graph = self.fused
            while True:
                key = self.key(inputs)
                plan = self._plans.get(key)
                if plan is not None and plan.versions.hold():
                    self._plans.move_to_end(key)
                    return plan
                types = [TensorType(dtype_of(item), item.shape) for item in inputs]
                values = {k: np.array(inputs[k]) for k in self._value_inputs}
                try:
                    plan = self._instance(graph, types) or self._tried(types)
                    plan = plan or make_plan(graph, types, values, self.options.plan)
                except UnknownShapeError as error:
                    more = set(error.inputs) - set(self._value_inputs)
                    if not more:
                        raise
                    if not error.of_all_contents or gives_size(error.node):
                        # Its traceback would keep the plan that was begun, and its arrays.
                        self._selected = error.with_traceback(None), set()
                    self._value_inputs = tuple(sorted({*self._value_inputs, *more}))
                    continue
                self._select(key[len(types) :])
                self._plans[key] = plan
                while len(self._plans) > self.options.plans:
                    self._plans.popitem(last=False)
                return plan

    def _select(self, contents: _Key) -> None:
        """Count the contents of inputs that seemed to select a branch, or one of few sizes.

        Raises:
            UnknownShapeError: there are too many for a plan of each.
        """
        if self._selected is not None:
            error, known = self._selected
            known.add(contents)
            if len(known) > _SELECTED:
                self._selected = None
                raise error

    def _instance(self, graph: Graph, types: Sequence[TensorType]) -> Instance | None:
        """Return the program that a template gives for these types, None if there is none."""
        if self._value_inputs:
            return None
        return self._templates.instance(graph, types, self.options.plan, self.weights)

    def laid_out(self, plan: Plan | Instance) -> ArgumentLayout:
        """Return the argument words of a plan, which all sessions share."""
        if isinstance(plan, Instance):
            return plan.laid()
        with self._lock:
            laid = self._laid.get(plan)
            if laid is None:
                laid = self._laid[plan] = lay_out(plan, self.weights)
            return laid

    def adopt(self, fused: Graph, guards: Guards, trial: Trial) -> None:
        """Take what a query of the same graph has made: the fused graph and its trial plan."""
        ends = [[v.name for v in g.inputs if v.parameter is None] for g in (fused, self.subgraph)]
        outputs = [[v.name for v in g.outputs] for g in (fused, self.subgraph)]
        if ends[0] == ends[1] and outputs[0] == outputs[1]:
            with self._lock:
                self._fused = fused, Versions(guards)
                self._trial = trial

    def to_export(self, file: ExportFile) -> dict[str, Any] | None:
        """Return how the graph was fused, and its programs; without those that no file can hold."""
        with self._lock:
            fused = self.fused
            assert self._fused is not None, "fused just now"
            nodes = describe(self.subgraph, fused)
            guards = [parameter.name for parameter, _ in self._fused[1].read]
            told = [self._told(plan, file) for plan in self._plans.values()]
        programs = [each for each in told if each is not None]
        if nodes is None and not programs:
            return None
        kept = {"fusion": self.fusion, "nodes": nodes, "guards": guards}
        return {**kept, "options": self._plan_options, "programs": programs}

    def _told(self, plan: Plan | Instance, file: ExportFile) -> dict[str, Any] | None:
        if self._value_inputs or guard_pages.MODE or not plan.versions.hold():
            return None
        return describe_program(self.laid_out(plan), file)

    @property
    def _plan_options(self) -> str:
        plan = self.options.plan
        return f"{plan.threads} {plan.blocked} {sorted(plan.properties.items())}"

    def restore(self, saved: Mapping[str, Any], file: ImportFile) -> None:
        """Take the programs of an exported model, and the fused graph, if they are as this op's."""
        if saved.get("fusion") != self.fusion:
            return
        by_name = {parameter.name: parameter for parameter in self.parameters}
        with suppress(KeyError, TypeError):  # it fuses by itself
            guards = tuple((by_name[name], by_name[name].version) for name in saved["guards"])
            if isinstance(saved.get("nodes"), list):
                self._kept = (saved, guards)
        if not guard_pages.MODE and saved.get("options") == self._plan_options:
            told = (read_program(each, file, self.parameters) for each in saved["programs"])
            self._programs = [program for program in told if program is not None]

    def stored_program(self, inputs: Sequence[Any], snapshot: Snapshot) -> StoredProgram | None:
        """Return the program from a file that runs these inputs, None if there is none."""
        for program in self._programs:
            if program.fits(inputs):
                if program.holds(snapshot):
                    return program
                self._programs = [each for each in self._programs if each is not program]
        return None

    def _tried(self, types: Sequence[TensorType]) -> Plan | None:
        """Return the plan that was begun on trial, once, if it is for these types and holds."""
        trial, self._trial = self._trial, None
        if trial is None or trial.planner is None or self._value_inputs:
            return None
        planner = trial.planner
        fits = planner.graph is self.fused and list(trial.types) == list(types)
        return planner.finish() if fits and Versions(planner.guards.items()).hold() else None

    def parts(self, error: UnknownShapeError | None = None) -> Parts | None:
        """Return the fused graph in parts, None while it is planned as a whole.

        Args:
            error: Why it cannot be planned as a whole; it is then cut before that node.
        """
        with self._lock:
            if self._parts is None and error is None:
                return None
            graph = self.fused
            if self._parts is None or self._parts[0] is not graph:
                if error is None:
                    return None
                self._parts = (graph, Parts(cut_at(graph, error.node, self.part)))
            return self._parts[1]

    def part(self, subgraph: Graph) -> SubgraphOp:
        """Return what runs a part of the fused graph."""
        return CpuSubgraphOp(subgraph, self.options, without_weights)

    def key(self, inputs: Sequence[Any]) -> _Key:
        """Return what tells plans apart: shapes, and the content of what shapes depend on."""
        key: list[Any] = [item.shape for item in inputs]
        for position in self._value_inputs:
            item = inputs[position]
            if isinstance(item, np.ndarray):
                key.append(item.tobytes())
        return tuple(key)


def _sized(type_: TensorType, first: int, others: int) -> TensorType:
    """Return the type with sizes for the dimensions that are not known."""
    assert type_.shape is not None
    sizes = (first, *[others] * len(type_.shape))
    pairs = zip(type_.shape, sizes, strict=False)
    return TensorType(type_.dtype, [dim if isinstance(dim, int) else size for dim, size in pairs])


def without_weights(graph: Graph) -> tuple[Graph, Guards]:
    """Return a fused graph's part as it runs: its inputs are those that are no weights."""
    graph = graph.clone()
    graph.inputs = tuple(value for value in graph.inputs if value.parameter is None)
    return graph, ()
