"""Schedules: which steps of a plan may run at the same time within one request.

Regions of different devices that do not depend on each other overlap. `make_schedule` groups the
steps of a plan into tasks: chains of steps that one thread runs. A `Scheduler` starts a task as
soon as the tasks that it reads from are done and no other task of its device runs. The
dependencies follow from the graph, so the results of a run do not depend on the speed of tasks.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable, Container, Sequence
from typing import Any

import attrs

from subgraph.errors import DeviceError, described
from subgraph.graph.limits import budgets, enter_run, leave_run, limited
from subgraph.graph.parameters import pinned, pinned_snapshot
from subgraph.runtime.task_executor import TaskExecutor

HOST = ""  # the device of steps that Python runs by the reference implementation
# Time to hand a task to another thread and to wait for it (measured: 93 us, median of runs of two
# empty regions, 2 cores).
HANDOVER_SECONDS = 1e-4
# Number of runs after which a schedule that could not save `HANDOVER_SECONDS` is tried again,
# because the sizes of values may have changed (estimate).
_RUNS_BEFORE_RETRY = 256
_threads = TaskExecutor("regions", threads=None)

Values = list[Any]
RunSteps = Callable[[Values, Sequence[int]], None]
# Locks, each with the steps (first, end) that are run under it.
DeviceLocks = Sequence[tuple[threading.Lock, int, int]]


@attrs.frozen
class Work:
    """A step as the schedule sees it.

    Attributes:
        inputs: Slots that it reads.
        outputs: Slots that it writes.
        device: The device that runs it, `HOST` for the reference implementation.
        is_region: Whether it is a region, which may run in a thread of its own.
        concurrent: Whether it may also overlap with other steps of its device.
    """

    inputs: Sequence[int]
    outputs: Sequence[int]
    device: str = HOST
    is_region: bool = False
    concurrent: bool = False


@attrs.define
class Task:
    """A chain of steps that one thread runs.

    Attributes:
        device: The device of its steps; None: it may overlap with every other task.
        steps: Their positions in the plan, ascending.
        needs: Tasks that have to be done before it; their numbers are lower than its own.
        followers: Tasks that wait for it.
        reads: Slots that other tasks read, too; the last reader frees them.
    """

    device: str | None
    steps: list[int] = attrs.field(factory=list[int])
    needs: set[int] = attrs.field(factory=set[int])
    followers: list[int] = attrs.field(factory=list[int])
    reads: list[int] = attrs.field(factory=list[int])


@attrs.frozen
class Schedule:
    """The tasks of a plan of which some may run at the same time.

    Attributes:
        tasks: The tasks, in an order in which they may run one after the other.
        task_of: The number of each step's task.
        readers: Number of readers of each slot that several tasks read.
    """

    tasks: Sequence[Task]
    task_of: Sequence[int]
    readers: dict[int, int]

    def memory_group(self, step: int) -> object:
        """Return a key that is equal for steps that never run at the same time."""
        number = self.task_of[step]
        device = self.tasks[number].device
        return ("task", number) if device is None else ("device", device)

    def locks(self, by_device: DeviceLocks) -> list[threading.Lock]:
        """Return the lock that each task holds, so that no other run uses its device."""
        by_step = {k: lock for lock, begin, end in by_device for k in range(begin, end)}
        return [by_step[task.steps[0]] for task in self.tasks]


def make_schedule(work: Sequence[Work], results: Container[int]) -> Schedule | None:
    """Return how steps may overlap; None if no two regions may.

    Args:
        work: The steps in an order in which they can run one after the other.
        results: Slots of the plan's outputs, which no task frees.
    """
    regions = [each for each in work if each.is_region]
    several = len({each.device for each in regions}) > 1 or any(r.concurrent for r in regions)
    if len(regions) < 2 or not several or not _has_independent_regions(work):
        return None
    tasks, task_of = _tasks(work)
    readers = _shared_slots(work, tasks, task_of, results)
    for number, task in enumerate(tasks):
        for needed in task.needs:
            tasks[needed].followers.append(number)
    return Schedule(tasks, task_of, readers)


def _has_independent_regions(work: Sequence[Work]) -> bool:
    """Return whether two regions that may overlap have no path between them."""
    before: dict[int, int] = {}  # per slot: the regions that it depends on, one bit for each
    regions: list[Work] = []
    of_device: dict[str, int] = {}
    for each in work:
        above = 0
        for slot in each.inputs:
            above |= before.get(slot, 0)
        if each.is_region:
            rivals = 0 if each.concurrent else of_device.get(each.device, 0)
            # A bit is left for a region that is neither an ancestor of this one nor on the same
            # device.
            if ((1 << len(regions)) - 1) & ~above & ~rivals:
                return True
            bit = 1 << len(regions)
            regions.append(each)
            if not each.concurrent:
                of_device[each.device] = of_device.get(each.device, 0) | bit
            above |= bit
        before.update((slot, above) for slot in each.outputs)
    return False


def _tasks(work: Sequence[Work]) -> tuple[list[Task], list[int]]:
    """Return the chains of steps, and for each step the number of its chain."""
    maker: dict[int, int] = {}
    for position, each in enumerate(work):
        maker.update(dict.fromkeys(each.outputs, position))
    crossed = _crossed(work, maker)
    tasks: list[Task] = []
    task_of: list[int] = []
    for position, each in enumerate(work):
        sources = {task_of[maker[slot]] for slot in each.inputs if slot in maker}
        device = None if each.concurrent else each.device
        number = next(
            (
                k
                for k in sorted(sources, reverse=True)
                if tasks[k].device == device
                and tasks[k].steps[-1] not in crossed
                # The step joins a chain only if the chain waited for all its other sources anyway.
                and sources - {k} <= tasks[k].needs
            ),
            None,
        )
        if number is None:
            number = len(tasks)
            tasks.append(Task(device, needs=sources))
        tasks[number].steps.append(position)
        task_of.append(number)
    return tasks, task_of


def _crossed(work: Sequence[Work], maker: dict[int, int]) -> set[int]:
    """Return the steps whose results a step of another device, or one that may overlap, reads.

    A task ends with such a step, so that the other task waits for no further steps.
    """
    crossed: set[int] = set()
    for each in work:
        for slot in each.inputs:
            source = maker.get(slot)
            if source is not None and (each.concurrent or work[source].device != each.device):
                crossed.add(source)
    return crossed


def _shared_slots(
    work: Sequence[Work], tasks: Sequence[Task], task_of: Sequence[int], results: Container[int]
) -> dict[int, int]:
    """Set the slots that several tasks read in these tasks; return the readers of each slot."""
    by_slot: dict[int, set[int]] = {}
    made_in: dict[int, int] = {}
    for position, each in enumerate(work):
        for slot in each.inputs:
            by_slot.setdefault(slot, set()).add(task_of[position])
        made_in.update(dict.fromkeys(each.outputs, task_of[position]))
    readers: dict[int, int] = {}
    for slot, numbers in by_slot.items():
        # A value that only its own task reads is freed by the step (`Step.free`).
        if slot in made_in and slot not in results and numbers != {made_in[slot]}:
            readers[slot] = len(numbers)
            for number in sorted(numbers):
                tasks[number].reads.append(slot)
    return readers


class Scheduler:
    """Runs a schedule repeatedly for one request; in order if overlapping would not save time.

    Attributes:
        schedule: The schedule.
    """

    def __init__(self, schedule: Schedule) -> None:
        """Prepare to run ``schedule``."""
        self.schedule = schedule
        self._runs_in_order = 0  # number of runs until overlapping is tried again

    def run(
        self, run_steps: RunSteps, values: Values, locks: Sequence[threading.Lock] = ()
    ) -> None:
        """Run all steps on the values of a run; a snapshot is pinned.

        Args:
            run_steps: Runs steps, identified by position, on the values; several threads call it.
            values: The values.
            locks: For each task the lock that is held while it runs; empty for no locks.
        """
        run = _Run(self.schedule, values, run_steps, locks)
        enter_run(values)
        try:
            if self._runs_in_order:
                self._runs_in_order -= 1
                run.in_order()
            elif run.side_by_side() < HANDOVER_SECONDS:
                self._runs_in_order = _RUNS_BEFORE_RETRY
        finally:
            leave_run()


class _Run:
    """The state of one run of a schedule."""

    def __init__(
        self,
        schedule: Schedule,
        values: Values,
        run_steps: RunSteps,
        locks: Sequence[threading.Lock],
    ) -> None:
        self._tasks = schedule.tasks
        self._values = values
        self._run_steps = run_steps
        self._locks = locks
        self._readers = dict(schedule.readers)
        self._missing = [len(task.needs) for task in self._tasks]
        self._ready = [k for k, missing in enumerate(self._missing) if not missing]  # a heap
        self._busy: set[str | None] = set()
        self._running = 0
        self._errors: list[tuple[int, BaseException]] = []
        self._seconds: dict[object, float] = {}
        self._lock = threading.Lock()
        self._ended = threading.Event()
        # Snapshot and budgets belong to a thread; helpers take over those of the thread that runs.
        self._pinned = pinned_snapshot()
        self._budgets = budgets()

    def in_order(self) -> None:
        """Run the tasks one after the other in this thread."""
        for number, task in enumerate(self._tasks):
            self._run(number)
            self._free(task)

    def side_by_side(self) -> float:
        """Run the tasks, those that may overlap in threads of their own.

        Returns:
            Upper bound of the seconds that overlapping saved.

        Raises:
            BaseException: The error of the first task, in order, that failed. All other tasks have
                ended by then; their errors are its notes.
        """
        with self._lock:
            mine = self._start()
        self._work(mine)
        try:
            self._ended.wait()
        except BaseException as error:  # as of Ctrl-C: no task may run on after the call
            with self._lock:
                self._errors.append((-1, error))
            self._ended.wait()
        if self._errors:
            self._raise()
        return sum(self._seconds.values()) - max(self._seconds.values(), default=0.0)

    def _raise(self) -> None:
        (_, first), *others = sorted(self._errors, key=lambda each: each[0])
        for _, error in others:
            first.add_note(f"beside it failed: {described(error)}")
        raise first

    def _start(self) -> int | None:
        """Start all tasks that may run except one; return that one for this thread, if any.

        The caller holds the lock.
        """
        mine: int | None = None
        waiting: list[int] = []
        # After an error no further task starts; those that run end by themselves.
        while self._ready and not self._errors:
            number = heapq.heappop(self._ready)
            device = self._tasks[number].device
            # Sessions of one device share their memory (`Schedule.memory_group`), so that they must
            # not overlap.
            if device is not None and device in self._busy:
                waiting.append(number)
                continue
            if mine is not None and not self._hand_over(number):
                waiting.append(number)  # no thread can be started: this one runs it later
                break
            self._busy.add(device)
            self._running += 1
            if mine is None:
                mine = number
        for number in waiting:
            heapq.heappush(self._ready, number)
        return mine

    def _hand_over(self, number: int) -> bool:
        try:
            _threads.submit(lambda: self._help(number))
        except DeviceError:
            return False
        return True

    def _help(self, number: int) -> None:
        """Run a task, and those that become ready by it, in another thread."""
        assert self._pinned is not None, "a run pins one"
        with limited(*self._budgets), pinned(self._pinned):
            enter_run(self._values)
            try:
                self._work(number)
            finally:
                leave_run()

    def _work(self, number: int | None) -> None:
        while number is not None:
            error: BaseException | None = None
            start = time.perf_counter()
            try:
                self._run(number)
            except BaseException as raised:
                error = raised
            number = self._done(number, time.perf_counter() - start, error)

    def _run(self, number: int) -> None:
        steps = self._tasks[number].steps
        if self._locks:
            with self._locks[number]:
                self._run_steps(self._values, steps)
        else:
            self._run_steps(self._values, steps)

    def _done(self, number: int, seconds: float, error: BaseException | None) -> int | None:
        """Record the end of a task; return the next one for this thread, if any."""
        task = self._tasks[number]
        with self._lock:
            self._running -= 1
            self._busy.discard(task.device)
            if error is not None:
                self._errors.append((number, error))
            else:
                key = number if task.device is None else task.device
                self._seconds[key] = self._seconds.get(key, 0.0) + seconds
                self._free(task)
                for follower in task.followers:
                    self._missing[follower] -= 1
                    if not self._missing[follower]:
                        heapq.heappush(self._ready, follower)
            # Followers are started under the same lock that counts what they wait for, so that no
            # task starts twice.
            following = self._start()
            if not self._running:
                self._ended.set()
        return following

    def _free(self, task: Task) -> None:
        """Free the values that no other task reads any more."""
        for slot in task.reads:
            self._readers[slot] -= 1
            if not self._readers[slot]:
                self._values[slot] = None
