"""Transpositions on the CPU device: few rows, ragged edges, every width."""

from __future__ import annotations

import numpy as np
import pytest

import subgraph as sg
from subgraph import ops
from subgraph.graph.types import Array
from subgraph.ops.movement import copies_cpu
from tests.support.kernels import random_bits

# Shape and order: few channels to and from the last place, in batches, with a rest; the same inside
# other dimensions; matrices that are no multiples of a block, or smaller than one.
FEW = [((2, channels, 9, 31), (0, 2, 3, 1)) for channels in (2, 3, 4)] + [
    ((2, 9, 31, channels), (0, 3, 1, 2)) for channels in (2, 3, 4)
]
TRANSPOSED = [
    ((5, 3, 40, 2), (0, 2, 1, 3)),
    ((3, 2, 20, 2, 33), (0, 2, 4, 1, 3)),
    ((1, 84, 70), (0, 2, 1)),
    ((7, 131), (1, 0)),
    ((131, 7), (1, 0)),
    ((12, 5), (1, 0)),
    ((5, 6, 17), (2, 1, 0)),
    ((65, 66), (1, 0)),
    ((3, 1, 2), (2, 1, 0)),
]
# Pixels of a few elements in planes that are transposed; patches of short rows.
PATCHES = [
    ((1, 40, 33, 4), (0, 3, 2, 1)),
    ((3, 17, 50, 2), (0, 3, 2, 1)),
    ((1, 4, 33, 40), (0, 3, 2, 1)),
    ((3, 2, 50, 17), (0, 3, 2, 1)),
    ((20, 3, 18, 3), (3, 2, 1, 0)),
    ((2, 6, 8, 2, 8, 2), (0, 1, 3, 5, 2, 4)),
    ((2, 6, 2, 2, 8, 8), (0, 1, 4, 2, 5, 3)),
    ((5, 4, 2, 5, 2), (0, 2, 4, 1, 3)),
]


def transposed(array: Array, order: tuple[int, ...], threads: int = 1) -> Array:
    """Return the transposition that the CPU device makes."""
    x = sg.input("x", array.shape, str(array.dtype))
    graph = sg.Graph([x], [ops.Transpose(x, perm=order)])
    model = sg.compile_model(graph, "CPU", {"INFERENCE_NUM_THREADS": threads})
    return np.asarray(model([array])[0])


@pytest.mark.parametrize("dtype", ["uint8", "float32", "float64"])
@pytest.mark.parametrize(("shape", "order"), FEW + TRANSPOSED + PATCHES)
def test_transpositions(shape: tuple[int, ...], order: tuple[int, ...], dtype: str) -> None:
    x = random_bits(shape, dtype)
    np.testing.assert_array_equal(transposed(x, order), x.transpose(order))


@pytest.mark.usefixtures("other_isa")
def test_every_width() -> None:
    for shape, order in (FEW[1], FEW[5], *TRANSPOSED[2:4]):
        x = random_bits(shape, "float32")
        np.testing.assert_array_equal(transposed(x, order), x.transpose(order))


def test_long_rows_are_cut_and_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many units, and threads, that do not divide the rows."""
    monkeypatch.setattr(copies_cpu, "UNIT_BYTES", 512)
    monkeypatch.setattr(copies_cpu, "MIN_BYTES_PER_THREAD", 1)
    for shape, order in ((FEW[1]), (FEW[5])):
        x = random_bits(shape, "float32")
        for threads in (1, 3):
            np.testing.assert_array_equal(transposed(x, order, threads), x.transpose(order))
