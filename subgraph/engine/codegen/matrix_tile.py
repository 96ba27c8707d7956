"""Matrix tiles: contraction tiles of bfloat16 (`subgraph.engine.codegen.matrix_registers`).

A contraction tile of two by two registers of sums loads four registers for four instructions.

Its arguments are a `TileBlock`, as those of `subgraph.engine.codegen.tile.contraction`. A step
along K has `MATRIX_DEPTH` elements, so that A is rows of bfloat16, padded to whole steps. B is a
sequence of registers: row r of one has, for each of 16 columns, the elements of rows 2 r and
2 r + 1. Initial values are float32, the same for all rows. Results and residuals are float32, too,
unless flags say that they are bfloat16 (`F_BFLOAT16_C`, `F_BFLOAT16_RESIDUAL`): the vectors of a
row are then adjacent. Masked tiles do not support these flags.

Rows of a register are independent: those beyond the rows of a tile are read, and may hold anything,
but are not stored. Subnormal elements count as 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from subgraph.engine.codegen.bfloat16 import emit_bfloat16, emit_load_bfloat16
from subgraph.engine.codegen.emit import Emit
from subgraph.engine.codegen.irtools import store_at
from subgraph.engine.codegen.matrix_registers import (
    LANES,
    ROW_BYTES,
    ROWS,
    PairSums,
    RegisterTile,
    RowRuns,
    pair_rows,
)
from subgraph.engine.codegen.tile import size_switch
from subgraph.engine.codegen.tiling import (
    F_BFLOAT16_C,
    F_BFLOAT16_RESIDUAL,
    F_HI,
    F_LO,
    MATRIX_DEPTH,
)
from subgraph.system import host

_NARROW_BYTES = 2 * LANES  # bytes of a vector of C that is rounded to bfloat16
_PACE_SHIFT = 7  # `TileBlock.pace` is for two steps, in bytes: cache lines of 64 bytes of one step
_LOOPS = ("outer", "middle", "inner")
# Emits the products of a step: address of A, address of B, whether the step is the last one.
_Step = Callable[[Any, Any, Any], None]


class _MatrixTile(RegisterTile):
    """Emits a contraction tile of bfloat16.

    Args:
        e: The emitter.
        t: Address of the `TileBlock`.
        rows: As in `RegisterTile`.
        vectors: As in `RegisterTile`.
        masked: Whether the last vector of a row has `TileBlock.tail` elements only.
    """

    def __init__(self, e: Emit, t: Any, rows: int, vectors: int, masked: bool) -> None:
        depth = e.word(t, "depth")
        whole = e.b.icmp_signed("==", depth, e.const(0))
        super().__init__(e, t, rows, vectors, e.b.select(whole, e.const(MATRIX_DEPTH), depth))
        self.mask = e.tail_mask(e.word(t, "tail")) if masked else None
        self.a_row = e.word(t, "a_row")
        self.a_register = e.word(t, "a_register")
        self.b_vector = e.word(t, "b_vector")
        self.ahead = e.variable(e.word(t, "ahead"))
        self.ahead_left = e.variable(e.b.ashr(e.word(t, "pace"), e.const(_PACE_SHIFT)))

    def step(self, a: Any, b: Any, _is_last: Any) -> None:
        """Emit the products of one step, whose operands begin at two addresses."""
        left = a, self.a_register, self.a_row
        right = b, self.b_vector, self.e.const(ROW_BYTES)
        self.multiply(left, right, self.registers.multiply)

    def fetch(self) -> None:
        """Emit the prefetches of a step into the L2 cache: half of `TileBlock.pace` bytes."""
        e = self.e
        with e.loop(e.get(self.ahead_left)):
            e.prefetch(e.get(self.ahead), near=False)
            e.step(self.ahead, e.const(ROW_BYTES))

    def loops(self, names: Sequence[str], a: Any, b: Any, step: _Step, is_last: Any = None) -> None:
        """Emit the loops ``names`` of the block and, inside them, that over the steps.

        Args:
            names: Names of loops, the outermost first.
            a: Variable with the address of A, which is advanced.
            b: Variable with the address of B, which is advanced.
            step: Emits the products of a step.
            is_last: Whether the outer loop is in its last iteration, LLVM i1.
        """
        e, t = self.e, self.t
        if not names:
            a_step, b_step = e.word(t, "a_step"), e.word(t, "b_step")
            with e.loop(e.word(t, "steps")) as left:
                is_end = e.b.icmp_signed("==", left, e.const(1))
                step(e.get(a), e.get(b), e.b.and_(is_last, is_end))
                self.fetch()
                e.step(a, a_step)
                e.step(b, b_step)
            return
        with e.loop(e.word(t, f"{names[0]}_count")) as left:
            if is_last is None:
                is_last = e.b.icmp_signed("==", left, e.const(1))
            self.loops(names[1:], e.variable(e.get(a)), e.variable(e.get(b)), step, is_last)
            e.step(a, e.word(t, f"{names[0]}_a"))
            e.step(b, e.word(t, f"{names[0]}_b"))

    def start(self) -> None:
        """Set the sums to the initial values, which all rows share, or to 0.

        A masked tile adds its initial values at the end, as a register is loaded in whole vectors.
        """
        e, b = self.e, self.e.b
        start, vector = e.word(self.t, "start"), e.word(self.t, "start_vector")
        if self.mask is not None:
            for _, _, register in self.each():
                self.registers.zero(register)
            return
        with b.if_else(b.icmp_signed("!=", start, e.const(0))) as (given, otherwise):
            with given:
                for _, j, register in self.each():
                    at = b.add(start, b.mul(vector, e.const(j)))
                    self.registers.load(register, at, e.const(0))
            with otherwise:
                for _, _, register in self.each():
                    self.registers.zero(register)

    def finish(self, rows: Any) -> None:
        """Emit the epilogue of ``rows`` (LLVM int64) rows: add, apply the bounds, store C."""
        e, t, b = self.e, self.t, self.e.b
        residual, c = e.word(t, "residual"), e.word(t, "c")
        if self.mask is not None:
            self.finish_rows(rows, self.stored_sums(), residual, c)
            return
        # Whole registers to which nothing is done are stored at once.
        left = b.xor(rows, e.const(self.rows * ROWS))
        for name in ("residual", "flags", "run_rows"):
            left = b.or_(left, e.word(t, name))
        with b.if_else(b.icmp_signed("==", left, e.const(0))) as (whole, otherwise):
            with whole:
                line, step = e.word(t, "c_row"), e.word(t, "c_vector")
                for i, j, register in self.each():
                    at = b.add(c, b.mul(step, e.const(j)))
                    at = b.add(at, b.mul(line, e.const(i * ROWS)))
                    self.registers.store(register, at, line)
            with otherwise:
                self.finish_rows(rows, self.stored_sums(), residual, c)

    def finish_rows(self, rows: Any, sums: Any, residual: Any, c: Any) -> None:
        """Emit the epilogue row by row.

        Args:
            rows: Rows, LLVM int64.
            sums: Address of their sums.
            residual: Address of the residual of the first row; 0: none.
            c: Address of the first row of C.
        """
        e, b = self.e, self.e.b
        epilogue = _Epilogue(self)
        residual, c = e.variable(residual), e.variable(c)
        with self.sum_rows(sums, rows) as own:
            places = (b.add(own, e.const(j * ROW_BYTES)) for j in range(self.vectors))
            values = [e.variable(e.load(at)) for at in places]
            epilogue.emit([values], e.get(residual), e.get(c))
            e.step(residual, epilogue.residual_row)
            e.step(c, epilogue.c_row)

    def lane_mask(self, j: int) -> Any:
        """Return the mask of vector j of a row; None if all its lanes exist."""
        return self.mask if j == self.vectors - 1 else None

    def emit(self, rows: Any) -> None:
        """Emit the whole tile of ``rows`` (LLVM int64) rows."""
        e, t = self.e, self.t
        self.start()
        self.loops(_LOOPS, e.variable(e.word(t, "a")), e.variable(e.word(t, "b")), self.step)
        self.finish(rows)


class _PairTile(_MatrixTile):
    """Emits the same tile by dot products of pairs, `pair_rows` or half as many rows at a time.

    Args:
        e: As in `_MatrixTile`.
        t: As in `_MatrixTile`.
        rows: As in `_MatrixTile`.
        vectors: As in `_MatrixTile`.
        masked: As in `_MatrixTile`.
        runs: Whether rows of A are runs of `TileBlock.run_rows`, between which rows of C have no
            gaps; otherwise they are registers of 16 rows.
    """

    def __init__(
        self, e: Emit, t: Any, rows: int, vectors: int, masked: bool, *, runs: bool
    ) -> None:
        super().__init__(e, t, rows, vectors, masked)
        self.has_runs = runs
        last, pairs = e.word(t, "last_depth"), self.registers.pairs
        is_whole = e.b.icmp_signed("==", last, e.const(0))
        self.last_pairs = e.b.select(is_whole, pairs, e.b.lshr(last, e.const(1)))

    def emit(self, rows: Any) -> None:
        """Emit the whole tile of ``rows`` (LLVM int64) rows."""
        e, t, b = self.e, self.t, self.e.b
        most = pair_rows(self.vectors)
        sums = self.room_for_sums(more=most)
        residual, c = (e.variable(e.word(t, name)) for name in ("residual", "c"))
        left, to, a = e.variable(rows), e.variable(sums), e.variable(e.word(t, "a"))
        runs = self.row_runs()
        epilogue = _Epilogue(self)
        whole_rows = e.variable(e.const(0))
        with e.while_positive(left):
            few = b.icmp_signed("<=", e.get(left), e.const(most // 2))
            with b.if_else(few) as (half, whole):
                with half:
                    # A single row, as in a step of a decoder, waits for B alone: with products of
                    # other rows between them, fewer loads of B are in flight.
                    is_alone = b.icmp_signed("==", rows, e.const(1))
                    with b.if_else(is_alone) as (alone, several):
                        with alone:
                            part, _ = self.products(1, runs, e.get(left), e.get(a))
                            self.store_sums(part, e.get(to))
                        with several:
                            part, _ = self.products(most // 2, runs, e.get(left), e.get(a))
                            self.store_sums(part, e.get(to))
                with whole:
                    part, behind = self.products(most, runs, e.get(left), e.get(a))
                    e.step(a, behind)
                    # Results of whole groups of rows are stored from registers.
                    is_full = b.icmp_signed(">=", e.get(left), e.const(most))
                    with b.if_else(is_full) as (stores, otherwise):
                        with stores:
                            epilogue.emit(part.by_row(), e.get(residual), e.get(c))
                            e.step(residual, b.mul(epilogue.residual_row, e.const(most)))
                            e.step(c, b.mul(epilogue.c_row, e.const(most)))
                            e.step(whole_rows, e.const(most))
                        with otherwise:
                            self.store_sums(part, e.get(to))
            # Only the first rows prefetch what the tile shall.
            e.put(self.ahead_left, e.const(0))
            e.step(to, e.const(most * self.vectors * ROW_BYTES))
            e.step(left, e.const(-most))
        done = b.mul(e.get(whole_rows), e.const(self.vectors * ROW_BYTES))
        rest = b.sub(rows, e.get(whole_rows))
        self.finish_rows(rest, b.add(sums, done), e.get(residual), e.get(c))

    def row_runs(self) -> RowRuns:
        """Return the runs of rows of A: those of an image, or those of registers."""
        e, t = self.e, self.t
        if self.has_runs:
            run, first, gap = (e.word(t, name) for name in ("run_rows", "first_run", "a_gap"))
        else:
            run = first = e.const(ROWS)
            gap = e.b.sub(self.a_register, e.b.mul(self.a_row, run))
        return RowRuns(e, self.a_row, run, first, gap, self.has_runs)

    def products(self, count: int, runs: RowRuns, rows: Any, a: Any) -> tuple[PairSums, Any]:
        """Emit the sums of a few rows.

        Args:
            count: Number of rows.
            runs: The rows of A.
            rows: Rows that exist, LLVM int64.
            a: Address of the first row of A, LLVM int64.

        Returns:
            The sums, and the bytes from the first row of A to the row behind.
        """
        e, t, b = self.e, self.t, self.e.b
        offsets, behind = runs.take(count, rows)
        part = PairSums(e, offsets, self.vectors, self.b_vector)
        start, vector = e.word(t, "start"), e.word(t, "start_vector")
        if self.mask is None:
            with e.when(b.icmp_signed("!=", start, e.const(0))):
                for _, j, slot in part.each():
                    e.put(slot, e.load(b.add(start, b.mul(vector, e.const(j)))))
        pairs, last = self.registers.pairs, self.last_pairs

        def step(at_a: Any, at_b: Any, is_last: Any) -> None:
            part.add(at_a, at_b, b.select(is_last, last, pairs))

        self.loops(_LOOPS, e.variable(a), e.variable(e.word(t, "b")), step)
        return part, behind

    def store_sums(self, part: PairSums, address: Any) -> None:
        """Store sums, rows adjacent."""
        e = self.e
        for i, j, slot in part.each():
            at = e.b.add(address, e.const((i * self.vectors + j) * ROW_BYTES))
            e.store(e.get(slot), at)


class _Epilogue:
    """Emits what a tile does to rows of sums: add, apply the bounds, store C.

    Args:
        tile: The tile.
    """

    def __init__(self, tile: _MatrixTile) -> None:
        e, t, b = tile.e, tile.t, tile.e.b
        self.tile, self.e = tile, e
        flags = e.word(t, "flags")
        self.low = b.select(e.flag(flags, F_LO), e.word_splat(t, "low"), e.fconst(float("-inf")))
        self.high = b.select(e.flag(flags, F_HI), e.word_splat(t, "high"), e.fconst(float("inf")))
        self.rounds = e.flag(flags, F_BFLOAT16_C)
        self.is_narrow = e.flag(flags, F_BFLOAT16_RESIDUAL)
        self.start, residual = e.word(t, "start"), e.word(t, "residual")
        self.has_start, self.has_residual = (
            b.icmp_signed("!=", address, e.const(0)) for address in (self.start, residual)
        )
        self.start_vector, self.residual_vector = (
            e.word(t, name) for name in ("start_vector", "residual_vector")
        )
        self.c_row, self.c_vector = e.word(t, "c_row"), e.word(t, "c_vector")
        row = e.word(t, "residual_row")
        self.residual_row = b.select(self.has_residual, row, e.const(0))

    def emit(self, rows: Sequence[Sequence[Any]], residual: Any, c: Any) -> None:
        """Emit the epilogue of some rows.

        Args:
            rows: Variables with the vectors of each row.
            residual: Address of the residual of the first row.
            c: Address of the first row of C.
        """
        e, b, masked = self.e, self.e.b, self.tile.mask is not None
        if masked:
            with e.when(self.has_start):
                for row in rows:
                    self.add(row, self.start, self.start_vector)
        else:
            with e.when(b.and_(self.has_residual, self.is_narrow)):
                for i, row in enumerate(rows):
                    at = b.add(residual, b.mul(self.residual_row, e.const(i)))
                    for j, value in enumerate(row):
                        added = emit_load_bfloat16(b, b.add(at, e.const(j * _NARROW_BYTES)))
                        e.put(value, b.fadd(added, e.get(value)))
        with e.when(b.and_(self.has_residual, b.not_(self.is_narrow))):
            for i, row in enumerate(rows):
                at = b.add(residual, b.mul(self.residual_row, e.const(i)))
                self.add(row, at, self.residual_vector)
        places = [b.add(c, b.mul(self.c_row, e.const(i))) for i in range(len(rows))]
        results = [[self.bounded(e.get(value)) for value in row] for row in rows]
        if masked:
            self.store(results, places)
            return
        with b.if_else(self.rounds) as (rounded, otherwise):
            with rounded:
                for row, place in zip(results, places, strict=True):
                    for j, value in enumerate(row):
                        at = b.add(place, e.const(j * _NARROW_BYTES))
                        store_at(b, at, emit_bfloat16(b, value), 2)
            with otherwise:
                self.store(results, places)

    def add(self, row: Sequence[Any], address: Any, step: Any) -> None:
        """Add vectors of float32, ``step`` bytes apart, to those of a row."""
        e, b = self.e, self.e.b
        for j, value in enumerate(row):
            at = b.add(address, b.mul(step, e.const(j)))
            e.put(value, b.fadd(e.load(at, self.tile.lane_mask(j)), e.get(value)))

    def store(self, rows: Sequence[Sequence[Any]], places: Sequence[Any]) -> None:
        """Store rows of float32 at addresses."""
        e, b = self.e, self.e.b
        for row, place in zip(rows, places, strict=True):
            for j, value in enumerate(row):
                at = b.add(place, b.mul(self.c_vector, e.const(j)))
                e.store(value, at, self.tile.lane_mask(j))

    def bounded(self, value: Any) -> Any:
        """Return a vector between bounds; NaN passes both, since comparisons with it are false."""
        b = self.e.b
        value = b.select(b.fcmp_ordered(">", self.low, value), self.low, value)
        return b.select(b.fcmp_ordered("<", self.high, value), self.high, value)


def contraction(
    *, dtype: str, lanes: int, mr: int, nv: int, operands: str, masked: bool, runs: bool = False
) -> Callable[..., None]:
    """Return the kernel that computes one contraction tile of bfloat16.

    Its arguments are ``(address of a TileBlock, rows, vectors, 0)`` with ``1 <= rows <= mr`` and
    ``1 <= vectors <= nv``. The calling kernel configures the registers before (`configure_tiles`).

    Args:
        dtype: ``"float32"``, the dtype of C.
        lanes: 16, the elements of a vector of C.
        mr: Most rows of a tile, 16 or 32.
        nv: Most vectors of a row of a tile, 1 or 2.
        operands: ``"bfloat16"``, the dtype of A and B.
        masked: Whether the last vector of each row has `TileBlock.tail` elements only.
        runs: Whether tiles have rows of several runs of A (dot products of pairs only).
    """

    def emit(e: Emit, t: Any, rows: int, vectors: int, count: Any) -> None:
        kind(e, t, rows, vectors, masked).emit(count)

    most = mr // ROWS
    kind = _MatrixTile if host.has_bfloat16_tiles() else partial(_PairTile, runs=runs)
    # Dot products of pairs have one function for all rows.
    by_registers = host.has_bfloat16_tiles()
    heights = range(1, most + 1) if by_registers else (most,)
    sizes = [(rows, v) for v in range(1, nv + 1) for rows in heights]
    name = "masked_matrix_tile" if masked else "matrix_tile"
    tiles = size_switch(name, dtype, lanes, sizes, emit)

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        tiles(args, (begin + ROWS - 1) // ROWS if by_registers else most, end, begin)

    return kernel
