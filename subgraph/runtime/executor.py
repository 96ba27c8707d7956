"""The default executor: walks a graph node by node in Python.

`Executor` runs a `Plan` for one request: subgraph nodes by the sessions of their ops, bodies of
control flow by executors of their own, every other node by the reference implementation. Most of
a model's work is inside subgraph nodes; a step of the executor itself takes about a microsecond. If
the plan has a schedule, steps that do not depend on each other run at the same time.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import attrs
import numpy as np

from subgraph.errors import DeviceError, LimitError, RequestCancelledError, SubgraphError, described
from subgraph.graph.graph import Node
from subgraph.graph.limits import enter_run, leave_run
from subgraph.graph.parameters import Parameter, Snapshot, epoch, pinned, pinned_snapshot
from subgraph.graph.result_arrays import fill_outputs, own_results
from subgraph.graph.types import Array
from subgraph.operators.bodies import captures_of
from subgraph.operators.operator import operator_of
from subgraph.operators.region_names import note_region
from subgraph.operators.subgraph_op import (
    DefaultSubgraphOp,
    IterationsResult,
    ProfileEntry,
    RunIterations,
    Session,
    SubgraphOp,
    Wiring,
    open_session,
)
from subgraph.runtime.cancel import Cancel
from subgraph.runtime.executor_plan import Plan, Step
from subgraph.runtime.step_calls import Run, StepCall, step_call
from subgraph.runtime.step_schedule import Scheduler

_log = logging.getLogger("subgraph")


class Executor:
    """Runs a plan for one request; one run at a time.

    Attributes:
        plan: The plan.
        profiling: Whether runs measure every node.
        scheduler: Runs steps at the same time; None if the plan has no schedule.
        stateful: Whether a failed run may have changed the states of ops, which are then restored.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        profiling: bool = False,
        cancel: Cancel | None = None,
        outer_entries: list[ProfileEntry] | None = None,
        home: str = "",
    ) -> None:
        """Open the sessions of the plan's subgraph nodes.

        Args:
            plan: The prepared graph.
            profiling: Whether runs measure every node.
            cancel: Flag that ends a run between two steps.
            outer_entries: For a body: the profile entries of the node, to which each run adds.
            home: For the parts of a region: its device. Profiles attribute to it the fast ops,
                which only copy or view values.
        """
        self._home = home
        self.plan = plan
        self.profiling = profiling
        self._outer_entries = outer_entries
        # Entries of each step; steps may run at the same time.
        self._profiles: list[list[ProfileEntry]] = [[] for _ in plan.steps]
        self._cancel = cancel or Cancel()
        self._runs: list[Run] = []
        self._bodies: dict[str, Executor] = {}  # by the node's name and the attribute's
        self._steps: list[StepCall] = []
        first: dict[tuple[object, type[Session]], Session] = {}
        for position in range(len(plan.steps)):
            self._prepare(position, first)
        self.scheduler = None if plan.schedule is None else Scheduler(plan.schedule)
        # The values with which runs on a snapshot start: the parameters, None elsewhere.
        self._start: tuple[Snapshot, list[Any]] | None = None
        is_body = outer_entries is not None
        self._region_call = self._make_region_call() if is_body and not profiling else None
        # Whether states must be restored after an error: one region may have run before another
        # fails. After the first run: whether the ops have states at all.
        self.stateful = not is_body and (len(self.sessions()) > 1 or bool(self._bodies))

    def _make_region_call(self) -> Run | None:
        """Return a callable that runs a body of one region without a list of values, or None."""
        session = self._runs[0] if self._runs else None
        if self.plan.only is None or not isinstance(session, Session):
            return None
        taken, results_at = self.plan.only
        run_inputs = session.run_inputs()
        if run_inputs is None:
            return None
        all_inputs = tuple(range(len(self.plan.inputs)))
        all_outputs = tuple(range(len(self.plan.steps[0].outputs)))
        if taken == all_inputs and results_at == all_outputs:
            return run_inputs

        def run(inputs: Sequence[Any]) -> Sequence[Any]:
            results = run_inputs([inputs[k] for k in taken])
            return [results[k] for k in results_at]

        return run

    def _prepare(self, position: int, first: dict[tuple[object, type[Session]], Session]) -> None:
        """Prepare the callables of a step: on all its inputs, and on the values of a run.

        Sessions of one type whose steps never overlap share their memory.

        Args:
            position: The step's position in the plan.
            first: First session by memory group and type; it is added to.
        """
        step, schedule = self.plan.steps[position], self.plan.schedule
        if step.op is None:
            run = self._runner(step, self._profiles[position])
            self._runs.append(run)
            self._steps.append(step_call(step, step.inputs, run))
            return
        session = open_session(step.op, step.fallback)
        if self.profiling:
            session.measure()
        self._cancel.watch(session)
        group = None if schedule is None else schedule.memory_group(position)
        other = first.setdefault((group, type(session)), session)
        if other is not session:
            session.share(other)
        self._runs.append(session)
        run_inputs = None if step.data_slots is None else session.run_inputs()
        if run_inputs is None or step.data_slots is None:
            self._steps.append(step_call(step, step.inputs, session.__call__))
        else:
            self._steps.append(step_call(step, step.data_slots, run_inputs))

    def _runner(self, step: Step, entries: list[ProfileEntry]) -> Run:
        """Return the callable of a step without an op; ``entries`` are the step's, for bodies."""
        if step.bodies:
            from subgraph.runtime.control_flow import control_flow

            bodies = [
                Executor(plan, profiling=self.profiling, cancel=self._cancel, outer_entries=entries)
                for plan in step.bodies
            ]
            names = (f"{step.node.name}/{key}" for key in captures_of(step.node))
            self._bodies.update(zip(names, bodies, strict=True))
            return control_flow(step.node, bodies)
        from subgraph.operators.reference import evaluate
        from subgraph.runtime.fast_ops import fast_op

        return fast_op(step.node) or partial(evaluate, step.node)

    def run(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """Run the graph.

        Args:
            inputs: One item for each input and capture of the graph: an array, a list for a
                sequence, a Parameter for a weight; None takes the default of an optional input.

        Returns:
            One item for each output. All parameters read as in the pinned snapshot, or, when none
            is pinned, as in one taken now.

        Raises:
            DeviceError: a node failed; its name and the reason.
        """
        return self.run_with_rollback(self._run, inputs) if self.stateful else self._run(inputs)

    def run_with_rollback(self, run: Run, inputs: Sequence[Any]) -> Sequence[Any]:
        """Call ``run`` on inputs; if it raises, restore the states of the ops."""
        before = {name: array.copy() for name, array in self.states().items()}
        try:
            results = run(inputs)
        except Exception:
            if before or self.states():
                self.set_states(before)
            raise
        self.stateful = bool(before or self.states())
        return results

    def _run(self, inputs: Sequence[Any]) -> Sequence[Any]:
        snapshot = pinned_snapshot()
        if snapshot is None:
            with pinned(Snapshot(self.plan.parameters)):
                return self._run(inputs)
        # A cancelled run takes the long way, whose loop raises the error.
        if self._region_call is not None and not self._cancel.wanted:
            try:
                return self._region_call(inputs)
            except LimitError:
                raise
            except Exception as error:
                self._take_over(error, 0)
        values = self.start(inputs)
        if self.scheduler is None:
            self.run_steps(values)
        else:
            self.scheduler.run(self.run_chain, values)
        return self.finish(values)

    def iterations(self, wiring: Wiring) -> RunIterations | None:
        """Return a callable that runs iterations of a loop's body; None if it is not one region.

        Args:
            wiring: As for a session, in positions of the body's inputs and outputs.
        """
        session = self._runs[0] if self._runs else None
        if self.plan.only is None or not isinstance(session, Session):
            return None
        taken, results_at = self.plan.only
        # Positions among the region's inputs, by position among the body's.
        input_at: dict[int | None, int | None] = {k: at for at, k in enumerate(taken)}
        items = [input_at.get(k) for k in wiring.items]
        run = session.iterations(
            Wiring(
                input_at.get(wiring.number),
                None if wiring.condition is None else results_at[wiring.condition],
                tuple((results_at[k], input_at.get(j)) for k, j in wiring.states),
                tuple(k for k in items if k is not None),
                tuple(results_at[k] for k in wiring.scans),
            )
        )
        return None if run is None else partial(self._iterate, run, session, taken)

    def _iterate(
        self,
        run: RunIterations,
        session: Session,
        taken: Sequence[int],
        inputs: Sequence[Any],
        limit: int | None,
    ) -> IterationsResult | None:
        """Run iterations of a loop by a session.

        Args:
            run: The session's callable.
            session: The session.
            taken: Positions of the body's inputs that the region reads.
            inputs: The body's inputs.
            limit: Most iterations; None for no limit.

        Returns:
            None if the iterations have to run one by one, which also raises any error.
        """
        if self.profiling or self._runs[0] is not session:  # another device runs the region
            return None
        items = [inputs[k] for k in taken]
        if any(type(item) is not np.ndarray for item in items):
            return None
        try:
            return run(items, limit)
        except (LimitError, RequestCancelledError):
            raise
        except Exception as error:
            _log.info(
                "a compiled loop of graph %r failed, its iterations are run one by one: %s: %s",
                *(self.plan.graph.name, type(error).__name__, error),
            )
            return None

    def start(self, inputs: Sequence[Any]) -> list[Any]:
        """Return the values with which a run starts.

        Args:
            inputs: As for `run`. A snapshot is pinned.
        """
        snapshot = pinned_snapshot()
        assert snapshot is not None, "run() pins one"
        if self.profiling:
            for entries in self._profiles:
                entries.clear()
        values = self._start_values(snapshot)
        plain = self.plan.plain_inputs
        if plain is not None and Parameter not in map(type, inputs):
            if len(inputs) != len(self.plan.inputs):
                raise ValueError(f"{len(inputs)} items for {len(self.plan.inputs)} inputs")
            values[plain] = inputs
            return values
        for (slot, object_slot), item in zip(self.plan.inputs, inputs, strict=True):
            if type(item) is Parameter:
                values[object_slot or slot] = item
                values[slot] = item.array
            elif item is not None:
                values[slot] = item
                if object_slot:
                    values[object_slot] = item
        return values

    def run_steps(self, values: list[Any], begin: int = 0, end: int | None = None) -> None:
        """Run steps of a plan without a schedule.

        Args:
            values: The values, as `start` returned them; they are updated.
            begin: The first step.
            end: The step before which to stop; None: run all.
        """
        enter_run(values)
        try:
            self.run_chain(values, range(begin, len(self._steps) if end is None else end))
        finally:
            leave_run()

    def finish(self, values: Sequence[Any]) -> list[Any]:
        """Return the outputs from the values of a run after all its steps."""
        start = self._start
        if start is not None and start[0].epoch != epoch():
            self._start = None  # frees parameters' arrays that were replaced meanwhile
        results = [values[slot] for slot in self.plan.outputs]
        if self._outer_entries is not None:
            if self.profiling:
                # A body runs many times; its entries are collected before the next run clears them.
                self._outer_entries.extend(self.profile())
        else:
            results = own_results(results, [values[slot] for slot, _ in self.plan.inputs])
        return results

    def _start_values(self, snapshot: Snapshot) -> list[Any]:
        start = self._start
        # The arrays of parameters are looked up once for each snapshot, not in every run.
        if start is None or start[0] is not snapshot:
            values: list[Any] = [None] * self.plan.slots
            for slot, parameter in self.plan.arrays:
                values[slot] = parameter.array
            for slot, parameter in self.plan.objects:
                values[slot] = parameter
            start = self._start = (snapshot, values)
        # Steps overwrite slots and free them, so that each run gets a copy.
        return start[1].copy()

    def run_chain(self, values: list[Any], positions: Sequence[int]) -> None:
        """Run some steps in this thread; other threads may run others meanwhile."""
        if self.profiling:
            self._run_timed(values, positions)
            return
        cancel = self._cancel
        done, count = 0, len(positions)
        while done < count:
            # The usual case runs the list itself. After an error the list is made again, because
            # `_take_over` has replaced the call of the failed step.
            every = not done and count == len(self._steps)
            steps = self._steps if every else [self._steps[k] for k in positions[done:]]
            try:
                for step in steps:
                    if cancel.wanted:
                        raise RequestCancelledError("the request was cancelled while it ran")
                    step(values)
                    done += 1
            except Exception as error:
                # If there is a fallback, the loop goes on with the same step: `done` was not
                # incremented.
                self._take_over(error, positions[done])

    def _run_timed(self, values: list[Any], positions: Iterable[int]) -> None:
        for position in positions:
            step, run = self.plan.steps[position], self._runs[position]
            entries = self._profiles[position]
            start = time.perf_counter()
            results = None
            # The loop ends with an error, or with results: each failure is followed by another
            # device.
            while results is None:
                try:
                    if self._cancel.wanted:
                        raise RequestCancelledError("the request was cancelled while it ran")
                    results = run([values[slot] for slot in step.inputs])
                except Exception as error:
                    run = self._take_over(error, position)
            span = start, time.perf_counter()
            for slot, result in zip(step.outputs, results, strict=True):
                values[slot] = result
            # The bodies of this step have added their entries meanwhile. Their time is subtracted
            # from the step's own, so that the profile's sum is the time of the run.
            of_bodies = sum(entry.seconds for entry in entries)
            entries.extend(self._entries(step, run, span, of_bodies, values))
            for slot in step.free:
                values[slot] = None

    def _take_over(self, error: Exception, position: int) -> Session:
        """Let the fallback device run a step that failed, now and later; raise if there is none."""
        step, run = self.plan.steps[position], self._runs[position]
        session = None
        if step.fallback is not None and isinstance(run, Session):
            session = step.fallback.recover(error, run)
        if session is None:
            raise_failure(error, step.node, run)
        self._region_call = None  # later iterations do not try the failed session first
        if self.profiling:
            session.measure()
        self._cancel.watch(session)
        self._runs[position] = session
        self._steps[position] = step_call(step, step.inputs, session.__call__)
        return session

    def _entries(
        self,
        step: Step,
        run: Run,
        span: tuple[float, float],
        of_bodies: float,
        values: Sequence[Any],
    ) -> Iterable[ProfileEntry]:
        """Return the profile entries of a step.

        Args:
            step: The step.
            run: Its callable.
            span: When it started and ended, in seconds of ``time.perf_counter``.
            of_bodies: Seconds that the entries of its bodies contain.
            values: The values of the run.
        """
        start, end = span
        inside = run.profile() if isinstance(run, Session) else []
        if inside:
            return note_region(_with_times(inside, start), step.node)
        node, op = step.node, run.op if isinstance(run, Session) else step.op
        moved = sum(
            item.nbytes
            for item in (values[slot] for slot in (*step.inputs, *step.outputs))
            if isinstance(item, np.ndarray)
        )
        device = "REFERENCE" if op is None else op.device
        kernel = "reference" if op is None else type(op).__name__
        # Bodies on a device run here while profiling, and otherwise on that device.
        inner = {each.device for body in step.bodies for each in body.ops()}
        if op is None and (inner or (self._home and _is_fast(node))):
            device, kernel = ",".join(sorted(inner)) or self._home, "executor"
        state = step.fallback.state if step.fallback is not None else ""
        entry = ProfileEntry(
            node.name,
            node.op_type,
            device,
            kernel,
            end - start - of_bodies,
            moved,
            fallback=state,
            start=start,
            end=end,
            thread=threading.get_ident(),
        )
        return note_region([entry], node)

    def sessions(self) -> dict[str, Session]:
        """Return the sessions of the graph's subgraph nodes, by the node's name.

        Those of bodies have the names of the node and the attribute in front: "loop/body/region".
        """
        runs = zip(self.plan.steps, self._runs, strict=True)
        found = {step.node.name: run for step, run in runs if isinstance(run, Session)}
        for where, body in self._bodies.items():
            found.update((f"{where}/{name}", each) for name, each in body.sessions().items())
        return found

    def states(self) -> dict[str, Array]:
        """Return the states of the request between runs; see `states_of`."""
        return states_of(self.sessions())

    def set_states(self, states: Mapping[str, Array]) -> None:
        """Set the states with which the next run begins; see `set_states_of`."""
        set_states_of(self.sessions(), states)

    def profile(self) -> list[ProfileEntry]:
        """Return the times of the nodes in the last run, in their order; empty unless profiling."""
        return [entry for entries in self._profiles for entry in entries]


def states_of(sessions: Mapping[str, Session]) -> dict[str, Array]:
    """Return the arrays that sessions carry from one run to the next, by "session name/state"."""
    return {
        f"{node}/{name}": array
        for node, session in sessions.items()
        for name, array in session.states().items()
    }


def set_states_of(sessions: Mapping[str, Session], states: Mapping[str, Array]) -> None:
    """Set the states with which the next run begins.

    Args:
        sessions: Sessions by name.
        states: As `states_of` returned them for sessions of the same nodes.

    Raises:
        DeviceError: a node does not exist, or has no such states.
    """
    by_node: dict[str, dict[str, Array]] = {node: {} for node in sessions}
    for key, array in states.items():
        # Names of nodes may contain slashes, so that the longest name that fits is the node.
        node = max((n for n in sessions if key.startswith(f"{n}/")), key=len, default=None)
        if node is None:
            raise DeviceError(
                f"no subgraph node of the model keeps state {key!r}; there are "
                f"{', '.join(map(repr, sessions)) or 'none'}"
            )
        by_node[node][key[len(node) + 1 :]] = array
    for node, session in sessions.items():
        # A stateful session without an entry is reset to its initial states.
        if by_node[node] or type(session).states is not Session.states:
            session.set_states(by_node[node])


class ExecutorSession(Session):
    """Runs the inner graph of a `DefaultSubgraphOp` with the default executor."""

    def __init__(self, op: DefaultSubgraphOp) -> None:
        """Open an executor of the plan that all sessions of the op share."""
        super().__init__(op)
        if op.plan is None:  # two threads may make one at the same time; each is right
            op.plan = Plan(op.subgraph)
        self._executor = Executor(op.plan)

    def __call__(
        self, inputs: Sequence[Any], outputs: Sequence[Array | None] | None = None
    ) -> Sequence[Any]:
        results = self._executor.run(inputs)
        return results if outputs is None else fill_outputs(results, outputs)

    def states(self) -> dict[str, Array]:
        return self._executor.states()

    def set_states(self, states: Mapping[str, Array]) -> None:
        self._executor.set_states(states)

    def profile(self) -> list[ProfileEntry]:
        return self._executor.profile()


def _with_times(entries: Sequence[ProfileEntry], start: float) -> list[ProfileEntry]:
    """Return entries with start times; those without one follow each other from ``start``."""
    found: list[ProfileEntry] = []
    for entry in entries:
        if not entry.start:
            end, thread = start + entry.seconds, threading.get_ident()
            entry = attrs.evolve(entry, start=start, end=end, thread=thread)
            start = end
        found.append(entry)
    return found


def _is_fast(node: Node) -> bool:
    from subgraph.runtime.fast_ops import fast_op

    return fast_op(node) is not None or operator_of(node).light


def raise_failure(error: Exception, node: Node, run: object = None) -> NoReturn:
    """Raise ``error`` with a note that names the node, or as a DeviceError if it is foreign.

    Args:
        error: The error.
        node: The node.
        run: The session that raised it, which may be that of a fallback device; else the node did.
    """
    graph = "" if node.graph is None else f" of graph {node.graph.name!r}"
    where = f"node {node.name!r} ({node.op_type}){graph}"
    if isinstance(error, SubgraphError):
        error.add_note(f"at {where}")
        raise error
    op = run.op if isinstance(run, Session) else node.op
    device = op.device if op is not None else "REFERENCE"
    own = op is None or device != SubgraphOp.device or type(op) is DefaultSubgraphOp
    place = f"on device {device!r}" if own else f"in {type(op).__name__}.forward"
    failure = DeviceError(f"{where} failed {place}: {described(error)}")
    failure.lost = op is not None and device != SubgraphOp.device
    for note in getattr(error, "__notes__", ()):
        failure.add_note(note)
    raise failure from error
