"""Every kernel under Oclgrind: no race, no access out of bounds, and the right results.

The tests of ``test_opencl_ops.py`` run on Oclgrind's device, once for each form of the kernels, and
those of ``test_gpu_kernels.py`` for a GPU; no other device runs a node. What was launched is
compared with the kernels that there are.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import pytest

from subgraph.errors import DeviceError
from subgraph.opencl.runtime import SIMULATOR, find_devices

HERE = Path(__file__).parent
ROOT = Path(__file__).parents[2]
FORMS, PARTS = ("CPU", "GPU"), 12
GENERATED = {"elementwise.run"}  # kernels without a file: their text is made for each chain
# Kernels that no run can reach, and why.
UNREACHED: dict[str, str] = {}


def simulator() -> str:
    """Return the id of the device that Oclgrind is, "" without it."""
    try:
        platforms = [device.platform.name for device in find_devices()]
    except DeviceError:
        return ""
    return str(platforms.index(SIMULATOR)) if SIMULATOR in platforms else ""


pytestmark = [
    pytest.mark.oclgrind,
    pytest.mark.timeout(7200),
    pytest.mark.skipif(
        not simulator(), reason="Oclgrind is not installed; make check-kernels does it"
    ),
]


def written() -> set[str]:
    """Return all kernels, as "file.kernel"."""
    names: set[str] = set()
    for path in (ROOT / "ops").rglob("*.cl"):
        text = re.sub(r"__attribute__\(\(.*?\)\)\)", "", path.read_text())
        file = path.relative_to(ROOT / "ops").with_suffix("").as_posix()
        names |= {f"{file}.{name}" for name in re.findall(r"__kernel\s+void\s+(\w+)", text)}
    return names | GENERATED


def run_part(form: str, part: int, folder: Path) -> tuple[dict[str, Any], str]:
    """Run a part of the tests; return the notes on it, and what failed."""
    log, notes = folder / f"{form}{part}.log", folder / f"{form}{part}.json"
    environment = {
        **os.environ,
        "OCLGRIND_DATA_RACES": "1",
        "OCLGRIND_LOG": str(log),
        "OCLGRIND_NOTES": str(notes),
        "OCLGRIND_PART": f"{part}/{PARTS}",
        # Its compiler makes vectors of addresses of some loops, which its simulator cannot follow.
        "OCLGRIND_BUILD_OPTIONS": "-cl-opt-disable",
        "PYOPENCL_NO_CACHE": "1",
        "PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", ""))),
        "SUBGRAPH_OPENCL_DEVICE_ID": simulator(),
        "SUBGRAPH_OPENCL_KERNELS": form,
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "tests.opencl.oclgrind_plugin",
        "-p",
        "no:cacheprovider",
    ]
    command += ["--timeout", "3600", "--tb", "short", str(HERE / "test_opencl_ops.py")]
    if form == "GPU":
        command.append(str(HERE / "test_gpu_kernels.py"))
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    failed = "" if done.returncode == 0 else f"{form}, part {part}: {done.stdout[-6000:]}"
    return json.loads(notes.read_text()), failed + (done.stderr[-2000:] if failed else "")


def test_every_kernel(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts = [(form, part) for part in range(PARTS) for form in FORMS]
    ran: list[tuple[dict[str, Any], str]] = []
    with capsys.disabled(), ThreadPoolExecutor(os.cpu_count()) as pool:
        began = time.monotonic()
        for done in as_completed([pool.submit(run_part, *part, tmp_path) for part in parts]):
            ran.append(done.result())
            state = ran[-1][1] or "no finding"
            spent = time.monotonic() - began
            print(f"\n{len(ran)} of {len(parts)} parts after {spent:.0f} s: {state}", flush=True)
    launched = {name for notes, _ in ran for name in notes["launched"]}
    left_out = {test: why for notes, _ in ran for test, why in notes["left out"].items()}
    with capsys.disabled():
        print(f"\nkernels checked: {len(written() & launched)} of {len(written())}")
        for name, why in {**UNREACHED, **left_out}.items():
            print(f"not checked: {name}: {why}")
    failures = [failed for _, failed in ran if failed]
    assert not failures, "\n".join(failures)
    assert written() - launched == set(UNREACHED)


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
    subprocess.run(
        [sys.executable, "-c", FAULTY, simulator()], env=environment, check=True, timeout=60
    )
    assert "Invalid write" in log.read_text()
