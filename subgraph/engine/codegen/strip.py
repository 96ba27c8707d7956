"""Strips: contraction tiles that walk along a row of pixels by themselves.

For a sum over few channels, calling a tile costs as much as its multiplications: words to read,
addresses to derive, loops to set up. A strip does that once for a whole row of outputs. What a
contraction tile (``tile.py``) reads from its words is a constant here: rows of A lie ``step``
elements apart, ``steps`` products follow one another without gaps in A and in B, and rows of C and
of the residual are whole vectors side by side. The order of additions is that of a contraction
tile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic, register_jitable

from subgraph.dtypes import item_bytes
from subgraph.engine.codegen.argument_views import view_of
from subgraph.engine.codegen.emit import Emit, private_function
from subgraph.engine.codegen.tile import Fetch
from subgraph.engine.codegen.tiling import (
    F_HI,
    F_LO,
    TileBlock,
    row_counts,
    tile_run,
)

_I64 = ir.IntType(64)


def _most(mr: int, nv: int, vectors: int) -> int:
    """Return the most rows of a tile of so many vectors: enough sums to hide their latency."""
    return mr if vectors == nv else max(mr, min(8, mr * nv // vectors))


most_rows, run_of = register_jitable(_most), register_jitable(tile_run)


def strip_sizes(mr: int, nv: int) -> list[tuple[int, int]]:
    """Return the rows and vectors of the tiles of strips."""
    return [(r, v) for v in range(1, nv + 1) for r in row_counts(_most(mr, nv, v))]


class _Tiles:
    """Emits a function over tiles of ``rows`` pixels times ``nv`` vectors, one after another."""

    def __init__(self, e: Emit, t: Any, rows: int, nv: int, names: Sequence[str]) -> None:
        self.e, self.rows, self.nv = e, rows, nv
        self.vector = e.lanes * e.item
        self.acc = [[e.variable(e.fconst(0.0)) for _ in range(nv)] for _ in range(rows)]
        # Fences would have words read again for every tile.
        self.w = {name: e.word(t, name) for name in ("start", "start_row", "c_vector", *names)}
        self.flags, self.low, self.high = (
            e.word(t, "flags"),
            e.word_splat(t, "low"),
            e.word_splat(t, "high"),
        )

    def tile(self, c: Any, res: Any, sums: Callable[[], None]) -> None:
        """Emit a tile of outputs at ``c``: start values, sums, residual, bounds, stores."""
        e, b = self.e, self.e.b
        self.start(c)
        sums()
        with e.when(b.icmp_signed("!=", res, e.const(0))):
            self.each(lambda i, j, v: b.fadd(e.load(self.at(res, i, j)), v))
        with e.when(e.flag(self.flags, F_LO)):
            self.each(lambda i, j, v: b.select(b.fcmp_ordered(">", self.low, v), self.low, v))
        with e.when(e.flag(self.flags, F_HI)):
            self.each(lambda i, j, v: b.select(b.fcmp_ordered("<", self.high, v), self.high, v))
        for i in range(self.rows):
            for j in range(self.nv):
                e.store(e.get(self.acc[i][j]), self.at(c, i, j))

    def at(self, base: Any, i: int, j: int) -> Any:
        """Return the address of vector (i, j) of C or of the residual."""
        b, e = self.e.b, self.e
        return b.add(b.add(base, b.mul(self.w["c_vector"], e.const(j))), e.const(i * self.vector))

    def each(self, change: Callable[[int, int, Any], Any]) -> None:
        """Replace every accumulator."""
        for i in range(self.rows):
            for j in range(self.nv):
                self.e.put(self.acc[i][j], change(i, j, self.e.get(self.acc[i][j])))

    def start(self, c: Any) -> None:
        """Begin the sums: with zeros, with one bias for all rows, or with what C holds."""
        e, b, init = self.e, self.e.b, self.w["start"]
        self.each(lambda i, j, v: e.fconst(0.0))
        with e.when(b.icmp_signed("!=", init, e.const(0))):
            bias = [e.load(b.add(init, e.const(j * self.vector))) for j in range(self.nv)]
            self.each(lambda i, j, v: bias[j])
        with e.when(b.icmp_signed("!=", self.w["start_row"], e.const(0))):
            self.each(lambda i, j, v: e.load(self.at(c, i, j)))


class _Strip(_Tiles):
    """Sums over broadcast elements of A times vectors of B."""

    def __init__(
        self, e: Emit, t: Any, rows: int, nv: int, step: int, steps: int, ahead: bool
    ) -> None:
        loops = ("outer_count", "outer_a", "outer_b", "inner_count", "inner_a", "inner_b")
        super().__init__(e, t, rows, nv, ("a", "b", "c", "residual", *loops, "last_steps"))
        self.t, self.row_bytes, self.steps = t, step * e.item, steps
        self.fetch = Fetch(e, t, nv * self.vector) if ahead else None

    def run(self, count: Any) -> None:
        """Emit ``count`` tiles of a row."""
        e = self.e
        a, c, res = (e.variable(self.w[name]) for name in ("a", "c", "residual"))
        moved = e.const(self.rows * self.vector)
        with e.loop(count):
            self.tile(e.get(c), e.get(res), lambda: self.sums(e.get(a)))
            e.step(a, e.const(self.rows * self.row_bytes))
            e.step(c, moved)
            with e.when(e.b.icmp_signed("!=", e.get(res), e.const(0))):
                e.step(res, moved)
        if self.fetch is not None:
            self.fetch.keep(self.t)

    def sums(self, first: Any) -> None:
        """Emit rounds of ``steps`` products, then those of the last block."""
        e, word = self.e, self.w
        at_a, at_b = e.variable(first), e.variable(word["b"])
        with e.loop(word["outer_count"]):
            a, w = e.variable(e.get(at_a)), e.variable(e.get(at_b))
            with e.loop(word["inner_count"]):
                self.round(e.get(a), e.get(w), self.steps)
                e.step(a, word["inner_a"])
                e.step(w, word["inner_b"])
            if self.steps == e.lanes:
                self.rest(a, w, word["last_steps"])
            e.step(at_a, word["outer_a"])
            e.step(at_b, word["outer_b"])

    def rest(self, a: Any, w: Any, count: Any) -> None:
        """Emit fewer products than a block has channels, one by one."""
        e = self.e
        with e.loop(count):
            self.round(e.get(a), e.get(w), 1)
            e.step(a, e.const(e.item))
            e.step(w, e.const(self.nv * self.vector))

    def round(self, a: Any, w: Any, steps: int) -> None:
        """Emit some products: all addresses are constants from two registers."""
        e, b = self.e, self.e.b
        a, w = e.opaque(a), e.opaque(w)
        for k in range(steps):
            at = k * self.nv * self.vector
            if self.fetch is not None:
                self.fetch.run(k)
            right = [e.load(b.add(w, e.const(at + j * self.vector))) for j in range(self.nv)]
            for i in range(self.rows):
                x = e.broadcast(b.add(a, e.const(i * self.row_bytes + k * e.item)))
                for j in range(self.nv):
                    e.put(self.acc[i][j], e.fma(x, right[j], e.get(self.acc[i][j])))
                e.hold(self.acc[i])


class _Windows(_Tiles):
    """Sums over rows of ``taps`` vectors, each pixel loaded once for all the outputs it is in.

    With a ``group`` of channels that is once for each of them: its element in all lanes of a group.
    """

    def __init__(self, e: Emit, t: Any, rows: int, taps: int, step: int, group: int) -> None:
        operands = ("a", "a_row", "b", "c", "c_row", "residual")
        loops = ("outer_count", "middle_count", "inner_count", "middle_a", "middle_b")
        super().__init__(e, t, rows, 1, (*operands, *loops, "left", "right", "zeros"))
        self.taps, self.step, self.group = taps, step, group

    def run(self, count: Any) -> None:
        """Emit the tiles of ``count`` rows; the last of a row may do again what others did."""
        e, b, word = self.e, self.e.b, self.w
        row, c_row, res_row = (e.variable(word[name]) for name in ("a", "c", "residual"))
        outputs = e.const(self.rows * self.vector)
        with e.loop(count):
            at = e.variable(e.const(0))  # bytes of outputs before the tile
            with e.loop(word["outer_count"]) as left:
                ends = b.icmp_signed("==", left, e.const(1))
                here = b.select(ends, word["inner_count"], e.get(at))
                before = b.sub(word["left"], self.passed(here))
                after = b.sub(word["right"], self.passed(b.sub(word["inner_count"], here)))
                a = b.add(e.get(row), b.mul(here, e.const(self.step)))
                res = e.get(res_row)
                moved = b.select(b.icmp_signed("!=", res, e.const(0)), here, e.const(0))
                self.tile(
                    b.add(e.get(c_row), here),
                    b.add(res, moved),
                    partial(self.sums, a, before, after),
                )
                e.step(at, outputs)
            e.step(row, word["a_row"])
            e.step(c_row, word["c_row"])
            with e.when(b.icmp_signed("!=", e.get(res_row), e.const(0))):
                e.step(res_row, word["c_row"])

    def passed(self, outputs: Any) -> Any:
        """Return the pixels between windows so many bytes of outputs apart."""
        b, e = self.e.b, self.e
        return b.mul(b.sdiv(outputs, e.const(self.vector)), e.const(self.step))

    def sums(self, first: Any, before: Any, after: Any) -> None:
        """Emit the kernel rows; pixels outside the image, at the ends of a row, are zeros."""
        e, b, word = self.e, self.e.b, self.w
        x, w = e.variable(first), e.variable(word["b"])
        row = self.taps * self.vector
        with e.loop(word["middle_count"]):
            for channel in range(self.group):
                at = b.add(e.get(w), e.const(channel * row))
                weights = [e.load(b.add(at, e.const(j * self.vector))) for j in range(self.taps)]
                self.channel(e.get(x), channel, weights, before, after)
            e.step(x, word["middle_a"])
            e.step(w, word["middle_b"])

    def channel(
        self, row: Any, channel: int, weights: Sequence[Any], before: Any, after: Any
    ) -> None:
        """Emit the products of a row's pixels, of one channel of each group."""
        e = self.e
        pixels = (self.rows - 1) * self.step + self.taps
        for p in range(pixels):
            users = [i for i in range(self.rows) if 0 <= p - i * self.step < self.taps]
            if not users:
                continue
            value = e.load(self.pixel(row, p, pixels - 1 - p, before, after))
            if self.group > 1:
                picks = [lane - lane % self.group + channel for lane in range(e.lanes)]
                value = e.shuffle(value, picks)
            for i in users:
                total = e.fma(value, weights[p - i * self.step], e.get(self.acc[i][0]))
                e.put(self.acc[i][0], total)
            e.fence()

    def pixel(self, row: Any, p: int, from_end: int, before: Any, after: Any) -> Any:
        """Return the address of pixel p of a row, or that of zeros where it lies outside."""
        e, b = self.e, self.e.b
        at = b.add(row, e.const(p * self.vector))
        if p < self.taps // 2:
            at = b.select(b.icmp_signed(">", before, e.const(p)), self.w["zeros"], at)
        if from_end < self.taps // 2:
            at = b.select(b.icmp_signed(">", after, e.const(from_end)), self.w["zeros"], at)
        return at


def strip(
    *, dtype: str, lanes: int, mr: int, nv: int, step: int, steps: int, ahead: bool = False
) -> Callable[..., None]:
    """Return the kernel that computes a row of outputs from the words of its first tile.

    Its arguments are ``(address of a TileBlock, pixels, vectors, 0)``. It reads the fields that a
    contraction tile does, but ``a_row``, ``a_step``, ``steps``, those of the middle loop,
    ``c_row``, the strides of the residual, which are those of C, and ``start_vector``;
    ``start_row`` only says whether the sums go on from what C holds. ``a``, ``c`` and ``residual``
    are changed. With ``last_steps`` there is one round less, and that many products follow; only
    where a round is a block of channels.

    Args:
        dtype: ``"float32"`` or ``"float64"``.
        lanes: Elements of one vector.
        mr: Most rows of a tile of ``nv`` vectors, at most 8; one of fewer vectors has more.
        nv: Most vectors of a row.
        step: Elements between rows of A.
        steps: Products of a round of the inner loop.
        ahead: Bring what lies at `ahead` into the second cache meanwhile; it is moved on.
    """
    item, block = item_bytes(dtype), view_of(TileBlock)

    def emit(e: Emit, t: Any, rows: int, vectors: int, count: Any) -> None:
        _Strip(e, t, rows, vectors, step, steps, ahead).run(count)

    tiles = switch(f"strip_{step}_{steps}", dtype, lanes, strip_sizes(mr, nv), emit)

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        t = block(args)
        most = most_rows(mr, nv, end)
        left = (begin + most - 1) // most  # tiles
        rows = (begin + left - 1) // max(left, 1)
        count = begin - left * (rows - 1)
        while left > 0:
            # Tiles come in two heights that differ by one row: none waits for its sums.
            tiles(args, rows, end, count)
            done = rows * count
            t.a = t.a + done * step * item
            t.c = t.c + done * lanes * item
            if t.residual != 0:
                t.residual = t.residual + done * lanes * item
            left -= count
            rows, count = rows - 1, left

    return kernel


def windows(
    *, dtype: str, lanes: int, mr: int, taps: int, step: int, group: int = 1
) -> Callable[..., None]:
    """Return the kernel that computes rows of a depthwise convolution, or of one of small groups.

    Its arguments are ``(address of a TileBlock, pixels of a tile, rows, 0)``. In a row
    ``middle_count`` rows of A, ``middle_a`` bytes apart, meet as many rows of weights, ``middle_b``
    bytes apart; rows of outputs are ``a_row`` bytes apart in A, ``c_row`` in C and in the residual.
    Output i of a row is the window of ``taps`` pixels that begins at pixel ``i * step`` of A.
    ``outer_count`` tiles make a row; the last one begins ``inner_count`` bytes into it. Of the
    row's pixels the first ``left`` and the last ``right``, at most ``taps // 2``, lie outside the
    image and count as ``zeros``. Everything else is as in :func:`strip`.

    Args:
        dtype: ``"float32"`` or ``"float64"``.
        lanes: Elements of one vector.
        mr: Most pixels of a tile, at most 8.
        taps: Pixels of a window.
        step: Pixels between windows.
        group: Channels of a group, which divide a vector. All that are in it, one after another,
            have ``taps`` vectors of weights in a row.
    """

    def emit(e: Emit, t: Any, rows: int, vectors: int, count: Any) -> None:
        _Windows(e, t, rows, taps, step, group).run(count)

    sizes = [(r, 1) for r in range(1, mr + 1)]
    tiles = switch(f"windows_{taps}_{step}_{group}", dtype, lanes, sizes, emit)

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        tiles(args, begin, 1, end)

    return kernel


def switch(
    name: str,
    dtype: str,
    lanes: int,
    sizes: Sequence[tuple[int, int]],
    emit: Callable[[Emit, Any, int, int, Any], None],
) -> Any:
    """Return an intrinsic ``(words, rows, vectors, count)`` that calls the function of a size."""

    def define(module: Any, rows: int, vectors: int) -> Any:
        function = private_function(module, f"{name}_{dtype}_{lanes}_{rows}x{vectors}", 2)
        builder = ir.IRBuilder(function.append_basic_block("entry"))
        emit(Emit(builder, dtype, lanes), function.args[0], rows, vectors, function.args[1])
        builder.ret_void()
        return function

    @intrinsic
    def tiles(typingctx: Any, block: Any, rows: Any, vectors: Any, count: Any) -> tuple[Any, Any]:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            most = max(rows for rows, _ in sizes) + 1
            index = builder.add(builder.mul(args[2], _I64(most)), args[1])
            done = builder.append_basic_block("strip_done")
            switch = builder.switch(index, done)
            for r, v in sizes:
                function = define(builder.module, r, v)
                case = builder.append_basic_block("strip")
                switch.add_case(_I64(v * most + r), case)
                with builder.goto_block(case):
                    builder.call(function, [args[0], args[3]])
                    builder.branch(done)
            builder.position_at_end(done)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 4), codegen

    return tiles
