"""The option --picture of the command line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from subgraph.tools.cli import main

DIGITS = Path(__file__).parents[2] / "examples" / "digits.onnx"


@pytest.mark.parametrize(
    ("argv", "shown"),
    [
        (("partition", "--ops", "Conv,Relu"), "In no region"),
        (("query", "--device", "HETERO:CPU,REFERENCE"), "CPU (28)"),
        (("profile", "--repeat", "2"), "Slowest nodes"),
    ],
)
def test_pictures(
    argv: tuple[str, ...], shown: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    name, *options = argv
    assert main([name, str(DIGITS), *options, "--picture", str(tmp_path / "picture.html")]) == 0
    assert "picture.html: open it in a browser" in capsys.readouterr().out.replace("\n", "")
    assert shown in (tmp_path / "picture.html").read_text()
    with pytest.raises(SystemExit, match="2"):
        main([name, str(DIGITS), *options, "--picture", str(tmp_path / "picture.png")])
    assert "expected a file .html, .svg, .dot, got" in capsys.readouterr().err
    assert main([name, str(DIGITS), *options, "--picture", str(tmp_path / "no" / "a.svg")]) == 1
    assert capsys.readouterr().out == ""


def test_the_picture_of_the_documentation_is_what_its_command_writes(tmp_path: Path) -> None:
    # Its reasons name the selector's file as the command does, relative to this folder.
    root = DIGITS.parents[1]
    command = "partition examples/digits.onnx --selector small_kernels"
    options = "--import examples/custom_selector.py --min-size 2 --picture"
    argv = [sys.executable, "-m", "subgraph", *command.split(), *options.split()]
    made = tmp_path / "partition.svg"
    subprocess.run([*argv, str(made)], cwd=root, check=True, capture_output=True)
    assert made.read_text() == (root / "docs" / "partition.svg").read_text()
