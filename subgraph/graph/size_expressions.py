"""Expressions over sizes, as immutable trees, and the emitter of a Python function for them.

A `Trace` of `subgraph.graph.symbolic` builds the trees. Equal expressions of a trace are one
object, so trees share their common parts.

Expressions live in the memory of one process. No file holds them, so nothing that is read from a
file reaches `python_function`.
"""

from __future__ import annotations

import ctypes
import math
import operator
import struct
from collections.abc import Callable, Sequence
from typing import Any

import attrs

# Takes the dimensions, and a function from the sizes of storages (bytes) to their offsets in the
# arena. Returns the values of the results, or None if a guard does not hold.
Evaluate = Callable[[Sequence[int], Callable[[Sequence[int]], Sequence[int]]], "list[Any] | None"]


@attrs.frozen(eq=False)
class Operation:
    """An operation on numbers; operations compare by identity.

    Attributes:
        name: Name in error messages and in emitted code.
        function: Computes the operation on Python's numbers.
        form: The operation in Python's syntax, with ``%s`` for each operand; empty for a call of
            ``name``.
    """

    name: str
    function: Callable[..., Any]
    form: str = ""

    def text(self, operands: Sequence[str]) -> str:
        """Return the operation on operands in Python's syntax."""
        return self.form % (*operands,) if self.form else f"{self.name}({', '.join(operands)})"


@attrs.frozen(eq=False, repr=False)
class Expression:
    """An operation on operands; expressions compare by identity.

    Attributes:
        operation: The operation.
        operands: Expressions, or plain numbers.
    """

    operation: Operation
    operands: tuple[Operand, ...]

    def __str__(self) -> str:
        shown = [str(o) if isinstance(o, Expression) else _number(o) for o in self.operands]
        return self.operation.text([f"({text})" if " " in text else text for text in shown])


@attrs.frozen(eq=False, repr=False)
class Guard:
    """A comparison whose outcome a plan depends on.

    Attributes:
        comparison: The comparison.
        outcome: The outcome for which the plan was made. It is not expressed by the opposite
            comparison because both are false for a NaN.
    """

    comparison: Expression
    outcome: bool

    def __str__(self) -> str:
        return str(self.comparison) if self.outcome else f"not {self.comparison}"


Operand = Expression | int | float
Statement = Expression | Guard


def float_bits(number: float) -> int:
    """Return the bits of a float64 as an integer."""
    bits: int = struct.unpack("<q", struct.pack("<d", number))[0]
    return bits


def _single(number: float) -> float:
    return ctypes.c_float(number).value  # NumPy would warn of an overflow to infinity


def _no_value(*_: Any) -> Any:
    raise TypeError("only an emitted function can compute it")


def _infix(name: str, sign: str, function: Callable[[Any, Any], Any]) -> Operation:
    return Operation(name, function, f"%s {sign} %s")


# Lambdas where type checkers know no type of the function in `operator`.
ADD = _infix("add", "+", operator.add)
SUB = _infix("sub", "-", operator.sub)
MUL = _infix("mul", "*", operator.mul)
FLOORDIV = _infix("floordiv", "//", lambda a, b: a // b)
TRUEDIV = _infix("truediv", "/", lambda a, b: a / b)
# The form is a template of Python's % operator, in which %% is a percent sign.
MOD = _infix("mod", "%%", operator.mod)
POW = _infix("pow", "**", lambda a, b: a**b)
AND = _infix("and", "&", lambda a, b: a & b)
OR = _infix("or", "|", lambda a, b: a | b)
XOR = _infix("xor", "^", lambda a, b: a ^ b)
LSHIFT = _infix("lshift", "<<", lambda a, b: a << b)
RSHIFT = _infix("rshift", ">>", lambda a, b: a >> b)
EQ = _infix("eq", "==", operator.eq)
NE = _infix("ne", "!=", operator.ne)
LT = _infix("lt", "<", operator.lt)
LE = _infix("le", "<=", operator.le)
GT = _infix("gt", ">", operator.gt)
GE = _infix("ge", ">=", operator.ge)
NEG = Operation("neg", operator.neg, "-%s")
POS = Operation("pos", operator.pos, "+%s")
INVERT = Operation("invert", operator.invert, "~%s")
ABS = Operation("abs", abs)
MAX = Operation("max", max)
MIN = Operation("min", min)
CEIL = Operation("ceil", math.ceil)
FLOOR = Operation("floor", math.floor)
TRUNC = Operation("trunc", math.trunc)
ROUND = Operation("round", round)
FLOAT_BITS = Operation("float_bits", float_bits)
SINGLE = Operation("single", _single)  # rounds to float32
DIMENSION = Operation("dimension", _no_value, "dims[%s]")  # a variable, by its position
ITEM = Operation("item", operator.getitem, "%s[%s]")
COMPARISONS = (EQ, NE, LT, LE, GT, GE)
UNARY = (NEG, POS, INVERT, ABS, CEIL, FLOOR, TRUNC)


def place(count: int) -> Operation:
    """Return the operation that computes arena offsets from the sizes of ``count`` storages."""
    return Operation("place", _no_value, f"place([{', '.join(['%s'] * count)}])")


def needed(statements: Sequence[Statement], results: Sequence[Operand]) -> list[Statement]:
    """Return all guards, and the expressions from which they and the results are computed.

    Args:
        statements: Expressions and guards, each expression after its operands.
        results: Expressions, or plain numbers.
    """
    wanted = {item for item in results if isinstance(item, Expression)}
    found: list[Statement] = []
    # Operands stand before their expressions, so that one pass backwards finds all that are needed.
    for statement in reversed(statements):
        if isinstance(statement, Guard):
            read = statement.comparison.operands
        elif statement in wanted:
            read = statement.operands
        else:
            continue
        found.append(statement)
        wanted.update([item for item in read if isinstance(item, Expression)])
    return found[::-1]


def python_function(statements: Sequence[Statement], results: Sequence[Operand]) -> Evaluate:
    """Return a Python function that evaluates the results.

    Args:
        statements: As `needed` returns them.
        results: Expressions among the statements, or plain numbers.

    Returns:
        The function. It raises ArithmeticError or ValueError where an operation does, for example
        when it divides by zero.
    """
    names: dict[Expression, str] = {}
    # The code sees nothing but the functions of its operations.
    scope: dict[str, Any] = {"__builtins__": {}, "inf": math.inf, "nan": math.nan}
    lines = ["def evaluate(dims, place):"]
    for statement in statements:
        expression = statement.comparison if isinstance(statement, Guard) else statement
        operation = expression.operation
        text = operation.text([_text(operand, names) for operand in expression.operands])
        if isinstance(statement, Guard):
            text = f"not ({text})" if statement.outcome else text
            lines.append(f" if {text}: return")
            continue
        name = names[expression] = f"v{len(names)}"
        lines.append(f" {name} = {text}")
        if not operation.form:
            scope[operation.name] = operation.function
    lines.append(f" return [{', '.join(_text(item, names) for item in results)}]")
    exec(compile("\n".join(lines), "<size expressions>", "exec"), scope)
    evaluate: Evaluate = scope["evaluate"]
    return evaluate


def _text(operand: Operand, names: dict[Expression, str]) -> str:
    return names[operand] if isinstance(operand, Expression) else _number(operand)


def _number(number: float) -> str:
    # Without parentheses -2 ** n would mean -(2 ** n).
    return repr(number) if number >= 0 else f"({number!r})"
