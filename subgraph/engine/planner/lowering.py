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

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import attrs
import numpy as np

from subgraph.engine.codegen.arguments import KernelArguments
from subgraph.engine.planner.operands import (
    Argument,
    EmittedStep,
    Layout,
    Operand,
    Scratch,
    Storage,
    Weight,
)
from subgraph.engine.program.reports import Report
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.errors import SubgraphError, UnsupportedOpError
from subgraph.graph.graph import Node
from subgraph.graph.parameters import Parameter
from subgraph.graph.types import Array
from subgraph.operators.operator import family_of, operator_key
from subgraph.operators.shape_values import concretized
from subgraph.system import guard_pages, host
from subgraph.system.registry import Files, Registry, defined_at

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


@attrs.frozen(eq=False)
class LoweringRule:
    """The lowering that is registered for an operator.

    Attributes:
        function: Lowers a node.
        dtypes: Dtypes of the first input that it supports; None: the function decides.
        layouts: Layouts of operands that it supports.
        makes_blocks: Whether it computes a node's outputs in blocks from plain inputs; None: never.
        custom: Whether it is a user's kernel of a custom operator.
    """

    function: Callable[[Node, Lowering], None]
    dtypes: frozenset[str] | None
    layouts: frozenset[Layout]
    makes_blocks: Callable[[Node], bool] | None = None
    custom: bool = False

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
    Files("subgraph.ops", lambda name: name.endswith((".cpu", "_cpu")), family_of),
)


def lowering(
    *op_types: str,
    domain: str = "",
    dtypes: Iterable[str] | None = None,
    layouts: Iterable[Layout] = ("plain",),
    makes_blocks: Callable[[Node], bool] | None = None,
) -> Callable[[_F], _F]:
    """Decorate the function that lowers these operators for CPU.

    Args:
        *op_types: Names of operators.
        domain: Their domain; "" is that of ONNX.
        dtypes: Dtypes of the first input that it supports; None: the function decides.
        layouts: Layouts of operands that it supports.
        makes_blocks: Whether it computes a node's outputs in blocks from plain inputs; None: never.
    """

    def register(function: _F) -> _F:
        allowed = None if dtypes is None else frozenset(dtypes)
        rule = LoweringRule(function, allowed, frozenset(layouts), makes_blocks)
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
        views: Whether kernels read operands in the layout "strided".
        uses_guard_pages: Whether storages are placed between guard pages, for debugging.
    """

    copies_outputs: ClassVar[bool] = True
    branches: ClassVar[bool] = True
    views: ClassVar[bool] = True
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
        self._extended: list[tuple[Storage, Operand]] = []

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

    def extend(self, source: Operand, output: Operand) -> bool:
        """Let an output be the longer form of a growing input, in the same buffer.

        The steps of the node write the positions behind those of the input. Only the longest
        operand of a buffer can be extended: two outputs would write to the same positions.

        Args:
            source: The input.
            output: The output; it differs from the input in the second last dimension.

        Returns:
            False if that is not possible.
        """
        buffer = source.storage
        if buffer is None or buffer.longest is not source:
            return False
        if output.shape[-2] > source.capacity:
            return False
        self._extended.append((buffer, source))
        output.grow_in(buffer, source.capacity)
        return True

    def undo(self) -> None:
        """Undo all calls of `place` and `extend`: the node is lowered in another way."""
        # All other changes of a lowering are to its own outputs and steps, which are dropped with
        # it.
        for part in self._placed:
            part.parent, part.parent_offset = None, 0
        for buffer, source in reversed(self._extended):
            buffer.longest = source

    def set_constant(self, output: Operand, array: Array) -> None:
        """Make an output the constant ``array`` of this plan."""
        array = np.ascontiguousarray(array).reshape(output.shape)
        output.known = array
        output.storage = Storage("constant", output.nbytes, content=array)
        output.offset = 0

    def in_place(self, output: Operand, source: Operand) -> None:
        """Allow an output to overwrite an input that no later step reads.

        This is correct only if every element is read before its memory is written, by the same
        work unit.
        """
        self.in_place_pairs.append((output, source))
