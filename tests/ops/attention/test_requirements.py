"""Attention, rotary embeddings and linear attention refuse what does not fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import subgraph as sg
from subgraph.graph.types import Array
from tests.support.requirements import DEVICES, Use, floats, ints, refused, run, taken

HEADS = {"q_num_heads": 4, "kv_num_heads": 2}
Q, K, V = floats(2, 4, 3, 6), floats(2, 2, 5, 6), floats(2, 2, 5, 7)
FLAT = (floats(2, 3, 24), floats(2, 5, 12), floats(2, 5, 14))
PAST = (floats(2, 2, 8, 6), floats(2, 2, 8, 7))


def attention(
    q: Array = Q, k: Array = K, v: Array = V, *rest: Array | None, outputs: int = 1, **given: Any
) -> Use:
    """Return a use of Attention."""
    return Use("Attention", [q, k, v, *rest], given, outputs=outputs)


def rotary(
    x: Array, angles: Sequence[int], positions: Array | None = None, **given: Any
) -> list[Use]:
    """Return uses of RotaryEmbedding whose cosines, then sines, have a shape."""
    half = given.pop("half", 3)
    rows = angles[:-1]
    fits = floats(*rows, half)
    caches = ((floats(*angles), fits), (fits, floats(*angles)))
    return [
        Use("RotaryEmbedding", [x, *pair, *([] if positions is None else [positions])], given)
        for pair in caches
    ]


X4, X3 = floats(2, 4, 3, 6), floats(2, 3, 24)
IDS = ints(0, 1, 2, 6, 5, 4).reshape(2, 3)
LINEAR = {"q_num_heads": 4, "kv_num_heads": 2, "update_rule": "gated_delta"}


def linear(k: int | None = None, other: Array | None = None, **given: Any) -> Use:
    """Return a use of LinearAttention, one of whose operands may be replaced."""
    operands: list[Array | None] = [
        *(floats(2, 5, 12), floats(2, 5, 6), floats(2, 5, 8)),
        *(floats(2, 2, 3, 4), floats(2, 5, 6), floats(2, 5, 2)),
    ]
    if k is not None:
        operands[k] = other
    return Use("LinearAttention", operands, {**LINEAR, **given}, outputs=2)


def flexible(q: Array, k: Array, v: Array) -> Use:
    """Return a use of FlexAttention."""
    return Use("FlexAttention", [q, k, v], version=1, domain="ai.onnx.preview")


WRONG = [
    attention(Q, floats(2, 2, 5, 5)),
    attention(Q, floats(2, 2, 5, 7), floats(2, 2, 5, 7)),
    attention(Q, floats(2, 3, 5, 6), floats(2, 3, 5, 7)),
    attention(Q, floats(2, 0, 5, 6), floats(2, 0, 5, 7)),
    attention(Q, floats(2, 8, 5, 6), floats(2, 8, 5, 7)),
    attention(Q, floats(1, 2, 5, 6), floats(1, 2, 5, 7)),
    attention(Q, K, floats(2, 2, 4, 7)),
    attention(Q, K, floats(2, 2, 6, 7)),
    attention(Q, K, floats(2, 1, 5, 7)),
    attention(Q, K, floats(1, 2, 5, 7)),
    attention(Q, K, floats(2, 5, 14)),
    attention(Q, K.astype(np.float64)),
    attention(*FLAT, q_num_heads=4),
    attention(*FLAT),
    attention(*FLAT, q_num_heads=0, kv_num_heads=2),
    attention(*FLAT, q_num_heads=-4, kv_num_heads=2),
    attention(*FLAT, q_num_heads=5, kv_num_heads=2),
    attention(*FLAT, q_num_heads=4, kv_num_heads=3),
    attention(*FLAT, q_num_heads=4, kv_num_heads=2**62),
    attention(*FLAT, q_num_heads=3, kv_num_heads=2),
    attention(Q, K, V, floats(3, 6)),
    attention(Q, K, V, floats(2, 5)),
    attention(Q, K, V, floats(4, 5)),
    attention(Q, K, V, floats(0, 5)),
    attention(Q, K, V, floats(3, 3, 5)),
    attention(Q, K, V, floats(2, 2, 3, 5)),
    attention(Q, K, V, floats(1, 2, 4, 3, 5)),
    attention(Q, K, V, floats(3, 14), *PAST),
    attention(Q, K, V, None, PAST[0]),
    attention(Q, K, V, None, None, PAST[1]),
    attention(Q, K, V, None, floats(2, 2, 8, 5), PAST[1]),
    attention(Q, K, V, None, floats(2, 2, 7, 6), PAST[1]),
    attention(Q, K, V, None, floats(1, 2, 8, 6), PAST[1]),
    attention(Q, K, V, None, PAST[0], floats(2, 2, 8, 6)),
    attention(Q, K, V, None, PAST[0], floats(2, 1, 8, 7)),
    attention(Q, K, V, None, PAST[0], floats(2, 8, 14)),
    attention(Q, K, V, None, None, None, ints(5)),
    attention(Q, K, V, None, None, None, ints(5, 5, 5)),
    attention(Q, K, V, None, None, None, ints(5, 5).astype(np.int32)),
    attention(Q, K, V, outputs=4, qk_matmul_output_mode=4),
    attention(Q, K, V, outputs=4, qk_matmul_output_mode=-1),
    attention(Q, K, V, softmax_precision=7),
    *rotary(X4, (7, 4), IDS),
    *rotary(X4, (7, 2), IDS),
    *rotary(X4, (7, 0), IDS),
    *rotary(X4, (2, 3, 2)),
    *rotary(X3, (7, 4), IDS, num_heads=4),
    Use("RotaryEmbedding", [X4, floats(7, 3), floats(6, 3), IDS]),
    Use("RotaryEmbedding", [X4, floats(0, 3), floats(0, 3), IDS]),
    Use("RotaryEmbedding", [X4, floats(7, 3), floats(7, 3), IDS[:1]]),
    Use("RotaryEmbedding", [X4, floats(7, 3), floats(7, 3), IDS[:, :2]]),
    Use("RotaryEmbedding", [X4, floats(7, 3), floats(7, 3), IDS.reshape(-1)]),
    Use("RotaryEmbedding", [X4, floats(7, 3), floats(7, 3), IDS.astype(np.int32)]),
    Use("RotaryEmbedding", [X4, floats(7, 3), floats(7, 3)]),
    Use("RotaryEmbedding", [X4, floats(2, 2, 3), floats(2, 2, 3)]),
    Use("RotaryEmbedding", [X4, floats(1, 3, 3), floats(1, 3, 3)]),
    Use("RotaryEmbedding", [X3, floats(7, 3), floats(7, 3), IDS]),
    Use("RotaryEmbedding", [X3, floats(7, 3), floats(7, 3), IDS], {"num_heads": 5}),
    Use("RotaryEmbedding", [X3, floats(7, 3), floats(7, 3), IDS], {"num_heads": -4}),
    Use("RotaryEmbedding", [X3[0], floats(7, 3), floats(7, 3), IDS], {"num_heads": 4}),
    *(
        Use(
            "RotaryEmbedding",
            [X4, floats(7, 4), floats(7, 4), IDS],
            {"rotary_embedding_dim": rotated},
        )
        for rotated in (8, 7, -8, 2**40)
    ),
    Use("RotaryEmbedding", [X4[..., :5], floats(7, 2), floats(7, 2), IDS]),
    *(
        linear(k, other)
        for k, other in (
            (0, floats(2, 5, 13)),
            (0, floats(2, 4, 12)),
            (0, floats(2, 5, 16)),
            (1, floats(2, 5, 8)),
            (1, floats(1, 5, 6)),
            (1, floats(2, 5, 0)),
            (2, floats(2, 5, 9)),
            (2, floats(2, 4, 8)),
            (3, floats(2, 2, 4, 3)),
            (3, floats(1, 2, 3, 4)),
            (3, floats(2, 2, 12)),
            (4, floats(2, 5, 5)),
            (4, floats(2, 4, 6)),
            (4, floats(2, 5, 0)),
            (4, None),
            (5, floats(2, 5, 3)),
            (5, floats(1, 5, 2)),
            (5, None),
        )
    ),
    *(
        flexible(Q, k, v)
        for k, v in (
            (floats(2, 3, 5, 6), floats(2, 3, 5, 7)),
            (floats(2, 2, 5, 5), V),
            (floats(1, 2, 5, 6), V),
            (K, floats(2, 2, 4, 7)),
            (K, floats(2, 1, 5, 7)),
            (K, floats(2, 5, 14)),
        )
    ),
    linear(q_num_heads=0),
    linear(q_num_heads=3),
    linear(kv_num_heads=-2),
    linear(kv_num_heads=3),
    linear(update_rule="other"),
]
RIGHT = [
    attention(),
    attention(*FLAT, **HEADS),
    attention(Q, K, V, floats(3, 5), is_causal=1),
    attention(Q, K, V, floats(2, 1, 1, 4)),
    attention(Q, K, V, floats(1, 13), *PAST, outputs=3),
    attention(Q, K, V, None, None, None, ints(5, 0), is_causal=1),
    *rotary(X4, (7, 3), IDS)[:1],
    Use("RotaryEmbedding", [X3, floats(2, 3, 3), floats(2, 3, 3)], {"num_heads": 4}),
    Use("RotaryEmbedding", [X4, floats(7, 2), floats(7, 2), IDS], {"rotary_embedding_dim": 4}),
    flexible(Q, K, V),
    linear(),
    linear(4, floats(2, 5, 2)),
    linear(5, floats(2, 5, 1)),
]

test_operands_that_do_not_fit_are_refused = refused(WRONG)
test_operands_that_fit_are_taken = taken(RIGHT)


HUGE = (-1, 7, 2**31, 2**62, -(2**63), 2**63 - 1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("number", HUGE)
def test_numbers_outside_their_bounds_are_refused(number: int, device: str) -> None:
    positions = IDS.copy()
    positions[1, 1] = number
    for use in (
        Use("RotaryEmbedding", [X4, floats(7, 3), floats(7, 3), positions]),
        attention(Q, K, V, None, None, None, ints(number, 5)),
    ):
        for weights in ((), [len(use.inputs) - 1]):
            with pytest.raises(sg.ShapeError, match="culprit"):
                run(use, device, weights)
