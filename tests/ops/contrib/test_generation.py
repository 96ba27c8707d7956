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
from tests.support.contrib import check as check_node
from tests.support.contrib import node_model
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
    # ONNX Runtime has no scores of an entry that has ended. In its search of one entry that is the
    # last step here, too.
    steps = int(got[2].any(axis=(1, 2, 3)).sum()) if got[2].shape[1] == 1 else 1
    mine, theirs = (np.maximum(scores[:steps], -1e30) for scores in (got[2], want[2]))
    np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-4)


@given(kind=st.sampled_from(KINDS), seed=st.integers(0, 10**6))
@example(kind="GreedySearch", seed=14)  # all entries end before max_length
@example(kind="BeamSearch0", seed=771)  # an entry ends in the first step
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


# Other outputs, other ways to run


def small(op_type: str, *, outputs: Any = SCORED[:1], **changes: Any) -> tuple[Any, Any]:
    """Return a model of a small search, and its operands; ``changes`` of both, by name."""
    formals = get_schema(op_type, "com.microsoft").inputs
    tokens = np.random.default_rng(0).integers(2, 23, (2, 5)).astype(np.int32)
    operands: dict[str, Any] = {"input_ids": tokens, "max_length": one(9)}
    attributes: dict[str, Any] = {"eos_token_id": 2, "pad_token_id": 1, "decoder": gpt()}
    if "Beam" in op_type:
        operands |= {"num_beams": one(2), "num_return_sequences": one(1), "min_length": one(0)}
        operands |= {"length_penalty": one(1, np.float32)}
    if op_type == "WhisperBeamSearch":
        operands["input_ids"] = np.ones((2, 5, 7), np.float32)
        attributes["encoder"], attributes["decoder"] = encoder_decoder(whisper=True)
        attributes["decoder_start_token_id"] = 1
    for name, value in changes.items():
        (operands if name in formals else attributes)[name] = value
    operands = {name: array for name, array in operands.items() if array is not None}
    attributes = {name: value for name, value in attributes.items() if value is not None}
    model = generation_model(op_type, operands, outputs, formals, **attributes)
    return model, operands


def probabilities_of_next(decoder: Any, operands: dict[str, Array]) -> Array:
    """Return the probability of each token after the first row of ``operands``."""
    model, operands = small(
        "BeamSearch",
        outputs=SCORED,
        decoder=decoder,
        input_ids=operands["input_ids"][:1],
        num_beams=one(1),
    )
    return np.exp(expected_of(model, operands)[2][0, 0, 0])


@pytest.mark.parametrize("custom", [0, 1])
def test_sampling_chooses_the_most_probable_tokens(custom: int) -> None:
    rows, decoder = 4000, gpt(vocabulary=9, seed=4)
    tokens = np.tile(np.array([[3, 4, 5]], np.int32), (rows, 1))
    model, operands = small(
        "Sampling",
        decoder=decoder,
        input_ids=tokens,
        max_length=one(4),
        eos_token_id=-1,
        top_p=0.7,
        custom=custom,
        seed=one(5),
    )
    p = probabilities_of_next(decoder, operands)
    compiled = sg.compile_model(sg.load(model), "REFERENCE")
    found = compiled(operands)[0]
    assert np.array_equal(found, compiled(operands)[0])  # it depends on the seed alone
    order = np.argsort(-p)
    kept = order[: 1 + int(np.argmax(np.cumsum(p[order]) > 0.7))]
    wanted = np.zeros(9)
    wanted[kept] = p[kept] / p[kept].sum()
    theirs = np.bincount(expected_of(model, operands)[0][:, 3], minlength=9) / rows
    mine = np.bincount(found[:, 3], minlength=9) / rows
    np.testing.assert_allclose(mine, wanted, atol=0.03)
    np.testing.assert_allclose(theirs, wanted, atol=0.03)
    other = compiled({**operands, "seed": one(6)})[0]
    assert not np.array_equal(found, other)


def test_sampling_lowers_scores_of_tokens_that_are_present() -> None:
    # ONNX Runtime reads presence_mask on CUDA only.
    mask = np.tile(np.arange(23, dtype=np.int32) % 2, (2, 1))
    options = {"top_p": 1e-6, "min_tokens_to_keep": 1, "presence_penalty": 1e4}
    model, operands = small("Sampling", presence_mask=mask, **options)
    found = sg.compile_model(sg.load(model), "REFERENCE")(operands)[0][:, 5:]
    assert ((found % 2 == 0) | (found == 1)).all()


def test_the_probability_of_silence() -> None:
    outputs = [*SCORED, ("", 0), ("speech", FLOAT)]
    model, operands = small("WhisperBeamSearch", outputs=outputs, no_speech_token_id=7)
    found = sg.compile_model(sg.load(model), "REFERENCE")(operands)
    # The first beam has had no token before, so that its score is that of the token.
    np.testing.assert_allclose(found[3], np.exp(found[2][0, :, 0, 7]), rtol=1e-5)


def test_padded_logits_are_cut() -> None:
    mask = (np.arange(23) < 20).astype(np.int32)
    model, operands = small("GreedySearch", vocab_mask=mask)
    want = expected_of(model, operands)[0]
    model, operands = small("GreedySearch", vocab_size=20)
    assert np.array_equal(sg.compile_model(sg.load(model), "REFERENCE")(operands)[0], want)


def test_weights_of_bodies_may_be_those_of_the_graph() -> None:
    model, operands = small("BeamSearch", outputs=SCORED)
    want = expected_of(model, operands)
    (body,) = (a.g for a in model.graph.node[0].attribute if a.name == "decoder")
    model.graph.initializer.extend(body.initializer)
    del body.initializer[:]
    for device in ("CPU", "REFERENCE"):
        found = sg.compile_model(sg.load(model), device)(operands)
        assert np.array_equal(found[0], want[0])
        np.testing.assert_allclose(found[1], want[1], rtol=1e-5)


def test_a_search_is_saved_parsed_partitioned_and_exported(tmp_path: Any) -> None:
    case = Case("BeamSearch1", 5)
    graph = sg.load(case.model)
    want = sg.compile_model(graph, "REFERENCE")(case.operands)

    def same(model: sg.CompiledModel) -> bool:
        found = model(case.operands)
        return all(np.allclose(found[k], want[k], rtol=1e-4, atol=1e-5) for k in range(3))

    assert same(sg.compile_model(sg.parse(str(graph)), "REFERENCE"))
    assert same(sg.compile_model(sg.load(sg.to_onnx(graph.clone())), "REFERENCE"))
    model = sg.compile_model(graph, "CPU")
    model.export_model(tmp_path / "model")
    assert same(sg.import_model(tmp_path / "model", "CPU"))
    assert same(sg.compile_model(graph, "HETERO:CPU,REFERENCE"))
    graph.attrs["subgraph_property"] = sg.ContainOpSelector({"MatMul", "Add", "Softmax"})
    cut = sg.passes.apply_pass(graph, "PartitionGraph")
    bodies = cut.node("search").bodies
    assert any(node.subgraph is not None for body in bodies for node in body.nodes)
    assert same(sg.compile_model(cut, "CPU"))
    assert same(sg.compile_model(sg.load(sg.to_onnx(cut)), "REFERENCE"))


def test_types_follow_from_constants() -> None:
    graph = sg.load(small("BeamSearch", outputs=SCORED)[0])
    assert [str(v.type) for v in graph.outputs] == [
        'int32["input_ids.0", ?, ?]',
        'float32["input_ids.0", ?]',
        'float32[?, "input_ids.0", ?, 23]',
    ]


# Wrong operands


def without_size(dim: int, value: str = "past_0") -> Any:
    """Return a decoder whose input or output has a size that is not stated."""
    body = gpt()
    (port,) = (p for p in (*body.input, *body.output) if p.name == value)
    port.type.tensor_type.shape.dim[dim].dim_param = "H"
    return body


def one_output_less() -> Any:
    """Return a decoder without the last part of its cache."""
    body = gpt()
    body.output.pop()
    return body


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("GreedySearch", {"max_length": one(5)}, "max_length is 5; it must be more than the 5"),
    ("GreedySearch", {"max_length": one(-5)}, "max_length is -5"),
    ("GreedySearch", {"max_length": one(2**31 - 1)}, "budget"),
    ("GreedySearch", {"max_length": np.array([9, 9], np.int32)}, "one number"),
    ("GreedySearch", {"max_length": one(9, np.int64)}, "max_length is int64"),
    ("GreedySearch", {"eos_token_id": 99}, "eos_token_id is 99; there are 23 tokens"),
    ("GreedySearch", {"pad_token_id": 2**31}, "pad_token_id is 2147483648"),
    ("GreedySearch", {"eos_token_id": -(2**63)}, "tokens are int32"),
    ("GreedySearch", {"vocab_size": 30}, "vocab_size is 30"),
    ("GreedySearch", {"model_type": 1}, "model_type is 1"),
    ("GreedySearch", {"repetition_penalty": one(0, np.float32)}, "repetition_penalty is 0"),
    ("GreedySearch", {"repetition_penalty": one(np.nan, np.float32)}, "nan"),
    ("GreedySearch", {"vocab_mask": np.ones(22, np.int32)}, "vocab_mask has shape"),
    ("GreedySearch", {"prefix_vocab_mask": np.ones((3, 23), np.int32)}, "prefix_vocab_mask"),
    ("GreedySearch", {"attention_mask": np.ones((2, 4), np.int32)}, "attention_mask"),
    ("GreedySearch", {"input_ids": np.zeros((2, 0), np.int32)}, "no tokens"),
    ("GreedySearch", {"input_ids": np.zeros((2, 5), np.float32)}, "int32"),
    ("GreedySearch", {"input_ids": np.full((2, 5), 77, np.int32)}, "77"),
    ("GreedySearch", {"decoder": one_output_less()}, "5 inputs and 2 outputs"),
    ("GreedySearch", {"decoder": without_size(2)}, "number of heads"),
    ("GreedySearch", {"decoder": encoder_decoder()[1]}, "11 inputs and 5 outputs"),
    ("BeamSearch", {"num_beams": one(0)}, "num_beams is 0"),
    ("BeamSearch", {"num_beams": one(129)}, "num_beams is 129"),
    ("BeamSearch", {"num_return_sequences": one(3)}, "at most num_beams, 2"),
    ("BeamSearch", {"num_return_sequences": one(0)}, "num_return_sequences is 0"),
    ("BeamSearch", {"decoder": gpt(vocabulary=1), "eos_token_id": 0}, "at least 2 tokens"),
    ("BeamSearch", {"model_type": 1}, "encoder is missing"),
    ("BeamSearch", {"model_type": 1, "encoder": gpt()}, "decoder has 5 inputs"),
    ("WhisperBeamSearch", {"logits_processor": one(1)}, "beginning_timestamp_token_id -1"),
    ("WhisperBeamSearch", {"decoder_input_ids": np.zeros((3, 2), np.int32)}, "a row for each"),
    ("WhisperBeamSearch", {"decoder_input_ids": np.zeros((2, 0), np.int32)}, "no tokens"),
    ("WhisperBeamSearch", {"decoder_output_cross_qk": 1}, "decoder_output_cross_qk is 1"),
    ("WhisperBeamSearch", {"extra_decoding_ids": np.zeros((2, 2), np.int32)}, "extra_decoding"),
    ("WhisperBeamSearch", {"decoder_start_token_id": None}, "decoder_start_token_id is -1"),
    ("WhisperBeamSearch", {"no_speech_token_id": 99}, "no_speech_token_id is 99"),
    ("WhisperBeamSearch", {"encoder": gpt()}, "encoder has 5 inputs"),
]


@pytest.mark.parametrize(("op_type", "changes", "message"), WRONG)
def test_wrong_operands_are_refused(op_type: str, changes: dict[str, Any], message: str) -> None:
    model, operands = small(op_type, **changes)
    with pytest.raises(sg.SubgraphError, match=message):
        sg.compile_model(sg.load(model), "REFERENCE")(operands)


@pytest.mark.parametrize("op_type", ["GreedySearch", "BeamSearch"])
def test_nothing_is_generated_for_an_empty_batch(op_type: str) -> None:
    model, operands = small(op_type, input_ids=np.zeros((0, 5), np.int32))
    shape = (0, 9) if op_type == "GreedySearch" else (0, 1, 9)
    assert sg.compile_model(sg.load(model), "REFERENCE")(operands)[0].shape == shape


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("length", [1, 2, 3, 12])
def test_repeated_sequences_of_tokens(size: int, length: int) -> None:
    rng = np.random.default_rng([size, length])
    tokens, scores = rng.integers(0, 3, (4, length)), rng.standard_normal((4, 5))
    check_node("NGramRepeatBlock", [tokens, scores.astype(np.float32)], ngram_size=size)


@pytest.mark.parametrize(("size", "token"), [(65, 1), (2**31, 1), (2, -3), (2, 5)])
def test_sequences_that_cannot_be_repeated_are_refused(size: int, token: int) -> None:
    tokens, scores = np.full((1, 3), token), np.zeros((1, 5), np.float32)
    model = node_model("NGramRepeatBlock", [tokens, scores], ngram_size=size)
    for device in ("CPU", "REFERENCE"):
        with pytest.raises(sg.SubgraphError):
            sg.compile_model(sg.load(model), device)([tokens, scores])
