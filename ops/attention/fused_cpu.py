"""Attention on the CPU device: the fused kernels, for FusedAttention and ONNX's Attention.

Kernels take strides for each operand, so that a Transpose before or after needs no step of its own:
FusedAttention names the order of the dimensions of each operand in its attributes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from subgraph.engine.planner.lowering import Lowering, Unsupported, lowering
from subgraph.engine.planner.operands import Operand
from subgraph.engine.planner.views import Part
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.graph.graph import Node
from subgraph.operators.schema import INTERNAL_DOMAIN
from subgraph.ops.elementwise.primitives import primitive
from subgraph.ops.shared.strides import contiguous
from subgraph.ops.shared.tile_planning import (
    FLOATS,
    Tiles,
    grain,
    matrix_tiles,
    round_up,
    tiles,
)
from subgraph.system import host

from .arguments import AttentionArguments, FewQueriesArguments, MatrixAttentionArguments

# Keys of a block at most (estimates): the scores of a panel, keys * queries, stay in the cache. The
# second is for few-row tiles, whose units have several panels.
_MAX_BLOCK_KEYS = 512
_MAX_BLOCK_KEYS_LOW = 192
_MAX_BLOCK_KEYS_MATRIX = 256  # with matrix tiles
# Values that lie a multiple of this many bytes apart map to few sets of a cache, and are copied
# before they are multiplied. With 16 heads of 64 elements side by side (4096 bytes) attention took
# 1.35 times the time without copies, with 8 heads 1.03 times (AVX2).
_ALIASED_BYTES = 2048


@attrs.frozen
class Heads:
    """An operand read as heads.

    Attributes:
        operand: The operand.
        sizes: Samples, heads, positions, elements of a head.
        steps: Strides along these dimensions, in elements.
    """

    operand: Operand
    sizes: tuple[int, int, int, int]
    steps: tuple[int, int, int, int]


def ordered(operand: Operand, order: str) -> Heads:
    """Return the heads of an operand of rank 4.

    Args:
        operand: The operand.
        order: Its dimensions, outermost first: batch ``b``, head ``h``, position ``t``, element
            ``d``.

    Raises:
        Unsupported: The rank is not 4, or the order names other dimensions.
    """
    if operand.rank != 4 or sorted(order) != sorted("bhtd"):
        raise Unsupported(f"attention over {operand.shape} in the order {order!r}")
    if operand.layout == "strided":
        b, h, t, d = (_part(operand.view[order.index(name)], name) for name in "bhtd")
        return Heads(operand, (b[0], h[0], t[0], d[0]), (b[1], h[1], t[1], d[1]))
    strides: dict[str, int] = {}
    step = 1
    for name, size in zip(reversed(order), reversed(operand.shape), strict=True):
        strides[name] = step
        step *= size
    sizes = dict(zip(order, operand.shape, strict=True))
    return Heads(
        operand,
        (sizes["b"], sizes["h"], sizes["t"], sizes["d"]),
        (strides["b"], strides["h"], strides["t"], strides["d"]),
    )


def _part(parts: Sequence[Part], name: str) -> Part:
    """Return the size and stride of a dimension of a view; of heads that are repeated, the first.

    Raises:
        Unsupported: The dimension has several strides.
    """
    if name == "h" and parts and parts[-1][1] == 0:
        parts = parts[:-1]
    if len(parts) > 1:
        raise Unsupported("attention over a dimension of several strides")
    return parts[0] if parts else (1, 0 if name != "d" else 1)


def heads_of(operand: Operand, heads: int) -> Heads:
    """Return the heads of an operand of rank 4, or ``[batch, positions, heads * size]``."""
    if operand.rank == 4:
        return ordered(operand, "bhtd")
    if operand.layout != "plain":
        raise Unsupported("attention over a view of heads side by side")
    batch, positions, hidden = operand.shape
    size = hidden // heads
    return Heads(operand, (batch, heads, positions, size), (positions * hidden, size, hidden, 1))


@attrs.define
class AttentionSpec:
    """What an attention computes: ``softmax(scale * Q K^T + mask) V``.

    Attributes:
        q: Queries. Each head of K and V serves as many adjacent heads of Q.
        k: Keys, of the queries' size.
        v: Values, one for each key.
        out: The output: positions of Q, elements of V.
        mask: Added to the scaled scores; it broadcasts to them. None: nothing.
        scale: Factor of the scores.
        causal: Query i sees keys up to ``i + offset`` only.
        offset: Keys before the first query.
        zero_unseen: 1: a query that sees no key gives 0, not NaN; 2: also one with a score of NaN.
        sinks: The score of a further key, without value, for each head of Q; None: there is none.
        starts: Instead of ``offset``, one int64 for each sample; None: there are none.
        window: Keys that a causal query sees at most, the last ones; 0: no limit.
        softcap: Bound c of the scores before the mask is added, ``c * tanh(score / c)``; 0: none.
    """

    q: Heads
    k: Heads
    v: Heads
    out: Heads
    mask: Operand | None
    scale: float
    causal: bool
    offset: int = 0
    zero_unseen: int = 0
    sinks: Operand | None = None
    starts: Operand | None = None
    window: int = 0
    softcap: float = 0.0

    @property
    def factor(self) -> float:
        """The factor of the products of queries and keys: the scale, divided by a bound."""
        return self.scale / self.softcap if self.softcap else self.scale


@lowering("FusedAttention", domain=INTERNAL_DOMAIN, dtypes=FLOATS, layouts=("plain", "strided"))
def fused(node: Node, low: Lowering) -> None:
    """Lower the fused form; see `subgraph.ops.attention.op`."""
    orders = [str(node.attrs.get(f"{name}_order", "bhtd")) for name in ("q", "k", "v", "o")]
    operands = [low.input(0), low.input(1), low.input(2), low.output()]
    q, k, v, out = (ordered(o, order) for o, order in zip(operands, orders, strict=True))
    scale, causal = float(node.attrs.get("scale", 1.0)), bool(node.attrs.get("causal", 0))
    emit_attention(low, AttentionSpec(q, k, v, out, low.optional(3), scale, causal))


def checked_mask_steps(r: AttentionSpec) -> tuple[int, int, int, int]:
    """Return the strides of an attention's mask, 0 without one, after a check of its operands.

    Raises:
        Unsupported: No kernel computes an attention of these operands.
    """
    if r.q.steps[3] != 1 or r.out.steps[3] != 1:
        raise Unsupported("attention over queries whose elements are not contiguous")
    if r.k.sizes[:3] != r.v.sizes[:3]:
        raise Unsupported("attention over heads of keys and of values that are shared differently")
    if r.v.sizes[2] == 0 or not r.out.operand.size:
        raise Unsupported("attention over an empty tensor")
    return (0, 0, 0, 0) if r.mask is None else mask_steps(r.mask)


def mask_steps(mask: Operand) -> tuple[int, int, int, int]:
    """Return a mask's strides along batch, head, query and key, in elements; 0 along size 1."""
    full = (1,) * (4 - mask.rank) + tuple(mask.shape)
    steps = [0 if size == 1 else step for size, step in zip(full, contiguous(full), strict=True)]
    return steps[0], steps[1], steps[2], steps[3]


@primitive
def emit_attention(low: Lowering, r: AttentionSpec) -> None:
    """Emit the step of an attention: `attention`, or `few_queries` for few.

    Raises:
        Unsupported: There is no kernel for these operands.
    """
    of = tiles(r.q.operand.dtype)
    batch, heads, queries, depth = r.q.sizes
    _, _, keys, values = r.v.sizes
    steps = checked_mask_steps(r)
    # `mask_writer` transposes a mask with rows for queries, whose keys have to be adjacent.
    if steps[2] and not steps[3] and keys > 1:
        raise Unsupported("a mask with rows for queries, but one column for all keys")
    if _has_few_queries(r, of, steps):
        _emit_few_queries(low, r, of, steps)
        return
    # The kernel of matrix tiles knows no sinks, windows or bounds; the other computes in float32.
    plain = r.sinks is None and not r.window and not r.softcap
    if plain and (matrix := matrix_tiles(low, of.dtype)) is not None:
        _emit_matrix_attention(low, r, matrix, steps)
        return
    panels = -(-queries // of.width)
    unit_panels = 1
    # Panels of a unit share the blocks of K and V, or the copy of V.
    if of.few_rows or _is_aliased(r, of):
        elements = (depth + values + 3) * of.width
        unit_panels = _panels_per_unit(of, panels, batch * heads, low.threads, elements)
    units = batch * heads * -(-panels // unit_panels)
    flops = 2 * batch * heads * queries * keys * (depth + values)
    low.emit(
        Kernel(
            "subgraph.ops.attention.kernels",
            "attention",
            **of.variant,
            bounded=r.softcap != 0,
        ),
        _arguments(low, r, of, steps, unit_panels),
        units,
        # A vector takes as long with fewer queries than fill it.
        grain=grain(units, flops * round_up(queries, of.lanes) // queries),
        flops=flops,
        bytes=_bytes_moved(r, of),
    )


def _emit_matrix_attention(
    low: Lowering, r: AttentionSpec, of: Tiles, mask_steps: Sequence[int]
) -> None:
    """Emit the step of an attention over matrix tiles."""
    batch, heads, queries, depth = r.q.sizes
    _, _, keys, values = r.v.sizes
    # A panel is a tile's rows of queries. Their registers, results, and two numbers of each:
    q_columns, v_columns = round_up(depth, of.depth_step), round_up(values, of.lanes)
    panel = of.mr * (q_columns * of.weight_item + (v_columns + 2) * of.item)
    panels = -(-queries // of.mr)
    unit_panels = _panels_per_unit(of, panels, batch * heads, low.threads, panel // of.item)
    blocks = -(-keys // _MAX_BLOCK_KEYS_MATRIX)
    block = round_up(-(-keys // blocks), of.depth_step)
    v_registers = block * q_columns * of.weight_item
    weights = v_registers + block * v_columns * of.weight_item
    scores = weights + of.mr * block * of.weight_item
    rows = scores + of.mr * block * of.item
    shared = rows + of.mr * (of.lanes + 2) * of.item
    units = batch * heads * -(-panels // unit_panels)
    flops = 2 * batch * heads * queries * keys * (depth + values)
    low.emit(
        Kernel("subgraph.ops.attention.matrix_kernels", "attention"),
        MatrixAttentionArguments(
            **_panel_arguments(r, of, mask_steps, block, unit_panels),
            **low.worker_scratch(unit_panels * panel + shared),
            panel_bytes=panel,
            v_registers=v_registers,
            weights=weights,
            scores=scores,
            rows=rows,
            line=block * of.item,
            block_steps=block // of.depth_step,
        ),
        units,
        grain=grain(units, flops * round_up(queries, of.mr) // queries),
        flops=flops,
        bytes=_bytes_moved(r, of),
    )


def _arguments(
    low: Lowering, r: AttentionSpec, of: Tiles, mask_steps: Sequence[int], unit_panels: int
) -> AttentionArguments:
    """Return the arguments of `attention`.

    Args:
        low: The lowering, which gives scratch memory.
        r: The attention.
        of: The tiles of its dtype.
        mask_steps: Strides of the mask, as of `checked_mask_steps`.
        unit_panels: Panels of queries of a work unit.
    """
    depth, (_, _, keys, values) = r.q.sizes[3], r.v.sizes
    block = _keys_per_block(of, keys)
    rows = (block + 1) * (2 if r.softcap and r.mask is not None else 1)
    elements = ((depth + values + 3) * unit_panels + rows) * of.width
    copies = _is_aliased(r, of)
    return AttentionArguments(
        **_panel_arguments(r, of, mask_steps, block, unit_panels),
        k_panel=of.panel(across=r.k.steps[3] != 1),
        v_panel=of.panel(across=r.v.steps[3] == 1),
        v_copy=elements * of.item if copies else 0,
        **low.worker_scratch((elements + (block * values if copies else 0)) * of.item),
    )


def _is_aliased(r: AttentionSpec, of: Tiles) -> bool:
    """Return whether the values of keys map to few sets of a cache."""
    step = r.v.steps[2] * of.item
    return r.v.steps[3] == 1 and step > r.v.sizes[3] * of.item and step % _ALIASED_BYTES == 0


def _panel_arguments(
    r: AttentionSpec, of: Tiles, mask_steps: Sequence[int], block: int, unit_panels: int
) -> dict[str, Any]:
    """Return the arguments that both kernels `attention` have in common, by name."""
    return _operands_and_strides(r, of, r.q.steps, r.out.steps, mask_steps) | {
        "queries": r.q.sizes[2],
        "heads": r.q.sizes[1],
        "sharing": r.q.sizes[1] // r.v.sizes[1],
        "k_line": _line_step(r.k) * of.item,
        "k_across": int(r.k.steps[3] != 1),
        "v_line": _line_step(r.v) * of.item,
        "v_across": int(r.v.steps[3] != 1),
        "keys_block": block,
        "panels": unit_panels,
    }


def _operands_and_strides(
    r: AttentionSpec, of: Tiles, q: Sequence[int], out: Sequence[int], mask: Sequence[int]
) -> dict[str, Any]:
    """Return the arguments that `attention` and `few_queries` have in common, by name.

    Args:
        r: The attention.
        of: The tiles of its dtype.
        q: Strides of Q along batch, head and query, in elements.
        out: Those of the output.
        mask: Those of the mask, and along keys.
    """
    named = {"q": q, "k": r.k.steps[:2], "v": r.v.steps[:2], "y": out, "mask": mask}
    strides = {
        f"{name}_{along}": step * of.item
        for name, steps in named.items()
        for along, step in zip(("batch", "head", "row"), steps, strict=False)
    }
    return strides | {
        "q": r.q.operand,
        "k": r.k.operand,
        "v": r.v.operand,
        "y": r.out.operand,
        "mask": r.mask or 0,
        "sinks": r.sinks or 0,
        "sink_head": of.item,
        "sink_row": 0,
        "keys": r.v.sizes[2],
        "key_size": r.q.sizes[3],
        "value_size": r.v.sizes[3],
        "mask_key": mask[3] * of.item,
        "scale": r.factor,
        "softcap": r.softcap,
        "causal": int(r.causal),
        "offset": r.offset,
        "starts": r.starts or 0,
        "window": r.window,
        "zero_unseen": r.zero_unseen,
    }


def _has_few_queries(r: AttentionSpec, of: Tiles, mask: Sequence[int]) -> bool:
    """Return whether `few_queries` computes this attention: few queries see each key.

    A quarter of a panel's width is an estimate: a panel takes as long with any number of queries.
    With one query it takes 0.15 to 0.26 of the time of panels, of which each has the query of one
    head, also if as many as 64 heads share a key (128 to 2048 keys of 64 to 256 elements, AVX2).
    """
    contiguous = r.v.steps[3] == 1 and 1 in (r.k.steps[2], r.k.steps[3])
    few = r.q.sizes[2] <= max(of.width // 4, 1)
    return few and contiguous and (r.mask is None or mask[3] == 1)


def _rows_of_a_key(r: AttentionSpec) -> int:
    """Return how many queries read the same key: with one query, all heads that share the key."""
    _, heads, queries, _ = r.q.sizes
    return queries if queries > 1 else heads // r.k.sizes[1]


def _emit_few_queries(low: Lowering, r: AttentionSpec, of: Tiles, mask: Sequence[int]) -> None:
    """Emit the step of an attention of few queries."""
    batch, heads, queries, depth = r.q.sizes
    _, kv_heads, keys, values = r.v.sizes
    q, out, rows, group = list(r.q.steps), list(r.out.steps), _rows_of_a_key(r), heads // kv_heads
    mask = list(mask)
    if queries < rows:
        # One query: the heads that share keys become the queries of one head.
        for steps in (q, out, mask):
            steps[1:3] = [steps[1] * rows, steps[1]]
        heads, group = kv_heads, 1
    named = _operands_and_strides(r, of, q, out, mask)
    if queries < rows:
        named |= {"sink_head": rows * of.item, "sink_row": of.item}
    arguments = FewQueriesArguments(
        **named,
        queries=rows,
        heads=heads,
        sharing=group,
        k_row=r.k.steps[2] * of.item,
        k_element=r.k.steps[3] * of.item,
        v_row=r.v.steps[2] * of.item,
        row_position=int(queries == rows),
        **low.worker_scratch((rows * round_up(keys + 1, of.lanes) + rows) * of.item),
    )
    flops = 2 * batch * heads * rows * keys * (depth + values)
    moved = _bytes_moved(r, of)
    low.emit(
        Kernel(
            "subgraph.ops.attention.row_kernels",
            "few_queries",
            dtype=of.dtype,
            lanes=of.lanes,
            across=r.k.steps[3] != 1,
            bounded=r.softcap != 0,
        ),
        arguments,
        batch * heads,
        grain=grain(batch * heads, flops + 2 * moved),
        flops=flops,
        bytes=moved,
    )


def _keys_per_block(of: Tiles, keys: int) -> int:
    """Return the keys of a block, such that blocks are equal and consist of whole tiles."""
    if not of.few_rows:
        return min(_MAX_BLOCK_KEYS, keys)
    blocks = -(-keys // _MAX_BLOCK_KEYS_LOW)
    return min(round_up(-(-keys // blocks), of.mr), keys)


def _panels_per_unit(of: Tiles, panels: int, others: int, threads: int, elements: int) -> int:
    """Return the panels of queries of a unit: equal units, enough of them for all threads.

    Args:
        of: The tiles of the dtype.
        panels: Panels of a head.
        others: Heads of all samples.
        threads: Threads that share the units.
        elements: Elements of a panel's queries, results and softmax state.
    """
    # Panels of a unit fill at most a quarter of the L2 cache; blocks of K and V need room as well.
    most = max(1, host.caches().l2 // 4 // (elements * of.item))
    pieces = -(-panels // most)
    if threads > 1:
        # Four units for each thread, so that threads finish together (estimate).
        pieces = max(pieces, min(panels, -(-4 * threads // others)))
    return -(-panels // pieces)


def _line_step(heads: Heads) -> int:
    """Return the stride between lines, in elements.

    A line is contiguous: the elements of one position, or one element of all positions.
    """
    _, _, position, element = heads.steps
    return position if element == 1 else element


def _bytes_moved(r: AttentionSpec, of: Tiles) -> int:
    """Return the bytes that a step reads and writes at least."""
    operands = [r.q.operand, r.k.operand, r.v.operand, r.out.operand]
    return of.item * sum(operand.size for operand in operands)
