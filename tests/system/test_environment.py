"""Environment variables: blank and invalid texts, and that no run ends by one."""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pytest

import subgraph as sg
from subgraph import ops
from subgraph.system import environment, pruning
from subgraph.system.environment import CACHE_MEGABYTES, PREBUILT, SPIN_MICROSECONDS

ROOT = Path(sg.__file__).parents[1]
INVALID = [
    ("SUBGRAPH_CACHE_MB", ["many", "-1", "nan", "inf"], "a number of megabytes"),
    ("SUBGRAPH_SPIN_US", ["long", "-5", "nan", "inf", "1e30"], "a number of microseconds"),
    ("SUBGRAPH_GUARD", ["middle"], "end .or 1., begin, or 0"),
    ("SUBGRAPH_MEMORY_LIMIT", ["much", "0", "-1"], "a positive number of bytes"),
]


@pytest.mark.parametrize("device", ["CPU", "HETERO:CPU,REFERENCE", "AUTO", "MULTI:CPU,REFERENCE"])
@pytest.mark.parametrize(
    ("name", "text", "takes"),
    [(name, text, takes) for name, texts, takes in INVALID for text in texts],
)
def test_an_invalid_text_is_an_error_of_the_compilation(
    name: str, text: str, takes: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a run it counted as a failure of the device, whose regions another one then ran."""
    x = sg.input("x", ("N", 2))
    graph = sg.Graph([x], [ops.Relu(x)])
    monkeypatch.setenv(name, text)
    with pytest.raises(sg.ConfigError, match=f"variable {name}='{text}' is not valid.*{takes}"):
        sg.compile_model(graph, device)
    with pytest.raises(sg.ConfigError, match=name):
        sg.query_model(graph, device)
    monkeypatch.setenv(name, " ")  # as a script that unsets it may do
    assert sg.compile_model(graph, device)(np.ones((1, 2), np.float32))[0].sum() == 2


def test_valid_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUBGRAPH_CACHE_MB", " 0.5 ")
    monkeypatch.setenv("SUBGRAPH_SPIN_US", "0")
    assert (pruning.limit(), SPIN_MICROSECONDS.value()) == (500_000, 0)
    monkeypatch.delenv("SUBGRAPH_CACHE_MB")
    assert CACHE_MEGABYTES.value() == CACHE_MEGABYTES.default
    monkeypatch.setenv("SUBGRAPH_PREBUILT", "")
    assert PREBUILT.value() is None
    monkeypatch.delenv("SUBGRAPH_PREBUILT")
    assert PREBUILT.value() == environment.PACKAGE_PREBUILT
    monkeypatch.setenv("SUBGRAPH_CACHE_DIR", "~/kernels")
    assert environment.base_folder() == Path.home() / "kernels"


def test_variables_are_read_in_one_place() -> None:
    """Besides the options of devices, and variables of an OpenCL driver."""
    allowed = {"system/environment.py", "runtime/settings.py", "opencl/runtime.py"}
    found = {
        path.relative_to(ROOT / "subgraph").as_posix()
        for path in (ROOT / "subgraph").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")
    }
    assert found == allowed


def test_the_documentation_lists_every_variable() -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("*.md"))
    names = [variable.name for variable in environment._variables]  # pyright: ignore[reportPrivateUsage]
    assert [name for name in names if f"`{name}" not in pages] == []
