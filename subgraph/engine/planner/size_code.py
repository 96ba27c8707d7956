"""Code that computes a plan's sizes while its program runs, from what a trace wrote down.

A `Trace` holds expressions as text, for Python; here they become rows for the compiled interpreter
of `subgraph.engine.program.size_kernels`. Each row belongs to a level: the read after which all
that it needs is known.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

import numpy as np

from subgraph.engine.planner.lowering import Unsupported
from subgraph.engine.program import abi
from subgraph.graph.symbolic import Trace, float_bits, is_symbolic
from subgraph.graph.types import Array

_Row = tuple[int, int, int, int]  # operation, target or what must come out, operands
_CODES = {name: code for code, name in enumerate(abi.SIZE_OPERATIONS)}
_WHOLE: dict[type[ast.AST], str] = {
    ast.Add: "add",
    ast.Sub: "sub",
    ast.Mult: "mul",
    ast.FloorDiv: "floordiv",
    ast.Mod: "mod",
    ast.BitAnd: "and",
    ast.BitOr: "or",
    ast.BitXor: "xor",
    ast.LShift: "shl",
    ast.RShift: "shr",
}
_FLOATING: dict[type[ast.AST], str] = {
    ast.Add: "fadd",
    ast.Sub: "fsub",
    ast.Mult: "fmul",
    ast.Div: "fdiv",
}
_FUNCTIONS = {"abs": ("abs", "fabs"), "max": ("max", "fmax"), "min": ("min", "fmin")}
_ROUNDED = ("ceil", "floor", "trunc")
# Operator of a comparison: the guard, whether its operands change sides, whether it is denied.
_COMPARED: dict[type[ast.AST], tuple[str, bool, bool]] = {
    ast.Eq: ("eq", False, False),
    ast.NotEq: ("eq", False, True),
    ast.Lt: ("lt", False, False),
    ast.LtE: ("le", False, False),
    ast.Gt: ("lt", True, False),
    ast.GtE: ("le", True, False),
}


class SizeCode:
    """The rows of all levels, and the registers on which they work.

    Attributes:
        registers: One word for each number, constants among them.
    """

    def __init__(self, trace: Trace, results: Sequence[Any], level_of_dim: Sequence[int]) -> None:
        """Translate a trace.

        Args:
            trace: The trace; it is closed.
            results: The traced numbers that are wanted.
            level_of_dim: The level at which each dimension is read.

        Raises:
            Unsupported: it has operations that the interpreter does not know.
        """
        self._rows: list[tuple[int, _Row]] = []
        self._floats: set[int] = set()
        self._levels = [*level_of_dim]
        self._constants: dict[tuple[bool, int], int] = {}
        self._words = [0] * len(level_of_dim)
        self._registers: dict[str, int] = {}
        for defines, text, guard in trace.lines(results):
            tree = ast.parse(text, mode="eval").body
            if guard:
                self._guard(tree)
            else:
                self._registers[f"v{defines}"] = self._value(tree)
        self.registers: Array = np.array(self._words, np.int64)

    def level(self, register: int) -> int:
        """Return the level at which a register has its number."""
        return self._levels[register]

    def register(self, number: Any) -> int:
        """Return where a traced number is."""
        assert is_symbolic(number), "all others stay as they are"
        return self._registers[f"v{number.number}"]

    def rows(self, level: int, base: int) -> Array:
        """Return the rows of a level, for registers that begin at an address."""
        guards = _CODES["eq"]
        made = [
            (
                code,
                target if code >= guards else base + abi.WORD * target,
                base + abi.WORD * one,
                base + abi.WORD * other,
            )
            for at, (code, target, one, other) in self._rows
            if at == level
        ]
        return np.array(made, np.int64).reshape(-1, abi.SIZE_CODE_WORDS)

    # ------------------------------------------------------------------ translation

    def _new(self, level: int, *, floating: bool) -> int:
        register = len(self._words)
        self._words.append(0)
        self._levels.append(level)
        if floating:
            self._floats.add(register)
        return register

    def _constant(self, value: float) -> int:
        bits = float_bits(value) if isinstance(value, float) else int(value)
        key = isinstance(value, float), bits
        register = self._constants.get(key)
        if register is None:
            if not -(1 << 63) <= bits < 1 << 63:
                raise Unsupported("a number beyond 64 bits among sizes")
            register = self._constants[key] = self._new(-1, floating=key[0])
            self._words[register] = bits
        return register

    def _emit(self, name: str, *operands: int, floating: bool = False) -> int:
        level = max(0, *(self._levels[register] for register in operands))
        target = self._new(level, floating=floating)
        self._rows.append((level, (_CODES[name], target, operands[0], operands[-1])))
        return target

    def _require(self, name: str, one: int, other: int, outcome: bool) -> None:
        level = max(0, self._levels[one], self._levels[other])
        self._rows.append((level, (_CODES[name], int(outcome), one, other)))

    def _floating(self, register: int) -> int:
        if register in self._floats:
            return register
        return self._emit("float", register, floating=True)

    def _value(self, tree: ast.expr) -> int:
        match tree:
            case ast.Constant(value=int() | float() as value):
                return self._constant(value)
            case ast.Name(id="inf" | "nan" as name):
                return self._constant(float(name))
            case ast.Name(id=name):
                return self._registers[name]
            case ast.Subscript(value=ast.Name(id="dims"), slice=ast.Constant(value=int() as index)):
                return index
            case ast.UnaryOp(op=op, operand=operand):
                return self._unary(op, self._value(operand))
            case ast.BinOp(left=left, op=op, right=right):
                return self._binary(op, self._value(left), self._value(right))
            case ast.Call(func=ast.Name(id=name), args=arguments):
                return self._call(name, [self._value(each) for each in arguments])
            case _:
                raise Unsupported(f"sizes that follow by {ast.unparse(tree)}")

    def _unary(self, op: ast.unaryop, operand: int) -> int:
        match op:
            case ast.UAdd():
                return operand
            case ast.USub():
                return self._binary(ast.Mult(), operand, self._constant(-1))
            case ast.Invert():
                return self._emit("invert", operand)
            case _:
                raise Unsupported(f"sizes that follow by {type(op).__name__}")

    def _binary(self, op: ast.operator, one: int, other: int) -> int:
        if one in self._floats or other in self._floats or isinstance(op, ast.Div):
            name = _FLOATING.get(type(op))
            operands = [self._floating(register) for register in (one, other)]
            compared, floating = "feq", True
        else:
            name, operands = _WHOLE.get(type(op)), [one, other]
            compared, floating = "eq", False
        if name is None:
            raise Unsupported(f"sizes that follow by {type(op).__name__}")
        if isinstance(op, (ast.Div, ast.FloorDiv, ast.Mod)):
            self._require(compared, operands[1], self._constant(0.0 if floating else 0), False)
        return self._emit(name, *operands, floating=floating)

    def _call(self, name: str, operands: Sequence[int]) -> int:
        floats = [register in self._floats for register in operands]
        if name == "bits":
            # The register of a float holds its bits.
            return self._emit("or", *[self._floating(register) for register in operands] * 2)
        if name in _FUNCTIONS and len({*floats}) == 1:
            return self._emit(_FUNCTIONS[name][floats[0]], *operands, floating=floats[0])
        if name in _ROUNDED and all(floats):
            return self._emit(name, *operands)
        if name == "single" and all(floats):
            return self._emit(name, *operands, floating=True)
        raise Unsupported(f"sizes that follow by {name}")

    def _guard(self, tree: ast.expr) -> None:
        outcome = True
        if isinstance(tree, ast.UnaryOp) and isinstance(tree.op, ast.Not):
            tree, outcome = tree.operand, False
        if not isinstance(tree, ast.Compare) or len(tree.ops) != 1:
            raise Unsupported(f"a decision by {ast.unparse(tree)}")
        name, swapped, denied = _COMPARED[type(tree.ops[0])]
        pair = [self._value(tree.left), self._value(tree.comparators[0])]
        if any(register in self._floats for register in pair):
            name, pair = f"f{name}", [self._floating(register) for register in pair]
        one, other = reversed(pair) if swapped else pair
        self._require(name, one, other, outcome != denied)
