"""Elementwise operators and fused chains of them on the CPU device: one kernel, one pass.

`emit_expression` turns an expression into a step: it finds how each operand lies in memory, merges
dimensions, and cuts the work into tiles. Other families use it for their elementwise parts
(BatchNormalization, ranges, casts of indices).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

import attrs
import numpy as np

from subgraph.dtypes import HALF_FLOATS, compute_dtype, item_bytes
from subgraph.engine.planner.lowering import Lowering, Unsupported, lowering
from subgraph.engine.planner.operands import Argument, Operand, Storage, Weight
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.graph.graph import Graph, Node
from subgraph.graph.symbolic import larger, smaller
from subgraph.operators.schema import INTERNAL_DOMAIN
from subgraph.ops.shared.activations import ACTIVATIONS
from subgraph.ops.shared.strides import Ints, broadcast_strides, collapse, contiguous
from subgraph.ops.shared.tile_planning import matrix_tiles

from .byte_arguments import ByteTableArguments, ClearPaddingArguments
from .expressions import EXPANSIONS, Expression, Term, canonical_order, expand, expand_graph
from .op import is_legacy_broadcast
from .primitives import primitive
from .sources import Source as Source
from .sources import blocked_sources, merge_blocks
from .sources import source as source

TILE = 16384  # elements of a work unit; two operands of float32 take 128 KiB, part of an L2 cache
_MIN_ELEMENTS_PER_THREAD = 8192  # an estimate
MAX_FUSED = 64  # instructions of a fused chain, whose compilation takes time (estimate)
# A function of one byte is computed by a table of 256 results from this many elements on, if its
# vector code takes at least this many instructions an element. Estimates.
_MIN_TABLE_ELEMENTS, _MIN_TABLE_INSTRUCTIONS = 1024, 2
# Instructions of a vector that these primitives take (estimates); all others count as one.
_INSTRUCTIONS = {"exp": 16, "log": 16, "tanh": 20, "sigmoid": 20, "erf": 24, "silu": 20, "gelu": 26}
# Operands of one kernel (estimate). A kernel of more takes seconds to compile, and nodes with other
# numbers of operands cannot use it.
_MAX_OPERANDS = 16
# The primitive that combines two operands of operators that take any number of them.
_FOLDS = {"Max": "max", "Mean": "add", "Min": "min", "Sum": "add"}
# Operators whose result is 0 where all inputs are 0: padding channels stay zero.
_KEEPS_ZERO = frozenset(
    [
        *(name for name, form in ACTIVATIONS.items() if form.keeps_zero),
        *("PRelu", "Abs", "Neg", "Sqrt", "Erf", "Identity", "Selu", "Sign", "Floor", "Ceil"),
        *("Round", "Sin", "Softsign"),
    ]
)


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
        low: The lowering that gets the step.
        expression: The program to compute.
        sources: Its inputs, in order; each broadcasts to the outputs' shape.
        results: The term stored in each output; all outputs have one shape and layout.
        keeps_zero: Whether the expression maps zeros to zero, so that the padding channels of the
            blocked layout need no clearing.

    Raises:
        Unsupported: An operand does not broadcast in the layout.
    """
    outputs = [operand for _, operand in results]
    target = outputs[0]
    if any(s.layout == "bfloat16" for s in sources):
        results = [(_rounded(expression, sources, results), target)]
    if any(o.shape != target.shape or o.layout != target.layout for o in outputs):
        raise Unsupported("outputs of a fused chain differ in shape or layout")
    if target.size == 0:
        return
    if _emit_table(low, expression, sources, results):
        finish(low, sources, [target], keeps_zero)
        return
    walk = _walk(low, expression, sources, outputs)
    instructions = [_for_precision(low, text) for text in expression.instructions]
    program, order = canonical_order(instructions, walk.modes[: len(sources)])
    name = {f"i{old}": f"i{new}" for new, old in enumerate(order)}
    kernel = Kernel(
        "subgraph.ops.elementwise.kernels",
        "run",
        program=program,
        inputs=tuple(sources[k].stored for k in order),
        modes=tuple(walk.modes[k] for k in order),
        outputs=tuple(
            f"{name.get(term.name, term.name)}:{_stored_as(term, o)}" for term, o in results
        ),
        outer=max(len(walk.dims) - 2, 0),
        lanes=walk.lanes,
    )
    operands = [*(walk.operands[k] for k in order), *outputs]
    strides = [*(walk.strides[k] for k in order), *walk.strides[len(order) :]]
    items = [item_bytes(sources[k].stored) for k in order] + [o.itemsize for o in outputs]
    arguments, units, tile = _kernel_arguments(expression, walk.dims, strides, operands, items)
    moved = sum(s.operand.nbytes for s in sources if isinstance(s.operand, Operand))
    low.emit(
        kernel,
        arguments,
        units,
        grain=larger(1, _MIN_ELEMENTS_PER_THREAD // tile),
        flops=len(expression.instructions) * target.size,
        bytes=moved + sum(o.nbytes for o in outputs),
    )
    finish(low, sources, outputs, keeps_zero)


def _rounded(
    expression: Expression, sources: Sequence[Source], results: Sequence[tuple[Term, Operand]]
) -> Term:
    """Let the output of one image in the layout "bfloat16" have that layout; return its bits.

    Its readers take it so, or the image would be of float32.

    Raises:
        Unsupported: There are several images or outputs.
    """
    (term, y), *others = results
    images = {s.operand: s.layout for s in sources if s.shape == y.shape}
    if others or list(images.values()) != ["bfloat16"] or y.layout != "blocked":
        raise Unsupported("several images, not all of bfloat16")
    y.store_as("bfloat16")
    return expression.bits_of_bfloat16(term)


def _stored_as(term: Term, output: Operand) -> str:
    """Return the dtype of an output in memory."""
    return term.dtype if output.layout == "bfloat16" else output.dtype


def _for_precision(low: Lowering, instruction: str) -> str:
    """Return an instruction of an expression as it is computed in the precision of the device."""
    name, _, rest = instruction.partition(".")
    if name in ("sigmoid", "silu") and matrix_tiles(low, rest.partition(" ")[0]) is not None:
        return f"{name}_bfloat16.{rest}"
    return instruction


class _Walk(NamedTuple):
    """How the kernel `run` traverses its inputs and outputs.

    Attributes:
        operands: The inputs.
        dims: Dimensions, merged as far as possible.
        strides: Strides of inputs and outputs along them, in elements.
        modes: How the kernel reads each along the last dimension: "v" contiguous, "s" one element,
            "p" a block of channels that repeats.
        lanes: Elements of a vector.
    """

    operands: Sequence[Operand | Weight]
    dims: Ints
    strides: Sequence[Ints]
    modes: tuple[str, ...]
    lanes: int


def _walk(
    low: Lowering, expression: Expression, sources: Sequence[Source], outputs: Sequence[Operand]
) -> _Walk:
    """Return how the kernel traverses the operands of an expression.

    Raises:
        Unsupported: An input does not broadcast in the layout.
    """
    target = outputs[0]
    blocks = [s.operand for s in sources if s.layout == "blocked" == target.layout]
    if any(isinstance(o, Operand) and o.lanes != target.lanes for o in blocks):
        raise Unsupported("blocks of another size: the dtypes differ in width")
    sizes = [compute_dtype(dtype) for dtype in (*expression.dtypes, *(o.dtype for o in outputs))]
    lanes = min(low.lanes("uint8" if d == "bool" else d) for d in (*sizes, *_work(expression)))
    if target.layout in ("blocked", "bfloat16"):
        if target.layout == "bfloat16":
            lanes = target.lanes
        elif any(s.shape != target.shape for s in sources):
            lanes = min(lanes, target.lanes)  # a block of channels repeats along the pixels
        operands, shape, strides = blocked_sources(low, sources, target)
        strides += [contiguous(shape)] * len(outputs)
        dims, strides, periodic = merge_blocks(shape, strides, lanes)
    elif any(s.layout != "plain" for s in sources):
        raise Unsupported("inputs in the blocked layout, but a result in the plain one")
    else:
        operands = [s.operand for s in sources]
        strides = [broadcast_strides(s.shape, target.shape) for s in sources]
        strides += [contiguous(target.shape)] * len(outputs)
        dims, strides = collapse(target.shape, strides)
        periodic = [False] * len(strides)
    modes = tuple(
        "p" if period else ("v" if steps[-1] else "s")
        for steps, period in zip(strides, periodic, strict=True)
    )
    if dims[-1] == 1:
        modes = tuple("v" for _ in modes)
    return _Walk(operands, dims, strides, modes, lanes)


def finish(
    low: Lowering, sources: Sequence[Source], outputs: Sequence[Operand], keeps_zero: bool
) -> None:
    """Clear the padding of the blocked layout, and allow the output to overwrite an input.

    Args:
        low: Where the steps go.
        sources: The operands that were read.
        outputs: The operands that were written, all of one shape and layout.
        keeps_zero: The results of zeros are zeros, so that the padding is clear already.
    """
    target = outputs[0]
    # Lanes of bytes beyond the channels are undefined (`subgraph.engine.planner.layouts`).
    clears = not keeps_zero and target.itemsize > 1
    blocks = target.layout in ("blocked", "bfloat16")
    if blocks and target.shape[1] % target.lanes and clears:
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
    chain: Graph | None = None,
) -> bool:
    """Emit a costly function of one byte as a lookup in a table of its 256 results.

    Each run computes the table anew, since scales and zero points may be inputs.

    Args:
        low: The lowering that gets the steps.
        expression: The function.
        sources: Its inputs.
        results: The term stored in each output.
        chain: The same function as a graph, if the expression is too long for one kernel.

    Returns:
        False if no step was emitted: the expression is cheap, or not a function of one byte.
    """
    term, target = results[0]
    whole = [s for s in sources if s.shape == target.shape]
    if len(results) > 1 or len(whole) != 1:
        return False
    x, operand = whole[0], whole[0].operand
    if not isinstance(operand, Operand):
        return False
    if item_bytes(x.dtype) != 1 or target.size < _MIN_TABLE_ELEMENTS:
        return False
    if x.layout != target.layout or operand.lanes != target.lanes:
        return False
    # Inputs beside the byte are the same for all elements, or one table would not do.
    if any(s is not x and math.prod(s.shape) != 1 for s in sources):
        return False
    names = [text.partition(".")[0] for text in expression.instructions]
    cost = sum(_INSTRUCTIONS.get(name, 1) for name in names)
    if cost < _MIN_TABLE_INSTRUCTIONS * min(low.lanes(dtype) for dtype in _work(expression)):
        return False
    every = low.weight("every byte", np.array, np.arange(256, dtype=np.uint8).view(x.dtype))
    scalars = [
        Source(every, (256,), "plain", x.dtype) if s is x else attrs.evolve(s, shape=())
        for s in sources
    ]
    table = temporary(low, target.dtype, (256,))
    if chain is None:
        emit_expression(low, expression, scalars, [(term, table)])
    else:
        _emit_nodes(low, chain, scalars, table)
    count = operand.nbytes
    low.emit(
        Kernel("subgraph.ops.movement.kernels", "byte_table", item=target.itemsize),
        ByteTableArguments(x=operand, y=target, table=table, size=count, block=TILE),
        -(-count // TILE),
        grain=1,
        flops=len(names) * target.size,
        bytes=count + target.nbytes,
    )
    return True


def allow_in_place(
    low: Lowering,
    output: Operand,
    x: Operand,
    read: Sequence[tuple[Operand | Weight, tuple[int, ...]]],
) -> None:
    """Allow ``output`` to overwrite ``x``, unless the step also reads that memory otherwise.

    Args:
        low: The lowering that gets the permission.
        output: The output, written element after element.
        x: An input of which each element is read just before the output's element is written.
        read: Every operand that the step reads, with the shape in which it is read.
    """
    if (x.layout, x.itemsize, x.shape) != (output.layout, output.itemsize, output.shape):
        return
    root, offset = _root(x)
    for other, shape in read:
        if isinstance(other, Operand) and other is not x:
            other_root, other_offset = _root(other)
            same = (other_offset, shape, other.itemsize) == (offset, x.shape, x.itemsize)
            # Another view of the storage, as of a slice, would be read after its elements are
            # overwritten.
            if other_root is not None and other_root is root and not same:
                return
        # An input that broadcasts is read again after the output has overwritten it.
        elif other is x and shape != output.shape:
            return
    low.in_place(output, x)


def _root(operand: Operand) -> tuple[Storage | None, int]:
    """Return the storage that holds an operand (None: not placed) and the byte offset in it."""
    if operand.storage is None:
        return None, 0
    root, offset = operand.storage.root()
    return root, offset + operand.offset


def _work(expression: Expression) -> list[str]:
    """Return the dtypes in which the instructions compute."""
    return [d for text in expression.instructions for d in text.split(" ", 1)[0].split(".")[1:]]


def _kernel_arguments(
    expression: Expression,
    dims: Ints,
    strides: Sequence[Ints],
    operands: Sequence[Operand | Weight],
    items: Sequence[int],
) -> tuple[list[Argument], int, int]:
    """Return the arguments of the kernel `run`, the number of tiles, and the elements of a tile."""
    size = dims[-1]
    rows = dims[-2] if len(dims) > 1 else 1
    outer = dims[:-2]
    block = smaller(size, TILE)
    row_block = larger(1, smaller(rows, TILE // block))
    chunks, row_chunks = -(-size // block), -(-rows // row_block)
    arguments: list[Argument] = [size, block, rows, row_block, chunks, row_chunks]
    arguments += [_signed(number) for number in expression.numbers]
    arguments += outer
    for operand, steps, item in zip(operands, strides, items, strict=True):
        arguments += [operand, steps[-2] * item if len(dims) > 1 else 0]
        arguments += [step * item for step in steps[:-2]]
    return arguments, math.prod(outer) * chunks * row_chunks, block * row_block


def _signed(number: float) -> int | float:
    """Return a number as a kernel argument; an integer beyond int64 as the int64 of its bits."""
    if isinstance(number, float):
        return number
    return number - 2**64 if number >= 2**63 else number


def clear_padding(low: Lowering, output: Operand) -> None:
    """Emit the step that zeroes the padding channels of the blocked layout."""
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
    low.emit(
        kernel, arguments, output.shape[0], grain=max(1, _MIN_ELEMENTS_PER_THREAD // max(pixels, 1))
    )


def temporary(low: Lowering, dtype: str, shape: Sequence[int]) -> Operand:
    """Return a new operand in the scratch memory of the node.

    Args:
        low: The lowering of the node.
        dtype: Its element type.
        shape: Its shape, plain layout.
    """
    operand = Operand(f"{low.node.name}.temporary", dtype, tuple(shape))
    operand.storage = low.scratch(max(operand.nbytes, 1)).storage
    return operand


def emit_cast(low: Lowering, x: Operand, y: Operand) -> None:
    """Emit the conversion of ``x`` to the dtype of ``y``; nothing if they are one operand.

    Args:
        low: The lowering that gets the step.
        x: The input, with as many elements as ``y``.
        y: The output.

    Raises:
        Unsupported: The kernels do not take one of the dtypes.
    """
    if x is y:
        return
    e = Expression()
    result = e.cast(e.input(x.dtype), y.dtype)
    emit_expression(low, e, [source(x, y.shape)], [(result, y)])


def widened(low: Lowering, x: Operand, y: Operand, dtype: str = "") -> tuple[Operand, Operand]:
    """Return an input, and memory for an output, in the dtype in which a kernel computes.

    The caller ends with ``emit_cast(low, memory, y)``.

    Args:
        low: The lowering that gets the conversion of the input.
        x: The input.
        y: The output.
        dtype: The kernel's dtype; "": float64 for a float64 input, else float32.
    """
    dtype = dtype or ("float64" if x.dtype == "float64" else "float32")
    return cast_to(low, x, dtype), y if y.dtype == dtype else temporary(low, dtype, y.shape)


def cast_to(low: Lowering, x: Operand, dtype: str) -> Operand:
    """Return ``x`` in another dtype: ``x`` itself if it has that dtype, else a converted temporary.

    Args:
        low: The lowering that gets the conversion.
        x: The operand.
        dtype: The dtype in which a kernel takes it.
    """
    if x.dtype == dtype:
        return x
    y = temporary(low, dtype, x.shape)
    emit_cast(low, x, y)
    return y


def _legacy_shape(node: Node, first: Operand, second: Operand) -> tuple[int, ...]:
    """Return the shape in which the second operand broadcasts; ``axis`` aligns it before 7."""
    shape = second.shape
    if not is_legacy_broadcast(node):
        return shape
    if node.op_type == "PRelu":
        return (*shape, *(1,) * (first.rank - 2)) if len(shape) == 1 and shape[0] > 1 else shape
    axis = node.attrs.get("axis")
    if axis is None:
        return shape
    return (*shape, *(1,) * (first.rank - int(axis) % first.rank - len(shape)))


@lowering(
    *(name for name in EXPANSIONS if name not in ("Identity", "CastLike")),
    layouts=("plain", "blocked", "bfloat16"),
)
def elementwise(node: Node, low: Lowering) -> None:
    """Lower one elementwise operator."""
    operands = [operand for operand in low.inputs if operand is not None]
    if len(operands) > _MAX_OPERANDS:
        _lower_in_groups(low, operands)
        return
    e = Expression()
    terms = [e.input(operand.dtype) for operand in operands]
    result = expand(e, node, terms)
    sources = [source(operand) for operand in operands]
    if len(operands) == 2:
        sources[1] = source(operands[1], _legacy_shape(node, operands[0], operands[1]))
    keeps = _keep_zero({node.op_type}, operands)
    emit_expression(low, e, sources, [(result, low.output())], keeps_zero=keeps)


def _keep_zero(op_types: AbstractSet[str], operands: Sequence[Operand]) -> bool:
    """Return whether operators give 0 where the padding of their operands in blocks is 0."""
    if all(operand.layout in ("blocked", "bfloat16") for operand in operands):
        return op_types <= _KEEPS_ZERO | {"Add", "Sub", "Mul", "Sum"}
    return op_types <= _KEEPS_ZERO


def _lower_in_groups(low: Lowering, operands: Sequence[Operand]) -> None:
    """Lower an operator of many operands as several steps of at most `_MAX_OPERANDS` each.

    The operands are combined in order, so the results equal those of a single kernel.
    """
    node, y = low.node, low.output()
    if any(operand.layout != "plain" for operand in (*operands, y)):
        raise Unsupported(f"{node.op_type} of {len(operands)} operands in the blocked layout")
    name = _FOLDS[node.op_type]
    # Half precision is rounded once, not after each group.
    dtype = "float32" if y.dtype in HALF_FLOATS else y.dtype
    partial_result: list[Operand] = []
    for first in range(0, len(operands), _MAX_OPERANDS - 1):
        group = [*partial_result, *operands[first : first + _MAX_OPERANDS - 1]]
        last = first + _MAX_OPERANDS - 1 >= len(operands)
        e = Expression()
        terms = [e.cast(e.input(operand.dtype), dtype) for operand in group]
        result = terms[0]
        for term in terms[1:]:
            result = e(name, result, term)
        if last and node.op_type == "Mean":
            result = e("div", result, float(len(operands)))
        target = y if last else temporary(low, dtype, y.shape)
        result = e.cast(result, target.dtype)
        emit_expression(low, e, [source(operand) for operand in group], [(result, target)])
        partial_result = [target]


@lowering("CastLike", layouts=("plain", "blocked"))
def cast_like(node: Node, low: Lowering) -> None:
    """Lower a cast to the dtype of the second input, whose elements are not read."""
    e = Expression()
    x = low.input(0)
    result = e.cast(e.input(x.dtype), low.output().dtype)
    emit_expression(low, e, [source(x)], [(result, low.output())], keeps_zero=True)


@lowering("FusedElementwise", domain=INTERNAL_DOMAIN, layouts=("plain", "blocked", "bfloat16"))
def fused(node: Node, low: Lowering) -> None:
    """Lower a chain of elementwise operators, the inner graph of the node, to one step.

    A chain that is too long for one kernel runs node by node if it is a function of one byte.
    """
    inner = node.subgraph
    if inner is None:
        raise Unsupported("a fused chain without its inner graph")
    operands = [low.input(k) for k in range(len(low.inputs))]
    e = Expression()
    terms = [e.input(operand.dtype) for operand in operands]
    results = expand_graph(e, inner, terms)
    sources = [source(operand) for operand in operands]
    pairs = list(zip(results, low.outputs, strict=True))
    keeps = _keep_zero({n.op_type for n in inner.nodes}, operands)
    if len(e.instructions) <= MAX_FUSED and len(operands) <= _MAX_OPERANDS:
        emit_expression(low, e, sources, pairs, keeps_zero=keeps)
    elif sum(math.prod(s.shape) != 1 for s in sources) > 1 or len(pairs) > 1:
        raise Unsupported(f"a fused chain of {len(e.instructions)} instructions")
    elif _emit_table(low, e, sources, pairs, inner):
        finish(low, sources, low.outputs, keeps)
    else:
        _emit_nodes(low, inner, sources, low.output())


def _emit_nodes(low: Lowering, inner: Graph, sources: Sequence[Source], y: Operand) -> None:
    """Emit a step for each node of a chain.

    Args:
        low: The lowering that gets the steps.
        inner: The chain, with one output.
        sources: Its inputs, of the shape of the output or of one element.
        y: Its output.

    Raises:
        Unsupported: The output is in the blocked layout.
    """
    if y.layout != "plain":
        raise Unsupported("a long chain of few elements in the blocked layout")
    values = dict(zip(inner.inputs, sources, strict=True))
    for node in inner.nodes:
        read = [values[value] for value in node.inputs if value is not None]
        e = Expression()
        result = expand(e, node, [e.input(s.dtype) for s in read])
        made = node.outputs[0]
        target = y if made is inner.outputs[0] else temporary(low, result.dtype, y.shape)
        emit_expression(low, e, read, [(result, target)])
        values[made] = source(target)
