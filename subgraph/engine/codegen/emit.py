"""A layer over LLVM's builder for loops written in IR: register tiles, strips and panels.

They are emitted instead of compiled by numba where the registers of every value matter. Addresses
are LLVM int64 in bytes, as in the blocks that describe a tile. All vectors of one `Emit` have the
same dtype and lanes.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

from llvmlite import ir

from subgraph.dtypes import item_bytes
from subgraph.engine.codegen.arguments import WordBlock
from subgraph.engine.codegen.irtools import (
    ELEMENTS,
    I32,
    I64,
    call_intrinsic,
    emit_fma,
    first_lanes,
    load_at,
    load_masked,
    pointer,
    prefetch_at,
    shuffle_vectors,
    splat_value,
    store_at,
    suffix,
)
from subgraph.engine.codegen.tiling import F_HI, F_LO, TileBlock
from subgraph.system.host import architecture, has_32_registers, isa


class Emit:
    """Emits the operations on vectors of one dtype and width at a builder's position.

    Attributes:
        declaration: Declaration of the block whose words are read by name.
        b: LLVM's builder.
        dtype: Element dtype, ``"float32"`` or ``"float64"``.
        lanes: Elements of a vector.
        item: Bytes of an element.
        scalar: LLVM type of an element.
        vector: LLVM type of a vector.
    """

    declaration: type[WordBlock] = TileBlock

    def __init__(self, builder: Any, dtype: str, lanes: int) -> None:
        self.b = builder
        self.dtype = dtype
        self.lanes = lanes
        self.item = item_bytes(dtype)
        self.scalar = ELEMENTS[dtype][1]
        self.vector = ir.VectorType(self.scalar, lanes)

    def const(self, value: int) -> Any:
        """Return an int64 constant."""
        return ir.Constant(I64, value)

    def fconst(self, value: float) -> Any:
        """Return a vector constant with one value in all lanes."""
        return ir.Constant(self.vector, [ir.Constant(self.scalar, value)] * self.lanes)

    def word(self, block: Any, index: int | str) -> Any:
        """Load a 64-bit word of a block.

        Args:
            block: Address of the block.
            index: Index of the word, or name of a field of the declaration.
        """
        index = self.declaration.fields[index][0] if isinstance(index, str) else index
        return self.load_i64(self.b.add(block, self.const(8 * index)))

    def put_word(self, block: Any, name: str, value: Any) -> None:
        """Store a 64-bit word of a block.

        Args:
            block: Address of the block.
            name: Name of a field of the declaration.
            value: LLVM int64.
        """
        index = self.declaration.fields[name][0]
        store_at(self.b, self.b.add(block, self.const(8 * index)), value, 8)

    def load_i64(self, address: Any) -> Any:
        """Load an int64."""
        return load_at(self.b, address, I64, 8)

    def word_splat(self, block: Any, index: int | str) -> Any:
        """Load a word that holds a float64; return it in all lanes as the vectors' dtype."""
        value = self.b.bitcast(self.word(block, index), ir.DoubleType())
        if self.dtype == "float32":
            value = self.b.fptrunc(value, self.scalar)
        return self.splat(value)

    def splat(self, value: Any) -> Any:
        """Return a vector with a scalar in all lanes."""
        return splat_value(self.b, value, self.lanes)

    def broadcast(self, address: Any) -> Any:
        """Load an element and return it in all lanes."""
        return self.splat(load_at(self.b, address, self.scalar, self.item))

    def load(self, address: Any, mask: Any = None) -> Any:
        """Load a vector; lanes outside ``mask`` are 0, and their memory is not accessed."""
        if mask is None:
            return load_at(self.b, address, self.vector, self.item)
        return load_masked(self.b, address, self.vector, mask, self.item)

    def shuffle(self, value: Any, picks: Sequence[int]) -> Any:
        """Return a vector whose element i is element ``picks[i]`` of a vector."""
        return shuffle_vectors(self.b, value, None, picks)

    def store(self, value: Any, address: Any, mask: Any = None) -> None:
        """Store a vector.

        Args:
            value: The vector.
            address: Address of its first element.
            mask: Lanes to store; None for all. The memory of other lanes is not accessed.
        """
        if mask is None:
            store_at(self.b, address, value, self.item)
            return
        args = [value, pointer(self.b, address, self.vector), I32(self.item), mask]
        name = f"llvm.masked.store.{suffix(self.vector)}.p0"
        call_intrinsic(self.b, name, ir.VoidType(), args)

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        """Return ``a * b + c``, rounded once where the instruction set has FMA.

        Args:
            a: First factor, a vector.
            b: Second factor.
            c: Addend.
        """
        return emit_fma(self.b, a, b, c)

    def opaque(self, value: Any) -> Any:
        """Return an int64 unchanged, as a value of which the optimiser knows nothing.

        LLVM then neither rewrites it in terms of other values nor derives others from it.
        """
        # An empty assembly text with one register as input and output emits no instruction.
        kind = ir.FunctionType(I64, [I64])
        return self.b.call(ir.InlineAsm(kind, "", "=r,0"), [value])

    def multiples(self, step: Any, count: int) -> list[Any]:
        """Return ``0 * step, 1 * step, ...`` using few registers.

        Only odd multiples are computed; the others are scaled by 2, 4 or 8 in x86's addressing
        modes.

        Args:
            step: LLVM int64.
            count: Number of multiples; of more than 8 some need a register of their own.
        """
        b = self.b
        odd = {k: self.opaque(b.mul(step, self.const(k))) for k in range(3, count, 2)}
        odd[1] = step

        def times(i: int) -> Any:
            shift = min((i & -i).bit_length() - 1, 3)
            whole = i >> shift
            return b.shl(odd[whole], self.const(shift)) if whole in odd else b.mul(step, I64(i))

        return [times(i) if i else self.const(0) for i in range(count)]

    def fence(self) -> None:
        """Emit a barrier that loads and stores do not cross when instructions are scheduled.

        Without it LLVM hoists all loads of a loop's body, whose registers spill the accumulators.
        """
        kind = ir.FunctionType(ir.VoidType(), [])
        self.b.call(ir.InlineAsm(kind, "", "~{memory}", side_effect=True), [])

    def fence_values(self, slots: Sequence[Any]) -> None:
        """Emit a `fence` before which the slots' values must have been computed.

        It is a plain `fence` unless x86 code may use 16 vector registers only: instruction sets
        with 16, and vectors shorter than the machine's. Without this, LLVM finishes some sums of a
        step in the next step, and copies all of them between registers.

        Args:
            slots: Results of `variable` that hold vectors.
        """
        few = not has_32_registers() or self.lanes * self.item < isa().vector_bytes
        # The constraint "x" below names x86's vector registers.
        if not few or self.lanes == 1 or architecture() != "x86_64":
            self.fence()
            return
        kind = ir.FunctionType(ir.VoidType(), [self.vector] * len(slots))
        text = "x," * len(slots) + "~{memory}"
        fence = ir.InlineAsm(kind, "", text, side_effect=True)
        self.b.call(fence, [self.get(slot) for slot in slots])

    def prefetch(self, address: Any, *, write: bool = False, near: bool = True) -> None:
        """Emit a prefetch of the cache line at an address.

        Args:
            address: Address of any byte of the line.
            write: Whether the line will be written.
            near: Whether to fetch into the L1 cache; otherwise into the L2.
        """
        prefetch_at(self.b, address, write=write, near=near)

    def tail_mask(self, count: Any) -> Any:
        """Return a mask whose first ``count`` lanes (int64 of any value) are set."""
        return first_lanes(self.b, count, self.lanes)

    def variable(self, value: Any) -> Any:
        """Return a stack slot that holds ``value``; LLVM turns it into registers (mem2reg)."""
        # LLVM turns slots into registers (mem2reg) only if they are allocated in the entry block.
        with self.b.goto_entry_block():
            slot = self.b.alloca(value.type)
        self.b.store(value, slot)
        return slot

    def get(self, slot: Any) -> Any:
        """Return the value of a slot of `variable`."""
        return self.b.load(slot, typ=slot.allocated_type)

    def put(self, slot: Any, value: Any) -> None:
        """Set the value of a slot of `variable`."""
        self.b.store(value, slot)

    def step(self, slot: Any, amount: Any) -> None:
        """Add an int64 to the value of a slot."""
        self.put(slot, self.b.add(self.get(slot), amount))

    @contextmanager
    def loop(self, count: Any) -> Generator[Any]:
        """Emit the body of a ``with`` as a loop of ``count`` iterations, none if not positive.

        Yields:
            The number of iterations left, the present one included: 1 in the last.
        """
        left = self.variable(count)
        with self.while_positive(left):
            yield self.get(left)
            self.step(left, self.const(-1))

    @contextmanager
    def while_positive(self, slot: Any) -> Generator[None]:
        """Emit the body of a ``with`` as a loop that runs while the int64 of a slot is positive."""
        head = self.b.append_basic_block("head")
        body = self.b.append_basic_block("body")
        done = self.b.append_basic_block("done")
        self.b.branch(head)
        self.b.position_at_end(head)
        self.b.cbranch(self.b.icmp_signed(">", self.get(slot), self.const(0)), body, done)
        self.b.position_at_end(body)
        yield
        self.b.branch(head)
        self.b.position_at_end(done)

    @contextmanager
    def when(self, condition: Any) -> Generator[None]:
        """Emit the body of a ``with`` so that it runs if a condition (i1) holds."""
        then = self.b.append_basic_block("then")
        done = self.b.append_basic_block("endif")
        self.b.cbranch(condition, then, done)
        self.b.position_at_end(then)
        yield
        self.b.branch(done)
        self.b.position_at_end(done)

    def flag(self, flags: Any, bit: int) -> Any:
        """Return whether a flag (an integer with one bit set) is set in an int64."""
        return self.b.icmp_signed("!=", self.b.and_(flags, self.const(bit)), self.const(0))


class Sums:
    """The accumulators of a register tile, in registers.

    Attributes:
        e: The emitter.
        acc: Slots of the accumulators, by row and vector.
    """

    def __init__(self, e: Emit, rows: int, vectors: int) -> None:
        """Set all accumulators to 0.

        Args:
            e: The emitter.
            rows: Rows of the tile.
            vectors: Vectors of a row.
        """
        self.e = e
        self.acc = [[e.variable(e.fconst(0.0)) for _ in range(vectors)] for _ in range(rows)]

    def each(self, change: Callable[[int, int, Any], Any]) -> None:
        """Set every accumulator (i, j) of a present ``value`` to ``change(i, j, value)``."""
        for i, row in enumerate(self.acc):
            for j, slot in enumerate(row):
                self.e.put(slot, change(i, j, self.e.get(slot)))

    def bound(self, flags: Any, low: Callable[[], Any], high: Callable[[], Any]) -> None:
        """Apply the bounds that the flags of a `TileBlock` demand.

        Args:
            flags: The flags, LLVM int64.
            low: Returns the lower bound, a vector.
            high: Returns the upper bound, a vector.
        """
        # An ordered comparison is false for NaN, so that NaN passes both bounds.
        for flag, sign, bound_of in ((F_LO, ">", low), (F_HI, "<", high)):
            with self.e.when(self.e.flag(flags, flag)):
                self._select(sign, bound_of())

    def _select(self, sign: str, bound: Any) -> None:
        b = self.e.b
        self.each(lambda i, j, v: b.select(b.fcmp_ordered(sign, bound, v), bound, v))


def private_function(module: Any, name: str, words: int = 1) -> Any:
    """Add a function to a module that only the module calls and that is never inlined.

    Args:
        module: llvmlite's module.
        name: Name of the function, unique in the module.
        words: Number of its parameters, all int64.
    """
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64] * words), name=name)
    function.linkage = "internal"
    function.attributes.add("noinline")
    function.attributes.add("nounwind")
    return function
