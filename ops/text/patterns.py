"""References of operators that search texts by regular expressions: RegexFullMatch, Tokenizer.

Their patterns are RE2's (https://github.com/google/re2/wiki/Syntax), whose search is linear in the
text. onnx.reference uses Python's ``re``, which backtracks, and defines digits, word characters and
the end of a text otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np

from subgraph.errors import ShapeError
from subgraph.graph.graph import Node
from subgraph.graph.limits import check_memory
from subgraph.graph.types import Array
from subgraph.operators.reference import attributes
from subgraph.operators.requirements import decoded
from subgraph.ops.ml.scores import prepared

_START_OF_TEXT, _END_OF_TEXT = "\x02", "\x03"
# (text, least number of characters of a token) -> tokens.
_Splitter = Callable[[str, int], list[str]]
# Characters and classes of ASCII characters, of which only the last may be repeated.
_CLASS = r"\[\^?(?:[A-Za-z0-9]-[A-Za-z0-9]|\\[wd]|[A-Za-z0-9_])+\]|\\[wd]|[A-Za-z0-9_]"
_GREEDY = re.compile(rf"(?:\\b)?(?:{_CLASS})+\+?(?:\\b)?")


@cache
def compiled(pattern: str, *, longest: bool = False) -> Any:
    """Return a compiled pattern.

    Args:
        pattern: The pattern.
        longest: Whether a search finds the longest match at a place, not that of the first
            alternative.

    Raises:
        ShapeError: RE2 does not accept the pattern.
    """
    import re2  # loaded for models with patterns alone

    options = re2.Options()
    options.log_errors = False
    options.longest_match = longest
    try:
        return re2.compile(pattern, options)
    except (re2.error, UnicodeEncodeError) as error:
        reason = error.args[0].decode() if isinstance(error, re2.error) else error
        raise ShapeError(f"pattern {pattern!r} is not valid: {reason}") from error


def regex_full_match(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return whether each string matches as a whole."""
    pattern = compiled(decoded(node.attrs.get("pattern", "")))
    x: Array = inputs[0]
    found = [pattern.fullmatch(text) is not None for text in _texts(x)]
    return [np.array(found, bool).reshape(x.shape)]


def tokenizer(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return the tokens of each string, padded to the largest number of tokens.

    Follows ONNX Runtime's ``com.microsoft.Tokenizer``: tokens are characters, matches of
    ``tokenexp``, or the text between matches of ``separators``, which are applied one by one.
    """
    options, x = attributes(node), inputs[0]
    split, shortest = prepared(node, splitter_of), int(options["mincharnum"])
    rows = [split(text, shortest) for text in _texts(x)]
    width = max(map(len, rows), default=0)
    if options["mark"] and width:
        rows = [[_START_OF_TEXT, *row, _END_OF_TEXT] for row in rows]
        width += 2
    check_memory(8.0 * len(rows) * width, f"{len(rows)} texts with up to {width} tokens")
    found = np.full((len(rows), width), decoded(options["pad_value"]), dtype=object)
    for to, row in zip(found, rows, strict=True):
        to[: len(row)] = row
    return [found.reshape((*x.shape, width))]


def splitter_of(node: Node) -> _Splitter:
    """Return how a Tokenizer splits a text.

    Raises:
        ShapeError: A pattern is not valid, or not exactly one of ``separators`` and ``tokenexp`` is
            given.
    """
    options = attributes(node)
    separators = [decoded(pattern) for pattern in options["separators"] or ()]
    expression = decoded(options["tokenexp"] or "")
    if bool(separators) == bool(expression):
        raise ShapeError("exactly one of the attributes separators and tokenexp must be given")
    if expression == "." or separators == [""]:
        return lambda text, _: list(text)
    if expression:
        pattern = compiled(expression, longest=True)
        find = re.compile(expression, re.ASCII).findall if _GREEDY.fullmatch(expression) else None

        def matches(text: str, shortest: int) -> list[str]:
            # Longer matches are tried first at each place, so that Python's ``re`` finds the
            # longest too, in linear time and a tenth of what a match of re2's interface takes.
            found: list[str] | None = find and find(text)
            if found is None or min(map(len, found), default=shortest) < shortest:
                return list(_matches(pattern, text, shortest))
            return found

        return matches
    patterns = [compiled(separator, longest=True) for separator in separators]

    def between(text: str, shortest: int) -> list[str]:
        row = [text]
        for pattern in patterns:
            parts = [part for piece in row for part in _between(pattern, piece)]
            row = [part for part in parts if len(part) >= shortest]
        return row

    return between


def _matches(pattern: Any, text: str, shortest: int) -> Iterator[str]:
    """Yield the matches that have at least ``shortest`` characters, from left to right."""
    # Of bytes, a search that begins anew does not convert the whole text again.
    content = text.encode()
    start: int | None = 0
    while start is not None:
        matches, start = pattern.finditer(content, start), None
        for match in matches:
            token = match.group().decode()
            if len(token) >= shortest:
                yield token
            elif len(token) > 1:  # the next match may begin within this one
                start = match.start() + len(token[0].encode())
                break


def _between(pattern: Any, text: str) -> Iterator[str]:
    """Yield what is between the matches; an empty match removes the character behind it."""
    start = 0
    for match in pattern.finditer(text):
        if match.start() >= start:
            yield text[start : match.start()]
            start = max(match.end(), match.start() + 1)
    yield text[start:]


def _texts(x: Array) -> list[str]:
    """Return the strings of an array.

    Raises:
        ShapeError: A string has no UTF-8 form, which patterns are defined on.
    """
    texts = [str(text) for text in x.reshape(-1)]
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ShapeError(f"the text {text!r} is not valid Unicode: {error}") from error
    return texts
