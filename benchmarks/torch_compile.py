"""Time of modules of PyTorch by backends of torch.compile, Subgraph's and others, and uncompiled.

usage: PYTHONPATH=. python benchmarks/torch_compile.py [MODEL ...] [--rounds 20] [--vs inductor ...]

The models are those of ``make_models/export_families.py``, which need torchvision and transformers.
All run in turn in one process with one thread. The table has the medians, the time of the first
call, which compiles, and the largest difference of results, relative to their largest element.
"""

# PyTorch and the libraries over it are not in the environment of `make lint`.
# pyright: reportMissingImports=false

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import subgraph as sg

sys.path.insert(0, str(Path(__file__).parent / "make_models"))

from export_families import MODELS

CONFIG = {"INFERENCE_NUM_THREADS": 1}


def compiled(module: Any, inputs: Sequence[Any], backend: Any, **options: Any) -> tuple[Any, float]:
    """Return a compiled module after its first call, and the seconds that this took."""
    made = torch.compile(module, backend=backend, **options)
    start = time.perf_counter()
    made(*inputs)
    return made, time.perf_counter() - start


def largest_difference(found: Any, wanted: Any) -> float:
    """Return the largest difference of two results, relative to the largest element of each."""
    if not isinstance(wanted, torch.Tensor):
        pairs = zip(found, wanted, strict=True)
        return max(largest_difference(one, other) for one, other in pairs)
    scale = max(float(wanted.double().abs().max()), 1e-9)
    return float((found.double() - wanted.double()).abs().max()) / scale


def medians(calls: Sequence[Callable[..., Any]], inputs: Sequence[Any], rounds: int) -> list[float]:
    """Return the median seconds of each function; they are called in turn."""
    times: list[list[float]] = [[] for _ in calls]
    for number in range(rounds + 2):
        for call, mine in zip(calls, times, strict=True):
            start = time.perf_counter()
            call(*inputs)
            if number >= 2:  # the first calls touch memory
                mine.append(time.perf_counter() - start)
    return [median(mine) for mine in times]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("models", nargs="*", help=f"default: all of {', '.join(MODELS)}")
    parser.add_argument("--rounds", type=int, default=20, help="calls of each")
    parser.add_argument("--vs", nargs="*", default=["inductor"], help="other backends")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    warnings.simplefilter("error", RuntimeWarning)  # PyTorch itself must not run the graph
    titles = ["model", "uncompiled ms", *(f"{name} ms" for name in arguments.vs), "subgraph ms"]
    table = Table(*titles, "of the fastest", "first call s", "difference")
    ratios: list[float] = []
    for name in arguments.models or MODELS:
        torch.compiler.reset()
        module, inputs = MODELS[name]()
        try:
            mine, first = compiled(module, inputs, sg.torch_backend, options={"config": CONFIG})
        except Exception as error:  # PyTorch wraps the warning
            table.add_row(name, f"{error}".partition("\n")[0][:60])
            continue
        difference = largest_difference(mine(*inputs), module(*inputs))
        others = [compiled(module, inputs, backend)[0] for backend in arguments.vs]
        *times, ours = medians([module, *others, mine], inputs, arguments.rounds)
        ratios.append(ours / min(times))
        shown = [f"{seconds * 1e3:.2f}" for seconds in (*times, ours)]
        table.add_row(name, *shown, f"{ratios[-1]:.2f}", f"{first:.1f}", f"{difference:.0e}")
    Console(width=120).print(table)
    if ratios:
        print(f"geometric mean {geometric_mean(ratios):.2f}")


if __name__ == "__main__":
    main()
