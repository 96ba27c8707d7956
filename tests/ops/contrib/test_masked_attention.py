"""DecoderMaskedMultiHeadAttention, against ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import subgraph as sg
from subgraph.graph.types import Array
from tests.support.contrib import check, node_model

pytestmark = pytest.mark.filterwarnings("ignore")
BATCH, HEADS, SIZE, ROOM = 2, 3, 4, 6


def normal(*shape: int) -> Array:
    return np.random.default_rng(shape).standard_normal(shape).astype(np.float32)


def whole(*numbers: int) -> Array:
    return np.array(numbers, np.int32)


def operands(count: int = 3, **others: Array | None) -> list[Array | None]:
    """Return the inputs in order; ``others`` replace those of their names."""
    token, cache = (BATCH, 1, HEADS * SIZE), (BATCH, HEADS, ROOM, SIZE)
    given: dict[str, Array | None] = {
        "query": normal(*token),
        "key": normal(*token) + 1,
        "value": normal(*token) - 1,
        "mask": None,
        "scores": None,
        "past_key": normal(*cache),
        "past_value": normal(*cache) + 1,
        "before": whole(count),
        "beams": None,
        "indirection": None,
        "bias": None,
    }
    found = list((given | others).values())
    while found[-1] is None:
        found.pop()
    return found


@pytest.mark.parametrize("before", [0, 3, ROOM - 1])
@pytest.mark.parametrize("options", ["", "mask", "scores", "bias", "mask scores bias"])
def test_a_token_attends_to_the_cache(before: int, options: str) -> None:
    mask = whole(*range(BATCH * (before + 1))).reshape(BATCH, -1) % 3
    given: dict[str, Array | None] = {
        "mask": (mask != 1).astype(np.int32),
        "scores": normal(1, HEADS, 1, before + 1),
        "bias": normal(3 * HEADS * SIZE),
    }
    # ONNX Runtime declares a mask and a bias of the positions so far.
    inputs = operands(before, **{name: given[name] for name in options.split()})
    form: dict[str, Any] = {"num_heads": HEADS, "past_present_share_buffer": 1}
    outputs = (True, True, True)
    want = check(
        "DecoderMaskedMultiHeadAttention", inputs, outputs=outputs, compared=1,
        **form,
    )  # fmt: skip
    model = node_model("DecoderMaskedMultiHeadAttention", inputs, outputs=outputs, **form)
    fed = {f"x{k}": x for k, x in enumerate(inputs) if x is not None}
    found = sg.compile_model(sg.load(model), "CPU")(fed)
    for k in (1, 2):
        np.testing.assert_allclose(
            found[k][:, :, : before + 1], want[k][:, :, : before + 1], rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize("masked", [False, True])
def test_a_token_attends_to_other_positions(masked: bool) -> None:
    key, value = normal(BATCH, HEADS, 7, SIZE), normal(BATCH, HEADS, 7, SIZE) - 1
    mask = (whole(*range(14)).reshape(2, 7) % 3 != 1).astype(np.int32) if masked else None
    inputs = [normal(BATCH, 1, HEADS * SIZE), key, value, mask]
    check("DecoderMaskedMultiHeadAttention", inputs if masked else inputs[:3], num_heads=HEADS)


WRONG: list[tuple[dict[str, Array | None], str]] = [
    ({"before": whole(ROOM)}, "6"),
    ({"before": whole(-1)}, "-1"),
    ({"before": whole(1, 1)}, "one number"),
    ({"before": None}, "its length is missing"),
    ({"past_key": None}, "past_key or its length"),
    ({"past_value": normal(BATCH, HEADS, 5, SIZE)}, "past_value"),
    ({"query": normal(BATCH, 2, HEADS * SIZE)}, "2 tokens"),
    ({"key": normal(BATCH, 1, HEADS * SIZE - 1)}, "key has shape"),
    ({"value": None}, "key or value is missing"),
    ({"mask": whole(*range(2 * (ROOM + 1))).reshape(2, -1)}, "mask_index has 7"),
    ({"scores": normal(1, HEADS, 1, ROOM + 1)}, "attention_bias has 7"),
    ({"bias": normal(HEADS * SIZE)}, "bias"),
    ({"beams": whole(2), "indirection": whole(*[0] * 12).reshape(1, 2, 6)}, "beam_width"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG)
def test_wrong_operands_are_refused(changes: dict[str, Array | None], message: str) -> None:
    inputs = operands(3, **changes)
    form: dict[str, Any] = {"num_heads": HEADS, "past_present_share_buffer": 1}
    model = node_model("DecoderMaskedMultiHeadAttention", inputs, outputs=(True,) * 3, **form)
    fed = {f"x{k}": x for k, x in enumerate(inputs) if x is not None}
    for device in ("CPU", "REFERENCE"):
        with pytest.raises(sg.SubgraphError, match=message):
            sg.compile_model(sg.load(model), device)(fed)
