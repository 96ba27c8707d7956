"""Compare what every device gives for whole models with what CPU gives: ``make agreement``.

usage: python benchmarks/agreement.py [MODEL.onnx ...] [--seeds N] [--limit 1e-4]

Each model runs on OPENCL, on HETERO with every node on OPENCL, CPU or REFERENCE by chance (N
draws), on MULTI by requests on all of its devices at a time, and on AUTO, before it has changed
over to its better device and after. Without models, the nine light ones of the onnx package run.
Inputs come from MODEL.npz beside the model, else they are random. The figure is the largest
difference, divided by the largest value of that output; one above the limit, or a run that fails,
ends the program with status 1.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import light_models
import numpy as np
import onnx
from models import inputs_of

import subgraph as sg
from subgraph.devices.plugins.auto import AutoModel
from subgraph.graph.types import Array

PLACES = {"OPENCL": 0.45, "CPU": 0.45, "REFERENCE": 0.1}
Arrays = Sequence[Array]
# What was run, and the results of all of its requests; it is asked when its turn comes.
Runs = Iterator[tuple[str, Callable[[], list[Arrays]]]]


def scattered(graph: sg.Graph, seed: int) -> sg.Graph:
    """Return the graph with an affinity by chance for each node."""
    graph = graph.clone()
    chance = random.Random(seed)
    for node in graph.nodes:
        place = chance.choices(list(PLACES), list(PLACES.values()))[0]
        node.metadata = {**(node.metadata or {}), "affinity": place}
    return graph


def once(core: sg.Core, graph: sg.Graph, device: str, feeds: Any) -> list[Arrays]:
    """Return the results of one request."""
    return [list(core.compile_model(graph, device)(feeds).values())]


def side_by_side(core: sg.Core, graph: sg.Graph, feeds: Any) -> list[Arrays]:
    """Return the results of requests on all devices of MULTI at a time."""
    pool = sg.InferQueue(core.compile_model(graph, "MULTI:OPENCL,CPU"))
    for _ in pool:
        pool.start_async(feeds)
    pool.wait_all()
    return [list(request.results.values()) for request in pool]


def changing_over(core: sg.Core, graph: sg.Graph, feeds: Any) -> list[Arrays]:
    """Return AUTO's results on the device that it starts on, and on the one that it chose."""
    model = core.compile_model(graph, "AUTO:OPENCL,CPU")
    assert isinstance(model, AutoModel), "OPENCL stands before CPU, so AUTO starts on CPU"
    first = list(model(feeds).values())
    model.ready.wait()
    if model.execution_devices != ["OPENCL"]:
        raise RuntimeError(f"AUTO stayed on {model.execution_devices}")
    return [first, list(model(feeds).values())]


def runs(core: sg.Core, graph: sg.Graph, feeds: Any, seeds: int) -> Runs:
    """Yield what there is to compare."""
    yield "OPENCL", partial(once, core, graph, "OPENCL", feeds)
    for seed in range(seeds):
        mixed = scattered(graph, seed)
        device = f"HETERO:{','.join(PLACES)}"
        yield f"HETERO, draw {seed}", partial(once, core, mixed, device, feeds)
    yield "MULTI:OPENCL,CPU", partial(side_by_side, core, graph, feeds)
    yield "AUTO:OPENCL,CPU", partial(changing_over, core, graph, feeds)
    yield "AUTO", partial(once, core, graph, "AUTO", feeds)


def difference(found: Arrays, wanted: Arrays) -> float:
    """Return the largest difference of an output in terms of its largest value."""
    worst = 0.0
    for ours, theirs in zip(found, wanted, strict=True):
        if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
            raise ValueError(f"got {ours.dtype}{ours.shape} for {theirs.dtype}{theirs.shape}")
        if not theirs.size:
            continue
        if theirs.dtype.kind not in "fc":
            worst = max(worst, float(np.mean(ours != theirs)))
            continue
        if not np.array_equal(np.isfinite(ours), np.isfinite(theirs)):
            return float("inf")
        apart = np.abs(ours.astype(np.float64) - theirs)[np.isfinite(theirs)]
        scale = np.abs(theirs[np.isfinite(theirs)]).max(initial=1e-6)
        worst = max(worst, float(apart.max(initial=0.0)) / scale)
    return worst


def compare(path: Path, seeds: int, limit: float) -> list[str]:
    """Print the differences for one model; return what is wrong."""
    core, graph, feeds = sg.Core(), sg.load(path), inputs_of(path)
    wanted = once(core, graph, "CPU", feeds)[0]
    wrong: list[str] = []
    for name, run in runs(core, graph, feeds, seeds):
        start = time.perf_counter()
        try:
            worst = max(difference(found, wanted) for found in run())
            told = f"{worst:.1e}"
            failed = not worst <= limit
        except Exception as error:  # whatever it is, the other models are still to be compared
            told, failed = f"{type(error).__name__}: {error}", True
        seconds = time.perf_counter() - start
        print(
            f"{path.stem:24} {name:18} {told}{'  TOO LARGE' * failed}  {seconds:.1f} s", flush=True
        )
        if failed:
            wrong.append(f"{path.stem} on {name}: {told}")
    return wrong


def main() -> int:
    """Compare; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", type=Path)
    parser.add_argument("--seeds", type=int, default=1, help="draws of affinities")
    parser.add_argument("--limit", type=float, default=1e-4)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        models: list[Path] = args.models
        if not models:
            models = [Path(folder) / f"{name}.onnx" for name in light_models.NAMES]
        wrong: list[str] = []
        for path in models:
            if not args.models:
                onnx.save(light_models.light_model(path.stem), path)
            wrong += compare(path, args.seeds, args.limit)
    print(f"{len(models)} models, {len(wrong)} differences above {args.limit:g}", *wrong, sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
