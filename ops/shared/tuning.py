"""Choices between kernels by measuring them, for the option TUNE; kept on disk.

The steps that each candidate would emit run on memory of their own, on one thread, in turns. Before
each run the caches are emptied of weights, which a network's other operators displace, too, and
filled with what is computed on, which the operator before leaves there. The fastest is noted in the
user's cache folder under the machine and the sizes of the operator, and is taken from there from
then on: the same choice every time.
"""

from __future__ import annotations

import ctypes
import json
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np

from subgraph.engine.planner.lowering import (
    EmittedStep,
    Lowering,
    Operand,
    Scratch,
    Storage,
    Weight,
    Word,
)
from subgraph.engine.program.reports import Report
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.graph.parameters import Parameter
from subgraph.graph.types import Array
from subgraph.system import host
from subgraph.system.folders import cache_folder
from subgraph.system.large_pages import aligned_empty
from subgraph.system.trusted_files import read_trusted, write_trusted

_T = TypeVar("_T")
_KERNEL = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)
_ROUNDS = 5
_CONDITIONS = "weights not in cache"  # choices made in other ways do not count
_LARGEST_SWEEP = 1 << 27


def fastest(low: Lowering, key: str, candidates: Mapping[_T, Callable[[Lowering], None]]) -> _T:
    """Return the algorithm that takes least time.

    Args:
        low: The lowering for which it is chosen.
        key: All that the choice depends on but the machine.
        candidates: The algorithms, each with the function that emits its steps. The file on disk
            holds them as ``str`` writes them.
    """
    isa = host.isa()
    key = f"{isa.cpu} {isa.like or isa.name} {_CONDITIONS} {key}"
    chosen = _stored().get(key)
    for candidate in candidates:
        if str(candidate) == chosen:
            return candidate
    trials: dict[_T, _Trial] = {}
    for candidate, emit in candidates.items():
        alone = Lowering(low.node, low.inputs, low.outputs, threads=1, float_block=low.float_block)
        emit(alone)
        trials[candidate] = _Trial(alone.steps)
    times = dict.fromkeys(trials, float("inf"))
    others = _other_data()
    for _ in range(_ROUNDS):
        for candidate, trial in trials.items():
            others.max()
            times[candidate] = min(times[candidate], trial.seconds())
    best = min(times, key=times.__getitem__)
    _store(key, str(best))
    return best


def _other_data() -> Array:
    """Return memory that, once read, leaves nothing else in a core's caches."""
    found = host.caches()
    nbytes = min(2 * (found.l2 + found.l3), _LARGEST_SWEEP)
    return np.zeros(nbytes // 8 + 1, np.int64) + 1


def _file() -> Path:
    return cache_folder().parent / "tuning.json"


def _stored() -> dict[str, str]:
    """Return the choices on disk; a file that cannot be read counts as none."""
    try:
        found: Any = json.loads(read_trusted(_file()))
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict):
        return {}
    entries = cast(dict[Any, Any], found)
    return {k: v for k, v in entries.items() if isinstance(k, str) and isinstance(v, str)}


def _store(key: str, choice: str) -> None:
    """Add a choice; where the folder cannot be written it is made again next time."""
    text = json.dumps(_stored() | {key: choice}, indent=0, sort_keys=True)
    with suppress(OSError):
        write_trusted(_file(), text.encode())


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

    def read_values(self) -> None:
        """Read all that steps compute on."""
        for memory in self._placed.values():
            memory.max()

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
        assert not isinstance(word, Report), "no kernel that is tuned reports"
        return word.address if isinstance(word, Kernel) else int(word)


class _Trial:
    """A candidate's steps and their memory."""

    def __init__(self, steps: Sequence[EmittedStep]) -> None:
        self._memory = _Memory()
        self._calls: list[tuple[Any, Array, int]] = []
        for step in steps:
            words = np.array([self._memory.word(word) for word in step.words], np.int64)
            self._calls.append((_KERNEL(step.kernel.address), words, step.units))

    def seconds(self) -> float:
        """Return how long a run takes whose values, but not weights, are in the caches."""
        self._memory.read_values()
        begin = time.perf_counter()
        for kernel, words, units in self._calls:
            kernel(words.ctypes.data, 0, units, 0)
        return time.perf_counter() - begin
