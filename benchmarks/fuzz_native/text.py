"""Target: the text form of graphs, parsed, printed and parsed again."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

import subgraph as sg
from subgraph.testing import conformance

from .draw import EDGE_NUMBERS, HUGE_NUMBERS
from .outcome import Finding, refuses

_MAX_SEED_CHARACTERS = 1500
_PIECES = re.compile(r'"[^"\n]*"|[\w.]+|\s+|.', re.DOTALL)
_WORDS = (
    *("graph", "return", "input", "capture", "weight", "doc", "meta", "attr", "json", "parameter"),
    *("seq", "optional", "map", "sparse", "tensor", "type", "none", "bytes", "base64", "sha256"),
    *(
        "opsets",
        "captures",
        "subgraph",
        "float32",
        "int64",
        "string",
        "int4",
        "bfloat16",
        "nan",
        "-inf",
    ),
    *(
        "{",
        "}",
        "(",
        ")",
        "[",
        "]",
        "%",
        "@",
        ":",
        "::",
        "=",
        ",",
        "?",
        "*",
        "-",
        "#",
        "\\",
        '"',
        '""',
    ),
    *('"\\ud800"', "1e400", "1_000", "\u0661", "\x00", '"AAAA"', '"{}"', '"[1e999]"'),
)


def seeds() -> Iterator[bytes]:
    """Yield the text of every small model of ONNX's suite."""
    for case in conformance.cases():
        if case.kind == "real":
            continue
        try:
            text = str(sg.load(case.load()[0]))
        except sg.SubgraphError:
            continue
        if len(text) <= _MAX_SEED_CHARACTERS:
            yield text.encode()


def run(data: bytes) -> None:
    """Parse a text, and check that the printed graph parses to a graph that prints the same."""
    text = data.decode("utf-8", "surrogatepass" if data[:1] == b"#" else "replace")
    parsed: list[sg.Graph] = []
    if refuses(lambda: parsed.append(sg.parse(text))):
        return
    printed = str(parsed[0])
    try:
        again = str(sg.parse(printed))
    except sg.SubgraphError as error:
        raise Finding(f"a printed graph is not read: {type(error).__name__}; {error}") from error
    if again != printed:
        raise Finding("a printed graph reads as another")


def mutate(data: bytes, largest: int, seed: int) -> bytes:
    """Return the text with one to four tokens replaced, removed, repeated or exchanged.

    Args:
        data: The text.
        largest: Largest number of bytes of the result.
        seed: Seed of the changes.
    """
    rng = random.Random(seed)
    pieces: list[str] = _PIECES.findall(data.decode("utf-8", "replace")) or [""]
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(pieces))
        match rng.randrange(7):
            case 0:
                pieces[at] = rng.choice(_WORDS)
            case 1:
                pieces.insert(at, rng.choice(_WORDS))
            case 2:
                pieces[at] = str(rng.choice((*EDGE_NUMBERS, *HUGE_NUMBERS)))
            case 3 if len(pieces) > 1:
                del pieces[at : at + rng.randint(1, 4)]
                pieces = pieces or [""]
            case 4:
                pieces[at:at] = pieces[at : at + rng.randint(1, 12)]
            case 5:
                other = rng.randrange(len(pieces))
                pieces[at], pieces[other] = pieces[other], pieces[at]
            case _:
                pieces[at] = rng.choice(pieces)
    return "".join(pieces).encode("utf-8", "surrogatepass")[:largest]
