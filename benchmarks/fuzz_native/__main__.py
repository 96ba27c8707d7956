"""Fuzz targets for a time each, start a worker again where one dies, and tell what was found."""

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

_ROUND_SECONDS = 900  # a worker's life: what a process keeps is bounded


@attrs.define
class Total:
    """What the workers of one target did."""

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
    """Fuzz one target; every worker has another seed."""
    total = Total(target)
    end = time.monotonic() + seconds
    folder.mkdir(parents=True, exist_ok=True)
    while (left := end - time.monotonic()) > 1:
        options = f"--folder {folder} --seconds {int(min(left, _ROUND_SECONDS)) + 1} --seed {seed}"
        command = [sys.executable, "-m", "fuzz_native.worker", target, *options.split()]
        environment = {
            "SUBGRAPH_GUARD": ("end", "begin")[seed % 2],  # what touches a guard page dies
            **os.environ,
            "SUBGRAPH_CACHE_DIR": str(folder.resolve() / "cache"),
        }
        with open(folder / f"{target}.log", "ab") as log:
            worker = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
            _, status, usage = os.wait4(worker.pid, 0)
        total.cpu_seconds += usage.ru_utime + usage.ru_stime
        seed += 1
        report = folder / f"{target}.{worker.pid}.json"
        told: dict[str, Any] = json.loads(report.read_text()) if report.exists() else {}
        report.unlink(missing_ok=True)
        total.runs += told.get("runs", 0)
        for kind, count in told.get("findings", {}).items():
            total.findings[kind] = total.findings.get(kind, 0) + count
        code = os.waitstatus_to_exitcode(status)
        if code:
            total.deaths += 1
            kind = f"a worker ended with {code}"
            total.findings[kind] = total.findings.get(kind, 0) + 1
            if not _forget_deadly(folder, target) and not told:
                break  # it cannot start at all: see the log
    with open(folder / "totals.jsonl", "a") as log:
        log.write(json.dumps({**attrs.asdict(total), "last_seed": seed - 1}) + "\n")
    return total


def _forget_deadly(folder: Path, target: str) -> int:
    """Remove inputs that end a worker from the corpus; return how many ever ended one."""
    deadly = {p.read_bytes() for p in (folder / "findings" / target).glob("[cto]*-*")}
    for path in (folder / "corpus" / target).iterdir():
        if path.read_bytes() in deadly:
            path.unlink()
    return len(deadly)


def main(given: Sequence[str] | None = None) -> int:
    """Fuzz; 1 if anything was found."""
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
