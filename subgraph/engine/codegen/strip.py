"""Strips: register tiles that compute a whole row of output pixels in one call.

If the sum runs over few channels, calling a contraction tile (`tile`) costs as much as its
multiplications: fields are loaded, addresses computed, loops set up. A strip does that once per row
of outputs. Strides that a contraction tile reads from its block are constants here: rows of A
(pixels) are ``step`` elements apart, ``steps`` products follow each other without gaps in A and B,
and rows of C and of the residual are adjacent whole vectors.

A *strip* broadcasts elements of A, for convolutions over blocked channels; *windows* multiply
element by element, for depthwise convolutions. The order of additions is that of the tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from numba.extending import register_jitable

from subgraph.dtypes import item_bytes
from subgraph.engine.codegen.argument_views import view_of
from subgraph.engine.codegen.bfloat16 import emit_bfloat16, emit_load_bfloat16
from subgraph.engine.codegen.emit import Emit, Sums
from subgraph.engine.codegen.irtools import store_at
from subgraph.engine.codegen.tile import Prefetcher, size_switch
from subgraph.engine.codegen.tiling import (
    TileBlock,
    row_counts,
    tile_run,
)


def _most(mr: int, nv: int, vectors: int) -> int:
    """Return the most rows of a tile of ``vectors`` vectors.

    A tile of fewer than ``nv`` vectors has more rows than ``mr``, up to 8, so that it has as many
    independent sums to hide the latency of FMA.
    """
    return mr if vectors == nv else max(mr, min(8, mr * nv // vectors))


most_rows, next_tiles = register_jitable(_most), register_jitable(tile_run)


def strip_sizes(mr: int, nv: int) -> list[tuple[int, int]]:
    """Return the sizes (rows, vectors) of the tiles that are compiled for a strip."""
    return [(r, v) for v in range(1, nv + 1) for r in row_counts(_most(mr, nv, v))]


class _Tiles(Sums):
    """The parts of strips and windows that do not depend on the sums.

    Args:
        e: The emitter.
        t: Address of the `TileBlock`.
        rows: Pixels of a tile.
        nv: Vectors of a pixel.
        names: Fields of the block that `w` has besides those that are used here.
    """

    def __init__(self, e: Emit, t: Any, rows: int, nv: int, names: Sequence[str]) -> None:
        super().__init__(e, rows, nv)
        self.rows, self.nv = rows, nv
        self.vector = e.lanes * e.item
        # Loaded once, here: a fence keeps LLVM from reusing a value loaded before it.
        self.w = {name: e.word(t, name) for name in ("start", "start_row", "c_vector", *names)}
        self.flags, self.low, self.high = (
            e.word(t, "flags"),
            e.word_splat(t, "low"),
            e.word_splat(t, "high"),
        )

    def tile(self, c: Any, res: Any, sums: Callable[[], None]) -> None:
        """Emit one tile: initial values, sums, residual, bounds, stores.

        Args:
            c: Address of the tile's outputs.
            res: Address of its residual; 0 for none.
            sums: Emits the sums.
        """
        e, b = self.e, self.e.b
        self.start(c)
        sums()
        with e.when(b.icmp_signed("!=", res, e.const(0))):
            self.each(lambda i, j, v: b.fadd(e.load(self.at(res, i, j)), v))
        self.bound(self.flags, lambda: self.low, lambda: self.high)
        for i in range(self.rows):
            for j in range(self.nv):
                self.store(e.get(self.acc[i][j]), self.at(c, i, j))

    def store(self, value: Any, address: Any) -> None:
        """Store a vector of C."""
        self.e.store(value, address)

    def at(self, base: Any, i: int, j: int) -> Any:
        """Return the address of vector j of pixel i, of C or of the residual at ``base``."""
        b, e = self.e.b, self.e
        return b.add(b.add(base, b.mul(self.w["c_vector"], e.const(j))), e.const(i * self.vector))

    def start(self, c: Any) -> None:
        """Set the accumulators to C if `start_row` is not 0, else to a bias or zeros."""
        e, b, init = self.e, self.e.b, self.w["start"]
        self.each(lambda i, j, v: e.fconst(0.0))
        with e.when(b.icmp_signed("!=", init, e.const(0))):
            bias = [e.load(b.add(init, e.const(j * self.vector))) for j in range(self.nv)]
            self.each(lambda i, j, v: bias[j])
        with e.when(b.icmp_signed("!=", self.w["start_row"], e.const(0))):
            self.each(lambda i, j, v: e.load(self.at(c, i, j)))


class _Strip(_Tiles):
    """Emits a strip, for one size of tile; arguments as of `strip`."""

    def __init__(
        self, e: Emit, t: Any, rows: int, nv: int, step: int, steps: int, ahead: bool
    ) -> None:
        loops = ("outer_count", "outer_a", "outer_b", "inner_count", "inner_a", "inner_b")
        super().__init__(e, t, rows, nv, ("a", "b", "c", "residual", *loops, "last_steps"))
        self.t, self.row_bytes, self.steps = t, step * e.item, steps
        self.fetch = Prefetcher(e, t, nv * self.vector) if ahead else None

    def run(self, count: Any) -> None:
        """Emit ``count`` adjacent tiles."""
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
            # The tiles of the next call, of another height, continue the prefetches.
            self.fetch.store_position(self.t)

    def sums(self, first: Any) -> None:
        """Emit the loops of a tile's sums, whose A begins at ``first``."""
        e, word = self.e, self.w
        at_a, at_b = e.variable(first), e.variable(word["b"])
        with e.loop(word["outer_count"]):
            a, w = e.variable(e.get(at_a)), e.variable(e.get(at_b))
            with e.loop(word["inner_count"]):
                self.round(e.get(a), e.get(w), self.steps)
                e.step(a, word["inner_a"])
                e.step(w, word["inner_b"])
            # Only sums over blocks of channels have a block that is not full.
            if self.steps == e.lanes:
                self.rest(a, w, word["last_steps"])
            e.step(at_a, word["outer_a"])
            e.step(at_b, word["outer_b"])

    def rest(self, a: Any, w: Any, count: Any) -> None:
        """Emit ``count`` products one by one, those of a block that is not full."""
        e = self.e
        with e.loop(count):
            self.round(e.get(a), e.get(w), 1)
            e.step(a, e.const(e.item))
            e.step(w, e.const(self.nv * self.vector))

    def round(self, a: Any, w: Any, steps: int) -> None:
        """Emit ``steps`` products, with all addresses at constant offsets from two registers."""
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
                e.fence_values(self.acc[i])


class _Windows(_Tiles):
    """Emits windows, for one size of tile; arguments as of `windows`.

    Each pixel is loaded once for all outputs whose window it is in; with groups of channels, once
    per channel of a group, whose element is copied to all lanes of its group.
    """

    def __init__(
        self,
        e: Emit,
        t: Any,
        rows: int,
        taps: int,
        step: int,
        group: int,
        storage: str,
        source: str,
    ) -> None:
        operands = ("a", "a_row", "b", "c", "c_row", "residual")
        loops = ("outer_count", "middle_count", "inner_count", "middle_a", "middle_b")
        super().__init__(e, t, rows, 1, (*operands, *loops, "left", "right", "zeros"))
        self.taps, self.step, self.group = taps, step, group
        self.storage, self.source = storage, source

    def store(self, value: Any, address: Any) -> None:
        """Store a vector of C in the dtype in which results are stored."""
        if self.storage:
            store_at(self.e.b, address, emit_bfloat16(self.e.b, value), 2)
        else:
            super().store(value, address)

    def run(self, count: Any) -> None:
        """Emit the tiles of ``count`` rows; the last tile of a row may overlap the previous one."""
        e, b, word = self.e, self.e.b, self.w
        row, c_row, res_row = (e.variable(word[name]) for name in ("a", "c", "residual"))
        outputs = e.const(self.rows * self.vector)
        with e.loop(count):
            at = e.variable(e.const(0))  # bytes of outputs before the tile
            with e.loop(word["outer_count"]) as left:
                ends = b.icmp_signed("==", left, e.const(1))
                # The last tile begins so far back that it is full: it overlaps the previous one and
                # stores the same values again, so that all tiles of a row have one height.
                here = b.select(ends, word["inner_count"], e.get(at))
                before = b.sub(word["left"], self.passed(here))
                after = b.sub(word["right"], self.passed(b.sub(word["inner_count"], here)))
                a = b.add(e.get(row), b.mul(here, e.const(self.step)))
                res = e.get(res_row)
                # 0 means that there is no residual, so that it must stay 0.
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
        """Return the pixels of A between two windows whose outputs are ``outputs`` bytes apart."""
        b, e = self.e.b, self.e
        return b.mul(b.sdiv(outputs, e.const(self.vector)), e.const(self.step))

    def sums(self, first: Any, before: Any, after: Any) -> None:
        """Emit the sums over the rows of a window.

        Args:
            first: Address of A for the tile's first output.
            before: Pixels from there that lie outside the image; may be negative.
            after: The same from the last pixel of the tile's last window backwards.
        """
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
        """Emit the products of one row of pixels and one channel of each group.

        Args:
            row: Address of the first pixel.
            channel: Index of the channel in its group.
            weights: The ``taps`` vectors of weights.
            before: As in `sums`.
            after: As in `sums`.
        """
        e = self.e
        pixels = (self.rows - 1) * self.step + self.taps
        for p in range(pixels):
            users = [i for i in range(self.rows) if 0 <= p - i * self.step < self.taps]
            # With strides above the window's size, some pixels are in no window.
            if not users:
                continue
            at = self.pixel(row, p, pixels - 1 - p, before, after)
            value = emit_load_bfloat16(e.b, at) if self.source else e.load(at)
            if self.group > 1:
                picks = [lane - lane % self.group + channel for lane in range(e.lanes)]
                value = e.shuffle(value, picks)
            for i in users:
                total = e.fma(value, weights[p - i * self.step], e.get(self.acc[i][0]))
                e.put(self.acc[i][0], total)
            e.fence()

    def pixel(self, row: Any, p: int, from_end: int, before: Any, after: Any) -> Any:
        """Return the address of a pixel, or of zeros if it lies outside the image.

        Args:
            row: Address of pixel 0.
            p: Index of the pixel.
            from_end: Its index from the last pixel backwards.
            before: As in `sums`.
            after: As in `sums`.
        """
        e, b = self.e, self.e.b
        at = b.add(row, e.const(p * self.vector))
        # At most half a window lies outside at each end, so that other pixels need no comparison.
        if p < self.taps // 2:
            at = b.select(b.icmp_signed(">", before, e.const(p)), self.w["zeros"], at)
        if from_end < self.taps // 2:
            at = b.select(b.icmp_signed(">", after, e.const(from_end)), self.w["zeros"], at)
        return at


def strip(
    *, dtype: str, lanes: int, mr: int, nv: int, step: int, steps: int, ahead: bool = False
) -> Callable[..., None]:
    """Return the kernel that computes a row of outputs.

    Its arguments are ``(address of a TileBlock, pixels, vectors, 0)``. The fields have the meaning
    that they have for a contraction tile, with these differences:

    * ``a_row``, ``a_step``, ``steps``, ``c_row``, ``start_vector`` and the middle loop are not
      read; the residual has the strides of C.
    * ``start_row``: not 0 if the sums continue from C, which they then replace.
    * ``last_steps``: products that follow the inner loop; only if ``steps`` is ``lanes``.
    * ``a``, ``c``, ``residual`` and, with prefetches, ``ahead`` are advanced past the row.

    Args:
        dtype: ``"float32"`` or ``"float64"``.
        lanes: Elements of a vector.
        mr: Most rows of a tile of ``nv`` vectors, at most 8; one of fewer vectors has more.
        nv: Most vectors of a row.
        step: Elements between rows (pixels) of A.
        steps: Products of one iteration of the inner loop.
        ahead: Whether to prefetch the memory at `TileBlock.ahead` into the L2 cache meanwhile.
    """
    item, block = item_bytes(dtype), view_of(TileBlock)

    def emit(e: Emit, t: Any, rows: int, vectors: int, count: Any) -> None:
        _Strip(e, t, rows, vectors, step, steps, ahead).run(count)

    tiles = size_switch(f"strip_{step}_{steps}", dtype, lanes, strip_sizes(mr, nv), emit)

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        t = block(args)
        most = most_rows(mr, nv, end)
        left = (begin + most - 1) // most  # tiles
        rows = (begin + left - 1) // max(left, 1)
        count = begin - left * (rows - 1)
        while left > 0:
            # Tiles have two heights that differ by one row, so that none is so low that it waits
            # for the latency of its sums.
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
    *,
    dtype: str,
    lanes: int,
    mr: int,
    taps: int,
    step: int,
    group: int = 1,
    storage: str = "",
    source: str = "",
) -> Callable[..., None]:
    """Return the kernel that computes rows of a depthwise convolution, or of one with small groups.

    Its arguments are ``(address of a TileBlock, pixels of a tile, rows, 0)``. Fields are used as in
    `strip`, with these differences:

    * ``middle_count`` rows of A, ``middle_a`` bytes apart, are multiplied with as many rows of
      weights, ``middle_b`` bytes apart. Output i of a row is the sum over the window of ``taps``
      pixels that begins at pixel ``i * step``.
    * Rows of outputs are ``a_row`` bytes apart in A, and ``c_row`` in C and the residual.
    * ``outer_count`` tiles make a row; the last one begins ``inner_count`` bytes into the outputs.
    * The first ``left`` and the last ``right`` pixels of a row, at most ``taps // 2`` each, lie
      outside the image; the vector at ``zeros`` is read instead.

    Args:
        dtype: ``"float32"`` or ``"float64"``.
        lanes: Elements of a vector.
        mr: Most pixels of a tile, at most 8.
        taps: Pixels of a window.
        step: Pixels between windows.
        group: Channels of a group; it divides ``lanes``. A row of weights has ``taps`` vectors for
            each channel of a group.
        storage: ``"bfloat16"`` if vectors of C, of 16 elements, are stored so: pixels are as many
            bytes apart as in float32. ``""`` if in ``dtype``.
        source: ``"bfloat16"`` if vectors of A are stored so, likewise.
    """

    def emit(e: Emit, t: Any, rows: int, vectors: int, count: Any) -> None:
        _Windows(e, t, rows, taps, step, group, storage, source).run(count)

    sizes = [(r, 1) for r in range(1, mr + 1)]
    tiles = size_switch(f"windows_{taps}_{step}_{group}", dtype, lanes, sizes, emit)

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        tiles(args, begin, 1, end)

    return kernel
