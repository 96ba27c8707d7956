"""Registers of matrix tiles: those of AMX, and vector registers in place of them.

A tile register holds 16 rows of 64 bytes. One instruction (tdpbf16ps) multiplies 16 rows of 32
elements of A with 32 rows of 16 columns of B and adds the products, in float32, to 16 x 16 sums:
sixteen times as many products in a cycle as fused multiply-adds of float32. (Source: Intel's
Architecture Instruction Set Extensions Programming Reference, TDPBF16PS.)

Where there are no such registers, an instruction on vectors (vdpbf16ps of AVX512_BF16) multiplies
two elements of a row of A with two rows of 16 columns of B: twice as many products as a fused
multiply-add. Its operands are rows of the same registers, in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

from llvmlite import ir
from numba.extending import register_jitable

from subgraph.engine.codegen.dot import emit_dot2, emit_dot4
from subgraph.engine.codegen.emit import Emit
from subgraph.engine.codegen.irtools import (
    F32,
    I8,
    I32,
    I64,
    INT64,
    VOID,
    call_intrinsic,
    define,
    load_at,
    pointer,
    splat_value,
    store_at,
)
from subgraph.engine.codegen.tiling import (
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
# Registers of A and of B follow those of the sums.
_SUMS, _LEFT, _RIGHT = 0, 4, 6
_REGISTERS = 8
_UNROLLED = 8  # pairs of elements of an unrolled loop, a power of two (estimate)
# The configuration of all registers to their full size: Intel's "palette 1", whose bytes 16 to 31
# are the bytes of a row of each register (16 bits), and bytes 48 to 55 the numbers of rows.
_CONFIGURATION = bytes(
    [1, *[0] * 15, *[ROW_BYTES, 0] * _REGISTERS, *[0] * 16, *[ROWS] * 8, *[0] * 8]
)


def _has_registers() -> bool:
    return host.has_bfloat16_tiles() and not host.is_emulated()


def _configure(builder: Any, _context: Any, args: Sequence[Any]) -> None:
    if _has_registers():
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
    if _has_registers():
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

    def _copy(
        self, source: Any, source_row: Any, target: Any, target_row: Any, mask: Any = None
    ) -> None:
        """Copy the rows of a register, or the elements of them in a mask, between two addresses."""
        e = self.e
        at, to = e.variable(source), e.variable(target)
        with e.loop(e.const(ROWS)):
            e.store(e.load(e.get(at), mask), e.get(to))
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
            # Registers of A have as many columns as a step has elements.
            mask = self.e.tail_mask(self.pairs) if register in (_LEFT, _LEFT + 1) else None
            self._copy(address, row, self.slots[register], self.e.const(ROW_BYTES), mask)
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

        def add(total: Any, x: Any, y: Any) -> Any:
            return b.bitcast(emit_dot2(b, b.bitcast(total, e.vector), x, y), words)

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
        left: tuple[Any, Any, Any],
        right: tuple[Any, Any, Any],
        add: Callable[[int, int, int], None],
    ) -> None:
        """Emit the products of one step.

        Args:
            left: Address of the first register of A, bytes from it to the second one, and bytes
                between rows of a register.
            right: The same of B.
            add: Adds the products of two registers to a third: `TileRegisters.multiply`.
        """
        loaded: set[int] = set()
        # Each register is loaded just before its first use: products start after two loads.
        for i, j, sums in self.each():
            for register, operand, number in ((_LEFT + i, left, i), (_RIGHT + j, right, j)):
                if register not in loaded:
                    loaded.add(register)
                    first, apart, row = operand
                    address = self.e.b.add(first, apart) if number else first
                    self.registers.load(register, address, row)
            add(sums, _LEFT + i, _RIGHT + j)

    def room_for_sums(self, more: int = 0) -> Any:
        """Return the address of memory on the stack for the rows of all sums, adjacent.

        Args:
            more: Further rows.
        """
        b = self.e.b
        with b.goto_entry_block():
            rows = self.rows * ROWS + more
            slot = b.alloca(ir.ArrayType(F32, rows * self.vectors * LANES))
            slot.align = ROW_BYTES
        return b.ptrtoint(slot, I64)

    def stored_sums(self) -> Any:
        """Emit stores of all sums to the stack; return the address of their rows, adjacent."""
        e, b = self.e, self.e.b
        line = self.vectors * ROW_BYTES
        sums = self.room_for_sums()
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


def pair_rows(vectors: int) -> int:
    """Return the rows of `PairSums` of 1 or 2 vectors, all sums of which stay in registers."""
    return 16 // vectors


class PairSums:
    """Sums of some rows in vector registers, to which dot products of pairs are added.

    This computes a part of a matrix tile on a machine without tile registers, from the same
    operands.

    Args:
        e: The emitter.
        offsets: Bytes from the first row of A to each row, LLVM int64; at most `pair_rows`.
        vectors: Vectors of a row, 1 or 2.
        right_vector: Bytes between the registers of B of two vectors, LLVM int64.
    """

    def __init__(self, e: Emit, offsets: Sequence[Any], vectors: int, right_vector: Any) -> None:
        self.e, self.vectors = e, vectors
        self._offsets, self._right = offsets, right_vector
        self._slots = [e.variable(e.fconst(0.0)) for _ in range(len(offsets) * vectors)]

    def each(self) -> list[tuple[int, int, Any]]:
        """Return row, number of the vector, and slot of all sums."""
        return [(k // self.vectors, k % self.vectors, slot) for k, slot in enumerate(self._slots)]

    def by_row(self) -> list[list[Any]]:
        """Return the slots of each row."""
        return [self._slots[k : k + self.vectors] for k in range(0, len(self._slots), self.vectors)]

    def add(self, left: Any, right: Any, pairs: Any) -> None:
        """Emit the products of a step.

        Args:
            left: Address of the first row of A, LLVM int64.
            right: Address of the first register of B, LLVM int64.
            pairs: Pairs of elements along K, LLVM int64.
        """
        e = self.e
        from_left, from_right = e.variable(left), e.variable(right)
        for unrolled, count in (
            (_UNROLLED, e.b.lshr(pairs, e.const(_UNROLLED.bit_length() - 1))),
            (1, e.b.and_(pairs, e.const(_UNROLLED - 1))),
        ):
            with e.loop(count):
                for k in range(unrolled):
                    self._add_pair(e.get(from_left), e.get(from_right), k)
                    e.fence()
                e.step(from_left, e.const(unrolled * 4))
                e.step(from_right, e.const(unrolled * ROW_BYTES))

    def _add_pair(self, left: Any, right: Any, number: int) -> None:
        e, b = self.e, self.e.b
        words = ir.VectorType(I32, LANES)
        at = b.add(right, e.const(number * ROW_BYTES))
        columns = [load_at(b, at, words, 4)]
        if self.vectors == 2:
            columns.append(load_at(b, b.add(at, self._right), words, 4))
        for offset, slots in zip(self._offsets, self.by_row(), strict=True):
            from_row = b.add(b.add(left, offset), e.const(number * 4))
            row = splat_value(b, load_at(b, from_row, I32, 4), LANES)
            for slot, values in zip(slots, columns, strict=True):
                e.put(slot, emit_dot2(b, e.get(slot), row, values))


class RowRuns:
    """The rows of A of a tile, a few at a time: runs of rows, with a gap in memory between them.

    Args:
        e: The emitter.
        row: Bytes between the rows of a run, LLVM int64.
        run: Rows of a run, LLVM int64.
        first: Rows of the first run, LLVM int64.
        gap: Bytes by which the first row of a run is farther away than the next row of the run
            before, LLVM int64.
        crosses: Whether rows that are taken together may belong to several runs.
    """

    def __init__(self, e: Emit, row: Any, run: Any, first: Any, gap: Any, crosses: bool) -> None:
        self.e, self._row, self._run, self._gap = e, row, run, gap
        self._left, self._crosses = e.variable(first), crosses

    def take(self, count: int, rows: Any) -> tuple[list[Any], Any]:
        """Return the offsets of the next rows, and the bytes from the first one to the row behind.

        Args:
            count: Number of rows.
            rows: Rows that exist, LLVM int64; the others have the offset of one that does.
        """
        e, b = self.e, self.e.b
        left, all_rows = e.get(self._left), e.const(count)
        is_end = b.icmp_signed("==", left, all_rows)
        behind = b.add(b.mul(self._row, all_rows), b.select(is_end, self._gap, e.const(0)))
        e.put(self._left, b.select(is_end, self._run, b.sub(left, all_rows)))
        offsets = e.multiples(self._row, count)
        if not self._crosses:
            return offsets, behind
        slots = [e.variable(at) for at in [*offsets, behind]]
        with e.when(b.icmp_signed("<", left, all_rows)):
            at = e.const(0)
            for i in range(1, count + 1):
                left = b.sub(left, e.const(1))
                is_end = b.icmp_signed("==", left, e.const(0))
                step = b.select(is_end, b.add(self._row, self._gap), self._row)
                left = b.select(is_end, self._run, left)
                exists = b.icmp_signed("<", e.const(i), rows)
                at = b.select(exists, b.add(at, step), at) if i < count else b.add(at, step)
                e.put(slots[i], at)
            e.put(self._left, left)
        *offsets, behind = [e.get(slot) for slot in slots]
        return offsets, behind
