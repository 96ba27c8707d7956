"""Packed weights against their definition in NumPy."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest

from subgraph.graph.limits import limited, memory_limit
from subgraph.graph.parameters import Parameter, Snapshot, pinned, pinned_snapshot
from subgraph.graph.types import Array
from subgraph.ops.movement import packing
from subgraph.ops.movement.packing_kernels import winograd_matrix
from subgraph.ops.shared.tile_planning import Tiles, round_up, tiles
from subgraph.weights.parallel import parallel_map


def panels(matrix: Array, of: Tiles) -> Array:
    """Return columns of ``[K, N]`` in groups of ``of.width``, the last filled to whole vectors."""
    depth, columns = matrix.shape
    filled = np.zeros((depth, round_up(columns, of.lanes)), of.dtype)
    filled[:, :columns] = matrix
    parts = [filled[:, at : at + of.width].reshape(-1) for at in range(0, columns, of.width)]
    return np.concatenate(parts) if parts else np.zeros(0, of.dtype)


def by_blocks(weight: Array, of: Tiles) -> Array:
    """Return ``[O, I, taps]`` as a matrix whose rows are (block of inputs, tap, lane)."""
    outputs, inputs, taps = weight.shape
    filled = np.zeros((outputs, round_up(inputs, of.lanes), taps), of.dtype)
    filled[:, :inputs] = weight
    split = filled.reshape(outputs, -1, of.lanes, taps)
    return split.transpose(1, 3, 2, 0).reshape(-1, outputs)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_matrices(dtype: str) -> None:
    of = tiles(dtype)
    rng = np.random.default_rng(1)
    narrow = 2 * of.width + of.lanes + 1
    shapes = [(1, 1, 1), (1, 5, 7), (2, 33, 50), (1, 40, 3 * of.width), (3, 17, narrow)]
    for shape in [*shapes, (0, 3, 4), (1, 0, 5), (1, 5, 0)]:
        plain = rng.standard_normal(shape).astype(dtype)
        turned = np.ascontiguousarray(plain.swapaxes(1, 2)).swapaxes(1, 2)
        spread = np.repeat(plain, 2, axis=2)[:, :, ::2]
        want = np.concatenate([np.zeros(0, dtype), *(panels(matrix, of) for matrix in plain)])
        for stack in (plain, turned, spread):
            np.testing.assert_array_equal(packing.pack_matrices(stack, of), want)


@pytest.mark.parametrize("turned", [False, True])
def test_a_large_matrix_of_a_file_gives_its_pages_back_in_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, turned: bool
) -> None:
    of = tiles("float32")
    plain = np.random.default_rng(4).standard_normal((3000, 5 * of.width + 3)).astype(of.dtype)
    (tmp_path / "file").write_bytes((plain.T if turned else plain).tobytes())
    with (tmp_path / "file").open("rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    flat = np.frombuffer(mapping, of.dtype)
    matrix = flat.reshape(plain.T.shape).T if turned else flat.reshape(plain.shape)
    parts: list[int] = []
    monkeypatch.setattr(packing, "release_array", lambda part: parts.append(part.shape[0]))
    want = panels(plain, of)
    np.testing.assert_array_equal(packing.pack_matrices(matrix[None], of), want)
    assert parts == []
    monkeypatch.setattr(packing, "_SLICE_BYTES", plain.nbytes // 3)
    np.testing.assert_array_equal(packing.pack_matrices(matrix[None], of), want)
    assert sum(parts) == plain.shape[1]
    assert 3 <= len(parts) <= 4


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_blocks(dtype: str) -> None:
    of = tiles(dtype)
    rng = np.random.default_rng(2)
    for shape in [(1, 1, 1), (5, 3, 9), (33, 2 * of.lanes, 4), (of.width + 1, 19, 9), (4, 0, 9)]:
        weight = rng.standard_normal(shape).astype(dtype)
        stack = np.stack([weight, 2 * weight])
        want = [panels(by_blocks(each, of), of) for each in stack]
        np.testing.assert_array_equal(packing.pack_blocks(stack, of), np.concatenate(want))


@pytest.mark.parametrize(("m", "taps"), [(2, 3), (4, 3), (3, 4), (2, 5)])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_winograd(dtype: str, m: int, taps: int) -> None:
    of = tiles(dtype)
    rng = np.random.default_rng(3)
    g = np.array(winograd_matrix(m, taps))
    for outputs, inputs in [(1, 1), (5, 3), (of.width, 2 * of.lanes), (of.width + 9, 21)]:
        weight = rng.standard_normal((outputs, inputs, taps, taps)).astype(dtype)
        points = np.einsum("pi,oqij,rj->prqo", g, weight.astype(np.float64), g)
        filled = np.zeros(((m + taps - 1) ** 2, round_up(inputs, of.lanes), outputs))
        filled[:, :inputs] = points.reshape(-1, inputs, outputs)
        want = np.concatenate([panels(point, of) for point in filled])
        got = packing.pack_winograd(weight, of, m)
        assert got.dtype == dtype
        np.testing.assert_allclose(got, want, rtol=2 * float(np.finfo(dtype).eps), atol=1e-15)


def test_strided_winograd() -> None:
    """Along an axis: the first and the middle weight, the outer ones' sum and it, the last."""
    of = tiles("float32")
    rng = np.random.default_rng(3)
    values = [[0, 1], [3, 1], [2]]
    outputs, inputs = of.width + 9, 2 * of.lanes
    weight = rng.standard_normal((outputs, inputs, 3, 3)).astype(np.float32)
    wide = np.concatenate([weight, weight[:, :, :1] + weight[:, :, 2:]], 2)
    wide = np.concatenate([wide, wide[..., :1] + wide[..., 2:3]], 3)
    want: list[Array] = []
    for rows in values:
        for columns in values:
            point = wide[:, :, rows][..., columns].reshape(outputs, inputs, -1)
            want.append(packing.pack_blocks(point[None], of))
    got = packing.pack_winograd_strided(weight, of)
    np.testing.assert_allclose(got, np.concatenate(want), rtol=1e-6, atol=1e-6)


def test_threads_see_the_snapshot_and_report_errors() -> None:
    parameter = Parameter("p", np.zeros(1, np.float32))
    snapshot = Snapshot((parameter,))
    parameter.assign(np.ones(1, np.float32))
    seen: list[tuple[int, float]] = []
    with pinned(snapshot):
        parallel_map(lambda k: seen.append((k, float(parameter.array[0]))), range(50), 3)
        assert pinned_snapshot() is snapshot
    assert sorted(seen) == [(k, 0.0) for k in range(50)]
    with pytest.raises(ZeroDivisionError):
        parallel_map(lambda k: 1 // k, [2, 1, 0, 1], 2)
    with limited(memory=1 << 20):  # budgets hold in all threads, and results are in order
        assert parallel_map(lambda k: (k, memory_limit()), range(50), 3) == [
            (k, 1 << 20) for k in range(50)
        ]
