"""Memory in large pages: arrays do not overlap, are aligned, and keep their content."""

from __future__ import annotations

import ctypes
import gc
import mmap
from itertools import pairwise

import numpy as np
import pytest

from subgraph.system import large_pages
from subgraph.system.large_pages import aligned_empty, mapped_empty
from subgraph.weights.mapped_files import release_array

pytestmark = pytest.mark.plain_memory
_SIZES = (0, 1, 100, 5000, 70_000, 3_000_000, 9_000_000, 5000)


@pytest.mark.parametrize("offered", [True, False])
def test_arrays_do_not_overlap(offered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_pages, "_HAS_HUGE_PAGES", offered and large_pages._HAS_HUGE_PAGES)  # pyright: ignore[reportPrivateUsage]
    arrays = [aligned_empty((size,), np.dtype(np.uint8)) for size in _SIZES * 5]
    arrays += [mapped_empty(size) for size in _SIZES]
    for k, (array, size) in enumerate(zip(arrays, _SIZES * 6, strict=True)):
        assert array.size == size
        assert not size or array.ctypes.data % 64 == 0
        array[...] = k
    spans = sorted((a.ctypes.data, a.ctypes.data + a.nbytes) for a in arrays if a.size)
    assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
    for k in range(0, len(arrays), 2):
        arrays[k] = np.empty(0, np.uint8)
    gc.collect()
    assert all((array == k).all() for k, array in enumerate(arrays) if k % 2)


def test_shapes_and_dtypes() -> None:
    array = aligned_empty((30, 7, 11), np.dtype(np.float64), 128)
    assert (array.shape, array.dtype, array.flags.c_contiguous) == ((30, 7, 11), np.float64, True)
    assert array.ctypes.data % 128 == 0


def test_only_pages_of_files_are_released() -> None:
    array = aligned_empty((1 << 20,), np.dtype(np.uint8))
    array[...] = 7
    array.flags.writeable = False
    release_array(array)
    assert (array == 7).all()


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="no large pages to ask for here")
def test_pages_are_freed_with_their_array() -> None:
    arrays = [aligned_empty((100_000,), np.dtype(np.uint8)) for _ in range(3)]
    for k in range(3):
        arrays[k][...] = 7
    inside = -(-arrays[1].ctypes.data // mmap.PAGESIZE) * mmap.PAGESIZE
    view = arrays[1][50_000:].view(np.int32)
    del arrays[1]
    gc.collect()
    assert ctypes.string_at(inside, 100) == bytes([7] * 100)  # a view still needs them
    del view
    gc.collect()
    assert ctypes.string_at(inside, 100) == bytes(100)
    assert all((array == 7).all() for array in arrays)


@pytest.mark.parametrize("size", [5000, 3_000_000, 9_000_000])
def test_without_mappings_memory_is_numpys(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: object, **_options: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(large_pages, "_SLABS", type(large_pages._SLABS)())  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(large_pages, "Anonymous", refuse)
    for array in (aligned_empty((size,), np.dtype(np.uint8)), mapped_empty(size)):
        array[...] = 1
        assert (array.size, array.ctypes.data % 64) == (size, 0)
