"""Size code: the numbers of a data-dependent plan, computed while its program runs.

The expressions of a trace (`subgraph.graph.size_expressions`) are translated to rows of
three-address code, which the compiled interpreter of `subgraph.engine.program.size_kernels`
executes. Each row belongs to a level: the index of the step that reads numbers
(`DataDependentPlan.reads`) after which all operands of the row are known.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from subgraph.engine.planner.lowering import Unsupported
from subgraph.engine.program import abi
from subgraph.graph import size_expressions as expressions
from subgraph.graph.size_expressions import Expression, Guard, Operand, Operation, float_bits
from subgraph.graph.symbolic import Trace, is_symbolic
from subgraph.graph.types import Array

_Row = tuple[int, int, int, int]  # operation, target or required outcome, operands
_CODES = {name: code for code, name in enumerate(abi.SIZE_OPERATIONS)}
_DIVISIONS = frozenset({expressions.TRUEDIV, expressions.FLOORDIV, expressions.MOD})
_TO_INTEGER = frozenset({expressions.CEIL, expressions.FLOOR, expressions.TRUNC})
# The interpreter compares by "eq", "lt" and "le" only. For each operation: the comparison, whether
# its operands are swapped, and whether its outcome is negated.
_COMPARED: dict[Operation, tuple[str, bool, bool]] = {
    expressions.EQ: ("eq", False, False),
    expressions.NE: ("eq", False, True),
    expressions.LT: ("lt", False, False),
    expressions.LE: ("le", False, False),
    expressions.GT: ("lt", True, False),
    expressions.GE: ("le", True, False),
}


class SizeCode:
    """The code of all levels, and its registers.

    Attributes:
        registers: First values, int64: dimensions, constants and results; floats as their bits.
    """

    def __init__(self, trace: Trace, results: Sequence[Any], level_of_dim: Sequence[int]) -> None:
        """Translate a trace.

        Args:
            trace: The trace; it is closed.
            results: The symbolic numbers that the code has to compute.
            level_of_dim: The level at which each dimension is read.

        Raises:
            Unsupported: An operation of the trace is unknown to the interpreter.
        """
        self._rows: list[tuple[int, _Row]] = []
        self._floats: set[int] = set()
        self._levels = [*level_of_dim]
        self._constants: dict[tuple[bool, int], int] = {}
        self._values = [0] * len(level_of_dim)
        self._registers: dict[Expression, int] = {}
        for statement in trace.statements(results):
            if isinstance(statement, Guard):
                self._guard(statement)
            else:
                self._registers[statement] = self._result(statement)
        self.registers: Array = np.array(self._values, np.int64)

    def level(self, register: int) -> int:
        """Return the level after which a register has its value."""
        return self._levels[register]

    def register(self, number: Any) -> int:
        """Return the register of a symbolic number."""
        assert is_symbolic(number), "plain numbers do not change"
        return self._registers[number.expression]

    def rows(self, level: int, base: int) -> Array:
        """Return the rows of a level.

        Args:
            level: The level.
            base: Address of register 0, from which the addresses of operands are computed.

        Returns:
            Rows ``[rows, abi.SIZE_CODE_WORDS]``, int64: operation, address of the result (of a
            guard: its required outcome), addresses of two operands.
        """
        guards = _CODES["eq"]
        rows = [
            (
                code,
                target if code >= guards else base + abi.WORD * target,
                base + abi.WORD * one,
                base + abi.WORD * other,
            )
            for at, (code, target, one, other) in self._rows
            if at == level
        ]
        return np.array(rows, np.int64).reshape(-1, abi.SIZE_CODE_WORDS)

    # ------------------------------------------------------------------ translation

    def _new(self, level: int, *, floating: bool) -> int:
        register = len(self._values)
        self._values.append(0)
        self._levels.append(level)
        if floating:
            self._floats.add(register)
        return register

    def _constant(self, value: float) -> int:
        floating = isinstance(value, float)
        bits = float_bits(value) if floating else int(value)
        register = self._constants.get((floating, bits))
        if register is None:
            if not -(1 << 63) <= bits < 1 << 63:
                raise Unsupported("a size of more than 64 bits")
            register = self._constants[floating, bits] = self._new(-1, floating=floating)
            self._values[register] = bits
        return register

    def _emit(self, name: str, *operands: int, floating: bool = False) -> int:
        code = _CODES.get(name)
        if code is None:
            raise Unsupported(f"sizes computed by {name}")
        level = max(0, *(self._levels[register] for register in operands))
        target = self._new(level, floating=floating)
        self._rows.append((level, (code, target, operands[0], operands[-1])))
        return target

    def _require(self, name: str, one: int, other: int, outcome: bool) -> None:
        level = max(0, self._levels[one], self._levels[other])
        self._rows.append((level, (_CODES[name], int(outcome), one, other)))

    def _floating(self, register: int) -> int:
        if register in self._floats:
            return register
        return self._emit("float", register, floating=True)

    def _operand(self, operand: Operand) -> int:
        if isinstance(operand, Expression):
            return self._registers[operand]
        return self._constant(operand)

    def _result(self, expression: Expression) -> int:
        """Emit an expression; return the register of its result."""
        operation = expression.operation
        if operation is expressions.DIMENSION:
            (position,) = expression.operands
            assert type(position) is int, "a dimension has a position"
            return position
        operands = [self._operand(operand) for operand in expression.operands]
        if operation is expressions.POS:
            return operands[0]
        if operation is expressions.NEG:
            operation, operands = expressions.MUL, [operands[0], self._constant(-1)]
        floats = [register in self._floats for register in operands]
        if operation is expressions.FLOAT_BITS:
            return self._emit("or", *[self._floating(operands[0])] * 2)
        if operation in _TO_INTEGER and all(floats):
            return self._emit(f"f{operation.name}", *operands)
        if operation in (expressions.MAX, expressions.MIN) and len({*floats}) > 1:
            raise Unsupported(f"the {operation.name} of an integer and a float among sizes")
        floating = any(floats) or operation is expressions.TRUEDIV
        if floating:
            operands = [self._floating(register) for register in operands]
        name = f"f{operation.name}" if floating else operation.name
        if operation in _DIVISIONS:
            zero = self._constant(0.0 if floating else 0)
            self._require("feq" if floating else "eq", operands[1], zero, False)
        return self._emit(name, *operands, floating=floating)

    def _guard(self, guard: Guard) -> None:
        name, swapped, negated = _COMPARED[guard.comparison.operation]
        pair = [self._operand(operand) for operand in guard.comparison.operands]
        if any(register in self._floats for register in pair):
            name, pair = f"f{name}", [self._floating(register) for register in pair]
        one, other = reversed(pair) if swapped else pair
        self._require(name, one, other, guard.outcome != negated)
