"""Lowering for OPENCL: the conversion of a node to launches of OpenCL kernels.

The files ``ops/<family>/opencl.py`` register a function for each operator, as ``cpu.py`` beside
them does; it emits launches by a `ClLowering`. A launch names a program, a kernel in it and the
range of work-items. An operand becomes two arguments: a buffer, and the index of its first element
in the buffer.

    @cl_lowering("Neg", dtypes={"float32"})
    def neg(node: Node, low: ClLowering) -> None:
        x, y = low.input(0), low.output()
        low.launch(ClSource("my_family"), "negate", [x, y, x.size], (x.size,))
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar, cast

import attrs
import numpy as np

from subgraph.engine.codegen.arguments import KernelArguments
from subgraph.engine.planner.lowering import LOWERINGS, Lowering, LoweringRule, Unsupported
from subgraph.engine.planner.operands import Argument, EmittedStep, Operand
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.errors import UnsupportedOpError
from subgraph.graph.graph import Node
from subgraph.opencl.runtime import ClSource, ClTraits
from subgraph.opencl.tuning import ClTuning
from subgraph.operators.operator import operator_key
from subgraph.system.registry import Files, Registry, defined_at

_F = TypeVar("_F", bound=Callable[[Node, "ClLowering"], None])
_P = TypeVar("_P", bound=Callable[..., None])
# Launches the OpenCL form of a CPU kernel. The last argument is what the shared lowering passed to
# `emit`: `KernelArguments`, or a sequence of `Argument`.
Translate = Callable[["ClLowering", Kernel, Any], None]
_K = TypeVar("_K", bound=Translate)
Range = tuple[int, ...]
_MAX_COUNT = 2**31  # kernels count elements in int32
_PRIMITIVES: dict[str, Callable[..., None]] = {}
_TRANSLATIONS: dict[tuple[str, str], Translate] = {}


@attrs.frozen
class ClLaunch:
    """The launch of a step: a kernel over a range of work-items.

    Attributes:
        source: The program.
        name: The kernel in it.
        global_size: Number of work-items in each of one to three dimensions.
        local_size: Number of work-items of a group in each dimension; None: the driver chooses.
    """

    source: ClSource
    name: str
    global_size: Range
    local_size: Range | None

    @property
    def description(self) -> str:
        """The name for profiles and messages."""
        return f"{self.source.name}.{self.name}"


# All files are loaded together, as a lowering may need `cl_kernel` functions of any of them.
_FILES = Files("subgraph.ops", lambda name: name.endswith((".opencl", "_opencl")))
CL_LOWERINGS: Registry[LoweringRule] = Registry(
    "OPENCL lowering", UnsupportedOpError, _FILES.load_all
)


def cl_lowering(
    *op_types: str, domain: str = "", dtypes: Iterable[str] | None = None
) -> Callable[[_F], _F]:
    """Decorate the function that lowers these operators for OPENCL.

    Args:
        *op_types: Names of operators.
        domain: Their domain; "" is that of ONNX.
        dtypes: Dtypes of the first input that it supports; None: the function decides.
    """

    def register(function: _F) -> _F:
        allowed = None if dtypes is None else frozenset(dtypes)

        def lower(node: Node, low: Lowering) -> None:
            assert isinstance(low, ClLowering), "plans for OPENCL make ClLowerings"
            function(node, low)

        rule = LoweringRule(lower, allowed, frozenset({"plain"}))
        for op_type in op_types:
            CL_LOWERINGS.register(operator_key(op_type, domain), rule, defined_at(function))
        return function

    return register


def cl_shared(*op_types: str, domain: str = "") -> None:
    """Lower these operators by the CPU's functions; the kernels that these emit are translated.

    Every kernel that they can emit needs a `cl_kernel` function, or the node is refused.

    Args:
        *op_types: Names of operators.
        domain: Their domain; "" is that of ONNX.
    """
    for op_type in op_types:
        key = operator_key(op_type, domain)
        # The translated kernels read plain values only; plans of OPENCL have no blocked layout.
        rule = attrs.evolve(LOWERINGS.get(key), layouts=frozenset({"plain"}))
        CL_LOWERINGS.register(key, rule, defined_at(rule.function))


def cl_primitive(function: _P) -> _P:
    """Decorate the OpenCL form of a primitive of ``ops/elementwise/primitives.py``, of its name."""
    _PRIMITIVES[function.__name__] = function
    return function


def cl_kernel(module: str, *factories: str) -> Callable[[_K], _K]:
    """Decorate the function that launches the OpenCL form of CPU kernels.

    It is called as ``function(low, kernel, arguments)`` with the kernel and arguments that a shared
    lowering passed to `Lowering.emit`.

    Args:
        module: Full name of the module of the CPU kernels.
        *factories: Names of their factories in the module.
    """

    def register(function: _K) -> _K:
        for factory in factories:
            _TRANSLATIONS[module, factory] = function
        return function

    return register


class ClLowering(Lowering):
    """The interface of a lowering function of OPENCL; see `Lowering`."""

    registry: ClassVar[Registry[LoweringRule]] = CL_LOWERINGS
    copies_outputs: ClassVar[bool] = False
    branches: ClassVar[bool] = False
    views: ClassVar[bool] = False
    uses_guard_pages: ClassVar[bool] = False
    kernels: ClassVar[str] = "OpenCL"
    primitives: ClassVar[Mapping[str, Callable[..., None]]] = _PRIMITIVES

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
        """Launch the OpenCL form of a CPU kernel, for a shared lowering.

        Args:
            kernel: The CPU kernel.
            arguments: Its arguments.
            units: Number of work units; with 0 nothing is launched.
            grain: Ignored; the form chooses its ranges.
            flops: Floating-point operations, for the profile.
            bytes: Bytes that are read and written, for the profile.

        Raises:
            Unsupported: The kernel has no OpenCL form.
        """
        translate = _TRANSLATIONS.get((kernel.module, kernel.factory))
        if translate is None:
            raise Unsupported(f"{self.node.op_type} has no OpenCL kernel for {kernel.factory}")
        before = len(self.steps)
        if units > 0:
            translate(self, kernel, arguments)
        # A translation may launch several kernels. Those without counts of their own get those of
        # the CPU's step, which the profile shows.
        for k, step in enumerate(self.steps[before:], before):
            self.steps[k] = attrs.evolve(step, flops=step.flops or flops, bytes=step.bytes or bytes)

    def permutes(self, dtype: str) -> bool:
        """Return False: the device's compiler decides how vectors are computed."""
        return False

    @property
    def traits(self) -> ClTraits:
        """The properties of the device that decide between variants of kernels."""
        return cast("ClTraits", self.options["traits"])

    @property
    def tuning(self) -> ClTuning:
        """The sizes of blocks and work-groups for the device."""
        return cast("ClTuning", self.options["tuning"])

    def require(self, *dtypes: str) -> None:
        """Check that the device supports these dtypes.

        Raises:
            Unsupported: It does not.
        """
        for dtype in dtypes:
            if dtype == "float64" and not self.traits.fp64:
                raise Unsupported("the OpenCL device has no float64")
            if dtype == "float16" and not self.traits.fp16:
                raise Unsupported("the OpenCL device has no float16")

    def launch(
        self,
        source: ClSource,
        name: str,
        arguments: Sequence[Argument | np.generic[Any]],
        global_size: Sequence[int],
        local_size: Sequence[int] | None = None,
        *,
        flops: int = 0,
        bytes: int = 0,
    ) -> None:
        """Add a launch.

        Args:
            source: The program.
            name: The kernel.
            arguments: Integers (passed as int32), floats (as float32), NumPy scalars (in their own
                dtype), operands, scratch and weights (as a buffer and the index of the first
                element), and reports (as the buffer of the slot and the number of the report).
            global_size: Number of work-items in each of one to three dimensions; if one is 0,
                nothing is launched.
            local_size: Number of work-items of a group in each dimension, which divides
                ``global_size``; None: the driver chooses.
            flops: Floating-point operations, for the profile.
            bytes: Bytes that are read and written, for the profile.

        Raises:
            Unsupported: An operand has 2^31 elements or more, an integer does not fit in int32, or
                there are more than 2^31 work-items.
        """
        if 0 in global_size:
            return
        for argument in arguments:
            if isinstance(argument, Operand) and argument.size >= _MAX_COUNT:
                reason = f"{argument.name!r} has {argument.size} elements; kernels count to 2^31"
                raise Unsupported(reason)
        for argument in arguments:
            if type(argument) is int and not -_MAX_COUNT <= argument < _MAX_COUNT:
                raise Unsupported(f"{argument} is a number of more than 32 bits")
        size = tuple(int(n) for n in global_size)
        if max(size) > _MAX_COUNT:  # a work-item's number is an int, too
            raise Unsupported(f"{max(size)} work-items; kernels count to 2^31")
        group = None if local_size is None else tuple(int(n) for n in local_size)
        # The planner only stores the kernel of a step, so that a launch can take its place.
        kernel = cast("Kernel", ClLaunch(source, name, size, group))
        words = cast("tuple[Argument, ...]", tuple(arguments))
        self.steps.append(EmittedStep(self.node, kernel, words, 1, 0, flops, bytes))
