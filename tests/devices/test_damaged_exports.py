"""Import of files that are damaged, inconsistent or no exported models; the checksum of a file."""

from __future__ import annotations

import io
import json
import os
import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import subgraph as sg
from subgraph.devices.blob import MAGIC, PROLOGUE, BlobWriter, digest, leaf_hashes
from tests.support.small_network import exported, net, same


@pytest.fixture
def core() -> sg.Core:
    return sg.Core()


def damaged(blob: bytes, rng: random.Random) -> bytes:
    data = bytearray(blob)
    kind = rng.randrange(6)
    if kind == 0:
        for _ in range(rng.choice([1, 1, 4])):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif kind == 1:
        del data[rng.randrange(len(data)) :]
    elif kind == 2:
        data += bytes(rng.randrange(1, 100))
    elif kind == 3:
        begin = rng.randrange(len(data))
        data[begin : begin + 64] = bytes(reversed(data[begin : begin + 64])) or b"x"
    elif kind == 4:
        offset, size = rng.choice([(8, 4), (12, 4), (16, 8), (24, 8)])
        data[offset : offset + size] = rng.randrange(1 << 8 * size).to_bytes(size, "little")
    else:
        begin = rng.randrange(len(data))
        data[begin : begin + rng.randrange(1, 4096)] = bytes(rng.randrange(1, 4096))
    return bytes(data)


def test_a_thousand_damaged_files_are_a_thousand_clean_errors(core: sg.Core) -> None:
    blob = exported(core.compile_model(net(), "REFERENCE"))
    rng = random.Random(7)
    tried = 0
    while tried < 1000:
        data = damaged(blob, rng)
        if data == blob:
            continue
        tried += 1
        with pytest.raises(sg.BlobError):
            core.import_model(data, "REFERENCE")
        with pytest.raises(sg.BlobError):
            core.import_model(data)


def inconsistent_headers() -> list[Any]:
    def drop(key: str) -> Any:
        return lambda h: h.pop(key)

    def put(key: str, value: Any) -> Any:
        return lambda h: h.__setitem__(key, value)

    def offset(h: Any) -> None:
        next(iter(h["weights"].values()))["offset"] = 1 << 40

    def size(h: Any) -> None:
        next(iter(h["weights"].values()))["size"] = 12

    def no_weight(h: Any) -> None:
        h["weights"].clear()

    values = [None, 5, "x", [], {}, -1, 1e400]
    changes = [put(k, v) for k in ("weights", "model", "options", "capability") for v in values]
    changes += [drop(k) for k in ("weights", "model", "options", "capability", "configs")]
    changes += [offset, size, no_weight, put("byteorder", "odd"), put("device", 3)]
    changes += [put("model", {"offset": 0, "size": 100}), put("packed", [{"recipe": 3}])]
    changes += [put("options", {"SPEED": 1}), put("defaults", 3), put("defaults", {"a": "w"})]
    return changes


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("number", range(len(inconsistent_headers())))
def test_inconsistent_headers_with_right_checksums(
    core: sg.Core, number: int, own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    blob = exported(core.compile_model(net(), "REFERENCE"))
    size, body_size = struct.unpack_from("<QQ", blob, 16)
    start = PROLOGUE + size
    header = json.loads(blob[PROLOGUE:start])
    inconsistent_headers()[number](header)
    writer = BlobWriter()
    writer.add(blob[start : start + body_size])
    stream = io.BytesIO()
    if not own:
        monkeypatch.setattr("subgraph.devices.blob.signature", lambda *_: bytes(32))
    writer.write(header, stream)
    stream.seek(0)
    try:
        model = core.import_model(stream, "REFERENCE")
    except (sg.BlobError, sg.ConfigError):
        return
    same(model, core.compile_model(net(), "REFERENCE"))  # what was changed did not matter


@pytest.mark.parametrize("data", [b"", b"abc", MAGIC, MAGIC + bytes(100), b"PK\x03\x04" * 50])
def test_files_that_are_something_else(core: sg.Core, tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "x"
    path.write_bytes(data)
    for source in (path, io.BytesIO(data)):
        with pytest.raises(sg.BlobError):
            core.import_model(source)
    for device_name in ("", "REFERENCE"):
        with pytest.raises(sg.MissingFileError, match=r"cannot read .*missing': No such file") as e:
            core.import_model(tmp_path / "missing", device_name)
        assert isinstance(e.value, sg.BlobError)
        assert isinstance(e.value, FileNotFoundError)
    with pytest.raises(sg.BlobError, match=r"not a regular file|cannot read"):
        core.import_model(tmp_path)
    with pytest.raises(sg.BlobError, match="cannot import a int"):
        core.import_model(3, "REFERENCE")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    with pytest.raises(sg.BlobError, match="open for text"):
        core.import_model(io.StringIO("text"), "REFERENCE")  # type: ignore[arg-type]


class Raw(io.RawIOBase):
    """A raw stream that takes and gives a few bytes at a time."""

    def __init__(self, content: bytes = b"", most: int | None = 1000) -> None:
        self.content = bytearray(content)
        self.most = most
        self.position = 0

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def write(self, piece: Any) -> int | None:
        if self.most is not None:
            self.content += bytes(piece[: self.most])
        return self.most and min(self.most, len(piece))

    def readinto(self, target: Any) -> int:
        piece = self.content[self.position : self.position + min(len(target), 1000)]
        target[: len(piece)] = piece
        self.position += len(piece)
        return len(piece)


def test_raw_streams_take_parts() -> None:
    model = sg.compile_model(net(), "REFERENCE")
    raw: Any = Raw()
    whole = io.BytesIO()
    model.export_model(raw)
    model.export_model(whole)
    assert raw.content == whole.getvalue()
    assert sg.import_model(raw, "REFERENCE").execution_devices == ["REFERENCE"]
    for most in (0, None):  # a stream that does not wait takes nothing
        full: Any = Raw(most=most)
        with pytest.raises(sg.BlobError, match=r"cannot write the stream: .*took no bytes"):
            model.export_model(full)


def test_streams_that_are_closed_or_open_for_something_else(tmp_path: Path) -> None:
    model = sg.compile_model(net(), "REFERENCE")
    path = tmp_path / "model.blob"
    model.export_model(path)
    with open(path, "rb") as stream, pytest.raises(sg.BlobError, match="not open to write bytes"):
        model.export_model(stream)
    for device in ("", "REFERENCE"):
        with pytest.raises(sg.BlobError, match=r"cannot read the stream: .*closed file"):
            sg.import_model(stream, device)
        wanted = pytest.raises(sg.BlobError, match="not open to read bytes")
        with open(tmp_path / "other", "wb") as other, wanted:
            sg.import_model(other, device)


def test_an_export_replaces_neither_a_pipe_nor_a_link(tmp_path: Path) -> None:
    model = sg.compile_model(net(), "REFERENCE")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(sg.FileError, match="no regular file"):
        model.export_model(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    model.export_model(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert sg.import_model(tmp_path / "file", "REFERENCE").device == "REFERENCE"


def checksum(data: bytes | bytearray) -> bytes:
    return digest(len(data), leaf_hashes(data))


@given(st.integers(0, 200_000), st.data())
def test_the_checksum_sees_every_changed_byte(size: int, draw: st.DataObject) -> None:
    data = np.random.default_rng(size).bytes(size)
    before = checksum(data)
    assert before == checksum(bytearray(data))
    if data:
        position = draw.draw(st.integers(0, len(data) - 1))
        flipped = bytearray(data)
        flipped[position] ^= draw.draw(st.integers(1, 255))
        assert checksum(flipped) != before
        assert checksum(data[:position]) != before
    assert checksum(data + b"\0") != before


def test_the_checksum_sees_a_change_in_every_part_of_a_large_file() -> None:
    data = bytearray(np.random.default_rng(0).bytes(5 * (1 << 22) + 1000))
    before = checksum(data)
    for position in (0, len(data) // 3, 1 << 22, len(data) - 1001, len(data) - 1):
        data[position] ^= 16
        assert checksum(data) != before
        data[position] ^= 16
    assert checksum(data) == before
