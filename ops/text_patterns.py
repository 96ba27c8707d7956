"""RegexFullMatch, for the reference: in time that grows with text and pattern, not with 2 to them.

Patterns are RE2's, which promises that; onnx.reference hands them to Python's ``re``, which goes
back and tries again. What may need that runs here as a nondeterministic automaton, all of whose
states are followed at once (Thompson, "Regular Expression Search Algorithm", 1968).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np

from subgraph.errors import ShapeError
from subgraph.graph import Node
from subgraph.op import reference

Array = np.ndarray[Any, Any]
_Test = Callable[[str], bool]
_MOST_STATES = 20_000
_CATEGORIES: dict[str, _Test] = {
    "CATEGORY_DIGIT": str.isdigit,
    "CATEGORY_SPACE": str.isspace,
    "CATEGORY_WORD": lambda c: c.isalnum() or c == "_",
}


@reference("RegexFullMatch")
def regex_full_match(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return whether each text matches as a whole."""
    match = _matcher(str(node.attrs.get("pattern", "")))
    x: Array = inputs[0]
    return [np.array([match(str(text)) for text in x.reshape(-1)], bool).reshape(x.shape)]


@cache
def _matcher(pattern: str) -> Callable[[str], bool]:
    try:
        compiled = re.compile(pattern)
        parsed: Any = import_module("re._parser").parse(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise ShapeError(f"pattern {pattern!r} is not valid: {error}") from error
    if _goes_back(parsed) <= 2:
        return lambda text: compiled.fullmatch(text) is not None
    return _Automaton(parsed, compiled.flags).matches


def _goes_back(parsed: Any) -> int:
    """Return among how many parts a text may be spread; many where a repetition holds some."""
    total = 0
    for name, argument in parsed:
        match str(name):
            case "MAX_REPEAT" | "MIN_REPEAT":
                inner = _goes_back(argument[2])
                total += 100 if inner else 1
            case "SUBPATTERN":
                total += _goes_back(argument[3])
            case "BRANCH":
                total += 1 + sum(_goes_back(branch) for branch in argument[1])
            case "LITERAL" | "NOT_LITERAL" | "ANY" | "IN" | "AT":
                pass
            case _:
                total += 100
    return total


class _Automaton:
    """States; each is a test of one character, a condition on the place, or a fork."""

    def __init__(self, parsed: Any, flags: int) -> None:
        self._fold = bool(flags & re.IGNORECASE)
        self._all = bool(flags & re.DOTALL)
        self._lines = bool(flags & re.MULTILINE)
        self._tests: list[_Test | str | None] = []
        self._next: list[list[int]] = []
        self._end = self._state(None)
        self._start = self._sequence(parsed, self._end)

    def _state(self, test: _Test | str | None, *following: int) -> int:
        if len(self._tests) >= _MOST_STATES:
            raise ShapeError(f"the pattern has more than {_MOST_STATES} states")
        self._tests.append(test)
        self._next.append(list(following))
        return len(self._tests) - 1

    def _sequence(self, parsed: Any, following: int) -> int:
        """Return the first state of a sequence that ends in ``following``."""
        for name, argument in reversed(list(parsed)):
            following = self._part(str(name), argument, following)
        return following

    def _part(self, name: str, argument: Any, following: int) -> int:
        match name:
            case "LITERAL" | "NOT_LITERAL" | "ANY" | "IN":
                return self._state(self._test(name, argument), following)
            case "AT":
                return self._state(str(argument), following)
            case "SUBPATTERN":
                if argument[1] or argument[2]:
                    raise ShapeError("flags of a part of a pattern are not supported")
                return self._sequence(argument[3], following)
            case "BRANCH":
                ways = [self._sequence(branch, following) for branch in argument[1]]
                return self._state(None, *ways)
            case "MAX_REPEAT" | "MIN_REPEAT":
                least, most, body = argument
                return self._repeat(least, most, body, following)
            case _:
                raise ShapeError(f"RE2, whose patterns these are, has no {name.lower()}")

    def _repeat(self, least: int, most: Any, body: Any, following: int) -> int:
        if str(most) == "MAXREPEAT":
            again = self._state(None)
            self._next[again] = [self._sequence(body, again), following]
            following = again
        else:
            end = following
            for _ in range(int(most) - least):
                following = self._state(None, self._sequence(body, following), end)
        for _ in range(least):
            following = self._sequence(body, following)
        return following

    def _test(self, name: str, argument: Any) -> _Test:
        if name == "ANY":
            return (lambda c: True) if self._all else (lambda c: c != "\n")
        items = argument if name == "IN" else [("LITERAL", argument)]
        negated = name == "NOT_LITERAL" or (name == "IN" and str(items[0][0]) == "NEGATE")
        tests = [_item(str(kind), value) for kind, value in items if str(kind) != "NEGATE"]
        fold = self._fold

        def test(c: str) -> bool:
            forms = (c, c.lower(), c.upper()) if fold else (c,)
            return any(t(form) for form in forms for t in tests) != negated

        return test

    def matches(self, text: str) -> bool:
        """Return whether the whole text matches."""
        states = self._closure({self._start}, text, 0)
        for place, c in enumerate(text):
            reached = {
                self._next[state][0]
                for state in states
                if callable(test := self._tests[state]) and test(c)
            }
            if not reached:
                return False
            states = self._closure(reached, text, place + 1)
        return self._end in states

    def _closure(self, states: set[int], text: str, place: int) -> set[int]:
        """Return the states with all that are reached without a character."""
        found, waiting = set(states), list(states)
        while waiting:
            state = waiting.pop()
            test = self._tests[state]
            if callable(test) or (test is not None and not self._holds(test, text, place)):
                continue
            more = [following for following in self._next[state] if following not in found]
            found.update(more)
            waiting += more
        return found

    def _holds(self, condition: str, text: str, place: int) -> bool:
        before, after = text[place - 1 : place] if place else "", text[place : place + 1]
        word = _CATEGORIES["CATEGORY_WORD"]
        edge = (before != "" and word(before)) != (after != "" and word(after))
        last = after == "" or (after == "\n" and (self._lines or place == len(text) - 1))
        known = {
            "AT_BEGINNING": not before or (self._lines and before == "\n"),
            "AT_BEGINNING_STRING": not before,
            "AT_END": last,
            "AT_END_STRING": not after,
            "AT_BOUNDARY": edge,
            "AT_NON_BOUNDARY": not edge,
        }
        if condition not in known:
            raise ShapeError(f"the condition {condition.lower()} is not supported")
        return known[condition]


def _item(kind: str, value: Any) -> _Test:
    """Return the test of one member of a class of characters."""
    if kind == "LITERAL":
        return lambda c: ord(c) == value
    if kind == "RANGE":
        return lambda c: value[0] <= ord(c) <= value[1]
    name = str(value)
    test = _CATEGORIES.get(name.replace("NOT_", ""))
    if test is None:
        raise ShapeError(f"the class {name.lower()} is not supported")
    return (lambda c: not test(c)) if "NOT_" in name else test
