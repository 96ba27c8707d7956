"""The command: damaged models in processes that may die, counted by what is wrong."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from worker_pool import processor_seconds

import subgraph as sg
import wrong_sizes
from wrong_sizes.comparison import Finding, check
from wrong_sizes.damage import make_case
from wrong_sizes.runs import said_by
from wrong_sizes.samples import samples

_FAILURES = ("crash", "hang", "outside", "raw", "verdict", "values", "slow")
_PATIENCE = 20  # times the seconds that a model may use, as long as it may take in all
_SHOWN = 3  # differences with ONNX Runtime that are printed for each operator and version


@attrs.frozen
class Report:
    """What a process tells of its work.

    Attributes:
        number: Number of the model; negative at the end.
        phase: What begins now; "" if the model is done.
        position: The set of operands of that step.
        cases: Cases of a model that is done.
        findings: What was found in them.
    """

    number: int
    phase: str = ""
    position: int = 0
    cases: int = 0
    findings: Sequence[Finding] = ()


def _devices(number: int, options: argparse.Namespace) -> list[str]:
    """Return the devices that a model runs on."""
    devices: list[str] = options.devices.split(",")
    shared = options.opencl_every and number % options.opencl_every == 0
    return [*devices, "OPENCL"] if shared and "OPENCL" not in devices else devices


def _work(channel: Any, numbers: Sequence[int], options: argparse.Namespace, log: str) -> None:
    """Check models and tell of each."""
    import resource
    import warnings

    warnings.simplefilter("ignore")
    np.seterr(all="ignore")
    os.environ["ALLOW_RELEASED_ONNX_OPSET_ONLY"] = "0"
    os.environ.setdefault("SUBGRAPH_MEMORY_LIMIT", "1G")  # otherwise a huge result takes a while
    os.environ.setdefault("PYOPENCL_BUILD_OPTIONS", "-cl-opt-disable")
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (options.memory << 30, options.memory << 30))
    for number in numbers:
        case = make_case(options.seed, number, options.only, options.nodes)
        marks = [time.process_time()]
        try:
            told = partial(_tell, channel, number, marks)
            findings = check(case, _devices(number, options), told)
        except Exception as error:  # a model that onnx does not write
            findings = [Finding("no model", case.text(), said_by(error))]
        taken = [*marks, time.process_time()][1] - marks[0]  # without ONNX Runtime
        if taken > options.slow:
            findings.append(Finding("slow", case.text(), f"{taken:.0f} s"))
        channel.send(Report(number, "", 0, len(case.sets), findings))
    channel.send(Report(-1))


def _tell(channel: Any, number: int, marks: list[float], phase: str, position: int) -> None:
    if phase == "ONNX Runtime":
        marks.append(time.process_time())
    channel.send(Report(number, phase, position))


def _part(numbers: list[int], options: argparse.Namespace) -> Iterator[Report]:
    """Check models in processes that may die; yield what is wrong with each."""
    context = get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        log = os.path.join(folder, "log")
        while numbers:
            channel, other = context.Pipe(duplex=False)
            process = context.Process(target=_work, args=(other, numbers, options, log))
            process.start()
            other.close()
            last, kind = Report(numbers[0], "the beginning"), "crash"
            try:
                while True:
                    if not _answers(channel, process, options.timeout):
                        kind = "hang"
                        process.kill()
                        raise EOFError
                    report: Report = channel.recv()
                    if report.number < 0:
                        numbers = []
                        break
                    last = report
                    if not report.phase:
                        yield report
                        numbers = numbers[numbers.index(report.number) + 1 :]
                        last = Report(numbers[0] if numbers else -1, "the beginning")
            except EOFError:
                process.join()
                said = Path(log).read_text(errors="replace")[-1500:]
                yield _ended(kind, last, f"({process.exitcode}): {said}", options)
                numbers = numbers[numbers.index(last.number) + 1 :]
            process.join()


def _answers(channel: Any, process: Any, seconds: float) -> bool:
    """Return whether a process tells something before it has used so much processor time.

    One that waits without using any hangs, too; on a busy machine it may wait long for its turn.
    """
    begin, waited = time.monotonic(), processor_seconds(process.pid)
    while time.monotonic() - begin < _PATIENCE * seconds:
        if channel.poll(min(seconds, 5)):
            return True
        if processor_seconds(process.pid) - waited > seconds:
            return False
    return False


def _ended(kind: str, last: Report, said: str, options: argparse.Namespace) -> Report:
    """Return the report of a process that died or hung at ``last``."""
    case = make_case(options.seed, last.number, options.only, options.nodes)
    if last.phase == "ONNX Runtime":
        kind = f"ONNX Runtime {'hangs' if kind == 'hang' else 'died'}"
    finding = Finding(kind, case.text(last.position), f"in {last.phase} {said}")
    return Report(last.number, cases=len(case.sets), findings=[finding])


def _options(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(wrong_sizes.__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, default=0, help="number of the first model")
    parser.add_argument("--count", type=int, default=1000, help="number of models")
    parser.add_argument("--devices", default="CPU,REFERENCE")
    parser.add_argument("--opencl-every", type=int, default=0, help="models of which one on OPENCL")
    parser.add_argument("--only", default="", help="operators, separated by commas")
    parser.add_argument("--nodes", type=int, default=1, help="operators that a model joins")
    parser.add_argument("--slow", type=float, default=20, help="seconds of CPU that are too many")
    parser.add_argument("--timeout", type=float, default=60, help="seconds of CPU of a hang")
    parser.add_argument("--memory", type=int, default=12, help="GiB of address space")
    parser.add_argument("--out", default="", help="file to append findings to, a JSON line each")
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> int:
    """Fuzz; return 1 if something is wrong that is not a difference to ONNX Runtime."""
    options = _options(given)
    # Before processes begin: each would load and compile it all again.
    samples(options.only)
    if "OPENCL" not in options.devices:  # a driver's threads are not there after a fork
        x = sg.input("x", (3,))
        for device in options.devices.split(","):
            sg.compile_model(sg.Graph([x], [sg.ops.Relu(x)]), device)([np.ones(3, np.float32)])
    counts: Counter[str] = Counter()
    where: dict[str, Counter[str]] = {}
    last = options.start + options.count
    for report in _part(list(range(options.start, last)), options):
        before = counts["cases"]
        counts["cases"] += report.cases
        if "OPENCL" in _devices(report.number, options):
            counts["on OPENCL"] += report.cases
        for finding in report.findings:
            counts[finding.kind] += 1
            title = finding.case.partition("(")[0]
            named = where.setdefault(finding.kind, Counter())
            named[title] += 1
            _show(report.number, finding, named[title], options.out)
        if counts["cases"] // 1000 > before // 1000:
            print(f"-- {dict(counts)}", flush=True)
    for kind, titles in where.items():
        print(f"{kind}: " + ", ".join(f"{t} {n}" for t, n in titles.most_common()))
    print(f"seed {options.seed}, {options.start} to {last - 1}: {dict(counts)}")
    return int(any(counts[kind] for kind in _FAILURES))


def _show(number: int, finding: Finding, nth: int, out: str) -> None:
    """Print a finding, and append it to a file.

    Args:
        number: Number of the model.
        finding: What was found.
        nth: How many of its kind this operator has.
        out: The file; "" for none.
    """
    if finding.kind in _FAILURES or (finding.kind != "excused" and nth <= _SHOWN):
        print(f"{number} {finding.kind}: {finding.case}\n    {finding.said}", flush=True)
    if out:
        with open(out, "a") as file:
            print(json.dumps({"number": number, **attrs.asdict(finding)}), file=file)


if __name__ == "__main__":
    sys.exit(main())
