"""The scripts in benchmarks/ find inputs for a model, and survive processes that do not."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models import inputs_of
from worker_pool import Lost, run_tasks

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


def _squares() -> Callable[[int], int]:
    def square(number: int) -> int:
        if number == 1:
            os._exit(3)
        if number == 2:
            time.sleep(60)
        return number**2

    return square


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("jobs", [1, 3])
def test_tasks_that_crash_or_hang_are_lost_alone(jobs: int) -> None:
    answers = dict(run_tasks(_squares, range(6), jobs, seconds=1.0))
    lost = {number: text for number, text in answers.items() if isinstance(text, Lost)}
    assert lost == {1: "the process died (exit code 3)", 2: "no result within 1 s"}
    assert {k: v for k, v in answers.items() if k not in lost} == {k: k**2 for k in (0, 3, 4, 5)}
