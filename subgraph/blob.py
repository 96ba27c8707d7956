"""The container of exported models: one file of a checked header and a checked body.

Layout, little endian: magic, format version, header length, body length, the signature of these and
the header (see `subgraph.own_files`), SHA-256 of all of that; then the header (JSON, padded with
spaces so that the body is aligned), then the body. Every byte is covered by a checksum, so a
damaged file is known before a model of it is handed out. The body is summed at memory speed: see
`digest`.
"""

from __future__ import annotations

import hashlib
import io
import json
import mmap
import os
import secrets
import struct
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, cast

import numpy as np

from subgraph.errors import BlobError, file_error
from subgraph.own_files import SIGNATURE_BYTES, is_own, signature
from subgraph.sharing import shared_out, start_threads
from subgraph.trusted_files import open_regular

MAGIC = b"\x89SUBGRPH"
VERSION = 3
ALIGN = 64
_LARGE, _ALIGN_LARGE = 1 << 20, 4096
_FIXED = struct.Struct("<8sIIQQ")  # magic, version, reserved, header length, body length
_SIGNED = _FIXED.size + SIGNATURE_BYTES
PROLOGUE = _SIGNED + 32
_SUMMED_AT_ONCE = 1 << 22
# Blocks of the checksum. The row length is a prime, so pieces of a disk's sectors that change
# places within a block come to other columns.
_ROWS, _COLUMNS = 64, 509  # words of 8 bytes
_BLOCK = 8 * _ROWS * _COLUMNS
_HEADER_LIMIT = 1 << 28

Buffer = bytes | mmap.mmap | memoryview


def digest(data: Any) -> str:
    """Return a checksum of a buffer, made at memory speed.

    The buffer is read once, as blocks of 64 rows of 509 words of 64 bits. The sums of all columns,
    modulo 2^64, of each block give a table whose row and column sums go through BLAKE2, as does
    what fills no block. Any change of one word changes a sum, and so does any exchange of words,
    sectors, pages or blocks; what lies whole rows (4072 bytes) apart in one block is the exception.
    It finds damage; it does not defend against forgery.
    """
    octets: np.ndarray[Any, Any] = np.frombuffer(data, np.uint8)
    whole = octets.size - octets.size % _BLOCK
    blocks = octets[:whole].view(np.uint64).reshape(-1, _ROWS, _COLUMNS)
    state = hashlib.blake2b(digest_size=16)
    state.update(struct.pack("<Q", octets.size))
    step = 64  # 16 MB at a time
    parts = [blocks[begin : begin + step] for begin in range(0, len(blocks), step)]
    for sums in _of_all(parts):
        state.update(sums)
    state.update(octets[whole:].tobytes())
    return state.hexdigest()


def _of_all(parts: list[np.ndarray[Any, Any]]) -> Iterable[bytes]:
    return shared_out(_sums, parts, min(4, os.cpu_count() or 1, len(parts)))


def _sums(blocks: np.ndarray[Any, Any]) -> bytes:
    columns = np.add.reduce(blocks, axis=1)
    sums: list[np.ndarray[Any, Any]] = [np.add.reduce(columns, axis=axis) for axis in (1, 0)]
    return b"".join(array.tobytes() for array in sums)


class BlobWriter:
    """Collects the parts of a file, then writes it."""

    def __init__(self) -> None:
        """Start an empty file."""
        self._parts: list[memoryview] = []
        self._size = 0

    def add(self, data: Any) -> dict[str, int]:
        """Add a part; return where it lies in the body."""
        view = memoryview(data).cast("B")
        align = _ALIGN_LARGE if len(view) >= _LARGE else ALIGN
        gap = -self._size % align
        if gap:
            self._parts.append(memoryview(bytes(gap)))
        place = {"offset": self._size + gap, "size": len(view)}
        self._parts.append(view)
        self._size += gap + len(view)
        return place

    def write(self, header: Mapping[str, Any], target: str | os.PathLike[str] | IO[bytes]) -> None:
        """Write the file to a path, whole or not at all, or to a binary stream.

        Raises:
            FileError: it cannot be written.
        """
        if not isinstance(target, (str, os.PathLike)) and not hasattr(target, "write"):
            raise BlobError(
                f"cannot export to a {type(target).__name__}; give a path or a binary stream"
            )
        if isinstance(target, io.TextIOBase):
            raise BlobError("the stream is open for text; open it for bytes ('wb')")
        body = b"".join(self._parts)
        full = {**header, "body": {"size": len(body), "digest": digest(body)}}
        text = json.dumps(full, sort_keys=True).encode()
        text += b" " * (-(PROLOGUE + len(text)) % _ALIGN_LARGE)
        fixed = _FIXED.pack(MAGIC, VERSION, 0, len(text), len(body))
        signed = fixed + signature(fixed, text)
        checksum = hashlib.sha256(signed + text).digest()
        pieces = [signed, checksum, text, body]
        if isinstance(target, (str, os.PathLike)):
            try:
                write_atomically(target, pieces)
            except OSError as error:
                raise file_error("write", target, error) from error
        else:
            for piece in pieces:
                target.write(piece)


def write_atomically(path: str | os.PathLike[str], pieces: Iterable[bytes]) -> None:
    """Write a file under another name and rename it when it is complete."""
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(6)}.tmp")
    try:
        with open(temporary, "xb") as stream:
            for piece in pieces:
                stream.write(piece)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, target)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


class BlobReader:
    """An opened and checked file."""

    def __init__(
        self, source: str | os.PathLike[str] | IO[bytes] | memoryview, *, later: bool = False
    ) -> None:
        """Open a path (its body is mapped), read a binary stream or take a part of a file.

        Args:
            source: A part is not checked: its file is.
            later: Whether the body of a large file is checked meanwhile, to be waited for by
                `check`; nothing that is made of it may be handed out before.

        Raises:
            BlobError: the file is damaged or no exported model; what does not fit.
            OSError: it cannot be read.
        """
        self.name = _name(source)
        data = source if isinstance(source, memoryview) else _opened(source)
        self.header, start, size = _checked_header(data, self.name)
        self._prologue = bytes(data[:start])
        self._body = memoryview(data)[start : start + size]
        self._fits = isinstance(source, memoryview)
        self._summing: threading.Thread | None = None
        if self._fits:
            return
        summing = threading.Thread(target=self._sum, name="subgraph-sum", daemon=True)
        if later and size > _SUMMED_AT_ONCE and start_threads([summing]):
            self._summing = summing
        else:
            self._sum()
            self.check()

    def _sum(self) -> None:
        told = self.header.get("body")
        expected = cast(dict[str, Any], told) if isinstance(told, dict) else {}
        size = len(self._body)
        self._fits = expected.get("size") == size and expected.get("digest") == digest(self._body)

    def check(self) -> None:
        """Wait until every byte is checked.

        Raises:
            BlobError: the body is damaged.
        """
        if self._summing is not None:
            self._summing.join()
            self._summing = None
        if not self._fits:
            raise BlobError(f"{self.name} is damaged: the checksum of its content does not fit")

    @property
    def own(self) -> bool:
        """Whether this user's own processes have written the header as it is."""
        told = self._prologue[_FIXED.size : _SIGNED]
        return is_own(told, self._prologue[: _FIXED.size], self._prologue[PROLOGUE:])

    def part(self, place: Any) -> memoryview:
        """Return the bytes of a part; no copy.

        Raises:
            BlobError: the place is not inside the body.
        """
        offset, size = integer(place, "offset"), integer(place, "size")
        if offset < 0 or size < 0 or offset + size > len(self._body):
            raise BlobError(f"{self.name} is damaged: a part lies outside of the file")
        return self._body[offset : offset + size]


def integer(table: Any, key: str) -> int:
    """Return an integer entry of a table of the header.

    Raises:
        BlobError: it is none.
    """
    found = cast(dict[str, Any], table).get(key) if isinstance(table, dict) else None
    if not isinstance(found, int):
        raise BlobError(f"the header is damaged: {key!r} is no number")
    return found


def read_header(source: str | os.PathLike[str] | IO[bytes]) -> dict[str, Any]:
    """Return the checked header alone; a stream is put back to where it was.

    Raises:
        BlobError: the file is damaged or no exported model.
    """
    if isinstance(source, (str, os.PathLike)):
        return _checked_header(_opened(source), _name(source))[0]
    if not hasattr(source, "seekable"):
        raise _no_source(source)
    if not source.seekable():
        raise BlobError("say the device to import for: the stream cannot be read twice")
    position = source.tell()
    try:
        return _checked_header(_opened(source), _name(source))[0]
    finally:
        source.seek(position)


def _name(source: Any) -> str:
    if isinstance(source, (str, os.PathLike)):
        return repr(os.fspath(cast("str | os.PathLike[str]", source)))
    name = getattr(source, "name", None)
    return repr(name) if isinstance(name, str) else "the stream"


def _no_source(source: Any) -> BlobError:
    kind = type(source).__name__
    return BlobError(f"cannot import a {kind}; give a path, bytes or a binary stream")


def _opened(source: str | os.PathLike[str] | IO[bytes]) -> bytes | mmap.mmap:
    if not isinstance(source, (str, os.PathLike)):
        if not hasattr(source, "read"):
            raise _no_source(source)
        data = source.read()
        if not isinstance(data, bytes):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise BlobError("the stream is open for text; open it for bytes ('rb')")
        return data
    try:
        with open_regular(source) as file:
            if os.fstat(file.fileno()).st_size == 0:
                return b""
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise file_error("read", source, error) from error


def _checked_header(data: Buffer, name: str) -> tuple[dict[str, Any], int, int]:
    """Return the header, and where the body begins and how long it is."""
    if len(data) < PROLOGUE or data[: len(MAGIC)] != MAGIC:
        raise BlobError(
            f"{name} is no exported model of Subgraph, or its beginning is damaged; "
            "an ONNX model goes to compile_model"
        )
    fixed = bytes(data[: _FIXED.size])
    _, version, reserved, header_size, body_size = _FIXED.unpack(fixed)
    if version != VERSION or reserved:
        raise BlobError(
            f"{name} has format {version}.{reserved}, this version reads {VERSION}.0; "
            "export the model anew"
        )
    start = PROLOGUE + header_size
    if header_size > _HEADER_LIMIT or start + body_size != len(data):
        raise BlobError(
            f"{name} is damaged: it has {len(data)} bytes, its header states {start + body_size}"
        )
    text = bytes(data[PROLOGUE:start])
    if hashlib.sha256(bytes(data[:_SIGNED]) + text).digest() != data[_SIGNED:PROLOGUE]:
        raise BlobError(f"{name} is damaged: the checksum of its header does not fit")
    try:
        header = json.loads(text)
    except ValueError as error:
        raise BlobError(f"{name} is damaged: its header cannot be read: {error}") from error
    if not isinstance(header, dict):
        raise BlobError(f"{name} is damaged: its header is no table")
    return cast(dict[str, Any], header), start, body_size
