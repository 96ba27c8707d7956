"""Where a command's results go: tables and lines on a terminal, or one JSON object."""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

from subgraph.graph.graph import Node

Row = dict[str, Any]


def ready_streams() -> None:
    """Let what a stream's encoding lacks be written as escapes, and a closed stream swallow all."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def drop_output() -> None:
    """Let nothing more be written to standard output, which cannot take it, at exit either."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Output:
    """Where a command's results go: tables and lines on a terminal, or one JSON object."""

    def __init__(self, args: argparse.Namespace) -> None:
        """Take ``--json`` from the arguments."""
        self._json = bool(args.json)
        if not self._json:
            from rich.console import Console

            class Lines(Console):
                def on_broken_pipe(self) -> None:
                    raise BrokenPipeError  # `subgraph.tools.cli.main` ends quietly; rich would exit

            # Into a pipe or file, lines are as long as the tables need.
            self._console = Lines(
                width=None if sys.stdout.isatty() else 200, highlight=False, markup=False
            )

    @contextmanager
    def progress(self, what: str) -> Generator[None]:
        """Show that something is under way, on a terminal, until the block ends."""
        if self._json or not sys.stderr.isatty():
            yield
            return
        from rich.console import Console

        with Console(stderr=True).status(f"{what} ..."):
            yield

    @contextmanager
    def bar(self, what: str, total: int) -> Generator[Callable[[int, str], None]]:
        """Show a bar; call what this gives with how many are done and what is being done."""
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
        """Print rows under their keys."""
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
        """Print names and single values."""
        for key, value in facts.items():
            self.line(f"{key.replace('_', ' ')}: {cell(value)}")

    def line(self, text: str) -> None:
        """Print a line."""
        if not self._json:
            self._console.print(text, markup=False)

    def finish(self, everything: Row) -> None:
        """Print the JSON object, if that was asked for."""
        if self._json:
            print(json.dumps(_in_json(everything), default=str, allow_nan=False))


def _in_json(value: Any) -> Any:
    """Return a value with texts for the floats that JSON cannot write: "NaN", "Infinity"."""
    if isinstance(value, dict):
        table: Row = value  # pyright: ignore[reportUnknownVariableType]
        return {key: _in_json(item) for key, item in table.items()}
    if isinstance(value, (list, tuple)):
        return [_in_json(item) for item in value]  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"
    return value


def cell(value: Any) -> str:
    """Return a value as a table shows it."""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def op_name(node: Node) -> str:
    """Return an operator's name with its domain."""
    return f"{node.domain}.{node.op_type}" if node.domain else node.op_type
