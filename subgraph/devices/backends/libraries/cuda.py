"""NVIDIA's cards for the backends that use them: finding one, streams, and memory."""

from __future__ import annotations

import importlib
import weakref
from typing import Any

from subgraph.errors import DeviceError
from subgraph.graph.types import Array

REQUIREMENT = "cuda-bindings >= 12.6"
_NON_BLOCKING = 1  # flag of cudaStreamCreateWithFlags: no implicit order with the default stream


class CudaError(RuntimeError):
    """A function of the CUDA runtime has failed."""


class Card:
    """An NVIDIA card of this machine.

    Attributes:
        runtime: The module of the CUDA runtime.
        number: Number of the card.
        name: The card's name and compute capability, such as "NVIDIA L4, 8.9".
    """

    def __init__(self, title: str, number: int = 0) -> None:
        """Find the card.

        Args:
            title: Name of the library that needs it, for messages.
            number: Number of the card.

        Raises:
            DeviceError: the CUDA bindings, the driver or the card is missing, or the driver is too
                old; the message says what to do.
        """
        try:
            self.runtime: Any = importlib.import_module("cuda.bindings.runtime")
        except ImportError as error:
            raise DeviceError(
                f"{title} needs NVIDIA's bindings of CUDA ({error}): pip install '{REQUIREMENT}'"
            ) from error
        driver = self.call("cudaDriverGetVersion")
        if not driver:
            raise DeviceError(
                f"{title} needs an NVIDIA card, and this machine has no driver for one (libcuda is "
                "not found): install NVIDIA's driver; nvidia-smi then lists the cards"
            )
        needed = self.call("cudaRuntimeGetVersion")
        if driver // 1000 < needed // 1000:
            raise DeviceError(
                f"{title}: NVIDIA's driver supports CUDA {_version(driver)}, and the installed "
                f"packages need CUDA {_version(needed)}: update the driver, or install packages "
                f"for CUDA {driver // 1000}, such as 'cuda-bindings == {driver // 1000}.*'"
            )
        try:
            count = self.call("cudaGetDeviceCount")
        except CudaError as error:
            raise DeviceError(f"{title} finds no NVIDIA card ({error})") from error
        if number >= count:
            raise DeviceError(f"{title} finds no NVIDIA card {number}; there are {count}")
        self.number = number
        found = self.call("cudaGetDeviceProperties", number)
        name = found.name.decode() if isinstance(found.name, bytes) else str(found.name)
        self.name = f"{name}, {found.major}.{found.minor}"

    def call(self, function: str, *arguments: Any) -> Any:
        """Call a function of the CUDA runtime, which returns its error code and its results.

        Args:
            function: Its name.
            *arguments: Its arguments.

        Returns:
            The result; None if it has none.

        Raises:
            CudaError: it has failed.
        """
        code, *results = getattr(self.runtime, function)(*arguments)
        if int(code):
            text = self.runtime.cudaGetErrorString(code)[1]
            raise CudaError(f"{function}: {text.decode() if isinstance(text, bytes) else text}")
        return results[0] if results else None

    def use(self) -> None:
        """Make this the card of the calling thread."""
        self.call("cudaSetDevice", self.number)


class Stream:
    """A queue of copies and kernels on a card, for one request.

    Attributes:
        handle: The stream as an integer, for libraries.
    """

    def __init__(self, card: Card) -> None:
        """Create the stream."""
        card.use()
        self._card = card
        made = card.call("cudaStreamCreateWithFlags", _NON_BLOCKING)
        weakref.finalize(self, card.runtime.cudaStreamDestroy, made)
        self.handle = int(made)

    def memory(self) -> CardMemory:
        """Return memory of the card for the work of this stream; nothing is allocated yet."""
        return CardMemory(self._card)

    def upload(self, array: Array, address: int) -> None:
        """Copy a C-contiguous array to the card; the array may be changed afterwards."""
        kind = self._card.runtime.cudaMemcpyKind.cudaMemcpyHostToDevice
        place = array.ctypes.data
        self._card.call("cudaMemcpyAsync", address, place, array.nbytes, kind, self.handle)

    def download(self, array: Array, address: int) -> None:
        """Fill a C-contiguous array from the card; it is complete after `wait`."""
        kind = self._card.runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost
        place = array.ctypes.data
        self._card.call("cudaMemcpyAsync", place, address, array.nbytes, kind, self.handle)

    def wait(self) -> None:
        """Wait for all that was queued.

        Raises:
            CudaError: some of it has failed.
        """
        self._card.call("cudaStreamSynchronize", self.handle)


class CardMemory:
    """Memory of a card that is allocated again when more is needed, and freed with the object.

    Attributes:
        size: Its size in bytes.
    """

    def __init__(self, card: Card) -> None:
        """Allocate nothing yet."""
        self._card = card
        self.size = 0
        self._address = 0
        self._free: Any = None

    def reserve(self, size: int) -> int:
        """Return the address of at least ``size`` bytes; the contents are not kept."""
        if size > self.size or not self._address:
            self.release()
            self._address = int(self._card.call("cudaMalloc", max(size, 1)))
            self._free = weakref.finalize(self, self._card.runtime.cudaFree, self._address)
            self.size = size
        return self._address

    def release(self) -> None:
        """Free the memory."""
        if self._free is not None:
            self._free()
        self._address = self.size = 0


def _version(number: int) -> str:
    """Return a version of CUDA as text, 12040 as "12.4"."""
    return f"{number // 1000}.{number % 1000 // 10}"
