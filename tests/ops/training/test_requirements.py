"""Losses and the steps of optimizers refuse what does not fit."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import subgraph as sg
from tests.support.requirements import DEVICES, Use, floats, ints, refused, run

Devices = pytest.mark.parametrize("device", DEVICES)
SCORES = floats(3, 5)
TRAINING = "ai.onnx.preview.training"
MOMENTUM = {"norm_coefficient": 0.1, "alpha": 0.9, "beta": 1.0, "mode": "standard"}
STEP = (np.ones((), np.float32), np.array(0), floats(2), floats(3), floats(2))
WRONG: list[tuple[Use, str]] = [
    (Use("NegativeLogLikelihoodLoss", (SCORES, ints(0, 1))), "labels has shape"),
    (Use("SoftmaxCrossEntropyLoss", (SCORES, ints(0, 1, 4), floats(3))), "weight has shape"),
    (Use("SoftmaxCrossEntropyLoss", (floats(3), ints(0, 1, 4))), "they need classes"),
    (Use("Momentum", STEP, MOMENTUM, domain=TRAINING), "input 3 has shape"),
]

test_wrong_operands_are_refused = refused(WRONG)


@Devices
@pytest.mark.parametrize("weights", [(), (1,)])
def test_labels_are_classes(device: str, weights: tuple[int, ...]) -> None:
    for labels in (ints(0, 1, 5), ints(0, -1, 4)):
        with pytest.raises(sg.ShapeError, match=r"of 5 classes|outside \[0, 4\]"):
            run(Use("NegativeLogLikelihoodLoss", (SCORES, labels)), device, weights)
    ignoring = Use("NegativeLogLikelihoodLoss", (SCORES, ints(0, -1, 4)), {"ignore_index": -1})
    wanted = -(SCORES[0, 0] + SCORES[2, 4]) / 2
    np.testing.assert_allclose(run(ignoring, device, weights)[0], wanted, rtol=1e-6)


@Devices
def test_a_loss_of_bfloat16(device: str) -> None:
    scores = np.eye(3, 5).astype(ml_dtypes.bfloat16)
    labels = ints(0, 1, 4)
    exponentials = np.exp(np.eye(3, 5))
    losses = np.log(exponentials.sum(1)) - np.eye(3, 5)[range(3), labels]
    for reduction, wanted in (("none", losses), ("mean", losses.mean()), ("sum", losses.sum())):
        for version in (13, 22):
            use = Use(
                "SoftmaxCrossEntropyLoss", (scores, labels), {"reduction": reduction}, version
            )
            found = run(use, device, ())[0]
            assert found.dtype == scores.dtype
            np.testing.assert_allclose(found.astype(np.float64), wanted, rtol=0.02)
