"""The memory plan: lives of storages, outputs that overwrite inputs, and offsets in the arena.

A storage lives from the first to the last step that reads or writes it. Storages whose lives do not
overlap may share memory. Storages are placed by decreasing size, each in the smallest gap between
those whose lives overlap its own ("greedy by size for offset calculation" of Pisarchyk and Lee,
Efficient Memory Management for Deep Neural Net Inference, arXiv:2001.03288).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Sequence
from itertools import chain

import attrs

from subgraph.engine.planner.operands import Operand, Storage
from subgraph.engine.planner.plan_types import Item, storages_of
from subgraph.system.large_pages import ALIGN

FOREVER = 1 << 60  # step after all steps, and more bytes than any arena has
# More storages than this are placed in the order of their first step; the arena becomes a little
# larger. Measured with random sizes: 3,000 storages with short lives take 0.01 s instead of 0.05 s,
# with half of them in use to the end 3 s by size; the arena is 1.11 times as large.
_MAX_BEST_FIT_STORAGES = 3000


@attrs.define
class Life:
    """The steps during which a storage is in use.

    Attributes:
        first: The first step that reads or writes it.
        last: The last one; `FOREVER` for an output of the run.
    """

    first: int
    last: int


class Lives:
    """Lives of all arena storages, updated while storages are joined."""

    def __init__(self) -> None:
        """Begin without storages."""
        self._of: dict[Storage, Life] = {}

    def mention(self, storage: Storage, step: int) -> None:
        """Extend the life of a storage to a step that reads or writes it."""
        root = storage.root()[0]
        life = self._of.get(root)
        if life is None:
            self._of[root] = Life(step, step)
        else:
            life.first = min(life.first, step)
            life.last = max(life.last, step)

    def keep(self, storage: Storage) -> None:
        """Extend the life of a storage beyond the last step."""
        root = storage.root()[0]
        life = self._of.setdefault(root, Life(0, 0))
        life.last = FOREVER

    def of(self, storage: Storage) -> Life | None:
        """Return the life of the storage's root."""
        return self._of.get(storage.root()[0])

    def join(self, part: Storage, into: Storage, offset: int) -> None:
        """Place the root storage ``part`` inside another storage.

        Args:
            part: A root storage.
            into: The storage that contains it from now on; its life covers both.
            offset: Where ``part`` begins in ``into``, in bytes.
        """
        root = into.root()[0]
        part.parent, part.parent_offset = into, offset
        # Only roots have lives; that of the part is merged into that of its new root.
        life = self._of.pop(part, None)
        if life is not None:
            known = self._of.setdefault(root, life)
            known.first = min(known.first, life.first)
            known.last = max(known.last, life.last)

    def items(self) -> Iterable[tuple[Storage, Life]]:
        """Return root storages with their lives, in the order of `mention`."""
        return self._of.items()


def lives_of(items: Sequence[Item], outputs: Sequence[Operand]) -> Lives:
    """Return the lives of all storages of the arena and of outputs.

    Args:
        items: The steps of a plan.
        outputs: The outputs of its graph, which live beyond the last step.
    """
    lives = Lives()
    mentions = [storages_of(item) for item in items]
    for storages in reversed(mentions):  # a storage that contains others comes after them
        for storage in storages:
            storage.flatten()
    for step, storages in enumerate(mentions):
        for storage in storages:
            if storage.root()[0].kind in ("arena", "output"):
                lives.mention(storage, step)
    for operand in outputs:
        assert operand.storage is not None
        if operand.storage.root()[0].kind in ("arena", "output"):
            lives.keep(operand.storage)
    return lives


def join_in_place(pairs: Iterable[tuple[Operand, Operand, int]], lives: Lives) -> int:
    """Let outputs overwrite inputs that no later step reads.

    Args:
        pairs: (output, input, step that computes the output), in the order of the steps.
        lives: The lives; they are updated.

    Returns:
        The number of outputs that overwrite an input.
    """
    return sum(_join(output, source, step, lives) for output, source, step in pairs)


def _join(output: Operand, source: Operand, step: int, lives: Lives) -> bool:
    """Let an output overwrite an input, if no later step reads the input; return whether it does.

    Args:
        output: The output.
        source: The input.
        step: The step that computes the output.
        lives: The lives; they are updated.
    """
    target, memory = output.storage, source.storage
    if target is None or memory is None or output.offset:
        return False
    root, offset = memory.root()
    offset += source.offset
    # Arrays of the caller, weights and constants must not be overwritten, and the memory of an
    # output that is already part of another storage is decided.
    if target.parent is not None or target is root or root.kind != "arena":
        return False
    life = lives.of(memory)
    mine = lives.of(target)
    # The input must be dead after this step. The output's storage must not be in use before it,
    # as it is if parts of a concatenation were written into it.
    if life is None or mine is None or life.last > step or mine.first < step:
        return False
    if target.kind == "arena":
        if offset + output.nbytes > root.nbytes or target.nbytes > root.nbytes - offset:
            return False
        lives.join(target, root, offset)
        return True
    # An output of the run: the input is placed in the output's memory instead.
    if target.kind != "output" or offset or root.nbytes != target.nbytes:
        return False
    lives.join(root, target, 0)
    return True


def assign_offsets(sizes: Sequence[int], lives: Sequence[Life]) -> tuple[list[int], int]:
    """Return the offset in the arena of each storage, and the arena's size, in bytes.

    Args:
        sizes: Bytes of each storage.
        lives: Life of each storage.
    """
    if len(sizes) > _MAX_BEST_FIT_STORAGES:
        return _first_fit_by_time(sizes, lives)
    # The index decides between equal sizes, so that a graph always gets the same memory plan.
    order = sorted(range(len(sizes)), key=lambda k: (-sizes[k], k))
    # Two storages are in use at the same time if both are at the first step of one of them. So the
    # placed storages are listed for each first step at which they are in use.
    times = sorted({life.first for life in lives})
    in_use: list[list[tuple[int, int]]] = [[] for _ in times]
    offsets = [0] * len(sizes)
    total = 0
    for k in order:
        size = _rounded(sizes[k])
        spans = in_use[bisect_left(times, lives[k].first) : bisect_right(times, lives[k].last)]
        begin = _best_fit(sorted(set(chain.from_iterable(spans))), size)
        for span in spans:
            span.append((begin, begin + size))
        offsets[k] = begin
        total = max(total, begin + size)
    return offsets, total


def _rounded(nbytes: int) -> int:
    return max(ALIGN, -(-nbytes // ALIGN) * ALIGN)


def _best_fit(placed: Iterable[tuple[int, int]], size: int) -> int:
    """Return the offset of the smallest gap of at least ``size`` bytes, else the end of all.

    Args:
        placed: Begin and end of the storages that are in use at the same time, sorted.
        size: Bytes that are wanted.
    """
    best, best_room, at = -1, FOREVER, 0
    for begin, end in placed:
        room = begin - at
        if size <= room < best_room:
            best, best_room = at, room
        at = max(at, end)
    return at if best < 0 else best


def _first_fit_by_time(sizes: Sequence[int], lives: Sequence[Life]) -> tuple[list[int], int]:
    """Place storages in the order of their first step, each in the first gap that fits."""
    offsets = [0] * len(sizes)
    alive: list[tuple[int, int, int]] = []  # begin, end, last step; sorted by begin
    total = 0
    for k in sorted(range(len(sizes)), key=lambda k: lives[k].first):
        life = lives[k]
        alive = [entry for entry in alive if entry[2] >= life.first]
        size = _rounded(sizes[k])
        at = 0
        for begin, end, _ in alive:
            if begin - at >= size:
                break
            at = max(at, end)
        insort(alive, (at, at + size, life.last))
        offsets[k] = at
        total = max(total, at + size)
    return offsets, total
