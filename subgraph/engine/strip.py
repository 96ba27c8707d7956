"""Strips: contraction tiles that walk along a row of pixels by themselves.

For a sum over few channels, calling a tile costs as much as its multiplications: words to read,
addresses to derive, loops to set up. A strip does that once for a whole row of outputs. What a
contraction tile (``tile.py``) reads from its words is a constant here: rows of A lie ``step``
elements apart, ``steps`` products follow one another without gaps in A and in B, and rows of C and
of the residual are whole vectors side by side. The order of additions is that of a contraction
tile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic, register_jitable

from subgraph.engine.tile import Emit, arg, item_bytes, private_function, put, rows_of
from subgraph.engine.tiling import (
    F_HI,
    F_LO,
    T_A,
    T_B,
    T_C,
    T_CJS,
    T_FLAGS,
    T_HI,
    T_INIT,
    T_IRS,
    T_KLAST,
    T_LO,
    T_N0,
    T_N2,
    T_RES,
    T_SA0,
    T_SA2,
    T_SB0,
    T_SB2,
)

_I64 = ir.IntType(64)


def _most(mr: int, nv: int, vectors: int) -> int:
    """Return the most rows of a tile of so many vectors: enough sums to hide their latency."""
    return mr if vectors == nv else max(mr, min(8, mr * nv // vectors))


most_rows = register_jitable(_most)


class _Strip:
    """Emits the function of one height: ``count`` tiles of ``rows`` pixels, one after another."""

    def __init__(self, e: Emit, t: Any, rows: int, nv: int, step: int, steps: int) -> None:
        self.e, self.t, self.rows, self.nv = e, t, rows, nv
        self.row_bytes, self.steps = step * e.item, steps
        self.vector = e.lanes * e.item
        self.acc = [[e.variable(e.fconst(0.0)) for _ in range(nv)] for _ in range(rows)]
        self.across = e.word(t, T_CJS)
        # Fences would have them read again for every tile.
        names = (T_B, T_N0, T_SA0, T_SB0, T_N2, T_SA2, T_SB2, T_KLAST)
        self.w = {name: e.word(t, name) for name in names}

    def run(self, count: Any) -> None:
        """Emit the tiles."""
        e, t = self.e, self.t
        a, c = e.variable(e.word(t, T_A)), e.variable(e.word(t, T_C))
        res = e.variable(e.word(t, T_RES))
        init, going_on = e.word(t, T_INIT), e.word(t, T_IRS)
        flags, low, high = e.word(t, T_FLAGS), e.word_splat(t, T_LO), e.word_splat(t, T_HI)
        moved = e.const(self.rows * self.vector)
        with e.loop(count):
            self.start(init, going_on, e.get(c))
            self.sums(e.get(a))
            with e.when(e.b.icmp_signed("!=", e.get(res), e.const(0))):
                self.each(lambda i, j, v: e.b.fadd(e.load(self.at(e.get(res), i, j)), v))
                e.step(res, moved)
            with e.when(e.flag(flags, F_LO)):
                self.each(lambda i, j, v: e.b.select(e.b.fcmp_ordered(">", low, v), low, v))
            with e.when(e.flag(flags, F_HI)):
                self.each(lambda i, j, v: e.b.select(e.b.fcmp_ordered("<", high, v), high, v))
            for i in range(self.rows):
                for j in range(self.nv):
                    e.store(e.get(self.acc[i][j]), self.at(e.get(c), i, j))
            e.step(a, e.const(self.rows * self.row_bytes))
            e.step(c, moved)

    def at(self, base: Any, i: int, j: int) -> Any:
        """Return the address of vector (i, j) of C or of the residual."""
        b, e = self.e.b, self.e
        return b.add(b.add(base, b.mul(self.across, e.const(j))), e.const(i * self.vector))

    def each(self, change: Callable[[int, int, Any], Any]) -> None:
        """Replace every accumulator."""
        for i in range(self.rows):
            for j in range(self.nv):
                self.e.put(self.acc[i][j], change(i, j, self.e.get(self.acc[i][j])))

    def start(self, init: Any, going_on: Any, c: Any) -> None:
        """Begin the sums: with zeros, with one bias for all rows, or with what C holds."""
        e, b = self.e, self.e.b
        self.each(lambda i, j, v: e.fconst(0.0))
        with e.when(b.icmp_signed("!=", init, e.const(0))):
            bias = [e.load(b.add(init, e.const(j * self.vector))) for j in range(self.nv)]
            self.each(lambda i, j, v: bias[j])
        with e.when(b.icmp_signed("!=", going_on, e.const(0))):
            self.each(lambda i, j, v: e.load(self.at(c, i, j)))

    def sums(self, first: Any) -> None:
        """Emit the sums of one tile: rounds of ``steps`` products, then those of the last block."""
        e, word = self.e, self.w
        at_a, at_b = e.variable(first), e.variable(word[T_B])
        with e.loop(word[T_N0]):
            a, w = e.variable(e.get(at_a)), e.variable(e.get(at_b))
            with e.loop(word[T_N2]):
                self.round(e.get(a), e.get(w), self.steps)
                e.step(a, word[T_SA2])
                e.step(w, word[T_SB2])
            if self.steps == e.lanes:
                with e.when(e.b.icmp_signed("!=", word[T_KLAST], e.const(0))):
                    self.rest(a, w, word[T_KLAST])
            e.step(at_a, word[T_SA0])
            e.step(at_b, word[T_SB0])

    def rest(self, a: Any, w: Any, count: Any) -> None:
        """Emit fewer products than a block has channels."""
        e = self.e
        part = e.lanes // 2
        while part:
            with e.when(e.flag(count, part)):
                self.round(e.get(a), e.get(w), part)
                e.step(a, e.const(part * e.item))
                e.step(w, e.const(part * self.nv * self.vector))
            part //= 2

    def round(self, a: Any, w: Any, steps: int) -> None:
        """Emit some products: all addresses are constants from two registers."""
        e, b = self.e, self.e.b
        a, w = e.opaque(a), e.opaque(w)
        for k in range(steps):
            at = k * self.nv * self.vector
            right = [e.load(b.add(w, e.const(at + j * self.vector))) for j in range(self.nv)]
            for i in range(self.rows):
                x = e.broadcast(b.add(a, e.const(i * self.row_bytes + k * e.item)))
                for j in range(self.nv):
                    e.put(self.acc[i][j], e.fma(x, right[j], e.get(self.acc[i][j])))
                e.fence()


def strip(
    *, dtype: str, lanes: int, mr: int, nv: int, step: int, steps: int
) -> Callable[..., None]:
    """Return the kernel that computes a row of outputs from the words of its first tile.

    Its arguments are ``(address of the T_* words, pixels, vectors, 0)``. It reads of the words
    what a contraction tile does, but T_ARS, T_AKS, T_KIN, T_N1 and what belongs to it, T_CRS, the
    strides of the residual, which are those of C, and T_IJS; T_IRS only tells whether the sums go
    on from what C holds. T_A, T_C and T_RES are changed. With T_KLAST there is one round less, and
    that many products follow; only where a round is a block of channels.

    Args:
        dtype: ``"float32"`` or ``"float64"``.
        lanes: Elements of one vector.
        mr: Most rows of a tile of ``nv`` vectors, at most 8; one of fewer vectors has more.
        nv: Most vectors of a row.
        step: Elements between rows of A.
        steps: Products of a round of the inner loop.
    """
    item = item_bytes(dtype)

    def define(module: Any, rows: int, vectors: int) -> Any:
        name = f"strip_{dtype}_{lanes}_{step}_{steps}_{rows}x{vectors}"
        function = private_function(module, name, 2)
        builder = ir.IRBuilder(function.append_basic_block("entry"))
        e = Emit(builder, dtype, lanes)
        _Strip(e, function.args[0], rows, vectors, step, steps).run(function.args[1])
        builder.ret_void()
        return function

    @intrinsic
    def tiles(typingctx: Any, block: Any, rows: Any, vectors: Any, count: Any) -> tuple[Any, Any]:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            most = _most(mr, nv, 1) + 1
            index = builder.add(builder.mul(args[2], _I64(most)), args[1])
            done = builder.append_basic_block("strip_done")
            switch = builder.switch(index, done)
            for v in range(1, nv + 1):
                for r in range(1, _most(mr, nv, v) + 1):
                    function = define(builder.module, r, v)
                    case = builder.append_basic_block("strip")
                    switch.add_case(_I64(v * most + r), case)
                    with builder.goto_block(case):
                        builder.call(function, [args[0], args[3]])
                        builder.branch(done)
            builder.position_at_end(done)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 4), codegen

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        left, most = begin, most_rows(mr, nv, end)
        while left > 0:
            rows, count = rows_of(left, most), 1
            if left % most == 0:
                rows, count = most, left // most
            elif left > 2 * most:
                rows, count = most, left // most - 1
            tiles(args, rows, end, count)
            done = rows * count
            left -= done
            put(args, T_A, arg(args, T_A) + done * step * item)
            put(args, T_C, arg(args, T_C) + done * lanes * item)
            if arg(args, T_RES) != 0:
                put(args, T_RES, arg(args, T_RES) + done * lanes * item)

    return kernel
