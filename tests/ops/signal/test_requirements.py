"""DFT, STFT and windows refuse what does not fit, also sizes that are computed in the run."""

from __future__ import annotations

import numpy as np
import pytest

import subgraph as sg
from subgraph import ops
from tests.support.requirements import DEVICES, Use, assert_agree, floats, ints, refused, run

WRONG: list[tuple[Use, str]] = [
    (Use("DFT", (floats(2, 8, 3),)), "3 elements"),
    (Use("DFT", (floats(2, 8, 1), np.array(0))), "dft_length is 0"),
    (Use("DFT", (floats(2, 8, 1), np.array(8), np.array(2))), "the numbers' parts"),
    (Use("DFT", (floats(2, 8, 1), np.array(8), np.array(5))), "axes are"),
    (Use("STFT", (floats(1, 16, 1), np.array(0), floats(4))), "frame_step is"),
    (Use("STFT", (floats(1, 16, 1), np.array(2), floats(20))), "frames of 20"),
    (Use("STFT", (floats(1, 16, 1), np.array(2), floats(4), np.array(5))), "window has shape"),
    (Use("STFT", (floats(1, 16, 3), np.array(2), floats(4))), "neither real nor complex"),
    (Use("HannWindow", (ints(1, 2),)), "has shape"),
]

test_wrong_operands_are_refused = refused(WRONG)


@pytest.mark.parametrize("device", ["CPU", "OPENCL"])
def test_a_signal_without_its_last_axis_is_real(device: str) -> None:
    assert_agree(Use("STFT", (floats(2, 16), np.array(2), floats(4))), device)


@pytest.mark.parametrize("device", DEVICES)
def test_step_and_length_are_scalars_or_lists_of_one(device: str) -> None:
    signal = floats(1, 16, 1)
    for number in (np.array(2), ints(2)):
        frames = run(Use("STFT", [signal, number, None, number + 2]), device)[0]
        wanted = np.fft.rfft(signal[0, 2:6, 0])
        np.testing.assert_allclose(frames[0, 1, :, 0], wanted.real, rtol=1e-5, atol=1e-5)


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
