"""Attention on the CPU device: the kernel behind the fused form and ONNX's operator.

Heads are read and written where they lie: the fused form names the order of the dimensions of each
operand, so that transpositions around it need not run.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from subgraph.engine.planner.lowering import Lowering, Operand, Unsupported, lowering
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.graph.graph import Node
from subgraph.operators.schema import INTERNAL_DOMAIN
from subgraph.ops.elementwise.primitives import primitive
from subgraph.ops.shared.tile_planning import FLOATS, Tiles, grain, round_up, tiles
from subgraph.system import host

from .arguments import AttentionArguments, FewQueriesArguments

_KEYS = 512  # keys of a block at most
_KEYS_LOW = 192  # the same for low tiles
_ORDERS = ("bhtd", "bthd", "bhdt")


@attrs.frozen
class Heads:
    """A stack of heads inside an operand: sizes, and strides in elements.

    Attributes:
        operand: The operand.
        sizes: Batch, heads, positions, size of a head.
        steps: Elements between them.
    """

    operand: Operand
    sizes: tuple[int, int, int, int]
    steps: tuple[int, int, int, int]


def ordered(operand: Operand, order: str) -> Heads:
    """Read a 4-D operand whose dimensions come in an order, such as ``"bthd"``."""
    if operand.rank != 4 or sorted(order) != sorted("bhtd"):
        raise Unsupported(f"attention over {operand.shape} in the order {order!r}")
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


def split_heads(operand: Operand, heads: int) -> Heads:
    """Read ``[batch, positions, heads * size]``."""
    batch, positions, hidden = operand.shape
    size = hidden // heads
    return Heads(operand, (batch, heads, positions, size), (positions * hidden, size, hidden, 1))


@attrs.define
class Request:
    """``softmax(scale * Q K^T + mask) V``."""

    q: Heads
    k: Heads
    v: Heads
    out: Heads
    mask: Operand | None
    scale: float
    causal: bool
    offset: int = 0
    zero_unseen: bool = False  # a query that may look at no key gives 0, not NaN


@lowering("FusedAttention", domain=INTERNAL_DOMAIN, dtypes=FLOATS)
def fused(node: Node, low: Lowering) -> None:
    """Lower the fused form; see ``ops/fused/op.py``."""
    orders = [str(node.attrs.get(f"{name}_order", "bhtd")) for name in ("q", "k", "v", "o")]
    operands = [low.input(0), low.input(1), low.input(2), low.output()]
    q, k, v, out = (ordered(o, order) for o, order in zip(operands, orders, strict=True))
    scale, causal = float(node.attrs.get("scale", 1.0)), bool(node.attrs.get("causal", 0))
    emit_attention(low, Request(q, k, v, out, low.optional(3), scale, causal))


def mask_steps(mask: Operand, shape: Sequence[int]) -> tuple[int, int, int, int]:
    """Return the strides of a mask along batch, head, query and key, in elements."""
    full = (1,) * (4 - mask.rank) + tuple(mask.shape)
    if mask.rank > 4 or any(s not in (1, n) for s, n in zip(full, shape, strict=True)):
        raise Unsupported(f"a mask of shape {mask.shape} for scores of shape {tuple(shape)}")
    steps: list[int] = []
    step = 1
    for size in reversed(full):
        steps.append(0 if size == 1 else step)
        step *= size
    steps.reverse()
    return steps[0], steps[1], steps[2], steps[3]


@primitive
def emit_attention(low: Lowering, r: Request) -> None:
    """Emit the step of an attention.

    Raises:
        Unsupported: The kernel cannot do it.
    """
    of = tiles(r.q.operand.dtype)
    batch, heads, queries, depth = r.q.sizes
    _, shared, keys, values = r.v.sizes
    if r.q.steps[3] != 1 or r.out.steps[3] != 1:
        raise Unsupported("attention over queries whose elements are not contiguous")
    if shared == 0 or heads % shared or r.k.sizes != (batch, shared, keys, depth):
        raise Unsupported(f"attention of heads {r.q.sizes}, {r.k.sizes}, {r.v.sizes}")
    if keys == 0 or not r.out.operand.size:
        raise Unsupported("attention over nothing")
    steps = (0, 0, 0, 0)
    if r.mask is not None:
        if r.mask.dtype != of.dtype:
            raise Unsupported(f"a mask of {r.mask.dtype}; it must be of the queries' dtype")
        steps = mask_steps(r.mask, (batch, heads, queries, keys))
        if steps[2] and not steps[3] and keys > 1:
            raise Unsupported("a mask that is the same for all keys")
    if _few(r, of, steps):
        _emit_few(low, r, of, steps)
        return
    panels = -(-queries // of.width)
    together = _panels(of, panels, batch * heads, low.threads, (depth + values + 3) * of.width)
    units = batch * heads * -(-panels // together)
    flops = 2 * batch * heads * queries * keys * (depth + values)
    low.emit(
        Kernel("subgraph.ops.attention.kernels", "attention", **of.variant),
        _arguments(low, r, of, steps, together),
        units,
        # A vector takes as long with fewer queries than fill it.
        grain=grain(units, flops * round_up(queries, of.lanes) // queries),
        flops=flops,
        bytes=_moved(r, of),
    )


def _arguments(
    low: Lowering, r: Request, of: Tiles, mask_steps: Sequence[int], together: int
) -> AttentionArguments:
    """Return the arguments of `attention` with so many panels of queries together in a unit."""
    _, heads, queries, depth = r.q.sizes
    _, shared, keys, values = r.v.sizes
    block = _block(of, keys)
    k_across, v_across = r.k.steps[3] != 1, r.v.steps[3] != 1
    k_pitch = _copied(of, r.k, block, together)
    v_pitch = _copied(of, r.v, block, together)
    elements = ((depth + values + 3) * together + block) * of.width
    copies = k_pitch * (depth if k_across else block) + v_pitch * (values if v_across else block)
    scratch = low.scratch(elements * of.item + copies, per_worker=True)
    q, k, v, y = (
        [step * of.item for step in steps]
        for steps in (r.q.steps, _lines(r.k), _lines(r.v), r.out.steps)
    )
    mask = [step * of.item for step in mask_steps]
    return AttentionArguments(
        q=r.q.operand,
        k=r.k.operand,
        v=r.v.operand,
        y=r.out.operand,
        mask=r.mask or 0,
        queries=queries,
        keys=keys,
        key_size=depth,
        value_size=values,
        heads=heads,
        sharing=heads // shared,
        q_batch=q[0],
        q_head=q[1],
        q_row=q[2],
        k_batch=k[0],
        k_head=k[1],
        k_line=k[2],
        k_across=int(k_across),
        v_batch=v[0],
        v_head=v[1],
        v_line=v[2],
        v_across=int(v_across),
        y_batch=y[0],
        y_head=y[1],
        y_row=y[2],
        mask_batch=mask[0],
        mask_head=mask[1],
        mask_row=mask[2],
        mask_key=mask[3],
        k_panel=of.panel(across=k_across),
        v_panel=of.panel(across=not v_across),
        scale=r.scale,
        causal=int(r.causal),
        offset=r.offset,
        keys_block=block,
        panels=together,
        scratch=scratch,
        scratch_bytes=scratch.nbytes,
        k_pitch=k_pitch,
        v_pitch=v_pitch,
        zero_unseen=int(r.zero_unseen),
    )


def _few(r: Request, of: Tiles, mask: Sequence[int]) -> bool:
    """Return whether so few queries look at each key that they are rows, not a panel."""
    lie = r.v.steps[3] == 1 and 1 in (r.k.steps[2], r.k.steps[3]) and mask[3] in (0, 1)
    return _rows(r) <= of.width // 4 and lie and (r.mask is None or mask[3] == 1)


def _rows(r: Request) -> int:
    """Return how many queries look at the same key: of one query, all heads that share it."""
    _, heads, queries, _ = r.q.sizes
    return queries if queries > 1 or _hides(r) else heads // r.k.sizes[1]


def _hides(r: Request) -> bool:
    """Return whether there is a key that the first query must not see."""
    return r.causal and r.offset + 1 < r.k.sizes[2]


def _emit_few(low: Lowering, r: Request, of: Tiles, mask: Sequence[int]) -> None:
    """Emit the step of an attention of few queries."""
    batch, heads, queries, depth = r.q.sizes
    _, shared, keys, values = r.v.sizes
    q, out, rows, group = list(r.q.steps), list(r.out.steps), _rows(r), heads // shared
    mask = list(mask)
    if queries < rows:
        # Heads that share keys look at them as queries do.
        for steps in (q, out, mask):
            steps[1:3] = [steps[1] * rows, steps[1]]
        heads, group = shared, 1
    scratch = low.scratch((rows * round_up(keys, of.lanes) + rows) * of.item, per_worker=True)
    q, k, v, out, mask = (
        [step * of.item for step in steps] for steps in (q, r.k.steps, r.v.steps, out, mask)
    )
    arguments = FewQueriesArguments(
        q=r.q.operand,
        k=r.k.operand,
        v=r.v.operand,
        y=r.out.operand,
        mask=r.mask or 0,
        queries=rows,
        keys=keys,
        key_size=depth,
        value_size=values,
        heads=heads,
        sharing=group,
        q_batch=q[0],
        q_head=q[1],
        q_row=q[2],
        k_batch=k[0],
        k_head=k[1],
        k_row=k[2],
        k_element=k[3],
        v_batch=v[0],
        v_head=v[1],
        v_row=v[2],
        v_element=v[3],
        y_batch=out[0],
        y_head=out[1],
        y_row=out[2],
        mask_batch=mask[0],
        mask_head=mask[1],
        mask_row=mask[2],
        mask_key=mask[3],
        scale=r.scale,
        causal=int(_hides(r)),
        offset=r.offset,
        scratch=scratch,
        scratch_bytes=scratch.nbytes,
        zero_unseen=int(r.zero_unseen),
    )
    flops = 2 * batch * heads * rows * keys * (depth + values)
    moved = _moved(r, of)
    low.emit(
        Kernel(
            "subgraph.ops.attention.row_kernels",
            "few_queries",
            dtype=of.dtype,
            lanes=of.lanes,
            across=r.k.steps[3] != 1,
        ),
        arguments,
        batch * heads,
        grain=grain(batch * heads, flops + 2 * moved),
        flops=flops,
        bytes=moved,
    )


def _block(of: Tiles, keys: int) -> int:
    """Return the keys of a block: equal blocks of whole tiles."""
    if not of.low:
        return min(_KEYS, keys)
    blocks = -(-keys // _KEYS_LOW)
    return min(round_up(-(-keys // blocks), of.mr), keys)


def _panels(of: Tiles, panels: int, others: int, threads: int, elements: int) -> int:
    """Return the panels of queries of a unit: equal units, enough of them for all threads.

    ``elements`` is what a panel holds; those of a unit fill a part of the second cache.
    """
    if not of.low:
        return 1
    most = max(1, host.caches().l2 // 4 // (elements * of.item))
    pieces = -(-panels // most)
    if threads > 1:
        pieces = max(pieces, min(panels, -(-4 * threads // others)))
    return -(-panels // pieces)


def _lines(heads: Heads) -> tuple[int, int, int]:
    """Return the strides of batch, head and line, a line being adjacent elements."""
    batch, head, position, element = heads.steps
    return batch, head, position if element == 1 else element


def _copied(of: Tiles, heads: Heads, block: int, together: int) -> int:
    """Return the bytes between the lines of a copy of a block, 0 where it is read in place."""
    positions = heads.steps[3] == 1
    length = heads.sizes[3] if positions else block
    step = _lines(heads)[2] * of.item
    if step % 2048 and (not of.low or together < 2 or step == length * of.item):
        return 0
    # An odd number of cache lines apart, they spread over all sets.
    return 64 * (-(-length * of.item // 64) | 1)


def _moved(r: Request, of: Tiles) -> int:
    operands = [r.q.operand, r.k.operand, r.v.operand, r.out.operand]
    return of.item * sum(operand.size for operand in operands)
