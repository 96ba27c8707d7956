"""Compare every operator on devices over other libraries with REFERENCE.

usage: python benchmarks/backend_operators.py [DEVICE ...] [--only Resize,Gemm]

The samples are those of `wrong_sizes`: operands that fit, for each version of each operator, from
ONNX's suite, the tests and a table. Each runs in HETERO before REFERENCE, once with all operands as
inputs, and once with all but the first as constants. A line is printed for each result that
differs, and for each sample that a device takes and then fails to run. Without names all installed
libraries run. What is known to remain: NaN that a device does not keep, errors that a library finds
only at a run, and middles between two integers that QuantizeLinear rounds to the other side.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Iterator

import numpy as np
import onnx
from wrong_sizes.runs import differs, make_model, ours
from wrong_sizes.samples import RANDOM, Operand, Sample, samples

import subgraph as sg


def models_of(sample: Sample) -> Iterator[tuple[onnx.ModelProto, dict[str, Operand]]]:
    """Yield models of a sample with the values of their inputs."""
    shapes = {name: v.shape for name, v in sample.values.items() if isinstance(v, np.ndarray)}
    tensors = list(shapes)
    for names in (set[str](), set(tensors[1:])) if tensors[1:] else (set[str](),):
        nodes, opsets = [sample.node], sample.opsets
        model = make_model(nodes, sample.values, sample.types, opsets, shapes.get, names)
        yield model, {name: v for name, v in sample.values.items() if name not in names}


def compare(device: str, only: str) -> int:
    """Print what differs on a device; return the number of lines."""
    core, count, taken, wrong = sg.Core(), 0, 0, 0
    for sample in (sample for group in samples(only) for sample in group):
        if sample.node.op_type in RANDOM:
            continue
        for model, values in models_of(sample):
            count += 1
            said = said_of(core, device, model, values)
            taken += said is not None
            if said:
                wrong += 1
                print(f"{device} {sample.title} ({sample.source}): {said}", flush=True)
    print(f"{device}: {taken} of {count} models run there, {wrong} differ")
    return wrong


def said_of(
    core: sg.Core, device: str, model: onnx.ModelProto, values: dict[str, Operand]
) -> str | None:
    """Return how results on a device differ, "" if they do not; None if it takes no node."""
    try:
        config = {"RUNTIME_FALLBACK": False}
        compiled = core.compile_model(sg.load(model), f"HETERO:{device},REFERENCE", config)
    except sg.SubgraphError:
        return None  # no device takes it
    if device not in compiled.get_property("EXECUTION_DEVICES"):
        return None
    [expected] = ours("REFERENCE", model, [values])
    try:
        results = compiled(values)
        found = [results[k] for k in range(len(model.graph.output))]
    except sg.SubgraphError as error:
        return "" if expected.results is None else f"fails: {' '.join(str(error).split())[:200]}"
    if expected.results is None:
        return f"is taken; REFERENCE says {expected.error}"
    for mine, right in zip(found, expected.results, strict=True):
        if isinstance(right, np.ndarray) and (mine.dtype, mine.shape) != (right.dtype, right.shape):
            return f"gives {mine.dtype}{list(mine.shape)} for {right.dtype}{list(right.shape)}"
    return differs(found, expected.results)


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("devices", nargs="*", help="names of devices; all that are installed")
    parser.add_argument("--only", default="", help="operators, separated by commas")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    installed = [backend.name for backend in sg.backends() if not backend.problem]
    return min(1, sum(compare(name, arguments.only) for name in arguments.devices or installed))


if __name__ == "__main__":
    sys.exit(main())
