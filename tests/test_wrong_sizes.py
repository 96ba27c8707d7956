"""The fuzzer of operands that do not fit: its cases are what they were, and it outlives a crash.

The whole is ``benchmarks/wrong_sizes.py`` (``make fuzz-shapes``).
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

_TOOL = Path(__file__).parents[1] / "benchmarks" / "wrong_sizes.py"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    sys.path.insert(0, str(_TOOL.parent))
    spec = importlib.util.spec_from_file_location("wrong_sizes", _TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["wrong_sizes"] = module
    spec.loader.exec_module(module)
    return module


def options(**changed: object) -> argparse.Namespace:
    known: dict[str, object] = {
        "seed": 0,
        "only": "Relu,Gather",
        "devices": "CPU,REFERENCE",
        "slow": 60.0,
        "timeout": 60.0,
        "memory": 32,
    }
    return argparse.Namespace(**known | changed)


def test_a_case_follows_from_its_number(tool: ModuleType) -> None:
    cases = [tool.make_case(0, number, "Relu,Gather") for number in range(50)]
    again = [tool.make_case(0, number, "Relu,Gather") for number in range(50)]
    assert [case.text for case in cases] == [case.text for case in again]
    assert {case.form for case in cases} == set(tool.FORMS)
    shapes = [
        case.values[name].shape == value.shape
        for case in cases
        for name, value in case.honest.values.items()
    ]
    assert 0.2 < np.mean(shapes) < 0.8


def test_a_number_that_was_made_huge_is_damaged_again(tool: ModuleType) -> None:
    rng = np.random.default_rng(0)
    for value in (-(1 << 63), (1 << 63) - 1):
        found = [tool._other_int(value, rng) for _ in range(200)]
        assert all(-(1 << 63) <= number < 1 << 63 for number in found)


def test_a_process_that_dies_is_one_finding(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(case: object, devices: Sequence[str], phase: Callable[[str], None]) -> dict[str, str]:
        phase(devices[0])
        if case.number == 3:  # type: ignore[attr-defined]
            os.kill(os.getpid(), signal.SIGKILL)
        return {"raw": "no SubgraphError"} if case.number == 4 else {}  # type: ignore[attr-defined]

    monkeypatch.setattr(tool, "check", check)
    found = {n: what for n, what, _ in tool._part(list(range(6)), options())}
    assert sorted(found) == list(range(6))
    assert list(found[3]) == ["crash"]
    assert "in CPU (-9)" in found[3]["crash"]
    assert [found[n] for n in (0, 1, 2, 4, 5)] == [{}, {}, {}, {"raw": "no SubgraphError"}, {}]


def test_a_wrong_result_and_a_lax_device_are_found(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = {"CPU": tool.Answer([np.zeros(3)]), "REFERENCE": tool.Answer(None, "ShapeError: no")}
    monkeypatch.setattr(tool, "ours", lambda device, *_: answers[device])
    monkeypatch.setattr(tool, "_is_judge", lambda *_: False)
    case = tool.make_case(0, 1, "Relu")
    found = tool.check(case, ["CPU", "REFERENCE"], lambda _: None)
    assert found == {"verdict": "CPU: gives float64[3]; REFERENCE: ShapeError: no"}
    answers["REFERENCE"] = tool.Answer([np.ones(3)])
    assert list(tool.check(case, ["CPU", "REFERENCE"], lambda _: None)) == ["values"]
    monkeypatch.setattr(tool, "_is_judge", lambda *_: True)
    refused = tool.Answer(None, "Fail: Integer division by zero")
    monkeypatch.setattr(tool, "in_onnxruntime", lambda *_: refused)
    assert list(tool.check(case, ["CPU"], lambda _: None)) == ["excused"]
    refused = tool.Answer(None, "Fail: rank")
    assert list(tool.check(case, ["CPU"], lambda _: None)) == ["lax"]
    monkeypatch.setattr(tool, "_is_judge", lambda *_: False)
    answers["CPU"] = tool.Answer(None, "KeyError: 3", raw=True)
    assert list(tool.check(case, ["CPU", "REFERENCE"], lambda _: None)) == ["raw", "verdict"]
