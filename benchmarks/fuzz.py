"""Differential fuzzing: Subgraph and ONNX Runtime on random models.

Graphs come from the strategies of ``sg.testing``. Hypothesis shrinks a graph whose results differ
to a few nodes, and the program prints its text form, from which a test can be made. A graph is
counted as unstable, not as different, if ONNX Runtime's own result changes when the inputs change
by a part in a million (as comparisons and argmax of equal values do).

With ``--free`` dimensions of the inputs become symbolic, and each model runs at several sizes one
after the other, which tests symbolic plans.

    python benchmarks/fuzz.py --devices CPU,REFERENCE --count 10000
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import os
import sys
import time
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import attrs
import numpy as np
import onnx
from hypothesis import HealthCheck, Phase, given, seed, settings
from models import onnxruntime_session

import subgraph as sg
from subgraph.graph.types import Array
from subgraph.testing import random_graphs

_BATCH = 100  # graphs of a process's job
_RTOL, _ATOL = 1e-3, 1e-4


class Difference(AssertionError):
    """The results of two runtimes differ."""


def in_onnxruntime(content: bytes) -> Callable[[Mapping[str, Array]], list[Any]]:
    """Return a function that runs the model in ONNX Runtime."""
    session = onnxruntime_session(content)
    return lambda feeds: list(session.run(None, dict(feeds)))


def difference(got: Sequence[Any], expected: Sequence[Any]) -> str:
    """Return how two lists of outputs differ, "" if they agree within the tolerances."""
    for number, (mine, theirs) in enumerate(zip(got, expected, strict=True)):
        mine, theirs = np.asarray(mine), np.asarray(theirs)
        if mine.dtype != theirs.dtype or mine.shape != theirs.shape:
            return f"output {number}: {mine.dtype}{mine.shape} for {theirs.dtype}{theirs.shape}"
        if mine.dtype.kind not in "f":
            if not np.array_equal(mine, theirs):
                said = f"output {number}: {np.mean(mine != theirs):.0%} of the elements differ"
                if mine.dtype.kind in "iu":
                    apart = np.abs(mine.astype(np.float64) - theirs.astype(np.float64)).max()
                    said += f", by at most {apart:.6g}"
                return said
            continue
        rough = 16.0 if mine.dtype.itemsize == 2 else 1.0
        mine, theirs = mine.astype(np.float64), theirs.astype(np.float64)
        # For windows of padding only, ONNX Runtime returns the lowest float, Subgraph -inf.
        theirs[theirs == np.finfo(np.float32).min] = -np.inf
        finite = theirs[np.isfinite(theirs)]
        scale = float(np.abs(finite).max()) if finite.size else 0.0
        limits = rough * _RTOL, rough * _ATOL * max(scale, 1.0)
        if not np.allclose(mine, theirs, *limits, equal_nan=True):
            with np.errstate(all="ignore"):
                worst = float(np.nanmax(np.abs(mine - theirs)))
            return f"output {number}: off by {worst:.3g} where values reach {scale:.3g}"
    return ""


def is_stable(
    runs: Callable[[Mapping[str, Array]], list[Any]],
    feeds: Mapping[str, Array],
    expected: Sequence[Any],
) -> bool:
    """Return whether small changes of the inputs change ONNX Runtime's results only little.

    Args:
        runs: Runs the model in ONNX Runtime.
        feeds: Inputs by name.
        expected: ONNX Runtime's results for them.
    """
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
        if difference(runs(moved), expected):
            return False
    return True


def free(content: bytes, rng: np.random.Generator) -> tuple[bytes, list[dict[str, int]]]:
    """Make about 70 % of the inputs' sizes symbolic, equal ones with one name.

    Returns:
        The model, and assignments of sizes to names at which to run it.
    """
    model = onnx.load_from_string(content)
    drop_shapes(model.graph)
    each = [dim for value in model.graph.input for dim in value.type.tensor_type.shape.dim]
    named = {dim.dim_value: f"d{dim.dim_value}" for dim in each if dim.dim_value > 1}
    named = {size: name for size, name in named.items() if rng.random() < 0.7}
    for dim in each:
        if dim.dim_value in named:
            dim.dim_param = named[dim.dim_value]
    known = {name: size for size, name in named.items()}
    others = [{name: int(rng.integers(1, 12)) for name in known} for _ in range(4)]
    return model.SerializeToString(), [known, *others, known] if known else [{}]


def drop_shapes(graph: onnx.GraphProto) -> None:
    """Remove all shapes except those of the model's inputs, as they hold for one size only."""
    del graph.value_info[:]
    for value in graph.output:
        value.type.tensor_type.ClearField("shape")
    bodies = [a.g for node in graph.node for a in node.attribute if a.HasField("g")]
    for body in bodies:
        drop_shapes(body)
        for value in body.input:
            value.type.tensor_type.ClearField("shape")


def check(
    graph: sg.Graph, devices: Sequence[str], number: int, counts: Counter[str], *, freed: bool
) -> None:
    """Compare one graph on several devices with ONNX Runtime.

    Args:
        graph: The graph.
        devices: Device strings.
        number: Seed of the inputs.
        counts: Counters of outcomes; changed.
        freed: Whether sizes become symbolic.

    Raises:
        Difference: a device's results differ from ONNX Runtime's, or it raised.
    """
    content = sg.to_onnx(graph).SerializeToString()
    sizes: list[dict[str, int]] = [{}]
    if freed:
        content, sizes = free(content, np.random.default_rng(zlib.crc32(content)))
        graph = sg.load(content)
    try:
        runs = in_onnxruntime(content)
    except Exception as error:
        counts[f"not loaded by ONNX Runtime ({' '.join(str(error).split())[:120]})"] += 1
        return
    models: dict[str, sg.CompiledModel] = {}
    for turn, known in enumerate(sizes):
        feeds = random_graphs.feeds(graph, number + turn, known)
        try:
            expected = runs(feeds)
        except Exception as error:
            if not turn:
                counts[f"not run by ONNX Runtime ({' '.join(str(error).split())[:120]})"] += 1
            continue
        for device in devices:
            try:
                model = models.get(device) or sg.compile_model(graph, device)
                models[device] = model
                results = model(feeds)
            except Exception as error:
                if turn and isinstance(error, sg.ShapeError):
                    # ONNX Runtime returns empty results for windows larger than the image.
                    counts["sizes refused"] += 1
                    break
                text = " ".join(str(error).split())[:300]
                raise Difference(
                    f"{device}{known or ''}: {type(error).__name__}: {text}"
                ) from error
            found = difference([results[k] for k in range(len(graph.outputs))], expected)
            if found:
                if not is_stable(runs, feeds, expected):
                    counts["unstable"] += 1
                    return
                raise Difference(f"{device}{known or ''}, turn {turn}: {found}")
        else:
            counts["equal"] += 1


@attrs.frozen
class Finding:
    """A shrunk counterexample.

    Attributes:
        batch: Number of the batch, from which and the seed the graphs follow.
        error: How results differ.
        text: Text form of the graph.
    """

    batch: int
    error: str
    text: str


def run_batch(
    job: tuple[int, int, tuple[str, ...], int, bool, bool],
) -> tuple[Counter[str], Finding | None]:
    """Check a batch of graphs; the seed and the batch's number determine all of them."""
    start, batch, devices, nodes, corners, freed = job
    warnings.simplefilter("ignore")
    counts: Counter[str] = Counter()
    last: dict[str, Any] = {}

    @seed(start * 1_000_003 + batch)
    @settings(
        max_examples=_BATCH,
        database=None,
        deadline=None,
        suppress_health_check=cast("list[HealthCheck]", list(HealthCheck)),
        phases=(Phase.generate, Phase.shrink),
        report_multiple_bugs=False,
    )
    @given(random_graphs.graphs(max_nodes=nodes, corners=corners))
    def compare(graph: sg.Graph) -> None:
        try:
            check(graph, devices, batch, counts, freed=freed)
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
    """Run the batches and print the differences; return 1 if there are any."""
    parser = argparse.ArgumentParser(description="Compare random models with ONNX Runtime.")
    parser.add_argument("--devices", default="CPU,REFERENCE")
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--nodes", type=int, default=12, help="operators of a model at most")
    parser.add_argument(
        "--corners", action="store_true", help="rare attributes, dtypes, shapes too"
    )
    parser.add_argument("--free", action="store_true", help="free sizes, several of them in turn")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first-batch", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args(arguments)
    devices = tuple(options.devices.split(","))
    batches = range(options.first_batch, options.first_batch + -(-options.count // _BATCH))
    shared = (devices, options.nodes, options.corners, options.free)
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
