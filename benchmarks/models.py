"""Time whole models against ONNX Runtime and OpenVINO: ``make bench BENCH_ARGS="*.onnx"``.

usage: python benchmarks/models.py MODEL.onnx ... [--threads 1] [--vs onnxruntime,openvino]
       [--precision bfloat16]

Samples of the runtimes are interleaved, with a calibration loop before and after each; the table
has medians of the samples next to a fast calibration (see `subgraph.tools.bench`). Without models
it times examples/digits.onnx. The last line is the geometric mean of Subgraph's time divided by the
faster peer's.
"""

from __future__ import annotations

import argparse
import platform
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import subgraph as sg
from subgraph.tools.bench import Measured, fastest_peer, measure
from subgraph.tools.cli_inputs import input_arrays, ports


def cpu_name() -> str:
    """Return the processor's name and the number of cores."""
    path = Path("/proc/cpuinfo")
    names = [line for line in path.read_text().splitlines() if line.startswith("model name")]
    return f"{names[0].partition(':')[2].strip()} ({len(names)} cores)" if names else ""


def inputs_of(model: Path) -> dict[str, np.ndarray]:
    """Return the arrays of ``model.npz`` in the model's folder, else random ones."""
    graph = sg.load(model)
    names = [value.name for value in graph.inputs if value.parameter is None]
    exported = model.stem.removesuffix("_op23").removesuffix("_ts17")  # see make_models/
    beside = model.with_name(f"{exported}.npz")
    if beside.exists():
        with np.load(beside) as held:
            return {name: held[name] for name in names}
    return input_arrays(ports(graph), {}, {}, 0)


def onnxruntime_session(model: Path | bytes, threads: int = 1) -> Any:
    """Return a session of ONNX Runtime on the CPU.

    Args:
        model: An ONNX file or its content.
        threads: Threads within an operator.
    """
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    source = str(model) if isinstance(model, Path) else model
    return ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def add_rows(table: Table, model: Path, measured: list[Measured]) -> float | None:
    """Add a row for each runtime; return Subgraph's median divided by the fastest peer's."""
    best = fastest_peer(measured)
    for place, one in enumerate(measured):
        row = one.row(best)
        table.add_row(model.stem if place == 0 else "", *map(str, row.values()))
    return None if best is None else measured[0].median / best


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    default = Path(__file__).parents[1] / "examples" / "digits.onnx"
    parser.add_argument("models", nargs="*", type=Path, default=[default])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=3)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--vs", default="onnxruntime,openvino")
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="float32")
    args = parser.parse_args()
    console = Console(width=160, highlight=False)
    console.print(f"{platform.platform()}, {cpu_name()}, {args.threads} thread(s)")
    ratios: list[float] = []
    table: Table | None = None
    for model in args.models:
        measured = measure(
            model,
            inputs_of(model),
            peers=args.vs.split(",") if args.vs else [],
            threads=args.threads,
            rounds=args.rounds,
            seconds=args.seconds,
            precision=args.precision,
        )
        table = table or Table("model", *measured[0].row(fastest_peer(measured)))
        ratio = add_rows(table, model, measured)
        if ratio is not None:
            ratios.append(ratio)
            console.print(f"{model.stem}: ours / best peer {ratio:.3f}")
    if table is not None:
        console.print(table)
    if ratios:
        console.print(f"geometric mean {np.exp(np.mean(np.log(ratios))):.3f}")


if __name__ == "__main__":
    main()
