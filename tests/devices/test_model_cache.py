"""The option CACHE_DIR: compiled models found again by content; damaged entries, many threads."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import numpy as np
import pytest

import subgraph as sg
from subgraph import ops
from subgraph.devices import model_cache
from tests.support.small_network import X, net, same

DEVICES = ["REFERENCE", "CPU"]


@pytest.fixture
def core() -> sg.Core:
    return sg.Core()


@pytest.mark.parametrize("device", DEVICES)
def test_cache_finds_by_content(core: sg.Core, tmp_path: Path, device: str) -> None:
    config = {"CACHE_DIR": str(tmp_path / "cache")}
    graph = net()
    first = core.compile_model(graph, device, config)
    assert len(list((tmp_path / "cache").iterdir())) == 1
    second = core.compile_model(graph, device, config)
    assert second.parameters["w"] is graph.parameters["w"]
    same(second, first)
    same(core.compile_model(net(), device, config), first)
    assert len(list((tmp_path / "cache").iterdir())) == 1
    same(core.compile_model(net(1), device, config), core.compile_model(net(1), device))
    core.compile_model(net(), device, {**config, "PERFORMANCE_HINT": "THROUGHPUT"})
    assert len(list((tmp_path / "cache").iterdir())) == 3
    graph.parameters["m"].assign(np.zeros((16, 10), np.float32))
    assert not second(X)[0].any()  # the cached model is built on the parameters of its graph
    core.set_property(device, config)
    core.compile_model(graph, device)
    assert len(list((tmp_path / "cache").iterdir())) == 4


@pytest.mark.parametrize("device", ["CPU", "HETERO:CPU,REFERENCE"])
def test_a_cached_model_has_the_options_in_force(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    config = {"CACHE_DIR": str(tmp_path)}
    option = "WEIGHTS_PRECISION"
    rounded, plain = sg.Core(), sg.Core()
    rounded.set_property("CPU", {option: "bfloat16"})
    first = rounded.compile_model(net(), device, config)(X)[0]
    exact = plain.compile_model(net(), device)(X)[0]
    assert not np.array_equal(first, exact)
    np.testing.assert_array_equal(plain.compile_model(net(), device, config)(X)[0], exact)
    monkeypatch.setenv(f"SUBGRAPH_CPU_{option}", "bfloat16")
    np.testing.assert_array_equal(plain.compile_model(net(), device, config)(X)[0], first)
    assert len(list(tmp_path.iterdir())) == 2


def test_damaged_cache_entries_are_made_anew(core: sg.Core, tmp_path: Path) -> None:
    config = {"CACHE_DIR": str(tmp_path)}
    first = core.compile_model(net(), "REFERENCE", config)
    (entry,) = tmp_path.iterdir()
    good = entry.read_bytes()
    for bad in (b"", good[:-1], good[:5000] + b"?" + good[5001:]):
        entry.write_bytes(bad)
        same(core.compile_model(net(), "REFERENCE", config), first)
        assert len(entry.read_bytes()) == len(good)


def test_a_graph_that_has_no_text_is_not_cached(core: sg.Core, tmp_path: Path) -> None:
    graph = net()
    graph.nodes[0].attrs["callback"] = object()
    with pytest.raises(sg.ModelError, match="object"):
        model_cache.cache_key(core.device("REFERENCE"), "REFERENCE", graph, {})


def test_a_cache_that_cannot_be_written_is_no_error(
    core: sg.Core, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    with caplog.at_level(logging.WARNING):
        model = core.compile_model(net(), "REFERENCE", {"CACHE_DIR": str(blocked)})
    assert "cannot be cached" in caplog.text
    same(model, core.compile_model(net(), "REFERENCE"))


def test_many_threads_share_a_cache(core: sg.Core, tmp_path: Path) -> None:
    config = {"CACHE_DIR": str(tmp_path)}
    want = core.compile_model(net(), "REFERENCE")
    errors: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(3):
                same(core.compile_model(net(), "REFERENCE", config), want)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("device", DEVICES)
def test_cached_bodies_stand_on_the_graphs_parameters(
    core: sg.Core, tmp_path: Path, device: str
) -> None:
    x, c = sg.input("x", ("N",)), sg.input("c", (), "bool")
    k = sg.parameter("k", np.array([2], np.float32))
    then = sg.Graph(outputs=[ops.Mul(sg.capture(x), sg.capture(k))], name="then")
    other = sg.Graph(outputs=[ops.Add(sg.capture(x), sg.capture(k))], name="else")
    graph = sg.Graph([x, c], [ops.If(c, then_branch=then, else_branch=other)], "flow")
    config = {"CACHE_DIR": str(tmp_path)}
    value = np.ones(3, np.float32)
    core.compile_model(graph, device, config)
    model = core.compile_model(graph, device, config)
    assert model.parameters["k"] is graph.parameters["k"]
    for number in (2, 7):
        graph.parameters["k"].assign(np.array([number], np.float32))
        assert model(value, np.array(True))[0][0] == number
        assert model(value, np.array(False))[0][0] == number + 1
