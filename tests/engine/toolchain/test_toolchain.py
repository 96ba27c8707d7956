"""The toolchain: the cache across processes, damaged and foreign entries, errors."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import struct
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llvmlite import binding

from subgraph.engine.program.pool import call
from subgraph.engine.toolchain import compile_workers, keys, loader, targets, toolchain
from subgraph.engine.toolchain.compiler import object_and_assembly
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.engine.toolchain.objectfile import link_image, undefined_symbols
from subgraph.engine.toolchain.toolchain import CompileEvent, KernelError
from subgraph.errors import ConfigError, DeviceError
from subgraph.system import host, processor
from subgraph.system.objectcache import ObjectCode
from tests.support.engine.kernels import powers

ROOT = Path(__file__).parents[3]
# Platforms on which kernels are cached as images, which need no linker.
IMAGES = sys.platform.startswith("linux") and host.architecture() == "x86_64"
# Runs one kernel and says what that took.
SCRIPT = """
import json, sys
import numpy as np
from subgraph.engine.toolchain import toolchain
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.engine.program.program import Program, Step
x = np.arange(128, dtype=np.float32)
y = np.zeros_like(x)
words = np.array([x.ctypes.data, y.ctypes.data])
kernel = Kernel("tests.support.engine.kernels", "scale", lanes=8)
Program([Step(kernel.address, words.ctypes.data, 2)]).run()
assert np.array_equal(y, x * x + 1), y
done = toolchain.statistics
heavy = [name for name in ("numba", "llvmlite.binding") if name in sys.modules]
print(json.dumps([done.compiled, done.loaded, heavy]))
"""


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT), *sys.path])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SUBGRAPH_CACHE_DIR", str(tmp_path))
    return tmp_path


def start(folder: Path, script: str = SCRIPT, path: Path = ROOT) -> subprocess.Popen[str]:
    root = str(Path(__file__).parents[3])
    variables = {
        **os.environ,
        "SUBGRAPH_CACHE_DIR": str(folder),
        "PYTHONPATH": os.pathsep.join([str(path), root]),
    }
    return subprocess.Popen(
        [sys.executable, "-c", script],
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> Any:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return json.loads(out)


def entries(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.sgk"))


def test_a_warm_process_compiles_nothing_and_has_no_numba(tmp_path: Path) -> None:
    compiled, loaded, heavy = finish(start(tmp_path))
    assert compiled == 3  # the kernel, the walker, and the entry of programs
    assert heavy == ["numba", "llvmlite.binding"]
    assert len(entries(tmp_path)) == compiled
    assert loaded == 0
    assert finish(start(tmp_path)) == [0, 3, ["llvmlite.binding"][: not IMAGES]]


def damage(raw: bytes, how: str) -> bytes:
    if how == "empty":
        return b""
    if how == "short":
        return raw[: len(raw) // 2]
    if how == "foreign":
        return b"\x7fELF" + raw[4:]
    flipped = bytearray(raw)
    flipped[-100] ^= 1
    return bytes(flipped)


@pytest.mark.parametrize("how", ["empty", "short", "flipped", "foreign"])
def test_a_damaged_entry_is_replaced(how: str, folder: Path) -> None:
    variant = {"empty": 4, "short": 8, "flipped": 16, "foreign": 32}[how]
    kernel = Kernel("tests.support.engine.kernels", "scale", lanes=variant)
    key = toolchain.cache_key(kernel, host.isa())
    path = folder / "kernels" / key[:2] / f"{key}.sgk"
    toolchain.forget(kernel)
    assert kernel.address
    good = path.read_bytes()
    path.write_bytes(damage(good, how))
    before = toolchain.statistics.compiled
    toolchain.forget(kernel)
    assert kernel.address
    assert toolchain.statistics.compiled == before + 1
    # The compiler names its object after nothing that changes: it is the same again.
    assert path.read_bytes() == good


def entry(key: str, needs: list[str], data: bytes) -> bytes:
    """Build a well-formed entry."""
    header = json.dumps({"key": key, "needs": needs}).encode()
    rest = header + data
    return struct.pack("<8s32sI", b"SGKERN01", hashlib.sha256(rest).digest(), len(header)) + rest


@pytest.mark.parametrize("kind", ["other key", "forbidden call", "no object"])
def test_a_well_formed_but_wrong_entry_is_replaced(kind: str, folder: Path) -> None:
    kernel = Kernel("tests.support.engine.kernels", "burn")
    key = toolchain.cache_key(kernel, host.isa())
    path = folder / "kernels" / key[:2] / f"{key}.sgk"
    forged = {
        "other key": entry("0" * 64, [], b"anything"),
        "forbidden call": entry(key, ["system"], b"anything"),
        "no object": entry(key, [], b"anything"),
    }[kind]
    path.parent.mkdir(parents=True)
    path.write_bytes(forged)
    before = toolchain.statistics.compiled
    toolchain.forget(kernel)
    assert kernel.address
    assert toolchain.statistics.compiled == before + 1
    assert path.read_bytes() != forged


def test_two_processes_fill_the_cache_at_once(tmp_path: Path) -> None:
    processes = [start(tmp_path) for _ in range(2)]
    for process in processes:
        compiled, loaded, _ = finish(process)
        assert compiled + loaded in (2, 3)
    assert len(entries(tmp_path)) == 3
    assert not list(tmp_path.rglob("*.tmp"))
    assert finish(start(tmp_path)) == [0, 3, ["llvmlite.binding"][: not IMAGES]]


def test_a_folder_that_cannot_be_written_warns_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # A file in the place of the folder: permissions do not stop root.
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("SUBGRAPH_CACHE_DIR", str(blocked))
    with caplog.at_level(logging.WARNING, "subgraph.engine"):
        for factory in ("burn", "count"):
            kernel = Kernel("tests.support.engine.kernels", factory)
            toolchain.forget(kernel)
            assert kernel.address
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "SUBGRAPH_CACHE_DIR" in warnings[0]


MODULE = """
from user_kernels.numbers import STEP
from subgraph.engine.codegen.simd import ld_i64, st_i64

def add():
    def kernel(args, begin, end, worker):
        st_i64(args, ld_i64(args) + STEP)
    return kernel
"""
USE = """
import json
import numpy as np
from subgraph.engine.toolchain import toolchain
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.engine.program.pool import call
cell = np.zeros(1, np.int64)
call(Kernel("user_kernels.adding", "add").address, cell.ctypes.data, 0, 0, 0)
print(json.dumps([int(cell[0]), toolchain.statistics.compiled]))
"""


def test_a_change_in_an_imported_module_compiles_anew(tmp_path: Path) -> None:
    package = tmp_path / "user_kernels"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "adding.py").write_text(MODULE)
    numbers = package / "numbers.py"
    cache = tmp_path / "cache"
    numbers.write_text("STEP = 3\n")
    assert finish(start(cache, USE, tmp_path)) == [3, 1]
    os.utime(numbers, (1, 1))
    assert finish(start(cache, USE, tmp_path)) == [3, 0]
    numbers.write_text("STEP = 40\n")
    assert finish(start(cache, USE, tmp_path)) == [40, 1]


def test_the_key_depends_on_variant_and_instruction_set() -> None:
    isas = [host.isa_named(name) for name in host.available_isas()]
    kernels = [Kernel("tests.support.engine.kernels", "scale", lanes=n) for n in (4, 8)]
    keys = {toolchain.cache_key(kernel, isa) for kernel in kernels for isa in isas}
    assert len(keys) == len(kernels) * len(isas)


def test_the_key_depends_on_how_kernels_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    isa = host.isa()
    before = keys.environment(isa)
    monkeypatch.setattr(keys, "source_digest", lambda module: f"another {module}")
    for cached in (keys.environment, keys.compiler_versions):
        cached.cache_clear()
    after = keys.environment(isa)
    for cached in (keys.environment, keys.compiler_versions):
        cached.cache_clear()
    assert after != before
    assert "another subgraph.engine.toolchain.compiler" in after


def test_spilled_vectors_are_aligned() -> None:
    isa = host.isa()
    if host.architecture() != "x86_64" or isa.vector_bytes < 32:
        pytest.skip(f"{isa.name}: the stack is aligned to vectors as it is")
    kernel = powers(dtype="float32", lanes=isa.vector_bytes)  # more than registers hold
    _, text = object_and_assembly(kernel, "kernel", isa)
    found = re.findall(r"vmov(.)\w+\s+%[yz]mm\d+, -?\w*\(%r[sb]p\)", text)
    assert "a" in found
    assert "u" not in found


def test_an_unknown_instruction_set_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUBGRAPH_ISA", "quantum")
    with pytest.raises(ConfigError, match=r"quantum.*use one of"):
        host.isa()


def test_kernels_are_values() -> None:
    one = Kernel("subgraph.ops.conv.kernels", "direct", mr=14, act="Relu")
    assert one == Kernel("subgraph.ops.conv.kernels", "direct", act="Relu", mr=14)
    assert hash(one) == hash(Kernel("subgraph.ops.conv.kernels", "direct", act="Relu", mr=14))
    assert one != Kernel("subgraph.ops.conv.kernels", "direct", mr=14, act="None")
    assert Kernel("subgraph.ops.conv.kernels", "direct", mr=1) != Kernel(
        "subgraph.ops.conv.kernels", "direct", mr=True
    )
    assert repr(one) == "Kernel(subgraph.ops.conv.kernels.direct(act='Relu', mr=14))"
    assert one != "text"


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("broken", "cannot be compiled"),
        ("raising", "which kernels may not"),
        ("missing", "missing"),
        ("bad_assembly", "cannot be compiled"),
        ("assembly_that_calls_system", "'system'"),
    ],
)
def test_a_bad_kernel_is_an_error(factory: str, message: str, folder: Path) -> None:
    with pytest.raises(KernelError, match=message) as caught:
        _ = Kernel("tests.support.engine.kernels", factory).address
    assert f"tests.support.engine.kernels.{factory}" in str(caught.value)
    assert isinstance(caught.value, DeviceError)
    assert not entries(folder)


def test_a_missing_module_is_an_error() -> None:
    with pytest.raises(KernelError, match=r"subgraph\.ops\.no_such_kernels"):
        _ = Kernel("subgraph.ops.no_such_kernels", "anything").address


def test_listeners_hear_of_compilations(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    events: list[CompileEvent] = []
    end = toolchain.watch_compilation(events.append)
    kernel = Kernel("tests.support.engine.kernels", "nested")
    toolchain.forget(kernel)
    with caplog.at_level(logging.INFO, "subgraph.engine"):
        assert toolchain.prepare([kernel, kernel]) == 1
    end()
    assert [event.kernel for event in events] == [kernel, kernel]
    assert events[0].seconds is None
    assert (events[1].seconds or 0) > 0
    assert "compiling tests.support.engine.kernels.nested()" in caplog.text
    toolchain.forget(kernel)
    assert toolchain.prepare([kernel]) == 0
    assert len(events) == 2
    word = np.zeros(1, np.int64)
    call(kernel.address, word.ctypes.data, 3, 10, 0)
    assert word[0] == 14


def test_the_first_compilation_is_announced(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(toolchain.statistics, "announced", False)
    kernel = Kernel("tests.support.engine.kernels", "nested")
    for _ in range(2):
        toolchain.forget(kernel)
        for entry in entries(folder):
            entry.unlink()
        with caplog.at_level(logging.WARNING, "subgraph.engine"):
            assert toolchain.prepare([kernel]) == 1
    (said,) = (r.getMessage() for r in caplog.records if r.levelno == logging.WARNING)
    assert said.startswith("compiling 1 kernel(s)")
    assert str(folder) in said


def address_of(kernel: Kernel) -> int:
    return kernel.address


def test_kernels_are_loaded_from_many_threads() -> None:
    kernels = [Kernel("tests.support.engine.kernels", "scale", lanes=n) for n in (2, 4, 8)]
    for kernel in kernels:
        toolchain.forget(kernel)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(address_of, kernels * 8))
    assert found == [k.address for k in kernels] * 8


# Calls, constants, a switch and a local function, as LLVM writes them.
PARTS = """
@table = private constant [4 x i64] [i64 3, i64 5, i64 7, i64 11]
declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)
declare double @cos(double)
declare double @tan(double)

define internal double @both(double %x) noinline {
  %c = call double @cos(double %x)
  %t = call double @tan(double %x)
  %sum = fadd double %c, %t
  %more = fmul double %sum, 0x3FF3AE147AE147AE
  ret double %more
}

define void @entry(i64 %to, i64 %from, i64 %size, i64 %which) {
start:
  %at = inttoptr i64 %to to ptr
  %source = inttoptr i64 %from to ptr
  call void @llvm.memcpy.p0.p0.i64(ptr %at, ptr %source, i64 %size, i1 false)
  %x = load double, ptr %at
  %y = call double @both(double %x)
  store double %y, ptr %at
  switch i64 %which, label %done [ i64 1, label %a
    i64 2, label %b
    i64 3, label %c
    i64 4, label %d
    i64 5, label %e ]
a:
  %z = fneg double %y
  store double %z, ptr %at
  br label %done
b:
  %i = load i64, ptr getelementptr ([4 x i64], ptr @table, i64 0, i64 2)
  store i64 %i, ptr %at
  br label %done
c:
  %p = getelementptr [4 x i64], ptr @table, i64 0, i64 %size
  store ptr %p, ptr %at
  br label %done
d:
  %s = call double @both(double %y)
  store double %s, ptr %at
  br label %done
e:
  store i64 %from, ptr %at
  br label %done
done:
  ret void
}
"""


@pytest.mark.skipif(not IMAGES, reason="object code is linked by LLVM here")
def test_images_run_as_what_llvm_links() -> None:
    module = binding.parse_assembly(PARTS)
    data = bytes(targets.machine().emit_object(module))
    needs = undefined_symbols(data)
    assert {"cos", "memcpy", "tan"} <= set(needs)
    code = loader.as_image("entry", ObjectCode(needs, data))
    assert code.start is not None
    [found] = loader.load([("entry", code)])
    [want] = loader._link([("entry", ObjectCode(needs, data))])
    source = np.linspace(0.3, 2, 3)
    for which in range(7):
        results = [np.zeros(3), np.zeros(3)]
        for address, target in zip((found, want), results, strict=True):
            call(address, target.ctypes.data, source.ctypes.data, source.nbytes, which)
        if which != 3:  # that gives an address
            np.testing.assert_array_equal(results[0], results[1])


@pytest.mark.parametrize(("start", "needs"), [(-1, ()), (99, ()), (0, ("exp",) * 99)])
def test_inconsistent_code_is_not_loaded(start: int, needs: tuple[str, ...]) -> None:
    """Found by fuzzing: the loader jumped to a start outside of the code."""
    with pytest.raises(loader.KernelError, match="damaged"):
        loader.load([("entry", ObjectCode(needs, bytes(99), start))])


def test_objects_that_are_no_image_are_left_to_llvm() -> None:
    text = "@state = global i64 0\ndefine void @entry() {\n store i64 1, ptr @state\n ret void\n}"
    data = bytes(targets.machine().emit_object(binding.parse_assembly(text)))
    assert (
        link_image(data, "entry", undefined_symbols(data)) is None
    )  # it writes to memory of its own
    good = bytes(targets.machine().emit_object(binding.parse_assembly(PARTS)))
    assert link_image(good, "other", undefined_symbols(good)) is None
    assert link_image(good, "entry", ()) is None
    for size in range(0, len(good), 61):
        link_image(good[:size], "entry", undefined_symbols(good))  # None, or whole: it never raises
    code = ObjectCode(undefined_symbols(data), data)
    assert loader.load([("entry", code)]) != [0]


def test_the_processor_is_queried_once_for_a_machine(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    description = folder / "cpuinfo"
    asked: list[int] = []

    def ask() -> processor.Processor:
        asked.append(1)
        return processor.Processor("some", {"avx": True, "fma": False})

    monkeypatch.setattr(processor, "_from_llvm", ask)
    assert processor.processor(folder / "none") == ask()  # nothing tells when it is another
    description.write_text("processor : 0\ncpu MHz : 1\nflags : avx\n\nprocessor : 1\n")
    asked.clear()
    for megahertz in (1, 2):
        description.write_text(f"processor : 0\ncpu MHz : {megahertz}\nflags : avx\n")
        assert processor.processor(description) == ("some", {"avx": True, "fma": False})
    assert len(asked) == 1
    [found] = (folder / "kernels").iterdir()
    good = found.read_text()
    for bad in ("", good[:-5], good.replace("some", "same")):
        found.write_text(bad)
        assert processor.processor(description).name == "some"
        assert found.read_text() == good
    description.write_text("processor : 0\nflags : avx sse\n")
    processor.processor(description)
    assert len(asked) == 5


def test_undefined_symbols_of_a_damaged_object() -> None:
    assert undefined_symbols(b"not an object") == ()
    with pytest.raises(ValueError, match="damaged"):
        undefined_symbols(b"\x7fELF\x02\x01" + bytes(40))
    with pytest.raises(ValueError, match="damaged"):
        undefined_symbols(b"\x7fELF\x02\x01" + b"\xff" * 200)


def test_host_facts() -> None:
    assert host.core_count() >= 1
    sizes = host.caches()
    assert 4096 <= sizes.l1 <= sizes.l2 <= sizes.l3 or sizes.l3 > 0
    assert host.lanes("float32") == max(1, host.isa().vector_bytes // 4)
    assert host.lanes("int8") >= host.lanes("float64")
    assert host.isa().name in host.available_isas()


WORKERS = """
import json, sys
from subgraph.engine.toolchain import toolchain, compile_workers
from subgraph.engine.toolchain.kernel import Kernel
compile_workers.worker_count = lambda kernels: 2
events = []
toolchain.watch_compilation(events.append)
kernels = [Kernel("tests.support.engine.kernels", "scale", lanes=n) for n in (1, 2, 4, 8, 16, 32)]
kernels.append(Kernel("tests.support.engine.kernels", "count"))
made = toolchain.prepare(kernels)
done = toolchain.statistics
addresses = {k.address for k in kernels}
print(json.dumps([made, done.compiled, done.loaded, len(addresses), len(events)]))
"""


def test_many_kernels_are_compiled_by_several_processes(tmp_path: Path) -> None:
    assert finish(start(tmp_path, WORKERS)) == [7, 7, 7, 7, 14]
    assert len(entries(tmp_path)) == 7
    assert finish(start(tmp_path, WORKERS)) == [0, 0, 7, 7, 0]


BAD_WORKERS = """
import json
from subgraph.engine.toolchain import toolchain, compile_workers
from subgraph.engine.toolchain.kernel import Kernel
compile_workers.worker_count = lambda kernels: 1
good = [Kernel("tests.support.engine.kernels", "scale", lanes=n) for n in (1, 2, 4)]
try:
    toolchain.prepare([Kernel("tests.support.engine.kernels", "broken"), *good])
except toolchain.KernelError as error:
    print(json.dumps([str(error)[:60], len(toolchain.Statistics.__dict__) > 0]))
"""


def test_an_error_in_a_worker_reaches_the_caller(tmp_path: Path) -> None:
    message, _ = finish(start(tmp_path, BAD_WORKERS))
    assert message.startswith("tests.support.engine.kernels.broken(): cannot be compile")


def test_the_number_of_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_workers, "_MAX_WORKERS", 15)
    monkeypatch.setattr(host, "core_count", lambda: 4)
    monkeypatch.setattr(sys, "executable", "/usr/bin/python3")
    assert [compile_workers.worker_count(n) for n in (0, 2, 3, 6, 100)] == [0, 0, 1, 2, 3]
    monkeypatch.setattr(sys, "executable", "/usr/bin/blender")
    assert compile_workers.worker_count(100) == 0


def test_quotas_of_control_groups(tmp_path: Path) -> None:
    assert host.cgroup_cores(tmp_path) == float("inf")
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("3:cpu:/old\n0::/user.slice/mine\n")
    mine = tmp_path / "sys/fs/cgroup/user.slice/mine"
    mine.mkdir(parents=True)
    (mine / "cpu.max").write_text("max 100000\n")
    assert host.cgroup_cores(tmp_path) == float("inf")
    (mine.parent / "cpu.max").write_text("250000 100000\n")
    assert host.cgroup_cores(tmp_path) == 2.5
    old = tmp_path / "sys/fs/cgroup/cpu"
    old.mkdir()
    (old / "cpu.cfs_quota_us").write_text("-1\n")
    (old / "cpu.cfs_period_us").write_text("100000\n")
    assert host.cgroup_cores(tmp_path) == 2.5
    (old / "cpu.cfs_quota_us").write_text("150000\n")
    assert host.cgroup_cores(tmp_path) == 1.5
