"""What users install: the wheel in a clean environment, beside a user's own ops.py."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from subgraph.system.prebuilt_files import write_data
from subgraph.tools.build_command import carried

ROOT = Path(__file__).parents[2]

PREBUILT = Path("subgraph/prebuilt")  # as `make kernels` leaves it
SCRIPT = """
import ops  # the user's own
assert ops.MINE == 1
import numpy as np
import subgraph as sg
import subgraph.ops, subgraph.passes
assert "site-packages" in subgraph.ops.__file__, subgraph.ops.__file__
x = sg.input("x", (2, 3))
graph = sg.Graph([x], [sg.ops.Relu(x)])
array = np.array([[-1, 2, -3], [4, -5, 6]], np.float32)
devices = sg.Core().available_devices
assert {"CPU", "REFERENCE"} <= {*devices}, devices
for device in (*devices, "HETERO:CPU,REFERENCE"):
    result = sg.compile_model(graph, device)(x=array)
    assert (result[0] == np.maximum(array, 0)).all(), device
print("fine")
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Return the wheel of a checkout without kernels, and what its build wrote."""
    out = tmp_path_factory.mktemp("wheel")
    tree = tmp_path_factory.mktemp("tree")  # setuptools leaves files behind where it builds
    for name in ("subgraph", "ops", "passes"):
        shutil.copytree(
            ROOT / name, tree / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
        )
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    shutil.rmtree(tree / PREBUILT, ignore_errors=True)
    write_data(tree / PREBUILT / "schemas.pack", "of another release", b"")
    done = subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, tree],
        check=True,
        capture_output=True,
        text=True,
    )
    (path,) = out.glob("*.whl")
    return path, done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(built: tuple[Path, str]) -> Path:
    return built[0]


def test_a_build_without_kernels_says_so(built: tuple[Path, str], tmp_path: Path) -> None:
    assert "the wheel carries no compiled kernels" in built[1]
    assert "`make wheel` compiles them" in built[1]
    for name in ("neon", "x86-64-v3", "schemas"):
        (tmp_path / f"{name}.pack").write_bytes(bytes(200_000))
    said = "the wheel carries compiled kernels for neon, x86-64-v3 (0.4 MB)"
    assert carried(tmp_path) == (said, True)


def test_the_release_compiles_the_kernels_first() -> None:
    """``make wheel`` is what CONTRIBUTING says of a release."""
    steps = subprocess.run(
        ["make", "--dry-run", "wheel"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    assert steps.index("subgraph.tools.prebuild") < steps.index("-m build --wheel")
    assert "`make wheel`" in (ROOT / "CONTRIBUTING.md").read_text()


def test_wheel_has_code_types_and_kernels_and_no_tests(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {"subgraph/__init__.py", "subgraph/__init__.pyi", "subgraph/py.typed"} <= names
    assert {"subgraph/ops/__init__.py", "subgraph/passes/__init__.py"} <= names
    assert {name for name in names if name.startswith(f"{PREBUILT}/")} == {
        f"{PREBUILT}/schemas.pack"
    }
    for folder, package in (("ops", "subgraph/ops"), ("passes", "subgraph/passes")):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".cl"):
                assert f"{package}/{path.relative_to(ROOT / folder).as_posix()}" in names
    assert not {n for n in names if n.split("/")[0] in ("tests", "ops", "passes", "benchmarks")}


def test_wheel_runs_beside_a_users_own_ops(wheel: Path, tmp_path: Path) -> None:
    # The packages that Subgraph needs come from this environment; Subgraph itself from the wheel.
    venv.create(tmp_path / "env", with_pip=False)
    python = tmp_path / "env" / "bin" / "python"
    site = next((tmp_path / "env" / "lib").glob("python*/site-packages"))
    zipfile.ZipFile(wheel).extractall(site)
    (tmp_path / "ops.py").write_text("MINE = 1\n")
    (tmp_path / "script.py").write_text(SCRIPT)
    needs = [p for p in sys.path if "site-packages" in p]
    (site / "needs.pth").write_text("\n".join(needs))
    # An editable install of this checkout would win by its import hook: keep .pth hooks out.
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [python, tmp_path / "script.py"], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "fine"
