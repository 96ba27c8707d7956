"""Run randomly damaged models of ONNX's suite; only results and ``sg.SubgraphError`` are allowed.

A case is a number, which determines the model, the damage and the inputs, so that
``--start 4711 --count 1`` repeats one. The damage is to bytes (flipped, removed, doubled,
truncated) or to the message (dimensions, attributes, dtypes, names, operators, nodes). Cases run in
worker processes with an address-space limit; a crash, a hang or another exception is a finding.

    python benchmarks/robustness.py --device AUTO --count 20000
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import re
import resource
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from worker_pool import Lost, run_tasks

from subgraph.testing import conformance as suite

# Edge cases of sizes, axes and counts.
_EDGE_NUMBERS = (
    *(-1, 0, 1, -2, 2, 255, 65536, 2**31 - 1, -(2**31), 2**40, 2**62, 2**63 - 1, -(2**63)),
)


# --- damage ------------------------------------------------------------------------------------


def damaged_bytes(content: bytes, rng: random.Random) -> bytes:
    """Return the bytes with one or two changes."""
    data = bytearray(content)
    for _ in range(rng.randint(1, 2)):
        if not data:
            break
        at = rng.randrange(len(data))
        length = rng.randint(1, 1 + min(16, len(data) - at))
        match rng.randrange(12):
            case 0 | 1 | 2 | 3 | 4:
                data[at] ^= 1 << rng.randrange(8)
            case 5 | 6 | 7:
                data[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF))
            case 8:
                del data[at : at + length]
            case 9:
                data[at:at] = data[at : at + length]
            case 10:
                data[at:at] = rng.randbytes(length)
            case _:
                del data[at:]
    return bytes(data)


def damaged_message(model: onnx.ModelProto, rng: random.Random) -> bytes:
    """Return a model with one to three changed fields."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for _ in range(rng.randint(1, 3)):
        _damage(copy, rng)
    return copy.SerializeToString()


def _damage(model: onnx.ModelProto, rng: random.Random) -> None:
    graph = model.graph
    choices: list[Callable[[], None]] = [lambda: _damage_opset(model, rng)]
    if graph.node:
        node = rng.choice(graph.node)
        choices += [lambda: _damage_node(graph, node, rng)] * 4
        if node.attribute:
            choices += [lambda: _damage_attribute(rng.choice(node.attribute), rng)] * 4
    if graph.initializer:
        choices += [lambda: _damage_tensor(rng.choice(graph.initializer), rng)] * 2
    infos = [*graph.input, *graph.output, *graph.value_info]
    if infos:
        choices += [lambda: _damage_info(rng.choice(infos), rng)] * 2
    rng.choice(choices)()


def _damage_opset(model: onnx.ModelProto, rng: random.Random) -> None:
    for entry in model.opset_import:
        entry.version = rng.choice((*range(1, 30), *_EDGE_NUMBERS))


def _damage_node(graph: onnx.GraphProto, node: onnx.NodeProto, rng: random.Random) -> None:
    names = [name for n in graph.node for name in (*n.input, *n.output)] + ["", "nowhere"]
    match rng.randrange(7):
        case 0 if node.input:
            node.input[rng.randrange(len(node.input))] = rng.choice(names)
        case 1 if node.output:
            node.output[rng.randrange(len(node.output))] = rng.choice(names)
        case 2:
            node.op_type = rng.choice([n.op_type for n in graph.node] + ["Add", "Loop", "Nope"])
        case 3:
            graph.node.remove(node)
        case 4:
            graph.node.add().CopyFrom(node)
        case 5:
            node.input.append(rng.choice(names))
        case _:
            del node.attribute[:]


def _damage_attribute(attribute: onnx.AttributeProto, rng: random.Random) -> None:
    match rng.randrange(6):
        case 0:
            attribute.i = rng.choice(_EDGE_NUMBERS)
        case 1 if attribute.ints:
            attribute.ints[rng.randrange(len(attribute.ints))] = rng.choice(_EDGE_NUMBERS)
        case 2:
            attribute.ints.append(rng.choice(_EDGE_NUMBERS))
        case 3:
            attribute.f = rng.choice((0.0, -1.0, 1e38, float("nan"), float("inf")))
        case 4 if attribute.HasField("t"):
            _damage_tensor(attribute.t, rng)
        case _:
            attribute.type = rng.randrange(15)  # pyright: ignore[reportAttributeAccessIssue]


def _damage_tensor(tensor: onnx.TensorProto, rng: random.Random) -> None:
    match rng.randrange(5):
        case 0 if tensor.dims:
            tensor.dims[rng.randrange(len(tensor.dims))] = rng.choice(_EDGE_NUMBERS)
        case 1:
            tensor.dims.append(rng.choice(_EDGE_NUMBERS))
        case 2:
            tensor.data_type = rng.randrange(30)
        case 3 if tensor.int64_data:
            tensor.int64_data[rng.randrange(len(tensor.int64_data))] = rng.choice(_EDGE_NUMBERS)
        case _:
            tensor.raw_data = damaged_bytes(tensor.raw_data or bytes(8), rng)


def _damage_info(info: onnx.ValueInfoProto, rng: random.Random) -> None:
    tensor = info.type.tensor_type
    match rng.randrange(4):
        case 0 if tensor.shape.dim:
            rng.choice(tensor.shape.dim).dim_value = rng.choice(_EDGE_NUMBERS)
        case 1:
            tensor.elem_type = rng.randrange(30)
        case 2:
            info.type.Clear()
        case _:
            tensor.shape.dim.add().dim_value = rng.choice(_EDGE_NUMBERS)


def damaged_inputs(inputs: Sequence[Any], rng: random.Random) -> list[Any]:
    """Return the inputs, in 30 % of calls with a changed value, shape or dtype of one."""
    given = list(inputs)
    if given and rng.random() < 0.3:
        at = rng.randrange(len(given))
        item = given[at]
        if isinstance(item, np.ndarray) and item.dtype.kind in "iuf" and item.dtype.isbuiltin == 1:
            match rng.randrange(4):
                case 0 if item.size:
                    item = item.copy()
                    number = rng.choice(_EDGE_NUMBERS)
                    with np.errstate(all="ignore"):
                        item.reshape(-1)[rng.randrange(item.size)] = np.array(number).astype(
                            item.dtype
                        )
                case 1:
                    item = item.reshape(-1)[: rng.randrange(item.size + 1)]
                case 2:
                    item = item.astype(np.float64)
                case _:
                    item = None
        given[at] = item
    return given


# --- one case ----------------------------------------------------------------------------------


def run_case(number: int, device: str, seed: int) -> str:
    """Run one case.

    Args:
        number: Number of the case.
        device: The device string.
        seed: Seed of all cases.

    Returns:
        "result", "refused", or the unexpected error.
    """
    import subgraph as sg

    rng = random.Random(f"{seed}/{number}")
    cases = _small_cases()
    case = cases[rng.randrange(len(cases))]
    model, sets = case.load()
    inputs = sets[0][0] if sets else []
    if rng.random() < 0.4:
        content = damaged_bytes(model.SerializeToString(), rng)
    else:
        content = damaged_message(model, rng)
    try:
        compiled = sg.compile_model(sg.load(content), device)
        compiled(damaged_inputs(inputs, rng))
    except sg.SubgraphError:
        return "refused"
    except BaseException as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = [f for f in frames if "subgraph" in f.filename or "ops/" in f.filename]
        at = f"{Path(own[-1].filename).name}:{own[-1].lineno}" if own else "?"
        text = " ".join(str(error).split())[:200]
        return f"{type(error).__name__} at {at} ({case.name}): {text}"
    return "result"


_CASES: list[suite.Case] = []


def _small_cases() -> list[suite.Case]:
    if not _CASES:
        _CASES.extend(c for c in suite.cases() if c.kind != "real")
    return _CASES


# --- workers -----------------------------------------------------------------------------------


def _runner(options: argparse.Namespace) -> Callable[[int], tuple[str, float, float]]:
    """Return the function that runs a case in a worker process.

    It returns how the case ended, its seconds, and the peak memory of the process in GiB.
    """
    limit = int(options.memory * 2**30)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    def run(number: int) -> tuple[str, float, float]:
        start = time.perf_counter()
        ended = run_case(number, options.device, options.seed)
        gc.collect() if number % 64 == 0 else None
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        return ended, time.perf_counter() - start, peak

    return run


def run_all(options: argparse.Namespace) -> tuple[Counter[str], dict[str, list[int]], float, float]:
    """Run the cases.

    Returns:
        Numbers of cases by outcome, cases by kind of finding, seconds of the longest case, and the
        largest peak memory of a process in GiB.
    """
    _small_cases()
    numbers = range(options.start, options.start + options.count)
    counts: Counter[str] = Counter()
    findings: dict[str, list[int]] = {}
    longest, peak = 0.0, 0.0
    # A case may wait for a processor, so that ten times its processor time may pass.
    limits = 10 * options.timeout, options.timeout
    for number, answer in run_tasks(partial(_runner, options), numbers, options.jobs, *limits):
        ended, seconds, used = (answer, 0.0, 0.0) if isinstance(answer, Lost) else answer
        longest, peak = max(longest, seconds), max(peak, used)
        counts[ended if ended in ("result", "refused") else "finding"] += 1
        if ended not in ("result", "refused"):
            kind = re.sub(r"\([a-z0-9_A-Z]+\):.*", "", ended)
            findings.setdefault(kind, []).append(number)
            if len(findings[kind]) == 1:
                print(f"case {number}: {ended}", flush=True)
    return counts, findings, longest, peak


def main(given: Sequence[str] | None = None) -> int:
    """Run the cases and print the findings; return 1 if there are any."""
    parser = argparse.ArgumentParser(description="Damage models at random.")
    parser.add_argument("--device", default="AUTO")
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--timeout", type=float, default=10.0, help="seconds for a case")
    parser.add_argument("--memory", type=float, default=4.0, help="address space in GiB")
    options = parser.parse_args(given)
    start = time.perf_counter()
    counts, findings, longest, peak = run_all(options)
    print(
        f"{options.device}, seed {options.seed}, cases {options.start} to "
        f"{options.start + options.count - 1}: {counts['result']} results, "
        f"{counts['refused']} refused, {counts['finding']} findings; longest case "
        f"{longest:.1f} s, largest process {peak:.2f} GiB; {time.perf_counter() - start:.0f} s"
    )
    for kind, numbers in sorted(findings.items(), key=lambda item: -len(item[1])):
        print(f"{len(numbers):5}  {kind} e.g. {numbers[:5]}")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
