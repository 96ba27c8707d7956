"""Fuzzing with operands that do not fit: every operator, every version, between guard pages.

An honest sample of one node (ONNX's node cases, the samples of the tests) is damaged in one or two
places: a dimension one longer, one shorter, 0 or 1, a dimension more or less, an index out of
range, an attribute of 0, -1 or a huge number. The model is declared with sizes, with symbolic ones
(it then runs the honest operands first, so that the damaged ones meet a plan for a new shape),
without any, or has operands as constants. CPU, REFERENCE and ONNX Runtime then either agree on the
result or refuse it. Each case runs in a process that may die; it is reported, and the next begins.

    SUBGRAPH_GUARD=end python benchmarks/wrong_sizes.py --count 10000

A case is its seed and number: ``--start N --count 1`` repeats one. On Oclgrind what it writes to
OCLGRIND_LOG is a finding, too. Findings are counted by kind:

- ``crash``, ``hang``: the process died at a guard page (the report says where) or gave no answer
- ``raw``: an exception that is no SubgraphError, or an InternalError
- ``verdict``: one of our devices refuses what another computes
- ``values``: our devices give different results
- ``outside``: Oclgrind saw an access outside of a buffer, or a race
- ``lax``, ``strict``, ``other``: against ONNX Runtime, for samples on which it agrees when honest;
  ``excused`` are those of which `REASONS` says why
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import onnx

import subgraph as sg
from subgraph.errors import InternalError, SubgraphError
from subgraph.types import ONNX_DTYPE

ROOT = Path(__file__).parents[1]
Array = np.ndarray[Any, Any]
FORMS = ("sizes", "symbolic", "unknown", "constants", "all constants")
OPSET = 26  # newest of ONNX Runtime
_RANDOM = {"Bernoulli", "Dropout", "Multinomial", "RandomNormalLike", "RandomUniformLike"}
_HUGE = (1 << 31, (1 << 31) - 1, 1 << 62, (1 << 63) - 1, -(1 << 31), -(1 << 63))


# Where ONNX Runtime and we differ with a reason: kind, what the finding says, why.
REASONS = (
    ("strict", "it must be 0 or 1", "the standard says nothing of other numbers"),
    ("lax", "division by zero", "whole numbers divided by zero give 0, as docs/devices.md says"),
    ("lax", "not_implemented", "it has no kernel for these dtypes or sizes"),
)
_FAILURES = ("crash", "hang", "outside", "raw", "verdict", "values", "slow")


# --- samples -----------------------------------------------------------------------------------


@attrs.frozen(eq=False)
class Sample:
    """One node with operands that fit.

    Attributes:
        node: The node.
        values: Its operands by name.
        opsets: Version of each domain.
        source: Where it is from.
    """

    node: onnx.NodeProto
    values: dict[str, Array]
    opsets: dict[str, int]
    source: str

    @property
    def title(self) -> str:
        """Operator and version."""
        return f"{self.node.domain}:{self.node.op_type}-{self.opsets[self.node.domain]}"


def _of_suite() -> Iterator[Sample]:
    """Yield the node cases of ONNX's suite that are one node on tensors."""
    from subgraph.testing import conformance

    for case in conformance.cases():
        if case.kind != "node" or case.name.endswith("_expanded"):
            continue
        model, sets = case.load()
        if len(model.graph.node) != 1 or not sets or model.graph.initializer:
            continue
        values = dict(zip([v.name for v in model.graph.input], sets[0][0], strict=False))
        if all(isinstance(value, np.ndarray) for value in values.values()):
            opsets = {o.domain: o.version for o in model.opset_import}
            yield Sample(model.graph.node[0], values, {"": OPSET, **opsets}, case.name)


def _node(op: str, inputs: Sequence[Array | None], outputs: int, options: dict[str, Any]) -> Any:
    names = ["" if value is None else f"i{k}" for k, value in enumerate(inputs)]
    made = [f"o{k}" for k in range(outputs)]
    values = {n: v for n, v in zip(names, inputs, strict=True) if v is not None}
    return onnx.helper.make_node(op, names, made, **options), values


def _of_operator_cases() -> Iterator[Sample]:
    from operator_cases import all_cases

    for case in all_cases():
        node, values = _node(case.op, case.inputs, case.outputs, case.attrs)
        if sum(value.nbytes for value in values.values()) < 1 << 20:
            yield Sample(node, values, {"": case.version or OPSET}, "operator_cases")


def _of_versions() -> Iterator[Sample]:
    from test_operator_versions import _dtypes, _versions  # pyright: ignore[reportPrivateUsage]
    from version_samples import MAKERS, Draw

    for op, make in MAKERS.items():
        for version in _versions(op):
            rng = np.random.default_rng(version)
            for dtype in _dtypes(op, version)[:3]:
                sample = make(Draw(rng, op, version, dtype))
                node, values = _node(op, sample.inputs, sample.outputs, sample.options)
                yield Sample(node, values, {"": version}, "version_samples")


@cache
def samples(only: str = "") -> list[list[Sample]]:
    """Return the samples of each operator and version."""
    sys.path.insert(0, str(ROOT / "tests"))
    found: dict[str, list[Sample]] = {}
    for make in (_of_suite, _of_operator_cases, _of_versions):
        for sample in make():
            if not only or sample.node.op_type in only.split(","):
                found.setdefault(sample.title, []).append(sample)
    return [found[title] for title in sorted(found)]


# --- damage ------------------------------------------------------------------------------------


@attrs.define(eq=False)
class Case:
    """A damaged sample.

    Attributes:
        number: Its number.
        honest: The sample as it was.
        node: The node, its attributes perhaps damaged.
        values: The operands, some damaged.
        form: How the model declares them.
        constant: Names of operands that are constants.
        what: What was done.
    """

    number: int
    honest: Sample
    node: onnx.NodeProto
    values: dict[str, Array]
    form: str
    constant: frozenset[str]
    what: str

    @property
    def text(self) -> str:
        """The case in a line."""
        shown = [
            f"{name}={v.dtype}{list(v.shape)}{'!' if name in self.constant else ''}"
            for name, v in self.values.items()
        ]
        options = [onnx.helper.printable_attribute(a) for a in self.node.attribute]
        text = f"{self.honest.title}({', '.join(shown)}; {', '.join(options)})"
        return f"{text[:500]} as {self.form}; {self.what}"


def make_case(seed: int, number: int, only: str = "") -> Case:
    """Return a case; always the same for its seed and number."""
    rng = np.random.default_rng([seed, number])
    known = samples(only)
    group = known[number % len(known)]
    sample = group[int(rng.integers(len(group)))]
    node = onnx.NodeProto()
    node.CopyFrom(sample.node)
    case = Case(number, sample, node, dict(sample.values), "", frozenset(), "")
    done = [_damage(case, rng) for _ in range(1 if rng.random() < 0.75 else 2)]
    case.what = " and ".join(done)
    case.form = FORMS[int(rng.integers(len(FORMS)))]
    if case.form == "constants":
        case.constant = frozenset(name for name in case.values if rng.random() < 0.5)
    elif case.form == "all constants":
        case.constant = frozenset(list(case.values)[1:])
    return case


def _damage(case: Case, rng: np.random.Generator) -> str:
    """Damage a case in one place; return what was done."""
    integers = [n for n, v in case.values.items() if v.dtype.kind in "iu" and 0 < v.size <= 4096]
    numbers = [a for a in case.node.attribute if a.type in _ATTRIBUTES]
    choices: list[Callable[[], str]] = []
    if case.values:
        choices += [lambda: _resize(case, rng)] * 4
    if integers:
        choices += [lambda: _change_value(case, integers, rng)] * 2
    if numbers:
        choices += [lambda: _change_attribute(numbers, rng)] * 2
    return choices[int(rng.integers(len(choices)))]() if choices else "nothing"


def _resize(case: Case, rng: np.random.Generator) -> str:
    name = list(case.values)[int(rng.integers(len(case.values)))]
    array = case.values[name]
    axis = int(rng.integers(array.ndim)) if array.ndim else 0
    ways: dict[str, Callable[[], Array]] = {
        "with a dimension of 1 more": lambda: array[None],
        "with a dimension of 2 more": lambda: np.stack([array, array]),
        "with a last dimension of 1 more": lambda: array[..., None],
    }
    if array.ndim:
        size = array.shape[axis]
        for text, to in (
            ("one longer", size + 1),
            ("one shorter", max(size - 1, 0)),
            ("empty", 0),
            ("one", 1),
            ("twice as long", 2 * size),
            ("much longer", size + 17),
        ):
            ways[f"{text} along {axis}"] = lambda to=to: _taken(array, axis, to)
        ways[f"without dimension {axis}"] = lambda: _taken(array, axis, 1).squeeze(axis)
        ways["scalar"] = lambda: np.asarray(array.reshape(-1)[0] if array.size else 0, array.dtype)
        ways["transposed"] = lambda: array.T
        ways["flat"] = lambda: array.reshape(-1)
    text = list(ways)[int(rng.integers(len(ways)))]
    case.values[name] = np.ascontiguousarray(ways[text]()).reshape(ways[text]().shape)
    return f"{name} {text}"


def _taken(array: Array, axis: int, size: int) -> Array:
    """Return ``size`` slices of an array along an axis, from the beginning again where needed."""
    if array.shape[axis] == 0:
        shape = [size if k == axis else n for k, n in enumerate(array.shape)]
        return np.zeros(shape, array.dtype)
    return np.take(array, np.arange(size) % array.shape[axis], axis)


def _change_value(case: Case, names: Sequence[str], rng: np.random.Generator) -> str:
    name = names[int(rng.integers(len(names)))]
    array = np.array(case.values[name])
    info = np.iinfo(array.dtype)
    sizes = {n for v in case.values.values() for n in v.shape}
    near = [0, -1, 1, *(sign * (n + by) for n in sizes for sign in (1, -1) for by in (-1, 0, 1))]
    pool = [*near, *_HUGE, info.min, info.max]
    value = min(max(pool[int(rng.integers(len(pool)))], int(info.min)), int(info.max))
    place: Any = "all" if rng.random() < 0.2 else int(rng.integers(array.size))
    array.reshape(-1)[slice(None) if place == "all" else place] = value
    case.values[name] = array
    return f"{name}[{place}] = {value}"


def _change_attribute(attributes: Sequence[onnx.AttributeProto], rng: np.random.Generator) -> str:
    attribute = attributes[int(rng.integers(len(attributes)))]
    before = onnx.helper.get_attribute_value(attribute)
    after = _ATTRIBUTES[attribute.type](before, rng)
    replaced = onnx.helper.make_attribute(attribute.name, after, attr_type=attribute.type)
    attribute.CopyFrom(replaced)
    return f"{attribute.name} = {str(after)[:60]} for {str(before)[:60]}"


def _other_int(value: int, rng: np.random.Generator) -> int:
    pool = (0, -1, 1, 2, value + 1, value - 1, -value, 2 * value, *_HUGE)
    return min(max(pool[int(rng.integers(len(pool)))], -(1 << 63)), (1 << 63) - 1)


def _other_float(_: float, rng: np.random.Generator) -> float:
    pool = (0.0, -1.0, float("nan"), float("inf"), 1e38, 1e-40)
    return pool[int(rng.integers(len(pool)))]


def _other_list(values: Sequence[Any], rng: np.random.Generator) -> list[Any]:
    changed = list(values)
    how = int(rng.integers(4)) if changed else 1
    if how < 2:
        return changed[:-1] if how == 0 else [*changed, changed[-1] if changed else 1]
    at = int(rng.integers(len(changed)))
    other = _other_int if isinstance(changed[at], int) else _other_float
    changed[at] = other(changed[at], rng)
    return changed


def _other_text(_: bytes, rng: np.random.Generator) -> str:
    pool = ("", "none", "constant", "NOTSET", "SAME_UPPER", "reverse", "x" * 1000)
    return pool[int(rng.integers(len(pool)))]


_ATTRIBUTES: dict[int, Callable[..., Any]] = {
    onnx.AttributeProto.INT: _other_int,
    onnx.AttributeProto.FLOAT: _other_float,
    onnx.AttributeProto.INTS: _other_list,
    onnx.AttributeProto.FLOATS: _other_list,
    onnx.AttributeProto.STRING: _other_text,
}


# --- runs --------------------------------------------------------------------------------------


def model_of(case: Case, node: onnx.NodeProto, declared: dict[str, Array]) -> onnx.ModelProto:
    """Return the model of a case, its inputs declared for the operands ``declared``."""
    graph = onnx.GraphProto(name="g", node=[node])
    for name, value in declared.items():
        number = ONNX_DTYPE[value.dtype.name] if value.dtype.kind not in "OUS" else 8
        if name in case.constant:
            graph.initializer.append(onnx.numpy_helper.from_array(case.values[name], name))
            continue
        shape: Any = {
            "symbolic": [f"{name}_{axis}" for axis in range(value.ndim)],
            "unknown": None,
        }.get(case.form, value.shape)
        graph.input.append(onnx.helper.make_tensor_value_info(name, number, shape))
    graph.output.extend(onnx.ValueInfoProto(name=name) for name in node.output if name)
    opsets = [onnx.helper.make_opsetid(d, v) for d, v in case.honest.opsets.items()]
    return onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10)


@attrs.frozen
class Answer:
    """What a runtime makes of a case: results, or the error."""

    results: list[Any] | None
    error: str = ""
    raw: bool = False


def ours(device: str, model: onnx.ModelProto, runs: Sequence[dict[str, Array]]) -> Answer:
    """Run a model on a device of ours with several operands in turn; answer with the last."""
    results: list[Any] = []
    try:
        compiled = sg.Core().compile_model(sg.load(model), device)
        for k, values in enumerate(runs):
            try:
                found = compiled(values)
                results = [found[position] for position in range(len(model.graph.output))]
            except SubgraphError:
                if k == len(runs) - 1:
                    raise
    except SubgraphError as error:
        return Answer(None, _said(error), isinstance(error, InternalError))
    except Exception as error:
        return Answer(None, _said(error), raw=True)
    return Answer(results)


def in_onnxruntime(model: onnx.ModelProto, values: dict[str, Array]) -> Answer:
    """Run a model in ONNX Runtime."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    try:
        session = ort.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        return Answer(list(session.run(None, values)))
    except Exception as error:
        return Answer(None, _said(error))


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _differs(mine: Sequence[Any], theirs: Sequence[Any]) -> str:
    from fuzz import difference

    pairs: list[tuple[Array, Array]] = []
    for one, other in zip(mine, theirs, strict=True):
        if not isinstance(one, np.ndarray) or one.dtype.kind in "OUS":
            if str(one) != str(other):
                return "other texts"
        elif one.dtype.isbuiltin == 1:
            pairs.append((one, other))
        elif one.dtype == other.dtype:  # bfloat16, float8, int4; as halves are compared
            pairs.append((one.astype(np.float16), other.astype(np.float16)))
    return difference([one for one, _ in pairs], [other for _, other in pairs])


def check(case: Case, devices: Sequence[str], phase: Callable[[str], None]) -> dict[str, str]:
    """Run a case everywhere; return what is wrong, by kind."""
    found: dict[str, str] = {}
    given = {n: v for n, v in case.values.items() if n not in case.constant}
    runs = [given]
    declared = case.values
    if case.form in ("symbolic", "unknown"):
        declared = case.honest.values
        runs = [declared, given]
    model = model_of(case, case.node, declared)
    answers: dict[str, Answer] = {}
    for device in devices:
        phase(device)
        before = len(_oclgrind())
        answers[device] = ours(device, model, runs)
        said = _oclgrind()[before:].strip()
        if said:
            found["outside"] = f"{device}: {said[:1000]}"
        if answers[device].raw:
            found["raw"] = f"{device}: {answers[device].error}"
    first, *rest = (answers[device] for device in devices)
    for device, other in zip(devices[1:], rest, strict=True):
        if (first.results is None) != (other.results is None):
            found["verdict"] = f"{devices[0]}: {_told(first)}; {device}: {_told(other)}"
        elif first.results and other.results and case.node.op_type not in _RANDOM:
            said = _differs(first.results, other.results)
            if said:
                found["values"] = f"{devices[0]} and {device}: {said}"
    phase("ONNX Runtime")
    judged = _is_judge(case, devices[0])
    if judged:
        theirs = in_onnxruntime(model, given)
        # It takes inputs of any rank for one that is declared as a scalar.
        request = "give an array of" in first.error
        if first.results is None and theirs.results is not None and not request:
            found["strict"] = f"{first.error}; ONNX Runtime: {_told(theirs)}"
        elif first.results is not None and theirs.results is None:
            found["lax"] = f"{_told(first)}; ONNX Runtime: {theirs.error}"
        elif first.results and theirs.results:
            said = _differs(first.results, theirs.results)
            if said:
                found["other"] = said
    return {("excused" if _reason(kind, said) else kind): said for kind, said in found.items()}


def _reason(kind: str, said: str) -> str:
    """Return why a difference is right, "" if nothing says so."""
    return next((w for of, text, w in REASONS if of == kind and text in said.lower()), "")


def _oclgrind() -> str:
    """Return what Oclgrind has found so far."""
    log = os.environ.get("OCLGRIND_LOG", "")
    return Path(log).read_text(errors="replace") if log and Path(log).exists() else ""


def _told(answer: Answer) -> str:
    if answer.results is None:
        return answer.error
    return "gives " + ", ".join(
        f"{r.dtype}{list(r.shape)}" if isinstance(r, np.ndarray) else str(type(r))
        for r in answer.results
    )


_judges: dict[int, bool] = {}


def _is_judge(case: Case, device: str) -> bool:
    """Return whether ONNX Runtime gives for the honest sample what we do."""
    key = id(case.honest)
    if key not in _judges:
        plain = attrs.evolve(case, values=case.honest.values, form="sizes", constant=frozenset())
        model = model_of(plain, case.honest.node, plain.values)
        theirs = in_onnxruntime(model, plain.values)
        mine = Answer(None)
        if theirs.results is not None and case.node.op_type not in _RANDOM:
            mine = ours(device, model, [plain.values])
        same = mine.results is not None and theirs.results is not None
        _judges[key] = same and not _differs(mine.results or [], theirs.results or [])
    return _judges[key]


# --- processes ---------------------------------------------------------------------------------


def _work(channel: Any, numbers: Sequence[int], options: argparse.Namespace, log: str) -> None:
    """Check cases and tell of each."""
    import resource
    import warnings

    warnings.simplefilter("ignore")
    np.seterr(all="ignore")
    os.environ["ALLOW_RELEASED_ONNX_OPSET_ONLY"] = "0"
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (options.memory << 30, options.memory << 30))
    for number in numbers:
        case = make_case(options.seed, number, options.only)
        start = time.process_time()
        told = partial(_tell, channel, number)
        try:
            found = check(case, options.devices.split(","), told)
        except Exception as error:  # a model that onnx does not write
            found = {"no model": _said(error)}
        taken = time.process_time() - start
        if taken > options.slow:
            found["slow"] = f"{taken:.0f} s"
        channel.send((number, "", found, case.text if found else ""))
    channel.send((-1, "", {}, ""))


def _tell(channel: Any, number: int, phase: str) -> None:
    channel.send((number, phase, {}, ""))


def _part(
    numbers: list[int], options: argparse.Namespace
) -> Iterator[tuple[int, dict[str, str], str]]:
    """Check cases in processes that may die; yield what is wrong with each."""
    context = get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        log = os.path.join(folder, "log")
        while numbers:
            channel, other = context.Pipe(duplex=False)
            process = context.Process(target=_work, args=(other, numbers, options, log))
            process.start()
            other.close()
            at, phase, kind = numbers[0], "", "crash"
            try:
                while True:
                    if not channel.poll(options.timeout):
                        kind = "hang"
                        process.kill()
                        raise EOFError
                    number, now, found, text = channel.recv()
                    if number < 0:
                        numbers = []
                        break
                    at, phase = number, now
                    if not now:
                        yield number, found, text
                        numbers = numbers[numbers.index(number) + 1 :]
                        at = numbers[0] if numbers else -1
            except EOFError:
                process.join()
                said = Path(log).read_text(errors="replace")[:1500]
                if phase == "ONNX Runtime":
                    kind = "ONNX Runtime died"
                case = make_case(options.seed, at, options.only)
                yield (
                    at,
                    {kind: f"in {phase or 'the beginning'} ({process.exitcode}): {said}"},
                    case.text,
                )
                numbers = numbers[numbers.index(at) + 1 :]
            process.join()


def main(given: Sequence[str] | None = None) -> int:
    """Fuzz; return 1 if something is wrong that is not a difference to ONNX Runtime."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, default=0, help="number of the first case")
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--devices", default="CPU,REFERENCE")
    parser.add_argument("--only", default="", help="operators, separated by commas")
    parser.add_argument("--slow", type=float, default=20, help="seconds of CPU that are too many")
    parser.add_argument("--timeout", type=float, default=120, help="seconds until a case hangs")
    parser.add_argument("--memory", type=int, default=12, help="GiB of address space")
    parser.add_argument("--out", default="", help="file to append findings to, a JSON line each")
    options = parser.parse_args(given)
    # Before processes begin: each would load and compile it all again.
    samples(options.only)
    if "OPENCL" not in options.devices:  # a driver's threads are not there after a fork
        x = sg.input("x", (3,))
        for device in options.devices.split(","):
            sg.compile_model(sg.Graph([x], [sg.ops.Relu(x)]), device)([np.ones(3, np.float32)])
    counts: Counter[str] = Counter()
    where: dict[str, Counter[str]] = {}
    last = options.start + options.count
    for number, found, text in _part(list(range(options.start, last)), options):
        counts["cases"] += 1
        for kind, said in found.items():
            counts[kind] += 1
            title = text.partition("(")[0]
            where.setdefault(kind, Counter())[title] += 1
            if kind in _FAILURES or (kind != "excused" and where[kind][title] <= 3):
                print(f"{number} {kind}: {text}\n    {said}", flush=True)
            if options.out:
                with open(options.out, "a") as file:
                    line = json.dumps({"number": number, "kind": kind, "case": text, "said": said})
                    print(line, file=file)
        if counts["cases"] % 200 == 0:
            print(f"-- {dict(counts)}", flush=True)
    for kind, titles in where.items():
        print(f"{kind}: " + ", ".join(f"{t} {n}" for t, n in titles.most_common()))
    print(f"seed {options.seed}, {options.start} to {last - 1}: {dict(counts)}")
    return int(any(counts[kind] for kind in _FAILURES))


if __name__ == "__main__":
    sys.exit(main())
