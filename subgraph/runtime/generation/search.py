"""The loops of GreedySearch, Sampling, BeamSearch and WhisperBeamSearch.

The bodies of a node are the model's encoder and decoder, which are partitioned and compiled as
those of a Loop are. The search between two calls of the decoder is a small part of the time and
runs in NumPy: as nodes in the body of a Loop it would need other sizes in each iteration.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from subgraph.errors import UnsupportedOpError
from subgraph.graph.graph import Node
from subgraph.graph.limits import check_memory
from subgraph.graph.types import Array
from subgraph.operators.bodies import captures_of, check_input_values
from subgraph.operators.schema import get_schema

from .decoders import Body, CausalDecoder, CrossDecoder, Decoder
from .hypotheses import Hypotheses
from .sampling import Sampler, probabilities
from .scores import changes, number

Run = Callable[[Sequence[Any]], Sequence[Any]]
# Score of all beams but the first before the first step, so that these do not repeat the first.
_NOT_A_BEAM = -1e9


def generation(node: Node, bodies: Sequence[Run]) -> Run:
    """Return a callable that runs a node on its inputs and captures.

    Args:
        node: One of the four operators.
        bodies: Callables that run each body on its inputs and captures, in attribute order.
    """
    formals = get_schema(node.op_type, node.domain).inputs
    count = len(node.inputs)
    captures = captures_of(node, count).items()
    spans = {name: (run, span) for (name, span), run in zip(captures, bodies, strict=True)}

    def compute(inputs: Sequence[Any]) -> Sequence[Any]:
        check_input_values(node, inputs[:count])
        operands = dict(zip(formals, inputs[:count], strict=False))

        def body(run: Run, span: slice) -> Body:
            return lambda given: run([*given, *inputs[span]])

        called = {name: body(*each) for name, each in spans.items()}
        beams = int(number(operands.get("num_beams"), 1))
        kind = CausalDecoder if _model_type(node) == 0 else CrossDecoder
        decoder = kind(node, called, beams)
        search = _greedy if node.op_type in ("GreedySearch", "Sampling") else _beam_search
        # Scores of tokens that must not be chosen may become infinite.
        with np.errstate(all="ignore"):
            return search(node, decoder, operands)

    return compute


def _model_type(node: Node) -> int:
    return int(node.attrs.get("model_type", 2 if node.op_type == "WhisperBeamSearch" else 0))


def _first_tokens(node: Node, operands: Mapping[str, Any]) -> Array:
    """Return the tokens that the search continues, [batch, length]."""
    source: Array = operands["input_ids"]
    if _model_type(node) == 0:
        return source
    first = operands.get("decoder_input_ids") if source.ndim == 3 else None
    if first is not None:
        return np.asarray(first)
    start = int(node.attrs.get("decoder_start_token_id", -1))
    return np.full((source.shape[0], 1), start, np.int32)


def _greedy(node: Node, decoder: Decoder, operands: Mapping[str, Any]) -> Sequence[Any]:
    """Choose one token for each entry of the batch in each step: the best one, or by chance."""
    first = _first_tokens(node, operands)
    batch, begin = first.shape
    length = int(number(operands["max_length"], 0))
    pad, end = (int(node.attrs[f"{name}_token_id"]) for name in ("pad", "eos"))
    check_memory(4 * batch * length, f"node {node.name!r} ({node.op_type})")
    tokens = np.full((batch, length), pad, np.int32)
    tokens[:, :begin] = first
    ended = np.zeros(batch, np.bool_)
    change_scores = changes(node, operands, 1)
    sampler = Sampler(node, operands) if node.op_type == "Sampling" else None
    scores = decoder.start(operands, first)
    for position in range(begin, length):
        for change in change_scores:
            change(scores, tokens[:, :position], position == begin)
        chosen = scores.argmax(axis=1) if sampler is None else sampler.choose(scores)
        ended |= (chosen == end) & (end >= 0)
        tokens[:, position] = np.where(ended, pad, chosen)
        if position + 1 == length or ended.all():
            break
        scores = decoder.step(tokens[:, : position + 1], None)
    return [tokens, scores][: len(node.outputs)]


def _beam_search(node: Node, decoder: Decoder, operands: Mapping[str, Any]) -> Sequence[Any]:
    """Continue the best ``num_beams`` sequences of each entry of the batch in each step."""
    first = _first_tokens(node, operands)
    batch, begin = first.shape
    length = int(number(operands["max_length"], 0))
    beams = _Beams(node, operands, first)
    change_scores = changes(node, operands, beams.count)
    logits = decoder.start(operands, first)
    speech = _probabilities(node, logits)
    steps = _Steps(node, (length - begin, batch, beams.count, logits.shape[1]))
    logits = np.repeat(logits, beams.count, axis=0)
    while True:
        scores = logarithms(logits)
        for change in change_scores:
            change(scores, beams.open_tokens(), beams.position == begin)
        scores += beams.totals.reshape(-1, 1)
        steps.add(scores)
        parents = beams.advance(scores)
        if beams.position == length or all(each.done for each in beams.finished):
            break
        logits = decoder.step(beams.open_tokens(), parents if beams.count > 1 else None)
    sequences, averages = beams.results(int(number(operands["num_return_sequences"], 1)))
    return _outputs(node, [sequences, averages, steps.scores, None, speech], operands)


class _Beams:
    """The open and the finished sequences of all entries of the batch.

    Attributes:
        count: Open sequences of each entry.
        position: Tokens of each open sequence so far.
        totals: Sums of the logarithms of their tokens' probabilities, [batch, beams].
        finished: The finished sequences of each entry.
    """

    def __init__(self, node: Node, operands: Mapping[str, Any], first: Array) -> None:
        """Begin with the same tokens, [batch, length], in all open sequences of an entry."""
        batch, self.position = first.shape
        self.count = int(number(operands["num_beams"], 1))
        length = int(number(operands["max_length"], 0))
        self._end, self._pad = (int(node.attrs[f"{name}_token_id"]) for name in ("eos", "pad"))
        check_memory(8 * batch * self.count * length, f"node {node.name!r} ({node.op_type})")
        self._tokens = np.zeros((batch, self.count, length), np.int32)
        self._tokens[:, :, : self.position] = first[:, None]
        penalty = number(operands.get("length_penalty"), 1.0)
        early = node.attrs.get("early_stopping", 0) == 1
        self.finished = [Hypotheses(self.count, penalty, early) for _ in range(batch)]
        self.totals = np.full((batch, self.count), _NOT_A_BEAM, np.float32)
        self.totals[:, 0] = 0

    def open_tokens(self) -> Array:
        """Return the tokens of the open sequences, [batch * beams, position]."""
        batch, count, _ = self._tokens.shape
        return self._tokens[:, :, : self.position].reshape(batch * count, self.position)

    def advance(self, scores: Array) -> Array:
        """Continue the sequences by one token; return the row that each continues.

        Args:
            scores: Totals with each possible token, [batch * beams, vocabulary].
        """
        batch, vocabulary, at = len(self.finished), scores.shape[1], self.position
        best, places = largest(scores.reshape(batch, self.count * vocabulary), 2 * self.count)
        parents, chosen = np.divmod(places, vocabulary)
        rows = np.arange(batch * self.count, dtype=np.int64).reshape(batch, self.count)
        for b, finished in enumerate(self.finished):
            if finished.done:
                self.totals[b], self._tokens[b, :, at] = 0, self._pad
                continue
            tokens = self._tokens[b, :, :at]
            alive = finished.advance(tokens, best[b], parents[b], chosen[b], self._end)
            from_beam = parents[b, alive]
            self.totals[b], rows[b] = best[b, alive], rows[b, from_beam]
            self._tokens[b] = self._tokens[b, from_beam]
            self._tokens[b, :, at] = chosen[b, alive]
        self.position += 1
        return rows.ravel()

    def results(self, count: int) -> tuple[Array, Array]:
        """Return the ``count`` best sequences [batch, count, length], and their averages."""
        batch, _, length = self._tokens.shape
        sequences = np.full((batch, count, length), self._pad, np.int32)
        averages = np.zeros((batch, count), np.float32)
        for b, finished in enumerate(self.finished):
            if not finished.done:
                for row, total in zip(self._tokens[b], self.totals[b], strict=True):
                    finished.add(row[: self.position], total)
            for k, (score, row) in enumerate(finished.best[: -count - 1 : -1]):
                sequences[b, k, : len(row)] = row
                averages[b, k] = score
        return sequences, averages


class _Steps:
    """The output ``scores`` of a beam search, if it is used: zeros after the last step.

    Attributes:
        scores: The scores of all tokens in each step, [steps, batch, beams, vocabulary]; or None.
    """

    def __init__(self, node: Node, shape: tuple[int, ...]) -> None:
        self.scores: Array | None = None
        self._count = 0
        if _is_used(node, 2):
            what = f"node {node.name!r} ({node.op_type}): its output scores"
            check_memory(4 * np.prod(shape, dtype=np.float64), what)
            self.scores = np.zeros(shape, np.float32)

    def add(self, scores: Array) -> None:
        """Add the scores of a step, [batch * beams, vocabulary]."""
        if self.scores is not None:
            self.scores[self._count] = scores.reshape(self.scores.shape[1:])
            self._count += 1


def _is_used(node: Node, position: int) -> bool:
    if position >= len(node.outputs):
        return False
    value, graph = node.outputs[position], node.graph
    return graph is None or bool(value.uses) or graph.is_output(value)


def _probabilities(node: Node, logits: Array) -> Array | None:
    """Return the probability of the token that stands for silence; None if it is not used."""
    token = int(node.attrs.get("no_speech_token_id", -1))
    return probabilities(logits)[:, token] if _is_used(node, 4) and token >= 0 else None


def _outputs(
    node: Node, results: Sequence[Array | None], operands: Mapping[str, Any]
) -> list[Array | None]:
    """Return the results for the node's outputs; floats have the dtype of its penalties.

    Raises:
        UnsupportedOpError: An output is used that the node's attributes do not ask for.
    """
    for position, result in enumerate(results):
        if result is None and _is_used(node, position):
            raise UnsupportedOpError(
                f"node {node.name!r} ({node.op_type}): its output {position} is not computed; the "
                "attribute that asks for it is not set (no_speech_token_id), or not supported "
                "(decoder_output_cross_qk)"
            )
    given = (operands.get(name) for name in ("length_penalty", "repetition_penalty"))
    dtype = next((x.dtype for x in given if x is not None), np.dtype(np.float32))
    first, *floats = results[: len(node.outputs)]
    return [first, *(x if x is None else x.astype(dtype, copy=False) for x in floats)]


def logarithms(logits: Array) -> Array:
    """Return the logarithms of the softmax of each row."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    found: Array = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return found


def largest(scores: Array, count: int) -> tuple[Array, Array]:
    """Return the largest elements of each row with their positions, the largest first.

    Of equal elements the one at the smaller position comes first.
    """
    size = scores.shape[1]
    if np.isnan(scores).any():
        scores = np.where(np.isnan(scores), -np.inf, scores)
    # The smallest of the largest elements; some elements that equal it may not be among them.
    least = np.partition(scores, size - count, axis=1)[:, size - count, None]
    places = np.empty((len(scores), count), np.int64)
    for row, limit, found in zip(scores, least, places, strict=True):
        above = np.flatnonzero(row > limit)
        equal = np.flatnonzero(row == limit)[: count - len(above)]
        every = np.sort(np.concatenate([above, equal]))
        found[:] = every[np.argsort(-row[every], kind="stable")]
    return np.take_along_axis(scores, places, axis=1), places
