"""Symbolic integers: sizes that record how they were computed, so that a plan serves other sizes.

While a plan is traced, the dimensions that differ from call to call are `SymInt` numbers. They
compute, compare and print like the numbers that they stand for. A `Trace` records the expression of
each result (`subgraph.graph.size_expressions`), and a guard for each decision that depends on one
(a comparison, a use as index, text or key): the guard holds if the decision has the same outcome.
`Trace.function` emits one Python function of the dimensions. It returns the numbers of the plan for
other dimensions, or None if a guard does not hold.

The scheme is that of tracing compilers (the symbolic integers of PyTorch's shape guards). A number
that leaves Python for C (``int(x)``, ``range(x)``, an array of integers) is pinned: its guard is
that it stays equal. A leak therefore costs generality, never correctness.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

from subgraph.graph import size_expressions as expressions
from subgraph.graph.size_expressions import (
    EQ,
    Evaluate,
    Expression,
    Guard,
    Operand,
    Operation,
    Statement,
    needed,
    python_function,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

_T = TypeVar("_T")
_PLAIN = frozenset({bool, float, int})
_COMPARED_EXACTLY = frozenset({Expression, int})


class Trace:
    """Expressions and guards on symbolic numbers, in the order in which they were recorded.

    Attributes:
        open: Whether operations on symbolic numbers are still recorded; afterwards they compute
            plain numbers.
    """

    def __init__(self) -> None:
        """Begin without expressions."""
        self.open = True
        self._statements: list[Statement] = []
        self._numbers: dict[tuple[Any, ...], SymInt] = {}
        self._guards: set[tuple[Any, ...]] = set()
        self._dims = 0

    def dimension(self, value: int) -> SymInt:
        """Return a symbolic number that stands for the next dimension."""
        self._dims += 1
        return self.apply(expressions.DIMENSION, value, self._dims - 1)

    def memory_plan(self, sizes: Sequence[Any], offsets: Iterable[int]) -> list[SymInt]:
        """Return the offsets of storages of these sizes in the arena, as symbolic numbers.

        Args:
            sizes: Bytes of each storage.
            offsets: The memory planner's offsets in bytes for the present sizes.
        """
        _, operands = _in_one_trace(sizes)
        plan = Expression(expressions.place(len(sizes)), tuple(map(_operand, operands)))
        self._statements.append(plan)
        return [self.apply(expressions.ITEM, offset, plan, k) for k, offset in enumerate(offsets)]

    def apply(self, operation: Operation, value: float, *operands: Operand) -> SymInt:
        """Return a symbolic number for an operation on operands.

        Args:
            operation: The operation.
            value: The operation's result for the present dimensions.
            operands: Expressions of this trace, or plain numbers.
        """
        key = (operation, *map(_key, operands))
        number = self._numbers.get(key)
        if number is None:
            expression = Expression(operation, operands)
            number = self._numbers[key] = SymInt(self, expression, value)
            self._statements.append(expression)
        return number

    def guard(self, comparison: Operation, outcome: bool, *operands: Operand) -> None:
        """Record that a comparison must have this outcome.

        Args:
            comparison: One of `size_expressions.COMPARISONS`.
            outcome: The outcome for the present dimensions.
            operands: Expressions of this trace, or plain numbers.
        """
        key = (comparison, outcome, *map(_key, operands))
        if key not in self._guards:
            self._guards.add(key)
            self._statements.append(Guard(Expression(comparison, operands), outcome))

    def guards(self) -> list[str]:
        """Return the guards in terms of the dimensions, for inspection."""
        return [str(statement) for statement in self._statements if isinstance(statement, Guard)]

    def function(self, results: Sequence[Any]) -> Evaluate:
        """Close the trace; return a function that computes ``results`` for other dimensions.

        Args:
            results: Symbolic or plain numbers.

        Returns:
            A function of the dimensions, in the order of `dimension`, and of a function from the
            sizes of storages to their offsets in the arena.
        """
        return python_function(self.statements(results), list(map(_operand, results)))

    def statements(self, results: Sequence[Any]) -> list[Statement]:
        """Close the trace; return all guards, and the expressions that they and the results need.

        Args:
            results: Symbolic or plain numbers.
        """
        self.open = False
        found = needed(self._statements, list(map(_operand, results)))
        # Plans keep the results of a trace for a long time; they need none of the other
        # expressions.
        self._statements.clear()
        self._numbers.clear()
        return found


class SymInt:
    """A symbolic number: behaves like the number that it stands for, and records its uses.

    Attributes:
        trace: The trace that records the uses.
        expression: The expression of the number in terms of the dimensions.
        value: The number for the present dimensions; may be a float.
    """

    __slots__ = ("expression", "trace", "value")

    def __init__(self, trace: Trace, expression: Expression, value: float) -> None:
        """Make the symbolic number of an expression.

        Args:
            trace: The trace that records uses of the number.
            expression: An expression of that trace.
            value: The expression's value for the present dimensions.
        """
        self.trace = trace
        self.expression = expression
        self.value = value

    @property
    def __class__(self) -> Any:
        """The class of the number, for ``isinstance``; ``type`` and C code see `SymInt`."""
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
        return _applied(expressions.ROUND, self)

    def __format__(self, spec: str) -> str:
        return format(pinned(self), spec)


def object_array(items: Sequence[Any]) -> NDArray[Any]:
    """Return items, symbolic integers among them, as an array of objects ``[len(items)]``."""
    # np.array looks up the array protocols of each symbolic integer, at 5 us per integer.
    return np.fromiter(items, object, len(items))


def is_symbolic(number: object) -> bool:
    """Return whether a number is symbolic."""
    return type(number) is SymInt


def plain(number: _T) -> _T:
    """Return the number that a symbolic one stands for, without recording a guard."""
    item: Any = number
    value: Any = item.value if type(item) is SymInt else item
    return value  # type: ignore[no-any-return]


def pinned(number: _T) -> _T:
    """Return a number as a plain one, and record the guard that it stays equal."""
    item: Any = number
    if type(item) is SymInt and item.trace.open:
        item.trace.guard(EQ, True, item.expression, item.value)
    return plain(number)


def float_bits(number: float) -> int:
    """Return the bits of a float64 as an integer."""
    bits: int = _applied(expressions.FLOAT_BITS, number)
    return bits


def single(number: float) -> float:
    """Return a number rounded to float32."""
    rounded: float = _applied(expressions.SINGLE, number)
    return rounded


def larger(one: int, other: int) -> int:
    """Return the larger number, without the guard that ``max`` records on which one that is."""
    largest: int = _applied(expressions.MAX, one, other)
    return largest


def smaller(one: int, other: int) -> int:
    """Return the smaller number, without the guard that ``min`` records on which one that is."""
    smallest: int = _applied(expressions.MIN, one, other)
    return smallest


_Function = TypeVar("_Function", bound=Callable[..., Any])


def recorded(function: _Function) -> _Function:
    """Decorate a function of numbers so that a trace records each call as one operation.

    The function runs again for other dimensions, so its comparisons are not recorded as guards. Use
    it for numbers such as sizes of work units, which affect only kernel arguments of a plan.

    Args:
        function: Takes numbers and returns a number, without side effects.
    """
    name = f"{function.__module__}.{function.__qualname__}".replace(".", "_")
    operation = Operation(name, function)

    @wraps(function)
    def call(*numbers: Any) -> Any:
        if _PLAIN.issuperset(map(type, numbers)):  # the common case outside of a trace
            return function(*numbers)
        return _applied(operation, *numbers)

    return cast("_Function", call)


def _key(operand: Operand) -> Any:
    """Return a dictionary key for an operand: 1, 1.0 and True differ, as do 0.0 and -0.0."""
    return operand if type(operand) in _COMPARED_EXACTLY else repr(operand)


def _operand(number: Any) -> Operand:
    """Return a number as an operand of an expression."""
    operand: Operand = number.expression if type(number) is SymInt else number
    return operand


def _is_number(item: Any) -> bool:
    return type(item) is SymInt or isinstance(item, (int, float, np.integer, np.floating))


def _plain_number(item: Any) -> Any:
    number = plain(item)
    return number if type(number) in _PLAIN else number.item()  # a scalar of NumPy's


def _in_one_trace(operands: Sequence[Any]) -> tuple[Trace | None, list[Any]]:
    """Return the open trace of the operands, if any, and the operands; those of none are plain."""
    found = [o if type(o) is SymInt and o.trace.open else _plain_number(o) for o in operands]
    return next((o.trace for o in found if type(o) is SymInt), None), found


def _applied(operation: Operation, *operands: Any) -> Any:
    """Apply an operation to numbers, and record it if one of them is symbolic."""
    function = operation.function
    if _PLAIN.issuperset(map(type, operands)):  # the common case outside of a trace
        return function(*operands)
    trace, found = _in_one_trace(operands)
    value = function(*map(plain, found))
    if trace is None:
        return value
    if not isinstance(value, (int, float)):  # complex: a root of a negative number
        return function(*map(pinned, found))
    return trace.apply(operation, value, *map(_operand, found))


def _binary(
    operation: Operation, right: int | None, both: bool = False
) -> tuple[Callable[[Any, Any], Any], Callable[[Any, Any], Any]]:
    """Return the methods of an operator, for a symbolic number on its left and on its right.

    Args:
        operation: The operation.
        right: The neutral right operand of integers, as 0 for addition; None if there is none.
        both: Whether ``right`` is neutral as the left operand too.
    """
    function = operation.function

    def forward(one: Any, other: Any) -> Any:
        if type(other) is int and one.trace.open:  # the common case
            # A float must be recorded: -0.0 + 0 is 0.0.
            if other == right and type(one.value) is int:
                return one
            return one.trace.apply(operation, function(one.value, other), one.expression, other)
        return _applied(operation, one, other) if _is_number(other) else NotImplemented

    def backward(one: Any, other: Any) -> Any:
        if both and type(other) is int and other == right and type(one.value) is int:
            return one
        return _applied(operation, other, one) if _is_number(other) else NotImplemented

    return forward, backward


def _comparison(operation: Operation) -> Callable[[Any, Any], Any]:
    function = operation.function

    def compare(one: Any, other: Any) -> Any:
        if not _is_number(other):
            return NotImplemented
        trace, found = _in_one_trace((one, other))
        outcome = bool(function(*map(plain, found)))
        if trace is not None:
            left, right = map(_operand, found)
            if left is not right:  # one expression has one value
                trace.guard(operation, outcome, left, right)
        return outcome

    return compare


def _unary(operation: Operation) -> Callable[[Any], Any]:
    return lambda one: _applied(operation, one)


def _leaving(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda one: function(pinned(one))


def _define(name: str, method: Callable[..., Any]) -> None:
    setattr(SymInt, f"__{name}__", method)


_EQUAL = _comparison(EQ)
for _operation, _right, _both in (
    (expressions.ADD, 0, True),
    (expressions.SUB, 0, False),
    (expressions.MUL, 1, True),
    (expressions.FLOORDIV, 1, False),
    (expressions.TRUEDIV, None, False),
    (expressions.MOD, None, False),
    (expressions.POW, 1, False),
    (expressions.AND, None, False),
    (expressions.OR, 0, False),
    (expressions.XOR, 0, False),
    (expressions.LSHIFT, 0, False),
    (expressions.RSHIFT, 0, False),
):
    _forward, _backward = _binary(_operation, _right, _both)
    _define(_operation.name, _forward)
    _define(f"r{_operation.name}", _backward)
for _operation in expressions.COMPARISONS:
    _define(_operation.name, _comparison(_operation))
for _operation in expressions.UNARY:
    _define(_operation.name, _unary(_operation))
for _leave in (int, float, operator.index, hash, str, repr):
    _define(_leave.__name__, _leaving(_leave))
