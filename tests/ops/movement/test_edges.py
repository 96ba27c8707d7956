"""Slice, Reshape and Range where they give few elements, one or none."""

from __future__ import annotations

import numpy as np
import pytest

import subgraph as sg
from subgraph import ops


@pytest.mark.parametrize("start", [-4, -3, -2, -1, 0, 1, 2, 5])
@pytest.mark.parametrize("end", [-9, -3, -2, -1, 0, 1, 2, 5])
@pytest.mark.parametrize("step", [-2, -1, 1, 2])
def test_a_slice_that_begins_outside_is_moved_to_the_end_it_begins_at(
    start: int, end: int, step: int
) -> None:
    """Going backwards, a start before the first element means the first; NumPy takes nothing."""
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    low, high = (0, 1) if step < 0 else (0, 2)
    first = min(max(start + 2 * (start < 0), low), high)
    last = min(max(end + 2 * (end < 0), low - (step < 0)), high)
    expected = array[list(range(first, last, step))]
    x = sg.input("x", (2, 3))
    parts = [sg.parameter(f"p{k}", np.array([n])) for k, n in enumerate((start, end, 0, step))]
    graph = sg.Graph([x], [ops.Slice(x, *parts)])
    assert graph.outputs[0].type == sg.TensorType("float32", expected.shape)
    for device in ("CPU", "REFERENCE"):
        np.testing.assert_array_equal(sg.compile_model(graph, device)(x=array)[0], expected)


@pytest.mark.parametrize("device", ["CPU", "REFERENCE"])
@pytest.mark.parametrize("shape", [(0, 2), (2, 3)])
def test_a_scalar_is_made_of_one_element_alone(shape: tuple[int, int], device: str) -> None:
    """Of none, one was read that was not there."""
    x, to = sg.input("x", ("A", "B")), sg.input("to", ("R",), "int64")
    model = sg.compile_model(sg.Graph([x, to], [ops.Reshape(x, to)]), device)
    assert model([np.ones((1, 1), np.float32), np.zeros(0, np.int64)])[0].shape == ()
    with pytest.raises(sg.ShapeError):
        model([np.ones(shape, np.float32), np.zeros(0, np.int64)])


@pytest.mark.parametrize("device", ["REFERENCE", "CPU"])
def test_a_range_away_from_its_limit_is_empty(device: str) -> None:
    """However far the limit is: it counted against the memory budget."""
    x, far = [sg.input(name, (), "int64") for name in "xl"], 1 << 62
    model = sg.compile_model(sg.Graph(x, [ops.Range(*x, np.array(-1))]), device)
    assert model(np.int64(0), np.int64(far))[0].tolist() == []
    assert model(np.int64(3), np.int64(0))[0].tolist() == [3, 2, 1]
    with pytest.raises(sg.LimitError):
        model(np.int64(0), np.int64(-far))


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_padding_of_complex_numbers_runs_on_cpu(dtype: str) -> None:
    """The kernel that fills the border was not compiled for elements of 16 bytes."""
    x = sg.input("x", (2, 3), dtype)
    graph = sg.Graph([x], [ops.Pad(x, np.array([1, 0, 0, 2]), np.array(2 - 3j, dtype))])
    array = np.arange(6).reshape(2, 3).astype(dtype) * (1 + 1j)
    request = sg.compile_model(graph, "CPU").create_infer_request()
    expected = np.pad(array, ((1, 0), (0, 2)), constant_values=2 - 3j)
    np.testing.assert_array_equal(request.infer([array])[0], expected)
    assert {entry.device for entry in request.profile()} == {"CPU"}
