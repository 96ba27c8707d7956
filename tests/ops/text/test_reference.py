"""The reference of TfIdfVectorizer, against onnx.reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnx.reference
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import subgraph as sg
from tests.support.contrib import oracle
from tests.support.peer import model_of_node

pytestmark = pytest.mark.filterwarnings("ignore")


def _gram_pool(draw: st.DrawFn, vocabulary: Sequence[Any]) -> tuple[list[Any], list[int], int]:
    """Return a pool of distinct n-grams, where each length begins in it, and how many there are."""
    pool: list[Any] = []
    starts: list[int] = []
    number = 0
    for size in range(1, draw(st.integers(1, 3)) + 1):
        starts.append(len(pool))
        word = st.sampled_from(vocabulary)
        grams = st.lists(st.tuples(*[word] * size), min_size=1, max_size=4, unique=True)
        for gram in draw(grams):
            pool += gram
            number += 1
    return pool, starts, number


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_n_grams_are_counted_as_onnx_reference_counts_them(data: st.DataObject) -> None:
    strings = data.draw(st.booleans())
    vocabulary: list[Any] = ["a", "b", "", "da"] if strings else [0, 1, 2, -7]
    pool, starts, number = data.draw(st.composite(_gram_pool)(vocabulary))
    least = data.draw(st.integers(1, len(starts)))
    shape = data.draw(st.sampled_from([(7,), (3, 5), (1, 1), (0,), (2, 0)]))
    count = int(np.prod(shape))
    words = data.draw(st.lists(st.sampled_from(vocabulary), min_size=count, max_size=count))
    x = np.array(words, dtype=object if strings else np.int64).reshape(shape)
    attributes: dict[str, Any] = {
        "mode": data.draw(st.sampled_from(["TF", "IDF", "TFIDF"])),
        "min_gram_length": least,
        "max_gram_length": data.draw(st.integers(least, len(starts))),
        "max_skip_count": data.draw(st.integers(0, 3)),
        "ngram_counts": starts,
        "ngram_indexes": data.draw(st.permutations(range(number))),
        # onnx.reference asks how many there are, which may be none.
        "weights": data.draw(
            st.lists(st.floats(-2, 2, width=32), min_size=number, max_size=number)
        ),
        "pool_strings" if strings else "pool_int64s": pool,
    }
    model, given_inputs = model_of_node("TfIdfVectorizer", [x], 9, **attributes)
    # The standard has a weight for each n-gram, onnx.reference one for each column.
    weights = np.zeros(number)
    weights[attributes["ngram_indexes"]] = attributes["weights"]
    form: dict[str, Any] = {**attributes, "weights": weights.tolist()}
    other, _ = model_of_node("TfIdfVectorizer", [x], 9, **form)
    want: Any = onnx.reference.ReferenceEvaluator(other).run(None, {"i0": x})
    got = sg.compile_model(sg.load(model), "REFERENCE")(given_inputs)[0]
    if x.size:
        np.testing.assert_allclose(got, oracle(model, {"i0": x})[0], rtol=1e-6)
    assert (got.shape, got.dtype) == (want[0].shape, want[0].dtype)
    np.testing.assert_allclose(got, want[0], rtol=1e-6)
