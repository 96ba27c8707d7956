"""Programs in exported models: argument layouts for the shapes with which a model has run.

`describe` converts an `ArgumentLayout` to plain JSON and one array of integers, and `read` converts
them back, for the same kernels and options. The machine code of the kernels is stored, too, for
machines whose cache does not have it. Argument words become addresses, and the code is executed,
without further checks; therefore only files that this user has signed are read. Symbolic plans are
stored as the instances that have run, without the expressions of their sizes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from subgraph.engine.executable.argument_layout import ArgumentLayout, Patch, Port, SymbolicConstant
from subgraph.engine.program import entry
from subgraph.engine.program.pool import helper_kernels, sleeps_in_kernel
from subgraph.engine.program.program import walker
from subgraph.engine.program.reports import Report
from subgraph.engine.toolchain import toolchain
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.engine.toolchain.keys import cache_key
from subgraph.graph.parameters import Parameter, Snapshot, Unchecked
from subgraph.graph.types import Array, dtype_of
from subgraph.operators.subgraph_op import ExportFile, ImportFile, ProfileEntry
from subgraph.system import host
from subgraph.system.json_values import with_tuples
from subgraph.system.large_pages import ALIGN
from subgraph.system.objectcache import ObjectCode
from subgraph.weights.cache import WeightEntry, read_only


@attrs.frozen(eq=False)
class StoredProgram:
    """A program from a file, with the conditions under which it may run.

    Attributes:
        layout: The argument layout.
        versions: The versions of the region's parameters, from which its weights were computed.
        sources: The parameters among them that the program itself does not read.
        unchecked: Weights in the file, whose checksums are checked before the first run.
    """

    layout: ArgumentLayout
    versions: Mapping[Parameter, int]
    sources: tuple[Parameter, ...]
    unchecked: tuple[Unchecked, ...]

    def check(self) -> None:
        """Check the checksums of the weights; the program must not run before.

        Raises:
            BlobError: The file is damaged.
        """
        Unchecked.check_all(self.unchecked)

    def fits(self, inputs: Sequence[Any]) -> bool:
        """Return whether the program is for inputs of these dtypes and shapes."""
        pairs = ((port, inputs[port.position]) for port in self.layout.inputs)
        return all(
            item.shape == port.shape and dtype_of(item) == port.dtype for port, item in pairs
        )

    def is_current(self, snapshot: Snapshot) -> bool:
        """Return whether its weights were computed from the parameters as in a snapshot."""
        for parameter, version in self.versions.items():
            state = snapshot.states.get(parameter)
            if (parameter.version if state is None else state.version) != version:
                return False
        return True


def describe(layout: ArgumentLayout, file: ExportFile) -> dict[str, Any] | None:
    """Return a program as plain JSON.

    Args:
        layout: The argument layout of the program.
        file: The file; arrays, weights and code are added to it.

    Returns:
        The description; None if the program has reference steps, or weights that cannot be stored.
    """
    # A reference step evaluates a node of the graph, which a description does not contain.
    if layout.breaks:
        return None
    weights: list[Any] = []
    numbers = _NumberCollector()
    for weight, patch in layout.weights:
        assert not isinstance(weight, SymbolicConstant), "only symbolic plans have them"
        stored = file.weight(weight) if isinstance(weight, WeightEntry) else file.array(weight)
        if stored is None:
            return None
        align = weight.align if isinstance(weight, WeightEntry) else ALIGN
        weights.append([stored, align, numbers.patch(patch)])
    kernels = dict.fromkeys([*(row[0] for row in layout.steps), *(k for k, _ in layout.kernels)])
    number = {kernel: k for k, kernel in enumerate(kernels)}
    isa = host.isa()
    steps = [x for kernel, *rest in layout.steps for x in (number[kernel], *rest)]
    description = {
        "kernels": [[k.module, k.factory, dict(k.variant), cache_key(k, isa)] for k in kernels],
        "code": _describe_code(kernels, file),
        "called": [[number[k], numbers.patch(patch)] for k, patch in layout.kernels],
        "weights": weights,
        "inputs": [_port(port, numbers) for port in layout.inputs],
        "outputs": [_port(port, numbers) for port in layout.outputs],
        "arena": numbers.patch(layout.arena),
        "arena_bytes": layout.arena_bytes,
        "tiny": layout.tiny,
        "reports": [[r.where, r.operand] for r in layout.reports],
        "slot": numbers.add(layout.slot),
        "words": numbers.add(layout.words),
        "steps": numbers.add(np.array(steps, np.int64)),
        "entries": [attrs.astuple(entry) for entry in layout.entries()],
    }
    # The array is stored last, when all spans have been added to it.
    return {**description, "numbers": file.array(numbers.array())}


def read(
    description: Mapping[str, Any], file: ImportFile, parameters: Sequence[Parameter]
) -> StoredProgram | None:
    """Return a program of a file that this user has signed.

    Args:
        description: As `describe` returned it.
        file: The file.
        parameters: The parameters of the region.

    Returns:
        The program; None if a kernel has changed since the file was written.
    """
    isa = host.isa()
    kernels: list[Kernel] = []
    for module, factory, variant, key in description["kernels"]:
        kernel = Kernel(module, factory, **{name: with_tuples(v) for name, v in variant.items()})
        # The argument words are laid out for the kernel as it was; another version would read them
        # wrongly.
        if cache_key(kernel, isa) != key:
            return None
        kernels.append(kernel)
    # The code is added before a kernel is requested, so that none is compiled.
    toolchain.add_imported_code(_read_code(description["code"], file))
    numbers = _StoredNumbers(file.array(description["numbers"]))
    sources: dict[Parameter, None] = {}
    weights: list[tuple[WeightEntry | Array, Patch]] = []
    unchecked: list[Unchecked] = []
    for stored, align, span in description["weights"]:
        sources.update(dict.fromkeys(file.sources(stored)))
        # Checking the checksums reads the whole file; `StoredProgram.check` does it before the
        # first run instead of at the import.
        weight = file.unchecked(stored)
        unchecked.append(weight)
        weights.append((read_only(weight.array, align), numbers.patch(span)))
    called: list[tuple[int, list[int]]] = description["called"]
    rows: list[list[int]] = numbers.part(description["steps"]).reshape(-1, 4).tolist()
    layout = ArgumentLayout(
        numbers.part(description["words"]),
        numbers.patch(description["arena"]),
        description["arena_bytes"],
        tuple(map(numbers.port, description["inputs"])),
        tuple(map(numbers.port, description["outputs"])),
        tuple(weights),
        tuple((kernels[k], numbers.patch(span)) for k, span in called),
        tuple((kernels[k], begin, units, grain) for k, begin, units, grain in rows),
        (),
        lambda: tuple([ProfileEntry(*entry) for entry in description["entries"]]),
        description["tiny"],
        tuple(Report(*entry) for entry in description["reports"]),
        numbers.part(description["slot"]),
    )
    versions = {parameter: parameter.version for parameter in parameters}
    return StoredProgram(layout, versions, tuple(sources), tuple(unchecked))


def _describe_code(kernels: Iterable[Kernel], file: ExportFile) -> list[Any]:
    """Return the code of kernels, and of those that every program needs, if it is cached."""
    in_kernel, isa = sleeps_in_kernel(), host.isa()
    # The entry, the walker and the helper threads' kernels run every program, so a machine without
    # a cache would have to compile them.
    always = (entry.KERNEL, walker(in_kernel), *helper_kernels(in_kernel))
    needed = dict.fromkeys([*kernels, *always])
    codes = {cache_key(kernel, isa): toolchain.object_code(kernel) for kernel in needed}
    return [
        [key, code.needs, code.start, file.array(np.frombuffer(code.data, np.uint8))]
        for key, code in codes.items()
        if code is not None
    ]


def _read_code(description: Sequence[Any], file: ImportFile) -> dict[str, ObjectCode]:
    """Return the code in a file, by its key in the cache."""
    return {
        key: ObjectCode(tuple(needs), file.array(stored).tobytes(), start)
        for key, needs, start, stored in description
    }


class _StoredNumbers:
    """The integers of a description; a span is the index of the first number, and their count."""

    def __init__(self, numbers: Array) -> None:
        self._numbers = numbers

    def part(self, span: Sequence[int]) -> Array:
        """Return the numbers of a span."""
        return self._numbers[span[0] : span[0] + span[1]]

    def patch(self, span: Sequence[int]) -> Patch:
        """Return the patch whose positions, then offsets, are in a span."""
        both = self.part(span)
        half = len(both) // 2
        return Patch(both[:half], both[half:])

    def port(self, entry: Sequence[Any]) -> Port:
        """Return a port as `_port` described it."""
        position, dtype, shape, nbytes, span = entry
        return Port(position, dtype, tuple(shape), nbytes, self.patch(span))


class _NumberCollector:
    """Collects integers in one array."""

    def __init__(self) -> None:
        self._parts: list[Array] = []
        self._size = 0

    def add(self, *arrays: Array) -> list[int]:
        """Append arrays; return the index of their first number, and how many they have."""
        size = sum(len(array) for array in arrays)
        self._parts += arrays
        self._size += size
        return [self._size - size, size]

    def patch(self, patch: Patch) -> list[int]:
        """Append the positions and offsets of a patch; return their place as `add` does."""
        return self.add(patch.positions, patch.offsets)

    def array(self) -> Array:
        """Return all numbers."""
        return np.concatenate([np.zeros(0, np.int64), *self._parts]).astype(np.int64, copy=False)


def _port(port: Port, numbers: _NumberCollector) -> list[Any]:
    return [port.position, port.dtype, list(port.shape), port.nbytes, numbers.patch(port.patch)]
