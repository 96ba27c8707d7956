"""Profiles of runs: time, FLOP/s and bandwidth of each step next to the machine's peak."""

from __future__ import annotations

import ctypes
import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from subgraph.engine.codegen.tiling import TileBlock
from subgraph.operators.subgraph_op import ProfileEntry
from subgraph.ops.shared.tile_planning import tiles
from subgraph.runtime.compiled_model import CompiledModel
from subgraph.system.host import core_count

_KERNEL = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)
_COPIES = (1 << 17, 1 << 20, 1 << 23, 1 << 27)
"""The bytes that copies touch whose speed is measured: from a core's own caches to memory."""


def core_limit(model: CompiledModel) -> int:
    """Return the number of cores that a run of a model may use."""
    supported: Sequence[str] = model.get_property("SUPPORTED_PROPERTIES")
    asked = "INFERENCE_NUM_THREADS"
    return (int(model.get_property(asked)) if asked in supported else 0) or core_count()


def profile_model(
    model: CompiledModel, arrays: Mapping[str, Any], repeats: int = 10
) -> list[ProfileEntry]:
    """Return an entry for each step of a run: seconds are the median of several runs.

    Begin and end of each step are those of the last run.

    Args:
        model: A model compiled with ``ENABLE_PROFILING``.
        arrays: Inputs by name.
        repeats: Number of measured runs, after one that is not measured.
    """
    request = model.create_infer_request()
    request.infer(arrays)
    runs: list[list[ProfileEntry]] = []
    for _ in range(max(repeats, 1)):
        request.infer(arrays)
        runs.append(list(request.profile()))
    return [
        attrs.evolve(step[-1], seconds=float(np.median([entry.seconds for entry in step])))
        for step in zip(*runs, strict=True)
    ]


@attrs.frozen
class Limits:
    """Measured peak of cores of this machine when all of them are busy.

    Attributes:
        flops: Float32 operations per second of multiply-add loops in registers, summed over cores.
        bytes: Bytes per second, read and written, of copies on all cores, by the bytes that all
            copies together touch, which decide between caches and memory.
    """

    flops: float
    bytes: Mapping[int, float]

    @classmethod
    def measure(cls, cores: int) -> Limits:
        """Return the limits of ``cores`` threads; measuring takes some tenths of a second."""
        return cls(_at_once(peak_flops, cores), {n: copy_bandwidth(n, cores) for n in _COPIES})

    def maximum(self, other: Limits) -> Limits:
        """Return the larger value of each limit, as other processes can only lower them."""
        fastest = {n: max(rate, other.bytes[n]) for n, rate in self.bytes.items()}
        return Limits(max(self.flops, other.flops), fastest)

    def row(self, entry: ProfileEntry, total: float) -> dict[str, Any]:
        """Return a row of a table for an entry; ``total`` is the seconds of all entries."""
        seconds = max(entry.seconds, 1e-9)
        size = next((n for n in self.bytes if n >= entry.bytes), max(self.bytes))
        bound = max(entry.flops / self.flops, entry.bytes / self.bytes[size]) / seconds
        return {
            "node": entry.node,
            "operator": entry.op_type,
            "device": entry.device,
            "kernel": entry.kernel,
            "ms": round(entry.seconds * 1e3, 4),
            "share": f"{entry.seconds / max(total, 1e-12):.1%}",
            "GFLOP/s": round(entry.flops / seconds / 1e9, 1) if entry.flops else "",
            "GB/s": round(entry.bytes / seconds / 1e9, 1) if entry.bytes else "",
            "of the limit": f"{bound:.0%}" if bound else "",
        }


def peak_flops(repeats: int = 15) -> float:
    """Return one core's float32 multiply-add peak in operations per second.

    Runs the largest GEMM tile over operands in registers and the L1 cache, ``repeats`` times.
    """
    of = tiles("float32")
    depth, rows, width = 512 // of.nv, of.mr, of.width
    a, b = np.zeros(rows * 16, np.float32), np.zeros(width, np.float32)
    c = np.zeros(rows * width, np.float32)
    words = np.zeros(TileBlock.block_words, np.int64)
    # Strides of 0 bytes between steps: every step reads the same cached values.
    loops = {"outer_count": 1, "middle_count": 1, "inner_count": 400, "steps": depth}
    strides = {"a_row": 64, "b_vector": of.lanes * 4, "c_row": width * 4, "c_vector": of.lanes * 4}
    operands = {"a": a.ctypes.data, "b": b.ctypes.data, "c": c.ctypes.data}
    for name, value in (loops | strides | operands).items():
        words[TileBlock.fields[name][0]] = value
    tile = _KERNEL(of.contraction().address)
    best = _fastest(lambda: tile(words.ctypes.data, rows, of.nv, 0), repeats)
    return 2 * 400 * depth * rows * width / best


def copy_bandwidth(touched: int, cores: int = 1) -> float:
    """Return the bytes per second, read and written, of copies on several threads.

    Args:
        touched: Bytes that all copies together read and write.
        cores: Number of threads, each of which copies an array of its own.
    """
    part = touched // 2 // cores
    # Several short copies are timed at once, so that the calls' overhead is small.
    row = max(1, (1 << 18) // part)

    def rate() -> float:
        source, target = np.zeros(part, np.uint8), np.ones(part, np.uint8)

        def copies() -> None:
            for _ in range(row):
                np.copyto(target, source)

        return 2 * part * row / _fastest(copies, 5)

    return _at_once(rate, cores)


def _fastest(do: Callable[[], object], repeats: int) -> float:
    best = float("inf")
    for _ in range(repeats):
        begin = time.perf_counter()
        do()
        best = min(best, time.perf_counter() - begin)
    return best


def _at_once(rate: Callable[[], float], cores: int) -> float:
    """Return the sum of the results of ``rate`` on ``cores`` concurrent threads."""
    with ThreadPoolExecutor(cores) as threads:
        return sum(one.result() for one in [threads.submit(rate) for _ in range(cores)])


def write_trace(path: Path, entries: Sequence[ProfileEntry]) -> None:
    """Write the begin, end and thread of entries in the trace event format of Chrome and Perfetto.

    Each thread and each queue of a device has a row, and further rows for overlapping steps.
    """
    known = [entry for entry in entries if entry.start]
    begin = min((entry.start for entry in known), default=0.0)
    rows = _rows(known)
    events: list[dict[str, Any]] = [
        {
            "name": entry.node,
            "cat": entry.op_type,
            "ph": "X",
            "ts": round((entry.start - begin) * 1e6, 3),
            "dur": round((entry.end - entry.start) * 1e6, 3),
            "pid": 1,
            "tid": row,
            "args": {
                "kernel": entry.kernel,
                "device": entry.device,
                "bytes": entry.bytes,
                "flops": entry.flops,
            },
        }
        for entry, row in zip(known, rows, strict=True)
    ]
    names = {row: _row_name(entry) for entry, row in zip(known, rows, strict=True)}
    events += [
        {"name": "thread_name", "ph": "M", "pid": 1, "tid": row, "args": {"name": name}}
        for row, name in sorted(names.items())
    ]
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def _row_name(entry: ProfileEntry) -> str:
    return f"thread {entry.thread}" if entry.thread else f"{entry.device}, queue"


def _rows(entries: Sequence[ProfileEntry]) -> list[int]:
    """Return the row of each entry, counted from 1.

    Entries of one thread share a row unless they overlap partially; nested ones share it, too.
    """
    rows: dict[int, int] = {}
    open_in: dict[tuple[object, int], list[float]] = {}  # ends of entries not yet ended, by row
    numbers: dict[tuple[object, int], int] = {}
    order = sorted(range(len(entries)), key=lambda k: (entries[k].start, -entries[k].end))
    for position in order:
        entry = entries[position]
        owner: object = entry.thread or entry.device
        lane = 0
        while True:
            under_way = open_in.setdefault((owner, lane), [])
            while under_way and under_way[-1] <= entry.start:
                under_way.pop()
            if not under_way or entry.end <= under_way[-1]:
                under_way.append(entry.end)
                break
            lane += 1
        rows[position] = numbers.setdefault((owner, lane), len(numbers) + 1)
    return [rows[position] for position in range(len(entries))]
