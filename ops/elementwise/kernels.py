"""The kernel of every elementwise operator and every fused chain: a program over vectors.

A *program* is a tuple of instructions, each the text ``"name.dtype operand ..."``::

    ("mul.float32 i0 c0", "add.float32 t0 i1", "max.float32 t1 #0")

Names are those of ``primitive_kernels.py`` (``cast.source.target`` has two dtypes). Operands:
``iK`` is input K, ``tK`` the result of instruction K, ``cK`` a number among the kernel arguments,
``#x`` a literal. An output is ``"operand:dtype"``: the operand to store, and the dtype to store.

A tile is a number of rows of contiguous output elements. The index along the dimensions outside the
rows is computed once for each tile. An input is read along a row in one of three modes:

- ``v``: contiguous like the output,
- ``s``: one element for the whole row,
- ``p``: one vector of ``lanes`` elements that repeats (a channel block of the blocked layout).

Rows and outer dimensions have any stride in bytes, 0 to broadcast.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir

from subgraph.dtypes import compute_dtype
from subgraph.engine.codegen import vmath
from subgraph.engine.codegen.irtools import (
    I32,
    I64,
    INT64,
    VOID,
    call_intrinsic,
    define,
    first_lanes,
    load_at,
    pointer,
    splat_value,
    store_at,
    store_masked,
    suffix,
)
from subgraph.system import host

from .primitive_kernels import apply, result_dtype
from .quantize_kernels import BOUNDS, quantized
from .vector_kernels import constant, element, from_memory, storage, to_memory

Value = Any
HEADER = 6  # arguments before the numbers: sizes of rows and tiles
# Short programs compute this many vectors at once, so that the latencies of their instructions
# overlap. Longer programs have that parallelism in one vector, and so have costly functions where
# the machine has 32 vector registers. Estimates.
_MAX_UNROLLED_INSTRUCTIONS, _UNROLL = 6, 4
_COSTLY = frozenset(
    [*vmath.NAMES, "pow", "tan", "sinh", "cosh", "asinh", "acosh", "atanh", "mod", "fmod"]
)


class _Program:
    """A parsed program: its instructions, and the dtypes of inputs, results and outputs."""

    def __init__(
        self,
        program: Sequence[str],
        inputs: Sequence[str],
        modes: Sequence[str],
        outputs: Sequence[str],
    ) -> None:
        self.inputs = list(inputs)
        self._single = {f"i{k}" for k, mode in enumerate(modes) if mode == "s"}
        self.instructions: list[tuple[str, list[str], list[str]]] = []
        self.results: list[str] = []
        for text in program:
            head, *operands = text.split()
            name, *dtypes = head.split(".")
            self.instructions.append((name, dtypes, operands))
            self.results.append(result_dtype(name, dtypes))
        self.outputs = [(text.split(":")[0], text.split(":")[1]) for text in outputs]
        self.numbers = self._numbers()

    def _numbers(self) -> dict[str, str]:
        """Return the dtype in which each number among the kernel arguments is used."""
        found: dict[str, str] = {}
        for _, dtypes, operands in self.instructions:
            for operand in operands:
                if operand.startswith("c"):
                    found[operand] = dtypes[0]
        for operand, dtype in self.outputs:
            if operand.startswith("c"):
                found[operand] = compute_dtype(dtype)
        return dict(sorted(found.items(), key=lambda item: int(item[0][1:])))

    @property
    def unroll(self) -> int:
        """Return the number of vectors to compute at once, so that their latencies overlap."""
        names = [name for name, _, _ in self.instructions]
        if len(names) > _MAX_UNROLLED_INSTRUCTIONS:
            return 1
        costly = _COSTLY.intersection(names)
        return 1 if costly and host.has_32_registers() else _UNROLL

    def _quantization(
        self, name: str, dtypes: Sequence[str], operands: Sequence[str]
    ) -> tuple[str, str, str | None] | None:
        """Return number, scale and zero point if an instruction is the end of a quantization.

        That is ``cast(max(min(rint(x / scale) + zero, most), least))`` to 8 bits by one scale. None
        for others, and where a division of vectors takes less time than what replaces it.
        """
        if name != "cast" or dtypes[0] != "float32" or dtypes[1] not in BOUNDS:
            return None
        if not host.has_512_bit_vectors():
            return None
        least, most = (f"#{bound}" for bound in BOUNDS[dtypes[1]])
        inner = self._operands_of("max", operands[0], least)
        inner = inner and self._operands_of("min", inner[0], most)
        if not inner:
            return None
        zero, added = None, self._operands_of("add", inner[0])
        if added:
            points = [self._operands_of("cast", operand, source=dtypes[1]) for operand in added]
            known = [k for k, point in enumerate(points) if point]
            if len(known) != 1:
                return None
            zero = points[known[0]][0]
            inner = [added[1 - known[0]]]
        rounded = self._operands_of("rint", inner[0])
        divided = self._operands_of("div", rounded[0]) if rounded else []
        if not divided or divided[1] not in self._single or divided[0][0] not in "it":
            return None
        return divided[0], divided[1], zero

    def _operands_of(
        self, name: str, operand: str, second: str = "", source: str = "float32"
    ) -> list[str]:
        """Return the operands of the instruction whose result an operand is; [] if it is another.

        Args:
            name: Name of the instruction.
            operand: The operand.
            second: The instruction's second operand; "": any.
            source: Its first dtype.
        """
        if not operand.startswith("t"):
            return []
        found, dtypes, operands = self.instructions[int(operand[1:])]
        fits = found == name and dtypes[0] == source and second in ("", *operands[1:])
        return operands if fits else []

    def evaluate(
        self, builder: Any, loaded: Sequence[Value], numbers: dict[str, Value], lanes: int
    ) -> list[Value]:
        """Emit the program for one vector of each input; return the vectors to store."""
        values: dict[str, Value] = {f"i{k}": value for k, value in enumerate(loaded)}
        for name, scalar in numbers.items():
            values[name] = splat_value(builder, scalar, lanes)
        for k, (name, dtypes, operands) in enumerate(self.instructions):
            args = [
                constant(dtypes[0], float(o[1:]), lanes) if o.startswith("#") else values[o]
                for o in operands
            ]
            quantization = self._quantization(name, dtypes, operands)
            if quantization is not None:
                x, scale, zero = quantization
                point = None if zero is None else values[zero]
                made = quantized(builder, values[x], values[scale], point, dtypes[1])
            else:
                made = apply(builder, name, dtypes, args)
            values[f"t{k}"] = made
        stored: list[Value] = []
        for operand, dtype in self.outputs:
            if operand.startswith("#"):
                value = constant(dtype, float(operand[1:]), lanes)
            else:
                value = values[operand]
            stored.append(to_memory(builder, value, dtype))
        return stored


def _loop(
    builder: Any,
    start: Value,
    stop: Value,
    step: Value,
    carried: Sequence[Value],
    body: Callable[[Value, list[Value]], list[Value]],
) -> tuple[Value, list[Value]]:
    """Emit the loop ``while at + step <= stop``.

    Args:
        builder: LLVM IR builder; ends up behind the loop.
        start: First value of the counter ``at``.
        stop: Its bound.
        step: Its step.
        carried: Values that each iteration passes to the next.
        body: Emits an iteration, given the counter and the carried values; returns the new ones.

    Returns:
        The counter and the carried values after the loop.
    """
    before = builder.block
    head, inside, done = (builder.append_basic_block(n) for n in ("head", "body", "done"))
    builder.branch(head)
    builder.position_at_end(head)
    at = builder.phi(I64)
    at.add_incoming(start, before)
    phis = [builder.phi(value.type) for value in carried]
    for phi, value in zip(phis, carried, strict=True):
        phi.add_incoming(value, before)
    following = builder.add(at, step)
    builder.cbranch(builder.icmp_signed("<=", following, stop), inside, done)
    builder.position_at_end(inside)
    results = body(at, list(phis))
    at.add_incoming(following, builder.block)
    for phi, value in zip(phis, results, strict=True):
        phi.add_incoming(value, builder.block)
    builder.branch(head)
    builder.position_at_end(done)
    return at, list(phis)


def _argument(builder: Any, args: Value, index: int) -> Value:
    """Load kernel argument ``index``, 64 bits."""
    return load_at(builder, builder.add(args, I64(8 * index)), I64, 8)


def _repeat(builder: Any, vector: Value, lanes: int, times: int) -> Value:
    """Return a vector ``times`` times in a row."""
    if times == 1:
        return vector
    picks = ir.Constant(
        ir.VectorType(I32, lanes * times), [I32(i % lanes) for i in range(lanes * times)]
    )
    return builder.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), picks)


class _Tile:
    """Emits the code of one tile."""

    def __init__(self, program: _Program, modes: Sequence[str], outer: int, lanes: int) -> None:
        self.program = program
        self.modes = [*modes, *("v" for _ in program.outputs)]
        self.dtypes = [*program.inputs, *(dtype for _, dtype in program.outputs)]
        self.outer = outer
        self.lanes = lanes

    def numbers(self, builder: Any, args: Value) -> dict[str, Value]:
        """Load the numbers among the kernel arguments."""
        found: dict[str, Value] = {}
        for name, dtype in self.program.numbers.items():
            word = _argument(builder, args, HEADER + int(name[1:]))
            ty = element(dtype)
            if isinstance(ty, ir.IntType):
                found[name] = builder.trunc(word, ty) if ty.width < 64 else word
            else:
                # An argument has 64 bits: real numbers are passed as float64, whatever they are
                # used as.
                real = builder.bitcast(word, ir.DoubleType())
                found[name] = real if ty == ir.DoubleType() else builder.fptrunc(real, ty)
        return found

    def emit(self, builder: Any, args: Value, unit: Value, numbers: dict[str, Value]) -> None:
        """Emit the code of tile ``unit``: find its rows in each operand, and loop over them."""
        size, block, rows, row_block, chunks, row_chunks = (
            _argument(builder, args, k) for k in range(HEADER)
        )
        at = HEADER + len(self.program.numbers)
        outer_sizes = [_argument(builder, args, at + d) for d in range(self.outer)]
        at += self.outer
        column = builder.mul(builder.urem(unit, chunks), block)
        rest = builder.udiv(unit, chunks)
        row = builder.mul(builder.urem(rest, row_chunks), row_block)
        rest = builder.udiv(rest, row_chunks)
        index: list[Value] = []
        for d in reversed(range(self.outer)):
            index.insert(0, builder.urem(rest, outer_sizes[d]) if d else rest)
            rest = builder.udiv(rest, outer_sizes[d])
        bases: list[Value] = []
        steps: list[Value] = []
        for mode, dtype in zip(self.modes, self.dtypes, strict=True):
            base, step = _argument(builder, args, at), _argument(builder, args, at + 1)
            base = builder.add(base, builder.mul(row, step))
            for d in range(self.outer):
                stride = _argument(builder, args, at + 2 + d)
                base = builder.add(base, builder.mul(index[d], stride))
            if mode == "v":
                base = builder.add(base, builder.mul(column, I64(storage(dtype)[1])))
            bases.append(base)
            steps.append(step)
            at += 2 + self.outer
        count = _least(builder, block, builder.sub(size, column))
        height = _least(builder, row_block, builder.sub(rows, row))

        # The addresses are carried from row to row: one addition for each operand instead of a
        # multiplication.
        def one_row(_at: Value, addresses: list[Value]) -> list[Value]:
            self.row(builder, addresses, count, numbers)
            return [builder.add(a, s) for a, s in zip(addresses, steps, strict=True)]

        _loop(builder, I64(0), height, I64(1), bases, one_row)

    def row(
        self, builder: Any, bases: Sequence[Value], count: Value, numbers: dict[str, Value]
    ) -> None:
        """Emit a row of ``count`` elements: unrolled vectors, single vectors, and a masked rest."""
        lanes = self.lanes
        # Operands that do not change along a row are loaded and converted once for it.
        fixed = [
            self._fixed(builder, k, bases[k], mode)
            for k, mode in enumerate(self.modes[: len(self.program.inputs)])
        ]

        def vectors(times: int) -> Callable[[Value, list[Value]], list[Value]]:
            def body(at: Value, _carried: list[Value]) -> list[Value]:
                self._vectors(builder, bases, fixed, at, times, numbers, None)
                return []

            return body

        at: Value = I64(0)
        times = self.program.unroll
        if times > 1:
            at, _ = _loop(builder, at, count, I64(lanes * times), [], vectors(times))
        if lanes > 1:
            at, _ = _loop(builder, at, count, I64(lanes), [], vectors(1))
            with builder.if_then(builder.icmp_signed("<", at, count)):
                # Lanes after the end compute on zeros, which no instruction traps on, and are not
                # stored.
                mask = first_lanes(builder, builder.sub(count, at), lanes)
                self._vectors(builder, bases, fixed, at, 1, numbers, mask)
        else:
            _loop(builder, at, count, I64(1), [], vectors(1))

    def _fixed(self, builder: Any, k: int, base: Value, mode: str) -> Value:
        """Load a vector that stays the same along a row; None for inputs of mode "v"."""
        if mode == "v":
            return None
        ty, size = storage(self.dtypes[k])
        if mode == "p":
            raw = load_at(builder, base, ir.VectorType(ty, self.lanes), size)
        else:
            raw = splat_value(builder, load_at(builder, base, ty, size), self.lanes)
        return from_memory(builder, raw, self.dtypes[k])

    def _vectors(
        self,
        builder: Any,
        bases: Sequence[Value],
        fixed: Sequence[Value],
        at: Value,
        times: int,
        numbers: dict[str, Value],
        mask: Value,
    ) -> None:
        """Emit ``times`` vectors from element ``at`` on; ``mask`` selects lanes, None: all."""
        lanes = self.lanes * times
        count = len(self.program.inputs)
        loaded: list[Value] = []
        for k in range(count):
            if fixed[k] is not None:
                loaded.append(_repeat(builder, fixed[k], self.lanes, times))
                continue
            ty, size = storage(self.dtypes[k])
            address = builder.add(bases[k], builder.mul(at, I64(size)))
            raw = _load(builder, address, ir.VectorType(ty, lanes), size, mask)
            loaded.append(from_memory(builder, raw, self.dtypes[k]))
        stored = self.program.evaluate(builder, loaded, numbers, lanes)
        for k, value in enumerate(stored, count):
            size = storage(self.dtypes[k])[1]
            address = builder.add(bases[k], builder.mul(at, I64(size)))
            _store(builder, address, value, size, mask)


def _least(builder: Any, a: Value, b: Value) -> Value:
    return builder.select(builder.icmp_signed("<", a, b), a, b)


def _load(builder: Any, address: Value, ty: Any, size: int, mask: Value) -> Value:
    """Load a vector; lanes outside ``mask`` are not read and are 0."""
    if mask is None:
        return load_at(builder, address, ty, size)
    args = [pointer(builder, address, ty), I32(size), mask, ty(None)]
    return call_intrinsic(builder, f"llvm.masked.load.{suffix(ty)}.p0", ty, args)


def _store(builder: Any, address: Value, value: Value, size: int, mask: Value) -> None:
    """Store a vector; lanes outside ``mask`` are not written."""
    if mask is None:
        store_at(builder, address, value, size)
        return
    store_masked(builder, address, value, mask, size)


def run(
    *,
    program: tuple[str, ...],
    inputs: tuple[str, ...],
    modes: tuple[str, ...],
    outputs: tuple[str, ...],
    outer: int,
    lanes: int,
) -> Callable[..., None]:
    """Return the kernel of a program (see the module's docstring); one work unit is one tile.

    Args:
        program: Instructions.
        inputs: Dtype of each input.
        modes: ``v``, ``s`` or ``p`` for each input.
        outputs: ``operand:dtype`` for each output.
        outer: Number of dimensions around the rows.
        lanes: Elements of one vector.

    Kernel arguments, 64 bits each::

        0 elements of a row  1 elements of a row in a tile  2 rows  3 rows in a tile
        4 tiles along a row  5 tiles along the rows  6.. numbers (float64 bits or integers)
        then the sizes of the outer dimensions
        then for each input and output: address, bytes between rows, bytes per outer dimension

    There are (outer sizes * argument 5 * argument 4) work units.
    """
    tile = _Tile(_Program(program, inputs, modes, outputs), modes, outer, lanes)

    def emit(builder: Any, _context: Any, args: Sequence[Value]) -> None:
        numbers = tile.numbers(builder, args[0])

        def one(unit: Value, _carried: list[Value]) -> list[Value]:
            tile.emit(builder, args[0], unit, numbers)
            return []

        _loop(builder, args[1], args[2], I64(1), [], one)

    tiles = define(VOID, [INT64, INT64, INT64], emit)

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        tiles(args, begin, end)

    return kernel
