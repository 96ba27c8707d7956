"""Changes of the scores of next tokens: penalties, masks, lengths, timestamps.

A `Change` is applied in place to the scores [rows, vocabulary] of each step, given the tokens
[rows, length] so far. A token that must not be chosen gets the lowest finite number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from subgraph.graph.graph import Node
from subgraph.graph.types import Array

LOWEST = float(np.finfo(np.float32).min)
# (scores, tokens, whether this is the first step) -> None
Change = Callable[[Array, Array, bool], None]
# Whisper's first timestamp is at most this many steps, of 0.02 s each, after the begin.
_LAST_INITIAL_TIMESTAMP = 50


def number(operand: Any, default: float) -> float:
    """Return the element of an operand; ``default`` if it is omitted."""
    return default if operand is None else float(np.asarray(operand).reshape(-1)[0])


def changes(node: Node, operands: Mapping[str, Any], rows: int) -> list[Change]:
    """Return the changes that the operands and attributes of a node ask for, in their order.

    Args:
        node: The node.
        operands: Its inputs by name; omitted ones are None or missing.
        rows: Rows of scores for each entry of the batch (beams).
    """
    attrs, found = node.attrs, list[Change]()
    penalty = number(operands.get("repetition_penalty"), 1.0)
    if penalty != 1.0:
        found.append(_repetition(np.float32(penalty)))
    if attrs.get("no_repeat_ngram_size", 0) > 0:
        found.append(_repeated_ngrams(int(attrs["no_repeat_ngram_size"])))
    for name in ("vocab_mask", "prefix_vocab_mask"):
        if operands.get(name) is not None:
            forbidden = np.asarray(operands[name]) == 0
            found.append(_forbidden(_by_row(forbidden, rows), name == "prefix_vocab_mask"))
    least, end = int(number(operands.get("min_length"), 0)), int(attrs["eos_token_id"])
    if least > 0 and end >= 0:
        found.append(_length(least, end))
    temperature = number(operands.get("temperature"), attrs.get("temperature", 1.0))
    if temperature > 0 and temperature != 1.0:
        found.append(_temperature(np.float32(temperature)))
    presence = np.float32(attrs.get("presence_penalty", 0.0))
    if presence and operands.get("presence_mask") is not None:
        found.append(_presence(presence * _by_row(operands["presence_mask"], rows)))
    # The other kinds of models have no timestamps.
    if "beginning_timestamp_token_id" in attrs and number(operands.get("logits_processor"), 0) == 1:
        found.append(timestamps(node))
    return found


def _by_row(mask: Array, rows: int) -> Array:
    """Return a mask of the vocabulary, or of each entry of the batch, for each row of scores."""
    return mask if mask.ndim == 1 else np.repeat(mask, rows, axis=0)


def _repetition(penalty: np.float32) -> Change:
    def change(scores: Array, tokens: Array, first: bool) -> None:
        for row, known in zip(scores, tokens, strict=True):
            seen = np.unique(known)
            seen = seen[(seen >= 0) & (seen < len(row))]
            old = row[seen]
            row[seen] = np.where(old < 0, old * penalty, old / penalty)

    return change


def _repeated_ngrams(size: int) -> Change:
    def change(scores: Array, tokens: Array, first: bool) -> None:
        forbid_repeated(scores, tokens, size, LOWEST)

    return change


def forbid_repeated(scores: Array, tokens: Array, size: int, value: float) -> None:
    """Set the scores of tokens that would repeat a sequence of ``size`` tokens to ``value``."""
    if size > tokens.shape[1]:
        return
    windows = np.lib.stride_tricks.sliding_window_view(tokens, size, axis=1)
    last = tokens[:, tokens.shape[1] - size + 1 :]  # the tokens before the next one
    repeated = (windows[:, :, :-1] == last[:, None]).all(axis=2)
    row, window = np.nonzero(repeated)
    token = windows[row, window, -1]
    valid = (token >= 0) & (token < scores.shape[1])
    scores[row[valid], token[valid]] = value


def _forbidden(mask: Array, first_only: bool) -> Change:
    def change(scores: Array, tokens: Array, first: bool) -> None:
        if first or not first_only:
            np.copyto(scores, np.float32(LOWEST), where=mask)

    return change


def _length(least: int, end: int) -> Change:
    def change(scores: Array, tokens: Array, first: bool) -> None:
        if tokens.shape[1] < least:
            scores[:, end] = LOWEST

    return change


def _temperature(temperature: np.float32) -> Change:
    def change(scores: Array, tokens: Array, first: bool) -> None:
        scores /= temperature

    return change


def _presence(penalties: Array) -> Change:
    def change(scores: Array, tokens: Array, first: bool) -> None:
        scores -= penalties

    return change


def timestamps(node: Node) -> Change:
    """Return the rules of Whisper's timestamps, which are the last tokens of the vocabulary.

    They stand in pairs, except for the first one, and do not decrease. If they are together more
    probable than each other token, the next token is one.

    Args:
        node: A WhisperBeamSearch, whose attributes name the special tokens.
    """
    attrs = node.attrs
    begin, end = int(attrs["beginning_timestamp_token_id"]), int(attrs["eos_token_id"])

    def tokens_of(*names: str) -> list[int]:
        found = (int(attrs.get(f"{name}_token_id", -1)) for name in names)
        return [token for token in found if token >= 0]

    never = tokens_of("start_of_lm", "no_timestamps")
    not_later = tokens_of("decoder_start", "translate", "transcribe")

    def change(scores: Array, tokens: Array, first: bool) -> None:
        for row, known in zip(scores, tokens, strict=True):
            row[never] = LOWEST
            length, stamps = len(known), np.flatnonzero(known >= begin)
            # The sequence begins with the tokens before the first timestamp, and that one.
            prompt = stamps[0] + 1 if len(stamps) else length
            if length > prompt:
                row[not_later] = LOWEST
            of_pair = length <= prompt or known[-2] >= begin
            if known[-1] >= begin:
                if of_pair:
                    row[begin:] = LOWEST
                else:
                    row[:end] = LOWEST
            if len(stamps):
                last = int(known[stamps[-1]])
                row[begin : last if known[-1] >= begin and not of_pair else last + 1] = LOWEST
            if length == prompt:
                row[begin + _LAST_INITIAL_TIMESTAMP + 1 :] = LOWEST
            text = row[:begin].max()
            if np.log(np.exp(row[begin:] - text).sum()) > 0:
                row[:begin] = LOWEST

    return change
