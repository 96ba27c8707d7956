"""The subgraph op of the CPU device: regions by programs of compiled kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import count
from typing import Any

import attrs
import numpy as np

from subgraph.engine.cpu.dry_run_plan import DryRunPlan
from subgraph.engine.cpu.growing_inputs import with_buffers
from subgraph.engine.cpu.region_options import CpuRegionOptions
from subgraph.engine.cpu.region_session import ArgumentLayouts, CpuSession
from subgraph.engine.cpu.row_parts import RowParts
from subgraph.engine.cpu.stored_programs import StoredPrograms
from subgraph.engine.cpu.symbolic_plans import SymbolicPlans
from subgraph.engine.executable.argument_layout import make_argument_layout
from subgraph.engine.executable.stored_program import describe as describe_program
from subgraph.engine.executable.symbolic_plan import PlanInstance
from subgraph.engine.planner.concrete_types import concrete
from subgraph.engine.planner.dry_run import DryRun
from subgraph.engine.planner.plan import make_plan
from subgraph.engine.planner.plan_types import Plan
from subgraph.engine.region.concrete_plan import ConcretePlan
from subgraph.engine.region.region_op import Fuse, Guards, RegionOp, without_weights
from subgraph.engine.region.strategy import Strategy
from subgraph.errors import SubgraphError
from subgraph.graph.graph import Graph
from subgraph.graph.parameters import Versions
from subgraph.graph.types import TensorType, numpy_dtype
from subgraph.operators.subgraph_op import ExportFile, ImportFile, SubgraphOp
from subgraph.system import guard_pages
from subgraph.weights.cache import WeightCache, WeightEntry

# Sample sizes of unknown dimensions for which weights are prepared: of the first axis, of others
# (estimates: tokens of a text, pixels of an image, a batch).
_SAMPLE_SIZES = ((1, 64), (1, 224), (16, 64))


class CpuSubgraphOp(RegionOp):
    """Runs a graph by plans of compiled kernels.

    Attributes:
        symbolic: The strategy for shapes that differ from call to call.
        row_parts: Decides how many rows of a batch run at a time.
    """

    device = "CPU"
    options: CpuRegionOptions

    def __init__(self, subgraph: Graph, options: CpuRegionOptions, fuse: Fuse) -> None:
        """Prepare to run a graph; see `RegionOp`."""
        # By the inputs that grow, and whether they may be overwritten: the fused graph, and an op
        # that runs it with a buffer for each.
        self._growing: dict[tuple[tuple[int, ...], bool], tuple[Graph, CpuSubgraphOp]] = {}

        def fuse_for_parts(graph: Graph) -> tuple[Graph, Guards]:
            found = self.row_parts.form()
            if found is None:
                return fuse(graph)
            fused, guards = fuse(found[0])
            return fused, (*guards, *found[1])

        super().__init__(subgraph, options, fuse_for_parts)
        self.row_parts = RowParts(subgraph, self.data_inputs, self.parameters, options)
        self._sessions = count()
        self._layouts = ArgumentLayouts(self.weights)

    def strategies(self) -> list[Strategy]:
        """Return the CPU's strategies in the order in which they are asked."""
        self._stored, self._dry_run = StoredPrograms(), DryRunPlan()
        self.symbolic = SymbolicPlans(self.options.plan, self.weights)
        last = ConcretePlan(self.options.plan)
        return [self._split, self._stored, self._known, self.symbolic, self._dry_run, last]

    def part_op(self, subgraph: Graph) -> SubgraphOp:
        """Return the op for a part of the fused graph."""
        # Fused nodes have no rule by which rows could be proved to be independent.
        options = attrs.evolve(self.options, independent=None)
        return CpuSubgraphOp(subgraph, options, without_weights)

    def _growing_session(self, positions: tuple[int, ...], overwrites: bool) -> CpuSession:
        """Return a session of the fused graph with buffers for inputs that grow.

        Args:
            positions: The inputs, among those that are not weights.
            overwrites: Whether they may be overwritten.
        """
        key = positions, overwrites
        with self._lock:
            fused = self.fused
            graph, op = self._growing.get(key, (None, None))
            if op is None or graph is not fused:
                part = self.part_op(with_buffers(fused, positions, overwrites=overwrites))
                assert isinstance(part, CpuSubgraphOp), "parts of a region are regions"
                if self.symbolic.seen:
                    # Positions have changed since the last request, and capacities will.
                    before = list(self.symbolic.seen[-1])
                    before += [_without_positions(before[position]) for position in positions]
                    part.symbolic.begin(part.fused, before)
                self._growing[key] = fused, part
                op = part
        return op.session()

    def run_report(self) -> dict[str, Any]:
        """Return which strategies served calls; ``growing``: also those with inputs that grow."""
        report = super().run_report()
        if self._growing:
            report["growing"] = [op.run_report() for _, op in self._growing.values()]
        return report

    def session(self) -> CpuSession:
        """Return a session with memory of its own; streams are assigned in rotation."""
        pools = self.options.pools
        pool = pools[next(self._sessions) % len(pools)] if pools else None
        return CpuSession(self, self.row_parts, self._layouts, pool, self._growing_session)

    def release(self) -> None:
        """Drop plans, programs and weights."""
        with self._lock:
            super().release()
            self._stored.take_types()
            self._layouts.forget()
            for _, op in self._growing.values():
                op.release()
            self._growing.clear()

    def adopt(self, fused: Graph, guards: Guards, dry_run: DryRun) -> None:
        """Take the fused graph and the dry run of a query of the same graph.

        They are ignored if the fused graph has other inputs or outputs than this region, and if the
        region is fused for other numbers of rows.

        Args:
            fused: The fused graph.
            guards: Versions of the parameters on whose content the fusion depends.
            dry_run: The dry run of the fused graph.
        """
        if self.row_parts.form() is not None:
            return
        inputs = [[v.name for v in g.inputs if v.parameter is None] for g in (fused, self.subgraph)]
        outputs = [[v.name for v in g.outputs] for g in (fused, self.subgraph)]
        if inputs[0] == inputs[1] and outputs[0] == outputs[1]:
            with self._lock:
                self._fused = fused, Versions(guards)
                self._dry_run.adopt(dry_run)

    def prepare(self) -> None:
        """Plan and compute weights before the first call.

        Plans are made for the shapes of the exported model's programs or, without them, for the
        shapes in the types of the inputs. If these are not static, only those weights are computed
        whose form does not depend on the sizes.
        """
        known = self._stored.take_types()
        if not known and not self._known.plans():
            stated = [self.subgraph.inputs[position].type for position in self.data_inputs]
            tensors = [t for t in stated if isinstance(t, TensorType) and t.shape is not None]
            if len(tensors) < len(stated):
                return
            if any(not t.is_static for t in tensors):
                self._prepare_common_weights(tensors)
                return
            known.append(tensors)
        for types in known:
            inputs = [
                np.broadcast_to(np.zeros((), numpy_dtype(t.dtype)), concrete(t)) for t in types
            ]
            with suppress(Exception):  # the first run raises the error
                self.session().prepare(inputs)

    def _prepare_common_weights(self, types: Sequence[TensorType]) -> None:
        """Hold the weights that plans for all sample sizes of the unknown dimensions share."""
        found: list[dict[WeightEntry, None]] = []
        for first, others in _SAMPLE_SIZES:
            cache = WeightCache()
            sized = [_with_sizes(type_, first, others) for type_ in types]
            with suppress(SubgraphError):  # the sample sizes may not fit the graph
                make_argument_layout(make_plan(self.fused, sized, {}, self.options.plan), cache)
                found.append(dict.fromkeys(cache))
        if len(found) > 1:
            for entry in found[0]:
                if all(entry in other for other in found):
                    self.weights.hold(entry)

    def to_export(self, file: ExportFile) -> dict[str, Any] | None:
        """Return descriptions of the fused graph and of the programs that a file can contain."""
        with self._lock:
            fusion = super().to_export(file)
            found = [self._describe_plan(plan, file) for plan in self._known.plans()]
        programs = [each for each in found if each is not None]
        if fusion is None and not programs:
            return None
        none: dict[str, Any] = {"fusion": self.fusion, "nodes": None, "guards": []}
        rows = self.row_parts.to_export()
        options = self._plan_options
        return {**(fusion or none), "options": options, "programs": programs, "rows": rows}

    def _describe_plan(self, plan: Plan | PlanInstance, file: ExportFile) -> dict[str, Any] | None:
        if self.depends_on_values or guard_pages.MODE or not plan.versions.are_current():
            return None
        return describe_program(self._layouts.of(plan), file)

    @property
    def _plan_options(self) -> str:
        plan = self.options.plan
        properties = sorted(plan.properties.items())
        return f"{plan.threads} {plan.blocked} {self.options.rows} {properties}"

    def restore(self, saved: Mapping[str, Any], file: ImportFile) -> None:
        """Take the fused graph and the programs of an exported model, if options are the same."""
        super().restore(saved, file)
        same = (saved.get("fusion"), saved.get("options")) == (self.fusion, self._plan_options)
        if same and not guard_pages.MODE:
            self._stored.read(saved["programs"], file, self.parameters)
            self.row_parts.restore(saved["rows"])


def _without_positions(type_: TensorType) -> TensorType:
    """Return the type of a buffer that has room for no positions."""
    dims = type_.shape or ()
    return TensorType(type_.dtype, (*dims[:-2], 0, *dims[-1:]))


def _with_sizes(type_: TensorType, first: int, others: int) -> TensorType:
    """Return a type with sample sizes for its unknown dimensions.

    Args:
        type_: The type; its rank is known.
        first: Size of the first axis.
        others: Size of the other axes.
    """
    assert type_.shape is not None
    sizes = (first, *[others] * len(type_.shape))
    pairs = zip(type_.shape, sizes, strict=False)
    return TensorType(type_.dtype, [dim if isinstance(dim, int) else size for dim, size in pairs])
