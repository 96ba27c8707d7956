"""Fuzz each target for some time, restart workers that die, and print the findings."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs

from .worker import TARGETS

_ROUND_SECONDS = 900  # after which a worker is replaced, so that its caches stay small (estimate)


@attrs.define
class Total:
    """Totals of the workers of one target.

    Attributes:
        target: Name of the target.
        runs: Number of inputs that ran.
        cpu_seconds: CPU time of the workers.
        deaths: Number of workers that ended with an error.
        findings: Number of inputs by kind of finding.
    """

    target: str
    runs: int = 0
    cpu_seconds: float = 0.0
    deaths: int = 0
    findings: dict[str, int] = attrs.field(factory=dict)

    def __str__(self) -> str:
        found = "".join(f"\n    {count:6}  {kind}" for kind, count in sorted(self.findings.items()))
        return (
            f"{self.target}: {self.runs} runs, {self.cpu_seconds / 3600:.2f} CPU-hours, "
            f"{self.deaths} workers died, {len(self.findings)} kinds of findings{found}"
        )


def fuzz(target: str, folder: Path, seconds: float, seed: int) -> Total:
    """Fuzz one target; every worker has another seed.

    Args:
        target: Name of the target.
        folder: Folder of the corpus, the findings and the logs.
        seconds: Time to fuzz.
        seed: Seed of the first worker.
    """
    total = Total(target)
    end = time.monotonic() + seconds
    folder.mkdir(parents=True, exist_ok=True)
    while (left := end - time.monotonic()) > 1:
        options = f"--folder {folder} --seconds {int(min(left, _ROUND_SECONDS)) + 1} --seed {seed}"
        command = [sys.executable, "-m", "fuzz_native.worker", target, *options.split()]
        environment = {
            "SUBGRAPH_GUARD": ("end", "begin")[seed % 2],  # out-of-bounds accesses raise SIGSEGV
            **os.environ,
            "SUBGRAPH_CACHE_DIR": str(folder.resolve() / "cache"),
        }
        with open(folder / f"{target}.log", "ab") as log:
            worker = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
            _, status, usage = os.wait4(worker.pid, 0)
        total.cpu_seconds += usage.ru_utime + usage.ru_stime
        seed += 1
        report = folder / f"{target}.{worker.pid}.json"
        written: dict[str, Any] = json.loads(report.read_text()) if report.exists() else {}
        report.unlink(missing_ok=True)
        total.runs += written.get("runs", 0)
        for kind, count in written.get("findings", {}).items():
            total.findings[kind] = total.findings.get(kind, 0) + count
        code = os.waitstatus_to_exitcode(status)
        if code:
            total.deaths += 1
            kind = f"a worker ended with {code}"
            total.findings[kind] = total.findings.get(kind, 0) + 1
            if not _forget_deadly(folder, target) and not written:
                break  # the worker cannot start: see the log
    with open(folder / "totals.jsonl", "a") as log:
        log.write(json.dumps({**attrs.asdict(total), "last_seed": seed - 1}) + "\n")
    return total


def _forget_deadly(folder: Path, target: str) -> int:
    """Remove inputs that crash a worker from the corpus; return the number of all such inputs."""
    deadly = {p.read_bytes() for p in (folder / "findings" / target).glob("[cto]*-*")}
    for path in (folder / "corpus" / target).iterdir():
        if path.read_bytes() in deadly:
            path.unlink()
    return len(deadly)


def main(given: Sequence[str] | None = None) -> int:
    """Fuzz the targets; return 1 if there are findings."""
    parser = argparse.ArgumentParser(prog="fuzz_native", description=__doc__)
    parser.add_argument("targets", nargs="*", choices=[*TARGETS, []], help="all if none is said")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each target")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=Path(".fuzz"))
    options = parser.parse_args(given)
    found = False
    with ThreadPoolExecutor(options.jobs) as pool:
        arguments = (options.folder, options.seconds, options.seed)
        for total in pool.map(lambda t: fuzz(t, *arguments), options.targets or TARGETS):
            print(total, flush=True)
            found |= bool(total.findings)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
