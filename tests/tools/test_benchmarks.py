"""The scripts in benchmarks/ find inputs for a model by themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from models import inputs_of

import subgraph as sg

DIGITS = Path(__file__).parents[2] / "examples" / "digits.onnx"


def test_inputs_are_random_without_a_file_of_them() -> None:
    arrays = inputs_of(DIGITS)
    model = sg.compile_model(DIGITS, "CPU")
    assert [port.name for port in model.inputs] == list(arrays)
    assert all(np.isfinite(value).all() for value in model(arrays).values())


def test_inputs_of_a_file_beside_the_model_are_taken(tmp_path: Path) -> None:
    model = tmp_path / "digits_op23.onnx"
    model.write_bytes(DIGITS.read_bytes())
    (name,) = inputs_of(model)
    given = np.ones_like(inputs_of(model)[name])
    held: dict[str, Any] = {name: given}
    np.savez(tmp_path / "digits.npz", **held)
    np.testing.assert_array_equal(inputs_of(model)[name], given)
