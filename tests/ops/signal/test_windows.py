"""Windows refuse sizes that do not fit, also if these are computed in the run."""

from __future__ import annotations

import numpy as np
import pytest

import subgraph as sg
from subgraph import ops
from tests.support.requirements import DEVICES, Use, assert_refused, ints


@pytest.mark.parametrize("device", DEVICES)
def test_a_window_has_one_size(device: str) -> None:
    assert_refused(Use("HannWindow", (ints(1, 2),)), device, "has shape")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["HannWindow", "HammingWindow", "BlackmanWindow"])
def test_the_size_of_a_window_is_checked_wherever_it_is_computed(name: str, device: str) -> None:
    """Sizes that follow from inputs make the run go on in parts, of which one knows the number."""
    x, move = (sg.input(name, None, "int32") for name in ("x", "move"))
    first, last, rank = (sg.input(name, None, "int64") for name in ("first", "last", "rank"))
    number = ops.Reshape(ops.Slice(ops.CumProd(x, np.array(0)), first, last), rank)
    y = getattr(ops, name)(ops.Add(number, move))
    model = sg.compile_model(sg.Graph([x, move, first, last, rank], [y]), device)
    rest = [np.array([0]), np.array([1]), np.empty(0, np.int64)]
    x_value = np.array([5, 1], np.int32)
    assert model(x_value, np.array(1, np.int32), *rest)[0].shape == (6,)
    with pytest.raises(sg.ShapeError, match="size is -5"):
        model(x_value, np.array(-10, np.int32), *rest)
