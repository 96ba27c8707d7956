"""Files in which other users may have a hand: refused, never waited for, and said how to mend."""

from __future__ import annotations

import grp
import logging
import os
import pwd
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import subgraph as sg
from subgraph.devices.placement.profiles import read_profile
from subgraph.engine.toolchain import toolchain
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.opencl import runtime
from subgraph.system import objectcache, processor, trusted_files
from subgraph.system.objectcache import ObjectCode
from subgraph.system.trusted_files import (
    UntrustedFileError,
    open_regular,
    read_trusted,
    write_trusted,
)
from subgraph.tools.cli_inputs import read_array
from tests.support.children import in_child

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "geteuid"), reason="files have no owner and mode here"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]
needs_root = pytest.mark.skipif(
    getattr(os, "geteuid", lambda: 1)() != 0, reason="only root can give files to another user"
)
ROOT = Path(__file__).parents[2]
NOBODY = 65534
KEY = "ab" + "0" * 62
CODE = ObjectCode((), b"code")


@pytest.fixture(autouse=True)
def _no_waiting() -> Iterator[None]:
    """Fail what waits for a pipe."""

    def fail(*_: object) -> None:
        raise TimeoutError("it waits for a pipe")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of compiled kernels, with one entry."""
    monkeypatch.setenv("SUBGRAPH_CACHE_DIR", str(tmp_path))
    assert objectcache.write(KEY, CODE)
    assert objectcache.read(KEY) == CODE
    return tmp_path / "kernels"


def entry(folder: Path) -> Path:
    return folder / "ab" / f"{KEY}.sgk"


def pipe(path: Path) -> Path:
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    return path


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


# ---------------------------------------------------------------- pipes, links, devices


def external_model(folder: Path) -> Path:
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[4])
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="w.bin")
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "w"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [4])],
        [tensor],
    )
    path = folder / "model.onnx"
    path.write_bytes(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)]).SerializeToString()
    )
    return path


@pytest.mark.parametrize("suffix", [".npy", ".pb"])
def test_an_input_that_is_a_pipe_is_an_error(tmp_path: Path, suffix: str) -> None:
    with pytest.raises(OSError, match="not a regular file"):
        read_array(pipe(tmp_path / f"x{suffix}"))


def test_the_command_line_says_that_an_input_is_a_pipe(tmp_path: Path) -> None:
    model = external_model(tmp_path)
    (tmp_path / "w.bin").write_bytes(np.ones(4, np.float32).tobytes())
    path = pipe(tmp_path / "x.npy")
    done = subprocess.run(
        [sys.executable, "-m", "subgraph", "run", str(model), "--input", f"x={path}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 1
    assert done.stderr == f"subgraph: error: {path}: it is not a regular file\n"


def test_a_model_that_is_a_pipe_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(sg.ModelError, match="not a regular file"):
        sg.load(pipe(tmp_path / "model.onnx"))
    with pytest.raises(sg.BlobError, match="not a regular file"):
        sg.Core().import_model(pipe(tmp_path / "model.blob"))
    with pytest.raises(sg.BlobError, match="not a regular file"):
        read_profile(pipe(tmp_path / "profile.json"))


def test_external_data_that_are_a_pipe_are_an_error(tmp_path: Path) -> None:
    path = external_model(tmp_path)
    pipe(tmp_path / "w.bin")
    with pytest.raises(sg.ModelError, match=r"'w'.*not a regular file"):
        sg.load(path)


@pytest.mark.parametrize("path", ["/dev/zero", "/dev/tty", "/"])
def test_devices_and_folders_are_no_files(path: str) -> None:
    with pytest.raises(OSError, match=r"not a regular file|No such device|directory"):
        open_regular(path)


@pytest.mark.parametrize("kind", ["pipe", "link", "device", "folder"])
def test_a_cache_entry_that_is_no_regular_file_is_made_anew(folder: Path, kind: str) -> None:
    path, aside = entry(folder), folder / "aside"
    path.replace(aside)
    if kind == "pipe":
        pipe(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(aside if kind == "link" else "/dev/zero")
    assert objectcache.read(KEY) is None
    assert not objectcache.holds(KEY)
    if kind == "folder":
        path.rmdir()
    assert objectcache.write(KEY, CODE)
    assert objectcache.read(KEY) == CODE
    assert path.is_file()
    assert not path.is_symlink()


# ---------------------------------------------------------------- owner and mode


def refused(caplog: pytest.LogCaptureFixture, folder: Path, remedy: str) -> None:
    """Check that the cache is not used, and that this was said once, with what to do."""
    with caplog.at_level(logging.WARNING, "subgraph.engine"):
        for _ in range(2):
            assert objectcache.read(KEY) is None
            assert not objectcache.holds(KEY)
    (said,) = warnings(caplog)
    assert str(folder) in said
    assert remedy in said


@pytest.mark.parametrize("mode", [0o777, 0o757, 0o775])
def test_a_folder_that_others_can_write_is_refused(
    folder: Path, mode: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("subgraph.system.trusted_files._is_own_group", lambda *_: False)
    folder.chmod(mode)
    refused(caplog, folder, f"chmod -R go-w {folder}")
    assert not objectcache.write(KEY, CODE)
    assert not objectcache.writable()
    assert len(warnings(caplog)) == 1
    folder.chmod(mode & 0o755)
    assert objectcache.read(KEY) == CODE


@pytest.mark.parametrize("mode", [0o666, 0o646, 0o664])
def test_an_entry_that_others_can_write_is_refused(
    folder: Path, mode: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("subgraph.system.trusted_files._is_own_group", lambda *_: False)
    entry(folder).chmod(mode)
    refused(caplog, folder, f"chmod -R go-w {entry(folder)}")
    assert objectcache.write(KEY, CODE)
    assert objectcache.read(KEY) == CODE


def test_a_group_of_one_is_nobody_else(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("subgraph.system.trusted_files._is_own_group", lambda *_: True)
    folder.chmod(0o775)
    entry(folder).chmod(0o664)
    assert objectcache.read(KEY) == CODE


@pytest.mark.parametrize(
    ("primary", "name", "members", "own"),
    [
        (1000, "ada", [], True),
        (1000, "ada", ["ada"], True),
        (1000, "ada", ["eve"], False),
        (1000, "team", [], False),
        (100, "ada", [], False),
    ],
)
def test_whose_group_it_is(
    monkeypatch: pytest.MonkeyPatch, primary: int, name: str, members: list[str], own: bool
) -> None:
    user = pwd.struct_passwd(("ada", "x", 1000, primary, "", "/", "/bin/sh"))
    group = grp.struct_group((name, "x", 1000, members))
    monkeypatch.setattr(pwd, "getpwuid", lambda _: user)
    monkeypatch.setattr(grp, "getgrgid", lambda _: group)
    ask = trusted_files._is_own_group.__wrapped__  # pyright: ignore[reportPrivateUsage]
    assert ask(1000, 1000) is own


@needs_root
def test_what_belongs_to_another_user_is_refused(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    os.chown(folder, NOBODY, NOBODY)
    refused(caplog, folder, f"chown -R root {folder}")
    os.chown(folder, 0, 0)
    assert objectcache.read(KEY) == CODE
    os.chown(entry(folder), NOBODY, NOBODY)
    assert objectcache.read(KEY) is None
    assert not objectcache.holds(KEY)


def test_kernels_of_a_refused_folder_are_compiled(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT), *sys.path])
    kernel = Kernel("tests.support.engine.kernels", "count")
    toolchain.forget(kernel)
    assert kernel.address
    folder.chmod(0o777)
    compiled, loaded = toolchain.statistics.compiled, toolchain.statistics.loaded
    toolchain.forget(kernel)
    with caplog.at_level(logging.WARNING, "subgraph.engine"):
        assert toolchain.prepare([kernel]) == 1
        assert kernel.address
    assert toolchain.statistics.compiled == compiled + 1
    assert toolchain.statistics.loaded == loaded
    assert sum("chmod" in said for said in warnings(caplog)) == 1


def test_what_is_read_elsewhere_is_checked_too(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b.json"
    write_trusted(path, b"{}")
    assert read_trusted(path) == b"{}"
    path.chmod(0o666)
    with pytest.raises(UntrustedFileError, match="chmod"):
        read_trusted(path)
    assert processor._read(path) is None  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize(
    ("umask", "file", "above"), [(0o022, 0o644, 0o755), (0o077, 0o600, 0o700), (0, 0o644, 0o755)]
)
def test_entries_are_as_the_umask_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, umask: int, file: int, above: int
) -> None:
    monkeypatch.setenv("SUBGRAPH_CACHE_DIR", str(tmp_path / "cache"))
    before = os.umask(umask)
    try:
        assert objectcache.write(KEY, CODE)
    finally:
        os.umask(before)
    path = entry(tmp_path / "cache" / "kernels")
    assert path.stat().st_mode & 0o777 == file
    for each in list(path.parents)[:3]:
        assert each.stat().st_mode & 0o777 == above
    assert objectcache.read(KEY) == CODE


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache folder that every user can reach."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        monkeypatch.setenv("SUBGRAPH_CACHE_DIR", name)
        yield Path(name)


@needs_root
def test_a_cache_that_root_has_filled_serves_every_user(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT), *sys.path])
    kernel = Kernel("tests.support.engine.kernels", "count")
    toolchain.forget(kernel)
    assert kernel.address
    assert processor.processor()
    loaded = toolchain.statistics.loaded

    def use() -> None:
        toolchain.forget(kernel)
        assert toolchain.is_cached(kernel)
        assert kernel.address
        assert toolchain.statistics.loaded == loaded + 1
        assert not objectcache.writable(warn=False)
        for path in (shared / "kernels").glob("processor-*.json"):
            assert processor._read(path) is not None  # pyright: ignore[reportPrivateUsage]

    in_child(use, user=NOBODY)


@needs_root
def test_a_cache_that_a_user_has_filled_does_not_serve_another(shared: Path) -> None:
    shared.chmod(0o777)

    def fill() -> None:
        assert objectcache.write(KEY, CODE)
        assert objectcache.read(KEY) == CODE

    def use() -> None:
        assert objectcache.read(KEY) is None

    in_child(fill, user=NOBODY)
    use()
    in_child(use, user=NOBODY - 1)
    in_child(fill, user=NOBODY)


def test_half_a_file_says_what_is_missing(tmp_path: Path) -> None:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1000])
    weight: Any = onnx.numpy_helper.from_array(np.ones(1000, np.float32), "w")
    node = helper.make_node("Add", ["x", "w"], ["y"])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1000])
    data = helper.make_model(helper.make_graph([node], "g", [x], [y], [weight])).SerializeToString()
    path = tmp_path / "half.onnx"
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(
        sg.ModelError, match=r"truncated: of a part of \d+ bytes .* only \d+ are"
    ) as e:
        sg.load(path)
    assert "breaks off" not in str(e.value)


def test_built_opencl_programs_lie_where_nobody_else_can_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    prepare = runtime._prepare_environment  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setenv("SUBGRAPH_CACHE_DIR", str(tmp_path / "chosen"))
    monkeypatch.setattr(runtime, "user_folder", lambda: tmp_path / "user")
    for mode, where in ((0o755, "chosen"), (0o777, "user")):
        (tmp_path / "chosen" / "pocl").mkdir(parents=True, exist_ok=True)
        (tmp_path / "chosen" / "pocl").chmod(mode)
        monkeypatch.setenv("POCL_CACHE_DIR", "")
        monkeypatch.delenv("POCL_CACHE_DIR")
        prepare()
        assert os.environ["POCL_CACHE_DIR"] == str(tmp_path / where / "pocl")
    (said,) = warnings(caplog)
    assert "chmod" in said
