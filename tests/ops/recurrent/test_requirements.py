"""LSTM, GRU and RNN refuse weights and states that do not fit, on every device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import subgraph as sg
from subgraph.graph.types import Array
from tests.support.requirements import DEVICES, Use, floats, refused, run, taken

GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
STEPS, BATCH, WIDTH, HIDDEN = 3, 2, 5, 4


def operands(op: str, directions: int = 1) -> list[Array | None]:
    """Return operands that fit."""
    rows = GATES[op] * HIDDEN
    state = floats(directions, BATCH, HIDDEN)
    found: list[Array | None] = [
        floats(STEPS, BATCH, WIDTH),
        floats(directions, rows, WIDTH),
        floats(directions, rows, HIDDEN),
        floats(directions, 2 * rows),
        np.array([3, 2], np.int32),
        state,
    ]
    return [*found, state, floats(directions, 3 * HIDDEN)] if op == "LSTM" else found


def replaced(op: str, k: int, other: Array) -> list[Array | None]:
    """Return operands of which one does not fit."""
    found = operands(op)
    found[k] = other
    return found


def wrong_shapes(op: str) -> list[tuple[int, Array]]:
    """Return positions and what does not fit there: short, long, empty, of another rank."""
    rows = GATES[op] * HIDDEN
    found: list[tuple[int, Array]] = [
        (0, floats(STEPS, BATCH, WIDTH - 1)),
        (0, floats(STEPS, BATCH)),
        (1, floats(1, rows - 1, WIDTH)),
        (1, floats(1, rows + 1, WIDTH)),
        (1, floats(1, rows, WIDTH + 1)),
        (1, floats(1, 0, WIDTH)),
        (1, floats(2, rows, WIDTH)),
        (1, floats(rows, WIDTH)),
        (2, floats(1, rows - 1, HIDDEN)),
        (2, floats(1, rows, HIDDEN - 1)),
        (2, floats(1, rows, HIDDEN + 1)),
        (2, floats(2, rows, HIDDEN)),
        (3, floats(1, rows)),
        (3, floats(1, 2 * rows - 1)),
        (3, floats(1, 0)),
        (3, floats(2 * rows)),
        (3, floats(1, 2 * rows).astype(np.float64)),
        (4, np.array([3], np.int32)),
        (4, np.array([3, 2, 1], np.int32)),
        (4, np.array([3, 2], np.int64)),
        (5, floats(1, BATCH, HIDDEN - 1)),
        (5, floats(1, 1, HIDDEN)),
        (5, floats(0, BATCH, HIDDEN)),
        (5, floats(BATCH, HIDDEN)),
    ]
    if op == "LSTM":
        found += [
            (6, floats(1, BATCH, 1)),
            (6, floats(1, BATCH + 1, HIDDEN)),
            (7, floats(1, 2 * HIDDEN)),
            (7, floats(1, 0)),
            (7, floats(3 * HIDDEN)),
        ]
    return found


WRONG = [
    *(Use(op, replaced(op, k, other)) for op in GATES for k, other in wrong_shapes(op)),
    *(
        Use(op, operands(op), attributes)
        for op in GATES
        for attributes in (
            {"hidden_size": 1},
            {"hidden_size": 64},
            {"hidden_size": 0},
            {"hidden_size": -1},
            {"direction": "bidirectional"},
            {"direction": "sideways"},
            {"layout": 2},
            {"layout": 1},
            {"activations": ("Tanh",) * (GATES[op] // 2), "direction": "reverse"},
        )
        if op != "RNN" or "activations" not in attributes
    ),
    Use("GRU", [*operands("GRU"), floats(1, BATCH, HIDDEN)]),
]
RIGHT = [
    *(Use(op, operands(op), {"hidden_size": HIDDEN}) for op in GATES),
    *(Use(op, operands(op, 2), {"direction": "bidirectional"}) for op in GATES),
]

test_operands_that_do_not_fit_are_refused = refused(WRONG)
test_operands_that_fit_are_taken = taken(RIGHT)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("op", GATES)
@pytest.mark.parametrize("lengths", [(4, 1), (-1, 2), (2**31 - 1, 0), (0, -(2**31))])
def test_lengths_lie_within_the_steps(op: str, lengths: Any, device: str) -> None:
    use = Use(op, replaced(op, 4, np.array(lengths, np.int32)))
    last = range(1, len(use.inputs))
    for weights in ((), last, [k for k in last if k != 4]):
        with pytest.raises(sg.ShapeError, match="culprit"):
            run(use, device, weights)
