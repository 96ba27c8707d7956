"""GreedySearch, Sampling, BeamSearch, WhisperBeamSearch: models with the generation loop inside.

The bodies are the model's encoder and decoder. `subgraph.runtime.generation` runs the loops; here
stand the operators' forms and requirements. NGramRepeatBlock is what loops of other models contain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from subgraph.graph.graph import Graph, Node
from subgraph.graph.types import Array, Dim, TensorType, ValueType
from subgraph.operators.functions import Call, Results, declare_contributed, function
from subgraph.operators.requirements import (
    Tensor,
    is_known,
    known_numbers,
    require,
    require_dtype,
    require_rank,
    require_shape,
    require_single,
    require_whole_number,
)
from subgraph.operators.schema import get_schema

_MOST_BEAMS = 128  # ONNX Runtime's limit, too
_MOST_REPEATED = 64  # tokens of a sequence whose repetition is searched: nodes of a body
_CAUSAL, _SOURCE_TOKENS, _FEATURES = 0, 1, 2  # model_type: GPT-2, T5, Whisper
_MODEL_TYPES: Mapping[str, tuple[int, ...]] = {
    "BeamSearch": (_CAUSAL, _SOURCE_TOKENS, _FEATURES),
    "GreedySearch": (_CAUSAL,),
    "Sampling": (_CAUSAL,),
    "WhisperBeamSearch": (_FEATURES,),
}


def _model_type(node: Node) -> int:
    default = _FEATURES if node.op_type == "WhisperBeamSearch" else _CAUSAL
    return int(node.attrs.get("model_type", default))


def search_operands(
    node: Node, source: Tensor, most: Tensor, least: Tensor | None = None, *rest: Tensor | None
) -> None:
    """Raise ShapeError unless the operands, attributes and bodies of a search fit each other.

    Args:
        node: The node; its bodies are checked, too.
        source: Tokens [batch, length], int32, or Whisper's features [batch, size, frames].
        most: ``max_length``, one int32.
        least: ``min_length``, one int32.
        rest: The other operands in the order of the schema.
    """
    kind = _model_type(node)
    allowed = _MODEL_TYPES[node.op_type]
    require(kind in allowed, "model_type is {}; it must be one of {}", kind, list(allowed))
    vocabulary = _check_bodies(node, kind)
    size = int(node.attrs.get("vocab_size", -1))
    require(size <= vocabulary, "vocab_size is {}; the logits have {} elements", size, vocabulary)
    vocabulary = size if size > 0 else vocabulary
    for name in ("eos_token_id", "pad_token_id", "decoder_start_token_id"):
        token = int(node.attrs.get(name, -1))
        require(abs(token) < 1 << 31, "{} is {}; tokens are int32", name, token)
    end = int(node.attrs["eos_token_id"])
    require(end < vocabulary, "eos_token_id is {}; there are {} tokens", end, vocabulary)
    names = get_schema(node.op_type, node.domain).inputs
    operands = dict(zip(names, (source, most, least, *rest), strict=False))
    begin = _check_source(node, kind, source, operands)
    longest = _single("max_length", most)
    require(
        longest is None or not is_known(begin) or longest > begin,
        "max_length is {}; it must be more than the {} tokens that are given",
        longest,
        begin,
    )
    _single("min_length", least)
    for name in ("length_penalty", "repetition_penalty", "temperature"):
        require_single(name, operands.get(name), "float32", "float16")
    _check_positive("repetition_penalty", operands.get("repetition_penalty"))
    _single("seed", operands.get("seed"))
    rules = _single("logits_processor", operands.get("logits_processor"))
    stamp = int(node.attrs.get("beginning_timestamp_token_id", -1))
    require(
        rules != 1 or kind != _FEATURES or 0 < stamp < vocabulary,
        "logits_processor is 1, and beginning_timestamp_token_id {}, not in [1, {})",
        stamp,
        vocabulary,
    )
    _check_beams(operands, vocabulary)
    batch = source.shape[0]
    for name, shape in {
        "vocab_mask": (vocabulary,),
        "prefix_vocab_mask": (batch, vocabulary),
        "presence_mask": (batch, vocabulary),
    }.items():
        require_dtype(name, operands.get(name), "int32")
        require_shape(name, operands.get(name), shape, "one for each token")
    for name in ("cross_qk_layer_head", "extra_decoding_ids"):
        require(operands.get(name) is None, "the input {} is not supported", name)
    speech = int(node.attrs.get("no_speech_token_id", -1))
    silent = speech < vocabulary
    require(silent, "no_speech_token_id is {}; there are {} tokens", speech, vocabulary)
    crossed = node.attrs.get("decoder_output_cross_qk", 0)
    require(not crossed, "decoder_output_cross_qk is {}; only 0 is supported", crossed)


def _single(name: str, operand: Tensor | None) -> int | None:
    """Return the element of an operand if it is known, after a check that it is one int32."""
    require_single(name, operand, "int32")
    known = known_numbers(operand)
    return None if not known else known[0]


def _check_positive(name: str, operand: Tensor | None) -> None:
    known = None if operand is None else operand.known
    value = 1.0 if known is None else float(np.asarray(known).reshape(-1)[0])
    require(value > 0, "{} is {}; it must be more than 0", name, value)


def _check_beams(operands: Mapping[str, Tensor | None], vocabulary: int) -> None:
    if "num_beams" not in operands:
        return
    beams = _single("num_beams", operands["num_beams"])
    returned = _single("num_return_sequences", operands["num_return_sequences"])
    wanted = 1 if beams is None else beams
    require(1 <= wanted <= _MOST_BEAMS, "num_beams is {}, not in [1, {}]", wanted, _MOST_BEAMS)
    require(vocabulary >= 2, "a beam search needs at least 2 tokens, there is {}", vocabulary)
    require(
        returned is None or 1 <= returned <= (beams or _MOST_BEAMS),
        "num_return_sequences is {}; it must be at least 1, and at most num_beams, {}",
        returned,
        beams,
    )


def _check_source(
    node: Node, kind: int, source: Tensor, operands: Mapping[str, Tensor | None]
) -> int:
    """Check the operands that sequences begin with; return how many tokens are given."""
    require_rank("input_ids", source, 3 if kind == _FEATURES else 2)
    mask, first = operands.get("attention_mask"), operands.get("decoder_input_ids")
    if kind != _FEATURES:
        require_dtype("input_ids", source, "int32")
        require_dtype("attention_mask", mask, "int32")
        require_shape("attention_mask", mask, source.shape, "that of input_ids")
    if kind == _CAUSAL:
        require(source.shape[1] >= 1, "input_ids has no tokens")
        return source.shape[1]
    if kind == _FEATURES and first is not None:
        require_rank("decoder_input_ids", first, 2)
        require_dtype("decoder_input_ids", first, "int32")
        shape = (source.shape[0], first.shape[1])
        require_shape("decoder_input_ids", first, shape, "a row for each entry of the batch")
        require(first.shape[1] >= 1, "decoder_input_ids has no tokens")
        return first.shape[1]
    start = int(node.attrs.get("decoder_start_token_id", -1))
    require(start >= 0, "decoder_start_token_id is {}; it must be a token", start)
    return 1


def _check_bodies(node: Node, kind: int) -> int:
    """Check the inputs and outputs of the bodies; return the number of tokens."""
    decoder = _body(node, "decoder")
    layers = len(decoder.outputs) - 1
    require(layers >= 1, "decoder has {} outputs; logits and a cache are needed", layers + 1)
    _require_dtypes(decoder, "decoder", 1)
    if kind == _CAUSAL:
        for name in ("decoder", "init_decoder"):
            body = decoder if name == "decoder" else node.attrs.get(name)
            if isinstance(body, Graph):
                _require_count(body, name, 3 + layers, 1 + layers)
                _require_dtypes(body, name, 3)
        return _vocabulary(decoder)
    encoder = _body(node, "encoder")
    before = 2 if kind == _SOURCE_TOKENS else 1  # tokens and mask, or features
    require(layers % 2 == 0, "decoder has {} outputs; keys and values are pairs", layers + 1)
    # With or without the encoder's result.
    given = len(decoder.inputs) - before - 2 * layers
    require(
        given in (0, 1),
        "decoder has {} inputs, {} or {} are needed for {} outputs",
        len(decoder.inputs),
        before + 2 * layers,
        before + 2 * layers + 1,
        layers + 1,
    )
    starts = len(encoder.inputs) > before or kind == _FEATURES
    require(starts or not given, "decoder takes encoder_hidden_states, which encoder lacks")
    _require_count(encoder, "encoder", before + starts, 2 * starts + layers * (1 + starts))
    return _vocabulary(decoder)


def _body(node: Node, name: str) -> Graph:
    body = node.attrs.get(name)
    require(isinstance(body, Graph), "the attribute {} is missing", name)
    assert isinstance(body, Graph)
    return body


def _require_count(body: Graph, name: str, inputs: int, outputs: int) -> None:
    found = len(body.inputs), len(body.outputs)
    require(
        found == (inputs, outputs),
        "{} has {} inputs and {} outputs; {} and {} are needed",
        name,
        *found,
        inputs,
        outputs,
    )


def _require_dtypes(body: Graph, name: str, count: int) -> None:
    for value in body.inputs[:count]:
        dtype = value.type.dtype if isinstance(value.type, TensorType) else "int32"
        require(dtype == "int32", "input {} of {} has dtype {}, not int32", value.name, name, dtype)


def _vocabulary(decoder: Graph) -> int:
    type_ = decoder.outputs[0].type
    shape = type_.shape if isinstance(type_, TensorType) else None
    require(
        shape is not None and len(shape) == 3 and isinstance(shape[2], int),
        "the logits of decoder have type {}; the number of tokens must be stated",
        type_,
    )
    assert shape is not None, "just required"
    return int(shape[2] or 0)


def search_types(
    node: Node, types: Sequence[ValueType | None], values: Sequence[Array | None]
) -> list[ValueType | None]:
    """Return the types of sequences [batch, (returned,) max_length], averages and scores."""
    names = get_schema(node.op_type, node.domain).inputs
    given = dict(zip(names, types, strict=False))
    known = dict(zip(names, values, strict=False))

    def size(name: str) -> Dim:
        array = known.get(name)
        return None if array is None or array.size != 1 else int(array.reshape(-1)[0])

    source = types[0]
    shape = source.shape if isinstance(source, TensorType) else None
    batch = None if not shape else shape[0]
    longest, vocabulary = size("max_length"), _body(node, "decoder").outputs[0].type
    tokens: Dim = int(node.attrs.get("vocab_size", -1))
    if tokens == -1 and isinstance(vocabulary, TensorType) and vocabulary.shape:
        tokens = vocabulary.shape[-1]
    if node.op_type in ("GreedySearch", "Sampling"):
        results = [TensorType("int32", (batch, longest)), TensorType("float32", (batch, tokens))]
        return list(results[: len(node.outputs)])
    penalties = [given.get(f"{name}_penalty") for name in ("length", "repetition")]
    dtype = next((t.dtype for t in penalties if isinstance(t, TensorType)), "float32")
    returned = size("num_return_sequences")
    found = [
        TensorType("int32", (batch, returned, longest)),
        TensorType(dtype, (batch, returned)),
        TensorType(dtype, (None, batch, size("num_beams"), tokens)),
        None,
        TensorType(dtype, (batch,)),
    ]
    return list(found[: len(node.outputs)])


_GREEDY = (
    "input_ids, max_length, min_length?, repetition_penalty?, vocab_mask?, prefix_vocab_mask?, "
    "attention_mask?"
)
_BEAMS = (
    "input_ids, max_length, min_length?, num_beams, num_return_sequences, length_penalty?, "
    "repetition_penalty?, vocab_mask?, prefix_vocab_mask?, attention_mask?, decoder_input_ids?, "
    "logits_processor?"
)
_ATTRIBUTES: dict[str, Any] = {
    "decoder": "graph!",
    "decoder_start_token_id": -1,
    "encoder": "graph",
    "eos_token_id": "int!",
    "init_decoder": "graph",
    "model_type": 0,
    "no_repeat_ngram_size": 0,
    "pad_token_id": "int!",
    "vocab_size": -1,
}
_FIELDS: dict[str, Any] = {
    "compute": None,
    "infer": search_types,
    "requires": search_operands,
    "grows": True,
}
declare_contributed("GreedySearch", f"{_GREEDY} -> sequences", attributes=_ATTRIBUTES, **_FIELDS)
declare_contributed(
    "Sampling",
    f"{_GREEDY}, presence_mask?, seed? -> sequences, filtered_logits?",
    attributes={
        **_ATTRIBUTES,
        "custom": 0,
        "filter_value": -1e20,
        "min_tokens_to_keep": 0,
        "presence_penalty": 0.0,
        "temperature": 1.0,
        "top_p": 0.0,
    },
    random=True,
    **_FIELDS,
)
_BEAM_ATTRIBUTES = {**_ATTRIBUTES, "early_stopping": 0}
declare_contributed(
    "BeamSearch",
    f"{_BEAMS} -> sequences, sequences_scores?, scores?",
    attributes=_BEAM_ATTRIBUTES,
    **_FIELDS,
)
declare_contributed(
    "WhisperBeamSearch",
    f"{_BEAMS}, cross_qk_layer_head?, extra_decoding_ids?, temperature? -> sequences, "
    "sequences_scores?, scores?, cross_qk?, non_speech_probs?",
    attributes={
        **_BEAM_ATTRIBUTES,
        "beginning_timestamp_token_id": "int",
        "decoder_output_cross_qk": "int",
        "model_type": 2,
        "no_speech_token_id": "int",
        "no_timestamps_token_id": "int",
        "start_of_lm_token_id": "int",
        "transcribe_token_id": "int",
        "translate_token_id": "int",
    },
    **_FIELDS,
)


def repeat_operands(node: Node, tokens: Tensor, scores: Tensor) -> None:
    """Raise ShapeError unless each sequence has scores.

    Args:
        node: The NGramRepeatBlock.
        tokens: Sequences [batch, length], int64.
        scores: Scores of the next token, [batch, vocabulary].
    """
    require_rank("input_ids", tokens, 2)
    require_dtype("input_ids", tokens, "int64")
    require_rank("scores", scores, 2)
    require_shape("scores", scores, (tokens.shape[0], scores.shape[1]), "a row for each sequence")
    require_whole_number(node, "ngram_size", least=1)


@function(
    "NGramRepeatBlock",
    "input_ids, scores -> scores_out",
    requires=repeat_operands,
    ngram_size="int!",
)
def ngram_repeat_block(call: Call) -> Results:
    """Set the scores of tokens that would repeat a sequence of ``ngram_size`` tokens to -inf."""
    tokens, scores = call.inputs
    before = call.attribute("ngram_size") - 1  # tokens of such a sequence that exist
    if before >= _MOST_REPEATED:
        raise call.unsupported(f"ngram_size={before + 1}")
    # A number that is no token stands before each sequence, so that there is a place before each of
    # its tokens.
    none = call.constant(np.iinfo(np.int64).min, "int64")
    padded = call.Pad(tokens, [0, before, 0, 0], none)
    repeats = call.Equal(tokens, tokens)
    for k in range(-before, 0):
        # A token of the sequence at each place, and of the newest one.
        here = call.Slice(padded, [before + k], [k], [1])
        end = k + 1 if k < -1 else np.iinfo(np.int64).max
        newest = call.Slice(padded, [k], [end], [1])
        repeats = call.And(repeats, call.Equal(here, newest))
    infinity = call.constant(np.inf, call.dtype(scores))
    changes = call.Where(repeats, call.Neg(infinity), infinity)
    # A scatter would count negative tokens from the end.
    last = call.constant(np.iinfo(np.int64).max, "int64")
    forbidden = call.Where(call.Less(tokens, 0), last, tokens)
    forbidden = call.Where(repeats, forbidden, call.constant(0, "int64"))
    return [call.ScatterElements(scores, forbidden, changes, axis=1, reduction="min")]
