"""Panels: register tiles that compute all rows of a product in one call.

Attention multiplies a block of keys, and then of values, with a panel of queries. These sums are so
short that calling a contraction tile (`tile`) for every few rows takes a sixth of their time. A
panel loads its fields once. Its operands have the layout of attention: B and C are rows of
``vectors`` vectors without gaps, and in A either the steps or the rows are adjacent elements. The
order of additions is that of a contraction tile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from subgraph.dtypes import item_bytes
from subgraph.engine.codegen.argument_views import view_of
from subgraph.engine.codegen.emit import Emit, Sums
from subgraph.engine.codegen.strip import most_rows, next_tiles, strip_sizes
from subgraph.engine.codegen.tile import size_switch
from subgraph.engine.codegen.tiling import FEW_ROWS, TileBlock

# Steps of an iteration, whose operands are at constant offsets from two registers, and the same for
# tiles of more than FEW_ROWS rows, whose steps are long enough (estimates).
_UNROLL = 8
_UNROLL_MANY_ROWS = 2


class _Panel(Sums):
    """Emits adjacent tiles of ``rows`` rows times ``vectors`` vectors.

    Args:
        e: The emitter.
        t: Address of the `TileBlock`.
        rows: Rows of a tile.
        vectors: Vectors of a row.
        across: As in `panel`.
    """

    def __init__(self, e: Emit, t: Any, rows: int, vectors: int, across: bool) -> None:
        super().__init__(e, rows, vectors)
        self.rows, self.vectors, self.across = rows, vectors, across
        self.row = vectors * e.lanes * e.item
        names = ("a", "a_row", "b", "c", "start", "start_row", "steps", "row_bias")
        self.w = {name: e.word(t, name) for name in names}
        line = self.w["a_row"]
        if across:
            self.step, self.offsets = line, [e.const(i * e.item) for i in range(rows)]
        # x86's addressing modes reach 8 multiples of a few registers; taller tiles compute each
        # offset.
        elif rows <= 8:
            self.step, self.offsets = e.const(e.item), e.multiples(line, rows)
        else:
            self.step, self.offsets = (
                e.const(e.item),
                [e.b.mul(line, e.const(i)) for i in range(rows)],
            )

    def run(self, count: Any) -> None:
        """Emit ``count`` tiles."""
        e, b, w = self.e, self.e.b, self.w
        a, c, bias = (e.variable(w[name]) for name in ("a", "c", "row_bias"))
        height = e.const(self.rows)
        below = b.mul(e.const(e.item) if self.across else w["a_row"], height)
        with e.loop(count):
            self.sums(e.get(a))
            self.finish(e.get(c), e.get(bias))
            e.step(a, below)
            e.step(c, e.const(self.rows * self.row))
            with e.when(self.is_set(e.get(bias))):
                e.step(bias, e.const(self.rows * e.item))

    def is_set(self, word: Any) -> Any:
        """Return whether (i1) a field is not 0."""
        return self.e.b.icmp_signed("!=", word, self.e.const(0))

    def sums(self, first: Any) -> None:
        """Emit the sums of a tile whose A begins at ``first``: unrolled, then the remainder."""
        e, b = self.e, self.e.b
        self.each(lambda i, j, v: e.fconst(0.0))
        a, right = e.variable(first), e.variable(self.w["b"])
        unroll = _UNROLL if self.rows <= FEW_ROWS else _UNROLL_MANY_ROWS
        for steps, rounds in (
            (unroll, b.ashr(self.w["steps"], e.const(unroll.bit_length() - 1))),
            (1, b.and_(self.w["steps"], e.const(unroll - 1))),
        ):
            with e.loop(rounds):
                e.put(a, self.round(e.get(a), e.get(right), steps))
                e.step(right, e.const(steps * self.row))

    def round(self, a: Any, right: Any, steps: int) -> Any:
        """Emit ``steps`` steps at two addresses; return the address of A after them."""
        e, b = self.e, self.e.b
        # Otherwise LLVM derives each address from the previous one, a dependent chain that is as
        # long as that of the sums.
        a, right = e.opaque(a), e.opaque(right)
        for k in range(steps):
            at = k * self.row
            size = e.lanes * e.item
            vectors = [e.load(b.add(right, e.const(at + j * size))) for j in range(self.vectors)]
            for i in range(self.rows):
                ahead = 0 if self.across else k * e.item
                x = e.broadcast(b.add(b.add(a, self.offsets[i]), e.const(ahead)))
                for j in range(self.vectors):
                    e.put(self.acc[i][j], e.fma(x, vectors[j], e.get(self.acc[i][j])))
                e.fence()
            if self.across:
                a = b.add(a, self.step)
        return a if self.across else b.add(a, e.const(steps * e.item))

    def finish(self, c: Any, bias: Any) -> None:
        """Emit the epilogue of the tile at ``c``: row bias, accumulation into C, stores."""
        e, b, w = self.e, self.e.b, self.w
        size = e.lanes * e.item

        def at(i: int, j: int) -> Any:
            return b.add(c, e.const(i * self.row + j * size))

        with e.when(self.is_set(bias)):
            for i in range(self.rows):
                x = e.broadcast(b.add(bias, e.const(i * e.item)))
                for j in range(self.vectors):
                    e.put(self.acc[i][j], b.fadd(e.get(self.acc[i][j]), x))
                e.fence()  # otherwise LLVM loads the biases of all rows first, and spills them
        with e.when(self.is_set(w["start_row"])):
            self.each(lambda i, j, v: b.fadd(e.load(at(i, j)), v))
        with e.when(self.is_set(w["start"])):
            factors = [e.load(b.add(w["start"], e.const(j * size))) for j in range(self.vectors)]
            self.each(lambda i, j, v: e.fma(e.load(at(i, j)), factors[j], v))
        for i in range(self.rows):
            for j in range(self.vectors):
                e.store(e.get(self.acc[i][j]), at(i, j))


def panel(*, dtype: str, lanes: int, mr: int, nv: int, across: bool) -> Callable[..., None]:
    """Return the kernel that computes ``rows x vectors`` vectors of ``C = A B``.

    Its arguments are ``(address of a TileBlock, rows, vectors, 0)``. It reads ``a``, ``b``, ``c``
    and ``steps`` as a contraction tile does, advances ``a``, ``c`` and ``row_bias`` past the rows,
    and uses

    * ``a_row``: bytes between the rows of A; with ``across``, between its steps,
    * ``row_bias``: address of one element per row that is added; 0 for none,
    * ``start_row``: 1 to add the sums to C, 0 to overwrite C,
    * ``start``: address of ``vectors`` vectors: the sums are added to C times these; 0 for none.

    Args:
        dtype: ``"float32"`` or ``"float64"``.
        lanes: Elements of a vector.
        mr: Most rows of a tile of ``nv`` vectors; one of fewer vectors has more.
        nv: Most vectors of a row.
        across: Whether the rows of A are adjacent elements; otherwise its steps are.
    """
    item, block = item_bytes(dtype), view_of(TileBlock)

    def emit(e: Emit, t: Any, rows: int, vectors: int, count: Any) -> None:
        _Panel(e, t, rows, vectors, across).run(count)

    name = "panel_across" if across else "panel"
    tiles = size_switch(name, dtype, lanes, strip_sizes(mr, nv), emit)

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        t = block(args)
        left, most = begin, most_rows(mr, nv, end)
        line = item if across else t.a_row
        while left > 0:
            rows, count = next_tiles(left, most)
            tiles(args, rows, end, count)
            done = rows * count
            left -= done
            t.a = t.a + done * line
            t.c = t.c + done * end * lanes * item
            if t.row_bias != 0:
                t.row_bias = t.row_bias + done * item

    return kernel
