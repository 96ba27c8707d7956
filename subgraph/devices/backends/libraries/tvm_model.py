"""A function that TVM built from a model, and its runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from subgraph.devices.backends.libraries.translation import writable_view
from subgraph.graph.types import Array

_ALIGNMENT = 64  # bytes, of the memory that built functions read; other inputs are copied


class TvmModel:
    """A built function; each runner has a virtual machine of its own."""

    def __init__(
        self, built: Any, library: Any, relax: Any, threads: int, constant: frozenset[int]
    ) -> None:
        """Prepare to run a built function.

        Args:
            built: What ``relax.build`` returned.
            library: The package.
            relax: Its relax language.
            threads: Threads of a run; 0 for the library's own choice.
            constant: What `constant_outputs` returns for the model.
        """
        self._built = built
        self._library = library
        self._relax = relax
        self._threads = threads
        self._constant = constant  # positions of outputs whose memory the function holds

    def runner(self) -> Callable[[Sequence[Array], Sequence[Array | None]], Sequence[Array]]:
        library = self._library
        main = self._relax.VirtualMachine(self._built, library.cpu())["main"]
        tensor = library.runtime.from_dlpack
        staged: dict[int, Array] = {}  # by position of the input: memory with TVM's alignment
        if self._threads:
            library.get_global_func("runtime.config_threadpool")(1, self._threads)

        def call(arrays: Sequence[Array], into: Sequence[Array | None]) -> Sequence[Array]:
            passed = [writable_view(array) for array in arrays]
            for k, array in enumerate(passed):
                if array.__array_interface__["data"][0] % _ALIGNMENT:
                    place = staged.get(k)
                    if place is None or place.shape != array.shape:
                        place = staged[k] = _aligned(array)
                    np.copyto(place, array)
                    passed[k] = place
            found = main(*map(tensor, passed))
            results = [found] if len(into) == 1 and hasattr(found, "numpy") else found
            made: list[Array] = []
            for k, result in enumerate(results):
                own: Array = np.from_dlpack(result)
                # An output may be an input, another output or a constant of the function.
                held = k in self._constant or not own.flags.writeable
                if held or any(np.may_share_memory(own, other) for other in (*passed, *made)):
                    own = own.copy()
                made.append(own)
            return made

        return call


def constant_outputs(model: bytes) -> frozenset[int]:
    """Return the positions of the outputs of a serialized model that depend on no input."""
    import onnx

    graph = onnx.load_from_string(model).graph
    computed = {port.name for port in graph.input}
    for node in graph.node:
        if not computed.isdisjoint(node.input):
            computed.update(node.output)
    return frozenset(k for k, port in enumerate(graph.output) if port.name not in computed)


def _aligned(array: Array) -> Array:
    """Return memory of an array's shape and dtype with TVM's alignment."""
    memory = np.empty(array.nbytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
