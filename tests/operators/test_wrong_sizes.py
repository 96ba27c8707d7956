"""The fuzzer of operands that do not fit: its samples hold, and it tells what is wrong.

The whole is ``python -m wrong_sizes`` in ``benchmarks`` (``make fuzz-shapes``).
"""

from __future__ import annotations

import argparse
import os
import signal
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from wrong_sizes import __main__ as tool
from wrong_sizes import comparison, damage, reasons, runs
from wrong_sizes.samples import operator_versions, samples

pytestmark = pytest.mark.filterwarnings("ignore")
Phase = Callable[[str, int], None]


def options(**changed: object) -> argparse.Namespace:
    known: dict[str, object] = {
        "seed": 0,
        "only": "Relu,Gather",
        "devices": "CPU,REFERENCE",
        "opencl_every": 0,
        "nodes": 1,
        "slow": 60.0,
        "timeout": 60.0,
        "memory": 32,
    }
    return argparse.Namespace(**known | changed)


@pytest.mark.timeout(900)
def test_every_operator_and_version_has_a_sample_that_runs() -> None:
    groups = samples()
    have = {(s.node.domain, s.node.op_type, s.version) for group in groups for s in group}
    assert [key for key in operator_versions() if key not in have] == []
    never: list[str] = []
    for group in groups:
        errors: list[str] = []
        for sample in group:
            case = damage.Case(0, sample, sample.node, "sizes", frozenset(), [])
            model = case.model(sample.values)
            [answer] = runs.ours("REFERENCE", model, [sample.values])
            if answer.results is not None:
                break
            errors.append(answer.error)
        else:
            never.append(f"{group[0].title}: {errors}")
    assert never == []


def test_a_case_follows_from_its_number() -> None:
    cases = [damage.make_case(0, number, "Relu,Gather") for number in range(50)]
    again = [damage.make_case(0, number, "Relu,Gather") for number in range(50)]
    assert [case.text() for case in cases] == [case.text() for case in again]
    assert {case.form for case in cases} == set(damage.FORMS)
    counts = Counter(len(case.sets) for case in cases)
    assert set(counts) == {1, damage.OPERAND_SETS}


def test_nodes_of_a_joined_model_take_results_of_others() -> None:
    cases = [damage.make_case(0, number, nodes=4) for number in range(10)]
    again = [damage.make_case(0, number, nodes=4) for number in range(10)]
    assert [case.text() for case in cases] == [case.text() for case in again]
    connected = 0
    for case in cases:
        made = {name for node in case.honest.before for name in node.output}
        connected += len(made.intersection(case.node.input))
        fed = {k: v for k, v in case.honest.values.items() if k not in case.constant}
        for device in ("REFERENCE", "CPU"):
            [answer] = runs.ours(device, case.model(case.honest.values), [fed])
            assert answer.results is not None or case.node != case.honest.node, answer.error
    assert connected


def test_damage_of_every_kind_is_done() -> None:
    cases = [damage.make_case(1, number) for number in range(1500)]
    done = " and ".join(chosen.what for case in cases for chosen in case.sets)
    wanted = ("one longer", "one shorter", "empty", "one along", "much longer", "scalar", "flat")
    wanted += ("with a dimension of 1 more", "without dimension", "transposed", "] = nan")
    wanted += ("] = 9223372036854775807", "= 0 for", "= -1 for", "= nan for", "= inf for")
    wanted += ("= none for", "= 9223372036854775807 for", "one item shorter", "without ")
    assert [text for text in wanted if text not in done] == []


def test_a_number_that_was_made_huge_is_damaged_again() -> None:
    rng = np.random.default_rng(0)
    for value in (-(1 << 63), (1 << 63) - 1):
        found = [damage._other_int(value, rng) for _ in range(200)]
        assert all(-(1 << 63) <= number < 1 << 63 for number in found)


def test_a_process_that_dies_is_one_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(case: damage.Case, devices: Sequence[str], phase: Phase) -> list[tool.Finding]:
        phase(devices[0], 0)
        if case.number == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return [tool.Finding("raw", case.text(), "no SubgraphError")] if case.number == 4 else []

    monkeypatch.setattr(tool, "check", check)
    found = {
        r.number: [(f.kind, f.said) for f in r.findings] for r in tool._part([*range(6)], options())
    }
    assert sorted(found) == list(range(6))
    [(kind, said)] = found.pop(3)
    assert kind == "crash"
    assert "in CPU (-9)" in said
    assert found == {0: [], 1: [], 2: [], 4: [("raw", "no SubgraphError")], 5: []}


def _found(case: damage.Case, *devices: str) -> list[str]:
    return [finding.kind for finding in comparison.check(case, devices, lambda *_: None)]


def test_a_wrong_result_and_a_lax_device_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"CPU": runs.Answer([np.zeros(3)]), "REFERENCE": runs.Answer(None, "ShapeError: no")}
    monkeypatch.setattr(comparison, "ours", lambda device, *_, **__: [answers[device]])
    monkeypatch.setattr(comparison, "is_judge", lambda *_: False)
    numbers = (n for n in range(100) if len(damage.make_case(0, n, "Relu").sets) == 1)
    case = damage.make_case(0, next(numbers), "Relu")
    both = ("CPU", "REFERENCE")
    assert _found(case, *both) == ["verdict"]
    answers["REFERENCE"] = runs.Answer([np.ones(3)])
    assert _found(case, *both) == ["values"]
    monkeypatch.setattr(comparison, "is_judge", lambda *_: True)
    refused = runs.Answer(None, "Fail: Integer division by zero")
    monkeypatch.setattr(comparison, "in_onnxruntime", lambda *_: [refused])
    assert _found(case, "CPU") == ["excused"]
    refused = runs.Answer(None, "Fail: rank")
    assert _found(case, "CPU") == ["lax"]
    monkeypatch.setattr(comparison, "is_judge", lambda *_: False)
    answers["CPU"] = runs.Answer(None, "KeyError: 3", raw=True)
    assert _found(case, *both) == ["raw", "verdict"]


def test_a_reason_holds_for_its_operators_and_damage_alone() -> None:
    case = damage.make_case(0, 0, "Relu")
    case.sets[0].what = "i0[3] = nan"
    assert reasons.reason("values", case, 0, "output 0: off by 1")
    assert not reasons.reason("verdict", case, 0, "output 0: off by 1")
    case.sets[0].what = "i0 empty along 0"
    assert not reasons.reason("values", case, 0, "output 0: off by 1")
    only = reasons.Reason("lax", "axis", "", operators="Gather Slice")
    assert not only.holds("lax", case, 0, "an axis")
