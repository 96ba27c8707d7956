"""Run ONNX's backend test suite on every device, and on ONNX Runtime, OpenVINO and onnx.reference.

Each column of the table is a runtime and a way to load the model: unchanged; partitioned by a
random selector; after save and load; after export and import; printed as text and parsed; with
plans that are symbolic in every dimension. Cases run in worker processes: one that crashes or hangs
counts as failed and is replaced. Failures are printed as they come. Cases that no implementation
can pass are listed with the reason and counted separately.

    python benchmarks/conformance.py --devices AUTO,CPU,REFERENCE --modes plain,partition

A device over a library runs with its fallback devices; the table counts the cases of which it ran a
node. Its own errors are seen if regions may not move to the fallback devices:

    python benchmarks/conformance.py --devices OPENVINO --peers "" --config RUNTIME_FALLBACK=0
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import multiprocessing as mp
import os
import re
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import onnx
from models import onnxruntime_session
from worker_pool import Lost, run_tasks

from subgraph.graph.types import DTYPE_OF_ONNX, ONNX_DTYPE, Array, numpy_dtype
from subgraph.testing import conformance as suite

MODES = ("plain", "partition", "save", "export", "text", "traced")
PEERS = ("onnxruntime", "openvino", "onnx.reference")


@attrs.frozen
class Column:
    """One runtime in one mode: a column of the table.

    Attributes:
        runtime: A device string, or one of `PEERS`.
        mode: How the model is loaded, one of `MODES`; peers have "plain" only.
    """

    runtime: str
    mode: str = "plain"

    @property
    def title(self) -> str:
        """Heading of the column."""
        return self.runtime if self.mode == "plain" else f"{self.runtime} {self.mode}"


@attrs.frozen
class Outcome:
    """Result of a case.

    Attributes:
        name: Name of the case.
        error: Why it failed; "" if it passed.
        seconds: Time of the case.
        own: Whether the column's device ran at least one node; False for peers.
    """

    name: str
    error: str
    seconds: float
    own: bool = False


# --- the runtimes ------------------------------------------------------------------------------


def preparer(
    column: Column, options: argparse.Namespace, devices: set[str]
) -> Callable[[onnx.ModelProto], suite.Run]:
    """Return the function that prepares a model for the column's runtime.

    Args:
        column: Runtime and mode.
        options: The arguments ``seed`` and ``config``.
        devices: Receives the names of our devices that run nodes of the model.
    """
    if column.runtime == "onnxruntime":
        return _onnxruntime
    if column.runtime == "openvino":
        return _openvino
    if column.runtime == "onnx.reference":
        return _onnx_reference
    config = dict(pair.split("=", 1) for pair in options.config.split(",") if pair)

    def prepare(model: onnx.ModelProto) -> suite.Run:
        from subgraph.tools.backend import SubgraphRep

        compiled = _compiled(model, column, options.seed, config)
        devices.update(compiled.get_property("EXECUTION_DEVICES"))
        run = SubgraphRep(compiled).run
        if column.mode != "traced":
            return run

        def run_traced(inputs: Sequence[Any]) -> Sequence[Any]:
            with suite.traced():
                return run(inputs)

        return run_traced

    return prepare


def _compiled(model: onnx.ModelProto, column: Column, seed: int, config: dict[str, Any]) -> Any:
    """Return the model, compiled by Subgraph in the column's mode."""
    import subgraph as sg

    source: Any = model
    if column.mode == "partition":
        source = suite.partitioned(model, seed)
    elif column.mode == "save":
        with tempfile.TemporaryDirectory() as folder:
            return sg.compile_model(suite.saved(model, folder), column.runtime, config)
    elif column.mode == "text":
        source = suite.reprinted(model)
    elif column.mode == "export":
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.blob"
            sg.compile_model(model, column.runtime, config).export_model(path)
            return sg.import_model(path, column.runtime, config)
    return sg.compile_model(source, column.runtime, config)


# OpenVINO's names of the types that NumPy lacks.
_NARROW = {
    "bfloat16": "bf16",
    "float8_e4m3fn": "f8e4m3",
    "float8_e5m2": "f8e5m2",
    "float8_e8m0fnu": "f8e8m0",
    "float4_e2m1fn": "f4e2m1",
    "int4": "i4",
    "uint4": "u4",
    "uint2": "u2",
}


def _raw(value: Array) -> bytes:
    """Return the elements as ONNX packs them."""
    return onnx.numpy_helper.from_array(value).raw_data


def _unpacked(content: bytes, dtype: str, shape: Sequence[int]) -> Any:
    proto = onnx.TensorProto(data_type=ONNX_DTYPE[dtype], dims=shape, raw_data=content)
    return onnx.numpy_helper.to_array(proto)


def _onnxruntime(model: onnx.ModelProto) -> suite.Run:
    """Prepare a model for ONNX Runtime: with an IR version that it accepts, types as OrtValue."""
    import ctypes

    import onnxruntime as ort

    lowered = onnx.ModelProto()
    lowered.CopyFrom(model)
    lowered.ir_version = min(lowered.ir_version, 13)
    session = onnxruntime_session(lowered.SerializeToString())
    names = [item.name for item in session.get_inputs()]
    results = [item.name for item in session.get_outputs()]

    # Only Session.run returns sequences, optionals and maps.
    tensors = all(item.type.startswith("tensor(") for item in session.get_outputs())

    def to_ort(value: Any) -> Any:
        number = ONNX_DTYPE.get(value.dtype.name)
        if value.dtype.isbuiltin == 1 or number is None:
            return ort.OrtValue.ortvalue_from_numpy(value)
        held, raw = ort.OrtValue.ortvalue_from_shape_and_type(value.shape, number), _raw(value)
        ctypes.memmove(held.data_ptr(), raw, len(raw))
        return held

    def from_ort(value: Any) -> Any:
        dtype = DTYPE_OF_ONNX.get(value.element_type(), "") if value.is_tensor() else ""
        if dtype in ("", "string") or numpy_dtype(dtype).isbuiltin == 1:
            return value.numpy()
        content = ctypes.string_at(value.data_ptr(), value.tensor_size_in_bytes())
        return _unpacked(content, dtype, value.shape())

    def compute(values: Sequence[Any]) -> Sequence[Any]:
        given = [v if isinstance(v, list) or v is None else np.asarray(v) for v in values]
        if not tensors or any(
            not isinstance(v, np.ndarray) or v.dtype.kind in "OUS" for v in given
        ):
            return session.run(None, dict(zip(names, given, strict=False)))
        feeds = dict(zip(names, map(to_ort, given), strict=False))
        return [from_ort(v) for v in session.run_with_ort_values(results, feeds)]

    return compute


def _openvino(model: onnx.ModelProto) -> suite.Run:
    """Prepare a model for OpenVINO: inputs by name, narrow types as OpenVINO's."""
    import openvino as ov

    core = ov.Core()
    read = core.read_model(model.SerializeToString())
    compiled = core.compile_model(read, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    names = [item.name for item in model.graph.input]
    known = {name for port in compiled.inputs for name in port.get_names()}

    def to_tensor(value: Any) -> Any:
        array = np.ascontiguousarray(value).reshape(np.shape(value))
        if array.dtype.name in _NARROW:
            held = ov.Tensor(getattr(ov.Type, _NARROW[array.dtype.name]), ov.Shape(array.shape))
            held.data.view("u1").reshape(-1)[:] = np.frombuffer(_raw(array), "u1")
            return held
        return ov.Tensor(array)

    def compute(values: Sequence[Any]) -> Sequence[Any]:
        given = dict(zip(names, values, strict=False))
        request = compiled.create_infer_request()
        for name, value in given.items():
            if name in known:
                request.set_tensor(name, to_tensor(value))
        request.infer()
        outputs: list[Any] = []
        for k, info in enumerate(model.graph.output):
            tensor = request.get_output_tensor(k)
            dtype = DTYPE_OF_ONNX.get(info.type.tensor_type.elem_type, "")
            if dtype in _NARROW:
                content = np.ascontiguousarray(tensor.data).tobytes()
                outputs.append(_unpacked(content, dtype, tuple(tensor.shape)))
            else:
                outputs.append(np.array(tensor.data))
        return outputs

    return compute


def _onnx_reference(model: onnx.ModelProto) -> suite.Run:
    from onnx.reference import ReferenceEvaluator

    evaluator = ReferenceEvaluator(model)
    names = [str(name) for name in evaluator.input_names]

    def compute(values: Sequence[Any]) -> Sequence[Any]:
        results: Any = evaluator.run(None, dict(zip(names, values, strict=False)))
        return results

    return compute


# --- workers -----------------------------------------------------------------------------------


def _runner(
    column: Column, options: argparse.Namespace
) -> Callable[[int], tuple[str, float, bool]]:
    """Return the function that runs the case at a position, in a worker process.

    It returns the error, the seconds, and whether the column's device ran a node.
    """
    os.environ["ALLOW_RELEASED_ONNX_OPSET_ONLY"] = "0"  # ONNX Runtime: allow opset 27 and 28
    devices: set[str] = set()
    prepare = preparer(column, options, devices)
    known = suite.cases(options.suite)
    own = column.runtime.partition(":")[2].partition(",")[0] or column.runtime

    def run(position: int) -> tuple[str, float, bool]:
        devices.clear()
        start = time.perf_counter()
        try:
            suite.run(known[position], prepare)
            error = ""
        except Exception as failure:
            where = traceback.extract_tb(failure.__traceback__)[-1]
            text = " ".join(str(failure).split())[:300]
            place = f"{Path(where.filename).name}:{where.lineno}"
            error = f"{type(failure).__name__}: {text} ({place})"
        return error, time.perf_counter() - start, own in devices

    return run


def run_column(
    column: Column, positions: Sequence[int], options: argparse.Namespace
) -> Iterator[Outcome]:
    """Run cases on ``options.jobs`` processes; yield outcomes in the order in which they end.

    Args:
        column: Runtime and mode.
        positions: Positions of the cases in `suite.cases`.
        options: The arguments ``jobs``, ``seed``, ``config``, ``suite`` and ``timeout``.
    """
    known = suite.cases(options.suite)
    prepare = partial(_runner, column, options)
    for position, answer in run_tasks(prepare, positions, options.jobs, options.timeout):
        lost = isinstance(answer, Lost)
        error, seconds, own = (str(answer), 0.0, False) if lost else answer
        yield Outcome(known[position].name, error, seconds, own)


# --- report ------------------------------------------------------------------------------------


def table(
    results: dict[Column, list[Outcome]], known: Sequence[suite.Case], excused: Collection[str]
) -> str:
    """Return the table of passed cases by category and column.

    Args:
        results: Outcomes of each column, of the same cases.
        known: All cases of the suite.
        excused: Names of the cases that need not pass.
    """
    by_name = {case.name: case for case in known}
    columns = list(results)
    first = results[columns[0]]
    total = Counter(by_name[o.name].category for o in first)
    rows = [["category", "cases", *(c.title for c in columns)]]
    counts = {
        column: Counter(by_name[o.name].category for o in outcomes if not o.error)
        for column, outcomes in results.items()
    }
    for category in sorted(total):
        rows.append([category, str(total[category]), *(str(counts[c][category]) for c in columns)])
    rows.append(["all", str(len(first)), *(str(sum(counts[c].values())) for c in columns)])
    count = sum(outcome.name in excused for outcome in first)
    rows.append(["need not pass", str(count), *["" for _ in columns]])
    rows.append(["on the device", "", *(str(sum(o.own for o in results[c])) for c in columns)])
    rows.append(["seconds", "", *(f"{sum(o.seconds for o in results[c]):.0f}" for c in columns)])
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.ljust(width) if k == 0 else cell.rjust(width)
            for k, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    lines.insert(1, "-" * len(lines[0]))
    lines.insert(-4, "-" * len(lines[0]))
    return "\n".join(lines)


def failures(column: Column, outcomes: Sequence[Outcome], excused: Collection[str]) -> list[str]:
    """Return a line for each kind of error, with the cases that failed by it.

    Args:
        column: Runtime and mode.
        outcomes: Outcomes of its cases.
        excused: Names of the cases that need not pass.
    """
    groups: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        if outcome.error and outcome.name not in excused:
            kind = re.sub(r"'[^']*'|\d+", "#", outcome.error)[:160]
            groups.setdefault(kind, []).append(outcome)
    lines: list[str] = []
    for group in sorted(groups.values(), key=len, reverse=True):
        names = ", ".join(o.name for o in group[:4])
        more = f" and {len(group) - 4} more" if len(group) > 4 else ""
        lines.append(f"  {column.title}: {names}{more}: {group[0].error}")
    return lines


def versions() -> str:
    """Return the versions of the installed packages on which results depend."""
    found: list[str] = []
    for name in ("onnx", "numpy", "onnxruntime", "openvino"):
        with suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{name} {importlib.metadata.version(name)}")
    return ", ".join(found)


def _arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Run ONNX's test suite on devices and peers.")
    parser.add_argument("--devices", default="", help="ours, with commas (default: all that start)")
    parser.add_argument("--modes", default="plain", help=f"of ours: {','.join(MODES)}, or all")
    parser.add_argument("--peers", default="onnxruntime,openvino", help=",".join(PEERS))
    parser.add_argument("--select", default="", help="only cases whose name holds this")
    parser.add_argument("--config", default="", help="properties of ours: KEY=VALUE, with commas")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds for a case")
    parser.add_argument("--seed", type=int, default=0, help="of the random selectors")
    parser.add_argument(
        "--suite", default="", help="folder of another release's package onnx; default: installed"
    )
    parser.add_argument("--json", type=Path, help="write all outcomes to this file")
    return parser.parse_args(given)


def _columns(options: argparse.Namespace) -> list[Column]:
    devices = [name for name in options.devices.split(",") if name]
    if not devices:
        # In another process, because devices start threads, and workers are forked.
        with mp.get_context("fork").Pool(1) as pool:
            devices = ["AUTO", *pool.apply(_available)]
    modes = MODES if options.modes == "all" else options.modes.split(",")
    if options.devices == "none":
        devices = []
    columns = [Column(device, mode) for device in devices for mode in modes]
    return columns + [Column(name) for name in options.peers.split(",") if name]


def _available() -> list[str]:
    import subgraph as sg

    return list(sg.default_core().available_devices)


def main(given: Sequence[str] | None = None) -> int:
    """Run the suite, print the table; return 1 if a device failed a case that can pass."""
    options = _arguments(given)
    columns = _columns(options)
    known = suite.cases(options.suite)
    positions = [k for k, case in enumerate(known) if options.select in case.name]
    print(
        f"{len(positions)} cases; {versions()}; seed of random selectors {options.seed}", flush=True
    )
    results: dict[Column, list[Outcome]] = {}
    start = time.perf_counter()
    for column in columns:
        outcomes: list[Outcome] = []
        for outcome in run_column(column, positions, options):
            outcomes.append(outcome)
            if outcome.error:
                print(f"{column.title}: {outcome.name}: {outcome.error}", flush=True)
            if sys.stderr.isatty():
                done = f"{column.title}: {len(outcomes)}/{len(positions)}"
                print(f"\r{done:60}", end="", file=sys.stderr, flush=True)
        outcomes.sort(key=lambda o: o.name)
        results[column] = outcomes
        passed = sum(not o.error for o in outcomes)
        took = time.perf_counter() - start
        print(f"{column.title}: {passed} of {len(outcomes)} ({took:.0f} s since start)", flush=True)
    excused = suite.excused(options.suite)
    print(f"\n{table(results, known, excused)}\n")
    ours = [c for c in columns if c.runtime not in PEERS]
    lines = [line for column in ours for line in failures(column, results[column], excused)]
    print("\n".join(["failed:", *lines] if lines else ["no case failed that can pass"]))
    print("\nneed not pass:")
    names = {known[k].name for k in positions}
    for reason in dict.fromkeys(excused.values()):
        alike = [name for name in excused if excused[name] == reason and name in names]
        if alike:
            print(f"  {', '.join(alike)}: {reason}")
    if options.json:
        content = {
            column.title: {o.name: o.error for o in outcomes}
            for column, outcomes in results.items()
        }
        options.json.write_text(json.dumps(content, indent=1))
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
