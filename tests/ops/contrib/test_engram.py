"""Hyper-connections and Engram, against ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from subgraph.graph.types import Array
from tests.support.contrib import check
from tests.support.peer import random as floats
from tests.support.requirements import Use, refused

pytestmark = pytest.mark.filterwarnings("ignore")
BATCH, STREAMS, SIZE = (2, 3), 4, 8
TOLERANCES: dict[str, dict[str, Any]] = {
    "float32": {"rtol": 1e-5},
    "float16": {"rtol": 2e-3, "atol": 2e-3},
}
X, FLAT, BLOCK = floats(*BATCH, STREAMS, SIZE), floats(*BATCH, STREAMS * SIZE), floats(*BATCH, SIZE)
GATES = [(*BATCH, STREAMS), (*BATCH, STREAMS, 1), (*BATCH, STREAMS, SIZE)]


def _in(dtype: str, *arrays: Array | None) -> list[Array | None]:
    return [None if array is None else array.astype(dtype) for array in arrays]


@pytest.mark.parametrize("symbolic", [True, False])
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("gates", GATES)
def test_hyper_connections(gates: tuple[int, ...], dtype: str, symbolic: bool) -> None:
    form: dict[str, Any] = {**TOLERANCES[dtype], "symbolic": symbolic}
    gate = floats(*gates, seed=1)
    check("HyperConnectionPreMix", _in(dtype, X, gate), reduction_scale=0.5, **form)
    for mix in (None, floats(*BATCH, STREAMS, STREAMS)):
        check("HyperConnectionPostMix", _in(dtype, X, BLOCK, gate, mix), **form)
        if not symbolic:
            flat = _in(dtype, FLAT, BLOCK, gate, mix)
            check("HyperConnectionPostMix", flat, num_branches=STREAMS, **form)
    if not symbolic:
        for each in (gate, floats(*BATCH, STREAMS * SIZE, seed=1)):
            flat = _in(dtype, FLAT, each)
            check("HyperConnectionPreMix", flat, num_branches=STREAMS, **form)


def test_gates_of_another_dtype() -> None:
    inputs = [X.astype(np.float16), floats(*GATES[0])]
    check("HyperConnectionPreMix", inputs, rtol=2e-3, atol=2e-3)
    check("HyperConnectionPreMix", [X[:, :0], floats(*GATES[0])[:, :0]])


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("second", [True, False])
def test_engram_gate(second: bool, dtype: str) -> None:
    scales = [floats(STREAMS, SIZE, seed=seed) for seed in (2, 3, 4)]
    inputs = _in(dtype, X, floats(*X.shape, seed=1), BLOCK, *scales[: 3 if second else 2])
    outputs = (True, True) if second else (True,)
    check("EngramGate", inputs, outputs=outputs, **TOLERANCES[dtype])


def hashes(
    longest: int, tokens: int, dtype: str, given_: list[bool], seed: int
) -> tuple[list[Array | None], dict[str, Any]]:
    """Return random operands of NGramHashMapping, optional ones only where asked; attributes."""
    random, heads = np.random.default_rng(seed), 2
    tables = (longest - 1) * heads

    def some(*shape: int, low: int = 0, high: int = 9) -> Array:
        return random.integers(low, high, shape).astype(dtype)

    segments = np.sort(random.integers(0, 3, (2, tokens)), 1).astype(np.int32)
    optional = [some(2, longest - 1), some(tables), np.array(7, dtype), segments]
    inputs: list[Array | None] = [some(2, tokens), some(longest, low=-(10**9), high=10**9)]
    inputs += [some(tables, low=1, high=50)]
    inputs += [array if used else None for array, used in zip(optional, given_, strict=True)]
    while inputs[-1] is None:
        inputs.pop()
    return inputs, {"pad_id": 4, "n_head_per_ngram": heads, "max_ngram_size": longest}


@given(
    st.integers(2, 5),
    st.integers(0, 9),
    st.sampled_from(["int64", "int32"]),
    st.lists(st.booleans(), min_size=4, max_size=4),
    st.integers(0, 1),
    st.integers(0, 999),
)
def test_hashes_of_ngrams(
    longest: int, tokens: int, dtype: str, given_: list[bool], reset: int, seed: int
) -> None:
    inputs, form = hashes(longest, tokens, dtype, given_, seed)
    symbolic = {"symbolic": bool(seed % 2) and tokens > 0}
    check(
        "NGramHashMapping", inputs, steps=0, outputs=(True, True), reset_on_eos=reset,
        **symbolic, **form,
    )  # fmt: skip


def _use(op: str, *inputs: Array | None, outputs: int = 1, **form: Any) -> Use:
    return Use(op, inputs, form, 1, outputs, "com.microsoft")


def _hash(k: int, other: Array, **form: Any) -> Use:
    inputs, known = hashes(3, 6, "int64", [True] * 4, 0)
    inputs[k] = other
    return _use("NGramHashMapping", *inputs, **{**known, **form})


def _mix(k: int, other: Array) -> Use:
    inputs = [X, BLOCK, floats(*GATES[0]), floats(*BATCH, STREAMS, STREAMS)]
    inputs[k] = other
    return _use("HyperConnectionPostMix", *inputs)


def _gate(k: int, other: Array) -> Use:
    inputs = [X, X, BLOCK, *[floats(STREAMS, SIZE)] * 3]
    inputs[k] = other
    return _use("EngramGate", *inputs, outputs=2)


test_operands_that_do_not_fit_are_refused = refused(
    [
        _use("HyperConnectionPreMix", X, floats(*BATCH, STREAMS + 1)),
        _use("HyperConnectionPreMix", X, floats(*BATCH, 1)),
        _use("HyperConnectionPreMix", X, FLAT),
        _use("HyperConnectionPreMix", FLAT, FLAT, num_branches=5),
        _use("HyperConnectionPreMix", floats(3), floats(3)),
        _mix(1, floats(*BATCH, 1)),
        _mix(1, floats(*BATCH, STREAMS, SIZE)),
        _mix(2, floats(1, *GATES[0][1:])),
        _mix(3, floats(*BATCH, STREAMS, 1)),
        _gate(0, FLAT),
        _gate(1, X[:, :2]),
        _gate(2, floats(*BATCH, 1)),
        _gate(3, floats(SIZE)),
        _gate(4, floats(1, SIZE)),
        _gate(5, floats(STREAMS, 1)),
        _use("EngramGate", *(X, X, BLOCK, floats(STREAMS, SIZE), floats(STREAMS, SIZE)), outputs=2),
        _hash(1, np.array([1, 2])),
        _hash(2, np.array([11, 13, 17])),
        _hash(2, np.array([11, 13, 0, 17])),
        _hash(3, np.zeros((2, 3), np.int64)),
        _hash(3, np.zeros((1, 2), np.int64)),
        _hash(3, np.zeros((2, 2), np.int32)),
        _hash(4, np.zeros(1, np.int64)),
        _hash(5, np.zeros(1, np.int64)),
        _hash(6, np.zeros((2, 5), np.int32)),
        _hash(0, np.zeros(6, np.int64)),
        _hash(1, np.arange(3), max_ngram_size=1),
        _hash(1, np.arange(3), n_head_per_ngram=0),
    ]
)
