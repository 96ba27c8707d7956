"""Tokenizer and MurmurHash3, against ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx.helper
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import subgraph as sg
from subgraph.operators.schema import MICROSOFT

_TEXTS = st.lists(st.text("ab Z9_,é\n", max_size=12), min_size=1, max_size=6)
_EXPRESSIONS = [".", "[a-zA-Z0-9_]+", r"\b\w\w+\b", "a|ab", "ab?", r"(?i)z+", r"[^\s,]", "é{2}"]
# Classes one after another, as text pipelines write them; Python's ``re`` finds some of these.
_CLASSES = ["a", "Z", r"\w", r"\d", "[a-c]", r"[\da]", "[^ab]", r"[^\w]", "[é]", r"[^\s]"]
_WORDS = st.tuples(
    st.sampled_from(["", r"\b"]),
    st.lists(st.sampled_from(_CLASSES), min_size=1, max_size=3).map("".join),
    st.sampled_from(["", "+", "*"]),
    st.sampled_from(["", r"\b"]),
).map("".join)
_SEPARATORS = [[""], [" "], [",", " "], [r"\s+", "a+"], ["é|ab"], [r"\W"]]


def _model(op_type: str, x: np.ndarray[Any, Any], result: int, **attributes: Any) -> bytes:
    dtype = onnx.helper.np_dtype_to_tensor_dtype(x.dtype) if x.dtype != object else 8
    node = onnx.helper.make_node(op_type, ["x"], ["y"], domain=MICROSOFT, **attributes)
    given_type = onnx.helper.make_tensor_value_info("x", dtype, [None] * x.ndim)
    found = onnx.helper.make_tensor_value_info("y", result, None)
    graph = onnx.helper.make_graph([node], "g", [given_type], [found])
    sets = [onnx.helper.make_opsetid("", 18), onnx.helper.make_opsetid(MICROSOFT, 1)]
    model = onnx.helper.make_model(graph, opset_imports=sets, ir_version=9)
    content: bytes = model.SerializeToString()
    return content


def _agree(op_type: str, x: np.ndarray[Any, Any], result: int, **attributes: Any) -> None:
    content = _model(op_type, x, result, **attributes)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    expected = ort.InferenceSession(content, options).run(None, {"x": x})[0]
    for device in ("CPU", "REFERENCE"):
        found = sg.compile_model(content, device)(x=x)[0]
        assert found.shape == expected.shape
        assert found.tolist() == expected.tolist()


@settings(max_examples=90, deadline=None)
@given(st.data())
def test_tokens_are_onnx_runtimes(data: st.DataObject) -> None:
    texts = data.draw(_TEXTS)
    shape = data.draw(st.sampled_from([(len(texts),), (1, len(texts)), (len(texts), 1)]))
    characters = {"tokenexp": "."}, {"separators": [""]}
    split: dict[str, Any] = data.draw(
        st.one_of(
            st.one_of(st.sampled_from(_EXPRESSIONS), _WORDS).map(lambda p: {"tokenexp": p}),
            st.sampled_from(_SEPARATORS).map(lambda patterns: {"separators": patterns}),
        )
    )
    shortest = 1 if split in characters else data.draw(st.integers(1, 3))
    _agree(
        "Tokenizer",
        np.array(texts, object).reshape(shape),
        onnx.TensorProto.STRING,
        mark=data.draw(st.integers(0, 1)),
        mincharnum=shortest,
        pad_value=data.draw(st.sampled_from(["", "#"])),
        **split,
    )


@pytest.mark.parametrize(
    "split",
    [
        *({"tokenexp": p} for p in ("a|ab", "(a|ab)(c|bcd)?", "a+?", "a*", "b??a")),
        *({"separators": [p]} for p in ("a|ab", "a*?b", "(a|ab)(c|bcd)?")),
    ],
)
def test_the_longest_match_counts(split: dict[str, Any]) -> None:
    x = np.array(["xabcdyaab", "abcd", "", "aaa"], object)
    common = {"mark": 0, "mincharnum": 1, "pad_value": "#"}
    _agree("Tokenizer", x, onnx.TensorProto.STRING, **common, **split)


def test_tokens_of_no_text_are_none() -> None:
    attributes = {"mark": 1, "mincharnum": 1, "pad_value": "", "tokenexp": "a"}
    content = _model("Tokenizer", np.empty(0, object), onnx.TensorProto.STRING, **attributes)
    assert sg.compile_model(content)(x=np.empty(0, object))[0].shape == (0, 0)


@pytest.mark.parametrize(
    ("attributes", "words"),
    [
        ({}, "exactly one"),
        ({"tokenexp": "a", "separators": ["b"]}, "exactly one"),
        ({"tokenexp": "(a"}, r"missing \)"),
        ({"separators": ["a", "*"]}, "not valid"),
        ({"tokenexp": "a", "mincharnum": 0}, "mincharnum"),
    ],
)
def test_what_a_tokenizer_cannot_do_is_an_error(attributes: dict[str, Any], words: str) -> None:
    given_attributes = {"mark": 0, "mincharnum": 1, "pad_value": "", **attributes}
    x = np.array(["a"], object)
    with pytest.raises(sg.ShapeError, match=words):
        sg.compile_model(_model("Tokenizer", x, onnx.TensorProto.STRING, **given_attributes))(x=x)


def test_a_long_text_of_short_matches_ends() -> None:
    attributes = {"mark": 0, "mincharnum": 3, "pad_value": "", "tokenexp": "éb|bé{2}"}
    x = np.array(["éb" * 100_000 + "éé"], object)
    model = sg.compile_model(_model("Tokenizer", x, onnx.TensorProto.STRING, **attributes))
    assert model(x=x)[0].tolist() == [["béé"]]


def test_a_text_without_utf8_form_is_an_error() -> None:
    attributes = {"mark": 0, "mincharnum": 1, "pad_value": "", "tokenexp": "a+"}
    x = np.array(["a\ud800"], object)
    model = sg.compile_model(_model("Tokenizer", x, onnx.TensorProto.STRING, **attributes))
    with pytest.raises(sg.ShapeError, match="not valid Unicode"):
        model(x=x)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_hashes_are_onnx_runtimes(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(["int32", "uint32", "int64", "float32", "float64", "str"]))
    if dtype == "str":
        x = np.array(data.draw(_TEXTS), object)
    else:
        raw = data.draw(st.binary(min_size=48, max_size=48))
        x = np.nan_to_num(np.frombuffer(raw, dtype)).reshape(2, -1)
    positive = data.draw(st.integers(0, 1))
    result = onnx.TensorProto.UINT32 if positive else onnx.TensorProto.INT32
    seed = data.draw(st.sampled_from([0, 7, 2**31]))
    _agree("MurmurHash3", x, result, positive=positive, seed=seed)
