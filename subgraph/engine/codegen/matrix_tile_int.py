"""Matrix tiles of bytes: integer tiles over AMX's tile registers.

One instruction (tdpbusd) multiplies 16 rows of 64 unsigned bytes of A with 64 rows of 16 columns of
signed bytes of B and adds the products, exactly, to 16 x 16 sums of 32 bits. Arguments, operands
and epilogue are those of `subgraph.engine.codegen.tile_int`, flavour ``quads``, except that steps
have 64 bytes: B needs no other order, as its registers are rows of four bytes of each column.

Rows of A beyond those of a tile are read, and may hold anything. (Source: Intel's Architecture
Instruction Set Extensions Programming Reference, TDPBUSD.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir

from subgraph.engine.codegen.emit import Emit
from subgraph.engine.codegen.irtools import I32, I64, load_at, splat_value, store_at
from subgraph.engine.codegen.matrix_registers import LANES, ROW_BYTES, ROWS, RegisterTile
from subgraph.engine.codegen.tile import size_switch
from subgraph.engine.codegen.tile_int import IntegerTileBlock, ResidualSum, TileRequantizer
from subgraph.engine.codegen.tiling import MATRIX_TILE

_LOOPS = ("outer", "middle", "inner")
_STEP_SHIFT = 3  # a step of 64 bytes is eight double steps, which `IntegerTileBlock.steps` counts


class _MatrixTile(RegisterTile):
    """Emits an integer tile.

    Args:
        e: The emitter.
        t: Address of the `IntegerTileBlock`.
        rows: As in `RegisterTile`.
        vectors: As in `RegisterTile`.
    """

    def __init__(self, e: Emit, t: Any, rows: int, vectors: int) -> None:
        e.declaration = IntegerTileBlock
        super().__init__(e, t, rows, vectors)
        self.a_row = e.word(t, "a_row")
        self.a_register = e.word(t, "a_register")
        self.b_row = I64(vectors * ROW_BYTES)  # bytes of a step of four bytes of all columns

    def start(self) -> None:
        """Set the sums to the bias."""
        bias = self.e.word(self.t, "bias")
        for _, j, register in self.each():
            self.registers.load(register, self.e.b.add(bias, I64(j * ROW_BYTES)), I64(0))

    def step(self, a: Any, b: Any) -> None:
        """Emit the products of one step, whose operands begin at two addresses."""
        left, right = (a, self.a_register, self.a_row), (b, I64(ROW_BYTES), self.b_row)
        self.multiply(left, right, self.registers.multiply_bytes)

    def loops(self, names: Sequence[str], a: Any, b: Any, steps: Any) -> None:
        """Emit the loops ``names`` of the block and, inside them, that over the steps.

        Args:
            names: Names of loops, the outermost first.
            a: Variable with the address of A, which is advanced.
            b: Variable with the address of B, which steps advance.
            steps: Double steps of the inner loop, LLVM int64.
        """
        e, t = self.e, self.t
        if not names:
            with e.loop(e.b.ashr(steps, I64(_STEP_SHIFT))):
                self.step(e.get(a), e.get(b))
                e.step(a, I64(ROW_BYTES))
                e.step(b, e.b.mul(self.b_row, I64(ROWS)))
            return
        with e.loop(e.word(t, f"{names[0]}_count")) as left:
            if names[0] == "outer":
                last = e.b.icmp_signed("==", left, I64(1))
                steps = e.b.select(last, e.word(t, "last_steps"), steps)
            self.loops(names[1:], e.variable(e.get(a)), b, steps)
            e.step(a, e.word(t, f"{names[0]}_a"))

    def finish(self, rows: Any, output: str, residual: bool) -> None:
        """Emit the epilogue of ``rows`` (LLVM int64) rows: requantize the sums and store them."""
        e, t, b = self.e, self.t, self.e.b
        kind = ir.VectorType(I32, LANES)
        sums = self.stored_sums()
        row_sums = e.word(t, "row_sums")
        shifts = b.icmp_signed("!=", row_sums, I64(0))
        excess, c_block = e.word(t, "column_excess"), e.word(t, "c_block")
        end = None if output == "int32" else TileRequantizer(e, t, self.vectors, output)
        total = ResidualSum(e, t, end) if residual and end is not None else None
        at_sum, c = e.variable(row_sums), e.variable(e.word(t, "c"))
        with self.sum_rows(sums, rows) as own:
            values = [
                e.variable(load_at(b, b.add(own, I64(j * ROW_BYTES)), kind, 4))
                for j in range(self.vectors)
            ]
            with e.when(shifts):
                factor = splat_value(b, load_at(b, e.get(at_sum), I32, 4), LANES)
                for j, value in enumerate(values):
                    column = load_at(b, b.add(excess, I64(j * ROW_BYTES)), kind, 4)
                    e.put(value, b.sub(e.get(value), b.mul(factor, column)))
                e.step(at_sum, I64(4))
            for j, slot in enumerate(values):
                value, to = e.get(slot), b.add(e.get(c), I64(j * ROW_BYTES))
                if end is not None:
                    value = end.of_vector(value, j)
                if end is not None and output != "float32":
                    to = b.add(e.get(c), b.mul(c_block, I64(j)))
                    order = list(range(LANES))
                    packed = total.packed([value], to) if total else end.packed([value], order)
                    store_at(b, to, packed, 1)
                else:
                    store_at(b, to, value, 4)
            e.step(c, e.word(t, "c_row"))


def integer_contraction(*, output: str, residual: bool = False) -> Callable[..., None]:
    """Return the kernel that computes one tile.

    Its arguments are ``(address of an IntegerTileBlock, rows, vectors, 0)`` with at most 32 rows
    and 2 vectors. The calling kernel configures the registers before
    (`subgraph.engine.codegen.matrix_tile.configure_tiles`).

    Args:
        output: As in `subgraph.engine.codegen.tile_int.integer_contraction`.
        residual: As there.
    """
    most, vectors = MATRIX_TILE

    def emit(e: Emit, t: Any, rows: int, vectors: int, count: Any) -> None:
        tile = _MatrixTile(e, t, rows, vectors)
        tile.start()
        steps = e.word(t, "steps")
        tile.loops(_LOOPS, e.variable(e.word(t, "a")), e.variable(e.word(t, "b")), steps)
        tile.finish(count, output, residual)

    sizes = [(rows, v) for v in range(1, vectors + 1) for rows in range(1, most // ROWS + 1)]
    name = f"int_matrix_{output}{'_residual' if residual else ''}"
    tiles = size_switch(name, "float32", LANES, sizes, emit)

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        tiles(args, (begin + ROWS - 1) // ROWS, end, begin)

    return kernel
