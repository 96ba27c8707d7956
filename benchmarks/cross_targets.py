"""Compile kernels for other processors than this machine's, and check the assembly; nothing runs.

The kernels are those that tests request with emulated AVX-512 (``SUBGRAPH_ISA=like-avx512vnni``).
Each is compiled for the given processors. The program reports kernels that cannot be compiled,
integer GEMMs without ``vpdpbusd``, and inner loops that spill accumulators to the stack.

    python benchmarks/cross_targets.py tests/ops/quantized/test_qlinear.py
    tests/ops/conv/test_kernels.py
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

_V4 = [
    *("avx", "avx2", "avx512bf16", "avx512bitalg", "avx512bw", "avx512cd", "avx512dq", "avx512f"),
    *("avx512ifma", "avx512vbmi", "avx512vbmi2", "avx512vl", "avx512vnni", "avx512vpopcntdq"),
    *("bmi", "bmi2", "cx16", "f16c", "fma", "gfni", "lzcnt", "mmx", "movbe", "popcnt", "sse"),
    *("sse2", "sse3", "sse4.1", "sse4.2", "ssse3", "vaes", "vpclmulqdq"),
]
TARGETS = {
    "znver4": _V4,
    "sapphirerapids": sorted([*_V4, "avx512fp16", "avxvnni"]),
    "skylake-avx512": [f for f in _V4 if not re.search("avx512(bf|bi|if|vb|vn|vp)|gfni|va|vpc", f)],
}
_LABEL = re.compile(r"^(\.L\w+):")
_JUMP = re.compile(r"^\tj\w+\s+(\.L\w+)")
_SUMS = re.compile(r"^\t(?:\{\w+\} )?(vfn?m(?:add|sub)|vpdpbusd|vpmaddwd)")
_SPILL = re.compile(r"^\tv\w*mov\w+\s+%[xyz]mm\d+, -?\w*\(%r[sb]p\)")


def isa_of(cpu: str) -> Any:
    """Return the instruction set of a processor with AVX-512."""
    from subgraph.system.host import Isa

    return Isa("avx512", 64, 32, True, cpu, ",".join(f"+{f}" for f in TARGETS[cpu]))


def inner_loops(assembly: str) -> Iterator[list[str]]:
    """Yield the lines of each innermost loop."""
    lines = assembly.splitlines()
    at = {found[1]: number for number, line in enumerate(lines) if (found := _LABEL.match(line))}
    loops = [
        (at[found[1]], number)
        for number, line in enumerate(lines)
        if (found := _JUMP.match(line)) and at.get(found[1], number) < number
    ]
    for first, last in loops:
        if not any((a, b) != (first, last) and first <= a and b <= last for a, b in loops):
            yield lines[first : last + 1]


def spills(assembly: str) -> int:
    """Return the number of instructions in inner loops of multiply-adds that spill a vector."""
    return sum(
        sum(bool(_SPILL.match(line)) for line in loop)
        for loop in inner_loops(assembly)
        if any(_SUMS.match(line) for line in loop)
    )


def recorded(tests: Sequence[str]) -> list[Any]:
    """Run tests and return the kernels that they requested."""
    import pytest

    from subgraph.engine.toolchain.kernel import Kernel

    seen: dict[Kernel, None] = {}
    make = Kernel.__init__

    def record(self: Kernel, *args: Any, **variant: Any) -> None:
        make(self, *args, **variant)
        if self.module.startswith("subgraph."):
            seen[self] = None

    Kernel.__init__ = record  # type: ignore[method-assign]
    try:
        if pytest.main(["-q", "-m", "not slow and not oclgrind", *tests]) != 0:
            sys.exit("the tests fail")
    finally:
        Kernel.__init__ = make  # type: ignore[method-assign]
    return list(seen)


def examine(kernel: Any, cpu: str) -> list[str]:
    """Compile a kernel for a processor; return the problems of its code."""
    from subgraph.engine.toolchain import compiler

    isa = isa_of(cpu)
    try:
        function = compiler.make_function(kernel.module, kernel.factory, dict(kernel.variant))
        code, text = compiler.object_and_assembly(function, "kernel", isa)
    except Exception as error:
        return [f"cannot be compiled: {error}"]
    found = [] if code else ["no object code"]
    if kernel.module.endswith("tile_int") and dict(kernel.variant).get("flavour") == "quads":
        if not isa.has("avx512vnni"):
            return found  # lowerings choose other tiles for this processor
        found += [] if "vpdpbusd" in text else ["no vpdpbusd"]
    # Chains of elementwise functions may need more registers than there are, and have no sums.
    stored = 0 if kernel.module.endswith("subgraph.ops.elementwise.kernels") else spills(text)
    return found + ([f"{stored} vectors stored on the stack in inner loops"] if stored else [])


def main() -> None:
    """Run the tests, compile their kernels, print the problems."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("tests", nargs="+", help="test files, as pytest takes them")
    parser.add_argument("--cpu", action="append", choices=list(TARGETS), help="default: all")
    options = parser.parse_args()
    os.environ["SUBGRAPH_ISA"] = "like-avx512vnni"
    kernels = recorded(options.tests)
    from subgraph.system import host

    bad = 0
    for cpu in options.cpu or TARGETS:
        wanted = isa_of(cpu)
        host.isa = lambda wanted=wanted: wanted  # type: ignore[misc]
        for kernel in kernels:
            for trouble in examine(kernel, cpu):
                bad += 1
                print(f"{cpu}: {kernel.description}: {trouble}", flush=True)
        print(f"{cpu}: {len(kernels)} kernels compiled")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
