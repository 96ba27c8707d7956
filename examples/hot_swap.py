"""Weights that change after compile: assigned, updated in place, several at once; no recompilation.

One thread runs the model while the main thread changes weights. Every result belongs to one
consistent version, the old weights or the new ones, never to a mixture. Run: ``python
examples/hot_swap.py``.
"""

import threading

import numpy as np

import subgraph as sg
from subgraph import ops


def main() -> None:
    """Change two weights that depend on each other a thousand times while the model runs."""
    x = sg.input("x", shape=(4, 8))
    first = sg.parameter("first", np.full((8, 8), 1, np.float32))
    second = sg.parameter("second", np.full((8, 8), 1, np.float32))
    y = ops.MatMul(ops.MatMul(x, first), second)
    model = sg.compile_model(sg.Graph([x], [y]), "CPU")
    ones = np.ones((4, 8), np.float32)
    seen: set[float] = set()
    stop = threading.Event()

    def ask() -> None:
        while not stop.is_set():
            (result,) = {*model(x=ones)[0].ravel().tolist()}
            seen.add(result)

    thread = threading.Thread(target=ask)
    thread.start()
    for scale in range(1, 1001):
        with sg.transaction():  # both or neither
            model.parameters["first"].assign(np.full((8, 8), scale, np.float32))
            model.parameters["second"].assign(np.full((8, 8), 1 / scale, np.float32))
    stop.set()
    thread.join()
    worst = max(abs(value - 64) for value in seen)
    print(f"{len(seen)} distinct results, all 64 but for rounding: worst difference {worst:.1e}")
    assert worst < 1e-3

    with model.parameters["second"].update() as weight:  # a part of one weight
        weight[:, 0] = 0
    print("column 0 after the update:", model(x=ones)[0][:, 0])


if __name__ == "__main__":
    main()
