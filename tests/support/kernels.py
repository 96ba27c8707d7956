"""Run the steps of one lowered node without a plan: what the tests of the heavy kernels share."""

from __future__ import annotations

import ctypes
import itertools
import struct
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from subgraph.engine.planner.layouts import block_lanes
from subgraph.engine.planner.lowering import LOWERINGS, Lowering
from subgraph.engine.planner.operands import EmittedStep, Layout, Operand, Scratch, Storage, Weight
from subgraph.engine.program.reports import SLOT_WORDS, Report
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.graph.types import Array
from subgraph.operators.operator import operator_key
from subgraph.system import guard_pages, guard_report
from subgraph.system.guard_report import RunningStep

_KERNEL = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)


def random_bits(shape: tuple[int, ...], dtype: str) -> Array:
    """Return unsigned integers of random bits, or floats that are whole numbers up to 255."""
    bits = np.random.default_rng(3).integers(0, 256, (*shape, np.dtype(dtype).itemsize), np.uint8)
    return bits.view(dtype)[..., 0] if dtype.startswith("uint") else bits[..., 0].astype(dtype)


def to_blocked(array: Array, lanes: int) -> Array:
    """Return ``[N, C, ...]`` as ``[N, C / lanes, ..., lanes]``."""
    images, channels = array.shape[:2]
    padded = np.zeros((images, -(-channels // lanes) * lanes, *array.shape[2:]), array.dtype)
    padded[:, :channels] = array
    split = padded.reshape(images, -1, lanes, *array.shape[2:])
    return np.ascontiguousarray(np.moveaxis(split, 2, -1))


def from_blocked(array: Array, channels: int) -> Array:
    """Return ``[N, C / lanes, ..., lanes]`` as ``[N, C, ...]``."""
    moved = np.moveaxis(array, -1, 2)
    return moved.reshape(moved.shape[0], -1, *moved.shape[3:])[:, :channels]


class Memory:
    """Where storages lie while the steps of one node run: each between guard pages."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.arrays: dict[int, Array] = {}
        self.keep: list[Any] = []
        self.running: RunningStep | None = None
        self.slot = np.zeros(SLOT_WORDS, np.int64)

    def running_steps(self) -> list[RunningStep]:
        """Return the step that runs, for the report of a fault."""
        return [] if self.running is None else [self.running]

    def read_only(self, array: Array) -> Array:
        """Return the bytes of a copy that must not be written to."""
        self.keep.append(guard_pages.guarded_copy(array))
        kept: Array = self.keep[-1].reshape(-1).view(np.uint8)
        return kept

    def address(self, storage: Storage) -> int:
        """Return the address of a storage, placing it at first sight."""
        if id(storage) not in self.arrays:
            if isinstance(storage.content, Weight):
                placed = self.read_only(self.weight(storage.content))
            else:  # it comes with garbage: kernels must not rely on zeros
                placed = guard_pages.empty((storage.nbytes,), np.dtype(np.uint8))
            self.arrays[id(storage)] = placed
            self.keep.append(storage)
        return self.arrays[id(storage)].ctypes.data

    def weight(self, weight: Weight) -> Array:
        """Return what a recipe makes."""
        sources = [
            self.weight(s) if isinstance(s, Weight) else cast("Array", getattr(s, "array", s))
            for s in weight.sources
        ]
        return np.ascontiguousarray(weight.make(*sources))

    def word(self, word: float | Operand | Scratch | Weight | Kernel) -> int:
        """Return a word as the plan would put it into an argument block."""
        if isinstance(word, float):
            (bits,) = struct.unpack("<q", struct.pack("<d", word))
            return int(bits)
        if isinstance(word, Operand):
            if word.storage is None:
                raise AssertionError(f"operand {word.name} has no storage")
            return self.address(word.storage) + word.offset
        if isinstance(word, Kernel):
            return word.address
        if isinstance(word, Scratch):
            return self.address(word.storage)
        if isinstance(word, Weight):
            return self.read_only(self.weight(word)).ctypes.data
        return int(word)

    def words(self, step: EmittedStep) -> list[int]:
        """Return a step's argument block; reports go to a slot that nobody reads."""
        found: list[int] = []
        for word in step.arguments:
            if isinstance(word, Report):
                found += [self.slot.ctypes.data, 1]
            else:
                found.append(self.word(word))
        return found

    def run(self, step: EmittedStep, cuts: Sequence[float]) -> None:
        """Run a step in pieces, each as another worker, last piece first."""
        words = self.read_only(np.array(self.words(step), np.int64))
        self.running = RunningStep(step.kernel.description, words.view(np.int64).tolist())
        guard_report.watch(self)
        kernel = _KERNEL(step.kernel.address)
        at = sorted({0, step.units, *(int(cut * step.units) for cut in cuts)})
        pieces = list(itertools.pairwise(at))
        for number, (begin, end) in enumerate(reversed(pieces)):
            kernel(words.ctypes.data, begin, end, number % self.threads)
        self.running = None


def run_node(
    op_type: str,
    inputs: Sequence[Array | None],
    outputs: Sequence[tuple[int, ...]],
    attrs: Mapping[str, Any] | None = None,
    *,
    domain: str = "",
    constant: Sequence[int] = (),
    blocked: Sequence[int] = (),
    out_layout: Layout = "plain",
    threads: int = 2,
    cuts: Sequence[float] = (),
    options: dict[str, Any] | None = None,
    out_dtype: str = "",
) -> list[Array]:
    """Lower one node, run its steps and return its outputs in the plain layout.

    Args:
        op_type: Operator.
        inputs: Its inputs; None: omitted.
        outputs: Shapes of its outputs.
        attrs: Its attributes.
        domain: Its domain.
        constant: Which inputs are weights.
        blocked: Which inputs come in the blocked layout.
        out_layout: Layout of all outputs.
        threads: Threads of the plan.
        cuts: Where the units of every step are cut, as fractions.
        options: Properties of the device.
        out_dtype: Dtype of the outputs, if not that of the first input.
    """
    memory = Memory(threads)
    first = next(a for a in inputs if a is not None)
    dtype, lanes = first.dtype.name, block_lanes(first.dtype.name)
    operands: list[Operand | None] = []
    for index, array in enumerate(inputs):
        if array is None:
            operands.append(None)
            continue
        layout: Layout = "blocked" if index in blocked else "plain"
        stored = to_blocked(array, lanes) if layout == "blocked" else np.ascontiguousarray(array)
        storage = Storage("input", stored.nbytes)
        known = stored if index in constant else None
        memory.arrays[id(storage)] = memory.read_only(stored)
        memory.keep.append(storage)
        name = array.dtype.name
        operand = Operand(f"in{index}", name, array.shape, layout, known, storage=storage)
        operand.lanes = lanes if layout == "blocked" else 1
        operands.append(operand)
    results: list[Operand] = []
    dtype = out_dtype or dtype
    for index, shape in enumerate(outputs):
        result = Operand(f"out{index}", dtype, shape, out_layout)
        result.lanes = lanes if out_layout == "blocked" else 1
        result.storage = Storage("arena", result.nbytes)
        results.append(result)
    node = cast(
        "Any",
        SimpleNamespace(
            op_type=op_type,
            attrs=dict(attrs or {}),
            domain=domain,
            outputs=outputs,
            name="node",
            graph=None,
            subgraph=None,
        ),
    )
    low = Lowering(node, operands, results, threads=threads, options=options)
    LOWERINGS.get(operator_key(op_type, domain)).function(node, low)
    for step in low.steps:
        memory.run(step, cuts)
    arrays: list[Array] = []
    for result in results:
        assert result.storage is not None
        memory.address(result.storage)
        raw = memory.arrays[id(result.storage)][result.offset : result.offset + result.nbytes]
        if result.layout == "blocked":
            packed = (result.shape[0], result.blocks, *result.shape[2:], lanes)
            blocks = raw.view(dtype).reshape(packed)
            if dtype not in ("uint8", "int8"):  # there the rest may be anything
                assert not from_blocked(blocks, result.blocks * lanes)[:, result.shape[1] :].any()
            arrays.append(from_blocked(blocks, result.shape[1]))
        else:
            arrays.append(raw.view(dtype).reshape(result.shape))
    return [array.copy() for array in arrays]
