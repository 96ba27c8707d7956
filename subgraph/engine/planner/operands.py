"""The operands of a plan: values with their layouts, the memory that they share, and weights.

Lowerings read operands and emit steps over them (`EmittedStep`); the memory plan places storages.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import attrs

from subgraph.engine.codegen.tiling import MATRIX_DEPTH, MATRIX_ROWS, MATRIX_SLACK
from subgraph.engine.planner.concrete_types import concrete
from subgraph.engine.planner.views import View, dense
from subgraph.engine.program.reports import Report
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.graph.graph import Node
from subgraph.graph.parameters import Parameter
from subgraph.graph.types import Array, TensorType, numpy_dtype

Layout = Literal["plain", "blocked", "bfloat16", "registers", "strided"]


@attrs.define(eq=False)
class Storage:
    """Memory of one or several operands (views share it).

    Attributes:
        kind: The memory that contains it: the request's arena, an input or output array of the run,
            or a constant, whose content is the same until a parameter changes.
        nbytes: Its size, that of all workers' areas together.
        index: Position among the graph's inputs or outputs, for these kinds.
        content: The content of a constant; a parameter stands for its own array.
        workers: Number of threads that have an area of their own in it.
        worker_stride: Bytes from one worker's area to the next one's; 0 without areas.
        parent: The storage of which this is a part (an input of a concatenation in its output, or
            an output in the input that it overwrites), or None.
        parent_offset: Where in ``parent`` it begins, in bytes.
        longest: The operand with the most positions in a buffer in which operands grow; None: this
            is no such buffer, or steps only read it.
    """

    kind: Literal["arena", "input", "output", "constant"]
    nbytes: int
    index: int = -1
    content: Array | Weight | Parameter | None = None
    workers: int = 1
    worker_stride: int = 0
    parent: Storage | None = None
    parent_offset: int = 0
    longest: Operand | None = None

    def root(self) -> tuple[Storage, int]:
        """Return the outermost storage that contains this one, and the offset in it in bytes."""
        storage, offset = self, 0
        while storage.parent is not None:
            offset += storage.parent_offset
            storage = storage.parent
        return storage, offset

    def flatten(self) -> None:
        """Set the root as the parent, so that chains of parents are followed only once."""
        if self.parent is not None and self.parent.parent is not None:
            self.parent, self.parent_offset = self.root()


@attrs.define(eq=False)
class Operand:
    """A value of the plan: concrete dtype and shape, row-major in its layout.

    Attributes:
        name: The value's name.
        dtype: Its dtype.
        shape: Its logical shape. In "blocked" and "bfloat16" memory is [N, ceil(C / lanes),
            *spatial, lanes], zero in the channels beyond C.
        layout: "plain", "blocked", "bfloat16", "registers" or "strided". In "bfloat16" and
            "registers" values of float32 are stored as bfloat16. "bfloat16" has `MATRIX_SLACK`
            bytes of any content behind them. "registers" are those of the left operand of a
            product over matrix tiles: for each 16 rows, all steps of 32 columns. "strided" is a
            view of memory that is not dense, or repeated; its last part is contiguous.
        view: Where the elements are, in the layout "strided".
        capacity: Positions, along the second last axis, for which an input has room that is its
            buffer; 0 for operands that cannot grow.
        known: Its content, if the plan depends on it (shape arithmetic, small integer weights).
        source: How its content follows from parameters alone, or None: the parameter whose value it
            is, or the recipe of a transposed weight, a folded BatchNormalization. `Lowering.weight`
            accepts each of them.
        storage: Its memory; an alias shares that of its source. None until it is assigned.
        offset: Where in ``storage`` it begins, in bytes.
        lanes: Channels of a block, in layouts with blocks.
        form: The algorithm for which an earlier node of the plan packs this weight, and the
            estimated cycles of that node; None if no earlier node packs it.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    layout: Layout = "plain"
    known: Array | None = None
    source: Parameter | Weight | None = None
    storage: Storage | None = None
    offset: int = 0
    lanes: int = 1
    view: View = ()
    capacity: int = 0
    form: tuple[Any, float] | None = None
    _type: TensorType | None = attrs.field(default=None, init=False, repr=False)

    @classmethod
    def of(cls, name: str, type_: TensorType) -> Operand:
        """Return an operand of a static type.

        Raises:
            ShapeError: A dimension is not a number.
        """
        operand = cls(name, type_.dtype, concrete(type_))
        operand._type = type_
        return operand

    @property
    def type(self) -> TensorType:
        """Its logical type."""
        found = self._type
        # A lowering may set another shape (a view); the cached type is then made anew.
        if found is None or found.shape is not self.shape:
            found = self._type = TensorType(self.dtype, self.shape)
        return found

    @property
    def constant(self) -> bool:
        """Whether its content is the same in every run until a parameter changes."""
        return self.source is not None or self.known is not None

    @property
    def origin(self) -> Parameter | Weight | Array | None:
        """The source from which `Lowering.weight` computes, or the content.

        None if it is computed at run time.
        """
        return self.known if self.source is None else self.source

    @property
    def itemsize(self) -> int:
        """Bytes of an element in memory."""
        if self.layout in ("bfloat16", "registers"):
            return 2
        return numpy_dtype(self.dtype).itemsize

    @property
    def rank(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements, without the padding of a blocked layout."""
        return math.prod(self.shape)

    @property
    def blocks(self) -> int:
        """Number of channel blocks, in layouts with blocks."""
        return -(-self.shape[1] // self.lanes)

    @property
    def memory_shape(self) -> tuple[int, ...]:
        """The dimensions in memory, of operands in layouts with blocks, dense and growing ones."""
        if self.layout == "plain":
            return self.shape
        if self.layout == "strided":
            return (*self.shape[:-2], self.capacity, self.shape[-1])
        return (self.shape[0], self.blocks, *self.shape[2:], self.lanes)

    @property
    def parts(self) -> View:
        """The view of a plain or strided operand."""
        return self.view if self.layout == "strided" else dense(self.shape, self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of its memory, including padding; of a strided operand those of its elements."""
        if self.layout in ("plain", "strided"):
            return self.size * self.itemsize
        if self.layout == "registers":
            rows, columns = math.prod(self.shape[:-1]), self.shape[-1]
            whole = (
                -(-rows // MATRIX_ROWS) * MATRIX_ROWS,
                -(-columns // MATRIX_DEPTH) * MATRIX_DEPTH,
            )
            return math.prod(whole) * self.itemsize
        slack = MATRIX_SLACK if self.layout == "bfloat16" else 0
        return math.prod(self.memory_shape) * self.itemsize + slack

    def grow_in(self, buffer: Storage, capacity: int) -> None:
        """Make the operand the longest one that lies in a buffer, from its first position on.

        Args:
            buffer: The buffer.
            capacity: Positions of the buffer.
        """
        self.layout, self.capacity, self.storage = "strided", capacity, buffer
        self.view = dense(self.shape, self.memory_shape)
        buffer.longest = self

    def store_as(self, layout: Literal["plain", "bfloat16", "registers"]) -> None:
        """Set the layout of an output whose storage is its own, of float32 unless it is plain."""
        self.layout, self.lanes = layout, MATRIX_DEPTH if layout == "bfloat16" else 1
        self.storage = Storage("arena", self.nbytes)


@attrs.frozen(eq=False)
class Scratch:
    """Memory for intermediate results of the steps of one or several nodes.

    Attributes:
        storage: The memory.
        nbytes: Bytes from one thread's area to the next one's; without areas, the size.
    """

    storage: Storage
    nbytes: int


def location_of(argument: Operand | Scratch) -> tuple[Storage, int]:
    """Return the root storage of an operand or scratch memory, and its offset there in bytes."""
    assert argument.storage is not None, "an operand of a step has storage"
    root, offset = argument.storage.root()
    return root, offset + (argument.offset if isinstance(argument, Operand) else 0)


@attrs.frozen(eq=False)
class Weight:
    """An array computed from parameters or constant arrays, cached by the weight cache.

    Attributes:
        recipe: Name of the computation, part of the key in the weight cache.
        make: Computes the array from the arrays of the sources.
        sources: Parameters, constant arrays, or other weights, which are computed first.
    """

    recipe: str
    make: Callable[..., Array]
    sources: tuple[Parameter | Array | Weight, ...]


Argument = int | float | Operand | Scratch | Weight | Kernel | Report


@attrs.frozen(eq=False)
class EmittedStep:
    """One kernel call of a plan.

    Attributes:
        node: The node that it belongs to.
        kernel, arguments, units, grain, flops, bytes: See `Lowering.emit`.
    """

    node: Node
    kernel: Kernel
    arguments: tuple[Argument, ...]
    units: int
    grain: int
    flops: int
    bytes: int
