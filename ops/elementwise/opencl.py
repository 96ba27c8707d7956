"""Elementwise operators and fused chains of them on OPENCL: one generated kernel for each program.

The text depends on the program, the dtypes and the access mode of each operand (element by element,
one element for all, strided), never on sizes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np

from subgraph.dtypes import INTEGERS, UNSIGNED, compute_dtype
from subgraph.engine.planner.operands import Argument, Operand, Weight
from subgraph.graph.types import numpy_dtype
from subgraph.opencl.lowering import ClLowering, cl_primitive, cl_shared
from subgraph.opencl.runtime import ClSource
from subgraph.operators.schema import INTERNAL_DOMAIN
from subgraph.ops.shared.opencl_code import BFLOAT16, line, load, register, require, storage, store
from subgraph.ops.shared.strides import Ints, broadcast_strides, collapse, contiguous

from .cpu import Source, finish
from .expressions import EXPANSIONS, TO_BOOL, Expression, Term

_CHUNK = 1024  # elements of a work-item where all operands are contiguous; an estimate
_MIN_ROW = 16  # elements of a row for which a work-item loops over it; an estimate
_MIN_ROWS_PER_UNIT = 4  # rows for each compute unit, so that all have work; an estimate
_INFIX = {
    "add": "+",
    "sub": "-",
    "mul": "*",
    "eq": "==",
    "ne": "!=",
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
}
_BITS = {"and": "&", "or": "|", "xor": "^"}
# Primitives on floats that are functions of OpenCL C of the same name.
_BUILTIN = frozenset(
    [
        *("exp", "expm1", "log", "log1p", "tanh", "sin", "cos", "tan", "asin", "acos", "atan"),
        *("sinh", "cosh", "asinh", "acosh", "atanh", "erf", "sqrt", "floor", "ceil", "rint"),
        *("trunc", "pow", "fmod", "isnan"),
    ]
)
# Expressions of the other primitives; {0} and {1} are operands, {T} the C type.
_REAL = {
    "recip": "(1 / {0})",
    "sigmoid": "(1 / (1 + exp(-{0})))",
    "silu": "({0} / (1 + exp(-{0})))",
    "softplus": "(fmax({0}, ({T})0) + log1p(exp(-fabs({0}))))",
    "gelu": "({0} * ({T})0.5 * (1 + erf({0} * ({T})0.70710678118654752440)))",
    "abs": "fabs({0})",
    "neg": "(-{0})",
    "max": "(isnan({0}) ? {0} : {0} > {1} ? {0} : {1})",
    "min": "(isnan({0}) ? {0} : {0} < {1} ? {0} : {1})",
    "sign": "({0} > 0 ? ({T})1 : {0} < 0 ? ({T})-1 : {0} == 0 ? ({T})0 : {0})",
    "div": "({0} / {1})",
    "mod": "python_mod_{T}({0}, {1})",
}
_INTEGER = {
    "abs": "({0} < 0 ? ({T})-{0} : {0})",
    "neg": "({T})(-{0})",
    "not": "({T})(~{0})",
    "sign": "({T})({0} > 0 ? 1 : {0} < 0 ? -1 : 0)",
    "max": "({0} > {1} ? {0} : {1})",
    "min": "({0} < {1} ? {0} : {1})",
    "div": "divide_{T}({0}, {1})",
    "mod": "python_mod_{T}({0}, {1})",
    "fmod": "rest_{T}({0}, {1})",
    "pow": "power_{T}({0}, {1})",
    "shl": "((ulong){1} < {bits} ? ({T})({0} << ({1} & {last})) : ({T})0)",
    "shr": "((ulong){1} < {bits} ? ({T})({0} >> ({1} & {last})) : ({T})({0} < 0 ? -1 : 0))",
}
_REAL_HELPERS = """
{T} python_mod_{T}({T} a, {T} b) {{
  {T} rest = fmod(a, b);
  if (rest == 0) return copysign(({T})0, b);
  return (rest < 0) != (b < 0) ? rest + b : rest;
}}
"""
_INTEGER_HELPERS = """
{T} divide_{T}({T} a, {T} b) {{
  if (b == 0) return 0;
  {minus}
  return a / b;
}}
{T} rest_{T}({T} a, {T} b) {{
  if (b == 0 {or_minus}) return 0;
  return a % b;
}}
{T} python_mod_{T}({T} a, {T} b) {{
  {T} rest = rest_{T}(a, b);
  return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
}}
{T} power_{T}({T} a, {T} b) {{
  if (b < 0) return a == 1 ? 1 : a == ({T})-1 ? ((b & 1) ? a : ({T})1) : ({T})0;
  {T} result = 1;
  for (; b; b >>= 1, a *= a) if (b & 1) result *= a;
  return result;
}}
"""
_ROUND = """
float round_to_half(float x) { ushort held; vstore_half(x, 0, (half*)&held);
  return vload_half(0, (half*)&held); }
"""


def _helpers(dtype: str) -> str:
    """Return the C functions that the expressions of a dtype call."""
    kind = register(dtype)
    if dtype not in INTEGERS:
        return _REAL_HELPERS.format(T=kind)
    signed = dtype not in UNSIGNED.values()
    return _INTEGER_HELPERS.format(
        T=kind,
        minus="if (b == -1) return -a;" if signed else "",
        or_minus="|| b == -1" if signed else "",
    )


class Writer:
    """Translates the instructions of an expression to OpenCL C.

    Attributes:
        expression: The expression.
        helpers: Texts of the C functions that the statements call, in order of first use.
    """

    def __init__(self, expression: Expression) -> None:
        """Start without helper functions."""
        self.expression = expression
        self.helpers: dict[str, None] = {}

    def body(self) -> list[str]:
        """Return a statement for each instruction."""
        return [self._instruction(k, text) for k, text in enumerate(self.expression.instructions)]

    def prelude(self) -> str:
        """Return the functions that the statements call; valid after `body`."""
        return "".join(self.helpers)

    def _instruction(self, index: int, text: str) -> str:
        head, *operands = text.split(" ")
        name, dtype, *more = head.split(".")
        if name == "cast":
            kind, value = _ctype(more[0]), self._cast(operands[0], dtype, more[0])
        elif name == "pow" and more:
            kind, (a, b) = _ctype(more[0]), operands
            value = f"({b} == 2 ? {a} * {a} : ({kind})pow(({_ctype(dtype)}){a}, {b}))"
        elif name == "where":
            condition, a, b = operands
            kind = _ctype(dtype)
            first, second = self._operand(a, dtype), self._operand(b, dtype)
            value = f"({condition} ? {first} : {second})"
        else:
            kind = "bool" if name in TO_BOOL else _ctype(dtype)
            value = self._apply(name, dtype, [self._operand(o, dtype) for o in operands])
        return f"  {kind} t{index} = {value};"

    @staticmethod
    def _operand(text: str, dtype: str) -> str:
        return literal(text[1:], dtype) if text.startswith("#") else text

    def _apply(self, name: str, dtype: str, args: list[str]) -> str:
        kind = _ctype(dtype)
        if dtype == "bool":
            return _boolean(name, args)
        if name.startswith("round_"):
            return self._rounded(name, args[0])
        if name in _INFIX:
            value = f"{args[0]} {_INFIX[name]} {args[1]}"
            return value if name in TO_BOOL else f"({kind})({value})"
        if name in _BITS:
            return f"({kind})({args[0]} {_BITS[name]} {args[1]})"
        if dtype in INTEGERS:
            self.helpers[_helpers(dtype)] = None
            bits = 8 * numpy_dtype(dtype).itemsize
            return _INTEGER[name].format(*args, T=kind, bits=bits, last=bits - 1)
        if name == "pow":
            return f"({args[1]} == 2 ? {args[0]} * {args[0]} : pow({args[0]}, {args[1]}))"
        if name in _BUILTIN:
            return f"{name}({', '.join(args)})"
        if name == "mod":
            self.helpers[_helpers(dtype)] = None
        return _REAL[name].format(*args, T=kind)

    def _rounded(self, name: str, value: str) -> str:
        if name == "round_bfloat16":
            return f"from_bfloat16(to_bfloat16({value}))"
        self.helpers[_ROUND] = None
        return f"round_to_half({value})"

    @staticmethod
    def _cast(value: str, source: str, target: str) -> str:
        kind = _ctype(target)
        if target == "bool":
            return f"({value} != 0)"
        if source in INTEGERS or source == "bool" or target not in INTEGERS:
            return f"({kind}){value}"
        # Through a wider signed integer, as C compilers (and NumPy) do on most hosts.
        if numpy_dtype(target).itemsize <= 2:
            return f"({kind})(int){value}"
        if target == "uint64":
            large = "9223372036854775808.0f" if source == "float32" else "9223372036854775808.0"
            high = f"(ulong)(long)({value} - {large}) ^ 0x8000000000000000UL"
            return f"({value} >= {large} ? {high} : (ulong)(long){value})"
        return f"({kind})(long){value}" if target == "uint32" else f"({kind}){value}"


def _ctype(dtype: str) -> str:
    """Return the C type in which a dtype is computed; comparisons are bool."""
    return "bool" if dtype == "bool" else register(dtype)


def _boolean(name: str, args: list[str]) -> str:
    """Return the expression of a primitive on truth values."""
    if name == "not":
        return f"!{args[0]}"
    return f"({args[0]} {({**_INFIX, **_BITS})[name]} {args[1]})"


def literal(number: str, dtype: str) -> str:
    """Return a number as a C literal of a dtype."""
    if dtype == "bool":
        return "1" if float(number) else "0"
    if dtype in INTEGERS:
        return f"({register(dtype)}){number}"
    value = float(number)
    if math.isinf(value) or math.isnan(value):
        text = "NAN" if math.isnan(value) else "INFINITY" if value > 0 else "-INFINITY"
        return f"({register(dtype)}){text}"
    return f"({value!r}f)" if register(dtype) == "float" else f"({value!r})"


@attrs.frozen
class Walk:
    """How the work-items of a kernel traverse the elements.

    Attributes:
        dims: Merged dimensions of the output.
        strides: Strides of each input along them, in elements.
        rows: Whether a work-item computes a row (or `_CHUNK` contiguous elements), else one
            element.
    """

    dims: Ints
    strides: tuple[Ints, ...]
    rows: bool

    @property
    def modes(self) -> list[str]:
        """Access mode of each input: "flat" as the output, "one" element for all, "strided"."""
        whole = contiguous(self.dims)
        return [
            "one" if not any(steps) else "flat" if steps == whole else "strided"
            for steps in self.strides
        ]

    @property
    def strided(self) -> bool:
        """Whether some input has the mode "strided"."""
        return "strided" in self.modes

    @property
    def size(self) -> int:
        """Elements of a row, the work of one work-item if `rows`."""
        return self.dims[-1] if self.strided else _CHUNK

    def at(self, k: int) -> str:
        """Return the C expression of the index in input ``k`` of element ``j`` of the row."""
        mode, steps = self.modes[k], self.strides[k]
        if mode != "strided":
            return f"o{k} + first + j" if mode == "flat" else f"o{k}"
        last = len(self.dims) - 1
        outer = " + ".join([f"o{k}", *(f"d{d} * s{k}_{d}" for d in range(last))])
        step = {0: "0", 1: "j"}.get(steps[-1], f"j * s{k}_{last}") if self.rows else ""
        return f"{outer} + {step or f'd{last} * s{k}_{last}'}"


def program(expression: Expression, outputs: Sequence[tuple[Term, str]], walk: Walk) -> str:
    """Return the text of the kernel ``run``.

    Args:
        expression: The expression to compute.
        outputs: The term stored in each output, and the dtype of that output.
        walk: How the work-items traverse the elements.
    """
    writer = Writer(expression)
    body = writer.body()
    inputs = list(zip(expression.dtypes, walk.modes, strict=True))
    rank = len(walk.dims) if walk.strided else 0
    parameters = ["int total", "int size"] if walk.rows else ["int total"]
    parameters += [
        f"{storage(compute_dtype(_number_dtype(expression, k)))} c{k}"
        for k in range(len(expression.numbers))
    ]
    parameters += [f"int n{d}" for d in range(1, rank)]
    for k, (dtype, mode) in enumerate(inputs):
        parameters += [f"__global const {storage(dtype)}* p{k}", f"int o{k}"]
        if mode == "strided":
            parameters += [f"int s{k}_{d}" for d in range(rank)]
    for k, (_, dtype) in enumerate(outputs):
        parameters += [f"__global {storage(dtype)}* q{k}", f"int r{k}"]
    inner = [
        f"  {_ctype(dtype)} i{k} = {load(dtype, f'p{k}', walk.at(k))};"
        for k, (dtype, _) in enumerate(inputs)
    ]
    inner += body
    inner += [
        "  " + store(dtype, f"q{k}", f"r{k} + first + j", term.name)
        for k, (term, dtype) in enumerate(outputs)
    ]
    bfloat16 = "bfloat16" in str((*expression.dtypes, *outputs, *expression.instructions))
    prelude = (BFLOAT16 if bfloat16 else "") + writer.prelude()
    head = f"__kernel void run({', '.join(parameters)}) {{"
    return "\n".join([prelude, head, *_around(inner, walk, rank), "}", ""])


def _around(inner: Sequence[str], walk: Walk, rank: int) -> list[str]:
    """Put the statements for one element into a loop over a row, or into a work-item each."""
    lines = ["  int id = get_global_id(0), rest = id, j = 0;"]
    if walk.rows:
        lines += ["  int first = id * size, many = min(size, total - first);"]
        outer = rank - 1
    else:
        lines += ["  int first = id;", "  if (id >= total) return;"]
        outer = rank
    lines += [f"  int d{d} = rest % n{d}; rest /= n{d};" for d in range(outer - 1, 0, -1)]
    lines += ["  int d0 = rest;"] if outer > 0 else []
    if not walk.rows:
        return [*lines, *inner]
    # Iterations are independent: an output that overwrites an input does so element by element.
    loop = ["#pragma clang loop vectorize(assume_safety)", "  for (j = 0; j < many; j++) {"]
    return [*lines, *loop, *(f"  {line_}" for line_ in inner), "  }"]


def _number_dtype(expression: Expression, index: int) -> str:
    """Return the dtype of a number: that in which the instruction that reads it computes."""
    for text in expression.instructions:
        head, *operands = text.split(" ")
        if f"c{index}" in operands:
            return head.split(".")[1]
    return "float32"


def _walk(low: ClLowering, sources: Sequence[Source], target: Operand) -> Walk:
    """Return how the work-items traverse the elements: rows on CPUs, single elements on GPUs."""
    strides = [broadcast_strides(s.shape, target.shape) for s in sources]
    strides.append(contiguous(target.shape))
    dims, merged = collapse(target.shape, strides)
    walk = Walk(dims, tuple(merged[:-1]), not low.traits.is_gpu)
    if walk.rows and walk.strided:
        few_rows = (
            target.size // dims[-1] < _MIN_ROWS_PER_UNIT * low.traits.units and dims[-1] > _CHUNK
        )
        return attrs.evolve(walk, rows=dims[-1] >= _MIN_ROW and not few_rows)
    return walk


@cl_primitive
def emit_expression(
    low: ClLowering,
    expression: Expression,
    sources: Sequence[Source],
    results: Sequence[tuple[Term, Operand]],
    *,
    keeps_zero: bool = False,
) -> None:
    """Launch the kernel of an expression: the OPENCL form of the primitive in ``cpu.py``.

    Args:
        low: The lowering that gets the launch.
        expression: The program to compute.
        sources: Its inputs, in order; each broadcasts to the outputs' shape.
        results: The term stored in each output; all outputs have one shape.
        keeps_zero: Not used: there is no blocked layout on OPENCL.
    """
    target = results[0][1]
    if target.size == 0:
        return
    require(low, *expression.dtypes, *(o.dtype for _, o in results))
    for text in expression.instructions:
        require(low, *text.split(" ", 1)[0].split(".")[1:])
    walk = _walk(low, sources, target)
    outputs = [(term, operand.dtype) for term, operand in results]
    source = ClSource("elementwise", program(expression, outputs, walk))
    arguments: list[Argument | np.generic[Any]] = [target.size]
    if walk.rows:
        arguments.append(walk.size)
    for k, number in enumerate(expression.numbers):
        dtype = _number_dtype(expression, k)
        kind = "uint8" if dtype == "bool" else compute_dtype(dtype)
        arguments.append(numpy_dtype(kind).type(number))
    arguments += walk.dims[1:] if walk.strided else []
    operands: list[Operand | Weight] = [s.operand for s in sources]
    for operand, mode, steps in zip(operands, walk.modes, walk.strides, strict=True):
        arguments.append(operand)
        arguments += steps if mode == "strided" else []
    arguments += [o for _, o in results]
    moved = sum(o.nbytes for o in operands if isinstance(o, Operand))
    low.launch(
        source,
        "run",
        arguments,
        *(((-(-target.size // walk.size),), (1,)) if walk.rows else line(low, target.size)),
        flops=len(expression.instructions) * target.size,
        bytes=moved + sum(o.nbytes for _, o in results),
    )
    finish(low, sources, [target], keeps_zero)


cl_shared(*(name for name in EXPANSIONS if name != "Identity"))
cl_shared("FusedElementwise", domain=INTERNAL_DOMAIN)
