"""Applications that PyInstaller makes: the hook lists what they need, and one runs a model."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import subgraph as sg
from subgraph import ops

APPLICATION = """
import sys
import numpy as np
import subgraph as sg
for device in ("CPU", "REFERENCE"):
    model = sg.compile_model(sys.argv[1], device)
    print(model(np.ones((1, 3, 8, 8), np.float32))[0].sum(), model.get_property("FALLBACKS"))
"""


def hook() -> dict[str, Any]:
    """Run the hook that the entry point names, as PyInstaller does."""
    (point,) = [e for e in entry_points(group="pyinstaller40") if e.module.startswith("subgraph.")]
    (folder,) = point.load()()
    return runpy.run_path(str(Path(folder, "hook-subgraph.py")))


def test_the_hook_lists_modules_and_files_that_are_found_by_name() -> None:
    found = hook()
    modules = set(found["hiddenimports"])
    assert modules >= {"subgraph.ops.conv.kernels", "subgraph.passes.fuse.gelu", "subgraph.ops"}
    assert not any(name.startswith("subgraph.testing") for name in modules)
    names = {Path(source).name for source, _ in found["datas"]}
    assert {"__init__.pyi", "py.typed", "kernels.cl"} <= names
    assert any(name.startswith("numba-") for name in names)
    assert found["module_collection_mode"] == "py"


@pytest.mark.slow
def test_an_application_runs_a_model(tmp_path: Path) -> None:
    """It is built from a wheel: PyInstaller does not follow editable installations."""
    root = Path(__file__).parents[2]
    environment = tmp_path / "environment"
    python = environment / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    install = [str(python), "-m", "pip", "install", "--quiet"]
    subprocess.run([*install, "pyinstaller>=6.10", str(root)], check=True)
    x = sg.input("x", (1, 3, 8, 8))
    weight = sg.parameter("w", np.ones((4, 3, 3, 3), np.float32))
    sg.save(sg.Graph([x], [ops.Relu(ops.Conv(x, weight))]), tmp_path / "model.onnx")
    (tmp_path / "app.py").write_text(APPLICATION)
    make = [str(environment / "bin" / "pyinstaller"), "--log-level", "ERROR", "app.py"]
    subprocess.run(make, cwd=tmp_path, check=True)
    argv = [str(tmp_path / "dist" / "app" / "app"), str(tmp_path / "model.onnx")]
    # No folder of this process is on the application's path.
    variables = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    done = subprocess.run(
        argv, capture_output=True, text=True, check=True, cwd=tmp_path, env=variables
    )
    assert done.stdout.splitlines() == ["3888.0 {}"] * 2, done.stdout + done.stderr
