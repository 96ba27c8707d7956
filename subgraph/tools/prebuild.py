"""Compile the kernels of common model families ahead of time, for levels of instruction sets.

``make kernels`` runs this; `subgraph.engine.toolchain.prebuilt` reads the files. The families are
planned for each level to find the kernels that they need; the kernels do not run, so that any
machine can build for all levels. Kernels in the kernel cache are not compiled again, so that an
interrupted build continues.

usage: python -m subgraph.tools.prebuild [--output FOLDER] [--level NAME ...] [MODEL.onnx ...]
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path

import attrs

import subgraph as sg
from subgraph.devices.export import region_nodes
from subgraph.engine.cpu import iterations
from subgraph.engine.program import entry
from subgraph.engine.toolchain import prebuilt, toolchain
from subgraph.engine.toolchain.isa_levels import LEVELS, IsaLevel
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.engine.toolchain.keys import source_digest
from subgraph.operators import schema_cache
from subgraph.operators.subgraph_op import SubgraphOp
from subgraph.system import host, prebuilt_files
from subgraph.system.environment import PACKAGE_PREBUILT
from subgraph.system.objectcache import ObjectCode
from subgraph.tools.warmup import prepared_graphs

_THREADS = (1, 4)  # numbers of threads to plan for: one thread and several may need other kernels
_LIMIT = 15_000_000  # bytes of all files together, so that a wheel stays small


@attrs.frozen
class Built:
    """The file of one level.

    Attributes:
        level: Instruction set and processors of the kernels.
        path: Path of the file.
        kernels: Number of kernels in the file.
        size: Bytes of the file.
    """

    level: IsaLevel
    path: Path
    kernels: int
    size: int


def kernels_of(level: IsaLevel, models: Sequence[Path]) -> list[Kernel]:
    """Return the kernels that the families and ``models`` need on a level's machines."""
    entry.method()  # Python calls it, so it must not be replaced while kernels are recorded
    with toolchain.recording() as found:
        for processor in level.planned_as:
            with host.target(level.isa._replace(cpu=processor), level.architecture):
                _plan(models)
    needed = dict.fromkeys([entry.KERNEL, *found])
    return [kernel for kernel in needed if kernel.module.startswith("subgraph.")]


def _plan(models: Sequence[Path]) -> None:
    """Plan the families and the models, weights included, without running their kernels."""
    toolchain.address(iterations.loop_kernel())  # planning does not request this one
    precisions = ("", "bfloat16") if host.multiplies_bfloat16() else ("",)
    for _, make in [*prepared_graphs(()), *(prepared_graphs(models) if models else ())]:
        graph = make()
        for threads, precision in product(_THREADS, precisions):
            config = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION": precision}
            model = sg.compile_model(graph, "CPU", config)
            for node in region_nodes(model.graph):
                op: SubgraphOp | None = node.op
                if op is not None:
                    type(op).prepare(op)


def build(folder: Path, levels: Sequence[IsaLevel], models: Sequence[Path]) -> list[Built]:
    """Compile and write the files of some levels.

    A kernel is in the file of the lowest level whose code suits: one that depends on no feature of
    a higher level is not compiled again for that.

    Args:
        folder: Folder of the files.
        levels: The levels, the lowest first.
        models: ONNX files besides the families.
    """
    built: list[Built] = []
    below: dict[Kernel, ObjectCode] = {}
    architecture = ""
    for level in levels:
        if level.isa.name != architecture:
            architecture, below = level.isa.name, {}
        wanted = [
            kernel for kernel in kernels_of(level, models) if not _serves(below, kernel, level)
        ]
        codes = compiled_codes(level, wanted)
        new = {kernel: code for kernel, code in codes.items() if not _same(below, kernel, code)}
        built.append(write_level(folder, level, new))
        below = {**below, **new}
    return built


def _serves(below: Mapping[Kernel, ObjectCode], kernel: Kernel, level: IsaLevel) -> bool:
    """Return whether a lower level has code of a kernel that this level would not improve."""
    code = below.get(kernel)
    return (
        code is not None
        and all(level.isa.has(name) == on for name, on in code.features)
        and (not any("vnni" in name for name, _ in code.features))
    )


def _same(below: Mapping[Kernel, ObjectCode], kernel: Kernel, code: ObjectCode) -> bool:
    return kernel in below and below[kernel].data == code.data


def compiled_codes(level: IsaLevel, kernels: Sequence[Kernel]) -> dict[Kernel, ObjectCode]:
    """Compile kernels for a level, a process for each core; print progress."""
    codes: dict[Kernel, ObjectCode] = {}
    start = time.perf_counter()
    context = multiprocessing.get_context("spawn")
    target = (level.isa, level.architecture)
    with ProcessPoolExecutor(host.core_count(), context, host.set_target, target) as pool:
        compiled = pool.map(toolchain.compile_for_level, kernels)
        for kernel, code in zip(kernels, compiled, strict=True):
            codes[kernel] = code
            seconds = time.perf_counter() - start
            print(
                f"\r{level.name}: {len(codes)}/{len(kernels)}, {seconds:.0f} s", end="", flush=True
            )
    print()
    return codes


def write_level(folder: Path, level: IsaLevel, codes: Mapping[Kernel, ObjectCode]) -> Built:
    """Write the file of a level.

    Args:
        folder: Folder of the file.
        level: Instruction set and processors of the kernels.
        codes: Code of kernels.
    """
    modules = sorted({kernel.module for kernel in codes})
    path = folder / f"{level.name}.pack"
    prebuilt.write_pack(
        path,
        level,
        prebuilt.version_names(),
        {module: source_digest(module) for module in modules},
        {prebuilt.kernel_key(kernel): code for kernel, code in codes.items()},
    )
    return Built(level, path, len(codes), path.stat().st_size)


def _write_schemas(folder: Path) -> None:
    """Write the operators' schemas, so that a new machine need not import onnx for them."""
    key = schema_cache.release_key()
    if key is not None:
        path = folder / f"{schema_cache.PREBUILT}.pack"
        prebuilt_files.write_data(path, key, schema_cache.schemas_of_package())


def main(arguments: Iterable[str] | None = None) -> None:
    """Build the files, print their sizes, and exit with an error if they exceed `_LIMIT`."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("models", nargs="*", type=Path, help="models beside the usual families")
    default = PACKAGE_PREBUILT
    parser.add_argument("--output", type=Path, default=default, help=f"folder ({default})")
    names = [level.name for level in LEVELS]
    parser.add_argument("--level", action="append", choices=names, help="default: all")
    options = parser.parse_args(None if arguments is None else list(arguments))
    levels = [level for level in LEVELS if level.name in (options.level or names)]
    _write_schemas(options.output)
    built = build(options.output, levels, options.models)
    for one in built:
        print(f"{one.path}: {one.kernels} kernels, {one.size / 1e6:.2f} MB")
    total = sum(one.size for one in built)
    print(f"{total / 1e6:.2f} MB in all")
    if total > _LIMIT:
        sys.exit(f"more than {_LIMIT / 1e6:.0f} MB: leave models out")


if __name__ == "__main__":
    main()
