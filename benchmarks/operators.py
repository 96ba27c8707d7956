"""Time single operators against ONNX Runtime and OpenVINO, one thread each, the worst first.

usage: python benchmarks/operators.py [FAMILY or part of a label ...] [--vs onnxruntime,openvino]

Each operator is a model of one node at sizes that real models have (``operator_table.py``). The
runs of the runtimes are interleaved; the table has each one's smallest CPU time, including the call
from Python. A name of `--vs` in capitals is a device of Subgraph, such as ONEDNN. The ratio is
Subgraph's time divided by the faster peer's; results that differ from a peer's by more than 1e-4
are marked. A peer that refuses an operator has no time for it.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import numpy as np
import onnx
from models import onnxruntime_session
from onnx import helper, numpy_helper
from operator_table import FAMILIES, Case, Fixed
from rich.console import Console
from rich.table import Table

import subgraph as sg
from subgraph.graph.types import Array

Run = Callable[[dict[str, Array]], list[Array]]
_SAMPLE = 2e-4  # seconds; shorter runs are repeated within a sample
_ROUNDS = 15  # samples of each runtime


@attrs.frozen
class Timed:
    """The measurements of one case.

    Attributes:
        case: The case.
        seconds: CPU seconds of a run by runtime.
        difference: Largest difference from a peer's results, relative to their largest element.
    """

    case: Case
    seconds: dict[str, float]
    difference: float

    @property
    def ratio(self) -> float:
        """Subgraph's time divided by the fastest peer's, NaN without one."""
        peers = [value for name, value in self.seconds.items() if name != "subgraph"]
        return self.seconds["subgraph"] / min(peers) if peers else math.nan


def model_of(case: Case) -> tuple[bytes, dict[str, Array]]:
    """Return a model of one node, and its inputs by name."""
    inputs: list[Any] = []
    weights: list[Any] = []
    names: list[str] = []
    feed: dict[str, Array] = {}
    for place, value in enumerate(case.inputs):
        name = "" if value is None else f"x{place}"
        names.append(name)
        if isinstance(value, Fixed):
            weights.append(numpy_helper.from_array(value.array, name))
        elif value is not None:
            kind = helper.np_dtype_to_tensor_dtype(value.dtype)
            inputs.append(helper.make_tensor_value_info(name, kind, value.shape))
            feed[name] = value
    outputs = [f"y{place}" for place in range(case.outputs)]
    node = helper.make_node(case.operator, names, outputs, domain=case.domain, **case.attributes)
    made = [onnx.ValueInfoProto(name=name) for name in outputs]
    graph = helper.make_graph([node], "operator", inputs, made, weights)
    imports = {"": case.opset, case.domain: case.opset if not case.domain else 1}
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid(*each) for each in imports.items()]
    )
    model.ir_version = 10
    return onnx.shape_inference.infer_shapes(model).SerializeToString(), feed


def on_device(model: bytes, device: str) -> Run:
    """Return a function that runs a model on a device of Subgraph, without its fallback."""
    config = {"INFERENCE_NUM_THREADS": 1}
    if device != "CPU" and len(sg.query_model(model, device, config)) != 1:
        raise sg.UnsupportedOpError(f"{device} does not run it")
    compiled = sg.compile_model(model, device, config)
    return lambda feed: list(compiled(feed).values())


def onnxruntime(model: bytes) -> Run:
    """Return a function that runs a model by ONNX Runtime."""
    session = onnxruntime_session(model)
    return lambda feed: list(session.run(None, feed))


def openvino(model: bytes) -> Run:
    """Return a function that runs a model by OpenVINO."""
    import openvino as ov

    hints = {"INFERENCE_NUM_THREADS": 1, "INFERENCE_PRECISION_HINT": "f32", "NUM_STREAMS": 1}
    core = ov.Core()
    request = core.compile_model(core.read_model(model), "CPU", hints).create_infer_request()
    return lambda feed: list(request.infer(feed, share_inputs=True, share_outputs=True).values())


PEERS: dict[str, Callable[[bytes], Run]] = {"onnxruntime": onnxruntime, "openvino": openvino}


def difference(found: list[Array], other: list[Array]) -> float:
    """Return the largest difference relative to the largest element."""
    worst = 0.0
    for a, b in zip(found, other, strict=True):
        if a.shape != b.shape:
            return math.inf
        if a.dtype == object:
            worst = max(worst, 0.0 if (a == b).all() else math.inf)
            continue
        wide = (np.asarray(a, np.float64), np.asarray(b, np.float64))
        if a.size:
            apart = np.nanmax(np.abs(wide[0] - wide[1]), initial=0.0)
            worst = max(worst, float(apart / max(np.nanmax(np.abs(wide[1])), 1e-9)))
    return worst


def measure(case: Case, peers: list[str]) -> Timed:
    """Time a case on Subgraph and on the peers that support it."""
    model, feed = model_of(case)
    runs: dict[str, Run] = {"subgraph": on_device(model, "CPU")}
    results = {"subgraph": runs["subgraph"](feed)}
    for name in peers:
        try:
            runs[name] = PEERS[name](model) if name in PEERS else on_device(model, name)
            results[name] = [np.array(value) for value in runs[name](feed)]
        except Exception:  # the peer does not support the operator
            runs.pop(name, None)
    others = [name for name in runs if name != "subgraph"]
    apart = [difference(results["subgraph"], results[name]) for name in others]
    # What returns other shapes computes something else, and its time says nothing.
    for name, distance in zip(others, apart, strict=True):
        if math.isinf(distance):
            del runs[name]
    samples: dict[str, list[float]] = {name: [] for name in runs}
    start = time.process_time()
    runs["subgraph"](feed)
    calls = max(1, int(_SAMPLE / max(time.process_time() - start, 1e-7)))
    for _ in range(_ROUNDS):
        for name, run in runs.items():
            start = time.process_time()
            for _ in range(calls):
                run(feed)
            samples[name].append((time.process_time() - start) / calls)
    return Timed(case, {name: min(taken) for name, taken in samples.items()}, max(apart, default=0))


def wanted(words: list[str]) -> Iterator[Case]:
    """Yield the cases whose family is one of ``words`` or whose label contains one; all if none."""
    for family, make in FAMILIES.items():
        for case in make():
            if not words or family in words or any(word in case.label for word in words):
                yield case


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*")
    parser.add_argument("--vs", default="onnxruntime,openvino")
    parser.add_argument("--above", type=float, default=0.0, help="show ratios from here on")
    args = parser.parse_args()
    peers = args.vs.split(",")
    timed = [measure(case, peers) for case in wanted(args.cases)]
    ratios = [one.ratio for one in timed if not math.isnan(one.ratio)]
    table = Table("operator", "subgraph ms", *(f"{name} ms" for name in peers), "ratio", "")
    for one in sorted(timed, key=lambda one: -one.ratio if one.ratio > 0 else 0.0):
        if one.ratio >= args.above:
            times = [one.seconds.get(name) for name in ("subgraph", *peers)]
            cells = ["-" if value is None else f"{value * 1e3:.4f}" for value in times]
            mark = f"differs by {one.difference:.0e}" if one.difference > 1e-4 else ""
            table.add_row(one.case.label, *cells, f"{one.ratio:.2f}", mark)
    console = Console(width=150, highlight=False)
    console.print(table)
    if ratios:
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        above = sum(ratio > 1 for ratio in ratios)
        console.print(f"{len(ratios)} operators, geometric mean {mean:.3f}, {above} above 1.0")


if __name__ == "__main__":
    main()
