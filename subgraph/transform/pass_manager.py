"""Applying passes: the registry, the check of each pass's promise, and instruments around passes.

A pass is a function from Graph to Graph, or a frozen attrs class whose fields are the pass's
options and whose instances are called with the graph. It never changes the graph that it was given
and returns one that verifies; `apply_pass` checks both. The files of ``passes/`` register theirs
with `register_pass` and are found when a name is first looked up.
"""

from __future__ import annotations

import difflib
import inspect
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, Self, TextIO, TypeVar, cast

import attrs

from subgraph.errors import PassError, SubgraphError, described
from subgraph.graph.graph import Graph
from subgraph.graph.limits import check_time
from subgraph.graph.parameters import changes_by_thread
from subgraph.system.gc_control import collect_young
from subgraph.system.registry import Files, Registry, defined_at, nearest

Pass = Callable[..., Graph]
PassLike = str | Pass | type[Any] | Sequence["PassLike"]
_P = TypeVar("_P", bound=Callable[..., Any])

PASSES: Registry[Pass] = Registry("pass", PassError, Files("subgraph.passes", lambda _: True))
_names: dict[Any, str] = {}
_operators: dict[str, frozenset[str]] = {}


def register_pass(name: str, *, operators: Iterable[str] = ()) -> Callable[[_P], _P]:
    """Decorate a pass: a function Graph -> Graph, or a frozen attrs class with ``__call__``.

    Keyword parameters of the function, or fields of the class, are the pass's options.

    Args:
        name: The name for `apply_pass`.
        operators: Names of operators; the pass changes no graph without any of them, so that
            callers may skip it there (`may_change`). Empty: the pass may change every graph.

    Raises:
        PassError: another pass has the name, or the pass cannot be called.
    """
    # ``@register_pass`` without parentheses passes the decorated function as the name. The pass is
    # registered only by the second call, so without this check it would silently be missing.
    if not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        called = getattr(name, "__name__", "MyPass")
        raise PassError(f'register_pass takes the pass\'s name: @register_pass("{called}")')

    def register(thing: _P) -> _P:
        if not callable(thing):
            raise PassError(f"pass {name!r}: {thing!r} is no pass; give a function or a class")
        PASSES.register(name, thing, defined_at(thing))
        _names[thing] = name
        _operators[name] = frozenset(operators)
        return thing

    return register


def may_change(name: str, present: AbstractSet[str]) -> bool:
    """Return whether a registered pass may change a graph with these operators.

    Args:
        name: The pass's name.
        present: Names of all operators of the graph and its bodies.

    Raises:
        PassError: the name is unknown.
    """
    PASSES.get(name)  # loads the file that declares the operators
    return not _operators[name] or not _operators[name].isdisjoint(present)


def pass_name(thing: PassLike) -> str:
    """Return the name of a pass for messages: registered, else that of the function or class."""
    if isinstance(thing, str):
        return thing
    # An instance of a registered pass class, with its options bound, goes by the name of the class.
    known = _names.get(thing) or _names.get(type(thing))
    return known or getattr(thing, "__name__", None) or type(thing).__name__


def apply_pass(
    graph: Graph,
    which: PassLike,
    *,
    instruments: Iterable[Instrument] = (),
    **options: Any,
) -> Graph:
    """Apply a pass, or several in order, and return the new graph.

    Args:
        graph: The graph; it is not changed.
        which: A registered name, a pass, a pass class, or a list of these.
        instruments: Active around these passes, besides those of enclosing ``with`` blocks.
        **options: The pass's options. With several passes each option goes to those that take it.

    Raises:
        PassError: a name or an option is unknown; or a pass raised an error that is not a
            `SubgraphError`, changed its input, or returned a graph that does not verify.
    """
    if not isinstance(graph, Graph):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise PassError(f"passes take a Graph, got {graph!r}; sg.load makes one of a model")
    steps = [(_callable(p), p) for p in _flatten(which)]
    calls = _with_options([(pass_name(p), call) for call, p in steps], options)
    with _active(instruments):
        for name, call in calls:
            graph = _run(name, call, graph)
            collect_young()
    return graph


def _flatten(which: PassLike) -> Iterator[str | Pass]:
    stack: list[Any] = [which]
    while stack:
        item = stack.pop()
        if isinstance(item, (list, tuple)):
            stack.extend(reversed(item))  # pyright: ignore[reportUnknownArgumentType]
        else:
            yield item


def _callable(which: str | Pass) -> Pass:
    found = PASSES.get(which) if isinstance(which, str) else which
    kind: Any = found if isinstance(found, type) else type(found)
    # `pass_name` looks a pass up in a dict, so its class must be hashable: an attrs class that is
    # not frozen compares by value and has no hash.
    if not callable(found) or kind is type or not kind.__hash__:
        raise PassError(f"{found!r} is not a pass; give a name, a function or a pass object")
    return found


def options_of(which: str | Pass) -> tuple[str, ...] | None:
    """Return the names of the options that a pass takes; None if it takes any."""
    found = _callable(which)
    parameters = list(inspect.signature(found).parameters.values())
    if not inspect.isclass(found):
        # A function takes the graph first. The signature of a class is that of its constructor,
        # which takes options only.
        parameters = parameters[1:]
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return tuple(p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD))


def _with_options(
    steps: Sequence[tuple[str, Pass]], options: Mapping[str, Any]
) -> list[tuple[str, Pass]]:
    calls: list[tuple[str, Pass]] = []
    taken: set[str] = set()
    known: list[str] = []
    for name, step in steps:
        # An option may be meant for one of several passes, so an option is an error only if none of
        # them takes it. Signatures are read only where they are needed.
        allowed = options_of(step) if options or inspect.isclass(step) else ()
        mine = {k: v for k, v in options.items() if allowed is None or k in allowed}
        known.extend(allowed or ())
        taken.update(mine)
        calls.append((name, _bind(name, step, mine)))
    for option in options:
        if option not in taken:
            shown = ", ".join(repr(name) for name, _ in steps)
            hint = nearest(option, known) if known else "it takes none"
            raise PassError(f"pass {shown} has no option {option!r}; {hint}")
    return calls


def _bind(name: str, step: Pass, options: Mapping[str, Any]) -> Pass:
    if inspect.isclass(step):
        try:
            return cast("Pass", step(**options))
        except SubgraphError:
            raise
        except Exception as error:
            raise PassError(
                f"pass {name!r}: options {dict(options)!r} do not fit: {error}"
            ) from error
    return partial(step, **options) if options else step


def _run(name: str, call: Pass, graph: Graph) -> Graph:
    # The time limit of a load or compilation is checked between passes, since Python cannot stop a
    # pass from outside.
    check_time(f"pass {name!r} on graph {graph.name!r}")
    around = _instruments.get()
    # The innermost `Checks` block decides, so a test may check what an enclosing block does not.
    checks = next((i for i in reversed(around) if isinstance(i, Checks)), _ALL_CHECKS)
    for instrument in around:
        instrument.before(name, graph)
    promise = Unchanged(graph) if checks.input else None
    start = time.perf_counter()
    try:
        result: Any = call(graph)
    except SubgraphError as error:
        error.add_note(f"in pass {name!r} on graph {graph.name!r}")
        raise
    except Exception as error:
        raise PassError(
            f"pass {name!r} failed on graph {graph.name!r}: {described(error)}"
        ) from error
    # The time is taken before the checks, which can take longer than a small pass.
    seconds = time.perf_counter() - start
    if not isinstance(result, Graph):
        raise PassError(
            f"pass {name!r} returned {type(result).__name__}, not a Graph; "
            "a pass returns the new graph (the one it was given, if there is nothing to do)"
        )
    if promise is not None:
        promise.check(f"pass {name!r}", PassError)
    if checks.output:
        try:
            result.verify()
        except SubgraphError as error:
            raise PassError(
                f"pass {name!r} returned a graph that does not verify: {error}"
            ) from error
    # The instrument that was called first before the pass is called last after it, as nested
    # ``with`` blocks are.
    for instrument in reversed(around):
        instrument.after(name, graph, result, seconds)
    return result


class Unchanged:
    """The state of a graph and its parameters before foreign code gets the graph."""

    def __init__(self, graph: Graph) -> None:
        """Take the state of ``graph``, in linear time."""
        self._graph, self._seen = graph, snapshot(graph)
        # Only changes by this thread count: other threads may assign to parameters at any time.
        self._changes = changes_by_thread()

    def check(self, who: str, kind: type[SubgraphError]) -> None:
        """Check that the graph and its parameters are still the same.

        Args:
            who: The code that got the graph, for the message: "pass 'Fold'".
            kind: Class of the error.

        Raises:
            SubgraphError: of class ``kind``: something has changed.
        """
        graph = self._graph
        if snapshot(graph) != self._seen:
            raise kind(
                f"{who} changed the graph {graph.name!r} that it was given; "
                "change a clone: new = graph.clone()"
            )
        if changes_by_thread() != self._changes:
            raise kind(
                f"{who} changed parameters of the graph {graph.name!r} that it was given; "
                "other graphs share them: use a new one, sg.parameter(name, array)"
            )


def snapshot(graph: Graph) -> list[object]:
    """Return all parts of a graph and its bodies as a list; equal lists mean an unchanged graph.

    Takes linear time. Values of any type are listed by identity, so a snapshot is valid only in
    this process. The inner graph of a subgraph node is one item, since it is never changed.
    """
    found: list[object] = []
    work = [graph]
    while work:
        current = work.pop()
        found += (current, current.name, current.doc, current.nodes)
        found += (current.inputs, current.captures, current.outputs)
        for held in (current.attrs, current.opsets, current.metadata):
            found += (*held, *map(id, held.values()))
        for value in current.inputs:
            found += (value.name, value.type, value.parameter, value.producer, len(value.uses))
        for node in current.nodes:
            found += (
                node.name,
                node.op_type,
                node.domain,
                node.version,
                node.inputs,
                node.outputs,
                node.captures,
                node.graph,
                node.subgraph,
            )
            # A pass that uses a value of its input in a new graph, without cloning, appends to the
            # value's uses. Their number shows that without a comparison of lists.
            for value in node.outputs:
                found += (value.name, value.type, value.parameter, value.producer, len(value.uses))
            if node.attrs or node.metadata or node.op is not None:
                found += (id(node.op), *node.attrs, *map(id, node.attrs.values()))
                found += (node.metadata or {}).items()
                work.extend(node.bodies)
    return found


class Instrument:
    """Base of observers of passes; a ``with`` block makes one active inside.

    A child overrides `before` and `after`. Instruments are per thread (and per task of asyncio).
    """

    def before(self, name: str, graph: Graph) -> None:
        """Called before pass ``name`` runs on ``graph``."""

    def after(self, name: str, before: Graph, after: Graph, seconds: float) -> None:
        """Called after a pass, when its promise was checked.

        Args:
            name: The pass's name.
            before: The graph that the pass was applied to.
            after: The graph that it returned.
            seconds: Time that the pass took, without the checks.
        """

    def __enter__(self) -> Self:
        _instruments.set((*_instruments.get(), self))
        return self

    def __exit__(self, *_: object) -> None:
        # The innermost entry of this instrument is removed. A token of the ContextVar, stored in
        # the object, would not do: one instrument may be active in nested blocks, and in several
        # threads.
        left = list(reversed(_instruments.get()))
        left.remove(self)
        _instruments.set(tuple(reversed(left)))


_instruments: ContextVar[tuple[Instrument, ...]] = ContextVar("instruments", default=())


@contextmanager
def _active(instruments: Iterable[Instrument]) -> Generator[None]:
    token = _instruments.set((*_instruments.get(), *instruments))
    try:
        yield
    finally:
        _instruments.reset(token)


class Checks(Instrument):
    """Chooses which promises of passes are checked; the innermost `Checks` block decides."""

    def __init__(self, *, input: bool = True, output: bool = True) -> None:
        """Choose the checks.

        Args:
            input: Check that the input graph and its parameters are unchanged.
            output: Check that the returned graph verifies.
        """
        self.input = input
        self.output = output


_ALL_CHECKS = Checks()


@attrs.frozen
class PassTime:
    """One run of a pass.

    Attributes:
        name: The pass's name.
        seconds: Time without the checks.
        nodes_before: Number of nodes of the graph that the pass was applied to, without bodies.
        nodes_after: Number of nodes of the result.
    """

    name: str
    seconds: float
    nodes_before: int
    nodes_after: int


class Timing(Instrument):
    """Collect how long passes take, in ``times``; ``str()`` gives a table."""

    def __init__(self) -> None:
        """Start with no times."""
        self.times: list[PassTime] = []

    def after(self, name: str, before: Graph, after: Graph, seconds: float) -> None:
        """Append the time of one run; see `Instrument.after`."""
        self.times.append(PassTime(name, seconds, len(before.nodes), len(after.nodes)))

    def __str__(self) -> str:
        width = max((len(t.name) for t in self.times), default=0)
        lines = [
            f"{t.name:<{width}}  {t.seconds * 1e3:10.3f} ms  "
            f"{t.nodes_before} -> {t.nodes_after} nodes"
            for t in self.times
        ]
        return "\n".join(lines)


class Printing(Instrument):
    """Print the text form of the graph after every pass."""

    def __init__(self, file: TextIO | None = None) -> None:
        """Print to ``file``; None: standard output."""
        self._file = file

    def after(self, name: str, before: Graph, after: Graph, seconds: float) -> None:
        """Print the result of one run; see `Instrument.after`."""
        print(f"# after {name}\n{after}", file=self._file or sys.stdout)


class Diff(Instrument):
    """Print the difference that every pass makes to the text form, as a unified diff."""

    def __init__(self, file: TextIO | None = None, context: int = 2) -> None:
        """Print differences.

        Args:
            file: Where to print; None: standard output.
            context: Unchanged lines to print around each change.
        """
        self._file = file
        self._context = context

    def after(self, name: str, before: Graph, after: Graph, seconds: float) -> None:
        """Print the difference of one run, if there is one; see `Instrument.after`."""
        lines = difflib.unified_diff(
            str(before).splitlines(),
            str(after).splitlines(),
            f"before {name}",
            f"after {name}",
            n=self._context,
            lineterm="",
        )
        for line in lines:
            print(line, file=self._file or sys.stdout)


class Hooks(Instrument):
    """Calls the user's functions before and after every pass."""

    def __init__(
        self,
        before: Callable[[str, Graph], None] | None = None,
        after: Callable[[str, Graph, Graph, float], None] | None = None,
    ) -> None:
        """Take functions ``before(name, graph)`` and ``after(name, graph, result, seconds)``."""
        self._before = before
        self._after = after

    def before(self, name: str, graph: Graph) -> None:
        """Call the user's function."""
        if self._before is not None:
            self._before(name, graph)

    def after(self, name: str, before: Graph, after: Graph, seconds: float) -> None:
        """Call the user's function; see `Instrument.after`."""
        if self._after is not None:
            self._after(name, before, after, seconds)
