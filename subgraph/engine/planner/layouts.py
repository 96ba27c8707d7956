"""Layouts: where a plan works in channel blocks, and the conversions at the edges of these parts.

Convolutions ask for the blocked layout, ``[N, ceil(C / lanes), *spatial,
lanes]``; what follows stays in it as long as its lowering can. Blocks of bytes (quantised values)
have 16 channels, and those beyond C hold anything. A value is converted where it meets a node that
needs the other layout, once for all such nodes. A conversion that moves nothing is a view.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

from subgraph.engine.planner.layout_arguments import CopyBytesArguments, ReorderArguments
from subgraph.engine.planner.lowering import (
    EmittedStep,
    Layout,
    Lowering,
    LoweringRule,
    Operand,
    Storage,
    Unsupported,
)
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.graph.graph import Node
from subgraph.graph.types import TensorType
from subgraph.operators.schema import INTERNAL_DOMAIN
from subgraph.system import host

Attempt = Callable[[Sequence[Operand | None], bool], Lowering]
_ANCHORS = frozenset({"Conv", "FusedConv", "QLinearConv", "FusedQLinearConv"})
_DTYPES = frozenset({"float32", "float64", "uint8", "int8"})
_BYTE_BLOCK = 16  # channels of a block of bytes, on every machine
_COPIED = 1 << 16  # bytes of a work unit of a copy
_CHUNK = 2048  # pixels of a work unit of a conversion


def block_lanes(dtype: str, float_block: int = 0) -> int:
    """Return the channels of a block in the blocked layout of a dtype.

    Args:
        dtype: The dtype.
        float_block: Those of float32, which are chosen for each graph; 0: a vector of this machine.
    """
    if dtype == "float32" and float_block:
        return float_block
    return _BYTE_BLOCK if dtype in ("uint8", "int8") else host.lanes(dtype)


class Arranger:
    """Chooses layouts node by node and emits conversions.

    Attributes:
        reorders: Number of conversions that move data.
        float_block: Channels of a block of float32 values.
    """

    def __init__(
        self,
        emit: Callable[[EmittedStep], object],
        threads: int,
        blocked: bool,
        float_block: int,
    ) -> None:
        """Give conversions to ``emit``; without ``blocked`` everything stays plain."""
        self.reorders = 0
        self.float_block = float_block
        self._emit = emit
        self._threads = threads
        self._enabled = blocked
        self._other: dict[Operand, Operand] = {}
        self._pending: list[tuple[Operand, Operand, EmittedStep | None]] = []

    def lower(
        self,
        node: Node,
        rule: LoweringRule,
        inputs: Sequence[Operand | None],
        types: Sequence[TensorType],
        attempt: Attempt,
    ) -> Lowering:
        """Return the lowering of a node in the blocked layout if that goes, else in the plain one.

        Raises:
            Unsupported: it goes in neither.
        """
        if self._wants_blocks(node, rule, inputs, types):
            try:
                low = attempt(self._as(node, inputs, types[0]), True)
            except Unsupported:
                self._pending.clear()
            else:
                self._commit()
                return low
        given = [None if o is None else self._converted(o, "plain") for o in inputs]
        try:
            low = attempt(given, False)
        except Unsupported:
            self._pending.clear()
            raise
        self._commit()
        return low

    def plain(self, operand: Operand) -> Operand:
        """Return an operand in the plain layout, with the conversion that it takes."""
        converted = self._converted(operand, "plain")
        self._commit()
        return converted

    @contextmanager
    def aside(self) -> Generator[None]:
        """Forget afterwards the conversions made meanwhile: their steps may not have run."""
        before = dict(self._other)
        try:
            yield
        finally:
            self._other = before

    def make_blocked(self, operand: Operand) -> None:
        """Give a new operand the blocked layout if its dtype has one."""
        if operand.dtype in _DTYPES:
            operand.layout = "blocked"
            operand.lanes = block_lanes(operand.dtype, self.float_block)

    def _wants_blocks(
        self,
        node: Node,
        rule: LoweringRule,
        inputs: Sequence[Operand | None],
        types: Sequence[TensorType],
    ) -> bool:
        if not self._enabled or "blocked" not in rule.layouts or not inputs:
            return False
        if any(operand is not None and operand.layout == "blocked" for operand in inputs):
            return True
        first = inputs[0]
        return (
            first is not None
            and first.rank > 2
            and node.op_type in _ANCHORS
            and types[0].dtype in _DTYPES
            and block_lanes(first.dtype, self.float_block) > 1
        )

    def _as(
        self, node: Node, inputs: Sequence[Operand | None], result: TensorType
    ) -> list[Operand | None]:
        """Return the inputs, in blocks those that carry the result's pixels."""
        rank = len(result.shape or ())
        filters = 1 if node.op_type in _ANCHORS else None  # computed, of the result's rank
        given: list[Operand | None] = []
        for position, operand in enumerate(inputs):
            moves = (
                operand is not None
                and not operand.constant
                and operand.dtype in _DTYPES
                and operand.rank == rank > 2
                # The few channels of an image are read as they are.
                and self._fills_blocks(operand)
            )
            layout: Layout = "plain" if position == filters else "blocked"
            given.append(self._converted(operand, layout) if moves and operand else operand)
        return given

    def _fills_blocks(self, operand: Operand) -> bool:
        """Return whether a value has enough channels for blocks of them."""
        return operand.shape[1] >= max(block_lanes(operand.dtype, self.float_block) // 2, 4)

    def _converted(self, operand: Operand, layout: Layout) -> Operand:
        if operand.layout == layout:
            return operand
        known = self._other.get(operand)
        if known is not None:
            return known
        for source, target, _ in self._pending:
            if source is operand:
                return target
        target = Operand(operand.name, operand.dtype, operand.shape)
        if layout == "blocked":
            self.make_blocked(target)
        step = None
        if _same_memory(operand, target):
            target.storage, target.offset = operand.storage, operand.offset
        else:
            target.storage = Storage("arena", target.nbytes)
            step = _reorder(operand, target)
        self._pending.append((operand, target, step))
        return target

    def _commit(self) -> None:
        for source, target, step in self._pending:
            self._other[source] = target
            self._other[target] = source
            if step is not None:
                self.reorders += 1
                self._emit(step)
        self._pending.clear()


def _same_memory(a: Operand, b: Operand) -> bool:
    """Return whether both layouts of a value are the same bytes: one pixel, whole blocks."""
    lanes = max(a.lanes, b.lanes)
    return math.prod(a.shape[2:]) == 1 and a.shape[1] % lanes == 0


def copying(node: Node, source: Operand, target: Operand) -> EmittedStep:
    """Return the step that copies an operand, in plain layout, to another one of its type."""
    size = source.nbytes
    units = -(-size // _COPIED)
    kernel = Kernel("subgraph.ops.movement.reorder_kernels", "copy")
    arguments = CopyBytesArguments(source=source, target=target, size=size, block=_COPIED)
    return EmittedStep(node, kernel, tuple(arguments.words()), units, 1, 0, 2 * size)


def _reorder(source: Operand, target: Operand) -> EmittedStep:
    blocked = target if target.layout == "blocked" else source
    pixels = math.prod(source.shape[2:])
    chunks = -(-pixels // _CHUNK)
    kernel = Kernel(
        "subgraph.ops.movement.reorder_kernels",
        "to_blocked" if target is blocked else "to_plain",
        dtype=source.dtype,
        lanes=blocked.lanes,
    )
    node = Node("Reorder", name=f"{source.name}.to_{target.layout}", domain=INTERNAL_DOMAIN)
    arguments = ReorderArguments(
        source=source,
        target=target,
        channels=source.shape[1],
        pixels=pixels,
        blocks=blocked.blocks,
        part=_CHUNK,
        parts=chunks,
    )
    units = source.shape[0] * blocked.blocks * chunks
    if source.size == 0:
        units = 0
    moved = source.nbytes + target.nbytes
    return EmittedStep(node, kernel, tuple(arguments.words()), units, 1, 0, moved)
