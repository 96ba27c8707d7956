"""Register tiles of the integer GEMM: 8-bit operands, exact 32-bit sums, requantized in registers.

The integer counterpart of `subgraph.engine.codegen.tile`. A step broadcasts four bytes of each row
of A and multiplies them with vectors of B, each of which adds to a vector of 32-bit sums. There are
three flavours of a step:

- ``pairs``: A has 16-bit integers (bytes less their zero point), B bytes or 16-bit integers. Two
  products are added into 32 bits (vpmaddwd). Exact, and zero points need no correction.
- ``quads``: A has unsigned, B signed bytes. Four products are added at once
  (`subgraph.engine.codegen.dot`, VNNI). The zero point of A is part of the bias. If a column of B
  has a zero point as signed bytes, it times the sum of the row of A is subtracted from the sums.
- ``checked`` (saturation-checked): operands as for ``quads``. Two products are added in 16 bits
  (vpmaddubsw), then into 32: three instructions where ``pairs`` needs four. The caller lists the
  steps in which a 16-bit sum may saturate; their sums are subtracted again and added exactly.

The epilogue is ``clamp(round(sum * scale + shift)) + zero point``, the requantization of
QLinearConv and QLinearMatMul, in the order of operations of ONNX Runtime.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from llvmlite import ir

from subgraph.engine.codegen.arguments import Address, WordBlock
from subgraph.engine.codegen.dot import (
    emit_dot4,
    emit_pair_products,
    emit_saturating_pairs,
    emit_sums_of_pairs,
)
from subgraph.engine.codegen.emit import Emit
from subgraph.engine.codegen.irtools import (
    F32,
    I8,
    I16,
    I32,
    I64,
    call_intrinsic,
    concatenate,
    load_at,
    shuffle_vectors,
    splat_value,
    store_at,
    suffix,
)
from subgraph.engine.codegen.tile import size_switch, tile_kernel
from subgraph.engine.codegen.tiling import row_counts
from subgraph.engine.codegen.vmath import emit_quotient
from subgraph.system import host

# Channels of a blocked layout, and outputs of one store: their sums are a 512-bit vector of int32,
# and as bytes they are a 128-bit vector.
BLOCK = 16


class IntegerTileBlock(WordBlock):
    """Arguments of an integer tile. Strides are in bytes; an address of 0: no such operand.

    Attributes:
        a: A at row 0 and the first iteration of all loops.
        a_row: Stride of A between rows.
        b: B, packed: all vectors that the tile reads, in their order, without gaps.
        outer_count: Iterations of the outer loop.
        outer_a: Stride of A between them.
        middle_count: Iterations of the middle loop.
        middle_a: Stride of A between them.
        inner_count: Iterations of the inner loop.
        inner_a: Stride of A between them.
        steps: Pairs of steps in one iteration of the inner loop; a step is four bytes of A.
        last_steps: Pairs of steps in the last iteration of the outer loop.
        c: First element of C.
        c_row: Stride of C between rows.
        c_block: Stride of C between blocks of 16 columns.
        bias: Initial values of the sums, an int32 per column.
        scale: A float32 per column.
        shift: A float32 per column that is added after scaling.
        low: Lower bound of the result before its zero point is added.
        high: Upper bound of the result before its zero point is added.
        zero: Zero point of the result.
        saturated_count: Number of steps in which sums may have saturated (``checked`` only).
        saturated_steps: Two words per such step: its offset in A at row 0, and in B, in bytes.
        row_sums: int32 per row: the sum of the row of A less its zero point; 0: columns of B have
            no zero point.
        column_excess: int32 per column: the zero point of B as signed bytes (not in ``pairs``).
        a_register: Stride of A between registers of 16 rows (matrix tiles only).
        run_rows: Rows of sums that are a run of rows of C (matrix tiles only); 0: all rows are.
        gap_rows: Rows of sums between runs, which are not rows of C.
        first_run: Rows of the first run, if there are gaps.
        residual: First element of the residual, whose strides are those of C.
        residual_scales: float32 numbers: the scale of the result that the residual is added to,
            that of the residual, and that of the sum with its inverse and the rest of the inverse
            (`vmath.emit_quotient`).
        residual_zero: Zero point of the residual.
        sum_low: Lower bound of the sum before its zero point is added.
        sum_high: Upper bound of the sum before its zero point is added.
        sum_zero: Zero point of the sum.
    """

    a: Address
    a_row: int
    b: Address
    outer_count: int
    outer_a: int
    middle_count: int
    middle_a: int
    inner_count: int
    inner_a: int
    steps: int
    last_steps: int
    c: Address
    c_row: int
    c_block: int
    bias: Address
    scale: Address
    shift: Address
    low: float
    high: float
    zero: int
    saturated_count: int
    saturated_steps: Address
    row_sums: Address
    column_excess: Address
    a_register: int
    run_rows: int
    gap_rows: int
    first_run: int
    residual: Address
    residual_scales: Address
    residual_zero: int
    sum_low: float
    sum_high: float
    sum_zero: int


def integer_tile_shape() -> tuple[int, int, int]:
    """Return ``(lanes, mr, nv)``: 32-bit lanes of a vector, and most rows and vectors of a tile."""
    lanes = max(4, host.lanes("int32"))
    if host.has_32_registers():
        return (lanes, 12, 2) if lanes == BLOCK else (lanes, 6, BLOCK // lanes)
    return (lanes, 6, 2) if lanes == 8 else (lanes, 2, BLOCK // lanes)


class Requantizer:
    """Emits the requantization of 32-bit sums, for all kernels of the integer GEMM.

    Attributes:
        real: LLVM type of a vector of scaled sums, float32.
    """

    def __init__(self, builder: Any, lanes: int, output: str, words: tuple[Any, Any, Any]) -> None:
        """Emit the constants.

        Args:
            builder: LLVM's builder.
            lanes: Elements of a vector of sums.
            output: Dtype of the result: ``"uint8"``, ``"int8"`` or ``"float32"``.
            words: Fields low and high (float64 as bits) and zero of `IntegerTileBlock`.
        """
        self.b = builder
        self.lanes = lanes
        self.output = output
        self.real = ir.VectorType(F32, lanes)
        low, high = (builder.bitcast(word, ir.DoubleType()) for word in words[:2])
        self.low = splat_value(builder, builder.fptrunc(low, F32), lanes)
        self.high = splat_value(builder, builder.fptrunc(high, F32), lanes)
        self.zero = words[2]
        # The lower bound as an integer. That of an unbounded float32 result, which does not use
        # it, is -inf, whose conversion would be undefined.
        least = builder.select(
            builder.fcmp_ordered(">", low, ir.DoubleType()(-512.0)), low, ir.DoubleType()(-512.0)
        )
        self.least = builder.add(builder.fptosi(least, I64), self.zero)

    def scaled(self, sums: Any, scale: Any, shift: Any) -> Any:
        """Return ``sums * scale + shift`` in float32.

        Args:
            sums: Vector of int32.
            scale: Vector of float32.
            shift: Vector of float32.
        """
        return self.b.fadd(self.b.fmul(self.b.sitofp(sums, self.real), scale), shift)

    def packed(self, values: list[Any], order: list[int]) -> Any:
        """Return 16 bytes: values rounded to nearest even, clamped, plus the zero point.

        Args:
            values: Vectors of float32, 16 elements in all.
            order: For each byte the index of its value.
        """
        b = self.b
        if self.lanes == 8 and host.has_saturating_packs():
            return self._packed_lanes([self._at_most(value) for value in values], order)
        zero = splat_value(b, b.trunc(self.zero, I32), self.lanes)
        whole = [b.add(self._rounded(self._clamped(value)), zero) for value in values]
        ordered = shuffle_vectors(b, concatenate(b, whole), None, order)
        return b.trunc(ordered, ir.VectorType(I8, BLOCK))

    def unpacked(self, value: Any) -> Any:
        """Return a vector of the numbers that `packed` returns, less the zero point, as float32."""
        value = self._clamped(value)
        return call_intrinsic(self.b, f"llvm.rint.{suffix(self.real)}", self.real, [value])

    def _at_most(self, value: Any) -> Any:
        """Return values up to the upper bound."""
        # The comparison is false for NaN, which becomes the upper bound; its conversion to an
        # integer would be undefined.
        return self.b.select(self.b.fcmp_ordered("<", value, self.high), value, self.high)

    def _clamped(self, value: Any) -> Any:
        """Return values between the bounds."""
        value = self._at_most(value)
        return self.b.select(self.b.fcmp_ordered(">", value, self.low), value, self.low)

    def _rounded(self, value: Any) -> Any:
        """Return values as int32, rounded to nearest even."""
        b, whole = self.b, ir.VectorType(I32, self.lanes)
        if self.lanes == 16 and host.has_512_bit_vectors() and not host.is_emulated():
            kept, every, current = ir.Constant(whole, ir.Undefined), I16(-1), I32(4)
            name = "llvm.x86.avx512.mask.cvtps2dq.512"
            return call_intrinsic(b, name, whole, [value, kept, every, current])
        value = call_intrinsic(b, f"llvm.rint.{suffix(self.real)}", self.real, [value])
        return b.fptosi(value, whole)

    def _packed_lanes(self, values: list[Any], order: list[int]) -> Any:
        """Return `packed` of two vectors of eight by AVX2's saturating packs of 128-bit lanes."""
        b = self.b
        words, bytes_ = ir.VectorType(I16, BLOCK), ir.VectorType(I8, 2 * BLOCK)
        # A float below the range becomes the least integer, which the packs saturate; `least` is
        # applied to the bytes. The upper bound has been applied to the floats.
        whole = [
            call_intrinsic(b, "llvm.x86.avx.cvt.ps2dq.256", ir.VectorType(I32, 8), [v])
            for v in values
        ]
        short = call_intrinsic(b, "llvm.x86.avx2.packssdw", words, whole)
        zero = splat_value(b, b.trunc(self.zero, I16), BLOCK)
        short = call_intrinsic(b, "llvm.sadd.sat.v16i16", words, [short, zero])
        name = "packuswb" if self.output == "uint8" else "packsswb"
        packed = call_intrinsic(b, f"llvm.x86.avx2.{name}", bytes_, [short, short])
        # AVX2 packs each 128-bit lane by itself, so that groups of four bytes have to be put in
        # order.
        four = [0, 4, 1, 5] if order[4] == 4 else [0, 1, 4, 5]
        quads = b.bitcast(packed, ir.VectorType(I32, 8))
        found = b.bitcast(shuffle_vectors(b, quads, None, four), ir.VectorType(I8, BLOCK))
        least = splat_value(b, b.trunc(self.least, I8), BLOCK)
        compare = b.icmp_unsigned if self.output == "uint8" else b.icmp_signed
        return b.select(compare(">", found, least), found, least)


class TileRequantizer(Requantizer):
    """Emits the requantization of a tile's sums by the fields of its block.

    Args:
        e: The emitter.
        t: Address of an `IntegerTileBlock`, LLVM int64.
        vectors: Vectors of a row of the tile.
        output: See `Requantizer`.
    """

    def __init__(self, e: Emit, t: Any, vectors: int, output: str) -> None:
        """Emit the constants, and load scales and shifts."""
        b, lanes = e.b, e.lanes
        super().__init__(b, lanes, output, (e.word(t, "low"), e.word(t, "high"), e.word(t, "zero")))
        scale, shift = e.word(t, "scale"), e.word(t, "shift")
        offsets = [I64(4 * lanes * j) for j in range(vectors)]
        self.scales = [load_at(b, b.add(scale, offset), self.real, 4) for offset in offsets]
        # Without a shift, zeros are added: one code serves both cases.
        slots = [e.variable(self.real(None)) for _ in range(vectors)]
        with e.when(b.icmp_signed("!=", shift, I64(0))):
            for slot, offset in zip(slots, offsets, strict=True):
                e.put(slot, load_at(b, b.add(shift, offset), self.real, 4))
        self.shifts = [e.get(slot) for slot in slots]

    def of_vector(self, sums: Any, j: int) -> Any:
        """Return the scaled sums of vector j of a row."""
        return self.scaled(sums, self.scales[j], self.shifts[j])


class ResidualSum:
    """Emits the sum of a quantized result and a residual in bytes, quantized again.

    The result is rounded first, and the sum is that of float32, as between DequantizeLinear and
    QuantizeLinear of the standard: ``(q - zero) * scale`` of each, their sum, and its quotient by
    the scale of the sum, each of which is rounded once.

    Args:
        e: The emitter.
        t: Address of an `IntegerTileBlock`, LLVM int64.
        own: Emits the result that the residual is added to.
    """

    def __init__(self, e: Emit, t: Any, own: Requantizer) -> None:
        """Emit the constants."""
        b = self.b = e.b
        self.own = own
        self.distance = b.sub(e.word(t, "residual"), e.word(t, "c"))
        at = e.word(t, "residual_scales")
        self.scales = [
            splat_value(b, load_at(b, b.add(at, I64(4 * k)), F32, 4), own.lanes) for k in range(5)
        ]
        self.zero = splat_value(b, b.trunc(e.word(t, "residual_zero"), I32), own.lanes)
        bounds = e.word(t, "sum_low"), e.word(t, "sum_high"), e.word(t, "sum_zero")
        self.sum = Requantizer(b, own.lanes, own.output, bounds)

    def packed(self, values: list[Any], to: Any) -> Any:
        """Return 16 bytes.

        Args:
            values: Vectors of float32, 16 scaled sums in all.
            to: Address of the bytes in C.
        """
        b, lanes = self.b, self.own.lanes
        own_scale, scale, divisor, inverse, rest = self.scales
        line = load_at(b, b.add(to, self.distance), ir.VectorType(I8, BLOCK), 1)
        widen = b.zext if self.own.output == "uint8" else b.sext
        totals: list[Any] = []
        for j, value in enumerate(values):
            part = shuffle_vectors(b, line, None, range(lanes * j, lanes * (j + 1)))
            whole = b.sub(widen(part, ir.VectorType(I32, lanes)), self.zero)
            residual = b.fmul(b.sitofp(whole, self.own.real), scale)
            total = b.fadd(b.fmul(self.own.unpacked(value), own_scale), residual)
            if host.isa().fma:
                totals.append(emit_quotient(b, total, divisor, inverse, rest))
            else:
                totals.append(b.fdiv(total, divisor))
        return self.sum.packed(totals, list(range(BLOCK)))


def emit_saturating_products(builder: Any, a: Any, b: Any) -> Any:
    """Emit the sums of four products of bytes, of which pairs saturate in 16 bits (vpmaddubsw).

    Args:
        builder: LLVM's builder.
        a: Vector of i32, each four unsigned bytes.
        b: Vector of as many i32, each four signed bytes.

    Returns:
        Vector of as many i32.
    """
    return emit_sums_of_pairs(builder, emit_saturating_pairs(builder, a, b))


def vector_bytes(flavour: str, weights: str, lanes: int) -> int:
    """Return the bytes of B that a step reads for one vector of sums.

    Args:
        flavour: As in `integer_contraction`.
        weights: As in `integer_contraction`.
        lanes: Elements of a vector of sums.
    """
    return 4 * lanes if flavour != "pairs" or weights == "int16" else 2 * lanes


class _IntegerTile:
    """Emits a tile of one size.

    Args:
        e: The emitter.
        t: Address of the `IntegerTileBlock`.
        rows: Rows of the tile.
        vectors: Vectors of a row.
        flavour: As in `integer_contraction`.
        weights: As in `integer_contraction`.

    Attributes:
        acc: Slots of the sums, by row and vector.
        offsets: Bytes of A from row 0 to each row.
        right: Slot of the address of B.
        vector_bytes: Bytes of B that a step reads for one vector of sums.
    """

    def __init__(
        self, e: Emit, t: Any, rows: int, vectors: int, flavour: str, weights: str
    ) -> None:
        e.declaration = IntegerTileBlock
        self.e, self.t, self.vectors, self.flavour, self.weights = e, t, vectors, flavour, weights
        b, kind, bias = e.b, ir.VectorType(I32, e.lanes), e.word(t, "bias")
        start = [load_at(b, b.add(bias, I64(4 * e.lanes * j)), kind, 4) for j in range(vectors)]
        self.acc = [[e.variable(start[j]) for j in range(vectors)] for _ in range(rows)]
        # `pairs` reads A less its zero point, so that its sums need no correction.
        if flavour != "pairs":
            _subtract_zero_points(e, t, self.acc)
        row = e.word(t, "a_row")
        self.vector_bytes = vector_bytes(flavour, weights, e.lanes)
        self.right = e.variable(e.word(t, "b"))
        self.offsets = e.multiples(row, rows)

    def loops(self) -> None:
        """Emit the four loops."""
        e, t, b = self.e, self.t, self.e.b
        steps, last = e.word(t, "steps"), e.word(t, "last_steps")
        at = [e.variable(e.word(t, "a"))]
        with ExitStack() as loops:
            # Closing a loop first advances the address variable of the level around it.
            for name in ("outer", "middle", "inner"):
                left = loops.enter_context(e.loop(e.word(t, f"{name}_count")))
                if name == "outer":
                    # Only the last block of channels may be shorter than the others.
                    steps = b.select(b.icmp_signed("==", left, I64(1)), last, steps)
                loops.callback(_move, e, t, at[-1], f"{name}_a")
                at.append(e.variable(e.get(at[-1])))
            with e.loop(steps):
                # Otherwise LLVM derives the address of each row from the previous row's.
                a, at_b = e.opaque(e.get(at[-1])), e.opaque(e.get(self.right))
                self.step(a, at_b, 0, self.add_products)
                self.step(a, at_b, 1, self.add_products)
                e.put(at[-1], b.add(a, I64(8)))
                e.put(self.right, b.add(at_b, I64(2 * self.vector_bytes * self.vectors)))

    def correct_saturated(self) -> None:
        """Emit the exact computation of the steps whose 16-bit sums may have saturated."""
        e, t, b = self.e, self.t, self.e.b
        entry = e.variable(e.word(t, "saturated_steps"))
        with e.loop(e.word(t, "saturated_count")):
            at = e.get(entry)
            a = b.add(e.word(t, "a"), e.load_i64(at))
            at_b = b.add(e.word(t, "b"), e.load_i64(b.add(at, I64(8))))
            self.step(a, at_b, 0, self.replace_products)
            e.put(entry, b.add(at, I64(16)))

    def step(self, a: Any, at_b: Any, number: int, change: Callable[[Any, Any, Any], Any]) -> None:
        """Emit a step: every sum becomes ``change(sum, bytes of A, vector of B)``.

        Args:
            a: Address of row 0 of A.
            at_b: Address of B.
            number: Steps from these addresses to the step.
            change: Emits the new value of a vector of sums.
        """
        e, b, lanes = self.e, self.e.b, self.e.lanes
        vectors, size = self.vectors, self.vector_bytes
        columns = [
            self.load_right(b.add(at_b, I64(size * (number * vectors + j)))) for j in range(vectors)
        ]
        for offset, sums in zip(self.offsets, self.acc, strict=True):
            at = b.add(b.add(a, offset), I64(4 * number))
            x = splat_value(b, load_at(b, at, I32, 1), lanes)
            for slot, column in zip(sums, columns, strict=True):
                e.put(slot, change(e.get(slot), x, column))
            e.fence()

    def load_right(self, at: Any) -> Any:
        """Load a vector of B: i32 of four bytes, or of ``pairs`` twice as many i16."""
        b, lanes = self.e.b, self.e.lanes
        if self.flavour != "pairs":
            return load_at(b, at, ir.VectorType(I32, lanes), 4)
        words = ir.VectorType(I16, 2 * lanes)
        if self.weights == "int16":
            return load_at(b, at, words, 2)
        return b.sext(load_at(b, at, ir.VectorType(I8, 2 * lanes), 1), words)

    def add_products(self, sums: Any, x: Any, column: Any) -> Any:
        """Return sums plus the products of a step, of which those of ``checked`` may saturate."""
        b = self.e.b
        if self.flavour == "quads":
            return emit_dot4(b, sums, x, column)
        if self.flavour == "checked":
            return b.add(sums, emit_saturating_products(b, x, column))
        pairs = b.bitcast(x, ir.VectorType(I16, 2 * self.e.lanes))
        return b.add(sums, emit_pair_products(b, pairs, column))

    def replace_products(self, sums: Any, x: Any, column: Any) -> Any:
        """Return sums with the exact products of a step instead of those that may saturate."""
        # Sums of 32 bits are exact modulo 2**32, so that the saturated value can be subtracted
        # again.
        saturating = emit_saturating_products(self.e.b, x, column)
        return self.e.b.sub(emit_dot4(self.e.b, sums, x, column), saturating)


def _subtract_zero_points(e: Emit, t: Any, acc: list[list[Any]]) -> None:
    """Subtract row sum times column zero point from the sums, if columns of B have zero points."""
    b, lanes, sums = e.b, e.lanes, e.word(t, "row_sums")
    kind = ir.VectorType(I32, lanes)
    with e.when(b.icmp_signed("!=", sums, I64(0))):
        at = e.word(t, "column_excess")
        columns = [load_at(b, b.add(at, I64(4 * lanes * j)), kind, 4) for j in range(len(acc[0]))]
        for i, row in enumerate(acc):
            factor = splat_value(b, load_at(b, b.add(sums, I64(4 * i)), I32, 4), lanes)
            for slot, column in zip(row, columns, strict=True):
                e.put(slot, b.sub(e.get(slot), b.mul(factor, column)))


def _move(e: Emit, t: Any, slot: Any, stride: str) -> None:
    """Advance an address variable by a field of the block."""
    e.step(slot, e.word(t, stride))


def _finish(e: Emit, t: Any, acc: list[list[Any]], output: str, residual: bool) -> None:
    """Emit the epilogue: requantize the sums and store them; int32 sums are stored as they are."""
    b, lanes = e.b, e.lanes
    c, crs, cjs = e.word(t, "c"), e.word(t, "c_row"), e.word(t, "c_block")
    vectors = len(acc[0])
    if output == "int32":
        for i, row in enumerate(acc):
            for j in range(vectors):
                to = b.add(b.add(c, b.mul(crs, I64(i))), I64(4 * lanes * j))
                store_at(b, to, e.get(row[j]), 4)
        return
    end = TileRequantizer(e, t, vectors, output)
    total = ResidualSum(e, t, end) if residual else None
    group = BLOCK // lanes
    for i, row in enumerate(acc):
        values = [end.of_vector(e.get(slot), j) for j, slot in enumerate(row)]
        to = b.add(c, b.mul(crs, I64(i)))
        if output == "float32":
            for j, value in enumerate(values):
                store_at(b, b.add(to, I64(4 * lanes * j)), value, 4)
            continue
        for j in range(0, vectors, group):
            part, at = values[j : j + group], b.add(to, b.mul(cjs, I64(j // group)))
            packed = total.packed(part, at) if total else end.packed(part, list(range(BLOCK)))
            store_at(b, at, packed, 1)
        e.fence()


def integer_contraction(
    *, flavour: str, weights: str, output: str, residual: bool = False
) -> Callable[..., None]:
    """Return the kernel that computes one tile.

    Its arguments are ``(address of an IntegerTileBlock, rows, vectors, 0)``.

    Args:
        flavour: ``"pairs"``, ``"quads"`` or ``"checked"``: see the module.
        weights: Dtype of B in memory: ``"int8"``, or ``"int16"`` (``pairs`` only).
        output: ``"uint8"`` or ``"int8"``; ``"int32"`` for the sums themselves; ``"float32"`` for
            scaled sums that are not rounded.
        residual: Whether a residual in bytes is added to a result in bytes (`ResidualSum`).
    """
    lanes, mr, nv = integer_tile_shape()

    def emit(e: Emit, t: Any, rows: int, vectors: int, _count: Any) -> None:
        tile = _IntegerTile(e, t, rows, vectors, flavour, weights)
        tile.loops()
        if flavour == "checked":
            tile.correct_saturated()
        _finish(e, t, tile.acc, output, residual)

    name = f"int_{flavour}_{weights}_{output}{'_residual' if residual else ''}"
    # A store needs the vectors of a whole block of outputs.
    group = max(1, BLOCK // lanes)
    sizes = [(rows, vectors) for vectors in range(group, nv + 1, group) for rows in row_counts(mr)]
    return tile_kernel(size_switch(name, "float32", lanes, sizes, emit))
