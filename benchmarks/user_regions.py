"""Compare partitioned models with whole ones, both compiled for the CPU.

usage: python benchmarks/user_regions.py MODEL.onnx ... [--rounds 60] [--device HETERO:CPU]

Each model is partitioned by several selectors, with the default op. In every round each partition
and the whole model run once, in random order on one thread. The ratio is the median over rounds of
a partition's CPU time divided by the whole model's; ``same`` is whether results are equal bit for
bit.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path
from typing import Any

import models
import numpy as np
from rich.console import Console
from rich.table import Table

import subgraph as sg
from subgraph.testing.random_selectors import ByNode

OP_TYPES = ({"Conv", "Clip"}, {"Conv"}, {"MatMul", "Gemm"}, {"Conv", "Relu", "Add"})
CONFIG = {"INFERENCE_NUM_THREADS": 1}


def forms(graph: sg.Graph, device: str) -> dict[str, tuple[int, sg.CompiledModel]]:
    """Return the number of regions and the compiled model of each partition by its selector.

    The first is "whole", the model without regions.
    """
    selectors: dict[str, Any] = {
        ",".join(sorted(names)): sg.ContainOpSelector(names) for names in OP_TYPES
    }
    selectors.update((f"random {seed}", ByNode(seed)) for seed in range(3))
    found = {"whole": (0, sg.compile_model(graph, "CPU", CONFIG))}
    for name, selector in selectors.items():
        cut = sg.optimize_for(graph, selector)
        regions = sum(node.subgraph is not None for node in cut.nodes)
        if regions:
            found[name] = regions, sg.compile_model(cut, device, CONFIG)
    return found


def seconds_of(
    compiled: dict[str, tuple[int, sg.CompiledModel]], feeds: dict[str, Any], rounds: int
) -> dict[str, list[float]]:
    """Return the CPU seconds of every round, by selector.

    Args:
        compiled: The result of `forms`.
        feeds: Inputs by name.
        rounds: Number of rounds.
    """
    seconds: dict[str, list[float]] = {name: [] for name in compiled}
    for _ in range(rounds):
        for name in random.sample(list(compiled), len(compiled)):
            _, model = compiled[name]
            model(feeds)  # fills the caches
            start = time.process_time()
            model(feeds)
            seconds[name].append(time.process_time() - start)
    return seconds


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--device", default="CPU", help="for the models that were partitioned")
    args = parser.parse_args()
    table = Table("model", "selector", "regions", "ms", "ratio", "same")
    for path in args.models:
        feeds = models.inputs_of(path)
        compiled = forms(sg.load(path), args.device)
        results = {name: list(model(feeds).values()) for name, (_, model) in compiled.items()}
        seconds = seconds_of(compiled, feeds, args.rounds)
        whole = np.array(seconds["whole"])
        for name, (regions, _) in compiled.items():
            same = all(map(np.array_equal, results[name], results["whole"]))
            own = np.array(seconds[name])
            row = [path.stem, name, regions, f"{np.median(own) * 1e3:.2f}"]
            table.add_row(*map(str, [*row, f"{np.median(own / whole):.3f}", same]))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
