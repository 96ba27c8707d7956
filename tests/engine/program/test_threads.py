"""Networks on any number of threads: the same bits, with many requests and with forks."""

from __future__ import annotations

import os
import random
import threading
from typing import Any

import numpy as np
import pytest

import subgraph as sg
from subgraph.graph.types import Array
from subgraph.tools.cli_inputs import input_arrays, ports
from subgraph.tools.warmup_graphs import FAMILIES

pytestmark = pytest.mark.slow
Arrays = dict[str, Array]
THREADS = range(1, 9)


def family(name: str) -> tuple[sg.Graph, Arrays]:
    """Return the graph of a family with weights of every size, and inputs."""
    graph = FAMILIES[name]()
    rng = np.random.default_rng(0)
    for parameter in graph.parameters.values():
        array = parameter.array
        if array.dtype.kind == "f" and array.ndim > 1:
            fan = max(1.0, array.size / array.shape[0])
            parameter.assign((rng.standard_normal(array.shape) / fan**0.5).astype(array.dtype))
    return graph, input_arrays(ports(graph), {}, {}, 0)


def bits(model: sg.CompiledModel, inputs: Arrays) -> bytes:
    """Return the bytes of all results of a run."""
    results = model(inputs)
    return b"".join(np.asarray(results[k]).tobytes() for k in range(len(results)))


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_every_number_of_threads_gives_the_same_bits(name: str) -> None:
    graph, inputs = family(name)
    alone = None
    for threads in THREADS:
        model = sg.compile_model(graph, "CPU", {"INFERENCE_NUM_THREADS": threads})
        for _ in range(3):  # which thread does what differs from run to run
            got = bits(model, inputs)
            alone = got if alone is None else alone
            assert got == alone, threads


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_many_callers_while_children_are_forked() -> None:
    configs: list[dict[str, Any]] = [
        {"INFERENCE_NUM_THREADS": 2},
        {"INFERENCE_NUM_THREADS": 5},
        {"INFERENCE_NUM_THREADS": 4, "NUM_STREAMS": 2},
        {"PERFORMANCE_HINT": "THROUGHPUT"},
    ]
    names = ["dense convolutions", "transformer encoders", "recurrent networks", "small networks"]
    jobs: list[tuple[sg.CompiledModel, Arrays, bytes]] = []
    for name in names:
        graph, inputs = family(name)
        wanted = bits(sg.compile_model(graph, "CPU", {"INFERENCE_NUM_THREADS": 1}), inputs)
        jobs += [(sg.compile_model(graph, "CPU", config), inputs, wanted) for config in configs]
    wrong: list[int] = []

    def call(seed: int, times: int) -> None:
        rng = random.Random(seed)
        for _ in range(times):
            number = rng.randrange(len(jobs))
            model, inputs, wanted = jobs[number]
            if rng.random() < 0.3:
                request = model.create_infer_request()
                request.start_async(inputs)
                request.wait()
            if bits(model, inputs) != wanted:
                wrong.append(number)

    def child(seed: int) -> int:
        """Run in a forked child: call from two threads, with the state that the parent left."""
        callers = [threading.Thread(target=call, args=(seed + k, 10)) for k in range(2)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join(60)
        alive = any(caller.is_alive() for caller in callers)
        return 3 if alive else 2 if wrong else 0

    callers = [threading.Thread(target=call, args=(k, 150)) for k in range(12)]
    for caller in callers:
        caller.start()
    forks = 0
    while any(caller.is_alive() for caller in callers):
        forks += 1
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                code = child(1000 * forks)
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert not wrong
    assert forks > 0
