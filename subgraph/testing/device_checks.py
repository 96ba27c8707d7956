"""`check_device`: tests a device against the contract of `subgraph.Device`."""

from __future__ import annotations

import io
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from subgraph.devices.core import Core
from subgraph.devices.default_core import default_core
from subgraph.devices.device import Device, class_name
from subgraph.dtypes import DTYPES
from subgraph.errors import (
    BlobError,
    ConfigError,
    DeviceError,
    MissingInputError,
    ShapeError,
    SubgraphError,
    UnsupportedOpError,
    described,
)
from subgraph.graph.graph import Graph, Node
from subgraph.graph.parameters import transaction
from subgraph.onnx_format.file import load
from subgraph.operators.subgraph_op import AFFINITY
from subgraph.system.registry import nearest
from subgraph.testing.device_random import random_graphs
from subgraph.testing.device_under_test import (
    INJECTED,
    DeviceReport,
    DeviceUnderTest,
    FailedCheck,
    SkippedCheck,
    broken_sessions,
    fail,
)

DEVICE_CHECKS: dict[str, str] = {}
_CHECKS: dict[str, Callable[[DeviceUnderTest], None]] = {}
_GENERIC = "does not list it as supported"  # end of Core's text for a device without reason


def check_device(
    device: str | Device | type[Device],
    *,
    config: Mapping[str, Any] | None = None,
    core: Core | None = None,
    models: Iterable[Any] = (),
    only: Collection[str] | None = None,
    max_examples: int = 20,
    rtol: float = 1e-4,
    atol: float = 1e-5,
) -> DeviceReport:
    """Test a device: queries, compilation, runs, errors, failures and exported models.

    `DEVICE_CHECKS` lists the checks with a sentence each. The test models consist of operators that
    the device takes in a query; results are compared with those of REFERENCE.

    Args:
        device: A device string, such as "CPU" or "HETERO:MYDEV,CPU"; or a device, or its class,
            which is then registered with a new Core.
        config: Options of every compile call.
        core: The Core that has the device; None: the default one.
        models: Further test models that the device takes: graphs, or arguments of `subgraph.load`.
        only: Names of the checks to run; None: all.
        max_examples: Number of random graphs of the check "random".
        rtol: Relative tolerance of results.
        atol: Absolute tolerance of results.

    Returns:
        The checks that passed, those that do not apply, and the numbers of graphs and runs.

    Raises:
        DeviceError: the device cannot start or fails checks; the message says how each one failed,
            and on what graph.
        ConfigError: ``only`` has the name of no check.
    """
    names = list(DEVICE_CHECKS) if only is None else list(only)
    for name in names:
        if name not in DEVICE_CHECKS:
            raise ConfigError(f"no check {name!r} of devices; {nearest(name, DEVICE_CHECKS)}")
    if not isinstance(device, str):
        core = Core()
        kind = device if isinstance(device, type) else type(device)
        core.register_device(class_name(kind), device)
        device = class_name(kind)
    graphs = [model if isinstance(model, Graph) else load(model) for model in models]
    try:
        dut = DeviceUnderTest(
            core or default_core(), device, config or {}, graphs, (rtol, atol), max_examples
        )
    except FailedCheck as error:
        raise DeviceError(str(error)) from error
    failed: dict[str, Exception] = {}
    for name in names:
        try:
            _CHECKS[name](dut)
        except SkippedCheck as why:
            dut.report.skipped[name] = str(why)
        except Exception as error:
            failed[name] = error
        else:
            dut.report.passed.append(name)
    if failed:
        lines = [
            f"\n{name} ({DEVICE_CHECKS[name]})\n  {_error_text(e)}" for name, e in failed.items()
        ]
        raise DeviceError(
            f"device {device} fails {len(failed)} of {len(names)} checks:" + "".join(lines)
        ) from next(iter(failed.values()))
    return dut.report


def _error_text(error: Exception) -> str:
    own = isinstance(error, FailedCheck)
    text = str(error) if own else described(error)
    return "\n  ".join([*text.splitlines(), *getattr(error, "__notes__", [])])


def _check(
    about: str,
) -> Callable[[Callable[[DeviceUnderTest], None]], Callable[[DeviceUnderTest], None]]:
    """Return a decorator that adds a check to the tables, under its name without "_"."""

    def add(check: Callable[[DeviceUnderTest], None]) -> Callable[[DeviceUnderTest], None]:
        name = check.__name__.removeprefix("_")
        DEVICE_CHECKS[name], _CHECKS[name] = about, check
        return check

    return add


@_check("every listed property can be read, and a writable one set to its value")
def _properties(dut: DeviceUnderTest) -> None:
    known = dut.options
    if not known:
        fail("SUPPORTED_PROPERTIES lists nothing; give a dict of names with 'RW' or 'RO'")
    for name, access in known.items():
        value = dut.core.get_property(dut.device.name, name)
        if access == "RW":
            dut.core.set_property(dut.device.name, {name: value})
            now = dut.core.get_property(dut.device.name, name)
            if now != value:
                fail(f"property {name} was set to {value!r} and is {now!r}")
    for name in ("FULL_DEVICE_NAME", "SUPPORTED_PROPERTIES"):
        if not dut.core.get_property(dut.device.name, name):
            fail(f"{name} is empty")


@_check("graphs that query_model takes compile, and HETERO places nodes as it answers")
def _query(dut: DeviceUnderTest) -> None:
    for graph in dut.graphs:
        found = dut.query(graph)
        missing = [node.name for node in graph.nodes if node.name not in found]
        if missing:
            fail(f"query_model leaves out {missing} of a model given as supported\n{graph}")
        dut.run(dut.compile(graph), graph, "a model of which query_model takes all nodes")
        if dut.is_physical:
            _check_placement(dut, graph)


def _check_placement(dut: DeviceUnderTest, graph: Graph) -> None:
    """Check that HETERO's ``query_model`` and ``compile_model`` place nodes on the same devices."""
    found = dut.query(graph, dut.with_reference)
    model = dut.compile(graph, dut.with_reference)
    homes: dict[str, str] = {}
    for node in model.graph.nodes:
        inside = [node] if node.subgraph is None else node.subgraph.nodes
        module = (node.metadata or {}).get(AFFINITY, "REFERENCE")
        homes.update((each.name, module) for each in inside)
    wrong = {n: (found[n], homes[n]) for n in homes if n in found and found[n] != homes[n]}
    if wrong:
        fail(f"query_model and compile_model of HETERO place nodes differently: {wrong}\n{graph}")


@_check("a refused node has a reason; the error of compile_model names a refused node")
def _refusals(dut: DeviceUnderTest) -> None:
    pieces = [p for p in dut.refused if p.dtype == "float32" and p.shape == ("N", 6)]
    own = [p for p in dut.taken if p.dtype == "float32" and p.shape == ("N", 6)]
    if not pieces or not own:
        raise SkippedCheck("it refuses none of the test operators on tensors of shape (N, 6)")
    x = own[0].input(fixed=dut.fixed)
    value = own[0].apply(pieces[0].apply(own[0].apply(x, "first"), "refused"), "last")
    graph = Graph([x], [value], "mixed")
    found = dut.query(graph)
    if not found:
        fail(
            f"query_model takes {own[0].name} in a graph without other operators, and refuses it "
            f"in a graph with {pieces[0].name}"
        )
    left = [node for node in graph.nodes if node.name not in found]
    for node in left:
        reason = found.reasons.get(node.name, "")
        if not reason or reason.endswith(_GENERIC):
            fail(
                f"query_model gives no reason for {node.name!r} ({node.op_type}): let supports "
                "return sg.Reject(why), or query_model a QueryResult with reasons"
            )
    dut.run(dut.compile(graph, dut.with_reference), graph, "beside REFERENCE")
    if dut.device.fallback or not dut.is_physical:
        dut.run(dut.compile(graph), graph, "with refused nodes on its fallback devices")
        return
    try:
        dut.compile(graph)
    except UnsupportedOpError as error:
        if not any(node.name in str(error) for node in left):
            fail(f"the error of compile_model has the name of no refused node: {error}")
    else:
        fail(f"compile_model takes nodes that query_model refuses: {[node.name for node in left]}")


@_check("the next call uses a new value of a weight, and no later call an old one")
def _weights(dut: DeviceUnderTest) -> None:
    graphs = [graph for graph in dut.graphs if graph.parameters]
    if not graphs:
        raise SkippedCheck("it takes none of the test operators with weights")
    for graph in graphs:
        model, other = dut.compile(graph), dut.compile(graph)
        region = dut.compile(graph, dut.with_reference)
        request = model.create_infer_request()
        kept = {parameter: parameter.array for parameter in graph.parameters.values()}
        floats = [p for p in kept if DTYPES[p.type.dtype].kind == "float"]
        try:
            # The scale 0.5 returns: a device must not find the earlier weights again by mistake,
            # nor miss them.
            for scale in (None, 0.5, 0.25, 0.5):
                if scale is not None:
                    with transaction():
                        for parameter in floats:
                            scaled = kept[parameter] * scale
                            parameter.assign(scaled.astype(kept[parameter].dtype))
                when = "with the first weights" if scale is None else "after weights were changed"
                dut.run(model, graph, when)
                dut.run(request.infer, graph, f"{when}, in a request made before")
                dut.run(other, graph, f"{when}, in a second model of the same weights")
                dut.run(region, graph, f"{when}, as a region of HETERO")
            for parameter in floats[:1]:
                with parameter.update() as array:
                    array[...] = array * 2
                dut.run(model, graph, "after Parameter.update")
        finally:
            for parameter, array in kept.items():
                parameter.assign(array)


@_check("one model runs inputs of several sizes")
def _shapes(dut: DeviceUnderTest) -> None:
    if dut.fixed:
        raise SkippedCheck("it takes fixed sizes alone")
    for graph in dut.graphs:
        model = dut.compile(graph)
        request = model.create_infer_request()
        # Sizes return, so that plans of earlier sizes are used again, and grow, so that buffers
        # must.
        for size in (2, 1, 5, 2, 3, 5):
            dut.run(model, graph, f"with {size} rows", size=size)
            dut.run(request.infer, graph, f"with {size} rows, in one request", size=size)


@_check("models run tensors without elements")
def _empty(dut: DeviceUnderTest) -> None:
    if dut.fixed:
        raise SkippedCheck("it takes fixed sizes alone")
    for graph in dut.graphs:
        model = dut.compile(graph)
        dut.run(model, graph, "with 0 rows", size=0)
        dut.run(model, graph, "with 2 rows after 0", size=2)


@_check("graphs may have several outputs, intermediate values and inputs among them")
def _outputs(dut: DeviceUnderTest) -> None:
    for piece in dut.pieces:
        x = piece.input(fixed=dut.fixed)
        first = piece.apply(x, "first")
        second = piece.apply(first, "second")
        side = piece.apply(x, "side")
        graph = Graph([x], [second, first, side, x], f"{piece.name}_outputs")
        if not dut.takes(graph):
            fail(f"a graph with several outputs is refused: {dut.query(graph).reasons}\n{graph}")
        model = dut.compile(graph)
        inputs = dut.inputs(graph)
        want = dut.expected(graph, inputs)
        got = model(inputs)
        dut.compare(graph, got, want, "several outputs, one of them an input")
        if list(got) != [value.name for value in graph.outputs]:
            fail(f"results are named {list(got)}, not as the graph's outputs are\n{graph}")


@_check("runs do not change inputs or earlier results; set_output's array gets the result")
def _memory(dut: DeviceUnderTest) -> None:
    for graph in dut.graphs:
        model = dut.compile(graph)
        inputs = dut.inputs(graph)
        copies = {name: array.copy() for name, array in inputs.items()}
        want = dut.expected(graph, inputs)
        first = model(inputs)
        # Copies: a device that uses its buffers again would change the first results in the second
        # run.
        held = [np.array(first[k]) for k in range(len(want))]
        model(dut.inputs(graph, seed=1))
        dut.compare(graph, first, held, "a later run changed results of an earlier run")
        if any(not np.array_equal(inputs[name], copies[name]) for name in inputs):
            fail(f"a run changed its inputs; compute in a copy\n{graph}")
        odd = {name: _strided(array) for name, array in inputs.items()}
        dut.compare(graph, model(odd), want, "inputs that are read-only and not contiguous")
        request = model.create_infer_request()
        for position, array in enumerate(want):
            target = np.empty_like(array)
            request.set_output(position, target)
            got = request.infer(inputs)
            dut.compare(graph, got, want, f"output {position} written into a given array")
            if got[position] is not target:
                fail(f"set_output({position}, array) is ignored: results are in another array")


def _strided(array: Any) -> Any:
    """Return a read-only view of the same elements that is not contiguous."""
    wide = np.repeat(array, 2, axis=-1) if array.ndim else array.copy()
    view = wide[..., ::2] if array.ndim else wide
    view.flags.writeable = False
    return view


@_check("several requests and threads may run at the same time")
def _requests(dut: DeviceUnderTest) -> None:
    graph = dut.some_graph()
    model = dut.compile(graph)
    if int(model.get_property("OPTIMAL_NUMBER_OF_INFER_REQUESTS")) < 1:
        fail("OPTIMAL_NUMBER_OF_INFER_REQUESTS is less than 1")
    inputs = [dut.inputs(graph, seed) for seed in range(4)]
    wanted = [dut.expected(graph, each) for each in inputs]
    called: list[Any] = []
    requests = [model.create_infer_request() for _ in inputs]

    def ended(request: Any) -> None:
        called.append(request)

    for request in requests:
        request.set_callback(ended)
    for _ in range(3):
        for request, each in zip(requests, inputs, strict=True):
            request.start_async(each)
        for request, want in zip(requests, wanted, strict=True):
            got = request.wait(60)
            if got is None:
                fail("an asynchronous run has not ended after 60 s")
            dut.compare(graph, got, want, "asynchronous runs of four requests side by side")
    if sorted(map(requests.index, called)) != sorted([0, 1, 2, 3] * 3):
        fail(f"12 asynchronous runs have called {len(called)} callbacks")
    errors: list[Exception] = []

    def work(number: int) -> None:
        try:
            for _ in range(5):
                got = model(inputs[number])
                dut.compare(graph, got, wanted[number], "calls from four threads")
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@_check("a region that fails while it runs moves to the next device, and later back")
def _failure(dut: DeviceUnderTest) -> None:
    graph = dut.some_graph()
    ran = dut.compile(graph, dut.with_reference).execution_devices
    if ran == ["REFERENCE"]:
        raise SkippedCheck("the default executor runs its graphs, which has no fallback")
    with broken_sessions([ran[0].partition(".")[0]]) as broken:
        model = dut.compile(
            graph,
            dut.with_reference,
            RUNTIME_FALLBACK=True,
            FALLBACK_FAILURES=2,
            FALLBACK_RETRY=0.05,
        )
        request = model.create_infer_request()
        dut.run(request.infer, graph, "before the failure")
        broken[0] = True
        for _ in range(3):
            dut.run(request.infer, graph, "after the device has failed")
            dut.run(model, graph, "after the device has failed, in a call")
        reported = model.get_property("FALLBACKS")
        if not any(INJECTED in each["cause"] for each in reported.values()):
            fail(
                f"FALLBACKS is {reported}, without the injected failure: no session of an op of "
                "the device was called"
            )
        if ran[0] in model.execution_devices:
            fail(f"EXECUTION_DEVICES still lists {ran[0]} after it has failed several times")
        broken[0] = False
        # Longer than FALLBACK_RETRY above, after which the device is tried again.
        time.sleep(0.06)
        for _ in range(3):
            dut.run(request.infer, graph, "after the device is back")
        if ran[0] not in model.execution_devices:
            fail(f"EXECUTION_DEVICES does not list {ran[0]} after it runs again")


@_check("an exported model runs after import; a file for other hardware is refused")
def _export(dut: DeviceUnderTest) -> None:
    for graph in dut.graphs[:3]:
        model = dut.compile(graph)
        file = io.BytesIO()
        try:
            model.export_model(file)
        except BlobError as error:
            raise SkippedCheck(f"it does not export models: {error}") from None
        data = file.getvalue()
        imported = dut.core.import_model(data, dut.name)
        dut.run(imported, graph, "imported")
        if imported.execution_devices != model.execution_devices:
            fail(
                f"an imported model runs on {imported.execution_devices}, but the exported one on "
                f"{model.execution_devices}"
            )
        for cut in (data[: len(data) // 2], b"no model"):
            try:
                dut.core.import_model(cut, dut.name)
            except SubgraphError:
                continue
            fail("import_model accepts a truncated file, or one that is no model")
        # A device with an import of its own has a file format of its own.
        if type(dut.device).import_model is Device.import_model:
            _other_hardware(dut, graph, data)


def _other_hardware(dut: DeviceUnderTest, graph: Graph, data: bytes) -> None:
    """Check that a file is refused, or compiled anew, if the device's capability differs."""
    device = dut.core.device(dut.compile(graph).execution_devices[0])
    capability = device.capability()
    if not any(capability.values()):
        fail("capability() is empty; return the properties that an exported model depends on")
    other = {key: f"{value} of another kind" for key, value in capability.items()}
    with patch.object(device, "capability", lambda: other):
        try:
            dut.core.import_model(data, dut.name, {"ALLOW_RECOMPILE": False})
        except BlobError as error:
            if "another kind" not in str(error):
                fail(
                    f"the error for a file of other hardware does not name the difference: {error}"
                )
        else:
            fail("a file is imported though capability() differs from the file's")
        dut.run(dut.core.import_model(data, dut.name), graph, "compiled again on import")


@_check("a profile has entries with node, device, kernel and plausible times")
def _profile(dut: DeviceUnderTest) -> None:
    for graph in dut.graphs[:3]:
        config = {"ENABLE_PROFILING": True} if "ENABLE_PROFILING" in dut.options else {}
        model = dut.compile(graph, **config)
        request = model.create_infer_request()
        request.infer(dut.inputs(graph))
        start = time.perf_counter()
        request.infer(dut.inputs(graph))
        wall = time.perf_counter() - start
        entries = request.profile()
        if not entries:
            fail("request.profile() is empty after a run")
        for entry in entries:
            if not entry.node or not entry.device or not entry.kernel:
                fail(f"{entry} lacks its node, device or kernel")
            if not 0 <= entry.seconds < 60:
                fail(f"{entry} took {entry.seconds} seconds")
        ran = {name.partition(".")[0] for entry in entries for name in entry.device.split(",")}
        reported = {name.partition(".")[0] for name in model.execution_devices}
        if not ran & reported:
            fail(
                f"profile entries say that {sorted(ran)} ran, EXECUTION_DEVICES {sorted(reported)}"
            )
        total = sum(entry.seconds for entry in entries)
        # Regions may overlap on all cores. The factor 2 and the 10 ms allow for the cost of the
        # clock, and are estimates.
        if config and total > wall * (os.cpu_count() or 1) * 2 + 0.01:
            fail(f"profile entries sum up to {total:.4f} s, the run took {wall:.4f} s")


@_check("options of threads and streams limit their numbers")
def _threads(dut: DeviceUnderTest) -> None:
    graph = dut.some_graph()
    known = [k for k in ("INFERENCE_NUM_THREADS", "NUM_STREAMS") if dut.options.get(k) == "RW"]
    for key in known:
        for value in (1, 2):
            dut.run(dut.compile(graph, **{key: value}), graph, f"with {key}={value}")
    if "PERFORMANCE_HINT_NUM_REQUESTS" in dut.options:
        model = dut.compile(graph, PERFORMANCE_HINT="THROUGHPUT", PERFORMANCE_HINT_NUM_REQUESTS=2)
        reported = model.get_property("OPTIMAL_NUMBER_OF_INFER_REQUESTS")
        if reported != 2:
            fail(
                "OPTIMAL_NUMBER_OF_INFER_REQUESTS with PERFORMANCE_HINT_NUM_REQUESTS=2 is "
                f"{reported}"
            )
        dut.run(model, graph, "with PERFORMANCE_HINT=THROUGHPUT")
    if not known:
        raise SkippedCheck("it has no option INFERENCE_NUM_THREADS or NUM_STREAMS")
    before = _thread_count()
    for _ in range(3):
        dut.run(dut.compile(graph, **dict.fromkeys(known, 1)), graph, "with one thread")
    more = _thread_count() - before
    if more > 1:
        fail(f"three models with {', '.join(f'{k}=1' for k in known)} start {more} threads more")


def _thread_count() -> int:
    """Return the number of threads of the process, on Linux including native ones."""
    tasks = Path("/proc/self/task")
    return len(list(tasks.iterdir())) if tasks.is_dir() else threading.active_count()


@_check("errors are Subgraph's and name the cause; the model works afterwards")
def _errors(dut: DeviceUnderTest) -> None:
    graph = dut.some_graph()
    _expect_error(ConfigError, "NO_SUCH_OPTION", lambda: dut.compile(graph, NO_SUCH_OPTION=1))
    _expect_error(ConfigError, "NO_SUCH", lambda: dut.core.get_property(dut.device.name, "NO_SUCH"))
    if "PERFORMANCE_HINT" in dut.options:
        _expect_error(
            ConfigError, "FASTEST", lambda: dut.compile(graph, PERFORMANCE_HINT="FASTEST")
        )
    x = graph.clone().inputs[0]
    node = Node("NoSuchOperator", [x], outputs=1, domain="no.such.domain", name="unknown")
    unknown = Graph([x], node.outputs, "unknown")
    inputs = dut.inputs(graph)
    _expect_error(SubgraphError, "NoSuchOperator", lambda: dut.compile(unknown)(inputs[x.name]))
    model = dut.compile(graph)
    name = next(iter(inputs))
    # No device may convert complex numbers to floats silently.
    kind = np.complex128 if inputs[name].dtype != np.complex128 else np.float32
    given: dict[str, Any]
    for given, error in (
        ({}, MissingInputError),
        ({**inputs, "no_such_input": inputs[name]}, MissingInputError),
        ({**inputs, name: inputs[name][None]}, ShapeError),
        ({**inputs, name: inputs[name].astype(kind)}, ShapeError),
    ):
        mentioned = "no_such_input" if "no_such_input" in given else name
        _expect_error(error, mentioned, partial(model, given))
    dut.run(model, graph, "after inputs that do not fit")


def _expect_error(kind: type[Exception], text: str, do: Callable[[], object]) -> None:
    """Check that ``do`` raises a ``kind`` whose message mentions ``text``."""
    try:
        do()
    except kind as error:
        if text not in str(error):
            fail(f"the error does not mention {text!r}: {described(error)}")
    except Exception as error:
        raise FailedCheck(
            f"{type(error).__name__} instead of sg.{kind.__name__} about {text!r}: {error}"
        ) from error
    else:
        fail(f"no error about {text!r}; a {kind.__name__} was expected")


@_check("random graphs of operators that the device takes run by HETERO with REFERENCE")
def _random(dut: DeviceUnderTest) -> None:
    random_graphs(dut)
