"""The record of a partition as JSON, for files, so that `explain` answers after loading."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import Any, cast

from subgraph.errors import ModelError, described
from subgraph.partition.record import (
    CAPPED,
    MADE,
    REFUSED,
    SMALL,
    UNUSED,
    PartitionRecord,
    RegionNote,
    Run,
)
from subgraph.partition.selector import Reject

# Version of the JSON layout. A reader refuses every other one.
_FORMAT = 1
_STATUSES = (MADE, SMALL, CAPPED, REFUSED, UNUSED)
# Answers that are no Reject; a Reject is its position in the table.
_FALSE, _NONE = -1, -2


def dump_record(record: PartitionRecord) -> str:
    """Return the JSON text of a record.

    Names of nodes and reasons that several runs share are written once. Source files that reasons
    name are written without their folder.
    """
    table = _Table()
    runs = [_run(run, table) for run in record.runs]
    held = {"format": _FORMAT, "names": table.names, "rejects": table.rejects, "runs": runs}
    return json.dumps(held, ensure_ascii=False, separators=(",", ":"))


class _Table:
    """Lists of names and reasons, each written once."""

    def __init__(self) -> None:
        self.names: list[list[str]] = []
        self.rejects: list[tuple[str, str, int]] = []
        self._name_lists: dict[int, int] = {}
        self._rejects: dict[Reject, int] = {}

    def list_of(self, names: list[str]) -> int:
        # All runs over one graph share the list itself, so its identity is enough and the names are
        # not compared.
        if id(names) not in self._name_lists:
            self._name_lists[id(names)] = len(self.names)
            self.names.append(names)
        return self._name_lists[id(names)]

    def answer(self, answer: Any) -> int:
        if not isinstance(answer, Reject):
            return _NONE if answer is None else _FALSE
        if answer not in self._rejects:
            self._rejects[answer] = len(self.rejects)
            # Without the folder, which is private to the user.
            self.rejects.append((answer.reason, PurePath(answer.file).name, answer.line))
        return self._rejects[answer]


def _run(run: Run, table: _Table) -> dict[str, Any]:
    return {
        **{name: getattr(run, name) for name in _PLAIN},
        "max_subgraphs": run.max_subgraphs,
        "names": table.list_of(run.names),
        "via": list(run.via),
        "region": list(run.region),
        "given_up": list(run.given_up.items()),
        "filtered": list(run.filtered.items()),
        "dropped": [(node, table.answer(why)) for node, why in run.dropped.items()],
        "refusals": [(n, method, m, table.answer(a)) for n, method, m, a in run.refusals],
        "regions": [
            (note.start, note.size, note.status, note.node, table.answer(note.why))
            for note in run.regions
        ],
        "forced": run.forced,
    }


def load_record(text: str) -> PartitionRecord:
    """Return the record of a JSON text from an untrusted file.

    Raises:
        ModelError: the text is not a record.
    """
    try:
        held = _Reader(json.loads(text))
        return held.record()
    except (ValueError, KeyError, TypeError, IndexError, OverflowError, RecursionError) as error:
        raise ModelError(f"the record of the partition is damaged: {described(error)}") from error


def _is(kind: type[Any] | tuple[type[Any], ...]) -> Callable[[Any], bool]:
    # Python counts a bool as an int; a number in the JSON is never true or false.
    return lambda item: isinstance(item, kind) and not isinstance(item, bool)


_whole, _text = _is(int), _is(str)
# Fields of a run that are the same in the file, with their checks.
_PLAIN = {
    **dict.fromkeys(("property", "version", "selector", "strategy"), _text),
    **{"options": _is(dict), "min_size": _whole},
}


def _checked(item: Any, *tests: Callable[[Any], bool]) -> list[Any]:
    """Return ``item`` if it is a list with one element for each test, which the element passes."""
    if not isinstance(item, list) or len(cast("list[Any]", item)) != len(tests):
        raise ValueError(f"{item!r} stands where {len(tests)} items should")
    items = cast("list[Any]", item)
    for each, fits in zip(items, tests, strict=True):
        if not fits(each):
            raise ValueError(f"{each!r} does not fit")
    return items


def _one(item: Any, fits: Callable[[Any], bool]) -> Any:
    return _checked([item], fits)[0]


def _each(item: Any, *tests: Callable[[Any], bool]) -> list[list[Any]]:
    if not isinstance(item, list):
        raise ValueError(f"{item!r} is no list")
    return [_checked(each, *tests) for each in cast("list[Any]", item)]


def _pairs(item: Any, key: Callable[[Any], bool], value: Callable[[Any], bool]) -> dict[Any, Any]:
    return {pair[0]: pair[1] for pair in _each(item, key, value)}


class _Reader:
    """Checks a record as it reads it."""

    def __init__(self, held: Any) -> None:
        if not isinstance(held, dict) or held.get("format") != _FORMAT:  # pyright: ignore[reportUnknownMemberType]
            raise ValueError(f"its format is not {_FORMAT}")
        self._held = cast("dict[str, Any]", held)
        self._names: list[list[str]] = [_texts(names) for names in self._held["names"]]
        self._rejects: list[Reject] = []
        for reason, file, line in _each(self._held["rejects"], _text, _text, _whole):
            reject = Reject(reason)
            reject.file, reject.line = file, line
            self._rejects.append(reject)

    def record(self) -> PartitionRecord:
        return PartitionRecord(tuple(self._run(run) for run in self._held["runs"]))

    def _run(self, run: Mapping[str, Any]) -> Run:
        listed: int = _one(run["names"], self._below(len(self._names)))
        # `explain` uses these numbers as indices, so each is compared here with the length of the
        # list that it leads into.
        names = self._names[listed]
        node = self._below(len(names))
        perhaps_node = self._below(len(names), least=-1)
        answer = self._below(len(self._rejects), least=_NONE)
        rejects = self._below(len(self._rejects))
        regions = [
            RegionNote(start, size, status, name, self._answer(why))
            for start, size, status, name, why in _each(
                run["regions"], node, _whole, _STATUSES.__contains__, _text, answer
            )
        ]
        # A filter that dropped a whole region is noted at the next position, which may not exist.
        region, after = self._below(len(regions), least=-1), self._below(len(regions) + 1)
        limit = run["max_subgraphs"]
        return Run(
            **{name: _one(run[name], fits) for name, fits in _PLAIN.items()},
            max_subgraphs=None if limit is None else _one(limit, _whole),
            names=names,
            via=array("i", _checked(run["via"], *[perhaps_node] * len(names))),
            region=array("i", _checked(run["region"], *[region] * len(names))),
            given_up=_pairs(run["given_up"], node, after),
            filtered=_pairs(run["filtered"], node, after),
            dropped={n: self._rejects[k] for n, k in _pairs(run["dropped"], node, rejects).items()},
            refusals=[
                (n, method, m, self._answer(k, plain=True))
                for n, method, m, k in _each(run["refusals"], node, self._below(3), node, answer)
            ],
            regions=regions,
            forced={_one(k, _text): _one(v, _text) for k, v in run["forced"].items()},
        )

    @staticmethod
    def _below(end: int, least: int = 0) -> Callable[[Any], bool]:
        return lambda item: _whole(item) and least <= item < end

    def _answer(self, number: int, *, plain: bool = False) -> Any:
        if number >= 0:
            return self._rejects[number]
        # A selector may also refuse by False or None, which `explain` quotes. For a region only a
        # Reject has a text.
        return False if plain and number == _FALSE else None


def _texts(texts: Any) -> list[str]:
    return _checked(texts, *[_text] * len(texts))
