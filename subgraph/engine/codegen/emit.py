"""Writing LLVM vector IR by hand: what the register tiles and other emitted loops are written with.

Addresses are 64-bit integers, as in the blocks of words that describe a tile; all vectors of one
`Emit` have the same width.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

from llvmlite import ir

from subgraph.dtypes import item_bytes
from subgraph.engine.codegen.arguments import WordBlock
from subgraph.engine.codegen.irtools import ELEMENTS
from subgraph.engine.codegen.simd import emit_fma, first_lanes
from subgraph.engine.codegen.tiling import TileBlock
from subgraph.system.host import architecture, has_32_registers, isa
from subgraph.system.numba_internals import cgutils

_I32 = ir.IntType(32)
_I64 = ir.IntType(64)
_PTR = ir.PointerType()


class Emit:
    """A thin layer over an LLVM builder: addresses are 64-bit integers, vectors have one width.

    Attributes:
        declaration: That of the block whose words are read by name.
    """

    declaration: type[WordBlock] = TileBlock

    def __init__(self, builder: Any, dtype: str, lanes: int) -> None:
        self.b = builder
        self.dtype = dtype
        self.lanes = lanes
        self.item = item_bytes(dtype)
        self.scalar = ELEMENTS[dtype][1]
        self.vector = ir.VectorType(self.scalar, lanes)
        self.suffix = f"v{lanes}{'f32' if dtype == 'float32' else 'f64'}"

    def const(self, value: int) -> Any:
        """Return a 64-bit integer constant."""
        return ir.Constant(_I64, value)

    def fconst(self, value: float) -> Any:
        """Return a vector with one value in all lanes."""
        return ir.Constant(self.vector, [ir.Constant(self.scalar, value)] * self.lanes)

    def word(self, block: Any, index: int | str) -> Any:
        """Load a word of a block: by index, or a field of the declaration by name."""
        index = self.declaration.fields[index][0] if isinstance(index, str) else index
        return self.load_i64(self.b.add(block, self.const(8 * index)))

    def put_word(self, block: Any, name: str, value: Any) -> None:
        """Store a field of a block."""
        index = self.declaration.fields[name][0]
        where = self.b.add(block, self.const(8 * index))
        self.b.store(value, self.b.inttoptr(where, _PTR))

    def load_i64(self, address: Any) -> Any:
        """Load one 64-bit integer."""
        return self.b.load(self.b.inttoptr(address, _PTR), typ=_I64)

    def word_splat(self, block: Any, index: int | str) -> Any:
        """Load a float64 word and return it in all lanes."""
        value = self.b.bitcast(self.word(block, index), ir.DoubleType())
        if self.dtype == "float32":
            value = self.b.fptrunc(value, self.scalar)
        return self.splat(value)

    def splat(self, value: Any) -> Any:
        """Return a vector with a scalar in all lanes."""
        undef = ir.Constant(self.vector, ir.Undefined)
        one = self.b.insert_element(undef, value, ir.Constant(_I32, 0))
        zeros = ir.Constant(ir.VectorType(_I32, self.lanes), [0] * self.lanes)
        return self.b.shuffle_vector(one, undef, zeros)

    def broadcast(self, address: Any) -> Any:
        """Load one element and return it in all lanes."""
        value = self.b.load(self.b.inttoptr(address, _PTR), typ=self.scalar)
        value_align(value, self.item)
        return self.splat(value)

    def load(self, address: Any, mask: Any = None) -> Any:
        """Load a vector; lanes outside ``mask`` become zero and are not touched in memory."""
        pointer = self.b.inttoptr(address, _PTR)
        if mask is None:
            value = self.b.load(pointer, typ=self.vector)
            value_align(value, self.item)
            return value
        kind = ir.FunctionType(self.vector, [_PTR, _I32, mask.type, self.vector])
        name = f"llvm.masked.load.{self.suffix}.p0"
        function = cgutils.get_or_insert_function(self.b.module, kind, name)
        return self.b.call(
            function, [pointer, ir.Constant(_I32, self.item), mask, self.fconst(0.0)]
        )

    def shuffle(self, value: Any, picks: Sequence[int]) -> Any:
        """Return a vector of the elements ``picks`` of a vector."""
        mask = ir.Constant(ir.VectorType(_I32, len(picks)), list(picks))
        return self.b.shuffle_vector(value, ir.Constant(value.type, ir.Undefined), mask)

    def store(self, value: Any, address: Any, mask: Any = None) -> None:
        """Store a vector, or its lanes inside ``mask``."""
        pointer = self.b.inttoptr(address, _PTR)
        if mask is None:
            value_align(self.b.store(value, pointer), self.item)
            return
        kind = ir.FunctionType(ir.VoidType(), [self.vector, _PTR, _I32, mask.type])
        name = f"llvm.masked.store.{self.suffix}.p0"
        function = cgutils.get_or_insert_function(self.b.module, kind, name)
        self.b.call(function, [value, pointer, ir.Constant(_I32, self.item), mask])

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        """Return ``a * b + c``, fused where the machine has it."""
        return emit_fma(self.b, a, b, c)

    def opaque(self, value: Any) -> Any:
        """Return an integer of which the optimiser knows nothing, so that it stays as it is."""
        kind = ir.FunctionType(_I64, [_I64])
        return self.b.call(ir.InlineAsm(kind, "", "=r,0"), [value])

    def multiples(self, step: Any, count: int) -> list[Any]:
        """Return 0, 1, 2, ... times a step, at most eight of them, in few registers."""
        b = self.b
        odd = {k: self.opaque(b.mul(step, self.const(k))) for k in (3, 5, 7) if k < count}
        odd[1] = step

        def times(i: int) -> Any:
            shift = (i & -i).bit_length() - 1
            return b.shl(odd[i >> shift], self.const(shift)) if i else self.const(0)

        return [times(i) for i in range(count)]

    def fence(self) -> None:
        """Keep loads on their side: LLVM's scheduler hoists them all and spills accumulators."""
        kind = ir.FunctionType(ir.VoidType(), [])
        self.b.call(ir.InlineAsm(kind, "", "~{memory}", side_effect=True), [])

    def hold(self, slots: Sequence[Any]) -> None:
        """As `fence`, and what the slots hold is computed before it, where x86 has few registers.

        Else LLVM finishes some sums of a step in the next one and moves all of them between
        registers. Halves of vectors keep to the 16 registers of machines whose vectors they are.
        """
        few = not has_32_registers() or self.lanes * self.item < isa().vector_bytes
        if not few or self.lanes == 1 or architecture() != "x86_64":
            self.fence()
            return
        kind = ir.FunctionType(ir.VoidType(), [self.vector] * len(slots))
        text = "x," * len(slots) + "~{memory}"
        hold = ir.InlineAsm(kind, "", text, side_effect=True)
        self.b.call(hold, [self.get(slot) for slot in slots])

    def prefetch(self, address: Any, *, write: bool = False, near: bool = True) -> None:
        """Ask for the cache line at an address ahead of its use; not ``near``: past the L1."""
        kind = ir.FunctionType(ir.VoidType(), [_PTR, _I32, _I32, _I32])
        function = cgutils.get_or_insert_function(self.b.module, kind, "llvm.prefetch.p0")
        flags = [ir.Constant(_I32, value) for value in (int(write), 3 if near else 2, 1)]
        self.b.call(function, [self.b.inttoptr(address, _PTR), *flags])

    def tail_mask(self, count: Any) -> Any:
        """Return the mask of the first ``count`` lanes."""
        return first_lanes(self.b, count, self.lanes)

    def variable(self, value: Any) -> Any:
        """Return a stack slot holding ``value`` (becomes a register)."""
        with self.b.goto_entry_block():
            slot = self.b.alloca(value.type)
        self.b.store(value, slot)
        return slot

    def get(self, slot: Any) -> Any:
        """Load a slot of :meth:`variable`."""
        return self.b.load(slot, typ=slot.allocated_type)

    def put(self, slot: Any, value: Any) -> None:
        """Store into a slot of :meth:`variable`."""
        self.b.store(value, slot)

    def step(self, slot: Any, amount: Any) -> None:
        """Add to an integer slot."""
        self.put(slot, self.b.add(self.get(slot), amount))

    @contextmanager
    def loop(self, count: Any) -> Generator[Any]:
        """Run the body ``count`` times (none when it is not positive); give the rounds left."""
        left = self.variable(count)
        head = self.b.append_basic_block("head")
        body = self.b.append_basic_block("body")
        done = self.b.append_basic_block("done")
        self.b.branch(head)
        self.b.position_at_end(head)
        self.b.cbranch(self.b.icmp_signed(">", self.get(left), self.const(0)), body, done)
        self.b.position_at_end(body)
        yield self.get(left)
        self.step(left, self.const(-1))
        self.b.branch(head)
        self.b.position_at_end(done)

    @contextmanager
    def when(self, condition: Any) -> Generator[None]:
        """Run the body when the condition holds."""
        then = self.b.append_basic_block("then")
        done = self.b.append_basic_block("endif")
        self.b.cbranch(condition, then, done)
        self.b.position_at_end(then)
        yield
        self.b.branch(done)
        self.b.position_at_end(done)

    def flag(self, flags: Any, bit: int) -> Any:
        """Return whether a bit of a flag word is set."""
        return self.b.icmp_signed("!=", self.b.and_(flags, self.const(bit)), self.const(0))


def value_align(instruction: Any, align: int) -> None:
    """Say that an access is aligned to single elements only."""
    instruction.align = align


def private_function(module: Any, name: str, words: int = 1) -> Any:
    """Declare a function of some 64-bit words, of this module, that is never inlined."""
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [_I64] * words), name=name)
    function.linkage = "internal"
    function.attributes.add("noinline")
    function.attributes.add("nounwind")
    return function
