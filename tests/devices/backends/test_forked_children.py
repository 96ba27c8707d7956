"""A forked child runs the models that it inherits by the libraries that its parent has used."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.backends import ON_CARDS, PACKAGES, installed, unusable

SETUP = """
import sys
import threading
import numpy as np
import subgraph as sg
from subgraph import ops
from tests.support.children import in_child

def net():
    x = sg.input("x", ("N", 64), "float32")
    w = sg.parameter("w", np.ones((64, 64), np.float32))
    return sg.Graph([x], [ops.Relu(ops.MatMul(x, w)), ops.Tanh(ops.MatMul(x, w))])

config = {"RUNTIME_FALLBACK": False}
core, device = sg.Core(), sys.argv[1]
model = core.compile_model(net(), device, config)
array = np.ones((3000, 64), np.float32)  # large enough for the libraries to use their threads
request = model.create_infer_request()
"""

AFTER_A_RUN = (
    SETUP
    + """
for run in (model, request.infer):
    assert (run([array])[0] == 64).all()

def check():
    for run in (model, request.infer, model.create_infer_request().infer):
        assert (run([array])[0] == 64).all()
        assert (run([array[:2500]])[0] == 64).all()
    request.start_async([array])
    assert (request.wait(60)[0] == 64).all()
    assert (core.compile_model(net(), device, config)([array])[0] == 64).all()

for _ in range(20):
    request.infer([array])
    in_child(check, seconds=60)
assert (model([array])[0] == 64).all()
"""
)

DURING_RUNS = (
    SETUP
    + """
stop = threading.Event()

def again_and_again(run):
    while not stop.is_set():
        run([array])

def check():
    assert (model([array])[0] == 64).all()
    assert (model([array[:2500]])[0] == 64).all()

threads = [
    threading.Thread(target=again_and_again, args=(model.create_infer_request().infer,))
    for _ in range(3)
]
for thread in threads:
    thread.start()
try:
    for _ in range(20):
        model([array])
        in_child(check, seconds=20)
finally:
    stop.set()
    for thread in threads:
        thread.join()
assert (model([array])[0] == 64).all()
"""
)


@pytest.mark.parametrize("script", [AFTER_A_RUN, DURING_RUNS], ids=["after a run", "during runs"])
@pytest.mark.parametrize("device", installed(*(name for name in PACKAGES if name not in ON_CARDS)))
def test_a_forked_child_does_not_wait_for_threads_of_its_parent(device: str, script: str) -> None:
    """GNU's OpenMP, in PyTorch and oneDNN, waits for them without end.

    TBB, in OpenVINO, waits for locks that they hold while they look for work after a run.
    """
    command = [sys.executable, "-c", script, device]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert ran.returncode == 0, ran.stderr[-3000:]


OUTSIDE = """
import numpy as np
import torch
import subgraph as sg
from subgraph import ops
from tests.support.children import in_child

torch.set_num_threads(4)
torch.randn(1000, 1000).exp()  # by threads of OpenMP
x = sg.input("x", (600, 64))
graph = sg.Graph([x], [ops.Tanh(ops.Relu(x))])

def check():
    sg.compile_model(graph, "TORCH", {"RUNTIME_FALLBACK": False})(np.ones((600, 64), np.float32))

in_child(check, seconds=60)
"""


@pytest.mark.skipif(bool(unusable("TORCH")), reason="PyTorch cannot be used")
def test_a_forked_child_of_a_user_of_pytorch() -> None:
    command = [sys.executable, "-c", OUTSIDE]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert ran.returncode == 0, ran.stderr[-3000:]
