"""Compile kernels ahead of time, so that the first run of a model finds them on disk.

Each given model is compiled for the CPU and run once on random inputs. Without models, small graphs
of common families are (`subgraph.tools.warmup_graphs`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import subgraph as sg
from subgraph.engine.toolchain import toolchain
from subgraph.graph.graph import Graph
from subgraph.tools.cli_inputs import input_arrays, ports
from subgraph.tools.warmup_graphs import FAMILIES

Make = Callable[[], Graph]


def prepared_graphs(models: Sequence[Path]) -> list[tuple[str, Make]]:
    """Return names of graphs, and functions that make them: of the models, or of all families."""
    return [(path.stem, partial(sg.load, path)) for path in models] or list(FAMILIES.items())


def warm(
    graphs: Sequence[tuple[str, Make]], report: Callable[[int, str], None], precision: str = ""
) -> int:
    """Compile the kernels that graphs need on the CPU, for one thread and for all.

    Args:
        graphs: Names and functions, as `prepared_graphs` returns them.
        report: Called with the number of completed graphs and the present graph or kernel.
        precision: The option INFERENCE_PRECISION.

    Returns:
        Number of kernels that were compiled; the others were on disk.
    """
    compiled = done = 0

    def listener(event: Any) -> None:
        nonlocal compiled
        if event.seconds is not None:
            compiled += 1
            report(done, event.kernel.description)

    end = toolchain.watch_compilation(listener)
    try:
        for name, make in graphs:
            report(done, name)
            graph = make()
            for threads in (1, 0):
                config = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION": precision}
                model = sg.compile_model(graph, "CPU", config)
                model(input_arrays(ports(graph), {}, {}, 0))
            done += 1
    finally:
        end()
    return compiled
