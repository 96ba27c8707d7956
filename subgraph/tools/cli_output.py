"""Output of commands: tables and lines on a terminal, or one JSON object."""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from subgraph.graph.graph import Node

Row = dict[str, Any]


def prepare_streams() -> None:
    """Make standard streams escape characters outside their encoding, and accept text if closed."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def discard_output() -> None:
    """Redirect standard output to the null device, so that Python's flush at exit succeeds."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Output:
    """Output of a command: tables and lines or, with ``--json``, only the object of `finish`."""

    def __init__(self, args: argparse.Namespace) -> None:
        """Choose the form of output by the argument ``json``."""
        self._json = bool(args.json)
        if not self._json:
            from rich.console import Console

            class Lines(Console):
                def on_broken_pipe(self) -> None:
                    raise BrokenPipeError  # `subgraph.tools.cli.main` ends quietly; rich would exit

            # rich would wrap tables at 80 columns in a pipe or file.
            self._console = Lines(
                width=None if sys.stdout.isatty() else 200, highlight=False, markup=False
            )

    @contextmanager
    def progress(self, what: str) -> Generator[None]:
        """Show a spinner on a terminal until the ``with`` block ends."""
        if self._json or not sys.stderr.isatty():
            yield
            return
        from rich.console import Console

        with Console(stderr=True).status(f"{what} ..."):
            yield

    @contextmanager
    def bar(self, what: str, total: int) -> Generator[Callable[[int, str], None]]:
        """Show a progress bar on a terminal until the ``with`` block ends.

        Args:
            what: The work, such as "compiling".
            total: Number of items.

        Yields:
            A function that updates the bar: number of completed items, name of the present one.
        """
        if self._json or not sys.stderr.isatty():
            yield lambda done, doing: None
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), "{task.description}")
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task(what, total=total)

            def show(done: int, doing: str) -> None:
                progress.update(task, completed=done, description=f"{what}: {doing}")

            yield show

    def table(self, title: str, rows: Sequence[Row]) -> None:
        """Print rows as a table whose columns are their keys; nothing if there are no rows."""
        if self._json or not rows:
            return
        from rich.table import Table

        table = Table(title=title, title_justify="left")
        columns = list(dict.fromkeys(key for row in rows for key in row))
        for column in columns:
            known = [row[column] for row in rows if row.get(column, "") != ""]
            number = all(isinstance(value, (int, float)) for value in known)
            table.add_column(column, justify="right" if number else "left", overflow="fold")
        for row in rows:
            table.add_row(*(cell(row.get(column, "")) for column in columns))
        self._console.print(table)

    def facts(self, facts: Row) -> None:
        """Print a line for each name and value."""
        for key, value in facts.items():
            self.line(f"{key.replace('_', ' ')}: {cell(value)}")

    def line(self, text: str) -> None:
        """Print a line."""
        if not self._json:
            self._console.print(printable(text), markup=False)

    def finish(self, everything: Row) -> None:
        """Print ``everything`` as a JSON object if the command has ``--json``."""
        if self._json:
            print(json.dumps(_in_json(everything), default=str, allow_nan=False))


def _in_json(value: Any) -> Any:
    """Return a value with strings for floats that JSON lacks: "NaN", "Infinity", "-Infinity"."""
    if isinstance(value, dict):
        table: Row = value  # pyright: ignore[reportUnknownVariableType]
        return {key: _in_json(item) for key, item in table.items()}
    if isinstance(value, (list, tuple)):
        return [_in_json(item) for item in value]  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"
    return value


def cell(value: Any) -> str:
    """Return the text of a value in a table."""
    return f"{value:.6g}" if isinstance(value, float) else printable(str(value))


def printable(text: str) -> str:
    """Return a text whose control characters are escaped; line feeds stay.

    Names come from files, and a terminal would obey their escape sequences.
    """
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text
    )


def op_name(node: Node) -> str:
    """Return an operator's name with its domain."""
    return f"{node.domain}.{node.op_type}" if node.domain else node.op_type


def how_to_show(picture: Path) -> str:
    """Return what to do with a picture in a file."""
    is_dot = picture.suffix.lower() == ".dot"
    return f"draw it with dot -Tsvg {picture}" if is_dot else "open it in a browser"
