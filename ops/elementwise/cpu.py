"""Elementwise operators and fused chains of them on the CPU device: one kernel, one pass.

`emit_expression` turns an expression into a step: it finds how each operand lies in memory, merges
dimensions, and cuts the work into tiles. Other families use it for what is elementwise in them
(BatchNormalization, ranges, casts of indices).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import attrs
import numpy as np

from subgraph.dtypes import item_bytes
from subgraph.engine.planner.lowering import (
    Argument,
    Lowering,
    Operand,
    Storage,
    Unsupported,
    Weight,
    lowering,
)
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.errors import UnsupportedOpError
from subgraph.graph.graph import Node
from subgraph.graph.symbolic import larger, smaller
from subgraph.graph.types import Array
from subgraph.operators.schema import INTERNAL_DOMAIN
from subgraph.ops.shared.strides import Ints, broadcast_strides, collapse, contiguous

from .byte_arguments import ByteTableArguments, ClearPaddingArguments
from .expressions import EXPANSIONS, Expression, Term, expand, expand_graph, in_one_order, register
from .op import is_legacy_broadcast
from .primitives import primitive

TILE = 16384  # elements of a unit: two operands of it stay in the first-level cache
_SMALL = 8192  # fewer elements are not worth a thread
# Elements and instructions (for each lane) from which on bytes are looked up in a table, and what
# functions made of many instructions count.
_TABLE_LEAST, _TABLE_WORTH = 1024, 2
_COUNTS = {"exp": 16, "log": 16, "tanh": 20, "sigmoid": 20, "erf": 24, "silu": 20, "gelu": 26}
# Operators whose result is 0 where all blocked inputs are 0: padding channels stay zero.
_KEEPS_ZERO = frozenset(
    [
        "Relu",
        "LeakyRelu",
        "PRelu",
        "HardSwish",
        "Tanh",
        "Abs",
        "Neg",
        "Sqrt",
        "Erf",
        "Gelu",
        "Swish",
        "Mish",
        "Identity",
        "Elu",
        "Selu",
        "Sign",
        "Floor",
        "Ceil",
        "Round",
        "Sin",
        "Softsign",
    ]
)


@attrs.frozen
class Source:
    """An input of an expression: where it lies and with which shape it is read.

    Attributes:
        operand: The operand, or a weight.
        shape: The shape with which it broadcasts.
        layout: "plain" or "blocked".
        dtype: Its dtype.
    """

    operand: Operand | Weight
    shape: tuple[int, ...]
    layout: str
    dtype: str


def source(operand: Operand, shape: Sequence[int] | None = None) -> Source:
    """Return an operand as the input of an expression, perhaps read with another shape.

    Raises:
        Unsupported: it has not as many elements as that shape.
    """
    wanted = operand.shape if shape is None else tuple(shape)
    if shape is not None and math.prod(wanted) != operand.size:
        raise Unsupported(f"{operand.name!r} of shape {operand.shape} read as {wanted}")
    return Source(operand, wanted, operand.layout, operand.dtype)


@primitive
def emit_expression(
    low: Lowering,
    expression: Expression,
    sources: Sequence[Source],
    results: Sequence[tuple[Term, Operand]],
    *,
    keeps_zero: bool = False,
) -> None:
    """Emit the step that computes an expression over all elements of its outputs.

    Args:
        low: Where the step goes.
        expression: What to compute.
        sources: Its inputs, in order; each broadcasts to the outputs' shape.
        results: Which term goes to which output; all outputs have one shape and layout.
        keeps_zero: Whether the padding of the blocked layout comes out as zeros by itself.

    Raises:
        Unsupported: an operand does not broadcast in the layout.
    """
    target = results[0][1]
    if any(o.shape != target.shape or o.layout != target.layout for _, o in results):
        raise Unsupported("outputs of a fused chain differ in shape or layout")
    if target.size == 0:
        return
    if _emit_table(low, expression, sources, results):
        _finish(low, sources, [target], keeps_zero)
        return
    blocks = [s.operand for s in sources if s.layout == "blocked" == target.layout]
    if any(isinstance(o, Operand) and o.lanes != target.lanes for o in blocks):
        raise Unsupported("blocks of another size: the dtypes differ in width")
    sizes = [register(dtype) for dtype in (*expression.dtypes, *(o.dtype for _, o in results))]
    lanes = min(low.lanes("uint8" if d == "bool" else d) for d in (*sizes, *_work(expression)))
    operands: list[Operand | Weight]
    if target.layout == "blocked":
        if any(s.shape != target.shape for s in sources):
            lanes = min(lanes, target.lanes)  # a block of channels repeats along the pixels
        operands, shape, strides = _blocked(low, sources, target)
        strides += [contiguous(shape)] * len(results)
        dims, strides, periodic = _merge_blocks(shape, strides, lanes)
    elif any(s.layout == "blocked" for s in sources):
        raise Unsupported("a result that has no blocked layout, of inputs in it")
    else:
        operands = [s.operand for s in sources]
        strides = [broadcast_strides(s.shape, target.shape) for s in sources]
        strides += [contiguous(target.shape)] * len(results)
        dims, strides = collapse(target.shape, strides)
        periodic = [False] * len(strides)
    modes = tuple(
        "p" if period else ("v" if steps[-1] else "s")
        for steps, period in zip(strides, periodic, strict=True)
    )
    if dims[-1] == 1:
        modes = tuple("v" for _ in modes)
    outputs = [o for _, o in results]
    program, order = in_one_order(expression.instructions, modes[: len(sources)])
    name = {f"i{old}": f"i{new}" for new, old in enumerate(order)}
    kernel = Kernel(
        "subgraph.ops.elementwise.kernels",
        "run",
        program=program,
        inputs=tuple(expression.dtypes[k] for k in order),
        modes=tuple(modes[k] for k in order),
        outputs=tuple(f"{name.get(term.name, term.name)}:{o.dtype}" for term, o in results),
        outer=max(len(dims) - 2, 0),
        lanes=lanes,
    )
    operands = [operands[k] for k in order]
    strides = [*(strides[k] for k in order), *strides[len(order) :]]
    items = [item_bytes(sources[k].dtype) for k in order] + [o.itemsize for o in outputs]
    words, units, tile = _words(expression, dims, strides, [*operands, *outputs], items)
    moved = sum(s.operand.nbytes for s in sources if isinstance(s.operand, Operand))
    low.emit(
        kernel,
        words,
        units,
        grain=larger(1, _SMALL // tile),
        flops=len(expression.instructions) * target.size,
        bytes=moved + sum(o.nbytes for o in outputs),
    )
    _finish(low, sources, outputs, keeps_zero)


def _finish(
    low: Lowering, sources: Sequence[Source], outputs: Sequence[Operand], keeps_zero: bool
) -> None:
    """Clear the padding of the blocked layout; let an output take the place of an input."""
    target = outputs[0]
    if target.layout == "blocked" and target.shape[1] % target.lanes and not keeps_zero:
        for output in outputs:
            clear_padding(low, output)
    read = [(s.operand, s.shape) for s in sources]
    for s in sources:
        if isinstance(s.operand, Operand) and s.shape == target.shape:
            allow_in_place(low, outputs[0], s.operand, read)


def _emit_table(
    low: Lowering,
    expression: Expression,
    sources: Sequence[Source],
    results: Sequence[tuple[Term, Operand]],
) -> bool:
    """Emit a costly function of one byte by a table of its 256 values, where that is shorter.

    The table is computed in each run, by the program itself: scales and zero points may change.
    """
    term, target = results[0]
    whole = [s for s in sources if s.shape == target.shape]
    if len(results) > 1 or len(whole) != 1:
        return False
    x, held = whole[0], whole[0].operand
    if not isinstance(held, Operand):
        return False
    if item_bytes(x.dtype) != 1 or target.size < _TABLE_LEAST:
        return False
    if x.layout != target.layout or held.lanes != target.lanes:
        return False
    if any(s is not x and math.prod(s.shape) != 1 for s in sources):
        return False
    names = [text.partition(".")[0] for text in expression.instructions]
    cost = sum(_COUNTS.get(name, 1) for name in names)
    if cost < _TABLE_WORTH * min(low.lanes(dtype) for dtype in _work(expression)):
        return False
    every = low.weight("every byte", np.array, np.arange(256, dtype=np.uint8).view(x.dtype))
    scalars = [
        Source(every, (256,), "plain", x.dtype) if s is x else attrs.evolve(s, shape=())
        for s in sources
    ]
    table = temporary(low, target.dtype, (256,))
    emit_expression(low, expression, scalars, [(term, table)])
    count = held.nbytes
    low.emit(
        Kernel("subgraph.ops.movement.kernels", "byte_table", item=target.itemsize),
        ByteTableArguments(x=held, y=target, table=table, size=count, block=TILE),
        -(-count // TILE),
        grain=1,
        flops=len(names) * target.size,
        bytes=count + target.nbytes,
    )
    return True


def allow_in_place(
    low: Lowering,
    output: Operand,
    held: Operand,
    read: Sequence[tuple[Operand | Weight, tuple[int, ...]]],
) -> None:
    """Let ``output`` overwrite ``held`` unless the step reads that memory in another way too.

    Args:
        low: Where the step goes.
        output: What is written, element after element.
        held: The input whose elements are read at the same places.
        read: Everything that the step reads, with the shape as which it is read.
    """
    if (held.layout, held.itemsize, held.shape) != (output.layout, output.itemsize, output.shape):
        return
    root, offset = _root(held)
    for other, shape in read:
        if isinstance(other, Operand) and other is not held:
            other_root, other_offset = _root(other)
            same = (other_offset, shape, other.itemsize) == (offset, held.shape, held.itemsize)
            if other_root is not None and other_root is root and not same:
                return
        elif other is held and shape != output.shape:
            return
    low.in_place(output, held)


def _root(operand: Operand) -> tuple[Storage | None, int]:
    if operand.storage is None:
        return None, 0
    root, offset = operand.storage.root()
    return root, offset + operand.offset


def _work(expression: Expression) -> list[str]:
    """Return the dtypes in which the instructions work."""
    return [d for text in expression.instructions for d in text.split(" ", 1)[0].split(".")[1:]]


def _words(
    expression: Expression,
    dims: Ints,
    strides: Sequence[Ints],
    operands: Sequence[Operand | Weight],
    items: Sequence[int],
) -> tuple[list[Argument], int, int]:
    """Return the argument words, the number of tiles and the elements of one."""
    size = dims[-1]
    rows = dims[-2] if len(dims) > 1 else 1
    outer = dims[:-2]
    block = smaller(size, TILE)
    row_block = larger(1, smaller(rows, TILE // block))
    chunks, row_chunks = -(-size // block), -(-rows // row_block)
    words: list[Argument] = [size, block, rows, row_block, chunks, row_chunks]
    words += [_signed(number) for number in expression.numbers]
    words += outer
    for operand, steps, item in zip(operands, strides, items, strict=True):
        words += [operand, steps[-2] * item if len(dims) > 1 else 0]
        words += [step * item for step in steps[:-2]]
    return words, math.prod(outer) * chunks * row_chunks, block * row_block


def _signed(number: float) -> int | float:
    """Return a number as a word: integers as int64."""
    if isinstance(number, float):
        return number
    return number - 2**64 if number >= 2**63 else number


def _blocked(
    low: Lowering, sources: Sequence[Source], target: Operand
) -> tuple[list[Operand | Weight], Ints, list[Ints]]:
    """Return operands, dimensions [N, blocks, pixels, lanes] and strides in the blocked layout."""
    lanes = target.lanes
    shape = (target.shape[0], target.blocks, math.prod(target.shape[2:]), lanes)
    operands: list[Operand | Weight] = []
    strides: list[Ints] = []
    for s in sources:
        operand, steps = _blocked_source(low, s, target, shape)
        operands.append(operand)
        strides.append(steps)
    return operands, shape, strides


def _blocked_source(
    low: Lowering, s: Source, target: Operand, dims: Ints
) -> tuple[Operand | Weight, Ints]:
    images, blocks, _, lanes = dims
    channels = target.shape[1]
    shape = (1,) * (len(target.shape) - len(s.shape)) + s.shape
    if s.layout == "blocked":
        if s.shape == target.shape:
            return s.operand, contiguous(dims)
        if s.shape[1] == channels and math.prod(s.shape[2:]) == 1:
            steps = contiguous((s.shape[0], blocks, 1, lanes))
            return s.operand, (steps[0] if s.shape[0] > 1 else 0, steps[1], 0, 1)
        raise Unsupported(f"blocked shapes {s.shape} and {target.shape} do not broadcast")
    if math.prod(shape) == 1:
        return s.operand, (0, 0, 0, 0)
    if math.prod(shape[1:]) == 1 and shape[0] == images:
        return s.operand, (1, 0, 0, 0)
    if shape[1] != channels or math.prod(shape[2:]) != 1:
        raise Unsupported(f"plain shape {s.shape} beside blocked {target.shape}")
    if shape[0] == 1 and channels % lanes and isinstance(s.operand, Operand):
        padded = -(-channels // lanes) * lanes
        weight = low.weight(f"pad_channels{padded}", partial(_pad, size=padded), s.operand)
        return weight, (0, lanes, 0, 1)
    if channels % lanes:
        raise Unsupported(f"{channels} plain channels are no multiple of {lanes}")
    return s.operand, (channels if shape[0] > 1 else 0, lanes, 0, 1)


def _pad(array: Array, size: int) -> Array:
    flat = array.reshape(-1)
    return np.concatenate([flat, np.zeros(size - flat.size, flat.dtype)])


def _merge_blocks(
    shape: Ints, strides: Sequence[Ints], lanes: int
) -> tuple[Ints, list[Ints], list[bool]]:
    """Merge pixels and lanes: along them a channel block repeats (mode "p")."""
    block = shape[3]
    last = [(s[2], s[3]) for s in strides]
    if block != lanes or any(pair not in ((lanes, 1), (0, 0), (0, 1)) for pair in last):
        dims, merged = collapse(shape, strides)
        return dims, merged, [False] * len(merged)
    merged = [(s[0], s[1], s[3]) for s in strides]
    periodic = [pair == (0, 1) and shape[2] > 1 for pair in last]
    if not any(periodic):
        dims, joined = collapse((*shape[:2], shape[2] * block), merged)
        return dims, joined, [False] * len(joined)
    outer, joined = collapse(shape[:2], [s[:2] for s in merged])
    rows = [(*s, m[2]) for s, m in zip(joined, merged, strict=True)]
    return (*outer, shape[2] * block), rows, periodic


def clear_padding(low: Lowering, output: Operand) -> None:
    """Emit the step that zeroes the channels beyond the last in the blocked layout."""
    used = output.shape[1] % output.lanes
    if used == 0 or output.size == 0:
        return
    pixels = math.prod(output.shape[2:])
    item = output.itemsize
    arguments = ClearPaddingArguments(
        array=output,
        blocks=output.blocks,
        pixels=pixels,
        pixel=output.lanes * item,
        used=used * item,
    )
    kernel = Kernel("subgraph.ops.movement.kernels", "clear_padding")
    low.emit(kernel, arguments, output.shape[0], grain=max(1, _SMALL // max(pixels, 1)))


def temporary(low: Lowering, dtype: str, shape: Sequence[int]) -> Operand:
    """Return an operand in scratch memory."""
    operand = Operand(f"{low.node.name}.temporary", dtype, tuple(shape))
    operand.storage = low.scratch(max(operand.nbytes, 1)).storage
    return operand


def emit_cast(low: Lowering, x: Operand, y: Operand) -> None:
    """Emit the conversion of ``x`` to the dtype of ``y``."""
    e = Expression()
    try:
        result = e.cast(e.input(x.dtype), y.dtype)
    except UnsupportedOpError as error:
        raise Unsupported(str(error)) from error
    emit_expression(low, e, [source(x, y.shape)], [(result, y)])


def cast_to(low: Lowering, x: Operand, dtype: str) -> Operand:
    """Return an operand in a dtype that kernels compute in; itself where it has it."""
    if x.dtype == dtype:
        return x
    y = temporary(low, dtype, x.shape)
    emit_cast(low, x, y)
    return y


def _legacy_shape(node: Node, first: Operand, second: Operand) -> tuple[int, ...]:
    """Return the shape with which the second operand broadcasts before opset 7."""
    shape = second.shape
    if not is_legacy_broadcast(node):
        return shape
    if node.op_type == "PRelu":
        return (*shape, *(1,) * (first.rank - 2)) if len(shape) == 1 and shape[0] > 1 else shape
    axis = node.attrs.get("axis")
    if axis is None:
        return shape
    return (*shape, *(1,) * (first.rank - int(axis) % first.rank - len(shape)))


def lower_chain(low: Lowering, operands: Sequence[Operand]) -> None:
    """Lower one operator over these operands."""
    node = low.node
    if len(operands) > _MOST_OPERANDS:
        _lower_in_groups(low, operands)
        return
    e = Expression()
    try:
        terms = [e.input(operand.dtype) for operand in operands]
        result = expand(e, node, terms)
    except UnsupportedOpError as error:
        raise Unsupported(str(error)) from error
    sources = [source(operand) for operand in operands]
    if len(operands) == 2:
        sources[1] = source(operands[1], _legacy_shape(node, operands[0], operands[1]))
    keeps = node.op_type in _KEEPS_ZERO or (
        node.op_type in ("Add", "Sub", "Mul", "Sum")
        and all(operand.layout == "blocked" for operand in operands)
    )
    emit_expression(low, e, sources, [(result, low.output())], keeps_zero=keeps)


def _lower_in_groups(low: Lowering, operands: Sequence[Operand]) -> None:
    """Lower an operator over many operands by kernels over few of them.

    A kernel for all takes long to compile, and no node with another number of operands can use it.
    The operands are taken in the same order, so results are those of one kernel.
    """
    node, y = low.node, low.output()
    if any(operand.layout != "plain" for operand in (*operands, y)):
        raise Unsupported(f"{node.op_type} of {len(operands)} operands in the blocked layout")
    name = _FOLDS[node.op_type]
    held: list[Operand] = []
    for first in range(0, len(operands), _MOST_OPERANDS - 1):
        group = [*held, *operands[first : first + _MOST_OPERANDS - 1]]
        last = first + _MOST_OPERANDS - 1 >= len(operands)
        e = Expression()
        try:
            terms = [e.input(operand.dtype) for operand in group]
            result = terms[0]
            for term in terms[1:]:
                result = e(name, result, term)
            if last and node.op_type == "Mean":
                result = e("div", result, float(len(operands)))
        except UnsupportedOpError as error:
            raise Unsupported(str(error)) from error
        target = y if last else temporary(low, y.dtype, y.shape)
        emit_expression(low, e, [source(operand) for operand in group], [(result, target)])
        held = [target]


@lowering(
    *(name for name in EXPANSIONS if name not in ("Identity", "CastLike")),
    layouts=("plain", "blocked"),
)
def elementwise(node: Node, low: Lowering) -> None:
    """Lower one elementwise operator."""
    lower_chain(low, [operand for operand in low.inputs if operand is not None])


@lowering("CastLike", layouts=("plain", "blocked"))
def cast_like(node: Node, low: Lowering) -> None:
    """Lower a cast to the dtype of the second input, which is not read."""
    e = Expression()
    x = low.input(0)
    try:
        result = e.cast(e.input(x.dtype), low.output().dtype)
    except UnsupportedOpError as error:
        raise Unsupported(str(error)) from error
    emit_expression(low, e, [source(x)], [(result, low.output())], keeps_zero=True)


@lowering("FusedElementwise", domain=INTERNAL_DOMAIN, layouts=("plain", "blocked"))
def fused(node: Node, low: Lowering) -> None:
    """Lower a chain of elementwise operators, the inner graph of the node, to one step."""
    inner = node.subgraph
    if inner is None:
        raise Unsupported("a fused chain without its inner graph")
    operands = [low.input(k) for k in range(len(low.inputs))]
    e = Expression()
    try:
        terms = [e.input(operand.dtype) for operand in operands]
        results = expand_graph(e, inner, terms)
    except UnsupportedOpError as error:
        raise Unsupported(str(error)) from error
    if len(e.instructions) > MAX_FUSED:
        raise Unsupported(f"a fused chain of {len(e.instructions)} instructions")
    keeps = all(n.op_type in _KEEPS_ZERO for n in inner.nodes) or (
        all(n.op_type in (*_KEEPS_ZERO, "Add", "Sub", "Mul", "Sum") for n in inner.nodes)
        and all(operand.layout == "blocked" for operand in operands)
    )
    emit_expression(
        low,
        e,
        [source(operand) for operand in operands],
        list(zip(results, low.outputs, strict=True)),
        keeps_zero=keeps,
    )


MAX_FUSED = 64
# Operands of a kernel. One of more takes seconds to compile, and other nodes have other numbers.
_MOST_OPERANDS = 16
_FOLDS = {"Max": "max", "Mean": "add", "Min": "min", "Sum": "add"}
