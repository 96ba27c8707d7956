"""Iterations: an executable plan run repeatedly by one call from Python, for the bodies of loops.

If the body is one program whose values keep their shapes from one iteration to the next, no Python
runs between iterations: a compiled loop (`subgraph.engine.program.iteration_kernels`) copies the
results of an iteration to the inputs of the next one, and reads the condition.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from subgraph.engine.executable.executable_plan import ExecutablePlan
from subgraph.engine.program import abi
from subgraph.engine.program.entry import entry
from subgraph.engine.program.program import Program
from subgraph.engine.region.strategy import Declined
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.errors import RequestCancelledError
from subgraph.graph.limits import check_memory, memory_limit
from subgraph.graph.types import Array
from subgraph.operators.subgraph_op import IterationsResult, Wiring

# A copy between iterations: address of the source, address of the target, bytes, and how far source
# and target advance with every iteration, in bytes.
_Row = tuple[int, int, int, int, int]
# Most bytes of a carried value: copying a larger one takes longer than the overhead of an iteration
# in Python (estimate).
_MAX_CARRIED_BYTES = 1 << 18
# Iterations of one call of compiled code, of tiny programs and of others (estimates). Between
# calls, Python handles signals and enlarges buffers.
_TINY_CHUNK_ITERATIONS, _CHUNK_ITERATIONS = 1024, 16
# Status of the compiled loop: an iteration was broken off. It is 0 if the limit of iterations was
# reached, and has another value if the condition became false.
_CANCELLED = 1


def loop_kernel() -> Kernel:
    """Return the kernel that runs a program repeatedly."""
    return Kernel("subgraph.engine.program.iteration_kernels", "iterate")


class Iterations:
    """An executable plan and the copies between its iterations; each value has its own memory."""

    def __init__(self, bound: ExecutablePlan, program: Program, wiring: Wiring) -> None:
        """Connect the outputs of a plan to its inputs.

        Args:
            bound: The plan.
            program: Its only program.
            wiring: How values are passed between iterations.
        """
        self._bound = bound
        self._program = program
        self._wiring = wiring
        self._output_staging = [port.allocate_staging() for port in bound.outputs]
        self._input_staging: dict[int, Array] = {
            e.position: e.staging for e in bound.inputs if e.staging is not None
        }
        self._unstaged_inputs = [port for port in bound.inputs if port.staging is None]
        unread: Array = np.zeros(1, np.int64)
        self._number = unread if wiring.number is None else self._input_staging[wiring.number]
        self._copies_before = _table([])
        self._copies_after = self._make_copies_after()
        self._block = np.zeros(abi.ITERATIONS_WORDS, np.int64)
        self._set(abi.ITERATIONS_INNER, program.block_address)
        self._set(abi.ITERATIONS_NUMBER, self._number.ctypes.data)
        if wiring.condition is not None:
            self._set(abi.ITERATIONS_CONDITION, self._output_staging[wiring.condition].ctypes.data)
        self._set_rows(abi.ITERATIONS_AFTER, self._copies_after)
        self._set(abi.RUN_RELEASE, 1)
        self._set(abi.RUN_WALK, loop_kernel().address)
        self._call = entry(self._block.ctypes.data)

    def _set(self, offset: int, value: int) -> None:
        self._block[offset // abi.WORD] = value

    def _set_rows(self, offset: int, rows: NDArray[np.int64]) -> None:
        self._set(offset, rows.ctypes.data)
        self._set(offset + abi.WORD, len(rows))

    def _make_copies_after(self) -> NDArray[np.int64]:
        """Return the copies after each iteration, first those of scan outputs.

        The targets of scan outputs are set by `run`, because their buffers may move.
        """
        scanned = [self._output_staging[k] for k in self._wiring.scans]
        rows: list[_Row] = [(a.ctypes.data, 0, a.nbytes, 0, a.nbytes) for a in scanned]
        for output, reader in self._wiring.states:
            if reader is not None:
                source, target = self._output_staging[output], self._input_staging[reader]
                rows.append((source.ctypes.data, target.ctypes.data, source.nbytes, 0, 0))
        return _table(rows)

    def run(self, inputs: Sequence[Any], limit: int | None) -> IterationsResult:
        """Run iterations; see `Session.iterations`.

        Args:
            inputs: Inputs of the first iteration.
            limit: Most iterations; None: until the condition is false.

        Raises:
            RequestCancelledError: The request was cancelled.
            LimitError: The results of all iterations need more memory than the budget.
            ShapeError: A value that a kernel took as an index or a count was out of range.
        """
        self._bound.rebind_arena()
        items = self._copy_inputs(inputs)
        buffers = [_Buffer(self._output_staging[output]) for output in self._wiring.scans]
        chunk = _TINY_CHUNK_ITERATIONS if self._program.tiny else _CHUNK_ITERATIONS
        done = status = 0
        self._set(abi.ITERATIONS_DONE, done)
        while status == 0 and (limit is None or done < limit):
            stop = done + chunk if limit is None else min(done + chunk, limit)
            # Twice, because rows are copied when a buffer is enlarged.
            held = 2 * sum(buffer.bytes_of(stop) for buffer in buffers)
            if held > memory_limit():
                check_memory(held, f"a loop that stacks the results of {stop} iterations")
            for k, buffer in enumerate(buffers):
                buffer.reserve(done, stop, limit)
                self._copies_after[k, 1] = buffer.address(done)
            self._set(abi.ITERATIONS_LIMIT, stop)
            self._program.wake_helpers()
            status = self._call()
            done = int(self._block[abi.ITERATIONS_DONE // abi.WORD])
            self._bound.check_reports()
        del items  # the program has read them
        if status == _CANCELLED:
            raise RequestCancelledError("the request was cancelled while it ran")
        rows = [buffer.rows(done) for buffer in buffers]
        states = [self._output_staging[output].copy() for output, _ in self._wiring.states]
        return IterationsResult(states, rows)

    def _copy_inputs(self, inputs: Sequence[Any]) -> list[Array]:
        """Copy the inputs of the first iteration to their memory, and prepare the copies of items.

        Returns:
            The arrays that the program reads, which must live until it has run.
        """
        items: list[Array] = []
        rows: list[_Row] = []
        for position, staging in self._input_staging.items():
            if position in self._wiring.items:
                items.append(np.ascontiguousarray(inputs[position], staging.dtype))
                at = items[-1].ctypes.data, staging.ctypes.data
                rows.append((*at, staging.nbytes, staging.nbytes, 0))
            else:
                staging[...] = inputs[position]
        for port in self._unstaged_inputs:
            port.bind_input(inputs[port.position])
            items.append(port.current)
            port.release_array()
        if rows:
            self._copies_before = _table(rows)
            self._set_rows(abi.ITERATIONS_BEFORE, self._copies_before)
        return items


class _Buffer:
    """The results of all iterations for one scan output."""

    def __init__(self, item: Array) -> None:
        self._item = item
        self._rows = np.empty((0, *item.shape), item.dtype)

    def bytes_of(self, iterations: int) -> int:
        """Return the bytes of the results of some iterations."""
        return iterations * self._item.nbytes

    def reserve(self, done: int, stop: int, limit: int | None) -> None:
        """Enlarge the buffer if necessary.

        Args:
            done: Number of results that it holds.
            stop: Number of results that it has to hold.
            limit: Number of results that it will hold in the end, if known.
        """
        if stop > len(self._rows):
            room = max(stop, 2 * len(self._rows))
            room = room if limit is None else min(room, limit)
            rows = np.empty((room, *self._item.shape), self._item.dtype)
            rows[:done] = self._rows[:done]
            self._rows = rows

    def address(self, iteration: int) -> int:
        """Return the address of the result of an iteration."""
        return int(self._rows.ctypes.data) + self.bytes_of(iteration)

    def rows(self, iterations: int) -> Array:
        """Return the results of the first iterations; the buffer must not be used afterwards."""
        return self._rows if iterations == len(self._rows) else self._rows[:iterations].copy()


def make_iterations(bound: ExecutablePlan, wiring: Wiring) -> Iterations:
    """Return the iterations of an executable plan.

    Args:
        bound: The plan.
        wiring: How values are passed between iterations.

    Raises:
        Declined: The plan has reference steps, values that are passed between iterations are large,
            or their types differ from one iteration to the next.
    """
    inputs = {port.position: port for port in bound.inputs}
    number, condition = wiring.number, wiring.condition
    changing = {reader for _, reader in wiring.states if reader is not None} | {*wiring.items}
    changing |= set() if number is None else {number}
    ports = [*(inputs[k] for k in changing), *bound.outputs]
    pairs = [(bound.outputs[k].type, inputs[j].type) for k, j in wiring.states if j is not None]
    if any(output != reader for output, reader in pairs):
        raise Declined("a value has another size in the next iteration")
    if bound.single_program is None:
        raise Declined("the plan has reference steps")
    if any(port.nbytes > _MAX_CARRIED_BYTES for port in ports):
        raise Declined("values that are passed between iterations are too large to be copied")
    if number is not None and (inputs[number].type[0], inputs[number].nbytes) != ("int64", 8):
        raise Declined("the iteration's number is no int64 scalar")
    if condition is not None:
        output = bound.outputs[condition]
        if (output.type[0], output.nbytes) != ("bool", 1):
            raise Declined("the condition is not one truth value")
    for port in ports:
        port.allocate_staging()
    return Iterations(bound, bound.single_program, wiring)


def _table(rows: Sequence[_Row]) -> NDArray[np.int64]:
    return np.array(rows, np.int64).reshape(-1, abi.COPY_WORDS)
