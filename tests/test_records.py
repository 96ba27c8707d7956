"""Records: classes of fields behave as attrs makes them, and to attrs look as its own."""

from __future__ import annotations

import copy
import inspect
import pickle
import subprocess
import sys
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import attrs
import pytest

import subgraph as sg
from subgraph import records
from subgraph.settings import describe_options, resolve_options


def number(given: Any) -> float:
    return float(given)


@records.frozen
class Point:
    x: int
    y: float = records.field(default=2, converter=number)
    tags: list[str] = records.field(factory=list[str])
    kind: ClassVar[str] = "point"

    def moved(self) -> Point:
        return records.evolve(self, x=self.x + 1)


@attrs.frozen
class TheirPoint:
    x: int
    y: float = attrs.field(default=2, converter=number)
    tags: list[str] = attrs.field(factory=list[str])
    kind: ClassVar[str] = "point"


@records.frozen
class Child(Point):
    z: int = 5

    def moved(self) -> Point:
        return records.evolve(super().moved(), z=7)


@records.define(eq=False)
class Counter:
    count: int = 0
    inner: Point | None = None


@records.frozen(kw_only=True)
class Named:
    late: int = 1
    must: str

    def __post_init__(self) -> None:
        if not self.must:
            raise ValueError("must is empty")


def both(act: Callable[[Any], Any]) -> tuple[Any, Any]:
    found: list[Any] = []
    for kind in (Point, TheirPoint):
        try:
            found.append(act(kind))
        except Exception as error:
            found.append(type(error).__mro__[-4])
    return found[0], found[1]


@pytest.mark.parametrize(
    "act",
    [
        lambda kind: repr(kind(1)).replace("TheirPoint", "Point"),
        lambda kind: kind(1, 3).y,
        lambda kind: kind(1) == kind(1, 2),
        lambda kind: kind(1) == (1, 2.0, []),
        lambda kind: kind(1) != kind(2),
        lambda kind: kind(),
        lambda kind: kind(1, 2, [], 4),
        lambda kind: kind(1, q=4),
        lambda kind: hash(kind(1, tags=())) == hash(kind(1, tags=())),
        lambda kind: hash(kind(1)),
        lambda kind: setattr(kind(1), "x", 2),
        lambda kind: setattr(kind(1), "other", 2),
        lambda kind: delattr(kind(1), "x"),
        lambda kind: kind(1).tags is kind(1).tags,
        lambda kind: kind.kind,
        lambda kind: kind.__match_args__,
        lambda kind: [p.name for p in inspect.signature(kind).parameters.values()],
        lambda kind: [p.kind for p in inspect.signature(kind).parameters.values()],
        lambda kind: inspect.signature(kind).parameters["x"].default is inspect.Parameter.empty,
        lambda kind: pickle.loads(pickle.dumps(kind(4, 5))) == kind(4, 5),
        lambda kind: copy.copy(kind(4, 5)) == kind(4, 5),
        lambda kind: copy.deepcopy(kind(4, 5)) == kind(4, 5),
        lambda kind: attrs.evolve(kind(4), x=5) == kind(5),
        lambda kind: attrs.asdict(kind(4)),
        lambda kind: attrs.astuple(kind(4)),
        lambda kind: [(f.name, f.type, f.converter) for f in attrs.fields(kind)],
        lambda kind: attrs.has(kind),
        lambda kind: hasattr(kind(1), "__dict__"),
        lambda kind: type(weakref.ref(kind(1))),
        lambda kind: kind.__qualname__[-5:],
    ],
)
def test_records_do_as_attrs_does(act: Callable[[Any], Any]) -> None:
    ours, theirs = both(act)
    assert ours == theirs


def test_children_and_super() -> None:
    child = Child(1, 2.0)
    assert (child.x, child.y, child.tags, child.z) == (1, 2.0, [], 5)
    assert records.names(Child) == ("x", "y", "tags", "z")
    assert child != Point(1, 2.0)
    assert child.moved() == Child(2, 2.0, z=7)

    class Plain(Child):
        def __init__(self) -> None:
            super().__init__(9)

    assert (Plain().x, Plain().z) == (9, 5)

    @attrs.frozen
    class Theirs(Point):
        w: int = 3

    theirs = Theirs(1, tags=["a"])
    assert (theirs.x, theirs.y, theirs.tags, theirs.w) == (1, 2.0, ["a"], 3)
    assert attrs.evolve(theirs, w=4) == Theirs(1, tags=["a"], w=4)


def test_what_may_change() -> None:
    counter = Counter()
    counter.count += 1
    assert counter.count == 1
    assert counter != Counter(1)
    assert len({counter, Counter(1)}) == 2
    assert records.asdict(Counter(2, Point(1))) == {
        "count": 2,
        "inner": {"x": 1, "y": 2.0, "tags": []},
    }
    assert records.asdict(Counter(2, Point(1)), recurse=False)["inner"] == Point(1)
    assert records.astuple(Counter(2)) == (2, None)

    @records.define
    class Equal:
        value: int

    assert Equal(1) == Equal(1)
    with pytest.raises(TypeError, match="unhashable"):
        hash(Equal(1))


def test_fields_given_by_name() -> None:
    assert (Named(must="a").late, Named(must="a", late=3).late) == (1, 3)
    with pytest.raises(TypeError):
        Named("a")  # type: ignore[misc]  # pyright: ignore[reportCallIssue]
    with pytest.raises(ValueError, match="must is empty"):
        Named(must="")
    with pytest.raises(TypeError, match="'b' has no default and stands after 'a'"):

        @records.frozen
        class Wrong:
            a: int = 1
            b: int  # pyright: ignore[reportGeneralTypeIssues]


def test_own_methods_stay() -> None:
    @records.frozen
    class Own:
        value: int

        def __eq__(self, other: object) -> bool:
            return True

        def __hash__(self) -> int:
            return 3

        def __repr__(self) -> str:
            return "own"

    assert (Own(1) == Own(2), hash(Own(1)), repr(Own(1))) == (True, 3, "own")


def test_options_of_a_child_that_attrs_made() -> None:
    @attrs.frozen
    class Options(sg.DeviceOptions):
        UNROLL: int = sg.option(2, "how often", minimum=1, maximum=8)

    class Same(Options):
        pass

    for kind in (Options, Same):
        found = resolve_options(kind, "SOME", [{"UNROLL": "4", "ENABLE_PROFILING": "yes"}])
        assert (found.UNROLL, found.ENABLE_PROFILING, found.CACHE_DIR) == (4, True, "")
        names = [row["name"] for row in describe_options(kind)]
        assert names[0] == "ENABLE_PROFILING"
        assert names[-1] == "UNROLL"
    with pytest.raises(sg.ConfigError, match=r"1\.\.8"):
        resolve_options(Options, "SOME", [{"UNROLL": 9}])


def test_a_warm_start_does_without_attrs() -> None:
    code = "import sys, subgraph.core, subgraph.devices.cpu; assert 'attr' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
