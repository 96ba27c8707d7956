"""The container of exported models: one file of a checked header and a checked body.

Layout, little endian: magic, format version, header length, body length; the `digest` of the body;
the signature of these and the header (see `subgraph.system.signing`); SHA-256 of all of that and
the header; then the header (JSON, padded with spaces so that the body is aligned), then the body.
Every byte is covered by a hash, so a damaged file is known before anything of it is used, and by
the signature, so that a file which this user has not written is known, too.
"""

from __future__ import annotations

import hashlib
import io
import json
import mmap
import os
import secrets
import struct
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, cast

from subgraph.errors import BlobError, file_error
from subgraph.system.signing import SIGNATURE_BYTES, is_own, signature
from subgraph.system.trusted_files import distrust, open_regular
from subgraph.weights.sharing import shared_out

MAGIC = b"\x89SUBGRPH"
VERSION = 4
ALIGN = 64
_LARGE, _ALIGN_LARGE = 1 << 20, 4096
_FIXED = struct.Struct("<8sIIQQ32s")  # magic, version, reserved, header's and body's length, digest
_SIGNED = _FIXED.size + SIGNATURE_BYTES
PROLOGUE = _SIGNED + 32
_PIECE = 1 << 22  # bytes hashed at a time
_MOST_WORKERS = 8
_HEADER_LIMIT = 1 << 26

Buffer = bytes | mmap.mmap | memoryview


def digest(data: Any) -> bytes:
    """Return SHA-256 of the size of a buffer and the SHA-256 of each 4 MiB of it.

    The pieces are hashed by several threads.
    """
    view = memoryview(data).cast("B")
    pieces = [view[begin : begin + _PIECE] for begin in range(0, len(view), _PIECE)]
    state = hashlib.sha256(struct.pack("<QQ", len(view), _PIECE))
    workers = min(_MOST_WORKERS, os.cpu_count() or 1, len(pieces))
    state.update(b"".join(shared_out(_hash, pieces, workers)))
    return state.digest()


def _hash(piece: memoryview) -> bytes:
    return hashlib.sha256(piece).digest()


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
        text = json.dumps(header, sort_keys=True).encode()
        text += b" " * (-(PROLOGUE + len(text)) % _ALIGN_LARGE)
        fixed = _FIXED.pack(MAGIC, VERSION, 0, len(text), len(body), digest(body))
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
    """An opened and checked file.

    Attributes:
        name: What messages call it.
        header: The header.
        own: Whether this user has written it as it is; nothing of any other file may be used
            that is not checked like a model.
    """

    def __init__(self, source: str | os.PathLike[str] | IO[bytes] | memoryview) -> None:
        """Open a path, read a binary stream or take a part of a file, and check every byte.

        Of a stream only the model is read; what follows it stays for whoever reads on.
        A file that only this user or root can change is mapped; any other is read into memory, so
        that it stays as it was checked.

        Raises:
            BlobError: the file is damaged or no exported model; what does not fit.
            OSError: it cannot be read.
        """
        self.name = _name(source)
        data = source if isinstance(source, memoryview) else _opened(source, self.name)
        head, text = _checked_head(data, self.name)
        self._body = memoryview(data)[PROLOGUE + len(text) :]
        body_digest: bytes = _FIXED.unpack_from(head)[-1]
        if digest(self._body) != body_digest:
            raise BlobError(f"{self.name} is damaged: the checksum of its content does not fit")
        self.own = is_own(head[_FIXED.size : _SIGNED], head[: _FIXED.size], text)
        self.header = _parsed(text, self.name)

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
        return _read_header(source)
    if not hasattr(source, "seekable"):
        raise _no_source(source)
    if not source.seekable():
        raise BlobError("say the device to import for: the stream cannot be read twice")
    position = source.tell()
    try:
        return _read_header(source)
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


def _read(stream: IO[bytes], count: int) -> bytes:
    """Return the next bytes of a stream, fewer only where it ends."""
    pieces: list[bytes] = []
    while count > 0:
        piece = stream.read(min(count, _PIECE))
        if not isinstance(piece, bytes):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise BlobError("the stream is open for text; open it for bytes ('rb')")
        if not piece:
            break
        pieces.append(piece)
        count -= len(piece)
    return b"".join(pieces)


def _from_stream(stream: IO[bytes], name: str, *, whole: bool = True) -> bytes:
    """Return the model that a stream holds next, or only what stands before its body."""
    if not hasattr(stream, "read"):
        raise _no_source(stream)
    head = _read(stream, PROLOGUE)
    header_size, body_size = _sizes(head, name)
    return head + _read(stream, header_size + (body_size if whole else 0))


def _opened(source: str | os.PathLike[str] | IO[bytes], name: str) -> bytes | mmap.mmap:
    if not isinstance(source, (str, os.PathLike)):
        return _from_stream(source, name)
    try:
        with open_regular(source) as file:
            status = os.fstat(file.fileno())
            if status.st_size == 0 or distrust(status, source) is not None:
                return file.read()
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise file_error("read", source, error) from error


def _read_header(source: str | os.PathLike[str] | IO[bytes]) -> dict[str, Any]:
    name = _name(source)
    if isinstance(source, (str, os.PathLike)):
        text = _checked_head(_opened(source, name), name)[1]
    else:
        text = _checked_header(_from_stream(source, name, whole=False), name)[1]
    return _parsed(text, name)


def _sizes(head: bytes, name: str) -> tuple[int, int]:
    """Return the lengths of header and body, of what stands before the header."""
    if len(head) < PROLOGUE or not head.startswith(MAGIC):
        raise BlobError(
            f"{name} is no exported model of Subgraph, or its beginning is damaged; "
            "an ONNX model goes to compile_model"
        )
    _, version, reserved, header_size, body_size, _ = _FIXED.unpack_from(head)
    if version != VERSION or reserved:
        raise BlobError(
            f"{name} has format {version}.{reserved}, this version reads {VERSION}.0; "
            "export the model anew"
        )
    if header_size > _HEADER_LIMIT:
        raise BlobError(f"{name} is damaged: its header would have {header_size} bytes")
    return header_size, body_size


def _checked_head(data: Buffer, name: str) -> tuple[bytes, bytes]:
    """Return what stands before the header, and the header's text, of a whole file."""
    size = PROLOGUE + sum(_sizes(bytes(data[:PROLOGUE]), name))
    if size != len(data):
        raise BlobError(f"{name} is damaged: it has {len(data)} bytes, its header states {size}")
    return _checked_header(data, name)


def _checked_header(data: Buffer, name: str) -> tuple[bytes, bytes]:
    """Return what stands before the header, and the header's text, if its checksum fits."""
    head = bytes(data[:PROLOGUE])
    text = bytes(data[PROLOGUE : PROLOGUE + _sizes(head, name)[0]])
    if hashlib.sha256(head[:_SIGNED] + text).digest() != head[_SIGNED:]:
        raise BlobError(f"{name} is damaged: the checksum of its header does not fit")
    return head, text


def _parsed(text: bytes, name: str) -> dict[str, Any]:
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BlobError(f"{name} is damaged: its header cannot be read: {error}") from error
    if not isinstance(header, dict):
        raise BlobError(f"{name} is damaged: its header is no table")
    return cast(dict[str, Any], header)
