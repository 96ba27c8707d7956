"""Reference of RegexFullMatch, in time linear in the text and in the pattern.

The standard's patterns are RE2's, which guarantees that. onnx.reference uses Python's ``re``, which
backtracks, and defines digits, word characters and the end of a text otherwise. Here `_Parser`
parses a pattern, and `_Automaton` simulates a nondeterministic automaton (Thompson, "Regular
Expression Search Algorithm", 1968). The syntax is that of
https://github.com/google/re2/wiki/Syntax, without single bytes and scripts.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

from subgraph.errors import ShapeError
from subgraph.graph.graph import Node
from subgraph.graph.types import Array

_Test = Callable[[str], bool]
_MAX_STATES = 20_000  # of an automaton, so that memory and time of a match are bounded (estimate)
_MAX_REPETITIONS = 1000  # of a part, as in RE2
_DIGITS, _SPACES = frozenset("0123456789"), frozenset("\t\n\f\r ")
_LOWER, _UPPER = frozenset(map(chr, range(97, 123))), frozenset(map(chr, range(65, 91)))
_WORDS = _DIGITS | _LOWER | _UPPER | {"_"}
_CLASSES = {"d": _DIGITS, "s": _SPACES, "w": _WORDS}
_PRINTED = frozenset(map(chr, range(33, 127)))
_NAMED = {
    **{"alnum": _WORDS - {"_"}, "alpha": _LOWER | _UPPER, "digit": _DIGITS, "lower": _LOWER},
    **{"upper": _UPPER, "word": _WORDS, "space": _SPACES | {"\v"}, "blank": frozenset(" \t")},
    **{"ascii": frozenset(map(chr, range(128))), "graph": _PRINTED, "print": _PRINTED | {" "}},
    "cntrl": frozenset(map(chr, (*range(32), 127))),
    "punct": _PRINTED - _WORDS | {"_"},
    "xdigit": frozenset("0123456789abcdefABCDEF"),
}
_CONTROLS = {"a": "\a", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}


def regex_full_match(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return whether each string matches as a whole."""
    automaton = _automaton(str(node.attrs.get("pattern", "")))
    x: Array = inputs[0]
    found = [automaton.matches(str(text)) for text in x.reshape(-1)]
    return [np.array(found, bool).reshape(x.shape)]


@cache
def _automaton(pattern: str) -> _Automaton:
    try:
        return _Automaton(_Parser(pattern).whole())
    except (_PatternError, RecursionError) as error:
        raise ShapeError(f"pattern {pattern!r} is not valid: {error}") from error


class _PatternError(Exception):
    """A pattern is not valid; the text says why."""


# A part of a pattern: ("test", function of a character), ("at", condition), ("sequence", parts),
# ("alternatives", parts), ("repeat", part, least, most or None).
_Part = tuple[Any, ...]


class _Parser:
    """Reads a pattern by recursive descent."""

    def __init__(self, pattern: str) -> None:
        self._text = pattern
        self._position = 0
        self._flags = frozenset[str]()

    def whole(self) -> _Part:
        """Return the whole pattern."""
        found = self._alternatives()
        if self._position < len(self._text):
            raise _PatternError("unexpected )")
        return found

    def _peek(self, *wanted: str) -> str:
        return next((w for w in wanted if self._text.startswith(w, self._position)), "")

    def _take(self, *wanted: str) -> str:
        """Consume and return the first of these that comes next, "" for none."""
        found = self._peek(*wanted)
        self._position += len(found)
        return found

    def _next(self) -> str:
        if self._position >= len(self._text):
            raise _PatternError("it ends too early")
        self._position += 1
        return self._text[self._position - 1]

    def _take_until(self, end: str) -> str:
        at = self._text.find(end, self._position)
        if at < 0:
            raise _PatternError(f"missing {end}")
        found, self._position = self._text[self._position : at], at + len(end)
        return found

    def _alternatives(self) -> _Part:
        flags = self._flags  # flags that are set in a group end with it
        ways = [self._sequence()]
        while self._take("|"):
            ways.append(self._sequence())
        self._flags = flags
        return ("alternatives", ways) if len(ways) > 1 else ways[0]

    def _sequence(self) -> _Part:
        """Return the parts up to ``|``, ``)`` or the end; quoted characters are literal."""
        parts: list[_Part] = []
        while self._position < len(self._text) and not self._peek("|", ")"):
            if self._take("\\Q"):
                at = self._text.find("\\E", self._position)
                quoted = self._text[self._position :] if at < 0 else self._take_until("\\E")
                self._position = len(self._text) if at < 0 else self._position
                parts += [self._one(c) for c in quoted[:-1]]
                parts += [self._repeated(self._one(c)) for c in quoted[-1:]]
            elif not self._take("\\E"):
                parts.append(self._repeated(self._atom()))
        return ("sequence", parts)

    def _repeated(self, part: _Part) -> _Part:
        """Return a part with the repetition that follows it, if there is one."""
        if part == ("sequence", []) and self._peek("*", "+", "?"):
            raise _PatternError("nothing to repeat")
        again = False
        while True:
            least, most = 0, None
            sign = self._take("*", "+", "?")
            if sign:
                least, most = int(sign == "+"), 1 if sign == "?" else None
            elif (counts := self._counts()) is not None:
                least, most = counts
            else:
                return part
            if again:
                raise _PatternError("a repetition of a repetition")
            self._take("?")  # whether it is lazy does not matter for a whole match
            part, again = ("repeat", part, least, most), True

    def _counts(self) -> tuple[int, int | None] | None:
        """Return the numbers of ``{2}``, ``{2,}``, ``{2,3}``; other braces are literal."""
        if not self._peek("{"):
            return None
        end = self._text.find("}", self._position)
        first, comma, last = self._text[self._position + 1 : max(end, 0)].partition(",")
        if not all(part.isascii() and (part.isdigit() or not part) for part in (first, last)):
            return None
        if end < 0 or not first:
            return None
        self._position = end + 1
        most = (int(last) if last else None) if comma else int(first)
        if max(int(first), most or 0) > _MAX_REPETITIONS or (
            most is not None and most < int(first)
        ):
            raise _PatternError("a repetition that is too long or goes backwards")
        return int(first), most

    def _atom(self) -> _Part:
        """Return the next part without its repetition."""
        sign = self._next()
        match sign:
            case "(":
                return self._group()
            case "[":
                return "test", self._folded(self._class())
            case ".":
                across_lines = "s" in self._flags  # read now, since later parts may change flags

                def any_character(character: str) -> bool:
                    return across_lines or character != "\n"

                return "test", any_character
            case "^" | "$":
                name = {"^": "begin", "$": "end"}[sign]
                return "at", name + (" of line" if "m" in self._flags else "")
            case "*" | "+" | "?":
                raise _PatternError("nothing to repeat")
            case "\\":
                names = {"A": "begin", "z": "end", "b": "edge", "B": "no edge"}
                known = self._take(*names)
                return ("at", names[known]) if known else ("test", self._folded(self._escape()))
            case _:
                return self._one(sign)

    def _one(self, character: str) -> _Part:
        return "test", self._folded(lambda c: c == character)

    def _folded(self, test: _Test) -> _Test:
        if "i" not in self._flags:
            return test
        return lambda c: any(test(form) for form in _forms(c))

    def _group(self) -> _Part:
        """Return a group, whose parenthesis was read."""
        outside = self._flags
        if self._take("?P<", "?<"):
            if self._peek("=", "!") or not self._take_until(">").replace("_", "a").isalnum():
                raise _PatternError("RE2 has no such group")
        elif self._take("?"):
            on = True
            while (sign := self._next()) not in ":)":
                if sign not in "imsU-":
                    raise _PatternError(f"RE2 has no group (?{sign}")
                on = on and sign != "-"
                self._flags = self._flags | {sign} if on else self._flags - {sign}
            if sign == ")":
                return "sequence", []  # the flags last until the enclosing group ends
        found = self._alternatives()
        if not self._take(")"):
            raise _PatternError("missing )")
        self._flags = outside
        return found

    def _escape(self) -> _Test:
        """Return the test of an escape, whose backslash was read."""
        sign = self._next()
        if sign.lower() in _CLASSES:
            test = self._folded(_CLASSES[sign.lower()].__contains__)
            return _negated(test) if sign.isupper() else test
        if sign in "pP":
            name = self._take_until("}") if self._take("{") else self._next()
            negated = (sign == "P") != name.startswith("^")
            kind = name.removeprefix("^")
            kinds = {"", "L", "M", "N", "P", "S", "Z", "C", "Any"}
            if kind not in kinds and not (len(kind) == 2 and kind[0] in kinds):
                raise _PatternError(f"the characters {name!r} are not known")
            start = "" if kind == "Any" else kind
            test = self._folded(lambda c: unicodedata.category(c).startswith(start))
            return _negated(test) if negated else test
        character = self._character(sign)
        return lambda c: c == character

    def _character(self, sign: str) -> str:
        """Return the character of an escape for a single character."""
        if sign == "x":
            digits = self._take_until("}") if self._take("{") else self._next() + self._next()
            try:
                return chr(int(digits, 16))
            except (ValueError, OverflowError) as error:
                raise _PatternError(f"\\x{digits} is no character") from error
        if sign in "01234567":
            digits = sign
            while len(digits) < 3 and self._peek(*"01234567"):
                digits += self._next()
            if sign != "0" and len(digits) < 2:
                raise _PatternError("RE2 has no references to groups")
            return chr(int(digits, 8))
        if sign in _CONTROLS:
            return _CONTROLS[sign]
        if sign in _WORDS - {"_"}:
            raise _PatternError(f"RE2 has no \\{sign}")
        return sign

    def _class(self) -> _Test:
        """Return the test of a class of characters, whose bracket was read."""
        negated = bool(self._take("^"))
        tests: list[_Test] = []
        first = True
        while first or not self._peek("]"):
            first = False
            if self._take("[:"):
                name = self._take_until(":]")
                members = _NAMED.get(name.removeprefix("^"))
                if members is None:
                    raise _PatternError(f"the class [:{name}:] is not known")
                test = self._folded(members.__contains__)
                tests.append(_negated(test) if name.startswith("^") else test)
            elif self._peek(*(f"\\{c}" for c in "dDsSwWpP")):
                self._next()
                tests.append(self._escape())
            else:
                tests.append(self._range())
        self._next()
        found = self._folded(lambda c: any(test(c) for test in tests))
        return _negated(found) if negated else found

    def _range(self) -> _Test:
        low = high = self._member()
        if self._peek("-") and not self._peek("-]"):
            self._next()
            high = self._member()
        if high < low:
            raise _PatternError(f"the range {low}-{high} goes backwards")
        return lambda c: low <= c <= high

    def _member(self) -> str:
        sign = self._next()
        return self._character(self._next()) if sign == "\\" else sign


def _forms(c: str) -> set[str]:
    """Return a character in all its cases: k, K and the Kelvin sign are one."""
    return {c, c.lower(), c.upper(), c.lower().upper(), c.upper().lower()}


def _negated(test: _Test) -> _Test:
    return lambda c: not test(c)


class _Automaton:
    """A nondeterministic automaton.

    A state is a test of one character, a condition on the position, or (None) a fork to several
    states. All states that the text read so far can lead to are followed at once.
    """

    def __init__(self, whole: _Part) -> None:
        self._tests: list[_Test | str | None] = []
        self._next: list[list[int]] = []
        self._end = self._state(None)
        self._start = self._part(whole, self._end)

    def _state(self, test: _Test | str | None, *following: int) -> int:
        if len(self._tests) >= _MAX_STATES:
            raise _PatternError(f"it has more than {_MAX_STATES} states")
        self._tests.append(test)
        self._next.append(list(following))
        return len(self._tests) - 1

    def _part(self, part: _Part, following: int) -> int:
        """Return the first state of a part that ends in ``following``."""
        match part:
            case ("sequence", parts):
                for inner in reversed(parts):
                    following = self._part(inner, following)
                return following
            case ("alternatives", ways):
                return self._state(None, *[self._part(way, following) for way in ways])
            case ("repeat", inner, least, most):
                return self._repeat(inner, least, most, following)
            case (_, test):
                return self._state(test, following)
            case _:
                raise AssertionError(part)

    def _repeat(self, inner: _Part, least: int, most: int | None, following: int) -> int:
        """Return the first state of ``least`` to ``most`` copies of a part; None: any number."""
        if most is None:
            again = self._state(None)
            self._next[again] = [self._part(inner, again), following]
            following = again
        else:
            end = following
            for _ in range(most - least):
                following = self._state(None, self._part(inner, following), end)
        for _ in range(least):
            following = self._part(inner, following)
        return following

    def matches(self, text: str) -> bool:
        """Return whether the whole text matches."""
        states = self._closure({self._start}, text, 0)
        for position, c in enumerate(text):
            reached = {
                self._next[state][0]
                for state in states
                if callable(test := self._tests[state]) and test(c)
            }
            if not reached:
                return False
            states = self._closure(reached, text, position + 1)
        return self._end in states

    def _closure(self, states: set[int], text: str, position: int) -> set[int]:
        """Return the states, and all that are reached from them without reading a character."""
        found, waiting = set(states), list(states)
        while waiting:
            state = waiting.pop()
            test = self._tests[state]
            if callable(test) or (test is not None and not _holds(test, text, position)):
                continue
            more = [following for following in self._next[state] if following not in found]
            found.update(more)
            waiting += more
        return found


def _holds(condition: str, text: str, position: int) -> bool:
    """Return whether a condition holds before the character at ``position``."""
    before, after = text[position - 1 : position] if position else "", text[position : position + 1]
    match condition:
        case "begin":
            return position == 0
        case "end":
            return position == len(text)
        case "begin of line":
            return before in ("", "\n")
        case "end of line":
            return after in ("", "\n")
        case _:
            return ((before in _WORDS) != (after in _WORDS)) == (condition == "edge")
