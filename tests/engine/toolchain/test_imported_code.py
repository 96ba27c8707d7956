"""Exported models contain the code of their kernels, which only the machines of their user run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from subgraph.system.environment import PACKAGE_PREBUILT

ROOT = PACKAGE_PREBUILT.parents[1]
EXPORT = """
import sys
import numpy as np
import subgraph as sg
from subgraph import ops
x = sg.input("x", (2, 16))
w = sg.parameter("w", np.ones((16, 8), np.float32))
model = sg.compile_model(sg.Graph([x], [ops.Relu(ops.MatMul(x, w))]), "CPU")
model(np.ones((2, 16), np.float32))
model.export_model(sys.argv[1])
"""
IMPORT = """
import json, sys
import numpy as np
import subgraph as sg
from subgraph.engine.toolchain import toolchain
model = sg.import_model(sys.argv[1], "CPU")
result = model(np.ones((2, 16), np.float32))[0]
right = result.tolist() == [[16.0] * 8] * 2
print(json.dumps([right, toolchain.statistics.compiled, bool(toolchain._imported)]))
"""


def run(script: str, cache: Path, path: Path) -> Any:
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "SUBGRAPH_CACHE_DIR": str(cache)}
    done = subprocess.run(
        [sys.executable, "-c", script, str(path)], env=variables, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout) if done.stdout else None


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported")
    run(EXPORT, folder / "cache", folder / "net.subgraph")
    return folder


@pytest.mark.plain_memory
def test_a_machine_with_the_key_compiles_nothing(exported: Path, tmp_path: Path) -> None:
    shutil.copy2(exported / "cache" / "export.key", tmp_path)
    right, compiled, imported = run(IMPORT, tmp_path, exported / "net.subgraph")
    assert (right, compiled, imported) == (True, 0, True)


def test_code_of_others_is_not_used(exported: Path, tmp_path: Path) -> None:
    right, compiled, imported = run(IMPORT, tmp_path, exported / "net.subgraph")
    assert right
    assert compiled > 0
    assert not imported
