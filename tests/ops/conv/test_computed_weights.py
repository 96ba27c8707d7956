"""Convolutions whose weights are computed in the run, on kernels of CPU and OPENCL."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from subgraph import ops
from tests.support.agreement import assert_kernels_agree

pytestmark = pytest.mark.usefixtures("no_fallback")


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("image", "window", "group", "options"),
    [
        ((5,), (3,), 1, {}),
        ((4, 5), (3, 2), 2, {"strides": [2, 1], "pads": [1, 0, 0, 1]}),
        ((3, 4), (2, 3), 1, {"strides": [3, 2], "dilations": [2, 1], "output_padding": [1, 0]}),
        ((2, 3), (3, 3), 4, {"strides": [2, 2], "auto_pad": "SAME_UPPER"}),
        ((2, 3, 2), (2, 2, 3), 2, {"strides": [1, 2, 1], "output_shape": [3, 5, 4]}),
        ((1, 1), (1, 1), 1, {}),
    ],
)
def test_transposed_convolutions_with_computed_weights(
    dtype: str,
    bias: bool,
    image: tuple[int, ...],
    window: tuple[int, ...],
    group: int,
    options: dict[str, Any],
) -> None:
    rng = np.random.default_rng([len(image), group, int(bias)])
    x = rng.standard_normal((2, 4, *image)).astype(dtype)
    w = rng.standard_normal((4, 3, *window)).astype(dtype)
    b = rng.standard_normal(3 * group).astype(dtype)

    def build(x: Any, w: Any, *b: Any) -> Any:
        return ops.ConvTranspose(x, ops.Neg(w), *b, group=group, **options)

    assert_kernels_agree(build, x, w, *[b] * bias)


@pytest.mark.parametrize("channels", [1, 4, 16])
@pytest.mark.parametrize("image", [(7,), (6, 7), (3, 4, 5)])
def test_convolutions_with_computed_weights(channels: int, image: tuple[int, ...]) -> None:
    """Found by test_operator_versions.py: their weights were read as if in blocks of channels."""
    rng = np.random.default_rng([channels, len(image)])
    x = rng.standard_normal((2, channels, *image)).astype(np.float32)
    w = rng.standard_normal((6, channels, *[2] * len(image))).astype(np.float32)

    def build(x: Any, w: Any) -> Any:
        twice = ops.Conv(ops.Relu(ops.Conv(x, w)), np.ones((2, 6, *[1] * len(image)), np.float32))
        return twice, ops.Conv(x, ops.Neg(w), strides=[2] * len(image))

    assert_kernels_agree(build, x, w)
