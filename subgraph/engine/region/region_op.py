"""The subgraph op of a device that plans: an inner graph, fused, and the strategies to run it.

Plans are shared by all sessions (`region_session`). A fusion may depend on the content of
parameters (a scale, an epsilon). If one of these changes, the graph is fused again; every other
parameter only changes the weights of plans.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import attrs

from subgraph.engine.planner.plan_types import PlanOptions
from subgraph.engine.region.concrete_plan import ConcretePlan
from subgraph.engine.region.known_plans import KnownPlans
from subgraph.engine.region.resolver import Resolver
from subgraph.engine.region.specialized_inputs import Key
from subgraph.engine.region.split_plan import SplitPlan, SplitRegion
from subgraph.engine.region.stored_fusion import describe, rebuild
from subgraph.engine.region.strategy import Strategy
from subgraph.errors import SubgraphError, described
from subgraph.graph.graph import Graph
from subgraph.graph.parameters import Parameter, Snapshot, Versions
from subgraph.graph.types import Array, TensorType
from subgraph.operators.subgraph_op import DefaultSubgraphOp, ExportFile, ImportFile, SubgraphOp
from subgraph.runtime.executor_plan import all_parameters
from subgraph.system.forking import free_in_child

Guards = tuple[tuple[Parameter, int], ...]  # parameters on whose content a fusion depends: versions
Fuse = Callable[[Graph], tuple[Graph, Guards]]


@attrs.frozen
class RegionOptions:
    """How a region is run.

    Attributes:
        plan: Options of plans.
        plans: Number of cached plans, and of executable plans in each session.
        profiling: Whether every step of a run is measured.
        compile_seconds: Seconds that planning and compiling for new shapes may take; 0: any time.
    """

    plan: PlanOptions = attrs.field(factory=PlanOptions)
    plans: int = 16
    profiling: bool = False
    compile_seconds: float = 0.0


class RegionOp(SubgraphOp):
    """Runs a graph by plans; the op of a device adds sessions, which bind them to its memory.

    Attributes:
        subgraph: The graph before fusion; `fused` is the graph that runs.
        data_inputs: Positions of the inputs that are not weights.
        options: How it is run.
        parameters: All parameters of the graph.
        fusion: Text that identifies everything on which ``fuse`` depends beside the graph.
        resolver: Finds the plan for a call.
    """

    fusion = ""

    def __init__(self, subgraph: Graph, options: RegionOptions, fuse: Fuse) -> None:
        """Prepare to run a graph; it is fused when it first runs.

        Args:
            subgraph: The graph.
            options: How it is run.
            fuse: Returns the graph to run, whose inputs are those of ``subgraph`` that are not
                weights, and the parameters on whose content the fusion depends.
        """
        super().__init__(subgraph)
        self.options = options
        self.data_inputs = tuple(k for k, v in enumerate(subgraph.inputs) if v.parameter is None)
        self.parameters = all_parameters(subgraph)
        self._fuse = fuse
        # The lock is reentrant: `resolve` holds it while strategies read `fused`, which takes it,
        # too.
        self._lock = free_in_child(threading.RLock())
        self._fused: tuple[Graph, Versions] | None = None
        self._stored_fusion: tuple[Any, Guards] | None = None
        self._split = SplitPlan(self.part_op)
        self._known = KnownPlans(options.plans)
        types = [subgraph.inputs[position].type for position in self.data_inputs]
        self.resolver = Resolver(
            subgraph.name,
            lambda: self.fused,
            self.strategies(),
            self._known,
            [type_.dtype if isinstance(type_, TensorType) else None for type_ in types],
        )

    def strategies(self) -> list[Strategy]:
        """Return new strategies in the order in which they are asked; devices override this.

        The constructor calls it, once.
        """
        return [self._split, self._known, ConcretePlan(self.options.plan)]

    def part_op(self, subgraph: Graph) -> SubgraphOp:
        """Return the op for a part of the fused graph."""
        raise NotImplementedError

    @property
    def fused(self) -> Graph:
        """The graph that runs, fused for the present parameters."""
        with self._lock:
            if self._fused is None:
                self._fused = self._rebuild_fused()
            # A stored fusion can be out of date as well, if a parameter was assigned after the
            # import.
            if self._fused is None or not self._fused[1].are_current():
                graph, guards = self._fuse(self.subgraph)
                self._fused = graph, Versions(guards)
                self.resolver.forget()
            return self._fused[0]

    def _rebuild_fused(self) -> tuple[Graph, Versions] | None:
        """Return the graph fused as an exported model describes it; None without a description."""
        # A description is tried once; after a failure the op fuses by itself.
        stored, self._stored_fusion = self._stored_fusion, None
        if stored is None:
            return None
        try:
            return rebuild(self.subgraph, stored[0]), Versions(stored[1])
        except (SubgraphError, KeyError, TypeError, ValueError, AttributeError) as error:
            self.resolver.note("stored fusion", described(error))
            return None

    def release(self) -> None:
        """Drop plans and weights."""
        with self._lock:
            super().release()
            self.resolver.forget()

    @property
    def depends_on_values(self) -> bool:
        """Whether plans depend on the content of inputs."""
        return bool(self.resolver.specialized_inputs)

    @property
    def is_one_plan(self) -> bool:
        """Whether the shapes of inputs alone determine the plan, as far as calls have shown."""
        return not self.resolver.specialized_inputs and self.split_region() is None

    def split_region(self) -> SplitRegion | None:
        """Return the fused graph split in parts; None while it is planned as a whole."""
        with self._lock:
            return self._split.of(lambda: self.fused)

    def forward(self, inputs: list[Any]) -> list[Array]:
        """Run once, in a session whose memory is freed afterwards."""
        return list(self.session()(inputs))

    def by_reference(self, inputs: Sequence[Any]) -> list[Any]:
        """Run the graph before fusion by the reference, because a weight is another array."""
        self.resolver.note("all strategies", "a weight was replaced by another array in this run")
        self.resolver.chosen["reference"] += 1
        return DefaultSubgraphOp(self.subgraph).forward(list(inputs))

    def resolve(
        self, inputs: Sequence[Any], snapshot: Snapshot, *, as_a_whole: bool = False
    ) -> object:
        """Return the plan, or split region, for a call.

        Args:
            inputs: Arrays for the inputs that are not weights.
            snapshot: The parameters as the call has to see them; it is pinned.
            as_a_whole: Whether the region must not be split.

        Raises:
            SubgraphError: See `Resolver.resolve`.
        """
        with self._lock:
            return self.resolver.resolve(inputs, snapshot, as_a_whole=as_a_whole)

    def key(self, inputs: Sequence[Any]) -> Key:
        """Return the key of a plan; see `SpecializedInputs.key`."""
        return self.resolver.specialized_inputs.key(inputs)

    def run_report(self) -> dict[str, Any]:
        """Return which strategies served calls, and why others could not.

        Returns:
            ``chosen``: counts by strategy; ``declined``: counts by strategy and cause; of a region
            that is split, ``parts``: the report of each part.
        """
        report = self.resolver.report()
        split = self._split.current
        if split is not None:
            report["parts"] = [type(op).run_report(op) for op in split.ops()]
        return report

    def to_export(self, file: ExportFile) -> dict[str, Any] | None:
        """Return a description of the fused graph as plain JSON; None if there is none."""
        with self._lock:
            nodes = describe(self.subgraph, self.fused)
            assert self._fused is not None, "fused just now"
            guards = [parameter.name for parameter, _ in self._fused[1].read]
        return None if nodes is None else {"fusion": self.fusion, "nodes": nodes, "guards": guards}

    def restore(self, saved: Mapping[str, Any], file: ImportFile) -> None:
        """Take the description of the fused graph from an exported model, if it fused likewise."""
        if saved.get("fusion") != self.fusion:
            return
        by_name = {parameter.name: parameter for parameter in self.parameters}
        with suppress(KeyError, TypeError):  # without a description the op fuses by itself
            guards = tuple((by_name[name], by_name[name].version) for name in saved["guards"])
            if isinstance(saved.get("nodes"), list):
                self._stored_fusion = saved["nodes"], guards


def without_weights(graph: Graph) -> tuple[Graph, Guards]:
    """Return a part of a fused graph without the inputs that are weights: a `Fuse` for parts."""
    graph = graph.clone()
    graph.inputs = tuple(value for value in graph.inputs if value.parameter is None)
    return graph, ()
