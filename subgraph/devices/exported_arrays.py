"""Arrays in exported models: the interfaces by which devices and ops write and read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from subgraph.devices.blob import BlobReader, BlobWriter, integer
from subgraph.dtypes import NOT_RAW
from subgraph.errors import BlobError
from subgraph.graph.parameters import Parameter, Unchecked
from subgraph.graph.types import Array, dtype_of, numpy_dtype
from subgraph.weights.cache import WeightEntry

# An estimate. Equal arrays are found by copies of their bytes, which must not take much memory.
_SHARED_MAX_BYTES = 1 << 20  # arrays up to this size are stored once if regions have equal ones


def add_array(writer: BlobWriter, array: Array) -> dict[str, Any]:
    """Add an array to a file; return its dtype, shape and place as a table of the header."""
    place = writer.add(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
    return {"dtype": dtype_of(array), "shape": list(array.shape), "place": place}


def stored_array(reader: BlobReader, place: Any, dtype: str, shape: Sequence[int]) -> Unchecked:
    """Return an array of a file whose checksum is verified at the first read.

    Args:
        reader: The file.
        place: The array's place, as `BlobWriter.add` returned it.
        dtype: Dtype of the array.
        shape: Shape of the array.

    Raises:
        BlobError: the size differs from that of dtype and shape, or the place is outside the file.
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


class ArrayExporter:
    """The interface to a file being written that `SubgraphOp.to_export` gets."""

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
        if array.nbytes > _SHARED_MAX_BYTES:
            return add_array(self._writer, array)
        # Several regions may hold equal small arrays, such as the code of a kernel.
        content = (dtype_of(array), array.shape, array.tobytes())
        if content not in self._small:
            self._small[content] = add_array(self._writer, array)
        return self._small[content]

    def weight(self, entry: WeightEntry) -> Any:
        number = self._numbers.get(entry)
        if number is not None:
            return number
        made = entry.get()
        for parameter in entry.parameters:
            own = parameter.array
            # The entry may be the parameter's own memory, which the file has already.
            same = made.ctypes.data == own.ctypes.data and made.nbytes == own.nbytes
            if same and own.flags.c_contiguous and parameter in self._names:
                return self._names[parameter]
        # It is a slice of a parameter, or was computed from Constant nodes of the graph.
        return None if dtype_of(made) in NOT_RAW else self.array(made)


class ArrayImporter:
    """The interface to an imported file that `SubgraphOp.restore` gets.

    An argument ``stored`` is the result of `ArrayExporter.array` or `ArrayExporter.weight`: the
    name of a parameter, the number of a packed weight, or the table of an array.
    """

    def __init__(self, reader: BlobReader, parameters: Mapping[str, Parameter]) -> None:
        self._reader = reader
        self._parameters = parameters

    def array(self, stored: Any) -> Array:
        return self.unchecked(stored).read()

    def unchecked(self, stored: Any) -> Unchecked:
        if isinstance(stored, str):
            held = self._parameters[stored].published.held
            return held if isinstance(held, Unchecked) else Unchecked(held)
        table = self._packed(stored) if isinstance(stored, int) else stored
        return stored_array(self._reader, table["place"], table["dtype"], table["shape"])

    def sources(self, stored: Any) -> tuple[Parameter, ...]:
        if not isinstance(stored, int):
            return ()
        return tuple(self._parameters[name] for name in self._packed(stored)["parameters"])

    def _packed(self, number: int) -> dict[str, Any]:
        return cast("dict[str, Any]", self._reader.header["packed"][number])
