"""The file format of exported models: a checked header and a checked body.

Layout, little endian:

1. magic, format version, header length, body length, `digest` of the body;
2. the signature of 1 and the header (see `subgraph.system.signing`);
3. SHA-256 of 1, 2 and the header;
4. the header: JSON, padded with spaces so that the body is aligned;
5. the body: small sections, then the large ones (1 MiB or more). The first large section begins at
   a leaf, and offsets of large sections are relative to it;
6. the SHA-256 of each leaf (256 KiB) of the body, from which the digest is computed.

Every byte is covered by a hash, so damage is found before a byte is used. The signature covers the
header and the digest, so files of other users are recognised. The reader verifies the header and
the list of hashes when it opens the file, and each leaf of the body before it is first read.

A *place* is the entry of the header for a section: a table with its ``offset`` and ``size`` in
bytes.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import mmap
import os
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, TypeVar, cast

from subgraph.errors import BlobError, FileError, file_error
from subgraph.system.large_pages import ALIGN
from subgraph.system.signing import SIGNATURE_BYTES, is_own, signature
from subgraph.system.trusted_files import AtomicFiles, distrust, open_regular
from subgraph.weights.parallel import parallel_map

MAGIC = b"\x89SUBGRPH"
# Increase it when a field of the header, or the data that an op exports, is added or changes its
# meaning. Files of other formats are refused; those of the same format but of another version of
# the package are compiled again from their graph (`export`).
VERSION = 6
LARGE = 1 << 20  # bytes from which a section is large
_ALIGN_LARGE = 4096  # bytes; a page, so that large sections are mapped without neighbours
_FIXED = struct.Struct("<8sIIQQ32s")  # magic, version, reserved, header's and body's length, digest
_SIGNED = _FIXED.size + SIGNATURE_BYTES
PROLOGUE = _SIGNED + 32
# An estimate, like the other sizes and the number of threads below. The hashes are 1/8192 of a
# file, and a small section is checked with little beside it.
_LEAF = 1 << 18  # bytes that one hash covers
_HASH_BYTES = 32
_LARGE_AT = "large"  # key of the header: offset in the body of the first large section
_READ_BYTES = 1 << 22  # bytes of a stream read at a time
_LEAVES_PER_TASK = 4  # leaves that a thread hashes as one task: 1 MiB
_MAX_THREADS = 8
_MAX_HEADER_BYTES = 1 << 26  # a longer header is damage, found before memory is allocated

T = TypeVar("T")
Buffer = bytes | mmap.mmap | memoryview


def leaf_hashes(data: Any) -> bytes:
    """Return the concatenated SHA-256 of each 256 KiB of a buffer, computed by several threads."""
    view = memoryview(data).cast("B")
    count = _leaf_count(len(view))
    return b"".join(_in_threads(lambda leaves: _hashed(view, leaves), range(count)))


def digest(size: int, hashes: bytes | memoryview) -> bytes:
    """Return SHA-256 of the size of a buffer and its `leaf_hashes`."""
    state = hashlib.sha256(struct.pack("<QQ", size, _LEAF))
    state.update(hashes)
    return state.digest()


def _leaf_count(size: int) -> int:
    return -(-size // _LEAF)


def _hashed(view: memoryview, leaves: Sequence[int]) -> bytes:
    sha256 = hashlib.sha256
    return b"".join([sha256(view[k * _LEAF : (k + 1) * _LEAF]).digest() for k in leaves])


def _in_threads(do: Callable[[Sequence[int]], T], leaves: Sequence[int]) -> list[T]:
    """Return the results of ``do`` for consecutive runs of ``leaves``, computed by threads."""
    step = _LEAVES_PER_TASK
    runs = [leaves[begin : begin + step] for begin in range(0, len(leaves), step)]
    if len(runs) < 2:
        return list(map(do, runs))
    return parallel_map(do, runs, min(_MAX_THREADS, os.cpu_count() or 1, len(runs)))


class _Buffers:
    """Buffers of a body in order of their offsets."""

    def __init__(self) -> None:
        self.pieces: list[memoryview] = []
        self.size = 0

    def add(self, data: memoryview, align: int) -> int:
        """Append a buffer; return its offset, a multiple of ``align``."""
        gap = -self.size % align
        if gap:
            self.pieces.append(memoryview(bytes(gap)))
        self.pieces.append(data)
        begin = self.size + gap
        self.size = begin + len(data)
        return begin


class BlobWriter:
    """Collects the sections of a file, then writes it."""

    def __init__(self) -> None:
        """Start an empty file."""
        self._small = _Buffers()
        self._large = _Buffers()

    def add(self, data: Any) -> dict[str, int]:
        """Add a section; return its place."""
        view = memoryview(data).cast("B")
        if len(view) >= LARGE:
            return {"offset": self._large.add(view, _ALIGN_LARGE), "size": len(view)}
        return {"offset": self._small.add(view, ALIGN), "size": len(view)}

    def write(self, header: Mapping[str, Any], target: str | os.PathLike[str] | IO[bytes]) -> None:
        """Write the file to a path, atomically, or to a binary stream.

        Raises:
            BlobError: ``target`` is neither.
            FileError: the file cannot be written.
        """
        if not isinstance(target, (str, os.PathLike)) and not hasattr(target, "write"):
            raise BlobError(
                f"cannot export to a {type(target).__name__}; give a path or a binary stream"
            )
        if isinstance(target, io.TextIOBase):
            raise BlobError("the stream is open for text; open it for bytes ('wb')")
        if self._large.size:
            # Large sections begin with a leaf of their own, so that a check of the small ones reads
            # none of them.
            self._small.add(memoryview(b""), _LEAF)
        body = b"".join([*self._small.pieces, *self._large.pieces])
        text = json.dumps({**header, _LARGE_AT: self._small.size}, sort_keys=True).encode()
        # Spaces are valid in JSON. With them the body begins on a page, so that the alignment of
        # sections in the body is that in memory.
        text += b" " * (-(PROLOGUE + len(text)) % _ALIGN_LARGE)
        hashes = leaf_hashes(body)
        root = digest(len(body), hashes)
        fixed = _FIXED.pack(MAGIC, VERSION, 0, len(text), len(body), root)
        signed = fixed + signature(fixed, text)
        # The signature says who wrote the file, and is computed with a key. The checksum, which
        # everyone can verify, tells a damaged file from one of another user.
        checksum = hashlib.sha256(signed + text).digest()
        pieces = [signed, checksum, text, body, hashes]
        if isinstance(target, (str, os.PathLike)):
            try:
                write_atomically(target, pieces)
            except OSError as error:
                raise file_error("write", target, error) from error
        else:
            _write_all(target, pieces)


def _write_all(stream: IO[bytes], pieces: Iterable[bytes]) -> None:
    """Write pieces to a stream, of which a raw one (an unbuffered file) may take parts at a time.

    Raises:
        FileError: the stream is closed, open for reading, full, or does not wait.
    """
    waits = not isinstance(stream, io.RawIOBase)
    try:
        for piece in pieces:
            rest = piece
            while rest:
                count: Any = stream.write(rest)  # None if the object does not count bytes
                if count is None and waits:
                    break
                if not count:
                    raise BlockingIOError(errno.EAGAIN, "it took no bytes")
                rest = rest[count:]
    except (OSError, ValueError) as error:
        raise _stream_error("write", error) from error


def _stream_error(action: str, error: OSError | ValueError) -> FileError:
    """Return the error for a stream that is closed, full or not open to "read" or "write"."""
    unable = isinstance(error, io.UnsupportedOperation)
    why = f"it is not open to {action} bytes" if unable else error
    made = FileError(f"cannot {action} the stream: {why}")
    made.errno = getattr(error, "errno", None)
    return made


def write_atomically(path: str | os.PathLike[str], pieces: Iterable[bytes]) -> None:
    """Write a file under a temporary name and rename it when it is complete.

    A link stays a link.

    Args:
        path: The file.
        pieces: Its content, piece by piece.

    Raises:
        OSError: the file cannot be written, or is a device or pipe, which would be replaced.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file() and not target.is_dir():
        raise OSError(errno.EINVAL, "it is no regular file; open it and give the stream")
    with AtomicFiles() as files:
        stream = files.open(target)
        for piece in pieces:
            stream.write(piece)


class BlobReader:
    """An opened file with a checked header; each part of the body is checked before its first use.

    Attributes:
        name: Name of the file in messages.
        header: The header.
        own: Whether the file is signed by this user. Of any other file, only what is checked like
            a model may be used.
    """

    def __init__(self, source: str | os.PathLike[str] | IO[bytes] | memoryview) -> None:
        """Open a path, a binary stream, or a section of another file, and check the header.

        A stream is read to the end of the model, not further. A file that only this user or root
        can change is mapped; any other is read into memory, so that it cannot change after the
        check. The whole body is checked here if the file is not signed by this user.

        Raises:
            BlobError: the file is damaged or no exported model; the message says what is wrong.
            OSError: it cannot be read.
        """
        self.name = _name(source)
        data = source if isinstance(source, memoryview) else _opened(source, self.name)
        head, text = _checked_head(data, self.name)
        body_size, root = _FIXED.unpack_from(head)[-2:]
        start = PROLOGUE + len(text)
        self._body = memoryview(data)[start : start + body_size]
        self._hashes = memoryview(data)[start + body_size :]
        if digest(body_size, self._hashes) != root:
            raise BlobError(f"{self.name} is damaged: the checksum of its content does not fit")
        self._unchecked = bytearray(b"\1" * _leaf_count(body_size))
        self.own = is_own(head[_FIXED.size : _SIGNED], head[: _FIXED.size], text)
        if not self.own:
            self.check_body()
        self.header = _parsed(text, self.name)
        self._large_at = integer(self.header, _LARGE_AT)

    def part(self, place: Any) -> memoryview:
        """Return a view of the bytes of a section, checked.

        Raises:
            BlobError: the place is not inside the body, or the section is damaged.
        """
        found, leaves = self.unchecked(place)
        self.check(leaves)
        return found

    def unchecked(self, place: Any) -> tuple[memoryview, Sequence[int]]:
        """Return a view of the bytes of a section, and the leaves to `check` before they are read.

        Raises:
            BlobError: the place is not inside the body.
        """
        offset, size = integer(place, "offset"), integer(place, "size")
        # Large sections follow the small ones, whose total size was not known when the place was
        # made.
        if size >= LARGE:
            offset += self._large_at
        if offset < 0 or size < 0 or offset + size > len(self._body):
            raise BlobError(f"{self.name} is damaged: a part lies outside of the file")
        leaves = range(offset // _LEAF, _leaf_count(offset + size)) if size else range(0)
        return self._body[offset : offset + size], leaves

    def check_body(self, *, large: bool = True) -> None:
        """Check the body; without ``large``, only its small sections.

        Raises:
            BlobError: it is damaged.
        """
        end = len(self._unchecked)
        self.check(range(end if large else min(_leaf_count(max(self._large_at, 0)), end)))

    def check(self, leaves: Iterable[int]) -> None:
        """Check the leaves among these that were not checked before.

        Raises:
            BlobError: one is damaged.
        """
        # Two threads may check a leaf at once. Both find the same, so that no lock is needed.
        waiting = [leaf for leaf in dict.fromkeys(leaves) if self._unchecked[leaf]]
        if waiting:
            _in_threads(self._check_run, waiting)

    def _check_run(self, leaves: Sequence[int]) -> None:
        size = _HASH_BYTES
        stated = b"".join([self._hashes[k * size : (k + 1) * size] for k in leaves])
        if _hashed(self._body, leaves) != stated:
            raise BlobError(f"{self.name} is damaged: the checksum of its content does not fit")
        for leaf in leaves:
            self._unchecked[leaf] = 0


def integer(table: Any, key: str) -> int:
    """Return the integer at ``key`` of a table of the header.

    Raises:
        BlobError: ``table`` is no table or has no such integer.
    """
    found = cast("dict[str, Any]", table).get(key) if isinstance(table, dict) else None
    if not isinstance(found, int):
        raise BlobError(f"the header is damaged: {key!r} is no number")
    return found


def read_header(source: str | os.PathLike[str] | IO[bytes]) -> dict[str, Any]:
    """Return the checked header alone; a stream is set back to its position before.

    Raises:
        BlobError: the file is damaged or no exported model.
    """
    name = _name(source)
    if isinstance(source, (str, os.PathLike)):
        return _parsed(_checked_head(_opened(source, name), name)[1], name)
    if not hasattr(source, "seekable"):
        raise _no_source(source)
    try:
        position = source.tell() if source.seekable() else None
    except (OSError, ValueError) as error:
        raise _stream_error("read", error) from error
    if position is None:
        raise BlobError("say the device to import for: the stream cannot be read twice")
    try:
        head = _from_stream(source, name, whole=False)
        return _parsed(_checked_header(head, name)[1], name)
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
        try:
            piece = stream.read(min(count, _READ_BYTES))
        except (OSError, ValueError) as error:
            raise _stream_error("read", error) from error
        if not isinstance(piece, bytes):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise BlobError("the stream is open for text; open it for bytes ('rb')")
        if not piece:
            break
        pieces.append(piece)
        count -= len(piece)
    return b"".join(pieces)


def _from_stream(stream: IO[bytes], name: str, *, whole: bool = True) -> bytes:
    """Return the next model in a stream, or if not ``whole`` the bytes before its body."""
    if not hasattr(stream, "read"):
        raise _no_source(stream)
    head = _read(stream, PROLOGUE)
    header_size, rest = _sizes(head, name)
    return head + _read(stream, header_size + (rest if whole else 0))


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


def _sizes(head: bytes, name: str) -> tuple[int, int]:
    """Return the length of the header, and of body and hashes, from the bytes before the header."""
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
    if header_size > _MAX_HEADER_BYTES:
        raise BlobError(f"{name} is damaged: its header would have {header_size} bytes")
    return header_size, body_size + _leaf_count(body_size) * _HASH_BYTES


def _checked_head(data: Buffer, name: str) -> tuple[bytes, bytes]:
    """Return the bytes before the header, and the header's text, of a whole file."""
    size = PROLOGUE + sum(_sizes(bytes(data[:PROLOGUE]), name))
    # All lengths are compared before any of them is used to slice.
    if size != len(data):
        raise BlobError(f"{name} is damaged: it has {len(data)} bytes, its header states {size}")
    return _checked_header(data, name)


def _checked_header(data: Buffer, name: str) -> tuple[bytes, bytes]:
    """Return the bytes before the header, and the header's text, whose checksum is verified."""
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
    return cast("dict[str, Any]", header)
