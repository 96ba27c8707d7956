"""The process of one runtime in a benchmark, controlled by its pipes.

`subgraph.tools.bench` starts ``python -m subgraph.tools.bench_worker RUNNER MODEL THREADS INPUTS``.
The process reads a JSON command in each line and answers with a JSON line: ``{"run": n, "inner":
k}`` takes n samples of k runs, with a calibration loop before and after each; ``{"save": path}``
writes the results of a run. With the runner ``best_level`` the process only finds the fastest
optimisation level of ONNX Runtime, so that the measured process loads the model once.
"""

from __future__ import annotations

import functools
import importlib
import json
import pickle
import resource
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

Arrays = dict[str, Any]
Runner = Callable[[], list[Any]]


def ours(model: Path, threads: int, arrays: Arrays, precision: str = "") -> Runner:
    """Return a function that runs a model on Subgraph's CPU device.

    Args:
        model: An ONNX file.
        threads: Threads of a run.
        arrays: Inputs by name.
        precision: Value of the option INFERENCE_PRECISION.
    """
    import subgraph as sg

    config = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION": precision}
    compiled = sg.compile_model(model, "CPU", config)
    return lambda: list(compiled(arrays).values())


def onnxruntime(model: Path, threads: int, arrays: Arrays, level: str) -> Runner:
    """Return a function that runs a model by ONNX Runtime's CPU provider.

    Args:
        model: An ONNX file.
        threads: Threads within an operator.
        arrays: Inputs by name.
        level: Graph optimisation level, one of `LEVELS`.
    """
    ort: Any = importlib.import_module("onnxruntime")
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, f"ORT_ENABLE_{level}")
    session: Any = ort.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
    return functools.partial(session.run, None, arrays)


def best_level(model: Path, threads: int, arrays: Arrays) -> str:
    """Return the optimisation level, of `LEVELS`, at which ONNX Runtime is fastest.

    Args:
        model: An ONNX file.
        threads: Threads within an operator.
        arrays: Inputs by name.
    """
    return min(LEVELS, key=lambda level: _median_of(onnxruntime(model, threads, arrays, level)))


def openvino(model: Path, threads: int, arrays: Arrays, precision: str = "f32") -> Runner:
    """Return a function that runs a model by OpenVINO, tuned for latency.

    Args:
        model: An ONNX file.
        threads: Threads of a run.
        arrays: Inputs by name.
        precision: OpenVINO's name of the dtype in which it computes.
    """
    ov: Any = importlib.import_module("openvino")
    core = ov.Core()
    network = core.read_model(str(model))
    network.reshape({name: array.shape for name, array in arrays.items()})
    config = {
        "INFERENCE_NUM_THREADS": threads,
        "INFERENCE_PRECISION_HINT": precision,
        "PERFORMANCE_HINT": "LATENCY",
    }
    request = core.compile_model(network, "CPU", config).create_infer_request()
    for name, array in arrays.items():
        request.set_tensor(name, ov.Tensor(array))

    def run() -> list[Any]:
        request.infer()
        return [tensor.data for tensor in request.output_tensors]

    return run


def torch(model: Path, threads: int, arrays: Arrays) -> Runner:
    """Return a function that runs a model by PyTorch, converted by onnx2torch.

    Args:
        model: An ONNX file.
        threads: Threads within an operator.
        arrays: Inputs by name, in the order of the module's arguments.
    """
    onnx2torch: Any = importlib.import_module("onnx2torch")
    pytorch: Any = importlib.import_module("torch")
    pytorch.set_num_threads(threads)
    module = onnx2torch.convert(str(model)).eval()
    tensors = [pytorch.from_numpy(array) for array in arrays.values()]

    def run() -> list[Any]:
        with pytorch.inference_mode():
            found: Any = module(*tensors)
        several: list[Any] = list(found) if isinstance(found, (tuple, list)) else [found]  # pyright: ignore[reportUnknownArgumentType]
        return [tensor.numpy() for tensor in several]

    return run


LEVELS = ("BASIC", "ALL")
RUNNERS: Mapping[str, Callable[[Path, int, Arrays], Runner]] = {
    "subgraph": ours,
    "subgraph bfloat16": functools.partial(ours, precision="bfloat16"),
    "openvino bfloat16": functools.partial(openvino, precision="bf16"),
    **{f"onnxruntime {level}": functools.partial(onnxruntime, level=level) for level in LEVELS},
    "openvino": openvino,
    "torch": torch,
}


def calibrate() -> float:
    """Return the seconds of a fixed loop, which show the machine's present speed."""
    start = time.perf_counter()
    total = 0
    for k in range(20_000):
        total += k
    return time.perf_counter() - start


def _median_of(run: Callable[[], Any]) -> float:
    run()
    times: list[float] = []
    for _ in range(5):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return float(np.median(times))


def peak_memory() -> int:
    """Return the peak resident size of this process, in bytes."""
    # getrusage includes the size of the parent process at the fork.
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _answer(command: dict[str, Any], run: Runner) -> dict[str, Any]:
    if "save" in command:
        with Path(command["save"]).open("wb") as file:
            pickle.dump(run(), file)
        return {"saved": command["save"]}
    samples: list[tuple[float, float]] = []
    before = calibrate()
    for _ in range(command["run"]):
        start = time.perf_counter()
        for _ in range(command["inner"]):
            run()
        seconds = (time.perf_counter() - start) / command["inner"]
        after = calibrate()
        samples.append((seconds, max(before, after)))
        before = after
    return {"samples": samples}


def main() -> None:
    """Prepare the runtime, print the time until the first result, then answer commands."""
    name, model, threads, inputs = sys.argv[1:5]
    start = time.perf_counter()
    # A file of `bench` itself. Formats of NumPy hold neither bfloat16 nor strings.
    arrays: Arrays = pickle.loads(Path(inputs).read_bytes())
    if name == "best_level":
        print(json.dumps({"level": best_level(Path(model), int(threads), arrays)}))
        return
    run = RUNNERS[name](Path(model), int(threads), arrays)
    run()
    ready = {"first_result_s": time.perf_counter() - start, "peak_bytes": peak_memory()}
    print(json.dumps(ready), flush=True)
    for line in sys.stdin:
        print(json.dumps(_answer(json.loads(line), run)), flush=True)


if __name__ == "__main__":
    main()
