"""Every version of operators on random inputs: REFERENCE and CPU against ONNX Runtime.

Samples come from the table in ``version_samples.py``. A version, or a dtype of it, that ONNX
Runtime does not run is passed over; test_reference_operators.py and test_reference_versions.py look
at those.
"""

from __future__ import annotations

import zlib
from collections import Counter
from typing import Any

import numpy as np
import onnx
import onnx.defs
import onnxruntime as ort
import pytest

import subgraph as sg
from subgraph.graph.types import ONNX_DTYPE, Array
from tests.support.version_samples import MAKERS, Draw, Sample

pytestmark = pytest.mark.filterwarnings("ignore")
_DTYPES = ("float32", "float64", "int64", "int32", "bool", "float16", "uint8", "int8")
_NEWEST = 26  # opset that ONNX Runtime takes
# Dtypes of an operator for which ONNX Runtime is no judge, with the reason.
_OTHERWISE = {
    ("ReduceLogSumExp", "int"): "its exponentials are integers",
    **{
        (op, kind): "it interpolates integers in single precision and cuts what is left of 1.9999"
        for op in ("Resize", "Upsample")
        for kind in ("int", "uint")
    },
}


def _versions(op: str) -> list[int]:
    schemas = onnx.defs.get_all_schemas_with_history()
    mine = [s for s in schemas if s.name == op and not s.domain and not s.deprecated]
    return sorted(s.since_version for s in mine if s.since_version <= _NEWEST)


def _dtypes(op: str, version: int) -> list[str]:
    schema = onnx.defs.get_schema(op, version)
    first = schema.inputs[1 if op == "Where" else 0]
    named = {text[7:-1] for text in first.types if text.startswith("tensor(")}
    named |= {"float32"} if "float" in named else set()
    named |= {"float64"} if "double" in named else set()
    return [dtype for dtype in _DTYPES if dtype in named]


def _model(op: str, version: int, sample: Sample) -> tuple[onnx.ModelProto, dict[str, Array]]:
    names = ["" if v is None else f"i{k}" for k, v in enumerate(sample.inputs)]
    given = {n: v for n, v in zip(names, sample.inputs, strict=True) if v is not None}
    made = [f"o{k}" for k in range(sample.outputs)]
    node = onnx.helper.make_node(op, names, made, **sample.options)
    graph = onnx.GraphProto(name="g", node=[node])
    for name, value in given.items():
        number = ONNX_DTYPE[value.dtype.name]
        graph.input.add().CopyFrom(onnx.helper.make_tensor_value_info(name, number, value.shape))
    graph.output.extend(onnx.ValueInfoProto(name=name) for name in made)
    opset = [onnx.helper.make_opsetid("", version)]
    return onnx.helper.make_model(graph, opset_imports=opset, ir_version=8), given


def _by_onnxruntime(model: onnx.ModelProto, given: dict[str, Array]) -> list[Any] | None:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    providers = ["CPUExecutionProvider"]
    try:
        session = ort.InferenceSession(model.SerializeToString(), options, providers=providers)
        found: list[Any] = session.run(None, given)
    except Exception:
        return None
    return found


def _difference(mine: Any, theirs: Any) -> str:
    if mine.dtype != theirs.dtype or mine.shape != theirs.shape:
        return f"{mine.dtype}{mine.shape} for {theirs.dtype}{theirs.shape}"
    exact = theirs.dtype.kind not in "f"
    limit = 0 if exact else 3e-2 if theirs.dtype == np.float16 else 1e-4
    same = np.allclose(mine, theirs, rtol=limit, atol=limit, equal_nan=not exact)
    return "" if same else f"{mine.reshape(-1)[:4]} for {theirs.reshape(-1)[:4]}"


def _compare(op: str, rounds: int, devices: tuple[str, ...], counts: Counter[str]) -> list[str]:
    wrong: list[str] = []
    for version in _versions(op):
        dtypes = _dtypes(op, version)
        rng = np.random.default_rng([zlib.crc32(op.encode()), version])
        for number in range(rounds if dtypes else 0):
            dtype = dtypes[number % len(dtypes)]
            sample = MAKERS[op](Draw(rng, op, version, dtype))
            model, given = _model(op, version, sample)
            expected = _by_onnxruntime(model, given)
            if expected is None:
                counts["not run"] += 1
                continue
            counts["compared"] += 1
            for device in devices:
                shown = [f"{v.dtype}{v.shape}" for v in given.values()]
                where = f"{op}-{version} on {device} {shown} {sample.options}"
                try:
                    results = sg.compile_model(model, device)(given)
                except Exception as error:
                    wrong.append(f"{where}: {type(error).__name__} {' '.join(str(error).split())}")
                    continue
                for k, theirs in enumerate(expected):
                    found = _difference(results[k], theirs)
                    if found and (op, dtype.rstrip("0123456789")) not in _OTHERWISE:
                        wrong.append(f"{where}: {found}")
    return wrong


@pytest.mark.parametrize("op", MAKERS)
def test_versions(op: str) -> None:
    assert not _compare(op, 2, ("REFERENCE",), Counter())


@pytest.mark.slow
@pytest.mark.parametrize("op", MAKERS)
def test_versions_at_length(op: str) -> None:
    counts: Counter[str] = Counter()
    assert not _compare(op, 60, ("REFERENCE", "CPU"), counts)
    assert counts["compared"] > 0
