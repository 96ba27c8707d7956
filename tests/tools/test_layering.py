"""Import arrows point inward: each folder imports those before it in `ORDER`.

Every import counts, those inside functions and under ``TYPE_CHECKING`` too; and heavy packages
load late.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from configparser import ConfigParser
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = {"numba", "llvmlite", "pyopencl", "onnx", "rich", "onnxruntime", "hypothesis"}

# The folders, each after all that it may import. "base" is the files errors.py and _version.py;
# "face" is subgraph/__init__.py, what users import, and connections.py, which answers the hooks.
ORDER = [
    "base",
    "system",
    "graph",
    "weights",
    "operators",
    "transform",
    "runtime.generation",
    "runtime",
    "partition.search",
    "partition",
    "onnx_format",
    "text_form",
    "engine",
    "engine.codegen",
    "engine.toolchain",
    "engine.program",
    "engine.planner",
    "engine.executable",
    "engine.region",
    "engine.cpu",
    "opencl",
    "devices",
    "ops",
    "ops.shared",
    "ops.elementwise",
    "ops.checks",
    "ops.movement",
    "ops.pool",
    "ops.reduce",
    "ops.indexing",
    "ops.matmul",
    "ops.image",
    "ops.unfold",
    "ops.conv.bfloat16",
    "ops.conv",
    "ops.normalization",
    "ops.quantized",
    "ops.recurrent",
    "ops.attention",
    "ops.selection",
    "ops.signal",
    "ops.ml",
    "ops.text",
    "ops.random",
    "ops.training",
    "ops.control_flow",
    "ops.contrib",
    "passes",
    "passes.simplify",
    "passes.shapes",
    "passes.control_flow",
    "passes.precision",
    "passes.gradient",
    "passes.fuse",
    "devices.placement",
    "devices.plugins",
    "devices.backends.libraries",
    "devices.backends",
    "frontends",
    "visualization",
    "face",
    "testing",
    "tools",
    "tools.pyinstaller",
]


# What is for the CPU alone; a region of OPENCL imports none of it.
OF_THE_CPU = ("subgraph.engine.cpu", "subgraph.engine.executable")


def module_files() -> Iterator[tuple[str, Path]]:
    for folder, package in (
        ("subgraph", "subgraph"),
        ("ops", "subgraph.ops"),
        ("passes", "subgraph.passes"),
    ):
        for path in sorted((ROOT / folder).rglob("*.py")):
            inner = path.relative_to(ROOT / folder)
            if folder == "subgraph" and inner.parts[0] in ("ops", "passes"):
                continue  # the links beside; walked as folders of their own
            parts = [package, *inner.with_suffix("").parts]
            yield ".".join(parts).removesuffix(".__init__"), path


MODULES = dict(module_files())
PACKAGES = {module for module, path in MODULES.items() if path.name == "__init__.py"}


def folder_of(module: str) -> str:
    """Return the entry of `ORDER` that a module belongs to."""
    if module in ("subgraph", "subgraph.connections", "subgraph.__main__"):
        return "tools" if module == "subgraph.__main__" else "face"
    package = module if module in PACKAGES else module.rpartition(".")[0]
    folder = package.removeprefix("subgraph").removeprefix(".") or "base"
    assert folder in ORDER, f"add {folder!r} to ORDER of this file, behind all that it imports"
    return folder


@cache
def imports(module: str) -> tuple[tuple[str, int], ...]:
    """Return the modules of this package that a module imports, with the line of each import."""
    path = MODULES[module]
    package = module if module in PACKAGES else module.rpartition(".")[0]
    found: list[tuple[str, int]] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join([*(above if node.level else []), *filter(None, [node.module])])
            for alias in node.names:
                full = f"{base}.{alias.name}"
                found.append((full if full in MODULES else base, node.lineno))
    own = [(name, line) for name, line in found if name.split(".")[0] == "subgraph"]
    return tuple(item for item in own if item[0] != "subgraph._version")


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imported_modules_exist(module: str) -> None:
    """A module that only a kernel loads, in its compiler process, is not missed before it runs."""
    beside = {"subgraph", *PACKAGES}
    missing = [name for name, _ in imports(module) if name not in MODULES and name not in beside]
    assert not missing, missing


def pointing_up(module: str) -> Iterator[tuple[str, int]]:
    here = ORDER.index(folder_of(module))
    for target, line in imports(module):
        if ORDER.index(folder_of(target)) > here:
            yield f"{module} -> {target}", line


@pytest.mark.parametrize("module", sorted(MODULES))
def test_arrows_point_inward(module: str) -> None:
    wrong = [f"line {line}: {arrow}" for arrow, line in pointing_up(module)]
    assert not wrong, wrong


def test_no_modules_import_each_other_in_a_circle() -> None:
    circle = {
        module: {name for name, _ in imports(module) if name in MODULES and name != module}
        for module in MODULES
    }
    while circle:
        imported = set[str]().union(*circle.values())
        free = [m for m, needed in circle.items() if m not in imported or not needed]
        if not free:
            break
        for module in free:
            del circle[module]
        for needed in circle.values():
            needed.intersection_update(circle)
    assert not circle, circle


def test_regions_of_opencl_take_nothing_that_is_the_cpus_own() -> None:
    shared = [m for m in MODULES if m.startswith(("subgraph.opencl", "subgraph.engine.region"))]
    wrong = {(m, name) for m in shared for name, _ in imports(m) if name.startswith(OF_THE_CPU)}
    assert not wrong, wrong


def test_every_folder_is_in_the_order() -> None:
    assert {folder_of(module) for module in MODULES} == set(ORDER)


def test_every_folder_is_installed() -> None:
    config = ConfigParser()
    config.read(ROOT / "setup.cfg")
    listed = config["options"]["packages"].split()
    assert sorted(PACKAGES) == sorted(listed), (
        f"packages of setup.cfg: add {sorted({*PACKAGES} - {*listed})}, "
        f"remove {sorted({*listed} - {*PACKAGES})}"
    )


def test_no_folder_is_crowded() -> None:
    for folder in {path.parent for path in MODULES.values()}:
        files = [path for path in folder.iterdir() if path.suffix in (".py", ".cl")]
        assert len(files) <= 21, f"{folder}: {len(files)} files; make folders of it"


@pytest.mark.parametrize("module", sorted(MODULES))
def test_siblings_of_an_operator_or_pass_are_imported_relatively(module: str) -> None:
    package = module.rpartition(".")[0]
    if not package.startswith(("subgraph.ops.", "subgraph.passes.")):
        return
    absolute = [
        node.lineno
        for node in ast.walk(ast.parse(MODULES[module].read_text()))
        if isinstance(node, ast.ImportFrom)
        and not node.level
        and f"{node.module}.".startswith(f"{package}.")
    ]
    assert not absolute, f"{module}: sibling imports must be relative, lines {absolute}"


def test_one_module_uses_the_internals_of_numba() -> None:
    """Those of llvmlite nobody uses."""
    private = ("numba.core", "llvmlite.ir.", "llvmlite.binding.")
    users: set[str] = set()
    for module, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [f"{node.module}."]
            if any(name.startswith(private) for name in names):
                users.add(module)
    assert users - {"subgraph.system.numba_internals"} == set()


def test_import_takes_no_heavy_package() -> None:
    code = f"import sys, subgraph; print(sorted({HEAVY!r} & set(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_every_public_name_loads() -> None:
    import subgraph

    assert subgraph.__all__
    for name in subgraph.__all__:
        assert getattr(subgraph, name) is not None, name
