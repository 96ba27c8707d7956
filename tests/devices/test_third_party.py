"""A device that another distribution brings: installed by pip, used alone and under HETERO."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the distribution of the fixtures as a user would, into a folder of its own."""
    source = Path(__file__).parents[1] / "fixtures" / "tinyaccel"
    work = tmp_path_factory.mktemp("tinyaccel")
    copied = work / "source"
    for file in source.rglob("*"):
        if file.is_file() and "__pycache__" not in file.parts:
            target = copied / file.relative_to(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(file.read_bytes())
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    command += ["--no-build-isolation", "--disable-pip-version-check"]
    command += ["--root-user-action=ignore", "--target", str(work / "site"), str(copied)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.fail(f"pip cannot install the fixture: {done.stderr}")
    return work / "site"


THIRD_PARTY = """
import io, sys
import numpy as np
import subgraph as sg
from subgraph import ops

core = sg.Core()
assert {"TINY.0", "TINY.1"} <= set(core.available_devices), core.available_devices
assert core.failed_devices == {"BROKEN": "device BROKEN cannot start: no such chip on the bus"}
assert core.get_property("TINY", "TINY_CORES") == 4
assert core.get_property("TINY", "TINY_SERIAL") == "T-1"
supported = core.get_property("TINY", "SUPPORTED_PROPERTIES")
assert (supported["TINY_CORES"], supported["TINY_UNROLL"]) == ("RO", "RW")
core.set_property("TINY", {"TINY_UNROLL": 4})

x = sg.input("x", ("N", 3))
w = sg.parameter("w", np.arange(12, dtype=np.float32).reshape(3, 4))
y = ops.Scale(ops.Relu(ops.MatMul(x, w)), by=2.0)
alone = sg.Graph([x], [y], "alone")
mixed = sg.Graph([x], [ops.Sigmoid(y, name="sig"), y], "mixed")
X = np.array([[1, -2, 3]], np.float32)
want = np.maximum(X @ w.parameter.array, 0) * 2

def run_all(model):
    np.testing.assert_allclose(model(X)[len(model.outputs) - 1], want, rtol=1e-6)
    return model

m = run_all(core.compile_model(alone, "TINY"))
assert m.get_property("TINY_UNROLL") == 4
assert m.graph.nodes[0].op.unroll == 4
blob = io.BytesIO()
m.export_model(blob)
import tinyaccel
calls, real = [], tinyaccel.transposed.__code__
blob.seek(0)
again = run_all(core.import_model(blob, "TINY"))
assert again.graph.nodes[0].op.weights.stats().made == 0, "the transposed weight was in the file"
again.parameters["w"].assign(again.parameters["w"].array * 3)
want = want * 3
run_all(again)
want = want / 3

found = core.query_model(mixed, "TINY")
assert found.reasons == {"sig": "TINY has no kernel for Sigmoid"}, found.reasons
if "hetero" in sys.argv[1:]:
    for devices in ("TINY,REFERENCE", "TINY.1,REFERENCE", "TINY,CPU,REFERENCE"):
        h = run_all(core.compile_model(mixed, "HETERO:" + devices, {"TINY_UNROLL": 8}))
        assert h.execution_devices[0] == devices.split(",")[0]
        assert h.get_property("TRANSFERS") == 1
        out = io.BytesIO()
        h.export_model(out)
        out.seek(0)
        run_all(core.import_model(out))
    cut = sg.optimize_for(mixed, "tiny")
    assert [n.name for n in cut.nodes if n.subgraph is not None]
print("fine")
"""


def run_third_party(site: Path, *arguments: str) -> None:
    code = f"import sys; sys.path.insert(0, {str(site)!r})\n{THIRD_PARTY}"
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip().endswith("fine")


def test_a_third_party_distribution_alone(installed: Path) -> None:
    run_third_party(installed)


def test_a_third_party_distribution_under_hetero(installed: Path) -> None:
    run_third_party(installed, "hetero")
