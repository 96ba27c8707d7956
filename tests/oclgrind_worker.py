"""Runs cases on Oclgrind, which writes what it finds to the file in OCLGRIND_LOG.

usage: python tests/oclgrind_worker.py DEVICE KERNELS START STEP
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from opencl_support import core, graph_of
from test_opencl_ops import chosen, heavy, integer, meeting
from test_ops_devices import check


def main(device: str, kernels: str, start: int, step: int) -> None:
    """Run every ``step``-th case on a device; what the operators give is compared, too."""
    core().set_property("OPENCL", {"KERNELS": kernels})
    for op, case in [*heavy(), *integer(), *meeting()][start::step]:
        graph, arrays = graph_of(op, **case)
        model = core().compile_model(graph, device)
        wanted = core().compile_model(graph, "CPU")(arrays)[0]
        np.testing.assert_allclose(model(arrays)[0], wanted, rtol=1e-4, atol=1e-4)
        print("ran", op, flush=True)
    with np.errstate(all="ignore"):
        for case in chosen()[start::step]:
            if case.inputs[0] is not None and case.inputs[0].size < 3000:
                print("runs", case.name, flush=True)
                check(case, device)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
