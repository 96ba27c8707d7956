"""What a precision costs: the figures, and the command that prints them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest

import subgraph as sg
from subgraph.tools.accuracy import compare
from subgraph.tools.cli import main
from tests.passes.test_fuse_quantized import residual_model


def test_figures() -> None:
    truth = np.array([[1.0, 2.0, 4.0], [3.0, -5.0, 0.0]], np.float32)
    found = np.array([[1.0, 2.5, 4.0], [3.0, -5.0, 3.5]], np.float32)
    one = compare([[found]], [[truth]])
    assert one.largest == 3.5
    assert one.mean == pytest.approx(4.0 / 6)
    assert one.relative == pytest.approx(0.7)
    assert one.top1 == 0.5
    assert one.cosine == pytest.approx(
        float((found * truth).sum() / np.linalg.norm(found) / np.linalg.norm(truth))
    )
    assert "50.0%" in one.row("int8").values()


def test_equal_and_zero_results() -> None:
    zeros = [np.zeros(3, np.float32)]
    same = compare([zeros], [zeros])
    assert (same.largest, same.cosine, same.top1) == (0.0, 1.0, 1.0)


@pytest.mark.parametrize("shape", [(2,), (3, 1)])
def test_other_shapes_are_an_error(shape: tuple[int, ...]) -> None:
    with pytest.raises(sg.ConfigError, match="outputs differ"):
        compare([[np.zeros(shape)]], [[np.zeros(3)]])


def test_nothing_to_compare_is_an_error() -> None:
    with pytest.raises(sg.ConfigError, match="no output"):
        compare([[np.array(["a"])]], [[np.array(["a"])]])


def test_the_command_compares_precisions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, _ = residual_model(0)
    path = tmp_path / "qdq.onnx"
    onnx.save(model, path)
    main(["accuracy", str(path), "--samples", "2", "--quantized", str(path), "--json"])
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["precision"] for row in rows] == ["int8, integer kernels", "int8, qdq.onnx"]
    assert all(row["largest difference"] <= 1 and row["cosine"] > 0.9999 for row in rows)
