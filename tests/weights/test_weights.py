"""The weight cache: keys, versions, sharing, freeing, consistency under threads."""

from __future__ import annotations

import enum
import gc
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np
import pytest

import subgraph as sg
from subgraph import ops
from subgraph.graph.parameters import Snapshot, pinned
from subgraph.graph.types import Array
from subgraph.weights.cache import ChangedEntries, StoredWeights
from subgraph.weights.recipe_ids import recipe_id


def param(value: float, name: str = "w", size: int = 8) -> sg.Parameter:
    return sg.Parameter(name, np.full(size, value, np.float32))


class Counter:
    """A recipe that counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, *arrays: Array) -> Array:
        self.calls += 1
        return np.sum(arrays, axis=0)


def test_unchanged_parameters_are_converted_once() -> None:
    cache, make, w = sg.WeightCache(), Counter(), param(2)
    first = cache.get("double", make, w)
    assert cache.get("double", make, w) is first
    assert make.calls == 1
    stats = cache.stats()
    assert (stats.entries, stats.hits, stats.made, stats.redone) == (1, 1, 1, 0)
    assert stats.bytes == 32


def test_every_parameter_of_an_entry_makes_it_stale() -> None:
    cache, make = sg.WeightCache(), Counter()
    five = [param(k, f"p{k}") for k in range(5)]
    assert cache.get("fold", make, *five)[0] == 10
    for k, p in enumerate(five):
        p.assign(p.array + 1)
        assert cache.get("fold", make, *five)[0] == 11 + k
    assert make.calls == 6
    assert cache.stats().redone == 5


def test_a_change_elsewhere_redoes_nothing() -> None:
    cache, make, w, other = sg.WeightCache(), Counter(), param(2), param(3)
    first = cache.get("double", make, w)
    other.assign(other.array + 1)
    assert cache.get("double", make, w) is first
    assert make.calls == 1


def test_another_parameter_of_equal_content_is_another_entry() -> None:
    cache, make = sg.WeightCache(), Counter()
    a, b = param(1), param(1)
    assert cache.get("r", make, a) is not cache.get("r", make, b)
    assert make.calls == 2


@pytest.mark.plain_memory
def test_results_are_read_only_and_aligned_on_demand() -> None:
    cache, w = sg.WeightCache(), sg.Parameter("w", np.arange(101, dtype=np.float32))
    result = cache.get("tail", lambda a: a[1:], w, align=64)
    assert result.ctypes.data % 64 == 0
    np.testing.assert_array_equal(result, np.arange(1, 101))
    with pytest.raises(ValueError, match="read-only"):
        result[0] = 5


@pytest.mark.plain_memory
def test_a_view_of_the_parameter_takes_no_memory() -> None:
    cache, w = sg.WeightCache(), param(2)
    cache.get("view", lambda a: a.reshape(2, 4), w)
    assert cache.stats().bytes == 0


def test_two_users_share_and_the_last_one_frees() -> None:
    make, w = Counter(), param(3)
    first, second = sg.WeightCache(), sg.WeightCache()
    gc.collect()
    before = sg.weight_stats().entries
    assert first.get("r", make, w) is second.get("r", make, w)
    assert make.calls == 1
    assert sg.weight_stats().entries == before + 1
    del first
    gc.collect()
    assert sg.weight_stats().entries == before + 1
    second.clear()
    gc.collect()
    assert sg.weight_stats().entries == before


@pytest.mark.parametrize("device", ["CPU", "HETERO:CPU,REFERENCE", "MULTI:CPU"])
def test_weights_go_with_the_last_model_before_cycles_are_found(device: str) -> None:
    x, w = sg.input("x", (4, 32)), sg.parameter("w", np.ones((32, 48), np.float32))
    graph, given = sg.Graph([x], [ops.MatMul(x, w)]), np.ones((4, 32), np.float32)
    gc.collect()
    before = sg.weight_stats().entries
    gc.disable()
    try:
        model = sg.compile_model(graph, device)
        want = model(given)[0]
        kept = model.graph
        assert sg.weight_stats().entries == before + 1
        del model
        assert sg.weight_stats().entries == before
        again, other = (sg.compile_model(kept, device) for _ in range(2))
        np.testing.assert_array_equal(again(given)[0], want)
        del again
        np.testing.assert_array_equal(other(given)[0], want)
        del other
        assert sg.weight_stats().entries == before
    finally:
        gc.enable()


def test_same_recipe_name_of_two_functions_is_two_entries() -> None:
    cache, w = sg.WeightCache(), param(3)

    def scaled(by: float) -> Any:
        return lambda a: a * by

    assert cache.get("scale", scaled(2.0), w)[0] == 6
    assert cache.get("scale", scaled(3.0), w)[0] == 9
    assert cache.get("scale", lambda a: a + 1, w)[0] == 4
    assert cache.get("scale", partial(np.multiply, 5.0), w)[0] == 15
    assert cache.get("scale", partial(np.multiply, 6.0), w)[0] == 18


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (np.int64(2), np.int64(3)),
        (np.float32(2), np.float16(2)),
        ([0, 1], [1, 0]),
        ({"axes": (0, 1)}, {"axes": (1, 0)}),
        (frozenset({"a", "b"}), frozenset({"a", "c"})),
        ((1, [2]), (1, [3])),
    ],
)
def test_recipes_are_told_apart_by_numbers_in_containers(one: Any, other: Any) -> None:
    def made(held: Any) -> Any:
        return lambda array: (array, held)

    first, second, again = (recipe_id("r", made(held)) for held in (one, other, one))
    assert first != second
    assert first == again


def test_recipes_are_told_apart_by_functions_in_their_closures() -> None:
    def scaled(factor: int) -> Any:
        return lambda array: array * factor

    def stacked(make: Any) -> Any:
        return lambda array: [make(part) for part in array]

    first, second, again = (recipe_id("r", stacked(scaled(n))) for n in (2, 3, 2))
    assert first != second
    assert first == again
    assert recipe_id("r", partial(stacked(scaled(2)))) != recipe_id("r", partial(stacked(len)))


class Layout(enum.Enum):
    BLOCKED = 1
    PLAIN = 2


@attrs.frozen
class Options:
    block: int


class Packer:
    """Recipes of an object: bound methods, itself, and functions that use or pass it on."""

    def __init__(self, block: int, name: str = "") -> None:
        self.block = block
        self.name = name
        self.calls = 0
        self.inside = SimpleNamespace(size=block)

    @property
    def doubled(self) -> int:
        return 2 * self.block

    def scaled(self, array: Array) -> Array:
        self.calls += 1
        return array * self.block

    def __call__(self, array: Array) -> Array:
        return self.scaled(array)


def _of_options(options: Any) -> Any:
    return lambda array: array * options.block


def _of_held(held: Any) -> Any:
    return lambda array: pack(array, held)


def pack(array: Array, held: Any) -> Array:
    return array


@pytest.mark.parametrize(
    "make",
    [
        lambda n: Packer(n).scaled,
        lambda n: Packer(n),
        lambda n: partial(Packer(n).scaled),
        lambda n: partial(pack, held=Packer(n)),
        lambda n: (lambda held: lambda array: held.scaled(array))(Packer(n)),
        lambda n: (lambda scaled: lambda array: scaled(array))(Packer(n).scaled),
        lambda n: (lambda held: lambda array: array * held.doubled)(Packer(n)),
        lambda n: (lambda held: lambda array: array * held.inside.size)(Packer(n)),
        lambda n: (lambda held: lambda array: [array * held.block for _ in array])(Packer(n)),
        lambda n: _of_held(Packer(n)),
        lambda n: _of_options(Options(n)),
        lambda n: _of_options(SimpleNamespace(block=n)),
        lambda n: _of_held(list(Layout)[n]),
        lambda n: _of_held((list(Layout)[n], Path(str(n)))),
        lambda n: _of_held(range(n)),
        lambda n: _of_held(np.dtype(["int8", "int16"][n])),
        lambda n: str(n).join,
    ],
)
def test_recipes_are_told_apart_by_their_objects(make: Callable[[int], Any]) -> None:
    """Two ops that differed in an attribute shared the result of the first one."""
    first, second, again = (recipe_id("r", make(n)) for n in (0, 1, 0))
    assert first != second
    assert first == again
    assert "0x" not in first


def test_what_a_recipe_does_not_read_is_no_part_of_its_id() -> None:
    one, other = Packer(2, "one"), Packer(2, "other")
    cache, w = sg.WeightCache(), param(3)
    made = cache.get("r", one.scaled, w)
    assert cache.get("r", other.scaled, w) is made
    assert cache.get("r", one.scaled, w) is made, "it has counted a call meanwhile"
    assert (one.calls, other.calls) == (1, 0)
    assert cache.get("r", Packer(3).scaled, w)[0] == 9


def test_a_list_that_collects_what_a_recipe_makes_does_not_change_its_id() -> None:
    collected: list[object] = []

    def made() -> Any:
        return lambda array: collected.append(object())

    first = recipe_id("r", made())
    collected.append(object())
    assert recipe_id("r", made()) == first


def test_recipe_ids_do_not_depend_on_the_process() -> None:
    assert "0x" not in recipe_id("r", Counter())


def test_a_pinned_snapshot_gets_its_own_versions() -> None:
    cache, make, w = sg.WeightCache(), Counter(), param(1)
    old = Snapshot([w])
    held = cache.get("r", make, w)
    w.assign(w.array + 1)
    assert cache.get("r", make, w)[0] == 2
    with pinned(old):
        assert cache.get("r", make, w) is held
    assert cache.get("r", make, w)[0] == 2
    assert make.calls == 2


def test_an_old_result_lives_only_while_it_is_held() -> None:
    cache, w = sg.WeightCache(), param(1, size=1000)
    entry = cache.entry("r", lambda a: a * 1, w)
    held = entry.get()
    for _ in range(5):
        w.assign(w.array + 1)
        entry.get()
    assert entry.bytes == 2 * 4000  # the newest and the one that is held
    del held
    gc.collect()
    assert entry.bytes == 4000


def test_an_old_snapshot_does_not_replace_the_newest() -> None:
    cache, make, w = sg.WeightCache(), Counter(), param(1)
    old = Snapshot([w])
    w.assign(w.array + 1)
    newest = cache.get("r", make, w)
    with pinned(old):
        assert cache.get("r", make, w)[0] == 1
    assert cache.get("r", make, w) is newest


def test_a_recipe_that_raises_says_which() -> None:
    cache, w = sg.WeightCache(), param(1, name="conv1.weight")

    def bad(array: Array) -> Array:
        raise ValueError("no such layout")

    with pytest.raises(ValueError, match="no such layout") as caught:
        cache.get("OIhw16", bad, w)
    assert "OIhw16" in str(caught.value.__notes__)
    assert "conv1.weight" in str(caught.value.__notes__)


def test_stored_results_are_taken_up_only_for_unchanged_parameters() -> None:
    make, a, b = Counter(), param(1, "a"), param(1, "b")
    stored, ready = StoredWeights(), np.full(8, 42, np.float32)
    for p in (a, b):
        stored.add(recipe_id("r", make), (p,), 0, ready)
    b.assign(b.array + 1)
    cache = sg.WeightCache()
    assert cache.get("r", make, a)[0] == 42
    assert cache.get("r", make, b)[0] == 2
    a.assign(a.array)
    assert cache.get("r", make, a)[0] == 1


def test_one_thread_redoes_for_all() -> None:
    w = param(0, size=4)
    calls: list[float] = []
    gate = threading.Barrier(8)

    def slow(array: Array) -> Array:
        calls.append(float(array[0]))
        return array * 2

    def ask() -> None:
        cache = sg.WeightCache()
        for _ in range(200):
            gate.wait()
            assert cache.get("slow", slow, w)[0] == w.array[0] * 2
            if gate.wait() == 0:
                w.assign(w.array + 1)

    keep = sg.WeightCache()
    keep.get("slow", slow, w)
    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert calls == [float(k) for k in range(200)]


def test_never_a_mix_of_two_parameters() -> None:
    a, b = param(0, "a"), param(0, "b")
    stop = threading.Event()
    wrong: list[Array] = []

    def write() -> None:
        k = 0.0
        while not stop.is_set():
            k += 1
            with sg.transaction():
                a.assign(np.full(8, k, np.float32))
                b.assign(np.full(8, -k, np.float32))

    def read() -> None:
        cache = sg.WeightCache()
        for _ in range(3000):
            result = cache.get("sum", lambda x, y: x + y, a, b)
            if result.any():
                wrong.append(result)

    writer = threading.Thread(target=write)
    readers = [threading.Thread(target=read) for _ in range(4)]
    for thread in [writer, *readers]:
        thread.start()
    for thread in readers:
        thread.join()
    stop.set()
    writer.join()
    assert not wrong


def test_a_recipe_that_counts_its_calls_keeps_its_name() -> None:
    calls = 0
    cache, w = sg.WeightCache(), param(3)

    def ask() -> Array:
        def make(array: Array) -> Array:
            nonlocal calls
            calls += 1
            return array * 2

        return cache.get("double", make, w)

    assert ask() is ask()
    assert calls == 1


def test_only_entries_of_changed_parameters_are_out_of_date() -> None:
    a, b, c = (param(1, name, 2) for name in "abc")
    cache, make = sg.WeightCache(), Counter()
    changes = ChangedEntries([cache.entry("sum", make, *of) for of in ((a,), (b,), (a, c))])
    before = Snapshot([a, b, c])
    assert list(changes.indices(before)) == [0, 1, 2]
    changes.mark_fetched(before)
    assert list(changes.indices(Snapshot([a, b, c]))) == []
    a.assign(a.array + 1)
    after = Snapshot([a, b, c])
    assert list(changes.indices(after)) == [0, 2]
    # What was not taken, for a recipe raised, is asked for again.
    assert list(changes.indices(after)) == [0, 2]
    changes.mark_fetched(after)
    c.assign(c.array + 1)
    assert list(changes.indices(Snapshot([a, b, c]))) == [2]
    # A request that still runs under an older snapshot gets all as they were.
    assert list(changes.indices(before)) == [0, 1, 2]
    changes.mark_fetched(before)
    assert list(changes.indices(after)) == [0, 2]
