"""Comparison of devices with each other and with ONNX Runtime, and what is wrong."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import attrs

from wrong_sizes.damage import Case, Damaged
from wrong_sizes.reasons import reason
from wrong_sizes.runs import Answer, differs, in_onnxruntime, ours, told
from wrong_sizes.samples import RANDOM, Operand


@attrs.frozen
class Finding:
    """Something wrong, or a difference.

    Attributes:
        kind: See above.
        case: The case, in a line.
        said: What was found.
    """

    kind: str
    case: str
    said: str


def check(case: Case, devices: Sequence[str], phase: Callable[[str, int], None]) -> list[Finding]:
    """Run a case everywhere; return what is wrong.

    Args:
        case: The case.
        devices: Devices of ours; each is compared with the first.
        phase: Is told of each step before it begins, with the set of operands that it runs.
    """
    given = [_fed(case, chosen) for chosen in case.sets]
    warm = case.form in ("symbolic", "unknown")
    declared = case.honest.values if warm else case.sets[0].values
    honest = [_fed(case, Damaged(case.honest.values, ""))] if warm else []
    model = case.model(declared)
    findings: list[Finding] = []

    def found(position: int, kind: str, said: str) -> None:
        kind = "excused" if reason(kind, case, position, said) else kind
        findings.append(Finding(kind, case.text(position), said))

    answers: list[list[Answer]] = []
    for device in devices:
        phase(device, 0)
        before = len(_oclgrind())
        answers.append(ours(device, model, [*honest, *given], warm=warm))
        said = _oclgrind()[before:].strip()
        if said:
            found(0, "outside", f"{device}: {said[:1000]}")
    for position in range(len(given)):
        _compare_devices(case, devices, [of[position] for of in answers], partial(found, position))
    if is_judge(case, devices[0]):
        theirs = in_onnxruntime(model, given, partial(phase, "ONNX Runtime"))
        for position, (mine, other) in enumerate(zip(answers[0], theirs, strict=True)):
            _compare_judge(mine, other, partial(found, position))
    return findings


def _fed(case: Case, chosen: Damaged) -> dict[str, Operand]:
    return {name: v for name, v in chosen.values.items() if name not in case.constant}


def _compare_devices(
    case: Case, devices: Sequence[str], answers: Sequence[Answer], found: Callable[[str, str], None]
) -> None:
    first = answers[0]
    for device, answer in zip(devices, answers, strict=True):
        if answer.raw:
            found("raw", f"{device}: {answer.error}")
        elif (first.results is None) != (answer.results is None):
            found("verdict", f"{devices[0]}: {told(first)}; {device}: {told(answer)}")
        elif first.results and answer.results and case.node.op_type not in RANDOM:
            said = differs(first.results, answer.results) if answer is not first else ""
            if said:
                found("values", f"{devices[0]} and {device}: {said}")


def _compare_judge(mine: Answer, theirs: Answer, found: Callable[[str, str], None]) -> None:
    if mine.results is None and theirs.results is not None:
        # ONNX Runtime takes inputs of any rank for one that is declared as a scalar.
        if "give an array of" not in mine.error:
            found("strict", f"{mine.error}; ONNX Runtime: {told(theirs)}")
    elif mine.results is not None and theirs.results is None:
        found("lax", f"{told(mine)}; ONNX Runtime: {theirs.error}")
    elif mine.results and theirs.results:
        said = differs(mine.results, theirs.results)
        if said:
            found("other", said)


def _oclgrind() -> str:
    """Return what Oclgrind has found so far."""
    log = os.environ.get("OCLGRIND_LOG", "")
    return Path(log).read_text(errors="replace") if log and Path(log).exists() else ""


_judges: dict[int, bool] = {}


def is_judge(case: Case, device: str) -> bool:
    """Return whether ONNX Runtime gives for the honest sample what we do; it judges no graphs."""
    if case.honest.before:
        return False
    key = id(case.honest)
    if key not in _judges:
        values = case.honest.values
        node = case.honest.node
        model = attrs.evolve(case, node=node, form="sizes", constant=frozenset()).model(values)
        [theirs] = in_onnxruntime(model, [values], lambda _: None)
        mine = Answer(None)
        if theirs.results is not None and case.node.op_type not in RANDOM:
            [mine] = ours(device, model, [values])
        same = mine.results is not None and theirs.results is not None
        _judges[key] = same and not differs(mine.results or [], theirs.results or [])
    return _judges[key]
