"""Arrays of the tensors of ONNX files, mapped from the model's file or external data files.

Used by the ONNX reader. Sizes that a file states are checked against the bytes that it has before
memory is allocated, and no file outside the model's folder is opened.
"""

from __future__ import annotations

import math
import mmap
import os
import sys
from collections.abc import Sequence
from pathlib import Path, PurePosixPath, PureWindowsPath

import attrs
import numpy as np

from subgraph.dtypes import DTYPES, NOT_RAW
from subgraph.errors import ModelError, file_error
from subgraph.graph.limits import check_memory, memory_limit
from subgraph.graph.parameters import Unchecked
from subgraph.graph.types import Array, numpy_dtype
from subgraph.onnx_format.wire import DOUBLE_DATA, FLOAT_DATA, Buffer, Span
from subgraph.operators.messages import TensorProto
from subgraph.operators.protobuf import dtype_from_number, tensor_from_proto
from subgraph.system.trusted_files import distrust, open_regular

# Smaller tensors are copied if their offset is not aligned for their dtype; larger ones stay
# unaligned views, because a copy would cost more. An estimate.
_COPY_MAX_BYTES = 1 << 16
_DENSE_MAX_BYTES = 1 << 31  # of a sparse tensor: ONNX's limit for dense ones


def map_file(path: str | os.PathLike[str], *, inside: Path | None = None) -> Buffer:
    """Map a regular file for reading, or read it if other users can change or shorten it later.

    Args:
        path: The file.
        inside: Folder that must contain the file; links, also hard links, are refused then.

    Raises:
        ModelError: the file does not exist, cannot be read, is empty, no regular file or a link.
    """
    shown = repr(os.fspath(path))
    try:
        with open_regular(path, follow=inside is None, inside=inside) as file:
            status = os.fstat(file.fileno())
            if inside is not None and status.st_nlink > 1:
                raise ModelError(
                    f"{shown} has {status.st_nlink} hard links, so it may be a file outside the "
                    "model's folder; nothing outside it is read: put a copy in its place"
                )
            if status.st_size == 0:
                raise ModelError(f"{shown} is empty")
            if distrust(status, path) is not None:
                check_memory(status.st_size, f"{shown}, which other users can change,")
                return file.read()
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise file_error("read", path, error) from error


@attrs.define(eq=False, slots=False)
class TensorReader:
    """Reads the arrays of the tensors of one model.

    Attributes:
        folder: Folder of external data; None refuses external data.
        buffer: The serialized model.
        key: Key of the external data entries that `strip` made.
        spans: Bytes of the tensors that `strip` took out of the message.
        mapped: Whether arrays are views of mapped files; False copies them.
    """

    _folder: Path | None = None
    _buffer: Buffer = attrs.field(default=b"", alias="buffer", kw_only=True)
    _key: str = attrs.field(default="", alias="key", kw_only=True)
    _spans: Sequence[Span] = attrs.field(default=(), alias="spans", kw_only=True)
    _mapped: bool = attrs.field(default=True, alias="mapped", kw_only=True)
    _files: dict[Path, Buffer] = attrs.field(init=False, factory=dict[Path, Buffer])
    _counted_bytes: int = attrs.field(init=False, default=0)

    def _counted(self, array: Array) -> Array:
        """Count an array that is no view of a file against the memory budget; return it."""
        self._count(array.nbytes)
        return array

    def _count(self, count: int) -> None:
        # A tensor of a function is read for each call, so a small file may need much memory.
        self._counted_bytes += count
        if self._counted_bytes > memory_limit():
            check_memory(self._counted_bytes, "what the model's tensors take beside the file")

    def array(self, proto: TensorProto) -> Array:
        """Return the read-only array of a tensor.

        Raises:
            ModelError: dims, dtype and data do not fit, or the external file is not allowed,
                missing or too short.
        """
        dtype = dtype_from_number(proto.data_type)
        shape = tuple(proto.dims)
        if any(dim < 0 for dim in shape):
            raise _damaged(proto, f"dims {shape[:8]} are negative")
        if self._key and len(proto.external_data) == 1:
            entry = proto.external_data[0]
            if entry.key == self._key:
                return self._stripped(proto, dtype, shape, self._spans[int(entry.value)])
        if proto.data_location == TensorProto.EXTERNAL:
            return self._external(proto, dtype, shape)
        return self._counted(tensor_from_proto(proto))

    def weight(self, proto: TensorProto) -> Array | Unchecked:
        """Return the array of an initializer; a subclass may return one checked at first read.

        Raises:
            ModelError: see `array`.
        """
        return self.array(proto)

    def _stripped(
        self, proto: TensorProto, dtype: str, shape: tuple[int, ...], span: Span
    ) -> Array:
        allowed = {FLOAT_DATA: ("float32", "complex64"), DOUBLE_DATA: ("float64", "complex128")}
        if dtype not in allowed.get(span.field, (dtype,)):
            raise _damaged(proto, f"its data stand in the field of another dtype than {dtype}")
        return self._view(proto, dtype, shape, self._buffer, span.offset, span.length)

    def _external(self, proto: TensorProto, dtype: str, shape: tuple[int, ...]) -> Array:
        entries = {entry.key: entry.value for entry in proto.external_data}
        folder, path = self._allowed(proto, entries.get("location", ""))
        try:
            offset = int(entries.get("offset") or 0)
            length = int(entries["length"]) if "length" in entries else None
        except ValueError as error:
            raise _damaged(proto, f"offset or length of its external data: {error}") from error
        # An empty tensor has no bytes to map; its file may be missing or empty.
        if math.prod(shape) == 0:
            return _read_only(np.empty(shape, numpy_dtype(dtype)))
        file = self._files.get(path)
        if file is None:
            try:
                file = self._files[path] = map_file(path, inside=folder)
            except ModelError as error:
                raise ModelError(f"tensor {proto.name!r}: {error}") from error
        if length is None:
            # ONNX: the length of external data is optional.
            length = _stored_bytes(dtype, shape)
        if offset < 0 or length < 0 or offset + length > len(file):
            raise _damaged(
                proto,
                f"its data are bytes {offset} to {offset + length} of {str(path)!r}, "
                f"which has {len(file)}",
            )
        return self._view(proto, dtype, shape, file, offset, length)

    def _allowed(self, proto: TensorProto, location: str) -> tuple[Path, Path]:
        """Return the model's folder, and the file of ``location``, which must lie in it."""
        if self._folder is None:
            raise ModelError(
                f"tensor {proto.name!r} is in the external file {location!r}, but the model did "
                "not come from a file; load it by its path, or give folder="
            )
        # A model of an untrusted source must not read other files of the user as weights. Windows'
        # separators and drives count on every system, so that a model is valid on all or on none.
        plain = PurePosixPath(location.replace("\\", "/"))
        outside = (
            not location
            or "\0" in location
            or plain.is_absolute()
            or bool(PureWindowsPath(location).drive)
            or ".." in plain.parts
        )
        folder = Path(os.path.realpath(self._folder))
        path = folder if outside else Path(os.path.realpath(folder / plain))
        if outside or not path.is_relative_to(folder) or path == folder:
            raise ModelError(
                f"tensor {proto.name!r}: external data {location!r} is not a file inside the "
                f"model's folder {str(folder)!r}; nothing outside it is read: put the file itself "
                "there, no link to it"
            )
        return folder, path

    def _view(
        self,
        proto: TensorProto,
        dtype: str,
        shape: tuple[int, ...],
        buffer: Buffer | memoryview,
        offset: int,
        length: int,
    ) -> Array:
        if dtype == "string" or length != _stored_bytes(dtype, shape):
            raise _damaged(
                proto, f"{dtype} of dims {shape[:8]} does not fit into {length} bytes of data"
            )
        # Packed elements have to be unpacked, and on a big-endian machine bytes to be swapped; the
        # onnx package does both.
        if dtype in NOT_RAW or dtype == "bool" or sys.byteorder == "big":
            self._count(math.prod(shape))
            return _decode(proto, buffer[offset : offset + length])
        storage = numpy_dtype(dtype)
        array: Array = np.frombuffer(buffer, np.uint8, length, offset)
        misaligned = offset % storage.alignment != 0
        if not self._mapped or (misaligned and length < _COPY_MAX_BYTES):
            array = self._counted(array.copy())
        return _read_only(array.view(storage).reshape(shape))

    def dense(self, values: TensorProto, indices: TensorProto, dims: Sequence[int]) -> Array:
        """Return the dense array of a sparse tensor.

        Args:
            values: The values that are not zero, of shape [n].
            indices: int64 indices of shape [n] into the flattened array, or [n, rank].
            dims: Shape of the dense array.

        Raises:
            ModelError: indices are out of range, or the dense array would be over 2 GB.
        """
        data, where, shape = self.array(values), self.array(indices), tuple(dims)
        # A few bytes of indices can state any dense size, so the size is checked before memory is
        # taken.
        if any(dim < 0 for dim in shape) or math.prod(shape) * data.itemsize > _DENSE_MAX_BYTES:
            raise _damaged(values, f"its dense dims {shape[:8]} are negative or over 2 GB")
        if data.ndim != 1 or where.dtype != np.int64 or not shape:
            raise _damaged(values, "a sparse tensor has a list of values and int64 indices")
        if where.shape == (data.size, len(shape)):
            if where.size and ((where < 0) | (where >= np.array(shape))).any():
                raise _damaged(values, f"its indices are outside of dims {shape[:8]}")
            flat = np.ravel_multi_index(tuple(where.T), shape) if where.size else where[:, 0]
        elif where.shape == (data.size,):
            flat = where
        else:
            raise _damaged(values, f"it has {data.size} values and indices of {where.shape}")
        total = math.prod(shape)
        self._count(total * data.itemsize)
        if flat.size and (flat.min() < 0 or flat.max() >= total):
            raise _damaged(values, f"its indices are outside of dims {shape[:8]}")
        if data.dtype == object:
            array: Array = np.full(total, "", dtype=object)
        else:
            array = np.zeros(total, dtype=data.dtype)
        array[flat] = data
        return _read_only(array.reshape(shape))


def _stored_bytes(dtype: str, shape: Sequence[int]) -> int:
    """Return the bytes of a tensor's raw data, in which 4-bit and 2-bit elements are packed."""
    return -(-math.prod(shape) * DTYPES[dtype].bits // 8)


def _decode(proto: TensorProto, raw: bytes | memoryview) -> Array:
    inline = TensorProto(
        name=proto.name, data_type=proto.data_type, dims=proto.dims, raw_data=bytes(raw)
    )
    return tensor_from_proto(inline)


def _read_only(array: Array) -> Array:
    array.flags.writeable = False
    return array


def _damaged(proto: TensorProto, why: str) -> ModelError:
    return ModelError(f"tensor {proto.name!r} is damaged: {why}")
