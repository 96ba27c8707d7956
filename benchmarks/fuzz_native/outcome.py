"""Allowed outcomes of a target, and the record of findings."""

from __future__ import annotations

import hashlib
import json
import signal
import time
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import subgraph as sg

LIMIT_SECONDS = 5.0  # CPU time of an input whose kernels are compiled (estimate)
HANG_SECONDS = 100.0  # CPU time of an input with compilation of its kernels (estimate)


class Finding(Exception):
    """A forbidden outcome; the message begins with its kind, up to a semicolon."""


class Hang(BaseException):
    """An input takes too long; no child of Exception, so that the library does not catch it."""


def refuses(action: Callable[[], object]) -> str:
    """Return the name of the ``sg.SubgraphError`` that an action raises, "" if none.

    Raises:
        sg.InternalError: a bug that the library reports.
        Exception: any other error of the action.
    """
    try:
        action()
    except sg.InternalError:
        raise
    except sg.SubgraphError as error:
        return type(error).__name__
    return ""


def kind_of(error: BaseException) -> str:
    """Return the kind of a finding: the error's type, and the library's innermost function."""
    if isinstance(error, Finding):
        return f"Finding: {str(error).partition(';')[0]}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [
        f for f in frames if "fuzz_native" not in f.filename and "site-packages" not in f.filename
    ]
    where = f"{Path(own[-1].filename).name}:{own[-1].name}" if own else "?"
    return f"{type(error).__name__} in {where}"


@contextmanager
def _given_up_after(seconds: float) -> Generator[None]:
    """Raise `Hang` in the block after some CPU time, if the system has such timers."""
    if not hasattr(signal, "setitimer"):
        yield
        return

    def give_up(*_: object) -> None:
        raise Hang(f"more than {seconds:g} s")

    before = signal.signal(signal.SIGVTALRM, give_up)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


class Recorder:
    """Runs inputs, writes the first of every kind of finding to a folder, and counts.

    Attributes:
        runs: Number of inputs.
        counts: Number of inputs by kind of finding.
    """

    def __init__(self, run: Callable[[bytes], None], folder: Path) -> None:
        """Make a recorder.

        Args:
            run: The target.
            folder: Folder of the findings: ``NAME.bin``, the input, and ``NAME.txt``, the error.
        """
        self._run = run
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.runs = 0
        self.counts: dict[str, int] = {}

    def __call__(self, data: bytes) -> None:
        """Run one input and record a finding."""
        self.runs += 1
        try:
            if (
                self._seconds(data) > LIMIT_SECONDS
                and (again := self._seconds(data)) > LIMIT_SECONDS
            ):
                raise Finding(f"slow; {again:.1f} s")
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self._keep(data, error)

    def _seconds(self, data: bytes) -> float:
        start = time.process_time()
        with _given_up_after(HANG_SECONDS):
            self._run(data)
        return time.process_time() - start

    def _keep(self, data: bytes, error: BaseException) -> None:
        kind = kind_of(error)
        self.counts[kind] = self.counts.get(kind, 0) + 1
        path = self._folder / hashlib.sha256(kind.encode()).hexdigest()[:12]
        if self.counts[kind] == 1 and not path.with_suffix(".bin").exists():
            path.with_suffix(".bin").write_bytes(data)
            text = "".join(traceback.format_exception(error))
            path.with_suffix(".txt").write_text(f"{kind}\n\n{text}")

    def save(self, path: Path) -> None:
        """Write the counts."""
        path.write_text(json.dumps({"runs": self.runs, "findings": self.counts}))
