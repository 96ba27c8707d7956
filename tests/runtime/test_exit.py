"""The end of a process is clean, whatever runs then: nothing on stderr, no abort."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from subgraph.system import exiting
from subgraph.system.exiting import Uninterrupted

ROOT = Path(__file__).parents[2]
HEAD = """
import logging, sys, threading, time
import numpy as np
import subgraph as sg
from subgraph import ops
logging.getLogger("subgraph").setLevel(logging.ERROR)  # "compiling ..." is no error
x = sg.input("x", ("N", 64))
w = sg.parameter("w", np.ones((64, 64), np.float32))
hidden = ops.Relu(ops.MatMul(ops.Tanh(ops.MatMul(x, w)), w))
graph = sg.Graph([x], [ops.Softmax(hidden)], "net")
X = np.ones((256, 64), np.float32)
model = sg.compile_model(graph, DEVICE)
"""
ENDS = {
    "after a run": "request = model.create_infer_request(); request.infer(X)",
    "functions of the script that are registered for good": """
sg.watch_compilation(lambda event: None)
@sg.register_property("mine")
class Mine(sg.SubgraphProperty):
    def create_subgraph_selector(self): return sg.ContainOpSelector({"Tanh"})
several = sg.compile_model(sg.optimize_for(graph, "mine"), "MULTI:REFERENCE,CPU")
request = several.create_infer_request(); request.infer(X); model(X)
""",
    "requests on their way": """
requests = [model.create_infer_request() for _ in range(4)]
for request in requests:
    request.start_async(X)
""",
    "callbacks on their way": """
requests = [model.create_infer_request() for _ in range(4)]
for request in requests:
    request.set_callback(lambda: time.sleep(0.3))
    request.start_async(X)
""",
    "a request that starts itself again": """
request = model.create_infer_request()
request.set_callback(lambda ended: ended.start_async(X))
request.start_async(X)
time.sleep(0.1)
""",
    "a thread in the middle of runs": """
model(X)
threading.Thread(target=lambda: [model(X) for _ in range(10**6)], daemon=True).start()
time.sleep(0.05)
""",
    "a cycle of references": """
class Holder: pass
holder = Holder()
holder.self, holder.model, holder.request = holder, model, model.create_infer_request()
holder.request.infer(X)
del model, holder
""",
    "the work of an object's end": """
class Owner:
    def __init__(self): self.model, self.self = model, self
    def __del__(self): self.model.execution_devices
owner = Owner()
""",
    "a measured run": """
request = sg.compile_model(graph, DEVICE, {"ENABLE_PROFILING": True}).create_infer_request()
request.infer(X)
request.profile()
request.start_async(X)
""",
    "a child of the process": """
import os, warnings
warnings.simplefilter("ignore")
request = model.create_infer_request()
request.start_async(X)
child = os.fork()
if child:
    assert os.waitpid(child, 0)[1] == 0
    request.wait()
""",
    "a user's op that runs and one that closes": """
class Handle:
    def close(self): time.sleep(0.01)
class Op(sg.SubgraphOp):
    def forward(self, inputs):
        self.weights.get("handle", lambda array: Handle(), inputs[1])
        time.sleep(0.2)
        return [inputs[0] @ inputs[1].array]
class Property(sg.SubgraphProperty):
    def create_subgraph_selector(self): return sg.ContainOpSelector({"MatMul"})
    def create_subgraph_node(self, subgraph, k): return sg.subgraph_node(subgraph, op=Op(subgraph))
own = sg.compile_model(sg.optimize_for(graph, Property()), DEVICE)
own(X)
requests = [own.create_infer_request() for _ in range(3)]
for request in requests:
    request.start_async(X)
""",
}


def ended(source: str) -> str:
    """Return what a process writes to stderr until it has ended well."""
    run = subprocess.run(
        [sys.executable, "-c", source],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert run.returncode == 0, run.stderr
    return run.stderr


@pytest.mark.parametrize("device", ["CPU", "OPENCL", "MULTI:OPENCL,CPU"])
@pytest.mark.parametrize("end", ENDS)
def test_the_end_is_quiet(end: str, device: str) -> None:
    assert ended(f"DEVICE = {device!r}\n{HEAD}\n{ENDS[end]}") == ""


def test_auto_may_still_compile_at_the_end() -> None:
    head = HEAD.replace("DEVICE)", '"AUTO:OPENCL,CPU", {"START_ON_CPU": True})')
    assert ended(f"{head}\nmodel(X)") == ""


def test_the_end_waits_for_the_threads_of_a_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PoCL compiles a kernel when it is first launched, on a thread of its own."""
    monkeypatch.setenv("POCL_CACHE_DIR", str(tmp_path))
    source = f"""
DEVICE = "OPENCL"
{HEAD}
from subgraph.opencl.executable_plan import ClExecutablePlan
ClExecutablePlan.finish = lambda self, pending: pending[0]
request = model.create_infer_request()
request.infer(X)
threading.Thread(target=lambda held: time.sleep(60), args=(request,), daemon=True).start()
"""
    assert ended(source) == ""


def test_a_release_that_raises_is_told_as_ours() -> None:
    source = f"""
DEVICE = "REFERENCE"
{HEAD}
class Op(sg.SubgraphOp):
    def forward(self, inputs): return [inputs[0] @ inputs[1].array]
    def release(self): raise OSError("handle gone")
class Property(sg.SubgraphProperty):
    def create_subgraph_selector(self): return sg.ContainOpSelector({{"MatMul"}})
    def create_subgraph_node(self, subgraph, k): return sg.subgraph_node(subgraph, op=Op(subgraph))
logging.getLogger("subgraph").setLevel(logging.WARNING)
own = sg.compile_model(sg.optimize_for(graph, Property()), DEVICE)
own(X)
del own
"""
    said = ended(source)
    assert "Op.release of model 'net' raised OSError: handle gone" in said
    assert "Exception ignored" not in said


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Uninterrupted:
    monkeypatch.setattr(exiting, "_EXIT_TIMEOUT", 0.3)
    return Uninterrupted()


def test_the_end_waits_for_who_is_inside(gate: Uninterrupted) -> None:
    inside, ended_at = threading.Event(), [0.0]

    def work() -> None:
        with gate, gate:
            inside.set()
            time.sleep(0.1)
            with gate:  # one that is inside goes on
                ended_at[0] = time.monotonic()

    thread = threading.Thread(target=work)
    thread.start()
    inside.wait()
    with gate:  # of the main thread itself
        gate.end()
    assert 0 < ended_at[0] <= time.monotonic()
    thread.join()


def test_the_end_does_not_wait_for_ever(gate: Uninterrupted) -> None:
    stop = threading.Event()

    def work() -> None:
        with gate:
            stop.wait()

    thread = threading.Thread(target=work)
    thread.start()
    while not gate._inside:  # pyright: ignore[reportPrivateUsage]
        time.sleep(0.001)
    start = time.monotonic()
    gate.end()
    assert 0.2 < time.monotonic() - start < 5
    stop.set()
    thread.join()


def test_the_end_waits_for_work_of_no_thread(gate: Uninterrupted) -> None:
    answers = [True, True, False]
    gate.wait_for(lambda: answers.pop(0))
    gate.wait_for(lambda: False)
    gate.end()
    assert not answers


def test_nobody_enters_while_the_process_ends(gate: Uninterrupted) -> None:
    gate.end()
    entered: list[float] = []

    def work() -> None:
        with gate:
            entered.append(time.monotonic())

    start = time.monotonic()
    thread = threading.Thread(target=work)
    thread.start()
    with gate:
        assert not entered, "the main thread goes on"
    thread.join()
    assert entered[0] - start > 0.2, "after some time: what is registered to end later may wait"
