"""Guard pages: an access of a kernel outside its operands ends the process with a report."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from subgraph.errors import ConfigError
from subgraph.system import guard_pages
from subgraph.system.environment import GUARD

ROOT = Path(__file__).parents[2]
MODES = ("end", "begin")
linux = pytest.mark.skipif(sys.platform != "linux", reason="faults are reported on Linux only")

# A kernel that reads its input from one element further on, or further back.
_SHIFTED = """
import attrs, sys
import numpy as np
import subgraph as sg
from subgraph.engine.planner.lowering import Lowering

shift, size = int(sys.argv[1]), int(sys.argv[2])
emit = Lowering.emit

def shifted(self, kernel, words, units, **rest):
    x = self.inputs[0]
    moved = attrs.evolve(x, offset=x.offset + shift * x.itemsize)
    emit(self, kernel, [moved if word is x else word for word in words], units, **rest)

Lowering.emit = shifted
x = sg.input("x", (size,), "float32")
sg.compile_model(sg.Graph([x], [sg.ops.Relu(x, name="act")]), "CPU")([np.ones(size, np.float32)])
"""
# A kernel that writes to its input.
_WRITES = """
import numpy as np
import subgraph as sg
from subgraph.engine.planner.lowering import Lowering

emit = Lowering.emit

def swapped(self, kernel, words, units, **rest):
    other = {id(self.inputs[0]): self.outputs[0], id(self.outputs[0]): self.inputs[0]}
    emit(self, kernel, [other.get(id(word), word) for word in words], units, **rest)

Lowering.emit = swapped
x = sg.input("x", (100000,), "float32")
sg.compile_model(sg.Graph([x], [sg.ops.Relu(x, name="act")]), "CPU")([np.ones(100000, "float32")])
"""
# Prints the argument words of plans of all kinds that point outside the guarded areas.
_POINTERS = """
import numpy as np
import subgraph as sg
from subgraph import ops
from subgraph.system import guard_pages, guard_report

rng = np.random.default_rng(0)
f4 = lambda *shape: rng.standard_normal(shape).astype(np.float32)
x = sg.input("x", ("N", 3, 12, 12), "float32")
y = ops.Relu(ops.Conv(x, sg.parameter("w", f4(20, 3, 3, 3)), sg.parameter("b", f4(20))))
y = ops.ReduceMean(ops.MaxPool(y, kernel_shape=[2, 2]), np.array([2, 3]), keepdims=0)
y = ops.Softmax(ops.MatMul(y, sg.parameter("m", f4(20, 7))))
model = sg.compile_model(sg.Graph([x], [y]), "CPU", {"INFERENCE_NUM_THREADS": 2})
kinds = set()
for images in (1, 2, 3, 5, 40):
    model([f4(images, 3, 12, 12)])
    for bound in list(guard_report._runners):
        kinds.add(type(bound.plan).__name__)
        staged = [port for port in (*bound.inputs, *bound.outputs) if port.staging is not None]
        patches = [bound._arena_patch, *(port._patch for port in staged)]
        patches += [patch for _, patch in bound._entry_patches]
        for patch in patches:
            for at in patch.positions:
                word = int(bound._words[at])
                area = guard_pages.nearest_area(word)
                if area is None or not area[0] <= word <= area[0] + area[1]:
                    print("outside", at, hex(word), area)
print(*sorted(kinds))
"""


def run(code: str, mode: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run code in a process with a mode of guard pages."""
    path = os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={**os.environ, "SUBGRAPH_GUARD": mode, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@linux
@pytest.mark.parametrize("size", [3, 1000, 100_000])
def test_a_read_behind_the_end_is_fatal(size: int) -> None:
    done = run(_SHIFTED, "end", 1, size)
    assert done.returncode == -signal.SIGSEGV, done.stderr
    assert f"0 bytes behind the end of an area of {4 * size} bytes" in done.stderr
    assert "node 'act' (Relu), kernel elementwise.kernels.run" in done.stderr
    assert "that area is argument" in done.stderr


@linux
@pytest.mark.parametrize("size", [3, 1000, 100_000])
def test_a_read_before_the_beginning_is_fatal(size: int) -> None:
    done = run(_SHIFTED, "begin", -1, size)
    assert done.returncode == -signal.SIGSEGV, done.stderr
    assert f"4 bytes before an area of {4 * size} bytes" in done.stderr
    assert "node 'act' (Relu)" in done.stderr


@linux
def test_a_write_to_an_input_is_fatal() -> None:
    done = run(_WRITES, "end")
    assert done.returncode == -signal.SIGSEGV, done.stderr
    assert "of an area of 400000 bytes that is read-only" in done.stderr


def test_without_the_mode_the_access_is_not_noticed() -> None:
    done = run(_SHIFTED, "", 1, 1000)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("mode", MODES)
def test_every_pointer_of_a_plan_is_into_a_guarded_area(mode: str) -> None:
    done = run(_POINTERS, mode)
    assert (done.returncode, done.stdout) == (0, "Plan PlanInstance\n"), done.stderr


@pytest.mark.parametrize("mode", MODES)
def test_areas_end_or_begin_at_a_page(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard_pages, "MODE", mode)
    page = guard_pages.PAGE
    sizes = [0, 1, 64, page - 1, page, page + 1, 3 * page]
    offsets, total = guard_pages.guarded_offsets(sizes)
    for offset, size, before, after in zip(
        offsets, sizes, [0, *offsets], [*offsets[1:], total], strict=False
    ):
        assert (offset + size if mode == "end" else offset) % page == 0
        assert offset // page > before // page
        assert after // page > (offset + size - 1) // page + (mode == "begin")
    for size in sizes:
        array = guard_pages.empty((size,), np.dtype(np.uint8))
        assert (array == 0xFF).all()
        array[...] = 1
        copy = guard_pages.guarded_copy(array)
        assert (copy == array).all()
        assert not copy.flags.writeable
        assert guard_pages.nearest_area(array.ctypes.data) == (array.ctypes.data, size) or not size


def test_an_unknown_mode_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUBGRAPH_GUARD", "middle")
    with pytest.raises(ConfigError, match="SUBGRAPH_GUARD='middle'"):
        GUARD.value()


# Every operator, loops, and packed weights; `make check-guard` runs all tests.
_PART = (
    "operators/test_ops_devices.py",
    "engine/cpu/test_iterations.py",
    "ops/movement/test_packing.py",
)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("mode", MODES)
def test_kernels_stay_inside(mode: str) -> None:
    command = ["-m", "pytest", "-q", "--capture=sys", "-p", "no:cacheprovider", "-k", "not OPENCL"]
    done = subprocess.run(
        [sys.executable, *command, *(str(ROOT / "tests" / name) for name in _PART)],
        env={**os.environ, "SUBGRAPH_GUARD": mode},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
