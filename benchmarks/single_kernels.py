"""Time GEMMs and convolutions one by one: GFLOP/s, share of the measured peak, ONNX Runtime's time.

usage: python benchmarks/single_kernels.py [gemm resnet50 mobilenetv2 vgg] [--rounds 5]

The peak is that of one core, measured with a loop of the GEMM tile on registers before and after
each round; rounds next to a low peak are dropped. In a round the runs of both runtimes are
interleaved, and the smallest time of each counts; the table has medians over the rounds. Subgraph's
time is that of the kernel without layout conversions, which a network has only at its edges; ONNX
Runtime's is that of a session of one node.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import time
from collections.abc import Iterator

import attrs
import numpy as np
from models import onnxruntime_session
from rich.console import Console
from rich.table import Table

import subgraph as sg
from subgraph import ops
from subgraph.graph.types import Array
from subgraph.tools.profiling import peak_flops

_EDGES = "movement.reorder_kernels"
GEMM = [
    *[(1024,) * 3, (512,) * 3, (128, 768, 768), (128, 3072, 768), (128, 768, 3072)],
    *[(128, 384, 384), (128, 1536, 384), (8, 768, 768), (1, 1000, 2048), (1, 4096, 4096)],
]
# Channels in, channels out, size of the image, kernel, stride, groups.
RESNET50 = [
    *[(3, 64, 224, 7, 2, 1), (64, 64, 56, 1, 1, 1), (64, 64, 56, 3, 1, 1), (64, 256, 56, 1, 1, 1)],
    *[(256, 64, 56, 1, 1, 1), (256, 128, 56, 1, 1, 1), (128, 128, 56, 3, 2, 1)],
    *[(128, 512, 28, 1, 1, 1), (256, 512, 56, 1, 2, 1), (512, 128, 28, 1, 1, 1)],
    *[(128, 128, 28, 3, 1, 1), (512, 256, 28, 1, 1, 1), (256, 256, 28, 3, 2, 1)],
    *[(256, 1024, 14, 1, 1, 1), (512, 1024, 28, 1, 2, 1), (1024, 256, 14, 1, 1, 1)],
    *[(256, 256, 14, 3, 1, 1), (1024, 512, 14, 1, 1, 1), (512, 512, 14, 3, 2, 1)],
    *[(512, 2048, 7, 1, 1, 1), (1024, 2048, 14, 1, 2, 1), (2048, 512, 7, 1, 1, 1)],
    (512, 512, 7, 3, 1, 1),
]
MOBILENETV2 = [
    *[(3, 32, 224, 3, 2, 1), (32, 32, 112, 3, 1, 32), (32, 16, 112, 1, 1, 1)],
    *[(16, 96, 112, 1, 1, 1), (96, 96, 112, 3, 2, 96), (96, 24, 56, 1, 1, 1)],
    *[(24, 144, 56, 1, 1, 1), (144, 144, 56, 3, 1, 144), (144, 144, 56, 3, 2, 144)],
    *[(144, 32, 28, 1, 1, 1), (32, 192, 28, 1, 1, 1), (192, 192, 28, 3, 1, 192)],
    *[(192, 64, 14, 1, 1, 1), (64, 384, 14, 1, 1, 1), (384, 384, 14, 3, 1, 384)],
    *[(384, 96, 14, 1, 1, 1), (96, 576, 14, 1, 1, 1), (576, 576, 14, 3, 2, 576)],
    *[(576, 160, 7, 1, 1, 1), (160, 960, 7, 1, 1, 1), (960, 960, 7, 3, 1, 960)],
    *[(960, 320, 7, 1, 1, 1), (320, 1280, 7, 1, 1, 1)],
]
VGG = [
    *[(3, 64, 224, 3, 1, 1), (64, 64, 224, 3, 1, 1), (64, 128, 112, 3, 1, 1)],
    *[(128, 128, 112, 3, 1, 1), (128, 256, 56, 3, 1, 1), (256, 256, 56, 3, 1, 1)],
    *[(256, 512, 28, 3, 1, 1), (512, 512, 28, 3, 1, 1), (512, 512, 14, 3, 1, 1)],
]
NETWORKS = {"resnet50": RESNET50, "mobilenetv2": MOBILENETV2, "vgg": VGG}
SUITES = ["gemm", *NETWORKS]


@attrs.frozen
class Case:
    """One operator to time.

    Attributes:
        name: Its shapes, for the table.
        graph: The graph of one node.
        feed: The input "x".
        flops: Floating-point operations of a run.
    """

    name: str
    graph: sg.Graph
    feed: Array
    flops: int


@attrs.frozen
class Sample:
    """One round of a case.

    Attributes:
        ours: Seconds of Subgraph's kernel.
        theirs: Seconds of ONNX Runtime's session.
        peak: The lower peak before and after the round, in GFLOP/s.
    """

    ours: float
    theirs: float
    peak: float


def cases(suite: str) -> Iterator[Case]:
    """Make the operators of a suite, with random weights."""
    rng = np.random.default_rng(0)

    def random(*shape: int) -> Array:
        return rng.standard_normal(shape, np.float32)

    if suite == "gemm":
        for m, n, k in GEMM:
            x = sg.input("x", shape=(m, k), dtype="float32")
            y = ops.MatMul(x, sg.parameter("w", random(k, n)))
            graph = sg.Graph(inputs=[x], outputs=[y], name="gemm")
            yield Case(f"{m} x {n} x {k}", graph, random(m, k), 2 * m * n * k)
        return
    for inputs, outputs, size, kernel, stride, groups in NETWORKS[suite]:
        x = sg.input("x", shape=(1, inputs, size, size), dtype="float32")
        w = random(outputs, inputs // groups, kernel, kernel)
        w /= np.float32((inputs // groups) ** 0.5 * kernel)
        pad = kernel // 2
        y = ops.Conv(
            x,
            sg.parameter("w", w),
            sg.parameter("b", random(outputs)),
            pads=[pad] * 4,
            strides=[stride] * 2,
            group=groups,
        )
        graph = sg.Graph(inputs=[x], outputs=[y], name="conv")
        target = (size + 2 * pad - kernel) // stride + 1
        name = f"{inputs} -> {outputs}, {size} x {size}, {kernel} x {kernel}"
        name += f" / {stride}" if stride > 1 else ""
        name += ", depthwise" if groups > 1 else ""
        yield Case(name, graph, random(1, inputs, size, size), 2 * w.size * target * target)


def core_peak() -> float:
    """Return one core's multiply-add peak at this moment, in GFLOP/s."""
    return peak_flops(repeats=1) / 1e9


def run_case(case: Case, rounds: int) -> tuple[list[Sample], str]:
    """Time a case; return a sample for each round, and the name of the kernel."""
    session = onnxruntime_session(sg.to_onnx(case.graph).SerializeToString())
    compiled = sg.compile_model(
        case.graph, "CPU", {"INFERENCE_NUM_THREADS": 1, "ENABLE_PROFILING": True}
    )
    request = compiled.create_infer_request()
    wanted = session.run(None, {"x": case.feed})[0]
    got = next(iter(request.infer({"x": case.feed}).values()))
    error = float(np.abs(got - wanted).max() / np.abs(wanted).max())
    if not error < 1e-4:
        raise SystemExit(f"{case.name}: differs from ONNX Runtime by {error:.1e}")
    samples: list[Sample] = []
    repeats = max(3, min(100, int(1e9 / case.flops)))
    kernel = ""
    for _ in range(rounds):
        before = core_peak()
        ours: list[float] = []
        theirs: list[float] = []
        for _ in range(repeats):
            request.infer({"x": case.feed})
            heavy = [e for e in request.profile() if not e.kernel.startswith(_EDGES)]
            ours.append(sum(e.seconds for e in heavy))
            kernel = max(heavy, key=lambda e: e.seconds).kernel
            begin = time.perf_counter()
            session.run(None, {"x": case.feed})
            theirs.append(time.perf_counter() - begin)
        peak = min(before, core_peak())
        samples.append(Sample(min(ours), min(theirs), peak))
    return samples, kernel.partition("(")[0] + (" m=2" if "m=2," in kernel else "")


def main() -> None:
    """Print one table for each suite."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("suites", nargs="*", default=SUITES, help=", ".join(SUITES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--csv", help="also write the rows to this file")
    arguments = parser.parse_args()
    console = Console(width=130)
    rows: list[list[str]] = []
    if unknown := set(arguments.suites).difference(SUITES):
        parser.error(f"no suites {sorted(unknown)}; there are {', '.join(SUITES)}")
    for suite in arguments.suites:
        best = max(core_peak() for _ in range(5))
        table = Table(title=f"{suite}, one core, float32, peak {best:.0f} GFLOP/s")
        for column in ("operator", "kernel", "GFLOP/s", "of peak", "ONNX Runtime", "ratio", "kept"):
            table.add_column(
                column, justify="left" if column in ("operator", "kernel") else "right"
            )
        total = [0.0, 0.0, 0.0]
        for case in cases(suite):
            samples, kernel = run_case(case, arguments.rounds)
            top = max(sample.peak for sample in samples)
            kept = [sample for sample in samples if sample.peak > 0.9 * top]
            ours, theirs, peak = (
                statistics.median(values)
                for values in zip(*[(s.ours, s.theirs, s.peak) for s in kept], strict=True)
            )
            rate = case.flops / ours / 1e9
            row = [case.name, kernel, f"{rate:.0f}", f"{rate / peak:.0%}"]
            row += [f"{case.flops / theirs / 1e9:.0f}", f"{ours / theirs:.2f}"]
            row += [f"{len(kept)}/{len(samples)}"]
            table.add_row(*row)
            rows.append([suite, *row])
            total = [total[0] + ours, total[1] + theirs, total[2] + case.flops / peak / 1e9]
        share = total[2] / total[0]
        table.add_row("all", "", "", f"{share:.0%}", "", f"{total[0] / total[1]:.2f}", "")
        console.print(table)
    if arguments.csv:
        with open(arguments.csv, "w", newline="") as file:
            csv.writer(file).writerows(rows)


if __name__ == "__main__":
    main()
