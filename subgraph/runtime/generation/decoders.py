"""The bodies of generation: their inputs in the first step and in the later ones.

Prompts and encoders run once for each entry of the batch. Rows of several beams begin with the step
that follows, which selects the cached keys and values of each row's parent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from subgraph.errors import ShapeError
from subgraph.graph.graph import Graph, Node, Value
from subgraph.graph.types import Array, TensorType, numpy_dtype

from .scores import number

Body = Callable[[Sequence[Any]], Sequence[Any]]  # on the body's inputs, without its captures


class Decoder:
    """Calls the bodies of a node.

    Attributes:
        node: The node.
        beams: Rows for each entry of the batch.
    """

    def __init__(self, node: Node, bodies: Mapping[str, Body], beams: int) -> None:
        """Begin a search.

        Args:
            node: The node.
            bodies: Its bodies by attribute.
            beams: Rows for each entry of the batch.
        """
        self.node, self.beams = node, beams
        self._bodies = bodies
        self._pasts: list[Array] = []
        self._expanded = beams == 1  # whether the cache has a row for each beam

    def start(self, operands: Mapping[str, Any], tokens: Array) -> Array:
        """Run the first step.

        Args:
            operands: Inputs of the node by name.
            tokens: The first tokens, [batch, length].

        Returns:
            The logits of the next token, [batch, vocabulary].
        """
        raise NotImplementedError

    def step(self, tokens: Array, parents: Array | None) -> Array:
        """Run a step; return the logits of the next token, [rows, vocabulary].

        Args:
            tokens: All tokens so far, [rows, length].
            parents: The row of the step before that each row continues; None: each its own.
        """
        raise NotImplementedError

    def _graph(self, attribute: str) -> Graph:
        graph: Graph = self.node.attrs[attribute]
        return graph

    def _selected(self, array: Array, parents: Array | None, axis: int) -> Array:
        """Return the rows of cached keys or values for the next step."""
        if parents is None:
            return array if self._expanded else np.repeat(array, self.beams, axis)
        return array.take(parents if self._expanded else parents // self.beams, axis)

    def _select(self, parents: Array | None, axis: int) -> None:
        """Select the rows of all cached keys and values."""
        if parents is not None and self._expanded and _is_identity(parents):
            parents = None
        self._pasts = [self._selected(past, parents, axis) for past in self._pasts]
        self._expanded = True

    def _logits(self, logits: Array) -> Array:
        """Return the logits of the last position as float32, without padding."""
        size = int(self.node.attrs.get("vocab_size", -1))
        last = logits[:, -1, : size if size > 0 else None]
        return last.astype(np.float32)


def _is_identity(parents: Array) -> bool:
    return bool((parents == np.arange(len(parents))).all())


def _empty_past(node: Node, value: Value, rows: int, batch_axis: int) -> Array:
    """Return an empty cache of the type of a body's input, for ``rows`` rows.

    Raises:
        ShapeError: the heads and their size are not stated.
    """
    type_ = value.type
    shape = list(type_.shape or ()) if isinstance(type_, TensorType) else []
    if len(shape) < 4 or not all(isinstance(shape[k], int) for k in (-3, -1)):
        raise ShapeError(
            f"node {node.name!r} ({node.op_type}): input {value.name!r} of a body has type "
            f"{type_}; the number of heads and their size must be stated"
        )
    shape[batch_axis], shape[-2] = rows, 0
    assert isinstance(type_, TensorType)
    return np.zeros([int(size or 0) for size in shape], numpy_dtype(type_.dtype))


class CausalDecoder(Decoder):
    """A decoder like GPT-2: tokens, positions, a mask; keys and values of a layer in one array."""

    def start(self, operands: Mapping[str, Any], tokens: Array) -> Array:
        """Run the prompt by ``init_decoder`` or, without one, by ``decoder``."""
        # Padding has no positions, also if a mask says otherwise.
        content = tokens != int(self.node.attrs["pad_token_id"])
        count = np.cumsum(content, axis=1, dtype=np.int32)
        positions = np.where(content, count - 1, 0).astype(np.int32)
        given = operands.get("attention_mask")
        mask = np.asarray(content if given is None else given, np.int32)
        name = "init_decoder" if "init_decoder" in self._bodies else "decoder"
        self._pasts = [
            _empty_past(self.node, value, len(tokens), 1) for value in self._graph(name).inputs[3:]
        ]
        rows = np.repeat(np.arange(len(tokens)), self.beams)
        self._positions = count[rows, -1:]
        # With room for all steps; new tokens are not masked.
        self._mask = np.ones((len(rows), int(number(operands["max_length"], 0))), np.int32)
        self._mask[:, : tokens.shape[1]] = mask[rows]
        return self._run(name, [tokens, positions, mask])

    def step(self, tokens: Array, parents: Array | None) -> Array:
        """Run the last token of each row."""
        # All rows of an entry of the batch have the same positions and mask.
        mask = self._mask[:, : tokens.shape[1]]
        self._select(parents, 1)
        positions = self._positions
        self._positions = positions + np.int32(1)
        return self._run("decoder", [tokens[:, -1:], positions, mask])

    def _run(self, name: str, inputs: Sequence[Array]) -> Array:
        logits, *self._pasts = self._bodies[name]([*inputs, *self._pasts])
        return self._logits(logits)


class CrossDecoder(Decoder):
    """An encoder, and a decoder that attends to its result, like T5 and Whisper.

    The inputs of the decoder are the tokens, the encoder's mask (T5) and result (if it has such an
    input), and keys and values of each layer: first those of the tokens so far, which its outputs
    are, then those of the encoder's result.
    """

    def start(self, operands: Mapping[str, Any], tokens: Array) -> Array:
        """Run the encoder, and the first step, unless the encoder's body has done it."""
        source = operands["input_ids"]
        encoder, decoder = self._graph("encoder"), self._graph("decoder")
        self._whole = not _takes_one_token(decoder)
        masks = [] if source.ndim == 3 else [_source_mask(self.node, source, operands)]
        inputs = [source, *masks, tokens][: len(encoder.inputs)]
        outputs = list(self._bodies["encoder"](inputs))
        count = len(decoder.outputs) - 1  # keys and values of all layers
        first = len(decoder.inputs) - 2 * count
        if has_first_step(encoder, source.ndim):
            logits, hidden = outputs[:2]
            self._pasts = outputs[2 : 2 + count]
            hiddens = [hidden] if first > 1 + len(masks) else []
            self._fixed = [*masks, *hiddens], outputs[2 + count :]
            return self._logits(logits)
        pasts = decoder.inputs[first : first + count]
        self._pasts = [_empty_past(self.node, value, len(tokens), 0) for value in pasts]
        self._fixed = masks, outputs
        return self._run(tokens)

    def step(self, tokens: Array, parents: Array | None) -> Array:
        """Run the last token of each row, or all if the decoder takes several."""
        if not self._expanded:
            before, after = self._fixed
            self._fixed = self._repeated(before), self._repeated(after)
        self._select(parents, 0)
        return self._run(tokens if self._whole else tokens[:, -1:])

    def _repeated(self, arrays: Sequence[Array]) -> list[Array]:
        return [np.repeat(array, self.beams, 0) for array in arrays]

    def _run(self, tokens: Array) -> Array:
        before, after = self._fixed
        results = self._bodies["decoder"]([tokens, *before, *self._pasts, *after])
        logits, *self._pasts = results
        return self._logits(logits)


def has_first_step(encoder: Graph, rank: int) -> bool:
    """Return whether a body ``encoder`` also runs the decoder's first step.

    Args:
        encoder: The body.
        rank: Dimensions of its first input: 2 for tokens (with a mask), 3 for features.
    """
    return len(encoder.inputs) > (2 if rank == 2 else 1)


def _takes_one_token(decoder: Graph) -> bool:
    type_ = decoder.inputs[0].type
    shape = type_.shape if isinstance(type_, TensorType) else None
    return shape is not None and len(shape) == 2 and shape[1] == 1


def _source_mask(node: Node, source: Array, operands: Mapping[str, Any]) -> Array:
    """Return the mask of the encoder's tokens; by default it hides padding at their begin."""
    mask = operands.get("attention_mask")
    if mask is not None:
        return np.asarray(mask)
    content = source != int(node.attrs["pad_token_id"])
    return np.asarray(np.logical_or.accumulate(content, axis=1), np.int32)
