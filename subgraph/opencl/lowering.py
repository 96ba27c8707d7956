"""Lowering for OPENCL: how an operator becomes launches of OpenCL kernels.

The files ``ops/<family>/opencl.py`` register a function for each operator, as ``cpu.py`` beside
them does, and talk to a `ClLowering`. A launch names a program, a kernel in it and the range of
work-items. An operand becomes two arguments: a buffer, and the element in it where it begins.

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
from subgraph.engine.planner.lowering import (
    LOWERINGS,
    Argument,
    EmittedStep,
    Lowering,
    LoweringRule,
    Operand,
    Unsupported,
)
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.errors import UnsupportedOpError
from subgraph.graph.graph import Node
from subgraph.opencl.runtime import ClSource, ClTraits
from subgraph.opencl.tuning import ClTuning
from subgraph.operators.operator import operator_key
from subgraph.system.registry import Files, Registry, defined_at

_F = TypeVar("_F", bound=Callable[[Node, "ClLowering"], None])
_P = TypeVar("_P", bound=Callable[..., None])
# The last argument is what the shared lowering gave: `KernelArguments`, or a sequence of words.
Translate = Callable[["ClLowering", Kernel, Any], None]
_K = TypeVar("_K", bound=Translate)
Range = tuple[int, ...]
_MAX_COUNT = 2**31  # elements are counted in 32 bits
_PRIMITIVES: dict[str, Callable[..., None]] = {}
_TRANSLATIONS: dict[tuple[str, str], Translate] = {}


@attrs.frozen
class ClLaunch:
    """What runs in a step: a kernel over a range of work-items.

    Attributes:
        source: The program.
        name: The kernel in it.
        global_size: Work-items in one to three dimensions.
        local_size: Work-items of a group; None lets the driver choose.
    """

    source: ClSource
    name: str
    global_size: Range
    local_size: Range | None

    @property
    def description(self) -> str:
        """The name for profiles and messages."""
        return f"{self.source.name}.{self.name}"


# All together: lowerings launch what other files give for kernels and primitives of the CPU.
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
        domain: Their domain.
        dtypes: The first input's dtypes that it takes; None: the function decides.
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
    """Lower these operators by the CPU's functions: what they emit is translated."""
    for op_type in op_types:
        key = operator_key(op_type, domain)
        rule = attrs.evolve(LOWERINGS.get(key), layouts=frozenset({"plain"}))
        CL_LOWERINGS.register(key, rule, defined_at(rule.function))


def cl_primitive(function: _P) -> _P:
    """Decorate what stands for the primitive of that name in ``ops/elementwise/primitives.py``."""
    _PRIMITIVES[function.__name__] = function
    return function


def cl_kernel(module: str, *factories: str) -> Callable[[_K], _K]:
    """Decorate the function that launches what stands for a kernel of the CPU.

    ``module`` is the full name of the module of kernels. The function is called as
    ``function(low, kernel, arguments)`` with what a shared lowering has emitted.
    """

    def register(function: _K) -> _K:
        for factory in factories:
            _TRANSLATIONS[module, factory] = function
        return function

    return register


class ClLowering(Lowering):
    """What a lowering function of OPENCL sees of one node, and where it puts launches."""

    registry: ClassVar[Registry[LoweringRule]] = CL_LOWERINGS
    copies_outputs: ClassVar[bool] = False
    branches: ClassVar[bool] = False
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
        """Launch what stands for a kernel of the CPU.

        Raises:
            Unsupported: there is nothing.
        """
        translate = _TRANSLATIONS.get((kernel.module, kernel.factory))
        if translate is None:
            raise Unsupported(f"{self.node.op_type} has no OpenCL kernel for {kernel.factory}")
        before = len(self.steps)
        if units > 0:
            translate(self, kernel, arguments)
        for k, step in enumerate(self.steps[before:], before):
            self.steps[k] = attrs.evolve(step, flops=step.flops or flops, bytes=step.bytes or bytes)

    def permutes(self, dtype: str) -> bool:
        """Return False: how vectors are computed is up to the device's compiler."""
        return False

    @property
    def traits(self) -> ClTraits:
        """What the device says of itself."""
        return cast("ClTraits", self.options["traits"])

    @property
    def tuning(self) -> ClTuning:
        """Sizes of blocks and groups that suit the device."""
        return cast("ClTuning", self.options["tuning"])

    def require(self, *dtypes: str) -> None:
        """Check that the device computes in these dtypes.

        Raises:
            Unsupported: it does not.
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
            arguments: Whole numbers (passed as int), floats (as float), NumPy scalars (as they
                are), and operands, scratch and weights (as a buffer and the first element).
            global_size: Work-items in one to three dimensions; nothing is launched when one is 0.
            local_size: Work-items of a group; ``global_size`` must be multiples of it.
            flops: Floating-point operations, for the profile.
            bytes: Bytes moved, for the profile.

        Raises:
            Unsupported: an operand has more elements, or a number is larger, than kernels count.
        """
        if 0 in global_size:
            return
        for word in arguments:
            if isinstance(word, Operand) and word.size >= _MAX_COUNT:
                raise Unsupported(f"{word.name!r} has {word.size} elements; kernels count to 2^31")
        for word in arguments:
            if type(word) is int and not -_MAX_COUNT <= word < _MAX_COUNT:
                raise Unsupported(f"{word} is a number of more than 32 bits")
        size = tuple(int(n) for n in global_size)
        group = None if local_size is None else tuple(int(n) for n in local_size)
        kernel = cast(Kernel, ClLaunch(source, name, size, group))
        words = cast("tuple[Argument, ...]", tuple(arguments))
        self.steps.append(EmittedStep(self.node, kernel, words, 1, 0, flops, bytes))
