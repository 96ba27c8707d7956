"""Choices between kernels by measuring them, for the option TUNE; kept on disk.

The steps that each candidate would emit run on memory of their own, on one thread. The fastest is
noted in the user's cache folder under the machine and the sizes of the operator, and is taken from
there from then on: the same choice every time.
"""

from __future__ import annotations

import ctypes
import json
import os
import struct
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, cast

import numpy as np

from subgraph.engine import host
from subgraph.engine.kernel import Kernel
from subgraph.engine.lowering import (
    EmittedStep,
    Lowering,
    Operand,
    Scratch,
    Storage,
    Weight,
    Word,
)
from subgraph.engine.objectcache import cache_folder
from subgraph.large_pages import aligned_empty
from subgraph.parameters import Parameter

Array = np.ndarray[Any, Any]
_KERNEL = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)
_ROUNDS = 5


def fastest(low: Lowering, key: str, candidates: Mapping[str, Callable[[Lowering], None]]) -> str:
    """Return the name of the candidate that takes least time.

    Args:
        low: The lowering for which it is asked.
        key: All that the choice depends on but the machine.
        candidates: Functions that emit the steps of each candidate.
    """
    isa = host.isa()
    key = f"{isa.cpu} {isa.like or isa.name} {key}"
    chosen = _stored().get(key)
    if chosen is not None and chosen in candidates:
        return chosen
    times: dict[str, float] = {}
    for name, emit in candidates.items():
        trial = Lowering(low.node, low.inputs, low.outputs, threads=1, float_block=low.float_block)
        emit(trial)
        times[name] = _seconds(trial.steps)
    best = min(times, key=times.__getitem__)
    _store(key, best)
    return best


def _file() -> Path:
    return cache_folder().parent / "tuning.json"


def _stored() -> dict[str, str]:
    """Return the choices on disk; a file that cannot be read counts as none."""
    try:
        found: Any = json.loads(_file().read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict):
        return {}
    entries = cast(dict[Any, Any], found)
    return {k: v for k, v in entries.items() if isinstance(k, str) and isinstance(v, str)}


def _store(key: str, choice: str) -> None:
    """Add a choice; where the folder cannot be written it is made again next time."""
    path = _file()
    text = json.dumps(_stored() | {key: choice}, indent=0, sort_keys=True)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False) as file:
            file.write(text)
        os.replace(file.name, path)
    except OSError:
        return


class _Memory:
    """Memory for the steps of one trial."""

    def __init__(self) -> None:
        self._placed: dict[Storage, Array] = {}
        self._made: dict[Weight, Array] = {}

    def _address(self, storage: Storage, offset: int) -> int:
        root, start = storage.root()
        if root not in self._placed:
            memory = aligned_empty((max(root.nbytes, 1),), np.dtype(np.uint8), 64)
            memory[:] = 0
            self._placed[root] = memory
        return self._placed[root].ctypes.data + start + offset

    def _weight(self, weight: Weight) -> Array:
        if weight not in self._made:
            arrays: list[Array] = []
            for source in weight.sources:
                if isinstance(source, Weight):
                    arrays.append(self._weight(source))
                else:
                    arrays.append(source.array if isinstance(source, Parameter) else source)
            self._made[weight] = np.ascontiguousarray(weight.make(*arrays))
        return self._made[weight]

    def word(self, word: Word) -> int:
        """Return a word as the kernel reads it."""
        if isinstance(word, float):
            (bits,) = struct.unpack("<q", struct.pack("<d", word))
            return int(bits)
        if isinstance(word, Operand):
            assert word.storage is not None, "a mentioned operand has storage"
            return self._address(word.storage, word.offset)
        if isinstance(word, Scratch):
            return self._address(word.storage, 0)
        if isinstance(word, Weight):
            return self._weight(word).ctypes.data
        return word.address if isinstance(word, Kernel) else int(word)


def _seconds(steps: list[EmittedStep]) -> float:
    """Return the least time of a few runs of all steps."""
    memory = _Memory()
    calls: list[tuple[Any, Array, int]] = []
    for step in steps:
        words = np.array([memory.word(word) for word in step.words], np.int64)
        calls.append((_KERNEL(step.kernel.address), words, step.units))
    best = float("inf")
    for _ in range(_ROUNDS):
        begin = time.perf_counter()
        for kernel, words, units in calls:
            kernel(words.ctypes.data, 0, units, 0)
        best = min(best, time.perf_counter() - begin)
    return best
