"""Views: kernels access argument blocks by field names, and never by numbers of words."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest

from subgraph.engine.codegen.argument_views import stack_block, view_of
from subgraph.engine.codegen.arguments import Address, WordBlock
from subgraph.engine.codegen.simd import ld_i64

ROOT = Path(__file__).parents[3]
_ACCESS = ("arg", "ld", "load", "put", "st")


class _Block(WordBlock):
    rows: int
    scale: float
    x: Address


def test_fields_are_read_and_set_by_name() -> None:
    block, view = stack_block(_Block), view_of(_Block)

    def move(address: int) -> int:
        own, given = block(), view(address)
        own.rows = given.rows + 1
        own.scale = given.scale * 2
        own.x = given.x
        given.rows, given.scale = own.rows, own.scale
        first: int = ld_i64(own)  # a view is an address where one is expected
        return first

    words = np.array([3, 0, 7], np.int64)
    words[1:2].view(np.float64)[0] = 1.5
    compiled: Any = numba.njit(move)
    assert compiled(words.ctypes.data) == 4
    assert words[0] == 4
    assert words[1:2].view(np.float64)[0] == 3.0


def test_a_block_on_the_stack_is_zeros_at_each_call() -> None:
    block = stack_block(_Block)

    def total() -> float:
        own = block()
        before: float = own.rows + own.scale + own.x
        own.rows, own.scale, own.x = 1, 2.0, 3
        return before

    compiled: Any = numba.njit(total)
    assert [compiled(), compiled()] == [0.0, 0.0]


def numbered(source: str) -> Iterator[int]:
    """Yield the lines on which a function loads from, or computes with, its parameter ``args``."""
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef) or not function.args.args:
            continue
        first = function.args.args[0]
        kind = "int" if first.annotation is None else ast.unparse(first.annotation)
        if (first.arg, kind) != ("args", "int"):
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func).rpartition(".")[2]
                passed = any(isinstance(a, ast.Name) and a.id == "args" for a in node.args)
                if passed and called.split("_")[0] in _ACCESS:
                    yield node.lineno
            if isinstance(node, ast.BinOp | ast.Subscript):
                used = (node.left, node.right) if isinstance(node, ast.BinOp) else (node.value,)
                if any(isinstance(a, ast.Name) and a.id == "args" for a in used):
                    yield node.lineno


@pytest.mark.parametrize(
    "access", ["arg(args, 3)", "ld_i64(args + 8)", "simd.ld_i64(args)", "args[2]"]
)
def test_a_number_in_place_of_a_name_is_found(access: str) -> None:
    kernel = "def kernel(args, begin, end, worker):\n    x = {}\n"
    assert list(numbered(kernel.format(access)))
    assert not list(numbered(kernel.format("arguments(args).x")))


FILES = sorted(
    path for folder in ("ops", "subgraph/engine/codegen") for path in (ROOT / folder).rglob("*.py")
)


def test_no_kernel_reads_its_arguments_by_number() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}" for path in FILES for line in numbered(path.read_text())
    ]
    assert not found
    assert len(FILES) > 100
