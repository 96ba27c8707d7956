"""Both emitters of size expressions against Python's own numbers, for random expressions."""

from __future__ import annotations

import math
import operator
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from subgraph.engine.executable.size_code import SizeCode
from subgraph.engine.planner.lowering import Unsupported
from subgraph.engine.program.program import Program, Step
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.graph.symbolic import Trace, float_bits, larger, plain, single, smaller
from subgraph.graph.types import Array

# One operation: its function, and the positions of its operands among the numbers so far.
Formula = tuple[Callable[..., Any], tuple[int, ...]]

# Comparisons are inverted like other integers; Python 3.12 warns of that.
pytestmark = pytest.mark.filterwarnings("ignore:Bitwise inversion:DeprecationWarning")
CONSTANTS = (0, 1, 3, -7, 62, 2**31, -(2**52) - 1, 2.5, -0.0, 1e300)
SHIFTS = 5  # the constants by which integers are shifted; others would take too much memory
DIMENSIONS = 3
ON_INTEGERS = (
    *(operator.floordiv, operator.mod, operator.and_, operator.or_, operator.xor),
    *(operator.lshift, operator.rshift),
)
ON_NUMBERS = (operator.add, operator.sub, operator.mul, operator.truediv)
COMPARISONS = (operator.lt, operator.le, operator.eq, operator.ne, operator.gt, operator.ge)
EDGES = (0, 1, -1, 2**31, -(2**31), 2**53, 2**53 + 1, 2**62, 2**63 - 1, -(2**63))


def _formulas(rng: random.Random) -> list[Formula]:
    """Return operations on the dimensions and constants that the interpreter knows."""
    integer = [True] * DIMENSIONS + [isinstance(constant, int) for constant in CONSTANTS]
    found: list[Formula] = []
    for _ in range(12):
        one, other = rng.randrange(len(integer)), rng.randrange(len(integer))
        both = integer[one] and integer[other]
        function: Callable[..., Any] = rng.choice(ON_NUMBERS + ON_INTEGERS if both else ON_NUMBERS)
        operands, result = (one, other), both and function is not operator.truediv
        if function in (operator.lshift, operator.rshift):
            operands = one, DIMENSIONS + rng.randrange(SHIFTS)
        if rng.random() < 0.2 and integer[one] == integer[other]:
            function, result = rng.choice([larger, smaller]), both
        elif rng.random() < 0.3:
            operands, result = (one,), integer[one]
            function = rng.choice([operator.neg, operator.pos, abs])
            if integer[one] and rng.random() < 0.3:
                function = operator.invert
            elif not integer[one] and rng.random() < 0.7:
                function = rng.choice([math.ceil, math.floor, math.trunc, single, float_bits])
                result = function is not single
        elif rng.random() < 0.2:
            function, result = rng.choice(COMPARISONS), True
        found.append((function, operands))
        integer.append(result)
    return found


def _computed(formulas: Sequence[Formula], numbers: Sequence[Any]) -> list[Any]:
    """Return the results of operations on numbers, symbolic or plain, and on the constants."""
    found = [*numbers, *CONSTANTS]
    for function, operands in formulas:
        found.append(function(*[found[k] for k in operands]))
    return found


def _expected(formulas: Sequence[Formula], dims: Sequence[int]) -> list[Any] | None:
    """Return what Python computes from plain numbers; None if it raises."""
    try:
        return _computed(formulas, dims)
    except (ArithmeticError, ValueError):
        return None


def _comparisons(formulas: Sequence[Formula], computed: Sequence[Any]) -> list[Any]:
    first = DIMENSIONS + len(CONSTANTS)
    return [computed[first + k] for k, (f, _) in enumerate(formulas) if f in COMPARISONS]


def _case(seed: int) -> tuple[random.Random, list[int], list[Formula], list[Any]]:
    """Return dimensions and operations that Python can apply to them, and the results."""
    rng = random.Random(seed)
    while True:
        formulas = _formulas(rng)
        dims = [rng.randrange(1, 40) for _ in range(DIMENSIONS)]
        computed = _expected(formulas, dims)
        if computed is not None and _fits(computed):
            return rng, dims, formulas, computed


def _traced(formulas: Sequence[Formula], dims: Sequence[int]) -> tuple[Trace, list[Any], list[int]]:
    """Return a trace of the operations, its symbolic results, and their positions."""
    trace = Trace()
    results = _computed(formulas, [trace.dimension(dim) for dim in dims])
    at = [k for k, result in enumerate(results) if plain(result) is not result]
    return trace, [results[k] for k in at], at


def _others(rng: random.Random, dims: Sequence[int]) -> list[Sequence[int]]:
    usual = [[rng.randrange(1, 40) for _ in dims] for _ in range(10)]
    negative = [[rng.randrange(-40, 40) for _ in dims] for _ in range(10)]
    huge = [[rng.choice([*EDGES, *dims]) for _ in dims] for _ in range(20)]
    return [dims, *usual, *negative, *huge]


def _same(found: Any, expected: Any) -> bool:
    """Return whether numbers are equal, of the same type, where 0.0 and -0.0 differ."""
    if isinstance(expected, float):
        return isinstance(found, float) and repr(found) == repr(expected)
    return isinstance(found, int) and found == expected


@pytest.mark.parametrize("seed", range(200))
def test_the_emitted_python_computes_what_python_does(seed: int) -> None:
    rng, dims, formulas, computed = _case(seed)
    trace, symbolic, at = _traced(formulas, dims)
    evaluate = trace.function(symbolic)
    decided = _comparisons(formulas, computed)
    for others in _others(rng, dims):
        expected = _expected(formulas, others)
        if expected is not None and _comparisons(formulas, expected) != decided:
            expected = None
        try:
            found = evaluate(others, lambda sizes: sizes)
        except (ArithmeticError, ValueError):
            found = None
        assert (found is None) == (expected is None), others
        if found is not None and expected is not None:
            assert all(_same(one, expected[k]) for one, k in zip(found, at, strict=True)), others


def _fits(computed: Sequence[Any]) -> bool:
    """Return whether all integers fit in the interpreter's registers, also as float64."""
    return all(abs(number) < 2**53 for number in computed if isinstance(number, int))


@pytest.mark.parametrize("seed", range(200))
def test_the_interpreter_computes_what_python_does(seed: int) -> None:
    """A run ends early if a guard does not hold, or if a result needs more than 64 bits."""
    rng, dims, formulas, computed = _case(seed)
    trace, symbolic, at = _traced(formulas, dims)
    code = SizeCode(trace, symbolic, [0] * DIMENSIONS)
    registers = [code.register(number) for number in symbolic]
    decided = _comparisons(formulas, computed)
    for others in _others(rng, dims):
        expected = _expected(formulas, others)
        if expected is not None and _comparisons(formulas, expected) != decided:
            expected = None
        held = _run(code, others)
        if expected is None:
            assert not held, others
        elif _fits(expected):
            assert held, others
        if held and expected is not None:
            for register, k in zip(registers, at, strict=True):
                bits = code.registers[register : register + 1]
                as_float = isinstance(expected[k], float)
                found = (bits.view(np.float64) if as_float else bits).item()
                assert _same(found, expected[k]), others


@pytest.mark.parametrize(
    ("compute", "dims"),
    [
        (lambda a, b: a + b, (2**63 - 1, 1)),
        (lambda a, b: a - b, (-(2**63), 1)),
        (lambda a, b: a * b, (2**40, 2**40)),
        (lambda a, b: a * b, (-(2**63), -1)),
        (lambda a, b: -a + b, (-(2**63), 1)),
        (lambda a, b: a // b, (-(2**63), -1)),
        (lambda a, b: a % b, (-(2**63), -1)),
        (lambda a, b: abs(a) + b, (-(2**63), 1)),
        (lambda a, b: a << b, (1, 64)),
        (lambda a, b: a + 0.5 * b, (2**53 + 1, 1)),
    ],
)
def test_sizes_beyond_64_bits_end_the_run(compute: Any, dims: tuple[int, int]) -> None:
    """Wrapped sizes would be accepted, and kernels would write beyond the planned memory."""
    trace = Trace(inline=True)
    a, b = (trace.dimension(size) for size in (6, 3))
    code = SizeCode(trace, [compute(a, b)], [0, 0])
    assert _run(code, (7, 5))
    assert not _run(code, dims)


@pytest.mark.parametrize(
    ("compute", "name"),
    [
        (lambda a: a**2, "pow"),
        (lambda a: (0.5 * a) // 1.5, "floordiv"),
        (lambda a: larger(a, 0.5 * a), "max"),  # type: ignore[arg-type]
        (lambda a: round(0.5 * a), "round"),
        (lambda a: a + 2**70, "64 bits"),
    ],
)
def test_unknown_operations_are_refused_by_name(compute: Any, name: str) -> None:
    trace = Trace()
    with pytest.raises(Unsupported, match=name):
        SizeCode(trace, [compute(trace.dimension(6))], [0])


def _run(code: SizeCode, dims: Sequence[int]) -> bool:
    """Run the code on dimensions; return whether all guards held and nothing overflowed."""
    stop: Array = np.zeros(1, np.int64)
    read: Array = np.array(dims, np.int64)
    base = code.registers.ctypes.data
    rows = code.rows(0, base)
    words = [base, len(dims), read.itemsize, stop.ctypes.data, rows.ctypes.data, len(rows), 0, 0]
    block: Array = np.array(words, np.int64)
    args: Array = np.array([block.ctypes.data, read.ctypes.data], np.int64)
    kernel = Kernel("subgraph.engine.program.size_kernels", "compute_sizes")
    Program([Step(kernel.address, args.ctypes.data, 1)]).run()
    return not stop[0]
