"""ONNX's own suite on the devices: the reference whole but for the large models, others in part.

``make conformance`` runs everything, in processes of its own and beside the peers.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import subgraph as sg
from subgraph.testing import conformance as suite
from subgraph.tools import backend

pytestmark = pytest.mark.filterwarnings("ignore")
# Named here: to ask the suite takes longer than all else that is done to collect the tests.
_CATEGORIES = (
    *("ai.onnx.ml", "attention", "cast", "control flow", "convolution, pooling"),
    *("models: pytorch-converted", "models: pytorch-operator", "models: simple"),
    *("normalization, losses", "other operators", "quantization", "random", "recurrent"),
    *("reduction", "resize", "sequence, optional", "signal", "strings, text", "training"),
)


@cache
def _possible() -> list[suite.Case]:
    """Return all cases but the large models and those that nobody can pass."""
    return [c for c in suite.cases() if c.kind != "real" and c.name not in suite.IMPOSSIBLE]


def _failures(
    cases: list[suite.Case], prepare: Callable[[onnx.ModelProto], suite.Run]
) -> list[str]:
    failed: list[str] = []
    for case in cases:
        try:
            suite.run(case, prepare)
        except Exception as error:
            failed.append(
                f"{case.name}: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
            )
    return failed


def _on(device: str, source: Callable[[onnx.ModelProto], Any] = lambda m: m) -> Any:
    return lambda model: backend.prepare(source(model), device).run


def test_every_category_is_tested() -> None:
    assert {case.category for case in suite.cases() if case.kind != "real"} == set(_CATEGORIES)


@pytest.mark.parametrize("category", _CATEGORIES)
def test_reference_passes_every_case_that_can_pass(category: str) -> None:
    assert not _failures([c for c in _possible() if c.category == category], _on("REFERENCE"))


def test_cpu_passes_every_case_of_quantization() -> None:
    # Scales in float16 once were refused: no sample had them.
    assert not _failures([c for c in _possible() if c.category == "quantization"], _on("CPU"))


def test_auto_passes_a_sample() -> None:
    assert not _failures(_possible()[3::29], _on("AUTO"))


@pytest.mark.parametrize("seed", [1, 2])
def test_a_random_partition_changes_nothing(seed: int) -> None:
    sample = _possible()[seed::13]
    assert not _failures(sample, _on("REFERENCE", lambda m: suite.partitioned(m, seed)))


def test_save_and_load_changes_nothing(tmp_path: Path) -> None:
    assert not _failures(_possible()[5::11], _on("REFERENCE", lambda m: suite.saved(m, tmp_path)))


def test_the_text_form_changes_nothing() -> None:
    assert not _failures(_possible()[6::11], _on("REFERENCE", suite.reprinted))


def test_export_and_import_changes_nothing() -> None:
    def prepare(model: onnx.ModelProto) -> suite.Run:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.blob"
            sg.compile_model(model, "REFERENCE").export_model(path)
            return backend.SubgraphRep(sg.import_model(path, "REFERENCE")).run

    assert not _failures(_possible()[7::23], prepare)


def test_plans_traced_in_every_dimension_change_nothing() -> None:
    with suite.traced():
        assert not _failures(_possible()[8::19], _on("CPU"))


# --- what nobody can pass ----------------------------------------------------------------------


def _case(name: str) -> suite.Case:
    return next(case for case in suite.cases() if case.name == name)


def test_the_corrected_cases_of_older_suites_pass_in_the_newest() -> None:
    assert suite.excused() == suite.IMPOSSIBLE
    assert set(suite.excused("old")) == {*suite.IMPOSSIBLE, *suite.CORRECTED}
    assert not _failures([_case(name) for name in suite.CORRECTED], _on("REFERENCE"))


def test_the_judge_refuses_even_the_expected_sequence_with_a_scalar() -> None:
    case = _case("test_loop16_seq_none")
    [(inputs, expected)] = case.load()[1]
    with pytest.raises(TypeError):
        suite.assert_matches(case, expected, expected)
    # Our result is what the suite expects: compared element by element, as it is everywhere else.
    got = backend.run_model(case.load()[0], inputs, "REFERENCE")[0]
    assert len(got) == len(expected[0])
    for mine, theirs in zip(got, expected[0], strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_the_expected_values_of_bernoulli_are_no_function_of_model_and_input() -> None:
    from onnx.backend.test.case.node.bernoulli import bernoulli_reference_implementation

    names = [name for name in suite.IMPOSSIBLE if "bernoulli" in name]
    assert len(names) == 6
    for name in names:
        [(inputs, expected)] = _case(name).load()[1]
        dtype = expected[0].dtype
        draws = {bernoulli_reference_implementation(inputs[0], dtype).tobytes() for _ in range(20)}
        # The suite's own generator of expected values gives others every time it is asked.
        assert len(draws) > 1


def test_bernoulli_draws_with_the_given_probabilities() -> None:
    model = _case("test_bernoulli_double").load()[0]
    expected = np.linspace(0, 1, 10)
    prepared = backend.prepare(model, "REFERENCE")
    drawn = np.mean([prepared.run([expected.astype(np.float32)])[0] for _ in range(4000)], axis=0)
    np.testing.assert_allclose(drawn, expected, atol=0.06)


# --- the backend interface ---------------------------------------------------------------------


def test_backend_runs_a_node_and_a_model() -> None:
    a, b = np.array([1.0, 2.0], np.float32), np.array([3.0, 5.0], np.float32)
    node = onnx.helper.make_node("Sub", ["a", "b"], ["c"])
    assert backend.run_node(node, [a, b], "REFERENCE")[0].tolist() == [-2.0, -3.0]
    assert backend.run_node(node, {"b": a, "a": b}, "REFERENCE").c.tolist() == [2.0, 3.0]
    old = onnx.helper.make_node("Softmax", ["x"], ["y"], axis=1)
    x = np.arange(8, dtype=np.float32).reshape(1, 2, 4)
    flat = backend.run_node(old, [x], "REFERENCE", opset_version=11)[0]
    assert flat.sum() == pytest.approx(1.0)
    assert backend.run_node(old, [x], "REFERENCE")[0].sum() == pytest.approx(4.0)


def test_backend_knows_its_devices() -> None:
    assert backend.supports_device("REFERENCE")
    assert not backend.supports_device("CUDA")
    with pytest.raises(sg.DeviceError):
        backend.prepare(_case("test_relu").load()[0], "CUDA")


def test_onnx_runner_takes_the_backend() -> None:
    import onnx.backend.test

    class OnReference(backend.SubgraphBackend):
        @classmethod
        def prepare(cls, model: Any, device: str = "CPU", **kwargs: Any) -> backend.SubgraphRep:
            return super().prepare(model, "REFERENCE", **kwargs)

        @classmethod
        def supports_device(cls, device: str) -> bool:
            return device == "CPU"

    import unittest

    runner = onnx.backend.test.BackendTest(OnReference, __name__)
    runner.include(r"^test_(abs|gemm|if|loop11|sequence_insert)")

    class Passed(unittest.TestResult):
        """Counts tests that passed: some versions of Python count skipped ones in testsRun."""

        count = 0

        def addSuccess(self, test: unittest.TestCase) -> None:
            self.count += 1

    result = Passed()
    runner.test_suite.run(result)
    assert not result.failures
    assert not result.errors
    assert result.count >= 15


# --- the page of differences -------------------------------------------------------------------


def test_the_page_lists_every_operator_that_is_not_onnx_references() -> None:
    from subgraph.operators.operator import OPERATORS
    from subgraph.operators.schema import standard_operators

    page = Path(__file__).parents[2] / "docs" / "conformance.md"
    table = page.read_text().partition("| operator |")[2].partition("\n\n")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("|")]
    listed = {name.strip() for row in rows for name in row.split(",")} - {"---", "operator", ""}
    standard = {f"{domain}::{name}" if domain else name for name, domain in standard_operators()}
    corrected = {
        n.rpartition("::")[2] for n, op in OPERATORS.items() if op.compute and n in standard
    }
    assert corrected == listed
