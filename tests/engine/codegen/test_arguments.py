"""Declarations of kernel arguments: positions of fields, and declarations that are refused."""

from __future__ import annotations

from typing import Any

import pytest

from subgraph.engine.codegen.arguments import Address, KernelArguments, ReportWords, Triple


class _Operands(KernelArguments):
    x: Address
    checked: ReportWords


class _Sizes(KernelArguments):
    rows: int
    scale: float


class _Arguments(_Operands, _Sizes):
    pad: Triple
    lanes: int


def test_fields_of_parents_come_first_in_their_order() -> None:
    assert {name: index for name, (index, _) in _Arguments.fields.items()} == {
        "x": 0,
        "checked": 1,
        "rows": 3,
        "scale": 4,
        "pad": 5,
        "lanes": 8,
    }
    arguments = _Arguments(lanes=7, pad=(4, 5, 6), scale=2, rows=3, x="x", checked="report")
    assert arguments.words() == ["x", "report", 3, 2.0, 4, 5, 6, 7]


def test_a_field_of_two_parents_is_refused() -> None:
    one, other = (type(name, (_Sizes,), {}) for name in ("_One", "_Other"))
    with pytest.raises(TypeError, match="rows is in two parents"):
        type("_Both", (one, other), {})


def test_kinds_that_are_no_words_are_refused() -> None:
    """Address, Words and Triple are names of one type; only the text of an annotation differs."""
    with pytest.raises(TypeError, match="from __future__ import annotations"):
        type("_Typed", (KernelArguments,), {"__annotations__": {"x": int}})


def test_missing_and_unknown_fields_are_refused() -> None:
    few: dict[str, Any] = {"rows": 1}
    many: dict[str, Any] = {"rows": 1, "scale": 1.0, "columns": 2}
    with pytest.raises(TypeError, match="without \\['scale'\\]"):
        _Sizes(**few)
    with pytest.raises(TypeError, match="no fields \\['columns'\\]"):
        _Sizes(**many)
