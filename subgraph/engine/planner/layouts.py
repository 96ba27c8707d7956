"""Layouts: the choice between the layouts of values, and the conversions between them.

Convolutions use the blocked layout, ``[N, ceil(C / lanes), *spatial, lanes]``, the ``nChw16c`` of
oneDNN. Later values stay in it as long as the lowerings support it. Blocks of bytes (quantized
values) have 16 channels, and the lanes beyond C are undefined. A value is converted at most once,
before the first node that needs the other layout. A conversion that moves no data is a view.

The third layout, "bfloat16", is ``[N, ceil(C / 32), *spatial, 32]``, the ``nChw32c`` of matrix
tiles: a lowering that knows its readers may choose it for its output (`Operand.store_as`).
Rules that do not support it get such a value in the blocked layout of float32.

The fourth, "registers", is what matrix tiles read of the left operand of a product: a product that
knows its readers may choose it (`Operand.store_as`). Others get the plain layout.

The fifth, "strided", is any view of memory (`subgraph.engine.planner.views`): keys and values of a
decoder in a buffer with room for more (`Lowering.extend`), heads that several others share, or rows
of channels in the memory of an image in blocks (`views.in_blocks`). Rules that do not support it
get a copy in plain layout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

from subgraph.engine.codegen.tiling import MATRIX_ROWS
from subgraph.engine.planner.layout_arguments import (
    CopyBytesArguments,
    RegistersArguments,
    ReorderArguments,
    StridesArguments,
)
from subgraph.engine.planner.lowering import Lowering, LoweringRule, Unsupported
from subgraph.engine.planner.operands import EmittedStep, Layout, Operand, Storage
from subgraph.engine.planner.views import MAX_RUNS, runs
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.graph.graph import Node
from subgraph.graph.symbolic import larger
from subgraph.graph.types import TensorType
from subgraph.operators.schema import INTERNAL_DOMAIN
from subgraph.system import host

Attempt = Callable[[Sequence[Operand | None], bool], Lowering]
CONVOLUTIONS = frozenset({"Conv", "FusedConv", "QLinearConv", "FusedQLinearConv"})
_BLOCKED_DTYPES = frozenset({"float32", "float64", "uint8", "int8"})
_BYTE_BLOCK_CHANNELS = 16  # on every machine: `tile_int.BLOCK`
_COPY_UNIT_BYTES = 1 << 16  # bytes in a work unit of a copy (estimate)
_CONVERSION_UNIT_PIXELS = 2048  # pixels in a work unit of a conversion (estimate)


def block_lanes(dtype: str, float_block: int = 0) -> int:
    """Return the channels of a block in the blocked layout of a dtype.

    Args:
        dtype: The dtype.
        float_block: Channels of a block of float32, as chosen for a graph (`block_width`); 0: the
            lanes of a vector of this machine.
    """
    if dtype == "float32" and float_block:
        return float_block
    return _BYTE_BLOCK_CHANNELS if dtype in ("uint8", "int8") else host.lanes(dtype)


class LayoutAssigner:
    """Assigns a layout to the values of one node after the other, and emits conversions.

    Attributes:
        reorders: Number of conversions that move data.
        float_block: Channels of a block of float32 values.
    """

    def __init__(
        self,
        emit: Callable[[EmittedStep], object],
        blocked: bool,
        float_block: int,
    ) -> None:
        """Begin without conversions.

        Args:
            emit: Receives the steps of conversions.
            blocked: Whether the blocked layout is used at all.
            float_block: Channels of a block of float32 values.
        """
        self.reorders = 0
        self.float_block = float_block
        self._emit = emit
        self._enabled = blocked
        self._counterparts: dict[Operand, Operand] = {}
        self._pending: list[tuple[Operand, Operand, EmittedStep | None]] = []

    def lower(
        self,
        node: Node,
        rule: LoweringRule,
        inputs: Sequence[Operand | None],
        types: Sequence[TensorType],
        attempt: Attempt,
    ) -> Lowering:
        """Return the lowering of a node, in the blocked layout if its rule supports it.

        Args:
            node: The node.
            rule: Its lowering rule.
            inputs: Its operands, None where one is omitted.
            types: Types of its outputs.
            attempt: ``attempt(inputs, blocked)`` lowers the node; ``blocked`` is the layout of its
                outputs.

        Raises:
            Unsupported: The node cannot be lowered in either layout.
        """
        refused = Unsupported(f"{node.op_type} has no lowering")
        for arranged, blocked in self._arrangements(node, rule, inputs, types):
            try:
                low = attempt(arranged, blocked)
            except Unsupported as error:
                # A refusal drops the conversions that were prepared for this attempt, so that no
                # run executes them in vain.
                self._pending.clear()
                refused = error
            else:
                self._commit()
                return low
        raise refused

    def _arrangements(
        self,
        node: Node,
        rule: LoweringRule,
        inputs: Sequence[Operand | None],
        types: Sequence[TensorType],
    ) -> Generator[tuple[Sequence[Operand | None], bool]]:
        """Yield the inputs in the layouts to be tried, best first, and whether outputs are blocks.

        Conversions are prepared when the inputs are asked for. See `lower`.
        """
        layouts = {operand.layout for operand in inputs if operand is not None}
        blocks = self._uses_blocks(node, rule, inputs, types)
        if blocks:
            if "bfloat16" in layouts and "bfloat16" in rule.layouts:
                yield self._in_blocks(node, inputs, types[0], True), True
            yield self._in_blocks(node, inputs, types[0], False), True
        own = [layout for layout in ("registers", "strided") if layout in layouts & rule.layouts]
        ways = [own, own[:1], own[1:]] if len(own) > 1 else [own]
        for some in filter(None, ways):
            yield [self._plain(operand, *some) for operand in inputs], False
        if not blocks and self._enabled and rule.makes_blocks and rule.makes_blocks(node):
            yield [self._plain(operand) for operand in inputs], True
        yield [self._plain(operand) for operand in inputs], False

    def _plain(self, operand: Operand | None, *others: str) -> Operand | None:
        """Return an input in the plain layout, or as it is if its layout is one of ``others``."""
        if operand is None or operand.layout in others:
            return operand
        return self._converted(operand, "plain")

    def plain(self, operand: Operand) -> Operand:
        """Return an operand in the plain layout, converted if necessary."""
        converted = self._converted(operand, "plain")
        self._commit()
        return converted

    @contextmanager
    def discarding_conversions(self) -> Generator[None]:
        """Forget, at the end of the context, the conversions made in it: runs may skip them."""
        # Conversions made before the context stay valid inside it, since their steps always run.
        before = dict(self._counterparts)
        try:
            yield
        finally:
            self._counterparts = before

    def make_blocked(self, operand: Operand) -> None:
        """Set the blocked layout for a new operand if its dtype has one."""
        if operand.dtype in _BLOCKED_DTYPES:
            operand.layout = "blocked"
            operand.lanes = block_lanes(operand.dtype, self.float_block)

    def _uses_blocks(
        self,
        node: Node,
        rule: LoweringRule,
        inputs: Sequence[Operand | None],
        types: Sequence[TensorType],
    ) -> bool:
        if not self._enabled or "blocked" not in rule.layouts or not inputs:
            return False
        if any(o is not None and o.layout in ("blocked", "bfloat16") for o in inputs):
            return True
        first = inputs[0]
        return (
            first is not None
            and first.rank > 2
            and node.op_type in CONVOLUTIONS
            and types[0].dtype in _BLOCKED_DTYPES
            and block_lanes(first.dtype, self.float_block) > 1
        )

    def _in_blocks(
        self, node: Node, inputs: Sequence[Operand | None], result: TensorType, keeps: bool
    ) -> list[Operand | None]:
        """Return the inputs of a node, images among them in blocked layout.

        An image has the rank of the result and is not constant. Filters of a convolution that are
        computed at run time have that rank as well, but stay in plain layout; those of QLinearConv,
        input 3, are refused by its rule if they are not constant. Values in the layout
        "bfloat16" stay as they are if the rule ``keeps`` them.
        """
        rank = len(result.shape or ())
        filters = 1 if node.op_type in CONVOLUTIONS else None
        found: list[Operand | None] = []
        for position, given in enumerate(inputs):
            operand = given
            if operand is not None and operand.layout in ("registers", "strided"):
                operand = self._converted(operand, "plain")
            if operand is not None and operand.layout == "bfloat16" and position != filters:
                found.append(operand if keeps else self._converted(operand, "blocked"))
                continue
            moves = (
                operand is not None
                and not operand.constant
                and operand.dtype in _BLOCKED_DTYPES
                and operand.rank == rank > 2
                # Convolutions read an image of few channels in plain layout.
                and self._fills_blocks(operand)
            )
            layout: Layout = "plain" if position == filters else "blocked"
            found.append(self._converted(operand, layout) if moves and operand else operand)
        return found

    def _fills_blocks(self, operand: Operand) -> bool:
        """Return whether a value has enough channels for the blocked layout."""
        return operand.shape[1] >= max(block_lanes(operand.dtype, self.float_block) // 2, 4)

    def _converted(self, operand: Operand, layout: Layout) -> Operand:
        """Return an operand in a layout; `_commit` emits the conversion if the node is lowered."""
        if operand.layout == layout:
            return operand
        if operand.layout == "bfloat16" and layout == "plain":
            operand = self._converted(operand, "blocked")
        known = self._counterparts.get(operand)
        if known is not None:
            return known
        # A node may read a value twice; it is converted once.
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
            step = conversion_step(operand, target)
        self._pending.append((operand, target, step))
        return target

    def _commit(self) -> None:
        for source, target, step in self._pending:
            self._counterparts[source] = target
            if source.layout in ("plain", "blocked"):
                # Conversion back to the first layout then costs nothing.
                self._counterparts[target] = source
            if step is not None:
                self.reorders += 1
                self._emit(step)
        self._pending.clear()


def _same_memory(a: Operand, b: Operand) -> bool:
    """Return whether both layouts of a value are the same bytes: one pixel and whole blocks."""
    if a.layout not in ("plain", "blocked"):
        return False
    lanes = max(a.lanes, b.lanes)
    return math.prod(a.shape[2:]) == 1 and a.shape[1] % lanes == 0


def copy_step(node: Node, source: Operand, target: Operand) -> EmittedStep:
    """Return the step that copies an operand in plain layout.

    Args:
        node: The node to which the step belongs.
        source: The operand.
        target: An operand of the same type.
    """
    size = source.nbytes
    units = -(-size // _COPY_UNIT_BYTES)
    kernel = Kernel("subgraph.ops.movement.reorder_kernels", "copy")
    arguments = CopyBytesArguments(source=source, target=target, size=size, block=_COPY_UNIT_BYTES)
    return EmittedStep(node, kernel, tuple(arguments.words()), units, 1, 0, 2 * size)


def conversion_step(source: Operand, target: Operand) -> EmittedStep:
    """Return the step that converts an operand to another layout.

    Args:
        source: The operand.
        target: An operand of the same type: in the plain layout if the source is blocked, registers
            or strided, else in the blocked one.
    """
    if source.layout == "registers":
        return _from_registers(source, target)
    if source.layout == "strided":
        return _from_strides(source, target)
    blocked = target if target.layout == "blocked" else source
    pixels = math.prod(source.shape[2:])
    chunks = -(-pixels // _CONVERSION_UNIT_PIXELS)
    module = "subgraph.ops.movement.reorder_kernels"
    if source.layout == "bfloat16":
        kernel = Kernel(module, "from_bfloat16", lanes=blocked.lanes)
    else:
        factory = "to_blocked" if target is blocked else "to_plain"
        kernel = Kernel(module, factory, dtype=source.dtype, lanes=blocked.lanes)
    node = Node("Reorder", name=f"{source.name}.to_{target.layout}", domain=INTERNAL_DOMAIN)
    arguments = ReorderArguments(
        source=source,
        target=target,
        channels=source.shape[1],
        pixels=pixels,
        blocks=blocked.blocks,
        part=_CONVERSION_UNIT_PIXELS,
        parts=chunks,
    )
    units = source.shape[0] * blocked.blocks * chunks
    if source.size == 0:
        units = 0
    moved = source.nbytes + target.nbytes
    return EmittedStep(node, kernel, tuple(arguments.words()), units, 1, 0, moved)


def _from_registers(source: Operand, target: Operand) -> EmittedStep:
    """Return the step that converts registers of matrix tiles to the plain layout."""
    rows, columns = math.prod(source.shape[:-1]), source.shape[-1]
    arguments = RegistersArguments(source=source, target=target, rows=rows, columns=columns)
    kernel = Kernel("subgraph.ops.movement.reorder_kernels", "from_registers")
    node = Node("Reorder", name=f"{source.name}.to_plain", domain=INTERNAL_DOMAIN)
    units, moved = -(-rows // MATRIX_ROWS), source.nbytes + target.nbytes
    return EmittedStep(node, kernel, tuple(arguments.words()), units, 1, 0, moved)


def _from_strides(source: Operand, target: Operand) -> EmittedStep:
    """Return the step that copies a strided operand to the plain layout."""
    *outer, (size, _) = runs(source.view) or [(1, 1)]
    assert len(outer) < MAX_RUNS, "views of more runs are not made"
    item = source.itemsize
    sizes, strides = zip(*outer, *[(1, 0)] * (MAX_RUNS - 1 - len(outer)), strict=True)
    arguments = StridesArguments(
        source=source,
        target=target,
        row=size * item,
        **{f"size_{k}": sizes[k] for k in range(1, MAX_RUNS - 1)},
        **{f"step_{k}": strides[k] * item for k in range(MAX_RUNS - 1)},
    )
    kernel = Kernel("subgraph.ops.movement.reorder_kernels", "from_strides")
    node = Node("Reorder", name=f"{source.name}.to_plain", domain=INTERNAL_DOMAIN)
    units, moved = math.prod(sizes) if target.size else 0, 2 * target.nbytes
    grain = larger(1, _COPY_UNIT_BYTES // larger(1, size * item))
    return EmittedStep(node, kernel, tuple(arguments.words()), units, grain, 0, moved)
