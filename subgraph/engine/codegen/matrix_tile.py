"""Matrix tiles: contraction tiles of bfloat16 over AMX's tile registers.

A tile register holds 16 rows of 64 bytes. One instruction (tdpbf16ps) multiplies 16 rows of 32
elements of A with 32 rows of 16 columns of B and adds the products, in float32, to 16 x 16 sums:
sixteen times as many products in a cycle as fused multiply-adds of float32. A contraction tile of
two by two registers of sums loads four registers for four such instructions.

Its arguments are a `TileBlock`, as those of `subgraph.engine.codegen.tile.contraction`. A step
along K has `MATRIX_DEPTH` elements, so that A is rows of bfloat16, padded to whole steps. B is a
sequence of registers: row r of one has, for each of 16 columns, the elements of rows 2 r and
2 r + 1. Initial values are float32, the same for all rows. Results and residuals are float32, too,
unless flags say that they are bfloat16 (`F_BFLOAT16_C`, `F_BFLOAT16_RESIDUAL`): the vectors of a
row are then adjacent. Masked tiles do not support these flags.

Rows of a register are independent: those beyond the rows of a tile are read, and may hold anything,
but are not stored. Subnormal elements count as 0. (Source: Intel's Architecture Instruction Set
Extensions Programming Reference, TDPBF16PS.)
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

from llvmlite import ir
from numba.extending import register_jitable

from subgraph.engine.codegen.bfloat16 import emit_bfloat16
from subgraph.engine.codegen.dot import emit_dot4
from subgraph.engine.codegen.emit import Emit
from subgraph.engine.codegen.irtools import (
    F32,
    I8,
    I16,
    I32,
    I64,
    INT64,
    VOID,
    bf16_to_f32,
    call_intrinsic,
    define,
    load_at,
    pointer,
    splat_value,
    store_at,
)
from subgraph.engine.codegen.tile import size_switch
from subgraph.engine.codegen.tiling import (
    F_BFLOAT16_C,
    F_BFLOAT16_RESIDUAL,
    F_HI,
    F_LO,
    MATRIX_DEPTH,
    MATRIX_ROW_BYTES,
    MATRIX_ROWS,
)
from subgraph.system import host
from subgraph.system.numba_internals import cgutils

ROWS = MATRIX_ROWS
ROW_BYTES = MATRIX_ROW_BYTES
LANES = 16  # sums of float32 of a row
REGISTER_BYTES = ROWS * ROW_BYTES
_NARROW_BYTES = 2 * LANES  # bytes of a vector of C that is rounded to bfloat16
# Registers of A and of B follow those of the sums.
_SUMS, _LEFT, _RIGHT = 0, 4, 6
_REGISTERS = 8
_PACE_SHIFT = 7  # `TileBlock.pace` is for two steps, in bytes: cache lines of 64 bytes of one step
_LOOPS = ("outer", "middle", "inner")
# The configuration of all registers to their full size: Intel's "palette 1", whose bytes 16 to 31
# are the bytes of a row of each register (16 bits), and bytes 48 to 55 the numbers of rows.
_CONFIGURATION = bytes(
    [1, *[0] * 15, *[ROW_BYTES, 0] * _REGISTERS, *[0] * 16, *[ROWS] * 8, *[0] * 8]
)


def _configure(builder: Any, _context: Any, args: Sequence[Any]) -> None:
    if not host.is_emulated():
        kind = ir.ArrayType(I8, len(_CONFIGURATION))
        value = ir.Constant(kind, bytearray(_CONFIGURATION))
        address = cgutils.alloca_once_value(builder, value)
        # Registers of A have ``depth`` columns, those of B half as many rows of pairs.
        depth = builder.trunc(args[0], I8)
        columns = builder.shl(depth, I8(1))
        rows = builder.lshr(depth, I8(1))
        base = builder.ptrtoint(address, I64)
        for register in (_LEFT, _LEFT + 1):
            store_at(builder, builder.add(base, I64(16 + 2 * register)), columns, 1)
        for register in (_RIGHT, _RIGHT + 1):
            store_at(builder, builder.add(base, I64(48 + register)), rows, 1)
        call_intrinsic(builder, "llvm.x86.ldtilecfg", ir.VoidType(), [address])


def _release(builder: Any, _context: Any, _args: Sequence[Any]) -> None:
    if not host.is_emulated():
        call_intrinsic(builder, "llvm.x86.tilerelease", ir.VoidType(), [])


# Intrinsics that a kernel calls before its first tile, with the elements of bfloat16 of a step
# along K (an even number, at most `MATRIX_DEPTH`), and after its last one. Registers that are in
# use make switching between threads slow.
configure_tiles = define(VOID, [INT64], _configure)
release_tiles = define(VOID, [], _release)


@register_jitable
def _configure_whole() -> None:
    """Configure registers for steps of their full size."""
    configure_tiles(MATRIX_DEPTH)


@register_jitable
def _nothing() -> None:
    """Do nothing, in kernels without matrix tiles."""


def tile_use(matrix: bool) -> tuple[Any, Any]:
    """Return two functions, to be called before the first tile of a kernel and after its last one.

    Args:
        matrix: Whether its tiles are matrix tiles; otherwise the functions do nothing.
    """
    return (_configure_whole, release_tiles) if matrix else (_nothing, _nothing)


@register_jitable
def full_rows(left: int, mr: int) -> int:
    """Return the rows of the next matrix tile: their registers have the cost of full ones."""
    return min(left, mr)


class TileRegisters:
    """Emits the instructions of tile registers, or what they do on an emulated machine.

    Args:
        e: The emitter of the function that uses the registers.
        depth: Elements of bfloat16 of a step, as `configure_tiles` was called with; LLVM int64.
    """

    def __init__(self, e: Emit, depth: Any) -> None:
        self.e = e
        self.pairs = e.b.lshr(depth, e.const(1))
        self.slots: list[Any] = []
        if host.is_emulated():
            kind = ir.ArrayType(I8, REGISTER_BYTES)
            with e.b.goto_entry_block():
                for _ in range(_REGISTERS):
                    slot = e.b.alloca(kind)
                    slot.align = ROW_BYTES
                    self.slots.append(e.b.ptrtoint(slot, I64))

    def _call(self, name: str, *args: Any) -> None:
        call_intrinsic(self.e.b, f"llvm.x86.{name}", ir.VoidType(), list(args))

    def _copy(self, source: Any, source_row: Any, target: Any, target_row: Any) -> None:
        """Copy the rows of a register between two addresses."""
        e = self.e
        at, to = e.variable(source), e.variable(target)
        with e.loop(e.const(ROWS)):
            e.store(e.load(e.get(at)), e.get(to))
            e.step(at, source_row)
            e.step(to, target_row)

    def zero(self, register: int) -> None:
        """Set all elements of a register to 0."""
        if not self.slots:
            self._call("tilezero", I8(register))
            return
        e, slot = self.e, self.slots[register]
        for row in range(ROWS):
            e.store(e.fconst(0.0), e.b.add(slot, e.const(row * ROW_BYTES)))

    def load(self, register: int, address: Any, row: Any) -> None:
        """Load a register.

        Args:
            register: Its number.
            address: LLVM int64, of row 0.
            row: LLVM int64, bytes between rows.
        """
        if self.slots:
            self._copy(address, row, self.slots[register], self.e.const(ROW_BYTES))
            return
        self._call("tileloadd64", I8(register), pointer(self.e.b, address, I8), row)

    def store(self, register: int, address: Any, row: Any) -> None:
        """Store a register.

        Args:
            register: Its number.
            address: LLVM int64, of row 0.
            row: LLVM int64, bytes between rows.
        """
        if self.slots:
            self._copy(self.slots[register], self.e.const(ROW_BYTES), address, row)
            return
        self._call("tilestored64", I8(register), pointer(self.e.b, address, I8), row)

    def multiply(self, sums: int, left: int, right: int) -> None:
        """Add the products of two registers of bfloat16 to one of float32.

        Args:
            sums: Number of the register of the sums.
            left: Number of the register of A.
            right: Number of the register of B.
        """
        if not self.slots:
            self._call("tdpbf16ps", I8(sums), I8(left), I8(right))
            return
        e, b = self.e, self.e.b
        words = ir.VectorType(I32, LANES)
        upper = ir.Constant(words, [0xFFFF0000] * LANES)
        shift = ir.Constant(words, [16] * LANES)

        def add(total: Any, x: Any, y: Any) -> Any:
            total = b.bitcast(total, e.vector)
            # The element of the even row of B is the lower half of a pair.
            lower_x, lower_y = (b.bitcast(b.shl(v, shift), e.vector) for v in (x, y))
            upper_x, upper_y = (b.bitcast(b.and_(v, upper), e.vector) for v in (x, y))
            return b.bitcast(e.fma(upper_x, upper_y, e.fma(lower_x, lower_y, total)), words)

        self._emulate(sums, left, right, add)

    def multiply_bytes(self, sums: int, left: int, right: int) -> None:
        """Add the products of unsigned bytes of A and signed bytes of B to int32.

        Args:
            sums: Number of the register of the sums.
            left: Number of the register of A.
            right: Number of the register of B.
        """
        if not self.slots:
            self._call("tdpbusd", I8(sums), I8(left), I8(right))
            return
        self._emulate(sums, left, right, lambda t, x, y: emit_dot4(self.e.b, t, x, y))

    def _emulate(
        self, sums: int, left: int, right: int, add: Callable[[Any, Any, Any], Any]
    ) -> None:
        """Emit the products of two registers, 32 bits of a row of A at a time.

        Args:
            sums: Register of the sums.
            left: Register of A.
            right: Register of B.
            add: ``add(total, x, y)`` returns a row of sums plus the products of 32 bits of A, in
                all lanes, with a row of B; all are vectors of i32.
        """
        e, b = self.e, self.e.b
        words = ir.VectorType(I32, LANES)
        at, to = e.variable(self.slots[left]), e.variable(self.slots[sums])
        with e.loop(e.const(ROWS)):
            total = e.variable(load_at(b, e.get(to), words, 4))
            a, from_b = e.variable(e.get(at)), e.variable(self.slots[right])
            with e.loop(self.pairs):
                x = splat_value(b, load_at(b, e.get(a), I32, 4), LANES)
                e.put(total, add(e.get(total), x, load_at(b, e.get(from_b), words, 4)))
                e.step(a, e.const(4))
                e.step(from_b, e.const(ROW_BYTES))
            store_at(b, e.get(to), e.get(total), 4)
            e.step(at, e.const(ROW_BYTES))
            e.step(to, e.const(ROW_BYTES))


class RegisterTile:
    """A tile of ``rows x vectors`` registers of sums, common to matrix tiles of all dtypes.

    Args:
        e: The emitter.
        t: Address of the tile's block.
        rows: Registers of sums along the rows, 1 or 2.
        vectors: Registers of sums along the columns, 1 or 2.
        depth: Elements of bfloat16 of a step, LLVM int64; None: `MATRIX_DEPTH`.
    """

    def __init__(self, e: Emit, t: Any, rows: int, vectors: int, depth: Any = None) -> None:
        self.e, self.t, self.rows, self.vectors = e, t, rows, vectors
        self.registers = TileRegisters(e, e.const(MATRIX_DEPTH) if depth is None else depth)

    def each(self) -> list[tuple[int, int, int]]:
        """Return ``(i, j, register)`` of all sums: those of rows ``16 i`` and of vector j."""
        return [
            (i, j, _SUMS + i * self.vectors + j)
            for i in range(self.rows)
            for j in range(self.vectors)
        ]

    def multiply(
        self,
        left: Callable[[int], tuple[Any, Any]],
        right: Callable[[int], tuple[Any, Any]],
        add: Callable[[int, int, int], None],
    ) -> None:
        """Emit the products of one step.

        Args:
            left: Returns address and bytes between rows of register i of A.
            right: The same of register j of B.
            add: Adds the products of two registers to a third: `TileRegisters.multiply`.
        """
        loaded: set[int] = set()
        # Each register is loaded just before its first use: products start after two loads.
        for i, j, sums in self.each():
            for register, place, number in ((_LEFT + i, left, i), (_RIGHT + j, right, j)):
                if register not in loaded:
                    loaded.add(register)
                    self.registers.load(register, *place(number))
            add(sums, _LEFT + i, _RIGHT + j)

    def stored_sums(self) -> Any:
        """Emit stores of all sums to the stack; return the address of their rows, adjacent."""
        e, b = self.e, self.e.b
        line = self.vectors * ROW_BYTES
        with b.goto_entry_block():
            slot = b.alloca(ir.ArrayType(F32, self.rows * ROWS * self.vectors * LANES))
            slot.align = ROW_BYTES
        sums = b.ptrtoint(slot, I64)
        for i, j, register in self.each():
            to = b.add(sums, e.const(i * ROWS * line + j * ROW_BYTES))
            self.registers.store(register, to, e.const(line))
        return sums

    @contextmanager
    def sum_rows(self, sums: Any, rows: Any) -> Generator[Any]:
        """Emit the body of a ``with`` as a loop over rows of sums that are rows of C.

        Args:
            sums: Result of `stored_sums`.
            rows: Number of rows of sums, gaps between runs of rows of C included; LLVM int64.

        Yields:
            The address of the sums of a row.
        """
        e, b = self.e, self.e.b
        line = e.const(self.vectors * ROW_BYTES)
        run, gap = e.word(self.t, "run_rows"), e.word(self.t, "gap_rows")
        is_one_run = b.icmp_signed("==", run, e.const(0))
        own, left = e.variable(sums), e.variable(rows)
        most = e.variable(b.select(is_one_run, rows, e.word(self.t, "first_run")))
        with e.while_positive(left):
            count = b.select(b.icmp_signed("<", e.get(left), e.get(most)), e.get(left), e.get(most))
            with e.loop(count):
                yield e.get(own)
                e.step(own, line)
            e.put(left, b.sub(b.sub(e.get(left), count), gap))
            e.step(own, b.mul(gap, line))
            e.put(most, run)


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
        self.ahead_lines = e.b.ashr(e.word(t, "pace"), e.const(_PACE_SHIFT))

    def step(self, a: Any, b: Any) -> None:
        """Emit the products of one step, whose operands begin at two addresses."""
        e = self.e

        def left(i: int) -> tuple[Any, Any]:
            return e.b.add(a, self.a_register) if i else a, self.a_row

        def right(j: int) -> tuple[Any, Any]:
            return e.b.add(b, self.b_vector) if j else b, e.const(ROW_BYTES)

        self.multiply(left, right, self.registers.multiply)

    def fetch(self) -> None:
        """Emit the prefetches of a step into the L2 cache: half of `TileBlock.pace` bytes."""
        e = self.e
        with e.loop(self.ahead_lines):
            e.prefetch(e.get(self.ahead), near=False)
            e.step(self.ahead, e.const(ROW_BYTES))

    def loops(self, names: Sequence[str], a: Any, b: Any) -> None:
        """Emit the loops ``names`` of the block and, inside them, that over the steps.

        Args:
            names: Names of loops, the outermost first.
            a: Variable with the address of A, which is advanced.
            b: Variable with the address of B, which is advanced.
        """
        e, t = self.e, self.t
        if not names:
            a_step, b_step = e.word(t, "a_step"), e.word(t, "b_step")
            with e.loop(e.word(t, "steps")):
                self.step(e.get(a), e.get(b))
                self.fetch()
                e.step(a, a_step)
                e.step(b, b_step)
            return
        with e.loop(e.word(t, f"{names[0]}_count")):
            self.loops(names[1:], e.variable(e.get(a)), e.variable(e.get(b)))
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
        if self.mask is not None:
            self.finish_rows(rows)
            return
        # Whole registers to which nothing is done are stored at once.
        left = b.xor(rows, e.const(self.rows * ROWS))
        for name in ("residual", "flags", "run_rows"):
            left = b.or_(left, e.word(t, name))
        with b.if_else(b.icmp_signed("==", left, e.const(0))) as (whole, otherwise):
            with whole:
                line, step = e.word(t, "c_row"), e.word(t, "c_vector")
                for i, j, register in self.each():
                    at = b.add(e.word(t, "c"), b.mul(step, e.const(j)))
                    at = b.add(at, b.mul(line, e.const(i * ROWS)))
                    self.registers.store(register, at, line)
            with otherwise:
                self.finish_rows(rows)

    def finish_rows(self, rows: Any) -> None:
        """Emit the epilogue row by row."""
        e, t, b = self.e, self.t, self.e.b
        sums = self.stored_sums()
        flags = e.word(t, "flags")
        low = b.select(e.flag(flags, F_LO), e.word_splat(t, "low"), e.fconst(float("-inf")))
        high = b.select(e.flag(flags, F_HI), e.word_splat(t, "high"), e.fconst(float("inf")))
        rounds = e.flag(flags, F_BFLOAT16_C)
        start = e.word(t, "start")
        residual, c = (e.variable(e.word(t, name)) for name in ("residual", "c"))
        has_start, has_residual = (
            b.icmp_signed("!=", address, e.const(0)) for address in (start, e.get(residual))
        )
        names = ("start_vector", "residual_row", "residual_vector", "c_row", "c_vector")
        w = {name: e.word(t, name) for name in names}

        def add(values: Sequence[Any], address: Any, vector: Any) -> None:
            for j, value in enumerate(values):
                at = b.add(address, b.mul(vector, e.const(j)))
                e.put(value, b.fadd(e.load(at, self.lane_mask(j)), e.get(value)))

        is_narrow = e.flag(flags, F_BFLOAT16_RESIDUAL)
        with self.sum_rows(sums, rows) as own:
            values = [
                e.variable(e.load(b.add(own, e.const(j * ROW_BYTES)))) for j in range(self.vectors)
            ]
            if self.mask is None:
                with e.when(b.and_(has_residual, is_narrow)):
                    for j, value in enumerate(values):
                        at = b.add(e.get(residual), e.const(j * _NARROW_BYTES))
                        e.put(value, b.fadd(self.load_bfloat16(at), e.get(value)))
                    e.step(residual, w["residual_row"])
            else:
                with e.when(has_start):
                    add(values, start, w["start_vector"])
            with e.when(b.and_(has_residual, b.not_(is_narrow))):
                add(values, e.get(residual), w["residual_vector"])
                e.step(residual, w["residual_row"])
            results = [self.bounded(e.get(value), low, high) for value in values]
            if self.mask is not None:
                self.store_row(results, e.get(c), w["c_vector"])
            else:
                with b.if_else(rounds) as (rounded, otherwise):
                    with rounded:
                        for j, value in enumerate(results):
                            at = b.add(e.get(c), e.const(j * _NARROW_BYTES))
                            store_at(b, at, emit_bfloat16(b, value), 2)
                    with otherwise:
                        self.store_row(results, e.get(c), w["c_vector"])
            e.step(c, w["c_row"])

    def store_row(self, values: Sequence[Any], address: Any, step: Any) -> None:
        """Store the vectors of a row of float32, ``step`` bytes apart."""
        e, b = self.e, self.e.b
        for j, value in enumerate(values):
            e.store(value, b.add(address, b.mul(step, e.const(j))), self.lane_mask(j))

    def bounded(self, value: Any, low: Any, high: Any) -> Any:
        """Return a vector between bounds; NaN passes both, since comparisons with it are false."""
        b = self.e.b
        value = b.select(b.fcmp_ordered(">", low, value), low, value)
        return b.select(b.fcmp_ordered("<", high, value), high, value)

    def load_bfloat16(self, address: Any) -> Any:
        """Load a vector of bfloat16 as float32."""
        return bf16_to_f32(self.e.b, load_at(self.e.b, address, ir.VectorType(I16, LANES), 2))

    def lane_mask(self, j: int) -> Any:
        """Return the mask of vector j of a row; None if all its lanes exist."""
        return self.mask if j == self.vectors - 1 else None

    def emit(self, rows: Any) -> None:
        """Emit the whole tile of ``rows`` (LLVM int64) rows."""
        e, t = self.e, self.t
        self.start()
        self.loops(_LOOPS, e.variable(e.word(t, "a")), e.variable(e.word(t, "b")))
        self.finish(rows)


def contraction(
    *, dtype: str, lanes: int, mr: int, nv: int, operands: str, masked: bool
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
    """

    def emit(e: Emit, t: Any, rows: int, vectors: int, count: Any) -> None:
        _MatrixTile(e, t, rows, vectors, masked).emit(count)

    sizes = [(rows, v) for v in range(1, nv + 1) for rows in range(1, mr // ROWS + 1)]
    name = "masked_matrix_tile" if masked else "matrix_tile"
    tiles = size_switch(name, dtype, lanes, sizes, emit)

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        tiles(args, (begin + ROWS - 1) // ROWS, end, begin)

    return kernel
