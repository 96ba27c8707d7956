"""Time from the start of a process to a model's first result, in a new environment.

usage: python benchmarks/first_results.py WHEEL MODEL.onnx ... [--rounds 5] [--peers onnxruntime]

A virtual environment gets the wheel and the peers. In every round each engine runs each model in a
process of its own, in random order, with one thread and with the engine's caches in its home
folder: once with an empty home folder ("fresh") and, for this project, once more in the same one
("warm"). The time is from the start of the process until the first result is there: imports,
loading, compiling and one run. Reported are medians in seconds, and the median of the rounds'
ratios fresh : warm. `make wheel` builds the wheel with its compiled kernels.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import models
import numpy as np
from rich.console import Console
from rich.table import Table

# Each reads the model's path and the path of its inputs, and ends with the time of the result.
_PROGRAMS = {
    "subgraph-ml": """
import subgraph as sg
model = sg.compile_model(sg.load(path), "CPU", {"INFERENCE_NUM_THREADS": 1})
model(feeds)
""",
    "onnxruntime": """
import onnxruntime
options = onnxruntime.SessionOptions()
options.intra_op_num_threads = 1
session = onnxruntime.InferenceSession(path, options, ["CPUExecutionProvider"])
session.run(None, feeds)
""",
    "openvino": """
import openvino
core = openvino.Core()
model = core.compile_model(path, "CPU", {"INFERENCE_NUM_THREADS": 1})
model(feeds)
""",
}
_BEFORE = """
import sys, time
import numpy
path = sys.argv[1]
feeds = dict(numpy.load(sys.argv[2]))
"""
_AFTER = "print(time.time())"
_OURS = "subgraph-ml"


def first_result(python: Path, engine: str, model: Path, feeds: Path, home: Path) -> float:
    """Return the seconds until a process of an engine has its first result.

    Args:
        python: The interpreter of the new environment.
        engine: A key of `_PROGRAMS`.
        model: The ONNX file.
        feeds: An ``.npz`` file of its inputs.
        home: The home folder of the process.

    Raises:
        subprocess.CalledProcessError: the process failed; its messages are on standard error.
    """
    variables = {name: text for name, text in os.environ.items() if "SUBGRAPH" not in name}
    for name in ("PYTHONPATH", "XDG_CACHE_HOME", "PYTHONDONTWRITEBYTECODE"):
        variables.pop(name, None)
    command = [python, "-c", _BEFORE + _PROGRAMS[engine] + _AFTER, model, feeds]
    start = time.time()
    done = subprocess.run(
        list(map(str, command)),
        env={**variables, "HOME": str(home)},
        cwd=home,
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    return float(done.stdout.split()[-1]) - start


def install(folder: Path, packages: Sequence[str]) -> Path:
    """Make a virtual environment with the packages, and return its interpreter."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", *packages], check=True)
    return python


def write_feeds(chosen: Sequence[Path], folder: Path) -> dict[Path, Path]:
    """Write the inputs of each model into a file of the folder, and return the files by model."""
    feeds = {model: folder / f"{model.stem}.npz" for model in chosen}
    for model, path in feeds.items():
        arrays: dict[str, Any] = {**models.inputs_of(model)}
        np.savez(path, **arrays)
    return feeds


def measure(
    python: Path, feeds: dict[Path, Path], engines: Sequence[str], rounds: int, folder: Path
) -> dict[Path, dict[str, list[float]]]:
    """Return the seconds of all rounds, by model, and by engine with "fresh" or "warm"."""
    seconds: dict[Path, dict[str, list[float]]] = {model: {} for model in feeds}
    for _ in range(rounds):
        pairs = [(model, engine) for model in feeds for engine in engines]
        for model, engine in random.sample(pairs, len(pairs)):
            with tempfile.TemporaryDirectory(dir=folder) as home:
                for state in ("fresh", "warm")[: 2 if engine == _OURS else 1]:
                    took = first_result(python, engine, model, feeds[model], Path(home))
                    seconds[model].setdefault(f"{engine} {state}", []).append(took)
    return seconds


def main() -> None:
    """Install, measure and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peers", default="onnxruntime,openvino", help="comma-separated")
    options = parser.parse_args()
    peers = [name for name in options.peers.split(",") if name]
    chosen = [path.resolve() for path in options.models]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wheel = str(options.wheel.resolve())
        print(f"installing {options.wheel.name} and {', '.join(peers)}", file=sys.stderr)
        python = install(folder / "environment", [wheel, *peers])
        feeds = write_feeds(chosen, folder)
        with tempfile.TemporaryDirectory(dir=folder) as home:
            first = first_result(python, _OURS, chosen[0], feeds[chosen[0]], Path(home))
        seconds = measure(python, feeds, [_OURS, *peers], options.rounds, folder)
    columns = sorted(seconds[chosen[0]])
    table = Table("model", *columns, "fresh : warm")
    for model, found in seconds.items():
        cells = [f"{statistics.median(found[column]):.2f}" for column in columns]
        table.add_row(model.stem, *cells, f"{ratio_of(found):.2f}")
    Console(width=120).print(table)
    print(f"{chosen[0].stem}, the first process after the installation: {first:.2f} s")


def ratio_of(found: dict[str, list[float]]) -> float:
    """Return the median over the rounds of fresh divided by warm."""
    pairs = zip(found[f"{_OURS} fresh"], found[f"{_OURS} warm"], strict=True)
    return statistics.median(fresh / warm for fresh, warm in pairs)


if __name__ == "__main__":
    main()
