"""Profiles of whole runs: time, arithmetic and traffic of each step beside the machine's limits."""

from __future__ import annotations

import ctypes
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from subgraph.compiled_model import CompiledModel
from subgraph.engine.tiling import (
    T_A,
    T_AKS,
    T_ARS,
    T_B,
    T_BJS,
    T_BKS,
    T_C,
    T_CJS,
    T_CRS,
    T_KIN,
    T_N0,
    T_N1,
    T_N2,
    T_WORDS,
)
from subgraph.ops.tile_planning import tiles
from subgraph.subgraph_op import ProfileEntry

_KERNEL = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)


def profile_model(
    model: CompiledModel, arrays: Mapping[str, Any], repeats: int = 10
) -> list[ProfileEntry]:
    """Return an entry for each step of a run, its time the median of ``repeats`` runs.

    Args:
        model: A model compiled with ``ENABLE_PROFILING``.
        arrays: Inputs by name.
        repeats: Runs that count, after a first one that does not.
    """
    request = model.create_infer_request()
    request.infer(arrays)
    runs: list[list[ProfileEntry]] = []
    for _ in range(max(repeats, 1)):
        request.infer(arrays)
        runs.append(list(request.profile()))
    return [
        attrs.evolve(step[0], seconds=float(np.median([entry.seconds for entry in step])))
        for step in zip(*runs, strict=True)
    ]


@attrs.frozen
class Limits:
    """What one core of this machine can do, as measured now.

    Attributes:
        flops: Float32 operations a second of a register-only multiply-add loop.
        bytes: Bytes a second of a large copy, read and written.
    """

    flops: float
    bytes: float

    @classmethod
    def measure(cls) -> Limits:
        """Measure both; takes about a tenth of a second."""
        return cls(peak_flops(), copy_bandwidth())

    def row(self, entry: ProfileEntry, total: float) -> dict[str, Any]:
        """Return an entry as a row of a table; ``total`` is the time of all entries."""
        seconds = max(entry.seconds, 1e-9)
        bound = max(entry.flops / self.flops, entry.bytes / self.bytes) / seconds
        return {
            "node": entry.node,
            "operator": entry.op_type,
            "device": entry.device,
            "kernel": entry.kernel,
            "ms": round(entry.seconds * 1e3, 4),
            "share": f"{entry.seconds / max(total, 1e-12):.1%}",
            "GFLOP/s": round(entry.flops / seconds / 1e9, 1) if entry.flops else "",
            "GB/s": round(entry.bytes / seconds / 1e9, 1) if entry.bytes else "",
            "of one core's limit": f"{bound:.0%}" if bound else "",
        }


def peak_flops(repeats: int = 15) -> float:
    """Return one core's float32 multiply-add peak, operations a second.

    Runs the largest contraction tile over operands that stay in registers and the first cache.
    """
    of = tiles("float32")
    depth, rows, width = 512 // of.nv, of.mr, of.width
    a, b = np.zeros(rows * 16, np.float32), np.zeros(width, np.float32)
    c = np.zeros(rows * width, np.float32)
    words = np.zeros(T_WORDS, np.int64)
    # Steps of zero bytes: every step reads the same values, nothing but the multiply-adds counts.
    words[[T_A, T_B, T_C]] = a.ctypes.data, b.ctypes.data, c.ctypes.data
    words[[T_ARS, T_AKS, T_BKS, T_BJS]] = 64, 0, 0, of.lanes * 4
    words[[T_N0, T_N1, T_N2, T_KIN]] = 1, 1, 400, depth
    words[[T_CRS, T_CJS]] = width * 4, of.lanes * 4
    tile = _KERNEL(of.contraction().address)
    best = float("inf")
    for _ in range(repeats):
        begin = time.perf_counter()
        tile(words.ctypes.data, rows, of.nv, 0)
        best = min(best, time.perf_counter() - begin)
    return 2 * 400 * depth * rows * width / best


def copy_bandwidth(nbytes: int = 1 << 26, repeats: int = 3) -> float:
    """Return the bytes a second, read and written, of a copy larger than the caches."""
    source, target = np.zeros(nbytes, np.uint8), np.ones(nbytes, np.uint8)
    best = float("inf")
    for _ in range(repeats):
        begin = time.perf_counter()
        np.copyto(target, source)
        best = min(best, time.perf_counter() - begin)
    return 2 * nbytes / best


def write_trace(path: Path, entries: Sequence[ProfileEntry]) -> None:
    """Write entries, one after another, in the trace event format of Chrome and Perfetto."""
    events: list[dict[str, Any]] = []
    at = 0.0
    for entry in entries:
        duration = entry.seconds * 1e6
        events.append(
            {
                "name": entry.node,
                "cat": entry.op_type,
                "ph": "X",
                "ts": round(at, 3),
                "dur": round(duration, 3),
                "pid": 1,
                "tid": entry.device,
                "args": {"kernel": entry.kernel, "bytes": entry.bytes, "flops": entry.flops},
            }
        )
        at += duration
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
