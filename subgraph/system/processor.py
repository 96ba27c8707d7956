"""The processor as LLVM names it: asked once for a machine, and kept beside the kernels.

LLVM is only there to compile: to load it for this question would take a third of a warm start.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from subgraph.system.folders import cache_folder
from subgraph.system.trusted_files import read_trusted, write_trusted

# Lines of Linux's description that differ between cores, or from one moment to the next.
_PASSING = (
    "processor",
    "cpu mhz",
    "physical id",
    "siblings",
    "core id",
    "cpu cores",
    "apicid",
    "initial apicid",
    "bogomips",
)
_FIRST_CORE = 1 << 14  # bytes that hold the description of one


class Processor(NamedTuple):
    """LLVM's name of a processor, and which of its features are on."""

    name: str
    features: dict[str, bool]


def processor(description: Path = Path("/proc/cpuinfo")) -> Processor:
    """Return this machine's processor.

    Args:
        description: Where the system describes it; without it, LLVM is asked each time.
    """
    told = _described(description)
    if told is None:
        return _asked()
    path = cache_folder() / f"processor-{told[:32]}.json"
    found = _kept(path)
    if found is None:
        found = _asked()
        _keep(path, found)
    return found


def _described(description: Path) -> str | None:
    """Return a hash of what LLVM's answer depends on."""
    import llvmlite

    try:
        with open(description, "rb") as file:
            first = file.read(_FIRST_CORE).decode(errors="replace").partition("\n\n")[0]
    except OSError:
        return None
    lines = [line for line in first.splitlines() if _key(line) not in _PASSING]
    text = "\n".join([str(llvmlite.__version__), *lines])
    return hashlib.sha256(text.encode()).hexdigest()


def _key(line: str) -> str:
    return line.partition(":")[0].strip().lower()


def _asked() -> Processor:
    from llvmlite import binding

    try:
        features = dict(binding.get_host_cpu_features())
    except RuntimeError:  # LLVM cannot tell on every platform
        features = {}
    return Processor(str(binding.get_host_cpu_name()), features)


def _kept(path: Path) -> Processor | None:
    try:
        checksum, _, text = read_trusted(path).decode().partition("\n")
        if hashlib.sha256(text.encode()).hexdigest() != checksum:
            return None
        name, features = json.loads(text)
    except (OSError, ValueError):
        return None
    return Processor(name, features)


def _keep(path: Path, found: Processor) -> None:
    text = json.dumps(found)
    with suppress(OSError):  # a folder that is only read
        write_trusted(path, f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}".encode())
