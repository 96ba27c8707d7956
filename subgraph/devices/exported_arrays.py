"""Arrays in exported models: how they are written and read, by the framework and by ops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from subgraph.devices.blob import BlobReader, BlobWriter, integer
from subgraph.errors import BlobError
from subgraph.graph.parameters import Parameter, Unchecked
from subgraph.graph.types import dtype_of, numpy_dtype
from subgraph.weights.cache import WeightEntry

Array = np.ndarray[Any, Any]
_SHARED_BELOW = 1 << 20  # bytes up to which arrays of regions are looked for among each other
# Dtypes whose bytes in an array are not those of the file.
NOT_RAW = ("string", "int4", "uint4", "int2", "uint2", "float4_e2m1fn")


def added(writer: BlobWriter, array: Array) -> dict[str, Any]:
    """Add an array; return its type and place."""
    place = writer.add(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
    return {"dtype": dtype_of(array), "shape": list(array.shape), "place": place}


def unchecked_at(reader: BlobReader, place: Any, dtype: str, shape: Sequence[int]) -> Unchecked:
    """Return the array at a place of a file, to be checked when it is read.

    Raises:
        BlobError: it does not fit its place, or that is not inside of the file.
    """
    held = numpy_dtype(dtype)
    size = held.itemsize
    for dim in shape:
        size *= dim
    if integer(place, "size") != size or held.hasobject:
        raise BlobError(f"{reader.name} is damaged: a weight has another size than its type")
    part, leaves = reader.unchecked(place)
    array = np.frombuffer(part, np.uint8).view(held).reshape(tuple(shape))
    return Unchecked(array, reader, leaves)


class FileKeeper:
    """What the regions' ops see of a file that is being written."""

    def __init__(
        self,
        writer: BlobWriter,
        names: Mapping[Parameter, str],
        packed: Mapping[WeightEntry, dict[str, Any]],
    ) -> None:
        self._writer = writer
        self._names = names
        self._numbers = {entry: k for k, entry in enumerate(packed)}
        self._small: dict[tuple[str, tuple[int, ...], bytes], Any] = {}

    def array(self, array: Array) -> Any:
        if array.nbytes > _SHARED_BELOW:
            return added(self._writer, array)
        # Regions have small ones in common, such as the code of a kernel.
        content = (dtype_of(array), array.shape, array.tobytes())
        if content not in self._small:
            self._small[content] = added(self._writer, array)
        return self._small[content]

    def weight(self, entry: WeightEntry) -> Any:
        number = self._numbers.get(entry)
        if number is not None:
            return number
        made = entry.get()
        for parameter in entry.parameters:
            own = parameter.array
            same = made.ctypes.data == own.ctypes.data and made.nbytes == own.nbytes
            if same and own.flags.c_contiguous and parameter in self._names:
                return self._names[parameter]
        # A part of a parameter, or made of constants that the graph holds as nodes.
        return None if dtype_of(made) in NOT_RAW else self.array(made)


class FileOfOps:
    """What the regions' ops see of a file that is imported."""

    def __init__(self, reader: BlobReader, parameters: Mapping[str, Parameter]) -> None:
        self._reader = reader
        self._parameters = parameters

    def array(self, told: Any) -> Array:
        return self.unchecked(told).read()

    def unchecked(self, told: Any) -> Unchecked:
        if isinstance(told, str):
            held = self._parameters[told].published.held
            return held if isinstance(held, Unchecked) else Unchecked(held)
        place = self._packed(told) if isinstance(told, int) else told
        return unchecked_at(self._reader, place["place"], place["dtype"], place["shape"])

    def sources(self, told: Any) -> tuple[Parameter, ...]:
        if not isinstance(told, int):
            return ()
        return tuple(self._parameters[name] for name in self._packed(told)["parameters"])

    def _packed(self, number: int) -> dict[str, Any]:
        return cast(dict[str, Any], self._reader.header["packed"][number])
