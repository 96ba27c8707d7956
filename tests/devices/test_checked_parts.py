"""Parts of an exported model: what is large is checked when it is first read, the rest at once."""

from __future__ import annotations

import io
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import subgraph as sg
from subgraph import ops
from subgraph.devices.blob import LARGE, BlobReader, BlobWriter
from subgraph.graph.parameters import Unchecked
from subgraph.system import signing
from tests.support.blobs import forged, split

ROW = np.random.default_rng(0).standard_normal((1, 600)).astype(np.float32)
WEIGHT = np.random.default_rng(1).standard_normal((600, 600)).astype(np.float32)


@pytest.fixture
def core() -> sg.Core:
    return sg.Core()


def model(core: sg.Core, device: str) -> sg.CompiledModel:
    """Return a product by a large weight, and a small one added to it; it has run."""
    x, w = sg.input("x", (1, 600)), sg.parameter("w", WEIGHT)
    y = ops.Add(ops.MatMul(x, w), sg.parameter("b", WEIGHT[0]))
    made = core.compile_model(sg.Graph([x], [y], "large"), device)
    made(ROW)
    return made


def exported(made: sg.CompiledModel) -> bytes:
    stream = io.BytesIO()
    made.export_model(stream)
    return stream.getvalue()


def flipped(data: bytes, place: dict[str, int]) -> bytes:
    """Return a file with one bit changed in the middle of a part."""
    changed = bytearray(data)
    header, body = split(data)
    start = data.rindex(bytes(body)) + (header["large"] if place["size"] >= LARGE else 0)
    changed[start + place["offset"] + place["size"] // 2] ^= 1
    return bytes(changed)


def weight_place(header: dict[str, Any]) -> dict[str, int]:
    return header["weights"]["w"]


def packed_place(header: dict[str, Any]) -> dict[str, int]:
    return max((item["place"] for item in header["packed"]), key=lambda place: place["size"])


def is_checked(parameter: sg.Parameter) -> bool:
    held = parameter.published.held
    return not isinstance(held, Unchecked) or held.is_checked


@pytest.mark.parametrize("device", ["CPU", "REFERENCE", "HETERO:CPU,REFERENCE"])
def test_a_large_weight_is_checked_when_it_is_read(core: sg.Core, device: str) -> None:
    made = model(core, device)
    again = core.import_model(exported(made))
    weight = again.parameters["w"]
    assert not is_checked(weight)
    assert is_checked(again.parameters["b"])
    np.testing.assert_array_equal(again(ROW)[0], made(ROW)[0])
    np.testing.assert_array_equal(weight.array, WEIGHT)
    assert is_checked(weight)
    weight.assign(WEIGHT * 2)
    np.testing.assert_allclose(again(ROW)[0], ROW @ (2 * WEIGHT) + WEIGHT[0], rtol=1e-3, atol=1e-3)


def test_a_run_of_packed_weights_reads_no_others(core: sg.Core) -> None:
    made = model(core, "CPU")
    again = core.import_model(exported(made))
    again(ROW)
    assert not is_checked(again.parameters["w"])


@pytest.mark.parametrize("place", [weight_place, packed_place])
def test_damage_of_a_large_part_is_an_error_of_who_reads_it(
    core: sg.Core, place: Callable[[dict[str, Any]], dict[str, int]]
) -> None:
    made = model(core, "CPU")
    data = exported(made)
    again = core.import_model(flipped(data, place(split(data)[0])))
    weight = again.parameters["w"]
    for _ in range(2):  # it is not forgotten
        if place is packed_place:
            with pytest.raises(sg.BlobError, match="checksum of its content"):
                again(ROW)
        else:
            np.testing.assert_array_equal(again(ROW)[0], made(ROW)[0])
            with pytest.raises(sg.BlobError, match="checksum of its content"):
                _ = weight.array
    assert weight.type == made.parameters["w"].type
    assert weight.nbytes == WEIGHT.nbytes
    weight.assign(WEIGHT)  # instead of what is damaged
    np.testing.assert_allclose(again(ROW)[0], made(ROW)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", ["CPU", "REFERENCE", "HETERO:CPU,REFERENCE", "MULTI:CPU"])
def test_a_damaged_bit_never_changes_a_result(core: sg.Core, device: str, tmp_path: Path) -> None:
    made = model(core, device)
    data = exported(made)
    path = tmp_path / "model.blob"
    rng = np.random.default_rng(2)
    for position in rng.integers(0, len(data), 40).tolist():
        changed = bytearray(data)
        changed[position] ^= 1 << int(rng.integers(8))
        path.write_bytes(changed)
        for source in (path, io.BytesIO(changed)):
            try:
                result = core.import_model(source, "", {"ALLOW_RECOMPILE": False})(ROW)[0]
            except sg.BlobError:
                continue
            np.testing.assert_array_equal(result, made(ROW)[0])


def test_a_damaged_small_part_is_known_at_once(core: sg.Core) -> None:
    data = exported(model(core, "CPU"))
    with pytest.raises(sg.BlobError, match="checksum of its content"):
        core.import_model(flipped(data, split(data)[0]["model"]))


def test_many_requests_check_at_once(core: sg.Core) -> None:
    made = model(core, "CPU")
    data = exported(made)
    wanted = made(ROW)[0]
    again = core.import_model(data)
    with ThreadPoolExecutor(8) as threads:
        for result in threads.map(lambda _: again(ROW)[0], range(16)):
            np.testing.assert_array_equal(result, wanted)
    damaged = core.import_model(flipped(data, packed_place(split(data)[0])))
    with ThreadPoolExecutor(8) as threads:
        for future in [threads.submit(damaged, ROW) for _ in range(16)]:
            with pytest.raises(sg.BlobError):
                future.result()


def test_large_parts_stand_apart_and_are_checked_by_themselves() -> None:
    writer = BlobWriter()
    sizes = (100, LARGE, 70_000, LARGE + 5, LARGE - 1)
    contents = [np.full(size, k, np.uint8) for k, size in enumerate(sizes)]
    places = [writer.add(content) for content in contents]
    stream = io.BytesIO()
    writer.write({}, stream)
    data = stream.getvalue()
    whole = BlobReader(io.BytesIO(data))
    whole.check_body()
    for place, content in zip(places, contents, strict=True):
        assert bytes(whole.part(place)) == content.tobytes()
    for place, size in zip(places, sizes, strict=True):
        reader = BlobReader(io.BytesIO(flipped(data, place)))
        if size < LARGE:
            with pytest.raises(sg.BlobError):
                reader.check_body(large=False)
            continue
        reader.check_body(large=False)
        for number in (0, 2, 4):
            assert bytes(reader.part(places[number])) == contents[number].tobytes()
        for _ in range(2):
            with pytest.raises(sg.BlobError):
                reader.part(place)
            with pytest.raises(sg.BlobError):
                reader.check_body()


@pytest.mark.parametrize("told", [-1, 1 << 60, None, "0"])
def test_a_wrong_place_of_the_large_parts_is_an_error(core: sg.Core, told: Any) -> None:
    """By whoever has the key: nobody else's header counts."""

    def change(header: dict[str, Any], body: bytearray) -> None:
        header["large"] = told

    data = exported(model(core, "CPU"))
    key = signing._key()  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(sg.BlobError):
        _ = core.import_model(forged(data, change, key)).parameters["w"].array
