"""Every kernel under Oclgrind: no race, no access out of bounds, and the right results."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from subgraph.errors import DeviceError
from subgraph.opencl.runtime import SIMULATOR, find_devices

WORKER = Path(__file__).with_name("oclgrind_worker.py")
PARTS = 4


def simulator() -> str:
    """Return the name of the device that Oclgrind is, "" without it."""
    try:
        platforms = [device.platform.name for device in find_devices()]
    except DeviceError:
        return ""
    return f"OPENCL.{platforms.index(SIMULATOR)}" if SIMULATOR in platforms else ""


pytestmark = [
    pytest.mark.oclgrind,
    pytest.mark.skipif(
        not simulator(), reason="Oclgrind is not installed; make check-kernels does it"
    ),
]


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("kernels", ["CPU", "GPU"])
def test_kernels(kernels: str, part: int, tmp_path: Path) -> None:
    log = tmp_path / "oclgrind.log"
    environment = {**os.environ, "OCLGRIND_DATA_RACES": "1", "OCLGRIND_LOG": str(log)}
    command = [sys.executable, str(WORKER), simulator(), kernels, str(part), str(PARTS)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-3000:]
    found = log.read_text() if log.exists() else ""
    assert not found, f"{done.stdout[-300:]}\n{found[:4000]}"


FAULTY = """
import sys
import numpy as np
from subgraph.opencl.runtime import ClSource, opencl, runtime
found = runtime(int(sys.argv[1]))
text = "__kernel void run(__global int* x) { x[get_global_id(0) + OFFSET] = OFFSET; }"
queue, held = found.queue(), found.buffer(16)
kernel = found.kernel(ClSource("faulty", text, (("OFFSET", 3),)), "run")
kernel.set_args(held)
opencl().enqueue_nd_range_kernel(queue, kernel, (4,), (4,)).wait()
"""


def test_oclgrind_finds_what_is_wrong(tmp_path: Path) -> None:
    log = tmp_path / "oclgrind.log"
    environment = {**os.environ, "OCLGRIND_LOG": str(log)}
    index = simulator().partition(".")[2]
    subprocess.run([sys.executable, "-c", FAULTY, index], env=environment, check=True, timeout=60)
    assert "Invalid write" in log.read_text()
