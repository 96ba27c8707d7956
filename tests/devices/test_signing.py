"""Exported models of somebody else: graph and weights are taken from them, and nothing else."""

from __future__ import annotations

import io
import json
import logging
import os
import random
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import subgraph as sg
from subgraph import ops
from subgraph.devices.blob import PROLOGUE, BlobReader, read_header
from subgraph.devices.plugins import cpu, hetero
from subgraph.engine.cpu import stored_programs
from subgraph.engine.cpu.region_op import CpuSubgraphOp
from subgraph.engine.region import concrete_plan, region_op
from subgraph.graph.types import Array
from subgraph.runtime.settings import unsaved_options
from subgraph.system import signing
from tests.support.blobs import forged, split
from tests.support.children import in_child
from tests.support.small_network import exported, region

X = np.random.default_rng(0).standard_normal((2, 3, 8, 8)).astype(np.float32)
KEY = bytes(range(32))
NOBODY = 65534
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
owners = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="files have no owner and mode here")
needs_root = pytest.mark.skipif(
    getattr(os, "geteuid", lambda: 1)() != 0, reason="only root can become another user"
)


def net(scale: float = 1.0) -> sg.Graph:
    """Weights that are packed, and a softmax that is fused."""
    rng = np.random.default_rng(1)

    def weight(name: str, *shape: int) -> sg.Value:
        return sg.parameter(name, (scale * rng.standard_normal(shape)).astype(np.float32) / 3)

    x = sg.input("x", (2, 3, 8, 8))
    y = ops.Relu(ops.Conv(x, weight("w", 16, 3, 3, 3), weight("b", 16), pads=[1, 1, 1, 1]))
    flat = ops.Flatten(ops.GlobalAveragePool(y))
    return sg.Graph([x], [ops.Softmax(ops.MatMul(flat, weight("m", 16, 20)))], "net")


def same(a: sg.CompiledModel, b: sg.CompiledModel) -> None:
    for one, other in zip(a(X).values(), b(X).values(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.fixture
def core() -> sg.Core:
    return sg.Core()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache folder of its own, and thus a key of its own."""
    monkeypatch.setenv("SUBGRAPH_CACHE_DIR", str(tmp_path / "cache"))
    forget_key()
    yield tmp_path / "cache"
    forget_key()


def forget_key() -> None:
    signing._key.cache_clear()  # pyright: ignore[reportPrivateUsage]


def unchanged(header: dict[str, Any], body: bytearray) -> None:
    """Change nothing."""


# ---------------------------------------------------------------- what a foreign file is good for


def zero_packed(header: dict[str, Any], body: bytearray) -> None:
    assert header["packed"]
    for item in header["packed"]:
        place = item["place"]
        body[place["offset"] : place["offset"] + place["size"]] = bytes(place["size"])


def short_packed(header: dict[str, Any], body: bytearray) -> None:
    for item in header["packed"]:
        item.update(shape=[1], dtype="float32")
        item["place"]["size"] = 4


def no_arena(header: dict[str, Any], body: bytearray) -> None:
    for kept in header["op_data"].values():
        for program in kept["programs"]:
            program.update(arena_bytes=0, words=[0, program["words"][1]])


def other_fusion(header: dict[str, Any], body: bytearray) -> None:
    for kept in header["op_data"].values():
        kept["programs"] = []
        for node in kept["nodes"]:
            if isinstance(node, dict):
                node["attrs"] = dict.fromkeys(node["attrs"], 1)


def other_region(header: dict[str, Any], body: bytearray) -> None:
    header["options"] = {"SPEED": "a lot", "NUM_STREAMS": 1000}
    header["pipeline"], header["requests"] = [["x"]], 1 << 40


CHANGES = [
    unchanged,
    zero_packed,
    short_packed,
    pytest.param(no_arena, marks=pytest.mark.plain_memory),
    other_fusion,
    other_region,
]


@pytest.mark.parametrize("key", [None, KEY, bytes(32)])
@pytest.mark.parametrize("change", CHANGES)
def test_only_graph_and_weights_of_a_foreign_file_are_used(
    core: sg.Core, monkeypatch: pytest.MonkeyPatch, change: Any, key: bytes | None
) -> None:
    """Everything in it lies, and all lengths and hashes are right; the signature is another's."""
    if change is unchanged and key is None:
        key = KEY
    model = core.compile_model(net(), "CPU")
    stream = forged(exported(model), change, key)

    def fail(*_: Any) -> Any:
        raise AssertionError("something else of the file is used")

    for owner, name in ((region_op, "rebuild"), (stored_programs, "read")):
        monkeypatch.setattr(owner, name, fail)
    monkeypatch.setattr(CpuSubgraphOp, "restore", fail)
    again = core.import_model(stream, "CPU")
    same(again, model)
    made = region(again).weights.stats()
    assert made.made == made.entries > 0
    stream.seek(0)
    with pytest.raises(sg.BlobError, match="not signed with your key"):
        core.import_model(stream, "CPU", {"ALLOW_RECOMPILE": False})


def test_weights_of_a_foreign_file_are_those_in_it(core: sg.Core) -> None:
    data = exported(core.compile_model(net(), "CPU"))

    def double(header: dict[str, Any], body: bytearray) -> None:
        place = header["weights"]["m"]
        part = slice(place["offset"], place["offset"] + place["size"])
        body[part] = (2 * np.frombuffer(bytes(body[part]), np.float32)).tobytes()

    again = core.import_model(forged(data, double), "CPU")
    graph = net()
    graph.parameters["m"].assign(2 * graph.parameters["m"].array)
    same(again, core.compile_model(graph, "REFERENCE"))


def test_a_foreign_graph_passes_the_checks_of_a_model(core: sg.Core) -> None:
    """Those of sg.load: also where the file says that a weight has another size."""
    data = exported(core.compile_model(net(), "CPU"))

    def short(header: dict[str, Any], body: bytearray) -> None:
        header["weights"]["m"]["size"] = 4

    def nothing(header: dict[str, Any], body: bytearray) -> None:
        place = header["model"]
        body[place["offset"] : place["offset"] + place["size"]] = bytes(place["size"])

    def cyclic(header: dict[str, Any], body: bytearray) -> None:
        place = header["model"]
        part = slice(place["offset"], place["offset"] + place["size"])
        body[part] = bytes(body[part]).replace(b"Relu", b"Rexu")

    for change in (short, nothing, cyclic):
        with pytest.raises(sg.BlobError):
            core.import_model(forged(data, change), "CPU")


def test_limits_hold_for_a_foreign_file(core: sg.Core) -> None:
    data = exported(core.compile_model(net(), "CPU"))
    with pytest.raises(sg.LimitError):
        core.import_model(forged(data, unchanged, KEY), "CPU", {"COMPILE_TIMEOUT": 1e-9})


def paths_in(table: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield where the values of a header stand."""
    if path:
        yield path
    if isinstance(table, (dict, list)):
        for key, value in table.items() if isinstance(table, dict) else enumerate(table):
            yield from paths_in(value, (*path, key))


# fmt: off
STRANGE: list[Any] = [
    None, 0, -1, 1 << 40, 1e308, "", "x", "../x", [], {}, [[]], True, "CPU", "MULTI:CPU",
    "HETERO:", "HETERO:CPU,CPU", {"offset": 0, "size": 0},
]
# fmt: on


def strange(rng: random.Random, header: dict[str, Any], body: bytearray) -> None:
    """Change what a header says, or bytes of the graph."""
    model = dict(header["model"])
    for _ in range(rng.choice([0, 1, 2])):
        *above, last = rng.choice(list(paths_in(header)))
        table: Any = header
        for key in above:
            table = table[key]
        if isinstance(table, dict) and rng.random() < 0.2:
            del table[last]
        else:
            table[last] = rng.choice(STRANGE)
    for _ in range(rng.choice([0, 1, 2, 5])):
        place = model["offset"] + rng.randrange(model["size"])
        body[place] = rng.choice([body[place] ^ 1 << rng.randrange(8), 0, 255])


@pytest.mark.parametrize("device", ["REFERENCE", "CPU", "HETERO:CPU,REFERENCE"])
def test_strange_files_are_clean_errors_or_models(core: sg.Core, device: str) -> None:
    """Lengths and hashes are right, so that what is read is what is strange."""
    data = exported(core.compile_model(net(), device))
    rng = random.Random(device)
    imported = 0
    for _ in range(100):
        stream = forged(data, lambda header, body: strange(rng, header, body), KEY)
        try:
            model = core.import_model(stream, rng.choice(["", device, "CPU"]))
            imported += 1
            model({port.name: X for port in model.inputs})
        except sg.SubgraphError:
            continue
    assert 0 < imported < 100


@pytest.mark.parametrize("device", ["HETERO:CPU,REFERENCE", "MULTI:CPU,REFERENCE"])
def test_devices_of_a_foreign_file(core: sg.Core, device: str) -> None:
    model = core.compile_model(net(), device)
    again = core.import_model(forged(exported(model), unchanged, KEY))
    assert again.device == device
    same(again, model)


def test_a_part_of_a_foreign_file_is_checked_too(core: sg.Core) -> None:
    """The models in a file of MULTI are files themselves; each has its own signature."""
    model = core.compile_model(net(), "MULTI:CPU,REFERENCE")
    data = exported(model)

    def damage(header: dict[str, Any], body: bytearray) -> None:
        place = header["models"]["CPU"]
        body[place["offset"] + place["size"] - 9] ^= 1

    def forge(header: dict[str, Any], body: bytearray) -> None:
        place = header["models"]["CPU"]
        part = slice(place["offset"], place["offset"] + place["size"])
        inner = forged(bytes(body[part]), zero_packed).getvalue()
        header["models"]["CPU"] = {"offset": len(body), "size": len(inner)}
        body += inner

    with pytest.raises(sg.BlobError, match="damaged"):
        core.import_model(forged(data, damage))
    same(core.import_model(forged(data, forge)), model)


# ---------------------------------------------------------------- what the signature covers


def test_every_byte_is_signed(core: sg.Core) -> None:
    data = exported(core.compile_model(net(), "CPU"))
    assert BlobReader(io.BytesIO(data)).own
    header, body = split(data)
    rng = np.random.default_rng(0)
    for place in rng.integers(0, len(body), 20).tolist():

        def flip(_: dict[str, Any], body: bytearray, place: int = place) -> None:
            body[place] ^= 1

        assert not BlobReader(forged(data, flip)).own
    for key in header.keys() - {"large"}:  # a file without this one is not even opened
        assert not BlobReader(forged(data, lambda h, _, key=key: h.pop(key))).own
    assert BlobReader(forged(data, unchanged)).own


def test_bytes_that_keep_all_sums_are_found(core: sg.Core) -> None:
    """The sums of rows and columns of a block of 64 by 509 words stay as they were."""
    x = sg.input("x", (1, 512))
    w = sg.parameter("w", np.ones((512, 512), np.float32))
    data = bytearray(exported(core.compile_model(sg.Graph([x], [ops.MatMul(x, w)]), "CPU")))
    start = bytes(data).rindex(bytes(split(bytes(data))[1]))
    for row, column, step in ((0, 0, 1), (0, 1, -1), (1, 0, -1), (1, 1, 1)):
        place = start + 8 * (509 * row + column)
        (word,) = struct.unpack_from("<Q", data, place)
        struct.pack_into("<Q", data, place, (word + step) % (1 << 64))
    with pytest.raises(sg.BlobError, match="checksum of its content"):
        _ = core.import_model(io.BytesIO(data), "CPU").parameters["w"].array


@pytest.mark.parametrize("text", [b"[" * 100_000, b"[1]", b"nonsense", b'{"a": ' * 50_000])
def test_a_header_that_is_no_table_is_an_error(core: sg.Core, text: bytes) -> None:
    import hashlib

    data = exported(core.compile_model(net(), "REFERENCE"))
    start = PROLOGUE + struct.unpack_from("<Q", data, 16)[0]
    fixed = data[:16] + struct.pack("<Q", len(text)) + data[24:96]
    damaged = fixed + hashlib.sha256(fixed + text).digest() + text + data[start:]
    assert len(fixed) + 32 == PROLOGUE
    for device in ("", "REFERENCE"):
        with pytest.raises(sg.BlobError, match="damaged: its header"):
            core.import_model(io.BytesIO(damaged), device)


# ---------------------------------------------------------------- options that name files


def test_which_options_no_file_sets() -> None:
    assert hetero.HeteroOptions().PROFILE == ""
    limits = {"MEMORY_LIMIT", "NODE_LIMIT", "COMPILE_TIMEOUT"}
    assert unsaved_options() == {"CACHE_DIR", "DUMP_DIR", "PROFILE", *limits}


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("device", ["CPU", "HETERO:CPU,REFERENCE", "MULTI:CPU,REFERENCE"])
def test_no_path_is_taken_from_a_file(
    core: sg.Core, folder: Path, tmp_path: Path, device: str, own: bool
) -> None:
    model = core.compile_model(net(), device)
    data = exported(model)
    key = (folder / "export.key").read_bytes() if own else KEY
    where = tmp_path / "planted"

    def plant(header: dict[str, Any], body: bytearray) -> None:
        header["options"]["CACHE_DIR"] = str(where)
        header["options"]["PROFILE"] = str(where)
        if ":" in device:
            configs = header.setdefault("configs", {})
            for name in ("CPU", "REFERENCE"):
                configs[name] = {**configs.get(name, {}), "CACHE_DIR": str(where)}
        header["subgraph"] = "0.0.0"  # so that it is compiled anew

    same(core.import_model(forged(data, plant, key)), model)
    assert not where.exists()


def test_no_path_is_written_into_a_file(core: sg.Core, tmp_path: Path) -> None:
    cache = {"CACHE_DIR": str(tmp_path / "x")}
    model = core.compile_model(net(), "MULTI:CPU,REFERENCE", {"CPU": cache, "REFERENCE": cache})
    data = exported(model)
    assert str(tmp_path).encode() not in data
    assert (tmp_path / "x").exists()


# ---------------------------------------------------------------- the model cache


def test_entries_of_the_model_cache_are_only_taken_from_oneself(
    core: sg.Core, tmp_path: Path
) -> None:
    config = {"CACHE_DIR": str(tmp_path)}
    model = core.compile_model(net(), "CPU", config)
    other = core.compile_model(net(3), "CPU")
    (path,) = tmp_path.iterdir()
    good = path.read_bytes()
    content = read_header(path)["content"]

    def claim(header: dict[str, Any], body: bytearray) -> None:
        header["content"] = content

    planted = {
        "signed by another": forged(good, zero_packed, KEY).getvalue(),
        "of another model": exported(other),
        "says that it is this model": forged(exported(other), claim).getvalue(),
    }
    for data in planted.values():
        path.write_bytes(data)
        same(core.compile_model(net(), "CPU", config), model)
        assert path.read_bytes() != data  # written anew
        assert BlobReader(path).own


def test_an_own_model_under_the_name_of_another_is_not_taken(core: sg.Core, tmp_path: Path) -> None:
    config = {"CACHE_DIR": str(tmp_path)}
    core.compile_model(net(3), "CPU", config)
    (path,) = tmp_path.iterdir()
    other = path.read_bytes()
    path.unlink()
    model = core.compile_model(net(), "CPU", config)
    (path,) = tmp_path.iterdir()
    path.write_bytes(other)
    same(core.compile_model(net(), "CPU", config), model)


def test_the_model_cache_holds_no_weights_twice(
    core: sg.Core, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The graph has them; a file that goes elsewhere holds them, too."""
    graph = net()
    config = {"CACHE_DIR": str(tmp_path)}
    model = core.compile_model(graph, "CPU", config)
    (path,) = tmp_path.iterdir()
    assert path.stat().st_size < len(exported(model))
    assert not read_header(path)["weights"]

    def fail(*_: Any) -> Any:
        raise AssertionError("nothing has to be planned")

    monkeypatch.setattr(concrete_plan, "make_plan", fail)
    monkeypatch.setattr(cpu, "fuse", fail)
    same(core.compile_model(graph, "CPU", config), model)
    with pytest.raises(sg.BlobError, match=r"weight .* is missing"):
        core.import_model(path, "CPU")


# ---------------------------------------------------------------- the file itself


def is_mapped(array: Array) -> bool:
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    return type(getattr(base, "obj", base)).__name__ == "mmap"


@owners
def test_a_file_that_others_can_change_is_read_into_memory(core: sg.Core, tmp_path: Path) -> None:
    """It might change after it was checked."""
    x = sg.input("x", ("N", 1024))
    w = sg.parameter("w", np.ones((1024, 1024), np.float32))
    path = tmp_path / "big.blob"
    core.compile_model(sg.Graph([x], [ops.MatMul(x, w)]), "REFERENCE").export_model(path)
    assert is_mapped(core.import_model(path).parameters["w"].array)
    path.chmod(0o666)
    model = core.import_model(path)
    assert not is_mapped(model.parameters["w"].array)
    assert BlobReader(path).own
    path.write_bytes(bytes(path.stat().st_size))
    assert (model(np.ones((1, 1024), np.float32))[0] == 1024).all()


# ---------------------------------------------------------------- the key


def test_the_key_is_made_once_and_kept_private(folder: Path) -> None:
    told = signing.signature(b"a", b"bc")
    (path,) = folder.iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    forget_key()
    assert signing.is_own(told, b"ab", b"c")
    assert not signing.is_own(told, b"ab", b"d")


@pytest.mark.parametrize("content", [b"", b"short", bytes(33)])
def test_a_damaged_key_is_no_key(
    folder: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    told = signing.signature(b"x")
    (folder / "export.key").write_bytes(content)
    forget_key()
    with caplog.at_level(logging.INFO, "subgraph"):
        assert not signing.is_own(told, b"x")
    assert signing.is_own(signing.signature(b"x"), b"x")
    assert "remove it" in caplog.text


def test_where_no_key_can_be_kept(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SUBGRAPH_CACHE_DIR", str(tmp_path / "file"))
    assert signing.is_own(signing.signature(b"x"), b"x")


@owners
@pytest.mark.parametrize("how", ["0644", "0640", "folder 0777", "folder 0775", "link", "pipe"])
def test_a_key_that_others_know_or_change_is_refused(
    core: sg.Core,
    folder: Path,
    how: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("subgraph.system.trusted_files._is_own_group", lambda *_: False)
    data = exported(core.compile_model(net(), "CPU"))
    assert BlobReader(io.BytesIO(data)).own
    path = folder / "export.key"
    if how.startswith("folder"):
        folder.chmod(int(how.split()[1], 8))
    elif how in ("link", "pipe"):
        path.rename(folder / "aside")
        if how == "link":
            path.symlink_to(folder / "aside")
        else:
            os.mkfifo(path)
    else:
        path.chmod(int(how, 8))
    forget_key()
    with caplog.at_level(logging.INFO, "subgraph"):
        for _ in range(2):
            assert not BlobReader(io.BytesIO(data)).own
    same(core.import_model(io.BytesIO(data)), core.compile_model(net(), "REFERENCE"))
    said = [r.getMessage() for r in caplog.records if str(folder) in r.getMessage()]
    assert len(said) == 1
    if how not in ("link", "pipe"):
        assert "chmod" in said[0] or "remove it" in said[0]


@needs_root
def test_each_user_of_a_shared_folder_has_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Root has filled it; what others sign by a key of their own, they know again."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        home = Path(name, "home")
        home.mkdir()
        os.chown(home, NOBODY, NOBODY)
        monkeypatch.setenv("SUBGRAPH_CACHE_DIR", name)
        monkeypatch.setattr("subgraph.system.environment.user_folder", lambda: home / "cache")
        forget_key()
        try:
            of_root = signing.signature(b"x")

            def sign() -> None:
                forget_key()
                told = signing.signature(b"x")
                assert told != of_root
                assert (home / "cache" / "export.key").stat().st_uid == NOBODY
                forget_key()
                assert signing.is_own(told, b"x")

            in_child(sign, user=NOBODY)
            os.chown(Path(name, "export.key"), NOBODY, NOBODY)
            forget_key()
            assert not signing.is_own(of_root, b"x")
        finally:
            forget_key()


def test_headers_are_plain_json(core: sg.Core) -> None:
    """Nothing in a file is code, or could name some."""
    data = exported(core.compile_model(net(), "CPU"))
    header, _ = split(data)
    assert json.loads(json.dumps(header)) == header
