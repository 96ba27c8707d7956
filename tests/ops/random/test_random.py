"""Random operators: requirements, and the distribution of what the reference draws."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.requirements import DEVICES, Use, assert_refused, floats, run


@pytest.mark.parametrize("device", DEVICES)
def test_draws_need_classes(device: str) -> None:
    assert_refused(Use("Multinomial", (floats(3, 0),)), device, "no classes")


def test_multinomial_draws_as_often_as_asked() -> None:
    shares = np.array([[0.1, 0.2, 0.7], [0.5, 0.5, 1e-9]], np.float32)
    use = Use("Multinomial", [np.log(shares)], {"sample_size": 20000, "seed": 1.0}, 7)
    drawn = run(use, "REFERENCE")[0]
    assert drawn.dtype == np.int32
    counts = np.stack([np.bincount(row, minlength=3) for row in drawn]) / 20000
    np.testing.assert_allclose(counts, shares, atol=0.02)
