"""Models with the generation loop inside, against ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import subgraph as sg
from subgraph.graph.types import Array
from subgraph.operators.schema import get_schema
from tests.support.generation import (
    FLOAT,
    INT32,
    encoder_decoder,
    expected_of,
    generation_model,
    gpt,
)

pytestmark = pytest.mark.filterwarnings("ignore")

# Operators, with the kind of their bodies.
KINDS = (
    *("GreedySearch", "Sampling", "BeamSearch0", "BeamSearch1", "BeamSearch2"),
    "WhisperBeamSearch2",
)
BY_ENTRY = ("input_ids", "decoder_input_ids", "prefix_vocab_mask", "attention_mask")
SCORED = [("sequences", INT32), ("sequences_scores", FLOAT), ("scores", FLOAT)]


def one(value: float, dtype: Any = np.int32) -> Array:
    return np.array([value], dtype)


class Case:
    """A random search.

    Attributes:
        op_type: The operator.
        operands: Its inputs by name.
        model: The model.
        pad: The token that follows a finished sequence.
    """

    def __init__(self, kind: str, seed: int) -> None:
        """Draw a search: bodies, sizes, operands and attributes."""
        self.op_type = kind.rstrip("012")
        self._rng = rng = np.random.default_rng(seed)
        model_type = int(kind[-1]) if kind[-1].isdigit() else 0
        self._vocabulary = vocabulary = int(rng.integers(9, 40))
        batch, length = int(rng.integers(1, 4)), int(rng.integers(1, 8))
        self.pad, end = (int(rng.integers(vocabulary)) for _ in range(2))
        attributes: dict[str, Any] = {"eos_token_id": end, "pad_token_id": self.pad}
        attributes |= {"model_type": model_type, "decoder_start_token_id": int(rng.integers(9))}
        attributes["no_repeat_ngram_size"] = int(rng.choice([0, 0, 1, 2, 3]))
        tokens = rng.integers(0, vocabulary, (batch, length)).astype(np.int32)
        tokens[:, : int(rng.integers(0, length))] = self.pad
        operands: dict[str, Any] = {"input_ids": tokens}
        self.operands = operands
        begin = length if model_type == 0 else 1
        if model_type == 2:
            operands["input_ids"] = rng.standard_normal((batch, 5, length)).astype(np.float32)
            if self._chance(0.7):
                begin = int(rng.integers(1, 4))
                first = rng.integers(0, vocabulary, (batch, begin)).astype(np.int32)
                operands["decoder_input_ids"] = first
        self._add_bodies(attributes, model_type, seed)
        # ONNX Runtime runs its decoder with no inputs if the encoder makes the only token.
        steps = int(rng.integers(2 if model_type else 1, 14))
        operands["max_length"] = one(begin + steps)
        self._add_options(batch, length, model_type)
        outputs = SCORED[:1]
        if "Beam" in self.op_type:
            outputs = SCORED
            self._add_beams(attributes)
        elif self.op_type == "Sampling":
            # One token only is among the most probable ones. ONNX Runtime never samples the first
            # token in the first row.
            attributes |= {"top_p": 1e-6, "min_tokens_to_keep": 1, "custom": int(self._chance(0.5))}
            attributes["temperature"] = float(rng.choice([0.5, 1, 2]))
            operands["seed"] = one(3)
            mask = rng.random(vocabulary) < 0.7
            mask[0], mask[1] = False, True
            operands["vocab_mask"] = mask.astype(np.int32)
            attributes["no_repeat_ngram_size"] = 0
            operands.pop("prefix_vocab_mask", None)
        if self.op_type == "WhisperBeamSearch" and self._chance(0.6):
            self._add_timestamps(attributes)
        formals = get_schema(self.op_type, "com.microsoft").inputs
        self.model = generation_model(self.op_type, operands, outputs, formals, **attributes)

    def _chance(self, probability: float) -> bool:
        return bool(self._rng.random() < probability)

    def _add_bodies(self, attributes: dict[str, Any], model_type: int, seed: int) -> None:
        size: dict[str, Any] = {"vocabulary": self._vocabulary, "seed": seed}
        if model_type == 0:
            attributes["decoder"] = gpt(**size)
            if self._chance(0.3):
                attributes["init_decoder"] = gpt(**size, last_only=True)
            return
        form = {"hidden": self._chance(0.5), "whisper": model_type == 2}
        if model_type == 1 and self._chance(0.4):
            form |= {"hidden": False, "first_step": False}
        attributes["encoder"], attributes["decoder"] = encoder_decoder(**size, **form)

    def _add_options(self, batch: int, length: int, model_type: int) -> None:
        rng, vocabulary = self._rng, self._vocabulary
        if self._chance(0.5) or "Beam" in self.op_type:  # where ONNX Runtime requires it
            self.operands["min_length"] = one(int(rng.integers(0, 14)))
        if self._chance(0.5):
            self.operands["repetition_penalty"] = one(rng.choice([0.5, 1, 1.3, 2.5]), np.float32)
        for name, shape in (("vocab_mask", ()), ("prefix_vocab_mask", (batch,))):
            if self._chance(0.3):
                mask = rng.random((*shape, vocabulary)) < 0.8
                self.operands[name] = mask.astype(np.int32)
        if model_type != 2 and self._chance(0.3):
            mask = rng.random((batch, length)) < 0.8
            self.operands["attention_mask"] = mask.astype(np.int32)

    def _add_beams(self, attributes: dict[str, Any]) -> None:
        beams = int(self._rng.integers(1, 5))
        self.operands["num_beams"] = one(beams)
        self.operands["num_return_sequences"] = one(int(self._rng.integers(1, beams + 1)))
        self.operands["length_penalty"] = one(self._rng.choice([0, 0.5, 1, 2]), np.float32)
        attributes["early_stopping"] = int(self._chance(0.4))
        if self.op_type == "WhisperBeamSearch" and self._chance(0.4):
            self.operands["temperature"] = one(self._rng.choice([0.5, 2]), np.float32)

    def _add_timestamps(self, attributes: dict[str, Any]) -> None:
        begin = int(self._rng.integers(6, self._vocabulary - 1))
        special = self._rng.permutation(begin)[:4].tolist()
        names = ("translate", "transcribe", "start_of_lm", "no_timestamps")
        attributes |= {f"{n}_token_id": t for n, t in zip(names, special, strict=True)}
        attributes["beginning_timestamp_token_id"] = begin
        self.operands["logits_processor"] = one(1)

    def expected(self) -> list[Array]:
        """Return ONNX Runtime's results.

        Its beam search ends entries of a batch by the scores of other entries, so that each entry
        is a search of its own.
        """
        batch = len(self.operands["input_ids"])
        if "Beam" not in self.op_type:
            return expected_of(self.model, self.operands)
        each = [
            expected_of(
                self.model,
                {
                    name: array[row : row + 1] if name in BY_ENTRY else array
                    for name, array in self.operands.items()
                },
            )
            for row in range(batch)
        ]
        return [np.concatenate([found[k] for found in each], k // 2) for k in range(3)]


def check(case: Case, device: str) -> None:
    """Compare a device with ONNX Runtime; tokens that must not be chosen may be any."""
    want = case.expected()
    got = sg.compile_model(sg.load(case.model), device)(case.operands)
    assert got[0].dtype == np.int32
    assert got[0].shape == want[0].shape
    if "Beam" not in case.op_type:
        # ONNX Runtime does not set what follows the step in which the last sequence ends.
        open_at = np.flatnonzero((got[0] != case.pad).any(axis=0))
        end = max(open_at[-1] if len(open_at) else 0, case.operands["input_ids"].shape[1] - 1) + 2
        np.testing.assert_array_equal(got[0][:, :end], want[0][:, :end])
        assert (got[0][:, end:] == case.pad).all()
        return
    assert got[1].shape == want[1].shape
    assert got[2].shape == want[2].shape
    possible = want[1] > -1e30
    np.testing.assert_array_equal(got[0][possible], want[0][possible])
    np.testing.assert_allclose(got[1][possible], want[1][possible], rtol=1e-4, atol=1e-5)
    # Before any entry has ended.
    for mine, theirs in zip(got[2][:2], want[2][:2], strict=True):
        np.testing.assert_allclose(
            np.maximum(mine, -1e30), np.maximum(theirs, -1e30), rtol=1e-4, atol=1e-4
        )


@given(kind=st.sampled_from(KINDS), seed=st.integers(0, 10**6))
@example(kind="GreedySearch", seed=14)  # all entries end before max_length
@example(kind="BeamSearch1", seed=1005)  # an entry that continues after others have ended
@example(kind="WhisperBeamSearch2", seed=3)
def test_the_loop_is_that_of_onnx_runtime(kind: str, seed: int) -> None:
    check(Case(kind, seed), "REFERENCE")


@pytest.mark.parametrize("kind", KINDS)
def test_bodies_run_on_cpu(kind: str) -> None:
    case = Case(kind, 5)
    check(case, "CPU")
    model = sg.compile_model(sg.load(case.model), "CPU")
    again = model(case.operands)
    assert np.array_equal(model(case.operands)[0], again[0])
    regions = model.get_property("REGION_STRATEGIES")
    assert len(regions) >= 1
