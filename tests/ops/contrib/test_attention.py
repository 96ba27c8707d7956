"""ONNX Runtime's attention operators, against ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import subgraph as sg
from subgraph.graph.types import Array
from tests.support.contrib import check, node_model

pytestmark = pytest.mark.filterwarnings("ignore")
B, S, N, D = 2, 5, 3, 8  # batches, positions, heads, their size
H = N * D


def normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def masks(past: int = 0) -> dict[str, Array]:
    """Return masks of every form for so many positions before."""
    rng, keys = np.random.default_rng(past), S + past
    raw = (rng.random((B, S, keys)) < 0.6).astype(np.int32)
    raw[..., 0] = 1
    return {
        "ends": np.array([keys, keys - 2], np.int32),
        "ends and starts": np.array([keys, keys - 1, 1, 0], np.int32),
        "ends and sums": np.array([keys, keys - 2, 0, S, 2 * S, 0, keys, 2 * keys - 2], np.int32),
        "keys": np.ascontiguousarray(raw[:, 0]),
        "queries": raw,
        "nothing": np.zeros((B, keys), np.int32),
    }


CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-4}


# With a cache ONNX Runtime takes masks of positions for causal attention only.
_FORMS = [
    (mask, causal, past)
    for mask in (None, *masks())
    for causal, past in ((0, 0), (1, 0), (0, 4), (1, 4))
    if (causal, past) != (0, 4) or mask not in ("ends", "ends and starts")
]


@pytest.mark.parametrize(("mask", "causal", "past"), _FORMS)
def test_attention(mask: str | None, causal: int, past: int) -> None:
    inputs = [normal(B, S, 16), normal(16, 3 * H, seed=1) / 4, normal(3 * H, seed=2)]
    inputs += [None if mask is None else masks(past)[mask]]
    inputs += [normal(2, B, N, past, D, seed=3)] if past else []
    outputs = [True, True] if past else [True]
    form: dict[str, Any] = {"num_heads": N, "unidirectional": causal, "outputs": outputs}
    check("Attention", inputs, constants=[1, 2], **form, **CLOSE)


def test_options_of_attention() -> None:
    x, w, bias = normal(B, S, 16), normal(16, 3 * H, seed=1) / 4, normal(3 * H, seed=2)
    scores = normal(1, N, S, S, seed=4)
    form: dict[str, Any] = {"num_heads": N, "constants": [1, 2], **CLOSE}
    # ONNX Runtime breaks down without a bias.
    want = check("Attention", [x, w, 0 * bias], scale=0.2, **form)
    check("Attention", [x, w], scale=0.2, expected=want, **form)
    check("Attention", [x, w, bias, None, None, scores], **form)
    mask = masks()["keys"]
    check("Attention", [x, w, bias, mask, None, scores], **form)
    check("Attention", [x, w, bias, masks()["nothing"]], mask_filter_value=-50.0, **form)
    check("Attention", [x, w, bias], outputs=[True, True], **form)
    wide = [normal(16, 2 * H + 2 * H, seed=5) / 4, normal(4 * H, seed=6)]
    check("Attention", [x, *wide], qkv_hidden_sizes=[H, H, 2 * H], **form)


def test_attention_of_any_length() -> None:
    inputs = [normal(B, S, 16), normal(16, 3 * H, seed=1) / 4, normal(3 * H, seed=2)]
    form: dict[str, Any] = {"num_heads": N, "constants": [1, 2], "symbolic": True, **CLOSE}
    for mask in ("ends", "keys", "queries"):  # a number of batches tells "ends and starts"
        check("Attention", [*inputs, masks()[mask]], **form)
    given = [*inputs, masks(4)["keys"], normal(2, B, N, 4, D, seed=3)]
    check("Attention", given, outputs=[True, True], unidirectional=1, **form)


@pytest.mark.parametrize("mask", [None, "ends", "keys"])
@pytest.mark.parametrize("past", [0, 4])
@pytest.mark.parametrize("zero", [False, True])
def test_quantised_attention(mask: str | None, past: int, zero: bool) -> None:
    rng = np.random.default_rng(7)
    x = rng.integers(0, 256, (B, S, 16)).astype(np.uint8)
    w = rng.integers(-60, 60, (16, 3 * H)).astype(np.int8)
    scales = [np.array(np.float32(0.01)), np.array(np.float32(0.02))]
    zeros = [np.array(np.uint8(128)), np.array(np.int8(0))] if zero else [None, None]
    inputs = [x, w, normal(3 * H), *scales, None if mask is None else masks(past)[mask], *zeros]
    inputs += [normal(2, B, N, past, D, seed=3)] if past else []
    form: dict[str, Any] = {"num_heads": N, "unidirectional": int(past > 0)}
    form["outputs"] = [True, True] if past else [True]
    check("QAttention", inputs, constants=[1, 2, 3, 4, 6, 7], **form, **CLOSE)


@pytest.mark.parametrize("mask", [None, "ends", "ends and sums", "keys", "queries"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("keys", [S, 7])
def test_multi_head_attention(mask: str | None, bias: bool, keys: int) -> None:
    q, k, v = normal(B, S, H), normal(B, keys, H, seed=1), normal(B, keys, 2 * H, seed=2)
    inputs = [q, k, v, normal(4 * H, seed=3) if bias else None]
    given = masks(keys - S)
    inputs += [None if mask is None else given[mask]]
    check("MultiHeadAttention", inputs, num_heads=N, **CLOSE)
    scores = normal(B, 1, S, keys, seed=4)
    check("MultiHeadAttention", [*inputs, scores], num_heads=N, scale=0.3, **CLOSE)


@pytest.mark.parametrize("mask", [None, "keys"])
@pytest.mark.parametrize("causal", [0, 1])
def test_multi_head_attention_with_a_cache(mask: str | None, causal: int) -> None:
    inputs = [normal(B, S, H, seed=k) for k in range(3)]
    inputs += [normal(3 * H, seed=3), None if mask is None else masks(4)[mask], None]
    inputs += [normal(B, N, 4, D, seed=4), normal(B, N, 4, D, seed=5)]
    form: dict[str, Any] = {"num_heads": N, "unidirectional": causal, **CLOSE}
    check("MultiHeadAttention", inputs, outputs=[True] * 3, **form)
    check("MultiHeadAttention", inputs[:3], outputs=[True] * 3, **form)


@pytest.mark.parametrize(("split", "symbolic"), [(False, False), (False, True), (True, False)])
def test_fewer_causal_queries_than_keys(split: bool, symbolic: bool) -> None:
    """The queries are the last positions, also if keys were cached outside of the operator.

    ONNX Runtime hides later keys from all queries but the last one as if they were the first.
    """
    form: dict[str, Any] = {"num_heads": N, "unidirectional": 1, **CLOSE}
    q, k, v = normal(B, S, H), normal(B, N, 7, D, seed=1), normal(B, N, 7, D, seed=2)
    rows = [x.swapaxes(1, 2).reshape(B, 7, H) for x in (k, v)]
    keys = [k, v] if split else rows
    masked = [None, masks(2)["keys"]]
    for more in ([], masked):
        check("MultiHeadAttention", [q[:, -1:], *keys, *more], symbolic=symbolic, **form)
        cached = [
            q,
            *(x[:, 2:] for x in rows),
            *(more or [None, None]),
            None,
            k[:, :, :2],
            v[:, :, :2],
        ]
        want = check("MultiHeadAttention", cached, outputs=[True] * 3, **form)[:1]
        check("MultiHeadAttention", [q, *keys, *more], symbolic=symbolic, expected=want, **form)
    # More queries than keys begin at the first key.
    few = [x[:, :, :3] for x in (k, v)] if split else [x[:, :3] for x in rows]
    check("MultiHeadAttention", [q, *few], symbolic=symbolic, **form)


def test_packed_and_split_operands() -> None:
    form: dict[str, Any] = {"num_heads": N, **CLOSE}
    packed, both = normal(B, S, N, 3, D), normal(B, 7, N, 2, D, seed=1)
    q, split = normal(B, S, H, seed=2), [normal(B, N, 7, D, seed=k) for k in (3, 4)]
    parts = [np.ascontiguousarray(packed[..., k, :]).reshape(B, S, H) for k in range(3)]
    want = check("MultiHeadAttention", parts, **form)
    check("MultiHeadAttention", [packed], expected=want, **form)
    parts = [np.ascontiguousarray(both[..., k, :]).reshape(B, 7, H) for k in range(2)]
    want = check("MultiHeadAttention", [q, *parts], **form)
    check("MultiHeadAttention", [q, both], expected=want, **form)
    check("MultiHeadAttention", [q, *split], **form)
    check("MultiHeadAttention", [q, *split, normal(3 * H, seed=5)], **form)


@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("rows", [False, True])
def test_rotary_embedding(interleaved: int, rows: bool) -> None:
    tables = [normal(20, D // 2, seed=k) for k in (1, 2)]
    positions = np.array([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]]) if rows else np.array([6])
    form: dict[str, Any] = {"interleaved": interleaved, "constants": [2, 3]}
    check("RotaryEmbedding", [normal(B, S, H), positions, *tables], **form)
    check("RotaryEmbedding", [normal(B, N, S, D), positions, *tables], **form)
    half = [table[:, : D // 4] for table in tables]
    form |= {"num_heads": N, "rotary_embedding_dim": D // 2}
    check("RotaryEmbedding", [normal(B, S, H), positions, *half], **form)


D2 = 16  # the smallest head that ONNX Runtime rotates
KV = 2  # heads of keys
G = 2 * KV  # of queries


def group(past: int, total: list[int], new: int, *, rotary: bool, packed: bool) -> list[Any]:
    """Return the inputs of GroupQueryAttention, with a cache of ``past`` positions."""
    batch = len(total)
    q = normal(batch, new, G * D2)
    k, v = normal(batch, new, KV * D2, seed=1), normal(batch, new, KV * D2, seed=2)
    operands = [np.concatenate([q, k, v], -1), None, None] if packed else [q, k, v]
    cache = [normal(batch, KV, past, D2, seed=seed) if past else None for seed in (3, 4)]
    ends = [np.array([n - 1 for n in total], np.int32), np.array(max(total), np.int32)]
    return [*operands, *cache, *ends, *(normal(32, D2 // 2, seed=5 + r) for r in range(2 * rotary))]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize(
    ("past", "total", "new"),
    [(0, [5, 5], 5), (6, [7, 7], 1), (6, [9], 3), (8, [8, 4], 1), (8, [5], 1)],
)
def test_group_query_attention(
    past: int, total: list[int], new: int, rotary: bool, packed: bool
) -> None:
    inputs = group(past, total, new, rotary=rotary, packed=packed)
    form: dict[str, Any] = {"num_heads": G, "kv_num_heads": KV, "do_rotary": int(rotary)}
    form["outputs"] = [True] * 3
    if not past <= max(total) == min(total):  # entries after the end of a cache are undefined
        form["compared"] = 1
    check("GroupQueryAttention", inputs, constants=[6, 7, 8], **form, **CLOSE)
    for option in (
        {"softcap": 3.0},
        {"local_window_size": 3},
        {"scale": 0.2},
        {"smooth_softmax": 1},
        {"smooth_softmax": 1, "local_window_size": 2},
        {"smooth_softmax": 1, "softcap": 3.0},
    ):
        check("GroupQueryAttention", inputs, constants=[6, 7, 8], **form, **option, **CLOSE)
    sinks = [*inputs, *[None] * (11 - len(inputs)), normal(G, seed=9)]
    check("GroupQueryAttention", sinks, constants=[6, 7, 8], **form, **CLOSE)


def test_group_query_attention_with_scores_and_norms() -> None:
    inputs = group(6, [9], 3, rotary=True, packed=False)
    form: dict[str, Any] = {"num_heads": G, "kv_num_heads": KV, "do_rotary": 1, **CLOSE}
    form |= {"outputs": [True] * 3, "constants": [6]}
    scores = normal(1, 1, 3, 9, seed=8)
    check("GroupQueryAttention", [*inputs, None, scores], **form)
    check("GroupQueryAttention", [*inputs, None, scores], **form, softcap=2.0)
    positions = np.array([[6, 7, 8]])
    check("GroupQueryAttention", [*inputs, positions], **form)


def test_what_has_no_body_is_said() -> None:
    inputs = group(0, [5], 5, rotary=False, packed=False)
    form: dict[str, Any] = {"num_heads": G, "kv_num_heads": KV, "qk_output": 1}
    model = node_model("GroupQueryAttention", inputs, **form)
    compiled = sg.compile_model(sg.load(model))
    fed = {i.name: inputs[int(i.name[1:])] for i in model.graph.input}
    with pytest.raises(sg.UnsupportedOpError, match=r"'node'.*GroupQueryAttention with qk_output"):
        compiled(fed)


def test_no_batches() -> None:
    inputs: list[Any] = [normal(0, S, H), *[normal(0, N, S, D)] * 2]
    only: Any = {"devices": ["REFERENCE"]}  # CPU leaves attention over empty tensors to it
    check("MultiHeadAttention", inputs, num_heads=N, **only)


@pytest.mark.parametrize("normalized", [False, True])
def test_no_batches_of_a_decoder(normalized: bool) -> None:
    """ONNX Runtime's CPU provider does not normalize queries and keys."""
    keys = normal(0, S, 2 * D)
    inputs = [normal(0, S, 4 * D), keys, keys, None, None, np.zeros(0, np.int32), np.array(S, "i4")]
    inputs += [None] * 7 + [np.ones(D, np.float32)] * 2 if normalized else []
    cache = normal(0, 2, S, D)
    expected = [normal(0, S, 4 * D), cache, cache]
    form: dict[str, Any] = {"num_heads": 4, "kv_num_heads": 2, "outputs": [True] * 3}
    check("GroupQueryAttention", inputs, expected=expected, devices=["REFERENCE"], **form)


@pytest.mark.parametrize("layout", [0, 1])
@pytest.mark.parametrize("sections", [[2, 1, 1], [0, 0, 4], [1, 3, 0]])
@pytest.mark.parametrize("form", ["rows", "heads", "part"])
@pytest.mark.parametrize("interleaved", [0, 1])
def test_multimodal_rotary(form: str, sections: list[int], layout: int, interleaved: int) -> None:
    rng = np.random.default_rng(0)
    shape = {"rows": (2, 5, 24), "heads": (2, 3, 5, 8), "part": (2, 5, 36)}[form]
    angles = rng.random((9, 4))
    tables = [f(angles).astype(np.float32) for f in (np.cos, np.sin)]
    positions = rng.integers(0, 9, (3, 2, 5))
    more: dict[str, Any] = {"num_heads": 3} if form == "rows" else {}
    if form == "part":
        more = {"num_heads": 3, "rotary_embedding_dim": 8}
    check(
        "MRotaryEmbedding", [rng.standard_normal(shape).astype(np.float32), positions, *tables],
        mrope_section=sections, mrope_layout=layout, interleaved=interleaved, **more,
    )  # fmt: skip


@pytest.mark.parametrize("device", ["CPU", "REFERENCE"])
@pytest.mark.parametrize("wrong", [-1, 9])
def test_multimodal_positions_outside_of_the_table(wrong: int, device: str) -> None:
    x, angles = np.ones((2, 5, 24), np.float32), np.ones((9, 4), np.float32)
    positions = np.zeros((3, 2, 5), np.int64)
    inputs = [x, positions, angles, angles]
    graph = sg.load(
        node_model("MRotaryEmbedding", inputs, mrope_section=[2, 1, 1], num_heads=3, symbolic=True)
    )
    compiled = sg.compile_model(graph, device)
    compiled(inputs)
    positions[2, 1, 4] = wrong
    with pytest.raises(sg.ShapeError, match="outside"):
        compiled(inputs)
