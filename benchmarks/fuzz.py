"""Differential fuzzing: random models of real operators, ours against ONNX Runtime.

Graphs come from the strategies of ``sg.testing``; hypothesis shrinks what differs to a few nodes
and the text form of that graph is printed, ready to be kept as a test. A graph whose result in
ONNX Runtime itself moves when the inputs move by a part in a million (a comparison of equals, an
argument of the largest of equals) proves nothing and is counted as unstable.

    python benchmarks/fuzz.py --devices CPU,REFERENCE --count 10000
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np
from hypothesis import HealthCheck, Phase, given, seed, settings

import subgraph as sg
from subgraph.testing import random_graphs

Array = np.ndarray[Any, Any]
_BATCH = 100
_RTOL, _ATOL = 1e-3, 1e-4


class Difference(AssertionError):
    """Two runtimes disagree."""


def run_onnxruntime(content: bytes, feeds: Mapping[str, Array]) -> list[Any]:
    """Return what ONNX Runtime gives for the model."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    results: list[Any] = session.run(None, dict(feeds))
    return results


def difference(got: Sequence[Any], expected: Sequence[Any]) -> str:
    """Return how two lists of outputs differ, "" if they do not."""
    for number, (mine, theirs) in enumerate(zip(got, expected, strict=True)):
        mine, theirs = np.asarray(mine), np.asarray(theirs)
        if mine.dtype != theirs.dtype or mine.shape != theirs.shape:
            return f"output {number}: {mine.dtype}{mine.shape} for {theirs.dtype}{theirs.shape}"
        if mine.dtype.kind not in "f":
            if not np.array_equal(mine, theirs):
                return f"output {number}: {np.mean(mine != theirs):.0%} of the elements differ"
            continue
        rough = 16.0 if mine.dtype.itemsize == 2 else 1.0
        mine, theirs = mine.astype(np.float64), theirs.astype(np.float64)
        finite = theirs[np.isfinite(theirs)]
        scale = float(np.abs(finite).max()) if finite.size else 0.0
        limits = rough * _RTOL, rough * _ATOL * max(scale, 1.0)
        if not np.allclose(mine, theirs, *limits, equal_nan=True):
            with np.errstate(all="ignore"):
                worst = float(np.nanmax(np.abs(mine - theirs)))
            return f"output {number}: off by {worst:.3g} where values reach {scale:.3g}"
    return ""


def is_stable(content: bytes, feeds: Mapping[str, Array], expected: Sequence[Any]) -> bool:
    """Return whether ONNX Runtime gives nearly the same for nearly the same inputs."""
    rng = np.random.default_rng(1)
    for _ in range(3):
        moved: dict[str, Array] = {
            name: (
                (array * (1 + rng.uniform(-1e-6, 1e-6, array.shape))).astype(array.dtype)
                if array.dtype.kind == "f"
                else array
            )
            for name, array in feeds.items()
        }
        if difference(run_onnxruntime(content, moved), expected):
            return False
    return True


def check(graph: sg.Graph, devices: Sequence[str], number: int, counts: Counter[str]) -> None:
    """Compare one graph.

    Raises:
        Difference: a device gives something else than ONNX Runtime.
    """
    feeds = random_graphs.feeds(graph, number)
    content = sg.to_onnx(graph).SerializeToString()
    try:
        expected = run_onnxruntime(content, feeds)
    except Exception as error:
        counts[f"not run by ONNX Runtime ({' '.join(str(error).split())[:120]})"] += 1
        return
    for device in devices:
        try:
            results = sg.compile_model(graph, device)(feeds)
        except Exception as error:
            text = " ".join(str(error).split())[:300]
            raise Difference(f"{device}: {type(error).__name__}: {text}") from error
        found = difference([results[k] for k in range(len(graph.outputs))], expected)
        if found:
            if not is_stable(content, feeds, expected):
                counts["unstable"] += 1
                return
            raise Difference(f"{device}: {found}")
    counts["equal"] += 1


@attrs.frozen
class Finding:
    """A shrunk counterexample."""

    batch: int
    error: str
    text: str


def run_batch(
    job: tuple[int, int, tuple[str, ...], int, bool],
) -> tuple[Counter[str], Finding | None]:
    """Check a batch of graphs; all of them follow from the seed and the batch's number."""
    start, batch, devices, nodes, corners = job
    warnings.simplefilter("ignore")
    counts: Counter[str] = Counter()
    last: dict[str, Any] = {}

    @seed(start * 1_000_003 + batch)
    @settings(
        max_examples=_BATCH,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
        report_multiple_bugs=False,
    )
    @given(random_graphs.graphs(max_nodes=nodes, corners=corners))
    def compare(graph: sg.Graph) -> None:
        try:
            check(graph, devices, batch, counts)
        except Difference as error:
            last["finding"] = Finding(batch, str(error), str(graph))
            raise

    try:
        compare()
    except Difference:
        counts["different"] += 1
        return counts, last["finding"]
    except Exception as error:
        counts["batch ended early"] += 1
        return counts, Finding(batch, f"{type(error).__name__}: {error}", "")
    return counts, None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the batches and print what differs; 1 if anything does."""
    parser = argparse.ArgumentParser(description="Compare random models with ONNX Runtime.")
    parser.add_argument("--devices", default="CPU,REFERENCE")
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--nodes", type=int, default=12, help="operators of a model at most")
    parser.add_argument(
        "--corners", action="store_true", help="rare attributes, dtypes, shapes too"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first-batch", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args(arguments)
    devices = tuple(options.devices.split(","))
    batches = range(options.first_batch, options.first_batch + -(-options.count // _BATCH))
    shared = (devices, options.nodes, options.corners)
    jobs = [(options.seed, batch, *shared) for batch in batches]
    counts: Counter[str] = Counter()
    findings: list[Finding] = []
    start = time.perf_counter()
    with mp.get_context("spawn").Pool(options.jobs, maxtasksperchild=20) as pool:
        for done, (found, finding) in enumerate(pool.imap_unordered(run_batch, jobs), 1):
            counts += found
            if finding is not None:
                findings.append(finding)
                print(f"batch {finding.batch}: {finding.error}\n{finding.text}\n", flush=True)
            if sys.stderr.isatty():
                print(f"\rbatch {done}/{len(jobs)}", end="", file=sys.stderr, flush=True)
    shown = ", ".join(f"{count} {what}" for what, count in counts.most_common())
    print(
        f"seed {options.seed}, {len(jobs)} batches of {_BATCH} on {', '.join(devices)}: {shown}; "
        f"{time.perf_counter() - start:.0f} s"
    )
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
