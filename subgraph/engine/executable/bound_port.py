"""Bound ports: inputs and outputs of executable plans, with a staging buffer or patched words."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from subgraph.engine.executable.argument_layout import Patch, Port
from subgraph.engine.program.addresses import address_of
from subgraph.graph.growing import extended
from subgraph.graph.result_arrays import usable_output
from subgraph.graph.types import Array, numpy_dtype
from subgraph.system import guard_pages
from subgraph.system.large_pages import aligned_empty

# Ports up to this size have a staging buffer: copying them takes less time than asking an array for
# its address and patching the words (estimate).
MAX_STAGED_BYTES = 16384


class BoundPort:
    """An input or output of an executable plan.

    The kernels read and write either a staging buffer, an array of the plan that is copied from or
    to the caller's array, or the caller's array itself, whose address is patched into the words.

    Attributes:
        position: Index among the graph's inputs or outputs.
        type: Its dtype and shape.
        nbytes: Its size.
        memory: Bytes that the staging buffer is a part of; None without one.
        staging: The staging buffer; None: runs work on the caller's array.
        current: The array that the present run works on, None between runs.
        array: The caller's array, of an input that is a buffer; None between runs.
    """

    def __init__(self, port: Port, words: Array) -> None:
        """Bind a port to the argument words of a plan; a small one gets a staging buffer.

        Args:
            port: The port.
            words: The argument words.
        """
        self.memory: Array | None = None
        self.position = port.position
        self.type = port.dtype, port.shape
        self.nbytes = port.nbytes
        self.staging: Any = None
        self._patch = port.patch
        self._words = words
        self._dtype = numpy_dtype(port.dtype)
        self._address = -1  # in the words
        self._staging_address = -1
        self.current: Any = None
        self.array: Any = None
        self._grows = port.grows
        if port.nbytes <= MAX_STAGED_BYTES and not port.grows:
            self.allocate_staging()

    def resize(
        self, shape: tuple[int, ...], nbytes: int, offsets: NDArray[np.int64] | None
    ) -> None:
        """Change to another size; the staging buffer stays where it is, if it has room.

        Args:
            shape: The shape.
            nbytes: Its size.
            offsets: Those of the words to patch; None: as before.
        """
        self.type, self.nbytes, self.staging = (self.type[0], shape), nbytes, None
        if offsets is not None:
            self._patch, self._address = Patch(self._patch.positions, offsets), -1
        if nbytes <= MAX_STAGED_BYTES and not self._grows:
            self.allocate_staging()

    def allocate_staging(self) -> Array:
        """Return the staging buffer, which is allocated and used from now on if there was none."""
        if self.staging is None:
            if self.memory is None or self.memory.nbytes < self.nbytes or guard_pages.MODE:
                # A port of sizes that grow with each run, as those of a decoder, gets room.
                exact = self.memory is None or guard_pages.MODE
                room = self.nbytes if exact else 2 * self.nbytes
                memory = aligned_empty((room,), np.dtype(np.uint8))
                self.memory, self._staging_address = memory, address_of(memory)
            staged = np.ndarray(self.type[1], self._dtype, self.memory)
            self._point_to(self._staging_address)
            self.staging = staged  # last, so that the next call patches the words if this fails
        staging: Array = self.staging
        return staging

    def _point_to(self, address: int) -> None:
        # Callers often pass the same array again; its words then already hold the address.
        if address != self._address:
            self._patch.put(self._words, address)
            self._address = address

    def bind_input(self, array: Array) -> None:
        """Make the next run read ``array``, converted if its dtype is not the port's.

        A file may state a wrong dtype for the result of an operator that states none itself.
        """
        if self.staging is not None:
            self.staging[...] = array
            self.current = self.staging
            return
        if not len(self._patch.positions):  # no kernel reads it
            self.current = array
            return
        if self._grows:
            self.array = array
        array = np.ascontiguousarray(array, self._dtype)
        # The reference to the array (or to its copy in C order) keeps the memory alive during the
        # run, since the kernels only have its address.
        self.current = array
        if guard_pages.MODE:
            self.current = guard_pages.guarded_copy(array, writable=self._grows)
        self._point_to(address_of(self.current))

    def bind_output(self, wanted: Array | None) -> Array:
        """Return the array that the next run writes: the buffer, ``wanted`` or a new one."""
        if self.staging is not None:
            self.current = self.staging
            staged: Array = self.staging
            return staged
        # With guard pages the result has to lie between them; the caller's array is filled by a
        # copy after the run.
        array = None if guard_pages.MODE else usable_output(wanted, self._dtype, self.type[1])
        if array is None:
            array = self._new_result()
        self._point_to(address_of(array))
        self.current = array
        return array

    def _new_result(self) -> Array:
        make = guard_pages.empty if guard_pages.MODE else np.empty
        return make(self.type[1], self._dtype)

    def release_array(self) -> None:
        """Drop the reference to the caller's array, after a run."""
        if self.array is not None and self.array is not self.current:
            self.array[...] = self.current  # the run wrote to a copy between guard pages
        self.current = self.array = None

    def copy_result(self, results: list[Array]) -> None:
        """Set the result of this output to a copy of its staging buffer, if it has one."""
        if self.staging is not None:
            # The next run overwrites the staging buffer, but the caller owns the result.
            results[self.position] = self.staging.copy()


class GrowingPort(BoundPort):
    """An output that grows in the buffer of an input; it has no memory of its own."""

    def __init__(self, port: Port, words: Array, buffer: BoundPort) -> None:
        """Bind an output to the input that is its buffer.

        Args:
            port: The output.
            words: The argument words of the plan, none of which point into the output.
            buffer: The input.
        """
        super().__init__(port, words)
        self._buffer = buffer

    def bind_output(self, wanted: Array | None) -> Array:
        """Return the buffer, until the run has ended."""
        buffer: Array = self._buffer.array
        return buffer

    def copy_result(self, results: list[Array]) -> None:
        """Set the result of this output to a view of the buffer, with the appended positions."""
        results[self.position] = extended(self._buffer.array, self.type[1][-2])
