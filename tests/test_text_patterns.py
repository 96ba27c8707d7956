"""RegexFullMatch: the automaton against Python's ``re``, and a pattern that would never end."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import subgraph as sg
from subgraph import ops

_ATOMS = st.sampled_from(["a", "b", ".", "[ab]", "[^a]", r"\d", r"\w", r"\W", "1", "^", "$", r"\b"])


def _compound(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    counts = st.sampled_from(["*", "+", "?", "*?", "{2}", "{1,3}", "{2,}"])
    return st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda p: f"({p[0]}|{p[1]})"),
        st.tuples(inner, counts).map(lambda p: f"(?:{p[0]}){p[1]}"),
    )


def _matches(pattern: str, texts: list[str]) -> list[bool]:
    x = sg.input("x", (len(texts),), "string")
    graph = sg.Graph([x], [ops.RegexFullMatch(x, pattern=pattern)])
    found: list[bool] = sg.compile_model(graph, "REFERENCE")(x=np.array(texts, object))[0].tolist()
    return found


@given(
    pattern=st.recursive(_ATOMS, _compound, max_leaves=6),
    texts=st.lists(st.text("ab1 \n", max_size=6), min_size=1, max_size=6),
    flags=st.sampled_from(["", "(?i)", "(?s)", "(?m)"]),
)
@settings(max_examples=100, deadline=None)
def test_patterns_mean_what_they_mean_in_python(pattern: str, texts: list[str], flags: str) -> None:
    whole = f"{flags}(?:(?:{pattern})?){{1}}{pattern}"
    expected = [re.fullmatch(whole, text) is not None for text in texts]
    assert _matches(whole, texts) == expected


def test_a_pattern_that_would_try_every_way_ends() -> None:
    texts = ["a" * 60, "a" * 60 + "b", "é" * 3]
    assert _matches("(a+)+b", texts) == [False, True, False]
    assert _matches("(a|a)*(a|a)*b", texts) == [False, True, False]
    assert _matches("(?i)(É+)+", texts) == [False, False, True]


@pytest.mark.parametrize("pattern", ["(", r"(a*)*\1", "(?=a*)*a*b*", "((a{999}){999}){999}"])
def test_patterns_that_are_none_are_refused(pattern: str) -> None:
    with pytest.raises(sg.ShapeError):
        _matches(pattern, ["a"])
