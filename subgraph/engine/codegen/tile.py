"""Register tiles: the micro-kernels of GEMM and convolution, emitted as LLVM vector IR.

A *contraction tile* computes ``mr`` rows times ``nv`` vectors of ``C = epilogue(start + sum AB)``
with all accumulators in registers, as the micro-kernel of BLIS does. A step of the sum broadcasts
one element of each row of A and multiplies it with ``nv`` vectors of B. The sum runs over four
nested loops whose strides are run-time values (`TileBlock`), so that one compiled tile serves GEMM
with any transposition, direct, 1x1, grouped, dilated, first-layer and transposed convolution, and
the point-wise products of Winograd's algorithm. A *depthwise tile* multiplies element by element.

A kernel fills in a `subgraph.engine.codegen.tiling.TileBlock` and calls the tile through the
address of ``Kernel("subgraph.engine.codegen.tile", "contraction", ...)``. Tiles are compiled as
kernels of their own, once for all kernels that call them: one function for each size up to
``mr x nv``, and a switch that calls it.

The order of additions of an output element does not depend on the size of the tile that computes
it, so that results do not depend on how work is divided.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba.extending import register_jitable

from subgraph.engine.codegen.emit import Emit, Sums, private_function
from subgraph.engine.codegen.irtools import (
    I16,
    I64,
    INT64,
    VOID,
    define,
    half_to_f32,
    load_at,
    zeroed_stack,
)
from subgraph.engine.codegen.tiling import (
    FEW_ROWS,
    row_counts,
    tile_rows,
)

rows_of = register_jitable(tile_rows)


_UNROLL = 2  # steps of one iteration of the general loop (estimate); `TileBlock.pace` is for two
# Steps of a depthwise tile whose weights are in registers at the same time (estimate).
_TAPS = 4
_LINE = 64  # bytes of a cache line


class Prefetcher:
    """Emits prefetches into the L2 cache: `TileBlock.pace` bytes at `ahead` per two steps.

    What is prefetched is read after the tile, such as the next panel of B.
    """

    def __init__(self, e: Emit, t: Any, step_bytes: int) -> None:
        """Load the fields.

        Args:
            e: The emitter.
            t: Address of the tile's block.
            step_bytes: Bytes of B that one step reads.
        """
        self.e, self.ahead = e, e.variable(e.word(t, "ahead"))
        # A step that reads more than a line prefetches as many lines: to skip some of them costs
        # more than to prefetch all.
        self.lines = max(1, step_bytes // _LINE)
        self.every = 2 if self.lines == 1 else 1
        pace = e.word(t, "pace")
        self.pace = pace if self.every == 2 else e.b.ashr(pace, e.const(1))

    def run(self, step: int) -> None:
        """Emit the prefetches of a step; ``step`` is its index in an unrolled iteration."""
        if step % self.every:
            return
        e, at = self.e, self.e.get(self.ahead)
        for line in range(self.lines):
            e.prefetch(e.b.add(at, e.const(line * _LINE)), near=False)
        e.step(self.ahead, self.pace)

    def store_position(self, t: Any) -> None:
        """Store the address that the prefetches have reached back into the block."""
        self.e.put_word(t, "ahead", self.e.get(self.ahead))


class _Tile(Sums):
    """The parts that all tiles share: the loops, initial values, epilogue and stores.

    Args:
        e: The emitter.
        t: Address of the `TileBlock`.
        mr: Rows of this tile.
        nv: Vectors of a row of this tile.
        masked: Whether the last vector of a row has `TileBlock.tail` elements only.
        ahead: Whether steps prefetch the memory at `TileBlock.ahead`.
        weights: ``"bfloat16"`` or ``"float16"`` if B is stored so; "" for the tile's dtype.
        squares: Whether sums are of squares of differences instead of products.

    Attributes:
        w: Fields of the block that are loaded once.
        dense: Whether (i1) the steps of A, and the vectors and steps of B, follow each other
            without gaps.
    """

    def __init__(
        self,
        e: Emit,
        t: Any,
        mr: int,
        nv: int,
        masked: bool,
        ahead: bool = False,
        weights: str = "",
        squares: bool = False,
    ) -> None:
        self.t, self.mr, self.nv = t, mr, nv
        self.weights, self.squares = weights, squares
        self.right_bytes = e.lanes * (2 if weights else e.item)  # a vector of B
        self.fetch = Prefetcher(e, t, nv * self.right_bytes) if ahead else None
        self.w = {name: e.word(t, name) for name in _LOOP_WORDS}
        self.mask = e.tail_mask(e.word(t, "tail")) if masked else None
        b, vector = e.b, self.right_bytes
        # One comparison tests all three strides: the differences are combined bit by bit, and are 0
        # only if every stride is that of an operand without gaps.
        gaps = b.or_(
            b.xor(self.w["a_step"], e.const(e.item)),
            b.or_(
                b.xor(self.w["b_step"], e.const(nv * vector)),
                b.xor(self.w["b_vector"], e.const(vector)),
            ),
        )
        self.dense = b.icmp_signed("==", gaps, e.const(0))
        # The accumulators come last, as the order of slots decides which registers LLVM assigns.
        super().__init__(e, mr, nv)

    def at(self, base: Any, rows: Any, columns: Any, i: int, j: int) -> Any:
        """Return the address of vector j of row i.

        Args:
            base: Address of vector 0 of row 0.
            rows: Bytes between rows.
            columns: Bytes between vectors.
            i: Row.
            j: Vector.
        """
        b, e = self.e.b, self.e
        row = b.add(base, b.mul(rows, e.const(i)))
        return b.add(row, b.mul(columns, e.const(j)))

    def lane_mask(self, j: int) -> Any:
        """Return the mask of vector j of a row; None if all its lanes exist."""
        return self.mask if j == self.nv - 1 else None

    def right(self, address: Any, j: int) -> Any:
        """Load vector j of a step of B, in the dtype of the tile."""
        if not self.weights:
            return self.e.load(address, self.lane_mask(j))
        # Packed weights are padded to whole vectors, so that no mask is needed.
        bits = load_at(self.e.b, address, ir.VectorType(I16, self.e.lanes), 2)
        return half_to_f32(self.e.b, bits, self.weights)

    def add(self, i: int, j: int, x: Any, y: Any) -> None:
        """Add the product of two vectors, or the square of their difference, to a sum."""
        e = self.e
        if self.squares:
            x = y = e.b.fsub(x, y)
        e.put(self.acc[i][j], e.fma(x, y, e.get(self.acc[i][j])))

    def start(self) -> None:
        """Set the accumulators to their initial values if `TileBlock.start` is set."""
        e, t = self.e, self.t
        init = e.word(t, "start")
        with e.when(e.b.icmp_signed("!=", init, e.const(0))):
            irs, ijs = e.word(t, "start_row"), e.word(t, "start_vector")
            self.each(lambda i, j, v: e.load(self.at(init, irs, ijs, i, j), self.lane_mask(j)))

    def prefetch_outputs(self) -> None:
        """Prefetch the residual and C, which `finish` accesses after the loops."""
        e, t = self.e, self.t
        res = e.word(t, "residual")
        with e.when(e.b.icmp_signed("!=", res, e.const(0))):
            rrs, rjs = e.word(t, "residual_row"), e.word(t, "residual_vector")
            for i in range(self.mr):
                for j in range(self.nv):
                    e.prefetch(self.at(res, rrs, rjs, i, j))
        for i in range(self.mr):
            for j in range(self.nv):
                e.prefetch(
                    self.at(self.w["c"], self.w["c_row"], self.w["c_vector"], i, j), write=True
                )

    def loops(
        self,
        k_step: Callable[[Any, Any], None],
        unrolled: Callable[[Any, Any, Any], Any] | None = None,
    ) -> None:
        """Emit the four loops.

        Args:
            k_step: ``k_step(a, b)`` emits one step at two addresses.
            unrolled: ``unrolled(at_a, at_b, steps)`` emits a faster loop over some steps
                where it can, advances the address variables, and returns the number of steps left.
        """
        e, t, b, w = self.e, self.t, self.e.b, self.w
        a0, b0 = e.variable(e.word(t, "a")), e.variable(e.word(t, "b"))
        last = e.word(t, "last_steps")
        last = b.select(b.icmp_signed("==", last, e.const(0)), w["steps"], last)
        with e.loop(e.word(t, "outer_count")) as left:
            kin = b.select(b.icmp_signed("==", left, e.const(1)), last, w["steps"])
            a1, b1 = e.variable(e.get(a0)), e.variable(e.get(b0))
            with e.loop(e.word(t, "middle_count")):
                a2, b2 = e.variable(e.get(a1)), e.variable(e.get(b1))
                with e.loop(e.word(t, "inner_count")):
                    a3, b3 = e.variable(e.get(a2)), e.variable(e.get(b2))
                    rest = unrolled(a3, b3, kin) if unrolled else kin
                    with e.loop(b.ashr(rest, e.const(_UNROLL.bit_length() - 1))):
                        av, bv = e.get(a3), e.get(b3)
                        for number in range(_UNROLL):
                            self.prefetch_step(number)
                            k_step(av, bv)
                            av = b.add(av, w["a_step"])
                            bv = b.add(bv, w["b_step"])
                        e.put(a3, av)
                        e.put(b3, bv)
                    # The remainder does not prefetch: `TileBlock.pace` is for two steps.
                    with e.loop(b.and_(rest, e.const(_UNROLL - 1))):
                        k_step(e.get(a3), e.get(b3))
                        e.step(a3, w["a_step"])
                        e.step(b3, w["b_step"])
                    e.step(a2, e.word(t, "inner_a"))
                    e.step(b2, e.word(t, "inner_b"))
                e.step(a1, e.word(t, "middle_a"))
                e.step(b1, e.word(t, "middle_b"))
            e.step(a0, e.word(t, "outer_a"))
            e.step(b0, e.word(t, "outer_b"))

    def prefetch_step(self, step: int) -> None:
        """Emit the prefetches of a step, if the tile prefetches; see `Prefetcher.run`."""
        if self.fetch is not None:
            self.fetch.run(step)

    def dense_steps(
        self, at_a: Any, at_b: Any, steps: Any, dense_step: Callable[[Any, Any, int], None]
    ) -> Any:
        """Emit the steps of operands without gaps, unrolled to a block of ``lanes`` channels.

        Args:
            at_a: Variable with the address of A, which is advanced.
            at_b: Variable with the address of B, which is advanced.
            steps: Number of steps.
            dense_step: ``dense_step(a, b, number)`` emits step ``number`` from a pair of addresses.

        Returns:
            The number of steps left: 0, or all if the operands have gaps.
        """
        e, b = self.e, self.e.b
        count = b.select(self.dense, steps, e.const(0))

        def run(unroll: int) -> None:
            # Otherwise LLVM derives each address from the previous one, a dependent chain that is
            # as long as that of the sums.
            av, bv = e.opaque(e.get(at_a)), e.opaque(e.get(at_b))
            for number in range(unroll):
                # A single step does not prefetch: `TileBlock.pace` is for two steps.
                if unroll > 1:
                    self.prefetch_step(number)
                dense_step(av, bv, number)
            e.put(at_a, b.add(av, e.const(unroll * e.item)))
            e.put(at_b, b.add(bv, e.const(unroll * self.nv * self.right_bytes)))

        with e.loop(b.ashr(count, e.const(e.lanes.bit_length() - 1))):
            run(e.lanes)
        with e.when(e.flag(count, e.lanes - 1)):
            # The remainder is the sum of some powers of two, each of which is emitted once, without
            # a loop.
            left = e.lanes // 2
            while left:
                with e.when(e.flag(count, left)):
                    run(left)
                left //= 2
        return b.sub(steps, count)

    def finish(self) -> None:
        """Emit the epilogue: add the row bias and the residual, apply the bounds, store C."""
        e, t, b = self.e, self.t, self.e.b
        rbias = e.word(t, "row_bias")
        with e.when(b.icmp_signed("!=", rbias, e.const(0))):
            rows = [e.broadcast(b.add(rbias, e.const(i * e.item))) for i in range(self.mr)]
            self.each(lambda i, j, v: b.fadd(v, rows[i]))
        res = e.word(t, "residual")
        with e.when(b.icmp_signed("!=", res, e.const(0))):
            rrs, rjs = e.word(t, "residual_row"), e.word(t, "residual_vector")
            self.each(
                lambda i, j, v: b.fadd(e.load(self.at(res, rrs, rjs, i, j), self.lane_mask(j)), v)
            )
        flags = e.word(t, "flags")
        self.bound(flags, lambda: e.word_splat(t, "low"), lambda: e.word_splat(t, "high"))
        c, crs, cjs = self.w["c"], self.w["c_row"], self.w["c_vector"]
        for i in range(self.mr):
            for j in range(self.nv):
                value = e.get(self.acc[i][j])
                e.store(value, self.at(c, crs, cjs, i, j), self.lane_mask(j))


def _emit_contraction(tile: _Tile) -> None:
    """Emit a contraction tile of one size."""
    e, b, w, acc, mr, nv = tile.e, tile.e.b, tile.w, tile.acc, tile.mr, tile.nv
    # The prefetches come first, so that the lines have arrived when the epilogue reads them after
    # the loops.
    tile.prefetch_outputs()
    tile.start()

    def k_step(a: Any, at_b: Any) -> None:
        vectors = [tile.right(b.add(at_b, b.mul(w["b_vector"], e.const(j))), j) for j in range(nv)]
        base = a  # recomputed every third row: x86 addresses base + stride * 1 or 2 in one operand
        for i in range(mr):
            if i and i % 3 == 0:
                base = b.add(a, b.mul(w["a_row"], e.const(i)))
            x = e.broadcast(b.add(base, b.mul(w["a_row"], e.const(i % 3))))
            for j in range(nv):
                tile.add(i, j, x, vectors[j])
            e.fence_values(acc[i])

    # Taller tiles need several address registers for a step (`FEW_ROWS`).
    few_rows = mr <= FEW_ROWS
    offsets = e.multiples(w["a_row"], mr) if few_rows else []

    def dense_step(a: Any, at_b: Any, number: int) -> None:
        step = number * nv * tile.right_bytes
        offsets_b = [e.const(step + j * tile.right_bytes) for j in range(nv)]
        vectors = [tile.right(b.add(at_b, offset), j) for j, offset in enumerate(offsets_b)]
        for i in range(mr):
            x = e.broadcast(b.add(b.add(a, offsets[i]), e.const(number * e.item)))
            for j in range(nv):
                tile.add(i, j, x, vectors[j])
            e.fence_values(acc[i])

    def dense_steps(at_a: Any, at_b: Any, steps: Any) -> Any:
        return tile.dense_steps(at_a, at_b, steps, dense_step)

    tile.loops(k_step, dense_steps if few_rows else None)
    tile.finish()


def _emit_depthwise(tile: _Tile) -> None:
    """Emit a depthwise tile of one size; see `depthwise`."""
    e, b, w, acc, mr = tile.e, tile.e.b, tile.w, tile.acc, tile.mr
    tile.start()

    def k_step(a: Any, at_b: Any) -> None:
        weight = e.load(at_b, tile.lane_mask(0))
        base = a
        for i in range(mr):
            if i and i % 3 == 0:
                base = b.add(a, b.mul(w["a_row"], e.const(i)))
            x = e.load(b.add(base, b.mul(w["a_row"], e.const(i % 3))), tile.lane_mask(0))
            e.put(acc[i][0], e.fma(x, weight, e.get(acc[i][0])))

    def windows(at_a: Any, at_b: Any, steps: Any) -> Any:
        """Emit steps in groups of `_TAPS` if rows and steps of A are adjacent vectors.

        Then row i at step k reads the pixel of row i + 1 at step k - 1: each pixel is loaded once
        for all rows that use it. The kernel `strip.windows` does that for 3, 5 and 7 taps. With
        AVX2, 31 taps take 0.75 and 9 x 9 taps 0.88 of the time of single steps.
        """
        vector = e.lanes * e.item
        gaps = [b.xor(w[name], e.const(vector)) for name in ("a_row", "a_step", "b_step")]
        beside = b.icmp_signed("==", b.or_(b.or_(gaps[0], gaps[1]), gaps[2]), e.const(0))
        rounds = b.select(beside, b.ashr(steps, e.const(_TAPS.bit_length() - 1)), e.const(0))
        with e.loop(rounds):
            a, at = e.opaque(e.get(at_a)), e.opaque(e.get(at_b))
            weights = [e.load(b.add(at, e.const(k * vector))) for k in range(_TAPS)]
            for p in range(mr + _TAPS - 1):
                x = e.load(b.add(a, e.const(p * vector)))
                for i in range(max(0, p - _TAPS + 1), min(mr, p + 1)):
                    e.put(acc[i][0], e.fma(x, weights[p - i], e.get(acc[i][0])))
                e.fence()
            e.put(at_a, b.add(a, e.const(_TAPS * vector)))
            e.put(at_b, b.add(at, e.const(_TAPS * vector)))
        return b.sub(steps, b.mul(rounds, e.const(_TAPS)))

    # `windows` loads whole vectors, which a masked tile must not.
    tile.loops(k_step, windows if tile.mask is None else None)
    tile.finish()


# The fields that tiles load once, before their loops.
_LOOP_WORDS = ("a_row", "a_step", "b_step", "b_vector", "steps", "c", "c_row", "c_vector")


def contraction(
    *,
    dtype: str,
    lanes: int,
    mr: int,
    nv: int,
    masked: bool,
    ahead: bool = False,
    weights: str = "",
    squares: bool = False,
) -> Callable[..., None]:
    """Return the kernel that computes one contraction tile.

    Its arguments are not a kernel's usual ones but ``(address of a TileBlock, rows, vectors, 0)``
    with rows from `row_counts` and ``1 <= vectors <= nv``.

    Args:
        dtype: ``"float32"`` or ``"float64"``.
        lanes: Elements of a vector.
        mr: Most rows of a tile.
        nv: Most vectors of a row of a tile.
        masked: Whether the last vector of each row has `TileBlock.tail` elements only.
        ahead: Whether to prefetch the memory at `TileBlock.ahead` into the L2 cache meanwhile.
        weights: ``"bfloat16"`` or ``"float16"`` if B is stored so and is converted in registers,
            for packed B only; "" for ``dtype``.
        squares: Whether to sum squares of differences instead of products.
    """

    def emit(e: Emit, t: Any, rows: int, vectors: int, _count: Any) -> None:
        _emit_contraction(_Tile(e, t, rows, vectors, masked, ahead, weights, squares))

    sizes = [(rows, vectors) for vectors in range(1, nv + 1) for rows in row_counts(mr)]
    name = "masked_tile" if masked else "tile"
    return tile_kernel(size_switch(name, dtype, lanes, sizes, emit))


def depthwise(*, dtype: str, lanes: int, mr: int, masked: bool) -> Callable[..., None]:
    """Return the kernel that computes one depthwise tile: pixels times a vector of channels.

    It is called like `contraction`, with 1 for ``vectors``. A step multiplies the vector of each
    row of A, at ``a + row * a_row``, element by element with the vector of B.

    Args:
        dtype: ``"float32"`` or ``"float64"``.
        lanes: Elements of a vector.
        mr: Most rows (pixels) of a tile.
        masked: Whether only `TileBlock.tail` channels exist.
    """

    def emit(e: Emit, t: Any, rows: int, _vectors: int, _count: Any) -> None:
        _emit_depthwise(_Tile(e, t, rows, 1, masked))

    sizes = [(rows, 1) for rows in row_counts(mr)]
    name = "masked_depthwise" if masked else "depthwise"
    return tile_kernel(size_switch(name, dtype, lanes, sizes, emit))


def tile_kernel(tiles: Any) -> Callable[..., None]:
    """Return the kernel ``(address of the block, rows, vectors, 0)`` that computes one tile.

    Args:
        tiles: The tiles by size, as `size_switch` returns them.
    """

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        tiles(args, begin, end, worker)

    return kernel


def size_switch(
    name: str,
    dtype: str,
    lanes: int,
    sizes: Sequence[tuple[int, int]],
    emit: Callable[[Emit, Any, int, int, Any], None],
) -> Any:
    """Return the intrinsic ``(block, rows, vectors, count)`` that calls the function of a size.

    Args:
        name: Stem of the functions' names.
        dtype: Element dtype of the emitter's vectors.
        lanes: Elements of a vector.
        sizes: Pairs (rows, vectors) for which functions are compiled.
        emit: ``emit(e, t, rows, vectors, count)`` emits the function of a size; t is the address of
            the block.
    """

    def function_of(module: Any, rows: int, vectors: int) -> Any:
        function = private_function(module, f"{name}_{dtype}_{lanes}_{rows}x{vectors}", 2)
        builder = ir.IRBuilder(function.append_basic_block("entry"))
        emit(Emit(builder, dtype, lanes), function.args[0], rows, vectors, function.args[1])
        builder.ret_void()
        return function

    def select(builder: Any, _context: Any, args: Sequence[Any]) -> None:
        # Rows and vectors together make one index, so that one jump table selects the function.
        most = max(rows for rows, _ in sizes) + 1
        index = builder.add(builder.mul(args[2], I64(most)), args[1])
        done = builder.append_basic_block("tile_done")
        # A size that was not compiled does nothing; kernels take their sizes from `row_counts`.
        switch = builder.switch(index, done)
        for r, v in sizes:
            function = function_of(builder.module, r, v)
            case = builder.append_basic_block("tile")
            switch.add_case(I64(v * most + r), case)
            with builder.goto_block(case):
                builder.call(function, [args[0], args[3]])
                builder.branch(done)
        builder.position_at_end(done)

    return define(VOID, [INT64] * 4, select)


def stack_words(count: int) -> Any:
    """Return the intrinsic ``() -> address`` of ``count`` words of 0 on the kernel's stack."""
    return define(INT64, [], lambda b, c, a: zeroed_stack(b, count))
