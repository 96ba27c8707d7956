"""The code in README and docs runs: the Python blocks of a page, in order, in one namespace."""

from __future__ import annotations

import re
import runpy
import shutil
import sys
from pathlib import Path

import pytest

import subgraph as sg

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
EXAMPLES = sorted(p for p in (ROOT / "examples").glob("*.py") if not p.name.startswith("train_"))
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def python_blocks(page: Path) -> list[tuple[int, str]]:
    text = page.read_text()
    return [(text[: found.start(1)].count("\n"), found.group(1)) for found in BLOCK.finditer(text)]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_code_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "import torch\n" in page.read_text():
        pytest.importorskip("torch", reason="PyTorch is not installed")
        pytest.importorskip("onnxscript", reason="the exporter of PyTorch is not installed")
    shutil.copy(ROOT / "examples" / "digits.onnx", tmp_path / "model.onnx")
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": f"page_{page.stem}"}
    for line, code in python_blocks(page):
        exec(compile("\n" * line + code, str(page), "exec"), namespace)


def test_names_that_the_pages_use_are_on_the_api_page() -> None:
    text = "".join(page.read_text() for page in PAGES)
    listed = set(re.findall(r"subgraph\.([\w.]+)", (ROOT / "docs" / "api.md").read_text()))
    used = {name: getattr(sg, name) for name in re.findall(r"\bsg\.([A-Za-z]\w*)", text)}
    documented = {name for name, value in used.items() if callable(value)} - {*vars(sg.errors)}
    assert documented <= listed


def test_the_pages_have_code() -> None:
    assert sum(len(python_blocks(page)) for page in PAGES) >= 10


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda p: p.stem)
def test_example_runs(
    example: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)  # the demo writes a picture
    monkeypatch.setattr(sys, "argv", [str(example)])
    monkeypatch.syspath_prepend(str(example.parent))
    runpy.run_path(str(example), run_name="__main__")
    assert capsys.readouterr().out
