"""Programs and thread pools: each unit runs once; load, forks, cancelling and exit."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from subgraph.engine.program import abi
from subgraph.engine.program.pool import Pool, shared
from subgraph.engine.program.program import Program, Step, grain
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.errors import ConfigError

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT))  # tests.support, also for hypothesis's own calls
Words = NDArray[np.int64]


class Counter:
    """A step that counts how often each unit ran, and units per worker."""

    def __init__(self, units: int, grain: int, size: int = 64) -> None:
        self.units = np.zeros(max(units, 1), np.int64)
        self.workers = np.zeros((size, 16), np.int64)
        self.words = np.array([self.units.ctypes.data, self.workers.ctypes.data], np.int64)
        kernel = Kernel("tests.support.engine.kernels", "count").address
        self.step = Step(kernel, self.words.ctypes.data, units, grain)


def burn(pauses: int, units: int, grain: int) -> tuple[Step, Words]:
    words = np.array([pauses, 0], np.int64)
    kernel = Kernel("tests.support.engine.kernels", "burn").address
    return Step(kernel, words.ctypes.data, units, grain), words


@pytest.fixture(params=[True, False], ids=["futex", "python"])
def pool(request: pytest.FixtureRequest) -> Pool:
    if request.param and not sys.platform.startswith("linux"):
        pytest.skip("helpers sleep in Python on this system")
    return Pool(2, in_kernel=bool(request.param))


def test_an_empty_program() -> None:
    assert Program([]).run()
    finished, times = Program([]).run_timed()
    assert finished
    assert times.shape == (0, 2)


@pytest.mark.parametrize("tiny", [True, False])
def test_steps_run_in_order(tiny: bool) -> None:
    counters = [Counter(units, 0) for units in (1, 0, 7)]
    program = Program([c.step for c in counters], tiny=tiny)
    for _ in range(3):
        assert program.run()
    assert [c.units.tolist() for c in counters] == [[3], [0], [3] * 7]
    assert counters[2].workers[0, 0] == 21


def test_more_units_than_a_ticket_counts() -> None:
    units = (abi.TICKET_MASK << 2) + 3
    counter = Counter(0, 0)
    kernel = Kernel("tests.support.engine.kernels", "tally").address
    step = Step(kernel, counter.words.ctypes.data, units, 1 << 20)
    assert Program([step], 2, shared(4)).run()
    assert counter.workers[:, 0].sum() == units


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 40)), max_size=12), st.integers(1, 5))
def test_every_unit_runs_once(steps: list[tuple[int, int]], threads: int) -> None:
    counters = [Counter(units, grain) for units, grain in steps]
    program = Program([c.step for c in counters], threads, shared(4))
    assert program.run()
    for counter, (units, _) in zip(counters, steps, strict=True):
        assert (counter.units[:units] == 1).all()
        assert counter.workers[:, 0].sum() == units
        assert not counter.workers[min(threads, 4) :].any()


def test_many_programs_at_once(pool: Pool) -> None:
    """More callers than threads, all on one pool."""
    rounds, failures = 60, list[str]()

    def caller(seed: int) -> None:
        counters = [Counter(97 + seed, 1), Counter(1000, 10), Counter(3, 1), Counter(50, 0)]
        program = Program([c.step for c in counters], 2, pool)
        for _ in range(rounds):
            if not program.run():
                failures.append("cancelled")
        failures.extend("a unit was lost" for c in counters if (c.units != rounds).any())

    callers = [threading.Thread(target=caller, args=(k,)) for k in range(6)]
    for thread in callers:
        thread.start()
    for thread in callers:
        thread.join(60)
        assert not thread.is_alive()
    assert not failures
    assert state(pool)[abi.POOL_WALKERS // 8] == 0
    assert state(pool)[abi.POOL_BUSY // 8] == 0


def test_one_program_called_from_many_threads(pool: Pool) -> None:
    counter = Counter(500, 5)
    program = Program([counter.step] * 4, 2, pool)
    callers = [
        threading.Thread(target=lambda: [program.run() for _ in range(20)]) for _ in range(4)
    ]
    for thread in callers:
        thread.start()
    for thread in callers:
        thread.join(60)
    assert (counter.units == 4 * 4 * 20).all()


FIRST = """
import sys, threading
import numpy as np
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.engine.program.pool import shared
from subgraph.engine.program.program import Program, Step
sys.setswitchinterval(1e-6)
words = np.array([1, 0])
step = Step(Kernel("tests.support.engine.kernels", "burn").address, words.ctypes.data, 8, 1)
gate = threading.Barrier(8)
def caller():
    gate.wait()
    program = Program([step], 2, shared(2))
    for _ in range(100):
        program.run()
callers = [threading.Thread(target=caller) for _ in range(8)]
for thread in callers:
    thread.start()
for thread in callers:
    thread.join()
print(words[1])
"""


def test_the_first_programs_of_a_process_start_at_once() -> None:
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", FIRST],
            env=variables,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert (done.returncode, done.stdout.strip()) == (0, "6400"), done.stderr


def state(pool: Pool) -> Words:
    words = abi.pool_bytes(pool.size) // 8
    return np.ctypeslib.as_array(
        ctypes.cast(pool.address, ctypes.POINTER(ctypes.c_int64)), (words,)
    )


def helped(pool: Pool) -> bool:
    """Run steps that wait for a helper until one takes part; it may be about to sleep."""
    words = np.array([0, 200], np.int64)
    step = Step(Kernel("tests.support.engine.kernels", "meet").address, words.ctypes.data, 8, 1)
    program = Program([step], 2, pool)
    deadline = time.monotonic() + 60
    while not words[0] and time.monotonic() < deadline:
        assert program.run()
    return bool(words[0])


def test_helpers_help(pool: Pool) -> None:
    assert helped(pool)


def test_helpers_wake_up_again(pool: Pool) -> None:
    assert helped(pool)
    time.sleep(0.05)  # they sleep now
    assert helped(pool)


def two_cores() -> set[int]:
    """Return the cores that this thread may run on; skip the test if helpers cannot be moved."""
    if not sys.platform.startswith("linux"):
        pytest.skip("helpers sleep in Python on this system")
    cores = os.sched_getaffinity(0)
    if len(cores) == 1:
        pytest.skip("there is no other core")
    return cores


def word_of_helper(pool: Pool, word: int) -> int:
    line = abi.POOL_TICKETS + abi.LINE  # of the first helper
    return int(state(pool)[(line + word) // abi.WORD])


def test_a_sleeping_helper_wakes_on_another_core_than_the_caller() -> None:
    cores = two_cores()
    pool = Pool(2, in_kernel=True)
    assert helped(pool)
    thread = word_of_helper(pool, abi.POOL_THREAD)
    deadline = time.monotonic() + 60

    def until(condition: Callable[[], bool]) -> None:
        while not condition():
            assert time.monotonic() < deadline

    # A step that both work on for long enough to look at where the helper may run meanwhile.
    step, _words = burn(50_000, 100, 25)
    caller = threading.Thread(target=Program([step], 2, pool).run)
    until(lambda: word_of_helper(pool, abi.POOL_ASLEEP) == 1)
    caller.start()
    until(lambda: len(os.sched_getaffinity(thread)) == len(cores) - 1)
    assert os.sched_getaffinity(thread) < cores
    caller.join()
    until(lambda: os.sched_getaffinity(thread) == cores)
    pool.close()


def test_a_caller_with_one_core_does_not_move_helpers() -> None:
    cores = two_cores()
    pool = Pool(2, in_kernel=True)
    assert helped(pool)
    thread = word_of_helper(pool, abi.POOL_THREAD)
    time.sleep(0.05)  # it sleeps now
    try:
        os.sched_setaffinity(0, {min(cores)})
        counter = Counter(64, 1)
        assert Program([counter.step], 2, pool).run()
        np.testing.assert_array_equal(counter.units, 1)
        assert os.sched_getaffinity(thread) == cores
    finally:
        os.sched_setaffinity(0, cores)
    pool.close()


def test_idle_helpers_cost_nothing() -> None:
    if not sys.platform.startswith("linux"):
        pytest.skip("helpers poll on this system")
    pool = Pool(3)
    counter = Counter(64, 1)
    Program([counter.step], 3, pool).run()
    time.sleep(0.02)
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.05
    pool.close()


@pytest.mark.parametrize("lanes", [4, 16])
def test_results_do_not_depend_on_threads(lanes: int) -> None:
    x = np.random.default_rng(1).normal(size=64 * 101).astype(np.float32)
    results: list[bytes] = []
    for threads in (1, 2, 3, 7):
        y = np.zeros_like(x)
        words = np.array([x.ctypes.data, y.ctypes.data], np.int64)
        kernel = Kernel("tests.support.engine.kernels", "scale", lanes=lanes).address
        program = Program([Step(kernel, words.ctypes.data, 101, 1)], threads, shared(7))
        assert program.run()
        results.append(y.tobytes())
    assert len(set(results)) == 1


def test_cancel_stops_between_steps() -> None:
    counters = [Counter(4, 0), Counter(4, 0)]
    program = Program([c.step for c in counters])
    program.cancel()
    assert not program.run()
    assert counters[0].units.sum() == 0
    program.clear()
    assert program.run()
    assert counters[1].units.sum() == 4


def test_cancel_from_another_thread(pool: Pool) -> None:
    step, words = burn(20000, 10, 1)
    program = Program([step] * 10000, 2, pool)
    outcome: list[bool] = []
    runner = threading.Thread(target=lambda: outcome.append(program.run()))
    runner.start()
    while words[1] == 0:
        time.sleep(0.001)
    program.cancel()
    runner.join(30)
    assert outcome == [False]
    assert 0 < words[1] < 100000
    assert words[1] % 10 == 0  # the step that was running ended


def test_times_of_steps() -> None:
    slow, _words = burn(20000, 8, 0)
    counter = Counter(1, 0)
    quick = counter.step
    before = time.perf_counter_ns()
    finished, times = Program([quick, slow, quick]).run_timed()
    after = time.perf_counter_ns()
    assert finished
    assert (np.diff(times.ravel()) >= 0).all()
    spent = times[:, 1] - times[:, 0]
    assert spent[1] > spent[0]
    assert spent[1] > spent[2]
    if sys.platform.startswith("linux"):
        assert before <= times[0, 0] <= times[-1, 1] <= after


def test_a_closed_pool_leaves_programs_running(pool: Pool) -> None:
    before = set(threading.enumerate())
    counter = Counter(100, 1)
    program = Program([counter.step], 2, pool)
    assert program.run()
    helpers = set(threading.enumerate()) - before
    assert [t.name for t in helpers] == ["subgraph-1"]
    pool.close()
    pool.close()
    assert program.run()
    assert (counter.units == 2).all()
    for thread in helpers:
        thread.join(10)
        assert not thread.is_alive()


def test_a_dropped_pool_ends_its_threads() -> None:
    before = set(threading.enumerate())
    pool = Pool(5)
    counter = Counter(64, 1)
    Program([counter.step], 5, pool).run()
    mine = set(threading.enumerate()) - before
    assert len(mine) == 4
    del pool
    gc.collect()
    for thread in mine:
        thread.join(10)
        assert not thread.is_alive()


def test_grain_follows_the_time_of_a_step() -> None:
    assert grain(1000, 500.0) == 0
    assert grain(1, 1e9) == 0
    assert grain(1000, 1e6) == 1
    assert grain(1000, 1e4) == 100
    assert grain(1000, 1e6, least=16) == 16


@pytest.mark.parametrize("size", [0, -1, 5000])
def test_pool_sizes(size: int) -> None:
    with pytest.raises(ConfigError, match="1 to 1024"):
        Pool(size)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_has_helpers_of_its_own(pool: Pool) -> None:
    counter = Counter(64, 1)
    step, _words = burn(2000, 64, 1)
    program = Program([step, counter.step], 2, pool)
    stop = threading.Event()
    # The fork happens while another thread is inside the pool.
    busy = threading.Thread(target=lambda: [program.run() for _ in iter(stop.is_set, True)])
    busy.start()
    time.sleep(0.01)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            mine = Counter(64, 1)
            again = Program([step, mine.step], 2, pool)
            for _ in range(5):
                again.run()
            code = 0 if (mine.units == 5).all() and helped(pool) else 2
        finally:
            os._exit(code)
    stop.set()
    busy.join(30)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert program.run()


EXIT = """
import sys, threading, time
import numpy as np
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.engine.program.pool import Pool, shared
from subgraph.engine.program.program import Program, Step, grain
words = np.array([500, 0])
step = Step(Kernel("tests.support.engine.kernels", "burn").address, words.ctypes.data, 64, 1)
for pool in (shared(3), Pool(2, in_kernel=False)):
    program = Program([step] * 20, pool.size, pool)
    program.run()
    keep = globals().setdefault("keep", [])
    keep += [pool, program]
if sys.argv[1] == "running":
    def forever():
        while True:
            program.run()
    threading.Thread(target=forever, daemon=True).start()
    time.sleep(0.05)
if sys.argv[1] == "sleeping":
    time.sleep(0.1)
print("end")
"""


@pytest.mark.parametrize("how", ["spinning", "sleeping", "running"])
def test_the_interpreter_exits(how: str) -> None:
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", EXIT, how],
        env=variables,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "end"), done.stderr
    assert not done.stderr
