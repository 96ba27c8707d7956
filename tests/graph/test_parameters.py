"""Parameters: versions, transactions, snapshots; readers and writers at once."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

import numpy as np
import pytest

import subgraph as sg
from subgraph.graph.parameters import Snapshot, epoch, pinned, pinned_snapshot
from subgraph.graph.types import Array


def make(name: str = "w", value: float = 1) -> sg.Parameter:
    return sg.Parameter(name, np.full(4, value, np.float32))


def test_assign_gives_a_new_version_and_copies() -> None:
    source = np.ones(4, np.float32)
    parameter = sg.Parameter("w", source)
    source[:] = 7
    assert parameter.array.tolist() == [1] * 4
    before, old, stamp = parameter.version, parameter.array, epoch()
    new: Array = np.full(4, 2, np.float32)
    parameter.assign(new)
    new[:] = 9
    assert parameter.version > before
    assert epoch() > stamp
    assert parameter.array.tolist() == [2] * 4
    assert old.tolist() == [1] * 4, "who holds the old state keeps it"
    with pytest.raises(ValueError, match="read-only"):
        parameter.array[0] = 5
    assert "version" in repr(parameter)


def test_versions_never_repeat() -> None:
    one, two = make(), make()
    stamps = {one.version, two.version}
    for parameter in (one, two, one):
        parameter.assign(np.zeros(4, np.float32))
        stamps.add(parameter.version)
    assert len(stamps) == 5


@pytest.mark.parametrize(
    "array", [np.zeros(3, np.float32), np.zeros(4), np.zeros((4, 1), np.float32)]
)
def test_dtype_and_shape_are_fixed(array: Array) -> None:
    parameter = make()
    with pytest.raises(sg.ShapeError, match=r"'w' is float32\[4\]"):
        parameter.assign(array)
    assert parameter.array.tolist() == [1] * 4


def test_update_publishes_at_the_end_and_not_after_an_error() -> None:
    parameter = make()
    with parameter.update() as array:
        array[0] = 5
        assert parameter.published.array[0] == 1
    assert parameter.array.tolist() == [5, 1, 1, 1]
    version = parameter.version
    with pytest.raises(ZeroDivisionError), parameter.update() as array:
        array[0] = 1 // (array.ndim - 1)
    assert (parameter.array[0], parameter.version) == (5, version)


def test_a_transaction_is_all_or_nothing_and_seen_inside() -> None:
    one, two = make("one"), make("two")

    def fail() -> None:
        with sg.transaction():
            one.assign(np.zeros(4, np.float32))
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert one.array[0] == 1
    with sg.transaction():
        one.assign(np.full(4, 2, np.float32))
        assert one.array[0] == 2, "the transaction sees its own changes"
        with sg.transaction(), two.update() as array:
            array += one.array
        assert two.published.array[0] == 1, "nobody else does"
    assert (one.array[0], two.array[0]) == (2, 3)


def test_a_nested_transaction_that_raises_changes_nothing() -> None:
    one, two = make("one"), make("two")
    with sg.transaction():
        one.assign(np.full(4, 2, np.float32))
        with contextlib.suppress(ZeroDivisionError), sg.transaction():
            one.assign(np.full(4, 3, np.float32))
            two.assign(np.full(4, 3 // (one.array.ndim - 1), np.float32))
        with contextlib.suppress(ZeroDivisionError), sg.transaction():
            two.assign(np.full(4, 4, np.float32))
            one.assign(np.full(4, 4 // (one.array.ndim - 1), np.float32))
        assert (one.array[0], two.array[0]) == (2, 1)
    assert (one.array[0], two.array[0]) == (2, 1)


def test_a_pinned_snapshot_stays_in_its_thread() -> None:
    parameter = make()
    other = make("other")
    snapshot = Snapshot([parameter])
    parameter.assign(np.full(4, 2, np.float32))
    other.assign(np.full(4, 2, np.float32))
    seen: list[float] = []
    with pinned(snapshot):
        assert pinned_snapshot() is snapshot
        assert parameter.array[0] == 1
        assert parameter.version == snapshot.states[parameter].version
        assert other.array[0] == 2, "it is not in the snapshot"
        thread = threading.Thread(target=lambda: seen.append(parameter.array[0]))
        thread.start()
        thread.join()
        with pinned(None):
            assert parameter.array[0] == 2
        assert parameter.array[0] == 1
    assert seen == [2]
    assert pinned_snapshot() is None
    assert parameter.array[0] == 2


def test_readers_see_transactions_whole() -> None:
    parameters = [make(f"w{k}", 0) for k in range(4)]
    stop = threading.Event()
    torn: list[list[float]] = []

    def write() -> None:
        for turn in range(1, 300):
            with sg.transaction():
                for parameter in parameters:
                    parameter.assign(np.full(4, turn, np.float32))
        stop.set()

    def read() -> None:
        while not stop.is_set():
            states = Snapshot(parameters).states
            values = [float(states[p].array[0]) for p in parameters]
            if len(set(values)) > 1:
                torn.append(values)

    threads = [threading.Thread(target=f) for f in (write, read, read)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not torn


def test_parameters_are_told_apart_by_identity() -> None:
    assert make() != make()
    assert len({make(), make()}) == 2
    adopted = np.ones(2, np.float32)
    assert np.shares_memory(sg.Parameter.adopt("w", adopted).array, adopted)


@pytest.mark.parametrize("device", ["CPU", "REFERENCE", "OPENCL"])
def test_values_in_the_other_byte_order(device: str) -> None:
    x, values = sg.input("x", ("N", 6)), np.arange(24, dtype=np.float32).reshape(6, 4)
    swapped = values.astype(values.dtype.newbyteorder())
    w = sg.parameter("w", swapped)
    assert w.parameter is not None
    model = sg.compile_model(sg.Graph([x], [sg.ops.MatMul(x, w)]), device)
    data = np.ones((2, 6), np.float32)
    np.testing.assert_array_equal(model(data)[0], data @ values)
    w.parameter.assign(2 * swapped)
    np.testing.assert_array_equal(model(data)[0], 2 * data @ values)


@pytest.mark.filterwarnings("ignore:Setting the (shape|dtype) on a NumPy array:DeprecationWarning")
@pytest.mark.parametrize("how", ["shape", "dtype", "resize"])
def test_an_update_changes_nothing_but_values(how: str) -> None:
    """The array was the published one: kernels would have read beyond it."""
    p = sg.Parameter("w", np.ones((6, 4), np.float32))
    changes: dict[str, object] = {"shape": (4, 6), "dtype": np.dtype("int32")}
    with p.update() as array:
        array[...] = 2
        if how == "resize":
            with pytest.raises(ValueError, match="does not own its data"):
                array.resize((2, 2), refcheck=False)
        else:
            setattr(array, how, changes[how])
    assert (p.array.shape, p.array.dtype, p.array.sum()) == ((6, 4), np.float32, 48)
    with pytest.raises(ValueError, match="read-only"):
        array[...] = 3


@pytest.mark.parametrize("hold", [lambda a: a[1:], lambda a: np.asarray(memoryview(a)), np.ravel])
def test_memory_of_an_update_is_not_that_of_the_parameter(hold: Callable[[Array], Array]) -> None:
    """A view of the array stays writable; the weights changed without a new version."""
    p = make()
    with sg.transaction():
        with p.update() as array:
            held = hold(array)
            held[...] = 2
        held[...] = 3
        assert p.array[-1] == 2, "not before the transaction ends either"
    held[...] = 4
    assert p.array[-1] == 2


def test_objects_are_no_values() -> None:
    """A parameter of strings took them, and the error for others called them strings."""
    words = sg.Parameter("words", np.array(["a", "b"], object))
    for wrong in (np.array(["a", None], object), None, [object(), "b"]):
        with pytest.raises(sg.ShapeError, match=r"'words' takes string\[2\]: .* array of objects"):
            words.assign(wrong)  # type: ignore[arg-type]
    assert words.array.tolist() == ["a", "b"]
    with pytest.raises(sg.ShapeError, match="array of objects"), words.update() as array:
        array[0] = None
    assert words.array.tolist() == ["a", "b"]
