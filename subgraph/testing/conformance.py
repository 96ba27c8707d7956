"""ONNX's backend test suite: its cases, its comparison, cases that cannot pass, ways to run models.

``make conformance`` and the tests use it. It also tests other implementations:
``for case in cases(): run(case, lambda model: MyRunner(model))``.
"""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

import attrs
import numpy as np
import onnx

Run = Callable[[Sequence[Any]], Sequence[Any]]
DataSet = tuple[list[Any], list[Any]]

_RANDOM = (
    "compares random numbers by value: the standard specifies no generator, and the expected "
    "numbers depend on the state of NumPy's global generator when the case was made"
)
_COMPARISON_FAILS = (
    "the suite's comparison calls len() for every element of a sequence, of which one is expected "
    "to be a scalar: it raises TypeError for every result (Subgraph's equals the expected one)"
)
# Cases that no implementation can pass, with the reason; tests/operators/test_conformance.py proves
# each.
IMPOSSIBLE: Mapping[str, str] = MappingProxyType(
    {
        "test_bernoulli": _RANDOM,
        "test_bernoulli_expanded": _RANDOM,
        "test_bernoulli_double": _RANDOM,
        "test_bernoulli_double_expanded": _RANDOM,
        "test_bernoulli_seed": _RANDOM,
        "test_bernoulli_seed_expanded": _RANDOM,
        "test_loop16_seq_none": _COMPARISON_FAILS,
    }
)

_MODES = (
    "exchanges the meanings of 1 and 2 of the attribute qk_matmul_output_mode; the same case of "
    "onnx 1.23.2, in the same operator version, has them right"
)
_WRAPPED = (
    "its int8 result wraps around instead of saturating; the same case of onnx 1.23.2, in the same "
    "operator version, saturates"
)
_EPSILON = (
    "its expected values were computed with an epsilon that its model omits; the model of onnx "
    "1.23.2 has it"
)
# Cases of older releases whose expected values were corrected since, with the error. Who passes
# them fails the newest suite.
CORRECTED: Mapping[str, str] = MappingProxyType(
    {
        "test_adam_multiple": _EPSILON,
        "test_attention_3d_with_past_and_present_qk_matmul_bias": _MODES,
        "test_attention_3d_with_past_and_present_qk_matmul_softcap": _MODES,
        "test_attention_4d_with_past_and_present_qk_matmul_bias": _MODES,
        "test_attention_4d_with_past_and_present_qk_matmul_bias_3d_mask": _MODES,
        "test_attention_4d_with_past_and_present_qk_matmul_bias_3d_mask_causal": _MODES,
        "test_attention_4d_with_past_and_present_qk_matmul_bias_4d_mask": _MODES,
        "test_attention_4d_with_past_and_present_qk_matmul_bias_4d_mask_causal": _MODES,
        "test_attention_4d_with_qk_matmul_bias": _MODES,
        "test_attention_4d_with_qk_matmul_softcap": _MODES,
        "test_qlinearmatmul_2D_int8_float16": _WRAPPED,
        "test_qlinearmatmul_2D_int8_float32": _WRAPPED,
        "test_qlinearmatmul_3D_int8_float16": _WRAPPED,
        "test_qlinearmatmul_3D_int8_float32": _WRAPPED,
    }
)

# (category, pattern of case names) of node cases; the first match counts. Without match: "other
# operators".
_CATEGORIES = (
    ("ai.onnx.ml", r"^test_ai_onnx_ml"),
    ("training", r"^test_(adam|adagrad|momentum|nesterov|gradient)"),
    ("control flow", r"^test_(if|loop|scan|sequence_map|range_.*expanded)"),
    ("sequence, optional", r"^test_(sequence|optional|identity_(sequence|opt)|split_to_sequence)"),
    ("attention", r"^test_(attention|flexattention|linear_attention|rotary|causal_conv|tensorsc)"),
    ("cast", r"^test_(cast|bitcast)"),
    ("quantization", r"^test_(quantize|dequantize|dynamicquantize|qlinear|matmulinteger|convint)"),
    ("strings, text", r"^test_(string|strnorm|tfidf|regex|image_decoder)"),
    ("convolution, pooling", r"^test_(basic_)?(conv|deform|max|average|lp|global|col2im|roialign)"),
    (
        "normalization, losses",
        r"^test_(batchnorm|layer_norm|instancenorm|group_norm|rms|mvn|sce|nll)",
    ),
    ("reduction", r"^test_(reduce|argm|cumsum|cumprod|sum|mean)"),
    ("recurrent", r"^test_(lstm|gru|rnn|simple_rnn)"),
    ("signal", r"^test_(dft|stft|blackman|hamming|hann|mel)"),
    ("random", r"^test_(bernoulli|random|dropout|training_dropout)"),
    ("resize", r"^test_(resize|upsample|gridsample|affine_grid|center_crop)"),
)


@attrs.frozen(eq=False)
class Case:
    """One case of the suite.

    Attributes:
        name: The suite's name of the case.
        kind: "node", "simple", "real", "pytorch-converted" or "pytorch-operator".
        rtol: Relative tolerance.
        atol: Absolute tolerance.
    """

    name: str
    kind: str
    rtol: float
    atol: float
    _source: Any = attrs.field(repr=False)
    _package: Path = attrs.field(repr=False, default=Path(onnx.__file__).parent)

    @property
    def category(self) -> str:
        """The line of the table of results in which the case is counted."""
        if self.kind != "node":
            return f"models: {self.kind}"
        for category, pattern in _CATEGORIES:
            if re.match(pattern, self.name):
                return category
        return "other operators"

    def load(self) -> tuple[onnx.ModelProto, list[DataSet]]:
        """Return the model, and pairs of inputs and expected outputs."""
        source = self._source
        if source.model is not None:
            sets = [
                ([_to_array(v) for v in a], [_to_array(v) for v in b]) for a, b in source.data_sets
            ]
            return source.model, sets
        if source.model_dir is not None:
            return _from_folder(Path(source.model_dir))
        return _light(self._package.parent / str(source.url))


@cache
def cases(package: str = "") -> tuple[Case, ...]:
    """Return the cases of the installed onnx package: 2,033 in onnx 1.23.2.

    Args:
        package: Folder of the package ``onnx`` of another release that has all its cases as files
            (1.21 and older), to read the cases from; "": the installed one.
    """
    from onnx.backend.test.loader import load_model_tests

    folder = Path(package) if package else Path(onnx.__file__).parent
    kinds = ("node", "simple", "real", "pytorch-converted", "pytorch-operator")
    found: list[Case] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for kind in kinds:
            loaded = _cases_of_files(folder, kind) if package else load_model_tests(kind=kind)
            for item in sorted(loaded, key=lambda c: c.name):
                found.append(Case(item.name, kind, item.rtol, item.atol, item, folder))
    return tuple(found)


def excused(package: str = "") -> Mapping[str, str]:
    """Return the cases of a suite that need not pass, with the reason.

    Args:
        package: As in `cases`; for an older release the result includes `CORRECTED`.
    """
    return {**IMPOSSIBLE, **CORRECTED} if package else IMPOSSIBLE


def _cases_of_files(package: Path, kind: str) -> list[Any]:
    """Return the cases of a kind of another release, read from its files as its loader does."""
    from onnx.backend.test.case.test_case import TestCase

    found: list[Any] = []
    for folder in (package / "backend" / "test" / "data" / kind).iterdir():
        facts: dict[str, Any] = {}
        if (folder / "data.json").exists():
            facts = json.loads((folder / "data.json").read_text())
        has_model = (folder / "model.onnx").exists()
        if has_model or facts:
            case = TestCase(
                name=folder.name,
                model_name=facts.get("model_name", folder.name),
                url=None if has_model else facts["url"],
                model_dir=str(folder) if has_model else None,
                model=None,
                data_sets=None,
                kind=kind,
                rtol=facts.get("rtol", 1e-3),
                atol=facts.get("atol", 1e-7),
            )
            found.append(case)
    return found


def _to_array(item: Any) -> Any:
    return onnx.numpy_helper.to_array(item) if isinstance(item, onnx.TensorProto) else item


def _from_folder(folder: Path) -> tuple[onnx.ModelProto, list[DataSet]]:
    model = onnx.ModelProto.FromString((folder / "model.onnx").read_bytes())
    sets: list[DataSet] = []
    for data in sorted(folder.glob("test_data_set*")):
        inputs = _read_values(data, "input", model.graph.input)
        sets.append((inputs, _read_values(data, "output", model.graph.output)))
    return model, sets


def _read_values(folder: Path, stem: str, infos: Sequence[onnx.ValueInfoProto]) -> list[Any]:
    count = len(list(folder.glob(f"{stem}_*.pb")))
    return [_read_value(folder / f"{stem}_{k}.pb", infos[k].type) for k in range(count)]


def _read_value(path: Path, type_: onnx.TypeProto) -> Any:
    content = path.read_bytes()
    if type_.HasField("sequence_type"):
        return onnx.numpy_helper.to_list(onnx.SequenceProto.FromString(content))
    if type_.HasField("optional_type"):
        return onnx.numpy_helper.to_optional(onnx.OptionalProto.FromString(content))
    return onnx.numpy_helper.to_array(onnx.TensorProto.FromString(content))


def _light(path: Path) -> tuple[onnx.ModelProto, list[DataSet]]:
    """Return a model of the onnx package without trained weights, and its data set."""
    from onnx.backend.test.runner import Runner

    model = onnx.ModelProto.FromString(path.read_bytes())
    constants = {tensor.name for tensor in model.graph.initializer}
    # The same inputs as in the suite's own runner, from which the expected outputs were computed.
    inputs = [
        Runner.generate_dummy_data(info, seed=0, random=False)
        for info in model.graph.input
        if info.name not in constants
    ]
    outputs: list[Any] = []
    for k in range(len(model.graph.output)):
        content = path.with_name(f"{path.stem}_output_{k}.pb").read_bytes()
        outputs.append(onnx.numpy_helper.to_array(onnx.TensorProto.FromString(content)))
    return model, [(inputs, outputs)]


def assert_matches(case: Case, expected: Sequence[Any], got: Sequence[Any]) -> None:
    """Compare results as the suite does.

    Args:
        case: The case, for its tolerances.
        expected: The expected outputs.
        got: The outputs of the implementation that is tested.

    Raises:
        AssertionError: the results differ.
        TypeError: the suite's comparison cannot handle them (see `IMPOSSIBLE`).
    """
    from onnx.backend.test.runner import Runner

    with np.errstate(all="ignore"):
        Runner.assert_similar_outputs(list(expected), list(got), case.rtol, case.atol)


def run(case: Case, prepare: Callable[[onnx.ModelProto], Run]) -> None:
    """Run a case and compare the results of each of its data sets.

    Args:
        case: The case, with its model, data sets and tolerances.
        prepare: Returns the function that runs a model, from inputs to outputs by position.

    Raises:
        AssertionError: the results differ.
        Exception: an error of ``prepare`` or of the run.
    """
    model, sets = case.load()
    ready = prepare(model)
    for inputs, expected in sets:
        assert_matches(case, expected, list(ready(inputs)))


# --- ways to load a model that must not change its results -----------------------------------


def partitioned(model: onnx.ModelProto, seed: int) -> Any:
    """Return the model's graph, partitioned by a selector whose answers follow from a seed."""
    import subgraph as sg
    from subgraph.testing.random_selectors import ByEdge

    graph = sg.load(model)
    graph.attrs["subgraph_property"] = ByEdge(seed)
    strategy = ("selector", "hetero")[seed % 2]
    return sg.passes.apply_pass(graph, "PartitionGraph", strategy=strategy)


def saved(model: onnx.ModelProto, folder: str | os.PathLike[str]) -> Any:
    """Return the model's graph after a save and a load."""
    import subgraph as sg

    path = Path(folder) / "again.onnx"
    sg.save(sg.load(model), path)
    return sg.load(path)


def reprinted(model: onnx.ModelProto) -> Any:
    """Return the model's graph printed as text and parsed, with the original weights."""
    import subgraph as sg

    graph = sg.load(model)
    return sg.parse(str(graph), parameters=graph.parameters)


@contextmanager
def traced() -> Generator[None]:
    """Make every CPU plan of the ``with`` block symbolic in all dimensions of its inputs.

    Usually only dimensions that differed between calls are symbolic, from the second shape on.
    """
    from subgraph.engine.cpu.symbolic_plans import SymbolicPlans

    def every(plans: SymbolicPlans) -> list[list[tuple[int, int]]]:
        ranks = enumerate(type_.rank or 0 for type_ in plans.seen[-1])
        return [[(position, axis)] for position, rank in ranks for axis in range(rank)]

    with patch.object(SymbolicPlans, "groups", every):
        yield
