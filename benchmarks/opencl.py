"""GFLOP/s of products and convolutions on OPENCL, and their share of the device's measured peak.

The peak is that of a loop of multiply-adds on registers (the best of several shapes of register
tiles), compiled by the device's compiler and interleaved with the kernels.

With --tilings, every way to divide each product on a GPU is measured, and the one that Subgraph
chooses is compared with the fastest. With --models, whole models are timed on OPENCL, on CPU, and
by PyTorch on the same card if it has CUDA: all in float32, with the copies of inputs and results.

usage: python benchmarks/opencl.py [--device OPENCL] [--rounds 10] [--tilings] [--models FILE ...]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

import subgraph as sg
from subgraph.devices.placement.profiles import sample_inputs
from subgraph.graph.types import Array
from subgraph.opencl.runtime import Runtime, opencl, runtime
from subgraph.opencl.tuning import TILES
from subgraph.ops.matmul import opencl as products

Run = Callable[[], float]

# Each iteration of the loop reads one column of A (cached) and two vectors of B, as a GEMM does.
LOOP = """
__kernel __attribute__((reqd_work_group_size(GROUP, 1, 1)))
void loop(__global const float* a, __global const float* b, __global float* out, int turns) {
  V low[ROWS], high[ROWS];
  for (int r = 0; r < ROWS; r++) low[r] = high[r] = (V)(r);
  for (int k = 0; k < turns; k++) {
    V x = *(__global const V*)(b + (k % 64) * 2 * LANES);
    V y = *(__global const V*)(b + (k % 64) * 2 * LANES + LANES);
    for (int r = 0; r < ROWS; r++) {
      float f = a[(k % 64) * ROWS + r];
      low[r] = f * x + low[r];
      high[r] = f * y + high[r];
    }
  }
  V sum = (V)(0);
  for (int r = 0; r < ROWS; r++) sum += low[r] + high[r];
  *(__global V*)(out + get_global_id(0) * LANES) = sum;
}
"""
# Rows, columns, depth: squares, a transformer's, a classifier's, and pointwise convolutions.
PRODUCTS = [
    *[(512, 512, 512), (1024, 1024, 1024), (4096, 4096, 1024), (1, 1000, 2048), (1, 4096, 4096)],
    *[(128, 3072, 768), (128, 768, 3072), (128, 768, 768), (32, 1280, 320), (16, 12544, 32)],
    *[(96, 12544, 16), (24, 3136, 96), (576, 196, 96), (160, 49, 960), (1280, 49, 320)],
    *[(64, 3136, 64), (256, 3136, 64), (512, 784, 128), (1024, 196, 256), (512, 49, 2048)],
]
# images, channels, height and width, kernels, size, stride
CONVOLUTIONS = [
    (1, 64, 56, 64, 3, 1),
    (1, 128, 28, 128, 3, 1),
    (1, 256, 14, 1024, 1, 1),
    (1, 512, 7, 512, 3, 1),
    (1, 3, 224, 64, 7, 2),
    (8, 64, 56, 64, 3, 1),
    (1, 64, 128, 32, 3, 1),
]


def loops(device: Runtime) -> dict[str, Run]:
    """Return for each shape of register tile a function that runs the loop; it returns GFLOP/s."""
    api = opencl()
    found: dict[str, Run] = {}
    lanes = max(device.traits.vector, 1)
    group = 64 if device.traits.is_gpu else 1
    items = device.traits.units * (2048 if device.traits.is_gpu else 8)
    turns = 1 << 17
    queue = device.queue(profiling=True)
    zeros = np.zeros(64 * 64 * 16, np.float32)
    flags = api.mem_flags
    a, b, out = (
        api.Buffer(device.context, flags.READ_WRITE | flags.COPY_HOST_PTR, hostbuf=array)
        for array in (zeros, zeros, np.zeros(items * lanes, np.float32))
    )
    for rows in (4, 6, 8):
        vector = f"float{lanes}" if lanes > 1 else "float"
        options = [f"-DROWS={rows}", f"-DLANES={lanes}", f"-DV={vector}", f"-DGROUP={group}"]
        program = api.Program(device.context, LOOP).build([*options, "-cl-mad-enable"])
        kernel = api.Kernel(program, "loop")
        kernel.set_args(a, b, out, np.int32(turns))

        # The default argument keeps the buffers alive, which a kernel does not.
        def run(kernel: Any = kernel, rows: int = rows, held: object = (a, b, out)) -> float:
            event = api.enqueue_nd_range_kernel(queue, kernel, (items,), (group,))
            event.wait()
            seconds = (event.profile.end - event.profile.start) * 1e-9
            return 2 * 2 * rows * lanes * turns * items / seconds / 1e9

        found[f"{rows} x 2 {vector}"] = run
    return found


def compiled(graph: sg.Graph, arrays: Sequence[Array], flops: int, device: str) -> Run:
    """Return a function that runs a graph and returns the GFLOP/s of its kernels."""
    request = sg.Core().compile_model(graph, device, {"ENABLE_PROFILING": True})
    infer = request.create_infer_request()

    def run() -> float:
        infer.infer(list(arrays))
        return flops / sum(entry.seconds for entry in infer.profile()) / 1e9

    return run


def product(shape: tuple[int, int, int], device: str) -> Run:
    """Return a function that runs a product of (m, k) with a weight (k, n); it returns GFLOP/s."""
    m, n, k = shape
    rng = np.random.default_rng(0)
    x = sg.input("x", (m, k), "float32")
    w = sg.parameter("w", rng.standard_normal((k, n)).astype(np.float32))
    graph = sg.Graph(inputs=[x], outputs=[sg.ops.MatMul(x, w)])
    arrays = [rng.standard_normal((m, k)).astype(np.float32)]
    return compiled(graph, arrays, 2 * m * n * k, device)


def convolution(shape: tuple[int, int, int, int, int, int], device: str) -> Run:
    """Return a function that runs one of `CONVOLUTIONS`; it returns GFLOP/s."""
    images, channels, size, kernels, taps, stride = shape
    rng = np.random.default_rng(0)
    x = sg.input("x", (images, channels, size, size), "float32")
    weight = rng.standard_normal((kernels, channels, taps, taps)).astype(np.float32)
    half = taps // 2
    y = sg.ops.Conv(
        x, sg.parameter("w", weight), pads=(half, half, half, half), strides=(stride, stride)
    )
    out = (size + 2 * half - taps) // stride + 1
    flops = 2 * images * channels * taps * taps * kernels * out * out
    arrays = [rng.standard_normal((images, channels, size, size)).astype(np.float32)]
    return compiled(sg.Graph(inputs=[x], outputs=[y]), arrays, flops, device)


def tilings(cases: dict[str, Callable[[], Run]], rounds: int) -> None:
    """Print the rate of each product with the chosen tiling, and with the best of all.

    Args:
        cases: Functions that compile a product, by name.
        rounds: Runs of each; the fastest counts.
    """
    choose, ratios = products.choose_tiling, list[float]()
    for name, compile_it in cases.items():
        rates: dict[products.Tiling, float] = {}
        chosen: list[products.Tiling] = []

        def note(low: Any, product: Any, chosen: Any = chosen) -> products.Tiling:
            chosen.append(choose(low, product))
            return chosen[-1]

        products.choose_tiling = note
        compile_it()
        for tiling in [products.Tiling(t, 1 << k) for t in TILES for k in range(6)]:
            products.choose_tiling = lambda low, product, tiling=tiling: tiling
            run = compile_it()
            rates[tiling] = max(run() for _ in range(rounds))
        best = max(rates, key=rates.__getitem__)
        ratios.append(rates[best] / rates[chosen[-1]])
        print(f"{rates[chosen[-1]]:8.1f} GFLOP/s  {name}: {chosen[-1]}; {ratios[-1]:.2f}: {best}")
    products.choose_tiling = choose
    print(f"the best ones are faster by {statistics.geometric_mean(ratios):.3f}")


def model_times(paths: Sequence[str], device: str, rounds: int) -> None:
    """Print the milliseconds of a request of each model, by device."""
    configs: dict[str, dict[str, Any]] = {device: {}, "CPU": {}, "TORCH": {"DEVICE": "cuda"}}
    for path in paths:
        graph = sg.load(path)
        inputs = sample_inputs(graph)
        for name, config in configs.items():
            try:
                request = sg.compile_model(graph, name, config).create_infer_request()
            except sg.SubgraphError as error:
                print(f"{path}: {name}: {error}")
                continue
            seconds: list[float] = []
            for _ in range(rounds + 3):
                start = time.perf_counter()
                request.infer(inputs)
                seconds.append(time.perf_counter() - start)
            print(f"{path}: {name} {statistics.median(seconds[3:]) * 1e3:.3f} ms", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; return 0 if every kernel reaches a third of the loop's rate."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="OPENCL")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--tilings", action="store_true", help="compare all tilings, on a GPU")
    parser.add_argument("--models", nargs="*", default=[], metavar="FILE", help="time models")
    options = parser.parse_args(argv)
    device = runtime(int(options.device.partition(".")[2] or 0))
    print(f"{device.name}, {device.traits}")
    compilers: dict[str, Callable[[], Run]] = {
        f"MatMul {m}x{k} by {k}x{n}": partial(product, (m, n, k), options.device)
        for m, n, k in PRODUCTS
    }
    compilers |= {
        f"{i} Conv {c}x{s}x{s} by {o} of {t}x{t} / {d}": partial(
            convolution, (i, c, s, o, t, d), options.device
        )
        for i, c, s, o, t, d in CONVOLUTIONS
    }
    if options.models:
        model_times(options.models, options.device, options.rounds)
        return 0
    if options.tilings:
        tilings(compilers, options.rounds)
        return 0
    measures = loops(device)
    cases = {name: compile_it() for name, compile_it in compilers.items()}
    best = dict.fromkeys([*measures, *cases], 0.0)
    for _ in range(options.rounds):
        for name, run in (*measures.items(), *cases.items()):
            best[name] = max(best[name], run())
    limit = max(best[name] for name in measures)
    for name in measures:
        print(f"{best[name]:8.1f} GFLOP/s          {name} (registers)")
    for name in cases:
        print(f"{best[name]:8.1f} GFLOP/s  {best[name] / limit:5.0%}   {name}")
    worst = min(best[name] for name in cases) / limit
    print(f"least: {worst:.0%} of the loop")
    return int(worst < 1 / 3)


if __name__ == "__main__":
    sys.exit(main())
