"""The HTML page around a drawing: an overview, a search, and the details of the chosen box.

The page holds all that it needs and loads nothing. Its policy forbids scripts other than its own,
so that names and texts of a hostile model cannot become scripts even if one escaped the escaping.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

import attrs

from subgraph.visualization.details import Details
from subgraph.visualization.svg import owner_class, svg_text

_PACKAGE = "subgraph.visualization"


@attrs.frozen(eq=False)
class Table:
    """A table of the overview.

    Attributes:
        title: Its title.
        columns: Titles of the columns.
        rows: For each row the number of the box that it leads to, or None, and its cells.
        note: A sentence below, may be empty.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[tuple[int | None, Sequence[str]]]
    note: str = ""


@cache
def package_text(name: str) -> str:
    """Return a file of this folder."""
    return (files(_PACKAGE) / name).read_text(encoding="utf-8")


def make_page(
    title: str,
    svg: str,
    legend: Mapping[str, int],
    tables: Iterable[Table],
    details: Iterable[Details],
) -> str:
    """Return the whole page.

    Args:
        title: Its title.
        svg: The drawing.
        legend: The number of nodes of each owner, in the order of the colours.
        tables: The overview.
        details: The facts about each box.
    """
    script = package_text("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    owners = "".join(
        f'<span><i class="{owner_class(number)}"></i>{svg_text(name)} ({count})</span>'
        for number, (name, count) in enumerate(legend.items())
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width">
<title>{svg_text(title)}</title>
<style>{package_text("page.css")}</style>
</head>
<body>
<header>
<h1>{svg_text(title)}</h1>
<div class="legend">{owners}</div>
<input id="search" type="search" placeholder="Find a node" aria-label="Find a node">
<button id="smaller" title="Smaller (control and wheel)">&minus;</button>
<button id="larger" title="Larger (control and wheel)">+</button>
<button id="all" title="Show all">all</button>
</header>
<main>{svg}</main>
<aside>
<div id="panel"></div>
<div id="overview">{"".join(map(_table, tables))}</div>
</aside>
<script type="application/json" id="details">{_json(details)}</script>
<script>{script}</script>
</body>
</html>
"""


def _table(table: Table) -> str:
    if not table.rows:
        return ""
    head = "".join(f"<th>{svg_text(name)}</th>" for name in table.columns)
    head = f"<tr>{head}</tr>" if head else ""
    body = "".join(_row(box, cells) for box, cells in table.rows)
    note = f"<p>{svg_text(table.note)}</p>" if table.note else ""
    return f"<h3>{svg_text(table.title)}</h3><table>{head}{body}</table>{note}"


def _row(box: int | None, cells: Sequence[str]) -> str:
    others = "".join(f"<td>{svg_text(cell)}</td>" for cell in cells[1:])
    if box is None:
        return f"<tr><th>{svg_text(cells[0])}</th>{others}</tr>"
    return f'<tr><td><a data-to-box="{box}">{svg_text(cells[0])}</a></td>{others}</tr>'


def _json(details: Iterable[Details]) -> str:
    """Return JSON in which no character ends the element around it or begins a comment."""
    held: list[dict[str, Any]] = [
        {"title": one.title, "rows": one.rows, "why": list(one.why)} for one in details
    ]
    text = json.dumps(held, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
