"""Positions in sequences, and the axes along which their tensors are joined."""

from __future__ import annotations

import numpy as np
import pytest

import subgraph as sg
from subgraph import ops
from tests.support.peer import session_of
from tests.support.requirements import DEVICES, floats


@pytest.mark.parametrize("device", DEVICES)
def test_positions_in_a_sequence(device: str) -> None:
    x, position = sg.input("x", ("A",), "float32"), sg.input("position", (), "int64")
    y = ops.SequenceAt(ops.SequenceConstruct(x, x), position, name="culprit")
    model = sg.compile_model(sg.Graph(inputs=[x, position], outputs=[y]), device)
    assert model([floats(3), np.array(1)])[0].shape == (3,)
    for wrong in (np.array(2), np.array(-3)):
        with pytest.raises(sg.ShapeError, match="culprit"):
            model([floats(3), wrong])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("position", [-4, 4, (1 << 63) - 1])
def test_a_position_outside_of_a_sequence_is_refused(position: int, device: str) -> None:
    items = [sg.input(f"x{k}", (2,)) for k in range(4)]
    at = sg.input("at", (), "int64")
    longer = ops.SequenceInsert(ops.SequenceConstruct(*items[:3]), items[3], at)
    model = sg.compile_model(sg.Graph([*items, at], [ops.SequenceLength(longer)]), device)
    given = [floats(2)] * 4
    assert model([*given, np.array(-3)])[0] == 4
    with pytest.raises(sg.ShapeError, match="outside"):
        model([*given, np.array(position)])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("position", [-3, -1, 0, 2, 3])
def test_a_position_counts_from_both_ends_of_a_sequence(position: int, device: str) -> None:
    """ONNX Runtime inserts at position 3 of three tensors at the end, as the standard says."""
    items = [sg.input(f"x{k}", (2,)) for k in range(4)]
    at = sg.input("at", (), "int64")
    longer = ops.SequenceInsert(ops.SequenceConstruct(*items[:3]), items[3], at)
    graph = sg.Graph([*items, at], [ops.ConcatFromSequence(longer, axis=0)])
    given = [np.full(2, k, np.float32) for k in range(4)]
    found = sg.compile_model(graph, device)([*given, np.array(position)])[0]
    session = session_of(graph)
    inputs = {f"x{k}": array for k, array in enumerate(given)} | {"at": np.array(position)}
    np.testing.assert_array_equal(found, session.run(None, inputs)[0])


@pytest.mark.parametrize("device", DEVICES)
def test_tensors_of_a_sequence_are_not_joined_along_an_axis_that_is_none(device: str) -> None:
    """NumPy's concatenate takes -2**31 for all elements of all arrays in a row."""
    items = [sg.input(f"x{k}", (2, 3)) for k in range(2)]
    joined = sg.Node(
        "ConcatFromSequence", [ops.SequenceConstruct(*items)], attrs={"axis": -(2**31)}
    )
    with pytest.raises(sg.ShapeError, match="axis is -2147483648"):
        sg.compile_model(sg.Graph(items, [joined.outputs[0]]), device)([floats(2, 3)] * 2)
