"""Lowering: the conversion of a node to steps of a program, by one function for each operator.

The files ``ops/<family>/cpu.py`` register a function for each operator that they can run. When a
plan is made for concrete input shapes, the function is called with a `Lowering`: it reads the types
of the operands, chooses a kernel and emits steps. It computes nothing and places no memory. The
memory plan is made afterwards from the operands of all steps.

    @lowering("Neg", dtypes={"float32"})
    def neg(node: Node, low: Lowering) -> None:
        x, y = low.input(0), low.output(0)
        low.in_place(y, x)
        kernel = Kernel("subgraph.ops.elementwise.kernels", "unary", op="Neg", dtype=x.dtype)
        low.emit(kernel, [x, y], units=x.size, grain=16384, bytes=2 * x.nbytes)

A function that raises `Unsupported` refuses the node with a reason; the reference then runs it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeVar

import attrs
import numpy as np

from subgraph.engine.codegen.arguments import KernelArguments
from subgraph.engine.codegen.tiling import MATRIX_DEPTH, MATRIX_ROWS, MATRIX_SLACK
from subgraph.engine.planner.concrete_types import concrete
from subgraph.engine.program.reports import Report
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.errors import SubgraphError, UnsupportedOpError
from subgraph.graph.graph import Node
from subgraph.graph.parameters import Parameter
from subgraph.graph.types import Array, TensorType, numpy_dtype
from subgraph.operators.operator import operator_key
from subgraph.operators.shape_values import concretized
from subgraph.system import guard_pages, host
from subgraph.system.registry import Files, Registry, defined_at

Layout = Literal["plain", "blocked", "bfloat16", "registers"]
_F = TypeVar("_F", bound=Callable[..., None])


class Unsupported(UnsupportedOpError):
    """A lowering refuses a node; the message is the reason that queries report."""


class ValueNeeded(SubgraphError):
    """A lowering needs the content of an input, so that every content needs a plan of its own.

    Attributes:
        index: Position of the input.
    """

    def __init__(self, index: int) -> None:
        super().__init__(f"the content of input {index} is needed")
        self.index = index


@attrs.define(eq=False)
class Storage:
    """Memory of one or several operands (views share it).

    Attributes:
        kind: The memory that contains it: the request's arena, an input or output array of the run,
            a constant of the plan, or a weight.
        nbytes: Its size, that of all workers' areas together.
        index: Position among the graph's inputs or outputs, for these kinds.
        array: The content of a constant.
        weight: The recipe of a weight, None if the weight is a parameter's own array.
        parameter: The parameter whose own array is the weight.
        workers: Number of threads that have an area of their own in it.
        worker_stride: Bytes from one worker's area to the next one's; 0 without areas.
        parent: The storage of which this is a part (an input of a concatenation in its output, or
            an output in the input that it overwrites), or None.
        parent_offset: Where in ``parent`` it begins, in bytes.
    """

    kind: Literal["arena", "input", "output", "constant", "weight"]
    nbytes: int
    index: int = -1
    array: Array | None = None
    weight: Weight | None = None
    parameter: Parameter | None = None
    workers: int = 1
    worker_stride: int = 0
    parent: Storage | None = None
    parent_offset: int = 0

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
    """A value of the plan: concrete dtype and shape, dense, row-major in its layout.

    Attributes:
        name: The value's name.
        dtype: Its dtype.
        shape: Its logical shape. In "blocked" and "bfloat16" memory is [N, ceil(C / lanes),
            *spatial, lanes], zero in the channels beyond C.
        layout: "plain", "blocked", "bfloat16" or "registers"; in the last two, values of float32
            are stored as bfloat16. "bfloat16" has `MATRIX_SLACK` bytes of any content behind them.
            "registers" are those of the left operand of a product over matrix tiles: for each 16
            rows, all steps of 32 columns.
        known: Its content, if the plan depends on it (shape arithmetic, small integer weights).
        parameter: The parameter whose value it is, or None.
        storage: Its memory; an alias shares that of its source. None until it is assigned.
        offset: Where in ``storage`` it begins, in bytes.
        lanes: Channels of a block, in layouts with blocks.
        derived: How it is computed from weights only, or None: a transposed weight, a folded
            BatchNormalization. `Lowering.weight` accepts it like a parameter.
        form: The algorithm for which an earlier node of the plan packs this weight, and the
            estimated cycles of that node; None if no earlier node packs it.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    layout: Layout = "plain"
    known: Array | None = None
    parameter: Parameter | None = None
    storage: Storage | None = None
    offset: int = 0
    lanes: int = 1
    derived: Weight | None = None
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
        return self.parameter is not None or self.derived is not None or self.known is not None

    @property
    def origin(self) -> Parameter | Weight | Array | None:
        """The source from which `Lowering.weight` computes: parameter, derived weight or content.

        None if it is computed at run time.
        """
        if self.parameter is not None:
            return self.parameter
        return self.known if self.derived is None else self.derived

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
    def nbytes(self) -> int:
        """Bytes of its memory, including padding."""
        if self.layout == "plain":
            return self.size * self.itemsize
        if self.layout == "registers":
            rows, columns = math.prod(self.shape[:-1]), self.shape[-1]
            whole = (
                -(-rows // MATRIX_ROWS) * MATRIX_ROWS,
                -(-columns // MATRIX_DEPTH) * MATRIX_DEPTH,
            )
            return math.prod(whole) * self.itemsize
        padded = self.shape[0] * self.blocks * self.lanes * math.prod(self.shape[2:])
        slack = MATRIX_SLACK if self.layout == "bfloat16" else 0
        return padded * self.itemsize + slack

    def store_as_bfloat16(self) -> None:
        """Set the layout "bfloat16" for an output of float32 whose storage is its own."""
        self.layout, self.lanes = "bfloat16", MATRIX_DEPTH
        self.storage = Storage("arena", self.nbytes)

    def store_as_registers(self) -> None:
        """Set the layout "registers" for an output of float32 whose storage is its own."""
        self.layout = "registers"
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


@attrs.frozen(eq=False)
class LoweringRule:
    """The lowering that is registered for an operator.

    Attributes:
        function: Lowers a node.
        dtypes: Dtypes of the first input that it supports; None: the function decides.
        layouts: Layouts of operands that it supports.
    """

    function: Callable[[Node, Lowering], None]
    dtypes: frozenset[str] | None
    layouts: frozenset[Layout]

    def check_dtype(self, node: Node, inputs: Iterable[Operand | None]) -> None:
        """Check the dtype of the first input.

        Raises:
            Unsupported: the lowering does not support it.
        """
        first = next((operand for operand in inputs if operand is not None), None)
        if self.dtypes is not None and first is not None and first.dtype not in self.dtypes:
            raise Unsupported(f"{node.op_type} on {first.dtype} has no kernel")


LOWERINGS: Registry[LoweringRule] = Registry(
    "CPU lowering",
    UnsupportedOpError,
    Files("subgraph.ops", lambda name: name.endswith((".cpu", "_cpu"))),
)


def lowering(
    *op_types: str,
    domain: str = "",
    dtypes: Iterable[str] | None = None,
    layouts: Iterable[Layout] = ("plain",),
) -> Callable[[_F], _F]:
    """Decorate the function that lowers these operators for CPU.

    Args:
        *op_types: Names of operators.
        domain: Their domain; "" is that of ONNX.
        dtypes: Dtypes of the first input that it supports; None: the function decides.
        layouts: Layouts of operands that it supports.
    """

    def register(function: _F) -> _F:
        allowed = None if dtypes is None else frozenset(dtypes)
        rule = LoweringRule(function, allowed, frozenset(layouts))
        for op_type in op_types:
            LOWERINGS.register(operator_key(op_type, domain), rule, defined_at(function))
        return function

    return register


class Lowering:
    """The interface of a lowering function: the operands of one node, and the steps it emits.

    Attributes:
        node: The node.
        inputs: Operands of its inputs, None where one is omitted.
        outputs: Operands of its outputs.
        threads: Largest number of threads that run a step.
        options: The device's configuration by option name.
        float_block: Channels of a block of float32 values in the blocked layout.
        in_place_pairs: (output, input) that may share memory; see `in_place`.
        steps: The steps emitted so far.
        primitives: Functions of this device that replace the primitives of
            ``ops/elementwise/primitives.py``, by name.
        registry: The lowerings of this device.
        kernels: Name of the device's kernels in messages.
        copies_outputs: Whether a plan copies outputs that share memory with other values.
        branches: Whether a run may skip steps, so that a plan may contain an If.
        uses_guard_pages: Whether storages are placed between guard pages, for debugging.
    """

    copies_outputs: ClassVar[bool] = True
    branches: ClassVar[bool] = True
    uses_guard_pages: ClassVar[bool] = bool(guard_pages.MODE)
    registry: ClassVar[Registry[LoweringRule]] = LOWERINGS
    kernels: ClassVar[str] = "CPU"
    primitives: ClassVar[Mapping[str, Callable[..., None]]] = {}

    @classmethod
    def rule_of(cls, node: Node) -> LoweringRule:
        """Return the lowering of a node's operator.

        Raises:
            Unsupported: There is none.
        """
        key = operator_key(node.op_type, node.domain)
        rule = cls.registry.find(key)
        if rule is None:
            raise Unsupported(f"{key} has no {cls.kernels} kernel")
        return rule

    def __init__(
        self,
        node: Node,
        inputs: Sequence[Operand | None],
        outputs: Sequence[Operand],
        *,
        threads: int = 1,
        options: dict[str, Any] | None = None,
        float_block: int = 0,
    ) -> None:
        """Prepare to lower a node.

        Args:
            node: The node.
            inputs: Operands of its inputs.
            outputs: Operands of its outputs.
            threads: Largest number of threads that run a step.
            options: The device's configuration by option name.
            float_block: Channels of a block of float32 values; 0: a vector of this machine.
        """
        self.node = node
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)
        self.threads = threads
        self.options = options or {}
        self.float_block = float_block or self.lanes("float32")
        self.steps: list[EmittedStep] = []
        self.in_place_pairs: list[tuple[Operand, Operand]] = []
        self._placed: list[Storage] = []

    def input(self, index: int) -> Operand:
        """Return the operand of a required input.

        Raises:
            Unsupported: The input is omitted.
        """
        operand = self.inputs[index] if index < len(self.inputs) else None
        if operand is None:
            raise Unsupported(f"{self.node.op_type} without its input {index}")
        return operand

    def optional(self, index: int) -> Operand | None:
        """Return the operand of an input; None if it is omitted."""
        return self.inputs[index] if index < len(self.inputs) else None

    def output(self, index: int = 0) -> Operand:
        """Return the operand of an output."""
        return self.outputs[index]

    def lanes(self, dtype: str) -> int:
        """Return the number of elements of a dtype in one vector of this machine."""
        return host.lanes(dtype)

    def permutes(self, dtype: str) -> bool:
        """Return whether one instruction can permute the elements of a vector arbitrarily."""
        return host.permutes(dtype, self.lanes(dtype))

    def block_lanes(self, dtype: str) -> int:
        """Return the channels of a block of floats, in the blocked layout."""
        return self.float_block if dtype == "float32" else self.lanes(dtype)

    def emit(
        self,
        kernel: Kernel,
        arguments: Sequence[Argument] | KernelArguments,
        units: int,
        *,
        grain: int = 0,
        flops: int = 0,
        bytes: int = 0,
    ) -> None:
        """Add a step.

        Args:
            kernel: The kernel.
            arguments: Its arguments, by name (`KernelArguments`) or in order: integers, floats
                (passed as the bits of a float64), operands, scratch, weights and kernels (passed
                as addresses), and reports (two words: address of the slot, number of the report).
            units: Number of work units, the smallest pieces of a step that a thread can take; with
                0 no step is added.
            grain: Fewest units that a thread takes; with 0 the step runs on one thread.
            flops: Floating-point operations of the whole step, for the profile.
            bytes: Bytes that the step reads and writes, for the profile.
        """
        # A step over an empty tensor has no work units, and its addresses need not be valid.
        if units > 0:
            if isinstance(arguments, KernelArguments):
                arguments = arguments.words()
            self.steps.append(
                EmittedStep(self.node, kernel, tuple(arguments), units, grain, flops, bytes)
            )

    def report(self, operand: str) -> Report:
        """Return the argument with which a kernel reports a value of an input out of range."""
        return Report(f"node {self.node.name!r} ({self.node.op_type})", operand)

    def scratch(self, nbytes: int, *, per_worker: bool = False) -> Scratch:
        """Return memory for this node's steps.

        Args:
            nbytes: Size of the memory, or of each worker's area of it.
            per_worker: Whether each worker has an area of its own. That of worker w begins at
                ``w * Scratch.nbytes``, which may be more than ``nbytes``.
        """
        workers = self.threads if per_worker else 1
        # Each worker's area lies between guard pages of its own, so that writing into a neighbour's
        # is detected.
        if self.uses_guard_pages:
            stride = guard_pages.guarded_stride(nbytes) if per_worker else nbytes
        else:
            # Areas begin on cache lines (64 bytes), so that two workers never write to the same
            # line.
            nbytes = stride = -(-nbytes // 64) * 64
        total = (workers - 1) * stride + nbytes
        storage = Storage("arena", total, workers=workers, worker_stride=stride)
        return Scratch(storage, stride)

    def worker_scratch(self, nbytes: int | None) -> dict[str, Any]:
        """Return the arguments of a kernel for the scratch memory of its workers.

        Args:
            nbytes: Size of a worker's area; None: the kernel uses none.

        Returns:
            The first worker's area as "scratch", and the bytes from an area to the next one as
            "scratch_bytes"; both are 0 if there is none.
        """
        if nbytes is None:
            return {"scratch": 0, "scratch_bytes": 0}
        memory = self.scratch(nbytes, per_worker=True)
        return {"scratch": memory, "scratch_bytes": memory.nbytes}

    def weight(
        self,
        recipe: str,
        make: Callable[..., Array],
        *sources: Operand | Parameter | Array | Weight,
    ) -> Weight:
        """Return a weight that is computed once for each version of its parameters.

        Args:
            recipe: Name of the computation. It must be different whenever ``make`` computes
                something else from the same sources.
            make: Computes the weight from the arrays of the sources.
            *sources: Constant operands (`Operand.constant`), parameters, arrays or weights.

        Raises:
            Unsupported: A source is computed at run time.
        """
        found: list[Parameter | Array | Weight] = []
        for source in sources:
            origin = source.origin if isinstance(source, Operand) else source
            if origin is None:
                name = source.name if isinstance(source, Operand) else ""
                raise Unsupported(f"input {name!r} is computed at run time, no weight")
            if isinstance(origin, np.ndarray) and isinstance(source, Operand):
                # The content of shape arithmetic is an array of objects; a recipe computes on the
                # operand's dtype.
                origin = concretized(origin, source.dtype)
            # Symbolic integers differ from call to call, but a weight is computed once.
            if isinstance(origin, np.ndarray) and origin.dtype.hasobject:
                raise Unsupported(f"recipe {recipe!r} of an array of objects")
            found.append(origin)
        return Weight(recipe, make, tuple(found))

    def alias(self, output: Operand, source: Operand, offset_bytes: int = 0) -> None:
        """Make an output a view of an operand; no step is needed.

        Args:
            output: The output.
            source: The operand.
            offset_bytes: Where in ``source`` the output begins.
        """
        output.storage = source.storage
        output.offset = source.offset + offset_bytes
        output.known = None
        output.parameter = None

    def place(self, source: Operand, output: Operand, offset_bytes: int) -> bool:
        """Let the producer of an input write it directly into the memory of an output.

        For operators that concatenate their inputs.

        Args:
            source: The input.
            output: The output.
            offset_bytes: Where in ``output`` the input begins.

        Returns:
            False if that is not possible: the caller then has to emit a step that copies.
        """
        part, whole = source.storage, output.storage
        if part is None or whole is None or part.kind != "arena" or whole.kind != "arena":
            return False
        # A storage can be in one place only: a value that two concatenations read is copied by the
        # second one. The second test prevents a cycle of parents.
        if part.parent is not None or whole.root()[0] is part:
            return False
        # A view of a part of the storage cannot be moved without the rest of the storage.
        if source.offset or source.nbytes != part.nbytes or output.layout != source.layout:
            return False
        # The producer was lowered earlier; its step refers to the storage, so its address follows
        # this change when the argument words are written.
        part.parent, part.parent_offset = whole, output.offset + offset_bytes
        self._placed.append(part)
        return True

    def undo(self) -> None:
        """Undo all calls of `place`, because the node is lowered in another way."""
        # All other changes of a lowering are to its own outputs and steps, which are dropped with
        # it.
        for part in self._placed:
            part.parent, part.parent_offset = None, 0

    def set_constant(self, output: Operand, array: Array) -> None:
        """Make an output the constant ``array`` of this plan."""
        array = np.ascontiguousarray(array).reshape(output.shape)
        output.known = array
        output.storage = Storage("constant", output.nbytes, array=array)
        output.offset = 0

    def in_place(self, output: Operand, source: Operand) -> None:
        """Allow an output to overwrite an input that no later step reads.

        This is correct only if every element is read before its memory is written, by the same
        work unit.
        """
        self.in_place_pairs.append((output, source))
