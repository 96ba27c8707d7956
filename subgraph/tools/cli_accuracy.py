"""The command `subgraph accuracy`: lower precisions and integer kernels compared with float32."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import subgraph as sg
from subgraph.system.host import multiplies_bfloat16
from subgraph.tools.accuracy import Run, is_quantized, measure
from subgraph.tools.cli_inputs import input_arrays, ports
from subgraph.tools.cli_output import Output

_WEIGHTS = ("bfloat16", "int8", "int4")  # in which CPU may hold float32 weights


def accuracy(args: argparse.Namespace) -> None:
    """Compare a model's results in lower precision or by int8 kernels with those in float32."""
    out = Output(args)
    graph = sg.load(args.model)
    given = dict(args.config)
    quantized = is_quantized(graph)
    truth_config = {**given, "FUSION": "0"} if quantized else given
    with out.progress("compiling"):
        truth = _runner(args.model, truth_config)
        rounded = {f"{dtype} weights": ("WEIGHTS_PRECISION", dtype) for dtype in _WEIGHTS}
        # Without matrix tiles products of float32 are not rounded.
        if multiplies_bfloat16():
            rounded["bfloat16 products"] = "INFERENCE_PRECISION", "bfloat16"
        runs: dict[str, Run] = {
            name: _runner(args.model, {**given, option: dtype})
            for name, (option, dtype) in rounded.items()
        }
        if quantized:
            runs = {"int8, integer kernels": _runner(args.model, given)}
        if args.quantized is not None:
            runs[f"int8, {args.quantized.name}"] = _runner(args.quantized, given)
    inputs = ports(graph)
    dims = dict(args.dim)
    with out.progress("comparing"):
        samples = [
            input_arrays(inputs, dict(args.input), dims, args.seed + k) for k in range(args.samples)
        ]
        found = measure(runs, truth, samples)
    rows = [one.row(name) for name, one in found.items()]
    what = "its float32 arithmetic" if quantized else "float32"
    out.table(f"{args.model.name} against {what}, {args.samples} inputs", rows)
    out.finish({"rows": rows})


def _runner(model: Path, config: dict[str, str]) -> Run:
    compiled = sg.compile_model(model, "CPU", config)

    def run(arrays: Any) -> Sequence[Any]:
        # By position, because a quantised model may have other names of inputs.
        names = [port.name for port in compiled.inputs]
        return list(compiled(dict(zip(names, arrays.values(), strict=False))).values())

    return run
