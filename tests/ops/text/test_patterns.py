"""RegexFullMatch: the syntax of patterns against ONNX Runtime, and patterns slow elsewhere."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort
import pytest

import subgraph as sg
from subgraph import ops
from tests.support.peer import model_of_node


def _matches(pattern: str, texts: list[str]) -> list[bool]:
    x = sg.input("x", (len(texts),), "string")
    graph = sg.Graph([x], [ops.RegexFullMatch(x, pattern=pattern)])
    found: list[bool] = sg.compile_model(graph, "REFERENCE")(x=np.array(texts, object))[0].tolist()
    return found


def _by_onnxruntime(pattern: str, texts: list[str]) -> list[bool] | None:
    """Return what ONNX Runtime, which holds RE2, says; None if it refuses the pattern."""
    x = np.array(texts, object)
    model, _ = model_of_node("RegexFullMatch", [x], 20, pattern=pattern)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    try:
        session = ort.InferenceSession(model.SerializeToString(), options)
        found: list[bool] = session.run(None, {"i0": x})[0].tolist()
    except Exception:
        return None
    return found


def _agree(pattern: str, texts: list[str]) -> None:
    expected = _by_onnxruntime(pattern, texts)
    if expected is None:
        with pytest.raises(sg.ShapeError):
            _matches(pattern, texts)
    else:
        assert _matches(pattern, texts) == expected


_SYNTAX = r"""
\d+ [\d]+ \w\W\S\D [^\w\s]+ [[:alpha:]]+ [[:^alpha:]1]+ []a] a$ a\z \Aa a\Z \Qa.b\E \Qab\E+ \x41
\x{e9} \101 \1 \pL+ \p{Lu} \PN [\pN-]+ \p{^L} a{2 a{,2} a{1,0} a{1001} a** a*? *a |a| () (?<n>a)
(?<=a)b (?!a) (?i:A)b (?x)a [b-a] [a-] [-a] [a \ \y \_ (?i)\x{c9} (?m)^a$\n^b$ [[:nope:]] \p{Nope}
a) (?U)a+? x{2}{3} \bab\b a\Bb [\]a] [a\-z] (a|b)*? a{2,}b? (?s). (?P<1>a) ^* a|* (|a)+ (?i)[^a]
"""


@pytest.mark.parametrize("pattern", _SYNTAX.split())
def test_the_syntax_is_re2s(pattern: str) -> None:
    texts = ["a", "A", "aa", "ab", "b", "é", "É", "12", "٣", "a.b", "-", "a1", "]", "_", "z"]
    _agree(pattern, ["", "a\n", "a\nb", *texts])


def test_a_pattern_that_would_try_every_way_ends() -> None:
    texts = ["a" * 60, "a" * 60 + "b", "é" * 3]
    assert _matches("(a+)+b", texts) == [False, True, False]
    assert _matches("(a|a)*(a|a)*b", texts) == [False, True, False]
    assert _matches("(?i)(É+)+", texts) == [False, False, True]


@pytest.mark.parametrize("pattern", ["(", r"(a*)*\1", "(?=a*)*a*b*", "((a{999}){999}){999}"])
def test_patterns_that_are_none_are_refused(pattern: str) -> None:
    with pytest.raises(sg.ShapeError):
        _matches(pattern, ["a"])
