"""What a process loads only when it must: files of registries, onnx, the standard's schemas."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.defs
import pytest
from onnx import TensorProto, helper, numpy_helper

import subgraph as sg
from subgraph import ops
from subgraph.engine.planner.lowering import LOWERINGS
from subgraph.operators import schema, schema_cache
from subgraph.operators.operator import OPERATORS
from subgraph.operators.protobuf import tensor_from_proto
from subgraph.operators.schema import CONTRIBUTED
from subgraph.system.environment import cache_folder
from subgraph.system.registry import Files, Registry
from subgraph.transform.pass_manager import PASSES

FILES = {
    "first": 'add("One")',
    "second": 'add("Two", "far::" + "Other")',
    "table": "add(*TABLE)",
    "unused": 'add("Three")',
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Registry[str]]:
    """A registry over the files of a package made of FILES."""
    package = tmp_path / "lazy_folder"
    package.mkdir()
    head = "from lazy_folder import LOADED, TABLE, registry\nLOADED.append(__name__[12:])\n"
    head += "def add(*names):\n    for n in names:\n        registry.register(n, n, __name__)\n"
    (package / "__init__.py").write_text("LOADED, TABLE = [], ['Com' + 'puted']\n")
    for name, text in FILES.items():
        (package / f"{name}.py").write_text(f"{head}{text}\n")
    monkeypatch.syspath_prepend(tmp_path)
    import lazy_folder  # pyright: ignore[reportMissingImports]  # made just now

    registry: Registry[str] = Registry("thing", sg.SubgraphError, Files("lazy_folder", _is_shown))
    lazy_folder.registry = registry
    yield registry
    for name in [name for name in sys.modules if name.startswith("lazy_folder")]:
        del sys.modules[name]


def _is_shown(name: str) -> bool:
    return "._" not in name


def loaded() -> list[str]:
    return sys.modules["lazy_folder"].LOADED


def test_a_name_loads_the_files_that_hold_it(folder: Registry[str]) -> None:
    assert folder.get("One") == "One"
    assert loaded() == ["first"]
    assert "far::Other" in folder
    assert folder.find("Two") == "Two"
    assert loaded() == ["first", "second"]


def test_a_computed_name_loads_all(folder: Registry[str]) -> None:
    folder.get("Two")
    assert folder.get("Computed") == "Computed"
    assert loaded() == ["second", "first", "table", "unused"]
    assert folder.find("None") is None


def test_names_load_all(folder: Registry[str]) -> None:
    assert folder.names() == ["Computed", "One", "Three", "Two", "far::Other"]


def test_sources_that_are_not_there(folder: Registry[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """An installation without sources has no text to look at."""
    monkeypatch.setattr("subgraph.system.registry._source", lambda _: b"")
    assert folder.get("One") == "One"
    assert len(loaded()) == len(FILES)


def test_a_name_of_two_owners_is_found_when_it_is_used(folder: Registry[str]) -> None:
    folder.register("One", "mine", "here")
    with pytest.raises(sg.SubgraphError, match="two owners: here and lazy_folder"):
        folder.get("One")


@pytest.mark.parametrize("registry", [OPERATORS, LOWERINGS, PASSES])
def test_no_name_has_two_owners(registry: Registry[Any]) -> None:
    """A process that loads few files would not notice."""
    assert len(registry.names()) > 10


@pytest.mark.parametrize("registry", [OPERATORS, CONTRIBUTED, LOWERINGS, PASSES])
def test_every_name_is_found_by_the_source_of_its_module(registry: Registry[Any]) -> None:
    """Look-ups of names that may not exist import no other files."""
    known: Any = registry._files
    files = Files(known._package, known._keep, known._home_of)
    own = [module.__file__ for key, module in sys.modules.items() if key.startswith("subgraph.")]
    checked = 0
    for name in registry.names():
        owner = registry.owner(name).rpartition(":")[0]
        if owner not in own:  # another test of this process has registered it
            continue
        modules = files.naming(name)
        assert len(modules) < 10
        assert owner in [sys.modules[module].__file__ for module in modules], name
        checked += 1
    assert checked > 10


LOAD = """
import sys
import numpy as np
import subgraph as sg
model = sg.compile_model(sys.argv[1], "CPU", {"CACHE_DIR": sys.argv[2]})
model(np.ones((1, 3, 8, 8), np.float32))
loaded = [name for name in sys.modules if name.partition(".")[0] in ("onnx", "numba")]
print(loaded + [name for name in sys.modules if name.startswith("subgraph.ops.contrib.")])
files = [name.split(".") for name, module in sys.modules.items() if not hasattr(module, "__path__")]
print(*{name[2] for name in files if name[:2] == ["subgraph", "ops"] and len(name) > 3})
"""

NEEDED = {"conv", "elementwise", "movement", "pool", "shared", "checks"}
"""The families that the model uses, the windows that Conv shares with pooling, and the checks
that the engine itself adds."""


@pytest.mark.parametrize("cached", [False, True])
def test_a_model_runs_without_what_it_does_not_need(tmp_path: Path, cached: bool) -> None:
    x = sg.input("x", shape=(1, 3, 8, 8), dtype="float32")
    w = sg.parameter("w", np.ones((8, 3, 3, 3), np.float32))
    shape = sg.parameter("shape", np.array([0, -1], np.int64))
    y = ops.Reshape(ops.Clip(ops.Add(ops.Conv(x, w, pads=[1] * 4), 1.0), 0.0, 6.0), shape)
    sg.save(sg.Graph([x], [y]), tmp_path / "net.onnx")
    folder = str(tmp_path / "models") if cached else ""
    argv = [sys.executable, "-c", LOAD, str(tmp_path / "net.onnx"), folder]
    subprocess.run(argv, check=True)  # it may have to compile, and to keep the schemas
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    imported, families = done.stdout.splitlines()
    assert imported == "[]"
    assert set(families.split()) <= NEEDED


def test_a_detector_runs_without_the_reference(tmp_path: Path) -> None:
    """Sizes that data decide, and shapes that are computed ahead: usual operators, by NumPy."""
    x = sg.input("x", shape=(1, 3, 8, 8), dtype="float32")
    height = ops.Gather(ops.Shape(x), sg.parameter("at", np.array([2], np.int64)))
    sizes = ops.Concat(sg.parameter("n", np.array([1, 3], np.int64)), height, height, axis=0)
    grown = ops.Resize(x, None, None, ops.Mul(sizes, sg.parameter("k", np.array([1, 1, 2, 2]))))
    count = ops.ReduceProd(
        ops.Slice(sizes, *(sg.parameter(n, [v]) for n, v in (("s", 2), ("e", 4))))
    )
    flat = ops.Reshape(grown, sg.parameter("flat", np.array([-1], np.int64)))
    best, places = ops.TopK(flat, ops.Reshape(count, sg.parameter("one", np.array([1], np.int64))))
    found = ops.NonZero(ops.Greater(best, 0.5))
    sg.save(sg.Graph([x], [found, places]), tmp_path / "net.onnx")
    argv = [sys.executable, "-c", LOAD, str(tmp_path / "net.onnx"), ""]
    subprocess.run(argv, check=True)  # it may have to compile, and to keep the schemas
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[0] == "[]"


def test_message_classes_are_those_of_onnx() -> None:
    code = """
import sys
from subgraph.operators import messages as onnx_messages
assert "onnx" not in sys.modules
import onnx
for name in onnx_messages.__all__:
    assert getattr(onnx_messages, name) == getattr(onnx, name), name
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache folder of its own."""
    monkeypatch.setenv("SUBGRAPH_CACHE_DIR", str(tmp_path))
    schema_cache.cached_schemas.cache_clear()
    yield tmp_path
    schema_cache.cached_schemas.cache_clear()


def test_kept_schemas_are_those_of_onnx(kept: Path) -> None:
    found = schema_cache.cached_schemas()
    assert found is not None
    assert len(list(kept.rglob("*.sgk"))) == 1
    for op_type, domain in schema.standard_operators():
        for version in range(1, schema.newest_opset(domain) + 1):
            try:
                want = schema.from_onnx(onnx.defs.get_schema(op_type, version, domain))
            except onnx.defs.SchemaError:
                want = None
            assert found.find(op_type, domain, version) == want, (op_type, version)
    assert found.find("Con", "", 13) is None
    assert found.find("Conv", "far", 13) is None
    assert found.newest == {domain: schema.newest_opset(domain) for domain in found.newest}


def test_kept_schemas_that_are_damaged_are_made_anew(kept: Path) -> None:
    first = schema_cache.cached_schemas()
    [path] = kept.rglob("*.sgk")
    path.write_bytes(path.read_bytes()[:-1])
    schema_cache.cached_schemas.cache_clear()
    assert schema_cache.cached_schemas() == first


def test_no_schemas_are_kept_where_nothing_can_be(
    kept: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SUBGRAPH_CACHE_DIR", str(kept / "file"))
    (kept / "file").write_text("in the way")
    assert schema_cache.cached_schemas() is None
    assert str(cache_folder()).startswith(str(kept / "file"))
    assert not caplog.records


DTYPES = [
    value for name, value in TensorProto.DataType.items() if name not in ("UNDEFINED", "STRING")
]


@pytest.mark.parametrize("raw", [True, False])
@pytest.mark.parametrize("shape", [(2, 3), (), (0, 2)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_are_read_as_onnx_does(dtype: int, shape: tuple[int, ...], raw: bool) -> None:
    held = helper.tensor_dtype_to_np_dtype(dtype)
    values = np.random.default_rng(2).integers(0, 2, shape)
    if raw:
        proto = numpy_helper.from_array(values.astype(held), "t")
    else:
        proto = helper.make_tensor("t", dtype, shape, values.astype(held).reshape(-1))
    found, want = tensor_from_proto(proto), numpy_helper.to_array(proto)
    assert (found.dtype, found.shape) == (want.dtype, want.shape)
    np.testing.assert_array_equal(found.astype(np.complex128), want.astype(np.complex128))


def test_tensors_whose_size_does_not_fit() -> None:
    proto = numpy_helper.from_array(np.arange(6, dtype=np.int64), "t")
    for raw in (proto.raw_data[:-8], proto.raw_data[:-1], b""):
        proto.raw_data = raw
        with pytest.raises(sg.ModelError, match="damaged"):
            tensor_from_proto(proto)
    field = helper.make_tensor("t", TensorProto.FLOAT, (3,), [1.0, 2.0, 3.0])
    del field.float_data[:]
    with pytest.raises(sg.ModelError, match="damaged"):
        tensor_from_proto(field)


def test_what_plans_kernels_loads_no_compiler() -> None:
    """Kernels are found as object code: planning any operator must not bring numba in."""
    code = """
import sys
from subgraph.engine.planner.lowering import LOWERINGS
from subgraph.devices.plugins import cpu
LOWERINGS.names()
assert any(name.endswith("ml.trees_cpu") for name in sys.modules), "all files are loaded"
print([name for name in ("numba", "scipy", "onnx") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
