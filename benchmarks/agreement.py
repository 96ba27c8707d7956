"""Compare the results of every device for whole models with those of CPU: ``make agreement``.

usage: python benchmarks/agreement.py [MODEL.onnx ...] [--seeds N] [--limit 1e-4]
           [--backends NAME ...]

Each model runs on OPENCL, on HETERO with every node on a random device of OPENCL, CPU and REFERENCE
(N draws), on MULTI with concurrent requests on all of its devices, and on AUTO, before and after it
has changed to its final device. Without models, the nine light ones of the onnx package run. Inputs
come from MODEL.npz in the model's folder, else they are random. The program prints the largest
difference, divided by the largest value of that output. If one is above the limit, or a run fails,
the exit status is 1.

With --backends each model runs on those devices over other libraries instead, all that are
installed if no name follows, and is compared with ONNX Runtime: on HETERO with CPU for the nodes
that the library refuses, and with CPU for all nodes outside of the regions of a random selector
(N draws). The number of nodes that the library runs is printed, and the number of its regions.
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
from models import inputs_of, onnxruntime_session

import subgraph as sg
from subgraph.devices.plugins.auto import AutoModel
from subgraph.graph.types import Array
from subgraph.partition.property import property_from

SHARES = {"OPENCL": 0.45, "CPU": 0.45, "REFERENCE": 0.1}
Arrays = Sequence[Array]
# Names of runs, and functions that run and return the results of all requests.
Runs = Iterator[tuple[str, Callable[[], list[Arrays]]]]


class RandomSelector(sg.SubgraphSelector):
    """Takes 60 % of the nodes that another selector takes, by name."""

    def __init__(self, inner: sg.SubgraphSelector, seed: int) -> None:
        """Choose by ``seed``."""
        self.inner = inner
        self.seed = seed

    def _drawn(self, node: sg.Node) -> bool:
        return random.Random(f"{self.seed} {node.name}").random() < 0.6

    def select(self, node: sg.Node) -> bool | sg.Reject:
        """Return whether the node is among them."""
        return self._drawn(node) and self.inner.select(node)

    def select_input(self, node: sg.Node, input_node: sg.Node) -> bool | sg.Reject:
        """Return whether the producer is among them."""
        return self._drawn(input_node) and self.inner.select_input(node, input_node)

    def select_output(self, node: sg.Node, output_node: sg.Node) -> bool | sg.Reject:
        """Return whether the consumer is among them."""
        return self._drawn(output_node) and self.inner.select_output(node, output_node)


def scattered(graph: sg.Graph, seed: int) -> sg.Graph:
    """Return the graph with a random affinity for each node."""
    graph = graph.clone()
    chance = random.Random(seed)
    for node in graph.nodes:
        device = chance.choices(list(SHARES), list(SHARES.values()))[0]
        node.metadata = {**(node.metadata or {}), "affinity": device}
    return graph


def once(core: sg.Core, graph: sg.Graph, device: str, feeds: Any) -> list[Arrays]:
    """Return the results of one request."""
    return [list(core.compile_model(graph, device)(feeds).values())]


def side_by_side(core: sg.Core, graph: sg.Graph, feeds: Any) -> list[Arrays]:
    """Return the results of concurrent requests on all devices of MULTI."""
    pool = sg.InferQueue(core.compile_model(graph, "MULTI:OPENCL,CPU"))
    for _ in pool:
        pool.start_async(feeds)
    pool.wait_all()
    return [list(request.results.values()) for request in pool]


def changing_over(core: sg.Core, graph: sg.Graph, feeds: Any) -> list[Arrays]:
    """Return AUTO's results on the device that it starts on, and on its final device."""
    model = core.compile_model(graph, "AUTO:OPENCL,CPU")
    assert isinstance(model, AutoModel), "OPENCL comes before CPU, so that AUTO starts on CPU"
    first = list(model(feeds).values())
    model.ready.wait()
    if model.execution_devices != ["OPENCL"]:
        raise RuntimeError(f"AUTO stayed on {model.execution_devices}")
    return [first, list(model(feeds).values())]


def of_onnxruntime(path: Path, feeds: Any) -> Arrays:
    """Return the results of ONNX Runtime itself."""
    results: Arrays = onnxruntime_session(path).run(None, dict(feeds))
    return results


def on_backend(graph: sg.Graph, name: str, feeds: Any, seed: int | None) -> list[Arrays]:
    """Return the results of a model with regions on a backend; print their number.

    Args:
        graph: The model.
        name: The device.
        feeds: Inputs by name.
        seed: Seed of a random selector; None for all nodes that the library takes.
    """
    config = {"RUNTIME_FALLBACK": False}
    if seed is None:
        model = sg.compile_model(graph, f"HETERO:{name},CPU", config)
    else:
        made = property_from(name.lower())
        whole = made.create_subgraph_selector
        made.create_subgraph_selector = lambda: RandomSelector(whole(), seed)
        model = sg.compile_model(sg.optimize_for(graph, made), "CPU", config)
    regions = [n.subgraph for n in model.graph.nodes if n.subgraph and n.op.device == name]
    taken = sum(len(region.nodes) for region in regions)
    print(f"{taken:4} of {len(graph.nodes):4} nodes, {len(regions):3} regions: ", end="")
    return [list(model(feeds).values())]


def backend_runs(graph: sg.Graph, feeds: Any, names: Sequence[str], seeds: int) -> Runs:
    """Yield the runs on devices over other libraries, by name."""
    for name in names:
        yield name, partial(on_backend, graph, name, feeds, None)
        for seed in range(seeds):
            yield f"{name}, draw {seed}", partial(on_backend, graph, name, feeds, seed)


def runs(core: sg.Core, graph: sg.Graph, feeds: Any, seeds: int) -> Runs:
    """Yield the runs to compare, by name."""
    yield "OPENCL", partial(once, core, graph, "OPENCL", feeds)
    for seed in range(seeds):
        mixed = scattered(graph, seed)
        device = f"HETERO:{','.join(SHARES)}"
        yield f"HETERO, draw {seed}", partial(once, core, mixed, device, feeds)
    yield "MULTI:OPENCL,CPU", partial(side_by_side, core, graph, feeds)
    yield "AUTO:OPENCL,CPU", partial(changing_over, core, graph, feeds)
    yield "AUTO", partial(once, core, graph, "AUTO", feeds)


def difference(found: Arrays, wanted: Arrays) -> float:
    """Return the largest difference of an output, divided by its largest value.

    For other dtypes than floats it is the share of elements that differ.
    """
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


def compare(path: Path, backends: Sequence[str], seeds: int, limit: float) -> list[str]:
    """Print the differences for one model; return a line for each failure."""
    core, graph, feeds = sg.Core(), sg.load(path), inputs_of(path)
    if backends:
        wanted = of_onnxruntime(path, feeds)
        every = backend_runs(graph, feeds, backends, seeds)
    else:
        wanted = once(core, graph, "CPU", feeds)[0]
        every = runs(core, graph, feeds, seeds)
    wrong: list[str] = []
    for name, run in every:
        start = time.perf_counter()
        try:
            worst = max(difference(found, wanted) for found in run())
            shown = f"{worst:.1e}"
            failed = not worst <= limit
        except Exception as error:  # the other runs are still to be compared
            shown, failed = f"{type(error).__name__}: {error}", True
        seconds = time.perf_counter() - start
        print(
            f"{path.stem:24} {name:18} {shown}{'  TOO LARGE' * failed}  {seconds:.1f} s", flush=True
        )
        if failed:
            wrong.append(f"{path.stem} on {name}: {shown}")
    return wrong


def main() -> int:
    """Compare; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", type=Path)
    parser.add_argument("--seeds", type=int, default=1, help="draws of affinities")
    parser.add_argument("--limit", type=float, default=1e-4)
    parser.add_argument("--backends", nargs="*", metavar="NAME")
    args = parser.parse_args()
    backends: list[str] = args.backends or []
    if args.backends == []:
        backends = [state.name for state in sg.backends() if not state.problem]
    with tempfile.TemporaryDirectory() as folder:
        models: list[Path] = args.models
        if not models:
            models = [Path(folder) / f"{name}.onnx" for name in light_models.NAMES]
        wrong: list[str] = []
        for path in models:
            if not args.models:
                onnx.save(light_models.light_model(path.stem), path)
            wrong += compare(path, backends, args.seeds, args.limit)
    print(f"{len(models)} models, {len(wrong)} differences above {args.limit:g}", *wrong, sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
