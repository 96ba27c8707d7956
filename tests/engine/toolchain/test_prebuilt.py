"""Prebuilt kernels: which machines use them, and stale, damaged and untrusted packs."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest

from subgraph.engine.toolchain import prebuilt, toolchain
from subgraph.engine.toolchain.isa_levels import LEVELS, IsaLevel
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.engine.toolchain.keys import source_digest
from subgraph.engine.toolchain.loader import KernelError
from subgraph.system import host, prebuilt_files
from subgraph.system.environment import PACKAGE_PREBUILT
from subgraph.system.objectcache import ObjectCode
from subgraph.tools import prebuild

ROOT = PACKAGE_PREBUILT.parents[1]
LEVEL = {level.name: level for level in LEVELS}
MODULE = """
from subgraph.engine.codegen.simd import ld_i64, st_i64
from user_kernels.numbers import STEP

def add():
    def kernel(args, begin, end, worker):
        st_i64(args, ld_i64(args) + STEP)
    return kernel
"""
# Runs the kernel in a program and says what that took.
SCRIPT = """
import json, sys
import numpy as np
from subgraph.engine.program.program import Program, Step
from subgraph.engine.toolchain import toolchain
from subgraph.engine.toolchain.kernel import Kernel
cell = np.zeros(1, np.int64)
Program([Step(Kernel("user_kernels.adding", "add").address, cell.ctypes.data, 1)]).run()
print(json.dumps([int(cell[0]), toolchain.statistics.compiled, "numba" in sys.modules]))
"""
HERE = [level for level in LEVELS if level.runs_on(host.isa(), host.architecture())]
pytestmark = pytest.mark.skipif(
    not HERE or not sys.platform.startswith("linux"), reason="no level of this machine"
)


@pytest.fixture
def user_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with a kernel that adds a constant of another of its modules."""
    package = tmp_path / "user_kernels"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "adding.py").write_text(MODULE)
    (package / "numbers.py").write_text("STEP = 3\n")
    monkeypatch.setenv("SUBGRAPH_CACHE_DIR", str(tmp_path / "cache"))
    return package


BUILD = """
import sys
from pathlib import Path
from subgraph.tools import prebuild
from subgraph.engine.program import entry
from subgraph.engine.program.pool import sleeps_in_kernel
from subgraph.engine.program.program import walker
from subgraph.engine.toolchain import toolchain
from subgraph.engine.toolchain.isa_levels import LEVELS
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.system import host
(level,) = (level for level in LEVELS if level.name == sys.argv[2])
kernels = [Kernel("user_kernels.adding", "add"), walker(sleeps_in_kernel()), entry.KERNEL]
with host.target(level.isa, level.architecture):
    codes = {kernel: toolchain.compile_for_level(kernel) for kernel in kernels}
prebuild.write_level(Path(sys.argv[1]), level, codes)
"""


def python(script: str, package: Path, cache: str, folder: Path | None, *args: str) -> Any:
    """Run a script in another process, with a cache and a folder of prebuilt kernels."""
    variables = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(package.parent), str(ROOT)]),
        "SUBGRAPH_CACHE_DIR": str(package.parent / cache),
        "SUBGRAPH_PREBUILT": "" if folder is None else str(folder),
    }
    command = [sys.executable, "-c", script, *args]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture
def pack(user_kernels: Path, tmp_path: Path) -> Path:
    """The file of the widest level that this machine runs, with what `SCRIPT` needs."""
    folder = tmp_path / "prebuilt"
    python(BUILD, user_kernels, "build", None, str(folder), HERE[-1].name)
    return folder / f"{HERE[-1].name}.pack"


def first_run(package: Path, pack: Path, cache: str = "fresh") -> tuple[Any, str]:
    done = python(SCRIPT, package, cache, pack.parent)
    return json.loads(done.stdout), done.stderr


def test_prebuilt_kernels_are_used_on_a_fresh_machine(user_kernels: Path, pack: Path) -> None:
    found, said = first_run(user_kernels, pack)
    assert found == [3, 0, False]
    assert not said
    assert not list((user_kernels.parent / "fresh").rglob("*.sgk"))


def test_kernels_of_changed_sources_are_compiled_with_a_warning(
    user_kernels: Path, pack: Path
) -> None:
    (user_kernels / "numbers.py").write_text("STEP = 40\n")  # not the kernel's own module
    (value, compiled, _), said = first_run(user_kernels, pack)
    assert (value, compiled) == (40, 1)
    assert "prebuilt kernels of user_kernels.adding are stale" in said
    assert said.count("stale") == 1


def rewritten(pack: Path, **changes: Any) -> None:
    """Write a file anew, its manifest changed."""
    opened = prebuilt.Pack(pack)
    raw = pack.read_bytes()
    body = raw[len(raw) - sum(k.size for k in opened.manifest.kernels.values()) :]
    manifest = attrs.evolve(opened.manifest, **changes)
    prebuilt.write_manifest(pack, manifest, body)


def test_kernels_of_another_compiler_are_not_used_with_a_warning(
    user_kernels: Path, pack: Path
) -> None:
    manifest = prebuilt.Pack(pack).manifest
    versions = {**manifest.versions, "llvmlite": "0.1"}
    rewritten(pack, versions=versions, names={**manifest.names, "llvmlite": "0.1"})
    (value, compiled, _), said = first_run(user_kernels, pack)
    assert (value, compiled) == (3, 3)
    assert "are stale: they were made with llvmlite 0.1, here" in said


@pytest.mark.parametrize("where", ["start", "manifest", "code", "short"])
def test_a_damaged_file_is_refused(where: str, user_kernels: Path, pack: Path) -> None:
    raw = bytearray(pack.read_bytes())
    at = {"start": 3, "manifest": 100, "code": len(raw) - 40, "short": 0}[where]
    raw[at] ^= 0 if where == "short" else 1
    pack.write_bytes(raw[:60] if where == "short" else raw)
    (value, compiled, _), said = first_run(user_kernels, pack)
    assert value == 3
    assert compiled >= 1
    assert "damaged" in said
    assert "install the package anew" in said


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="permissions are others here")
@pytest.mark.parametrize("what", ["file", "folder"])
def test_packs_that_others_can_write_are_not_used(
    what: str, user_kernels: Path, pack: Path
) -> None:
    (pack if what == "file" else pack.parent).chmod(0o666 if what == "file" else 0o777)
    (value, compiled, _), said = first_run(user_kernels, pack)
    assert (value, compiled) == (3, 3)
    assert "prebuilt kernels are not used" in said
    assert "chmod" in said


def test_code_that_depends_on_a_feature_asks_for_the_same_answer(
    user_kernels: Path, pack: Path
) -> None:
    kernels = prebuilt.Pack(pack).manifest.kernels
    other = [("avx512vnni", not host.isa().has("avx512vnni"))]
    rewritten(pack, kernels={k: v._replace(features=tuple(other)) for k, v in kernels.items()})
    (value, compiled, _), said = first_run(user_kernels, pack)
    assert (value, compiled, said) == (3, 3, "")


def isa_like(level: IsaLevel, **changes: Any) -> host.Isa:
    return level.isa._replace(**changes)


def test_a_machine_runs_the_levels_whose_features_it_has() -> None:
    known: Mapping[str, IsaLevel] = {level.name: level for level in LEVELS}
    v4, vnni, neon = known["x86-64-v4"], known["x86-64-v4-vnni"], known["neon"]
    assert vnni.runs_on(isa_like(vnni, cpu="cascadelake"), "x86_64")
    assert v4.runs_on(isa_like(vnni, cpu="cascadelake"), "x86_64")
    assert not vnni.runs_on(v4.isa, "x86_64")
    assert not known["x86-64-v3"].runs_on(v4.isa, "x86_64")  # its vectors are shorter
    assert not v4.runs_on(v4.isa._replace(like="like-avx512"), "x86_64")
    assert neon.runs_on(isa_like(neon, features="+neon,+sve"), "aarch64")
    assert not neon.runs_on(neon.isa, "x86_64")


FOREIGN = """
import sys
from subgraph.engine.program import entry
from subgraph.engine.program.program import walker
from subgraph.engine.toolchain import toolchain
from subgraph.engine.toolchain.isa_levels import LEVELS
from subgraph.system import host
(level,) = (level for level in LEVELS if level.name == sys.argv[1])
with host.target(level.isa, level.architecture):
    made = [toolchain.compile_for_level(kernel) for kernel in (entry.KERNEL, walker(True))]
print({int.from_bytes(code.data[18:20], "little") for code in made if code.start is None})
print(sorted(made[1].needs))
"""


def test_kernels_are_compiled_for_another_architecture(tmp_path: Path) -> None:
    """In a process of its own: numba keeps helper functions of one target for the next one."""
    foreign = "neon" if host.architecture() == "x86_64" else "x86-64-v3"
    run = subprocess.run(
        [sys.executable, "-c", FOREIGN, foreign],
        capture_output=True,
        text=True,
        env={**os.environ, "SUBGRAPH_CACHE_DIR": str(tmp_path)},
    )
    assert run.returncode == 0, run.stderr
    machines, needs = map(ast.literal_eval, run.stdout.splitlines())
    assert machines <= {183 if foreign == "neon" else 62}
    assert {"syscall", "sched_getcpu"} <= set(needs)


def test_a_pack_contains_equal_code_once(tmp_path: Path) -> None:
    codes = {f"{k:032x}": ObjectCode((), b"code" * 99, 0) for k in range(4)}
    path = tmp_path / "x.pack"
    prebuilt.write_pack(path, LEVELS[0], {}, {}, codes)
    opened = prebuilt.Pack(path)
    assert len({entry.offset for entry in opened.manifest.kernels.values()}) == 1
    assert [opened.read(key) for key in codes] == list(codes.values())


@pytest.mark.parametrize("content", [b"[]", b"{}", b'{"kernels": {"a": [1]}}', b"\xff", b"null"])
def test_a_wrong_manifest_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.pack"
    prebuilt_files.write_raw(path, content, b"")
    with pytest.raises(KernelError, match="damaged"):
        prebuilt.Pack(path)


def test_families_are_planned_for_a_machine_that_this_is_not() -> None:
    level = LEVEL["neon" if host.architecture() == "x86_64" else "x86-64-v3"]
    before = toolchain.statistics.compiled
    found = prebuild.kernels_of(level, [])
    assert toolchain.statistics.compiled == before
    lanes = {dict(kernel.variant).get("lanes") for kernel in found if "conv" in kernel.module}
    assert level.isa.vector_bytes // 4 in lanes
    assert all(kernel.module.startswith("subgraph.") for kernel in found)
    assert not any(toolchain.is_loaded(kernel) for kernel in found if "conv" in kernel.module)


def test_processes_compile_for_the_level_whatever_machine_this_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SUBGRAPH_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(host, "core_count", lambda: 1)
    kernel = Kernel("subgraph.ops.movement.packing_kernels", "pack", item=4, lanes=4)
    for name in ("x86-64-v3", "neon"):
        (code,) = prebuild.compiled_codes(LEVEL[name], [kernel]).values()
        assert dict(code.features) == {"avx512vl": False}, name  # this machine may have it


def test_code_is_compiled_once_for_the_levels_that_it_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Code that queries no feature of a higher level is in the pack of the lowest level only."""
    bytes_ = Kernel("subgraph.engine.program.walker_kernels", "spin")
    wanted = [level for level in LEVELS if level.name.startswith("x86-64-v4")][:2]
    if host.architecture() != "x86_64":
        pytest.skip("levels of x86-64")
    asked: list[str] = []

    def compiled(level: IsaLevel, kernels: list[Kernel]) -> dict[Kernel, ObjectCode]:
        asked.append(f"{level.name}: {len(kernels)}")
        plain = ObjectCode((), b"\xc3" * 64, 0, (("avx512vl", True),))
        return dict.fromkeys(kernels, plain)

    monkeypatch.setattr(prebuild, "kernels_of", lambda level, models: [bytes_])
    monkeypatch.setattr(prebuild, "compiled_codes", compiled)
    built = prebuild.build(tmp_path, wanted, [])
    assert asked == ["x86-64-v4: 1", "x86-64-v4-vnni: 0"]
    assert [one.kernels for one in built] == [1, 0]
    (sources,) = {tuple(prebuilt.Pack(built[0].path).manifest.sources.items())}
    assert sources == ((bytes_.module, source_digest(bytes_.module)),)
