"""Symbolic integers: sizes that record how they were computed, so that a plan serves other sizes.

While a plan is traced, the dimensions that differ from call to call are `SymInt` numbers. They
count, compare and print like the numbers that they stand for. A `Trace` records each operation, and
for each decision taken from one (a comparison, a use as index, text or key) a guard: the decision
must come out the same. `Trace.function` turns the record into one Python function of the
dimensions, which gives the numbers of the plan for other dimensions, or None where a guard fails.

The scheme is that of tracing compilers (the symbolic integers of PyTorch's shape guards). A number
that leaves Python for C (``int(x)``, ``range(x)``, an array of integers) is pinned: its guard is
that it stays equal. A leak therefore costs generality, never correctness.
"""

from __future__ import annotations

import math
import operator
import re
import struct
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any, TypeVar, cast

import numpy as np

# Of the dimensions, and of what places memory (sizes -> offsets): the numbers wanted, or None.
Evaluate = Callable[[Sequence[int], Callable[[Sequence[int]], Sequence[int]]], "list[Any] | None"]
# A line of the function: which value it defines (None: a guard, or a statement), its text, the
# values that it reads, and whether it is a guard.
_Line = tuple["int | None", str, tuple[int, ...], bool]
_T = TypeVar("_T")
_PLAIN = frozenset({bool, float, int})
_VALUE = re.compile(r"\bv\d+")


class Trace:
    """Operations and decisions on traced numbers, in the order in which they happened.

    Attributes:
        open: Whether traced numbers still write down; afterwards they are plain numbers.
        inline: Whether what a `recorded` function does is written down, not the call.
    """

    def __init__(self, *, inline: bool = False) -> None:
        """Begin with nothing."""
        self.open = True
        self.inline = inline
        self._lines: list[_Line] = []
        self._made: dict[str, SymInt] = {}
        self._guards: set[str] = set()
        self._dims = 0

    def dimension(self, value: int) -> SymInt:
        """Return a traced number that stands for the next dimension."""
        self._dims += 1
        return self.apply(f"dims[{self._dims - 1}]", value)

    def places(self, sizes: Sequence[Any], offsets: Iterable[int]) -> list[SymInt]:
        """Return the offsets that the memory plan gives for these sizes, as traced numbers."""
        _, given = _in_one_trace(sizes)
        text = f"places = place([{', '.join(map(_text, given))}])"
        self._lines.append((None, text, _numbers(sizes), False))
        return [self.apply(f"places[{k}]", offset) for k, offset in enumerate(offsets)]

    def apply(self, text: str, value: float, *operands: Any) -> SymInt:
        """Return what an expression on traced operands gives, ``value`` for the present ones."""
        made = self._made.get(text)
        if made is None:
            made = self._made[text] = SymInt(self, len(self._made), value)
            self._lines.append((made.number, text, _numbers(operands), False))
        return made

    def decide(self, text: str, *operands: Any) -> None:
        """Write down that an expression on traced operands is true."""
        if text not in self._guards:
            self._guards.add(text)
            self._lines.append((None, text, _numbers(operands), True))

    def decisions(self) -> list[str]:
        """Return the decisions in terms of the dimensions, for inspection."""
        texts: dict[str, str] = {}
        told: list[str] = []
        for defines, text, _, guard in self._lines:
            shown = _VALUE.sub(lambda found: texts[found[0]], text)
            if defines is not None:
                texts[f"v{defines}"] = f"({shown})" if " " in shown else shown
            elif guard:
                told.append(shown)
        return told

    def function(self, results: Sequence[Any]) -> Evaluate:
        """Return what computes numbers for other dimensions, and close the trace.

        Args:
            results: The numbers wanted, traced or plain.

        Returns:
            A function of the dimensions, in the order of `dimension`, and of what places memory.
        """
        lines = [
            f" if not ({text}): return None"
            if guard
            else f" {text}"
            if defines is None
            else f" v{defines} = {text}"
            for defines, text, guard in self.lines(results)
        ]
        made = ["def evaluate(dims, place):", *lines, f" return [{', '.join(map(_text, results))}]"]
        names: dict[str, Any] = dict(_NAMES)
        exec(compile("\n".join(made), "<traced plan>", "exec"), names)
        evaluate: Evaluate = names["evaluate"]
        return evaluate

    def lines(self, results: Sequence[Any]) -> list[tuple[int | None, str, bool]]:
        """Close the trace; return what computes these numbers, and all decisions, in order.

        Returns:
            Which value each line defines (None: none), its text, and whether it is a decision.
        """
        self.open = False
        wanted = set(_numbers(results))
        kept: list[tuple[int | None, str, bool]] = []
        for defines, text, reads, guard in reversed(self._lines):
            if guard or defines is None or defines in wanted:
                kept.append((defines, text, guard))
                wanted.update(reads)
        self._lines.clear()
        self._made.clear()
        return kept[::-1]


class SymInt:
    """A number of a trace: in all but its type the number that it stands for.

    Attributes:
        trace: What it is written down in.
        number: Which value of the trace it is.
        value: The number that it stands for.
    """

    __slots__ = ("number", "trace", "value")

    def __init__(self, trace: Trace, number: int, value: float) -> None:
        """Stand for ``value``."""
        self.trace = trace
        self.number = number
        self.value = value

    @property
    def __class__(self) -> Any:
        """The class of the number, for ``isinstance``; ``type`` and C code see what it is."""
        return type(self.value)

    @__class__.setter
    def __class__(self, value: Any) -> None:
        raise TypeError("a number stays one")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # NumPy asks every object for its protocols
            raise AttributeError(name)
        return getattr(pinned(self), name)

    def __bool__(self) -> bool:
        return not _EQUAL(self, 0)

    def __round__(self, digits: int | None = None) -> Any:
        if digits is not None:
            return round(pinned(self), digits)
        return _applied("round(%s)", round, self)

    def __format__(self, spec: str) -> str:
        return format(pinned(self), spec)


def is_symbolic(number: object) -> bool:
    """Return whether this is a traced number."""
    return type(number) is SymInt


def plain(number: _T) -> _T:
    """Return the number that a traced one stands for; nothing is written down."""
    item: Any = number
    value: Any = item.value if type(item) is SymInt else item
    return value  # type: ignore[no-any-return]


def pinned(number: _T) -> _T:
    """Return a number as a plain one; the trace holds only where it stays equal."""
    item: Any = number
    if type(item) is SymInt and item.trace.open:
        item.trace.decide(f"v{item.number} == {item.value!r}", item)
    return plain(number)


def float_bits(number: float) -> int:
    """Return the bits of a float64 as a whole number."""
    bits: int = _applied("bits(%s)", _bits, number)
    return bits


def single(number: float) -> float:
    """Return a number rounded to float32."""
    rounded: float = _applied("single(%s)", _single, number)
    return rounded


def larger(one: int, other: int) -> int:
    """Return the larger number; unlike ``max``, without a decision which one that is."""
    largest: int = _applied("max(%s, %s)", max, one, other)
    return largest


def smaller(one: int, other: int) -> int:
    """Return the smaller number; unlike ``min``, without a decision which one that is."""
    smallest: int = _applied("min(%s, %s)", min, one, other)
    return smallest


_Function = TypeVar("_Function", bound=Callable[..., Any])


def recorded(function: _Function) -> _Function:
    """Let a trace write down calls of a function of numbers as one operation.

    What the function decides is decided anew for other dimensions, and is no guard: for sizes of
    units and the like, which change words of a plan and nothing else.

    Args:
        function: It takes numbers and returns a number; nothing else comes in or goes out.
    """
    name = f"{function.__module__}.{function.__qualname__}".replace(".", "_")
    _NAMES[name] = function

    @wraps(function)
    def call(*numbers: Any) -> Any:
        if _PLAIN.issuperset(map(type, numbers)):  # nearly all are, outside of a trace
            return function(*numbers)
        if any(type(n) is SymInt and n.trace.open and n.trace.inline for n in numbers):
            return function(*numbers)
        return _applied(f"{name}({', '.join(['%s'] * len(numbers))})", function, *numbers)

    return cast(_Function, call)


def _bits(number: float) -> int:
    bits: int = struct.unpack("<q", struct.pack("<d", number))[0]
    return bits


def _single(number: float) -> float:
    return float(np.float32(number))


_NAMES: dict[str, Any] = {
    "bits": _bits,
    "ceil": math.ceil,
    "floor": math.floor,
    "inf": math.inf,
    "nan": math.nan,
    "single": _single,
    "trunc": math.trunc,
}


def _text(item: Any) -> str:
    """Return how a number is written in the function."""
    if type(item) is SymInt:
        return f"v{item.number}"
    return repr(item) if item >= 0 else f"({item!r})"


def _numbers(items: Iterable[Any]) -> tuple[int, ...]:
    return tuple([item.number for item in items if type(item) is SymInt])


def _is_number(item: Any) -> bool:
    return type(item) is SymInt or isinstance(item, (int, float, np.integer, np.floating))


def _plain_number(item: Any) -> Any:
    number = plain(item)
    return number if type(number) in _PLAIN else number.item()  # a scalar of NumPy's


def _in_one_trace(operands: Sequence[Any]) -> tuple[Trace | None, list[Any]]:
    """Return the open trace of operands, if any, and the operands, all others as plain numbers."""
    given = [o if type(o) is SymInt and o.trace.open else _plain_number(o) for o in operands]
    return next((o.trace for o in given if type(o) is SymInt), None), given


def _applied(text: str, function: Callable[..., Any], *operands: Any) -> Any:
    """Apply a function to numbers, and write it down."""
    if _PLAIN.issuperset(map(type, operands)):  # nearly all are, outside of a trace
        return function(*operands)
    trace, given = _in_one_trace(operands)
    value = function(*map(plain, given))
    if trace is None:
        return value
    if not isinstance(value, (int, float)):  # a root of a negative number
        return function(*map(pinned, given))
    return trace.apply(text % tuple(map(_text, given)), value, *given)


def _binary(
    sign: str, function: Callable[[Any, Any], Any], right: int | None, both: bool = False
) -> tuple[Callable[[Any, Any], Any], Callable[[Any, Any], Any]]:
    """Return the methods of an operator, of a traced number on its left and on its right.

    Args:
        sign: The operator, as the text of a format.
        function: What computes it.
        right: What on its right leaves a whole number as it is.
        both: Whether it does so on the left, too.
    """
    text = f"%s {sign} %s"

    def forward(one: Any, other: Any) -> Any:
        if type(other) is int and one.trace.open:  # nearly all are
            if other == right and type(one.value) is int:
                return one
            if other >= 0:
                shown = text % (f"v{one.number}", other)
                return one.trace.apply(shown, function(one.value, other), one)
        return _applied(text, function, one, other) if _is_number(other) else NotImplemented

    def backward(one: Any, other: Any) -> Any:
        if both and type(other) is int and other == right and type(one.value) is int:
            return one
        return _applied(text, function, other, one) if _is_number(other) else NotImplemented

    return forward, backward


def _comparison(sign: str, function: Callable[[Any, Any], bool]) -> Callable[[Any, Any], Any]:
    def compare(one: Any, other: Any) -> Any:
        if not _is_number(other):
            return NotImplemented
        trace, given = _in_one_trace((one, other))
        outcome = bool(function(*map(plain, given)))
        if trace is not None:
            left, right = map(_text, given)
            if left == right:  # computed in one way, they are equal
                return outcome
            # Not the opposite comparison: with a NaN both are false.
            says = f"{left} {sign} {right}"
            trace.decide(says if outcome else f"not {says}", *given)
        return outcome

    return compare


def _unary(text: str, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda one: _applied(text, function, one)


def _leaving(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda one: function(pinned(one))


def _define(name: str, method: Callable[..., Any]) -> None:
    setattr(SymInt, f"__{name}__", method)


_EQUAL = _comparison("==", operator.eq)
_OPERATORS: tuple[tuple[str, tuple[Callable[..., Any], Callable[..., Any]]], ...] = (
    ("add", _binary("+", operator.add, 0, both=True)),
    ("sub", _binary("-", operator.sub, 0)),
    ("mul", _binary("*", operator.mul, 1, both=True)),
    ("floordiv", _binary("//", lambda a, b: a // b, 1)),
    ("truediv", _binary("/", lambda a, b: a / b, None)),
    ("mod", _binary("%%", operator.mod, None)),
    ("pow", _binary("**", lambda a, b: a**b, 1)),
    ("and", _binary("&", lambda a, b: a & b, None)),
    ("or", _binary("|", lambda a, b: a | b, 0)),
    ("xor", _binary("^", lambda a, b: a ^ b, 0)),
    ("lshift", _binary("<<", lambda a, b: a << b, 0)),
    ("rshift", _binary(">>", lambda a, b: a >> b, 0)),
)
for _name, (_forward, _backward) in _OPERATORS:
    _define(_name, _forward)
    _define(f"r{_name}", _backward)
_define("eq", _EQUAL)
_define("ne", _comparison("!=", operator.ne))
_define("lt", _comparison("<", operator.lt))
_define("le", _comparison("<=", operator.le))
_define("gt", _comparison(">", operator.gt))
_define("ge", _comparison(">=", operator.ge))
_define("neg", _unary("-%s", operator.neg))
_define("pos", _unary("+%s", operator.pos))
_define("abs", _unary("abs(%s)", abs))
_define("invert", _unary("~%s", operator.invert))
_define("ceil", _unary("ceil(%s)", math.ceil))
_define("floor", _unary("floor(%s)", math.floor))
_define("trunc", _unary("trunc(%s)", math.trunc))
for _leave in (int, float, operator.index, hash, str, repr):
    _define(_leave.__name__, _leaving(_leave))
