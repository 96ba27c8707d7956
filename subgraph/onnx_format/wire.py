"""Removal of the bytes of large tensors from a serialized model before it is parsed.

`strip` walks a serialized ModelProto once and returns a small message for the onnx parser, in which
every large tensor has an entry of ``external_data`` with the number of its `Span` in the file.
Weights are therefore never copied, and files over protobuf's limit of 2 GB can be read.

Source: the protobuf encoding, https://protobuf.dev/programming-guides/encoding/.
"""

from __future__ import annotations

import mmap
from typing import NamedTuple

from subgraph.errors import ModelError

Buffer = mmap.mmap | bytes

# Tensors from this many bytes on are removed from the message. An estimate.
LARGE = 4096
# Protobuf's own limit on nested messages; damaged files might nest without end.
_MAX_DEPTH = 100

_MODEL, _GRAPH, _FUNCTION, _NODE, _ATTRIBUTE, _TENSOR = range(6)
# Fields that hold messages with tensors, by message and field number (onnx.proto).
_CHILDREN: dict[int, dict[int, int]] = {
    _MODEL: {7: _GRAPH, 25: _FUNCTION},
    _GRAPH: {1: _NODE, 5: _TENSOR},
    _FUNCTION: {7: _NODE, 11: _ATTRIBUTE},
    _NODE: {5: _ATTRIBUTE},
    _ATTRIBUTE: {5: _TENSOR, 6: _GRAPH, 10: _TENSOR, 11: _GRAPH},
}
RAW_DATA, FLOAT_DATA, DOUBLE_DATA = 9, 4, 10
# The other fields that hold a tensor's elements: string, int32, int64, uint64.
_OTHER_DATA = (5, 6, 7, 11)
_EXTERNAL_DATA = 13


class Span(NamedTuple):
    """The elements of a tensor in the file.

    Attributes:
        offset: Offset of the first byte.
        length: Number of bytes.
        field: Number of the field of TensorProto that holds them.
    """

    offset: int
    length: int
    field: int


def strip(buffer: Buffer, key: str) -> tuple[bytes, list[Span]]:
    """Return the model without the bytes of its large tensors, and the spans of these bytes.

    Args:
        buffer: The serialized model.
        key: Key of the external data entries, random so that no file can contain it.

    Raises:
        ModelError: the bytes are not in protobuf's wire form, or end too early.
    """
    stripper = _Stripper(buffer, key)
    pieces = stripper.message(0, len(buffer), _MODEL, 0)
    return (buffer[:] if pieces is None else b"".join(pieces)), stripper.spans


def varint(number: int) -> bytes:
    """Return a whole number >= 0 in protobuf's variable length form."""
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def delimited(field: int, length: int) -> bytes:
    """Return the tag and length that precede the ``length`` bytes of a field."""
    return varint(field << 3 | 2) + varint(length)


class _Stripper:
    """Walks a serialized model and collects the spans of its large tensors."""

    def __init__(self, buffer: Buffer, key: str) -> None:
        self._buffer = buffer
        self._key = key.encode()
        self.spans: list[Span] = []

    def _varint(self, position: int, end: int) -> tuple[int, int]:
        """Return the number of variable length at an offset, and the offset after it."""
        number = shift = 0
        # A number of 64 bits takes at most ten bytes of seven bits.
        while position < end and shift < 70:
            byte = self._buffer[position]
            position += 1
            number |= (byte & 0x7F) << shift
            if byte < 0x80:
                return number, position
            shift += 7
        raise _damaged(position)

    def message(self, begin: int, end: int, kind: int, depth: int) -> list[bytes] | None:
        """Return the stripped form of a message in pieces; None if nothing is removed from it.

        Args:
            begin: Offset of the message in the buffer.
            end: Offset of its end.
            kind: The message type, one of the constants above.
            depth: Number of messages around this one.
        """
        if depth > _MAX_DEPTH:
            raise ModelError(
                f"messages are nested more than {_MAX_DEPTH} deep; the file is damaged"
            )
        if kind == _TENSOR:
            return self._tensor(begin, end)
        children = _CHILDREN[kind]
        buffer = self._buffer
        pieces: list[bytes] = []
        copied = position = begin
        while position < end:
            start = position
            # Nearly all tags and lengths are below 128 and take one byte; they are read here
            # without a call.
            tag = buffer[position]
            position += 1
            if tag > 0x7F:
                tag, position = self._varint(start, end)
            if tag & 7 != 2:
                position = self._skip(tag & 7, position, end)
                continue
            body, position = self._delimited(position, end)
            child = children.get(tag >> 3)
            # A message that is shorter than a large tensor cannot contain one.
            if child is None or position - body < LARGE:
                continue
            inside = self.message(body, position, child, depth + 1)
            if inside is not None:
                head = delimited(tag >> 3, sum(map(len, inside)))
                pieces += [buffer[copied:start], head, *inside]
                copied = position
        return [*pieces, buffer[copied:end]] if pieces else None

    def _delimited(self, position: int, end: int) -> tuple[int, int]:
        """Return the offsets of the begin and end of a length-delimited field's bytes."""
        if position >= end:
            raise _damaged(position)
        size = self._buffer[position]
        position += 1
        if size > 0x7F:
            size, position = self._varint(position - 1, end)
        if position + size > end:
            raise _cut_short(position, size, end)
        return position, position + size

    def _skip(self, wire: int, position: int, end: int) -> int:
        """Return the offset after a field whose wire type is not length-delimited."""
        if wire == 0:
            return self._varint(position, end)[1]
        # ONNX has no groups (wire types 3 and 4). Adding the end makes these an error.
        position += {1: 8, 5: 4}.get(wire, end)
        if position > end:
            raise _damaged(position)
        return position

    def _tensor(self, begin: int, end: int) -> list[bytes] | None:
        """Replace the elements of a tensor by a reference, if they are large and in one field."""
        found: list[tuple[int, int, int, int]] = []
        position = begin
        while position < end:
            start = position
            tag, position = self._varint(position, end)
            if tag & 7 != 2:
                # A repeated field that is not packed has a tag before each element, so no span of
                # the file is the array.
                if tag >> 3 in (FLOAT_DATA, DOUBLE_DATA, *_OTHER_DATA):
                    return None
                position = self._skip(tag & 7, position, end)
                continue
            body, position = self._delimited(position, end)
            field = tag >> 3
            if field in (RAW_DATA, FLOAT_DATA, DOUBLE_DATA):
                found.append((start, body, position, field))
            elif field in _OTHER_DATA or field == _EXTERNAL_DATA:
                # Integers in these fields have variable length. Data in another file stay there.
                return None
        # Protobuf joins the parts of a packed field that occurs several times; they do not lie
        # together in the file.
        if len(found) != 1 or found[0][2] - found[0][1] < LARGE:
            return None
        start, body, stop, field = found[0]
        number = str(len(self.spans)).encode()
        self.spans.append(Span(body, stop - body, field))
        entry = delimited(1, len(self._key)) + self._key + delimited(2, len(number)) + number
        return [
            self._buffer[begin:start],
            delimited(_EXTERNAL_DATA, len(entry)) + entry,
            self._buffer[stop:end],
        ]


def _cut_short(position: int, size: int, end: int) -> ModelError:
    return ModelError(
        f"not an ONNX model, or truncated: of a part of {size} bytes that begins at byte "
        f"{position} only {end - position} are there; export or download it again"
    )


def _damaged(position: int) -> ModelError:
    return ModelError(
        f"not an ONNX model, or truncated: the wire form breaks off near byte {position}; export "
        "or download it again"
    )
