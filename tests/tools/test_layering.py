"""Import arrows point inward: core, leaves, devices, face; heavy packages load late."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FACE = {"subgraph.devices.core", "subgraph.tools.cli", "subgraph"}
HEAVY = {"numba", "llvmlite", "pyopencl", "onnx", "rich", "onnxruntime", "hypothesis"}


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


def layer(module: str) -> str:
    if module in FACE:
        return "face"
    for package, name in (
        ("subgraph.ops", "ops"),
        ("subgraph.passes", "passes"),
        ("subgraph.devices", "devices"),
        ("subgraph.testing", "testing"),
        ("subgraph.__main__", "face"),
        ("subgraph.tools.backend", "face"),
        ("subgraph.tools.bench", "face"),
        ("subgraph.tools.bench_worker", "face"),
        ("subgraph.tools.cli_inputs", "face"),
        ("subgraph.tools.cli_accuracy", "face"),
        ("subgraph.tools.cli_measure", "face"),
        ("subgraph.tools.cli_output", "face"),
        ("subgraph.tools.profiling", "face"),
        ("subgraph.tools.warmup", "face"),
        ("subgraph.tools.warmup_graphs", "face"),
    ):
        if module == package or module.startswith(package + "."):
            return name
    return "core"


def imports(module: str, path: Path, *, top_level_only: bool = False) -> Iterator[tuple[str, int]]:
    tree = ast.parse(path.read_text())
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    work: list[ast.AST] = list(tree.body)
    while work:
        node = work.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join(
                    package.split(".")[: len(package.split(".")) - node.level + 1]
                    + ([base] if base else [])
                )
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield (full if full in MODULES else base), node.lineno
        elif not (top_level_only and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))):
            work.extend(ast.iter_child_nodes(node))


ALLOWED = {
    "core": {"core"},
    "ops": {"core", "ops"},
    "passes": {"core", "passes"},
    "devices": {"core", "devices"},
    "testing": {"core", "testing", "face", "ops", "passes"},
    "face": {"core", "ops", "passes", "devices", "testing", "face"},
}


@pytest.mark.parametrize("module", sorted(MODULES))
def test_arrows_point_inward(module: str) -> None:
    here = layer(module)
    wrong = [
        f"line {line} imports {target} ({layer(target)})"
        for target, line in imports(module, MODULES[module])
        if target.split(".")[0] == "subgraph"
        and target != "subgraph._version"
        and layer(target) not in ALLOWED[here]
    ]
    assert not wrong, f"{module} ({here}): {wrong}"


@pytest.mark.parametrize("module", sorted(m for m in MODULES if layer(m) in ("ops", "passes")))
def test_a_leaf_reaches_the_core_by_full_names_and_siblings_relatively(module: str) -> None:
    text = MODULES[module].read_text()
    package = module.rpartition(".")[0] if module.count(".") > 1 else module
    absolute = [
        node.lineno
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom)
        and not node.level
        and (node.module or "").startswith(package)
    ]
    assert not absolute, f"{module}: sibling imports must be relative, lines {absolute}"


def test_import_takes_no_heavy_package() -> None:
    code = f"import sys, subgraph; print(sorted({HEAVY!r} & set(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_every_public_name_loads() -> None:
    import subgraph

    assert subgraph.__all__
    for name in subgraph.__all__:
        assert getattr(subgraph, name) is not None, name
