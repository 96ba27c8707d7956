"""LinearAttention on kernels of CPU and OPENCL."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from subgraph import ops
from subgraph.graph.types import Array
from tests.support.agreement import assert_kernels_agree

pytestmark = pytest.mark.usefixtures("no_fallback")


@pytest.mark.parametrize("rule", ["linear", "gated", "delta", "gated_delta"])
@pytest.mark.parametrize(("heads", "own", "per_key"), [(2, 2, True), (4, 2, False), (3, 1, True)])
@pytest.mark.parametrize("past", [True, False])
@pytest.mark.parametrize("sizes", [(5, 4, 6), (3, 7, 70), (1, 5, 64)])
def test_linear_attention(
    rule: str, heads: int, own: int, per_key: bool, past: bool, sizes: tuple[int, int, int]
) -> None:
    dtype = "float32" if past or per_key else "float16"
    rng = np.random.default_rng(heads)
    batch, (tokens, keys, values) = 2, sizes
    arrays: list[Array | None] = [
        rng.standard_normal((batch, tokens, heads * keys)),
        rng.standard_normal((batch, tokens, own * keys)) / 2,
        rng.standard_normal((batch, tokens, own * values)),
        rng.standard_normal((batch, own, keys, values)) if past else None,
        -rng.random((batch, tokens, own * (keys if per_key else 1))) if "gated" in rule else None,
        rng.random((batch, tokens, own if per_key else 1)) if "delta" in rule else None,
    ]
    given = [array.astype(dtype) for array in arrays if array is not None]

    def build(*inputs: Any) -> Any:
        left = iter(inputs)
        slots = [None if array is None else next(left) for array in arrays]
        while slots[-1] is None:
            slots.pop()
        attrs: dict[str, Any] = {"q_num_heads": heads, "kv_num_heads": own, "update_rule": rule}
        return ops.LinearAttention(*slots, **attrs)

    assert_kernels_agree(build, *given)
