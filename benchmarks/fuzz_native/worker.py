"""One process that fuzzes one target with atheris, or runs given inputs without it."""

from __future__ import annotations

import argparse
import importlib
import os
import pkgutil
import random
import resource
import sys
import warnings
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

TARGETS = ("text", "models", "blobs", "shapes", "partition", "kernel_cache")
_MAX_INPUT_BYTES = 1 << 14  # bytes
# By the clock, for machine code that does not end, which `outcome.HANG_SECONDS` cannot interrupt.
_HANG_SECONDS = 1800
_MEMORY_MIB = 4096  # address space of the process
# Budget of the values of a run: a changed size may ask for any number of elements.
_MEMORY_LIMIT = "256M"


def _plain_modules() -> Iterator[str]:
    """Yield the modules without kernels: instrumented bytecode cannot be compiled by numba."""
    for info in pkgutil.walk_packages(importlib.import_module("subgraph").__path__, "subgraph."):
        spec = None if info.name.endswith("__main__") else find_spec(info.name)
        if spec is None or spec.origin is None or info.name.endswith("_kernels"):
            continue
        source = Path(spec.origin).read_text(encoding="utf-8")
        if "numba" not in source and "pyopencl" not in source and "/opencl" not in spec.origin:
            yield info.name


def _atheris() -> Any:
    """Return Atheris, whose type stubs lack most of what is used here."""
    return importlib.import_module("atheris")


def instrument() -> None:
    """Import Subgraph's modules without kernels with coverage instrumentation."""
    atheris = _atheris()
    wanted = [name for name in _plain_modules() if name not in sys.modules]
    finder = atheris.import_hook.AtherisMetaPathFinder
    found = finder.find_spec

    def chosen(self: object, fullname: str, *rest: object) -> object:
        return found(self, fullname, *rest) if fullname in wanted else None

    finder.find_spec = chosen
    with atheris.instrument_imports(include=["subgraph"]):
        for name in wanted:
            importlib.import_module(name)


def load(target: str) -> ModuleType:
    """Return the module of a target."""
    return importlib.import_module(f"fuzz_native.{target}")


def write_seeds(module: ModuleType, folder: Path) -> int:
    """Write the seeds of a target if the folder is empty; return the number of its files."""
    folder.mkdir(parents=True, exist_ok=True)
    if not any(folder.iterdir()):
        for number, data in enumerate(module.seeds()):
            (folder / f"seed{number:05}").write_bytes(data[:_MAX_INPUT_BYTES])
    return sum(1 for _ in folder.iterdir())


def mutated_seeds(module: ModuleType, count: int, seed: int) -> Iterator[bytes]:
    """Yield mutated seeds without guidance by coverage, for checks without atheris.

    Args:
        module: The target.
        count: Number of inputs.
        seed: Seed of the mutations.
    """
    from robustness import damaged_bytes

    rng = random.Random(seed)
    seeds = list(module.seeds())
    for _ in range(count):
        data = rng.choice(seeds)
        for _ in range(rng.randint(0, 3)):
            if hasattr(module, "mutate"):
                data = module.mutate(data, _MAX_INPUT_BYTES, rng.randrange(2**32))
            else:
                data = damaged_bytes(data, rng)
        yield data


def main(given: Sequence[str] | None = None) -> None:
    """Fuzz until the time is over, or until the process dies; or run given inputs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--folder", type=Path, default=Path(".fuzz"))
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--repeat", nargs="*", type=Path)
    options = parser.parse_args(given)
    warnings.simplefilter("ignore")
    os.environ.setdefault("SUBGRAPH_MEMORY_LIMIT", _MEMORY_LIMIT)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_MIB << 20, _MEMORY_MIB << 20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if options.repeat:
        module = load(options.target)
        for path in options.repeat:
            print(path)
            module.run(path.read_bytes())
        return
    _fuzz(options)


def _fuzz(options: argparse.Namespace) -> None:
    atheris = _atheris()
    instrument()
    from .outcome import Recorder

    module = load(options.target)
    corpus, findings = options.folder / "corpus" / options.target, options.folder / "findings"
    write_seeds(module, corpus)
    record = Recorder(module.run, findings / options.target)

    def save(data: bytes) -> None:
        record(data)
        if record.runs % 32 == 0:
            record.save(options.folder / f"{options.target}.{os.getpid()}.json")

    arguments = [
        sys.argv[0],
        str(corpus),
        f"-max_total_time={options.seconds}",
        f"-seed={options.seed}",
        f"-max_len={_MAX_INPUT_BYTES}",
        f"-timeout={_HANG_SECONDS}",
        f"-rss_limit_mb={_MEMORY_MIB}",
        f"-artifact_prefix={findings / options.target}/",
        "-reload=0",
        "-print_final_stats=1",
    ]
    if hasattr(module, "mutate"):
        atheris.Setup(arguments, save, custom_mutator=module.mutate)
    else:
        atheris.Setup(arguments, save)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
