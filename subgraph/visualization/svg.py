"""A drawing as SVG, which an HTML page may contain and a file may hold alone."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape

from subgraph.visualization.layered_layout import Point
from subgraph.visualization.scene import (
    FRAME,
    INPUT,
    OUTPUT,
    TITLE_HEIGHT,
    Box,
    Edge,
    Scene,
    with_type,
)

# Characters that XML does not allow, and lone surrogates, which no encoding has.
_FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_COLOURS = 8  # of owners in the style sheets; further owners share them
_SHOWN_HEAT = 0.004  # smaller shares of the time have no visible colour


def svg_text(text: str) -> str:
    """Return text for SVG and HTML, with replacements for characters that these forbid."""
    return escape(_FORBIDDEN.sub("\ufffd", text))


def owner_class(owner: int) -> str:
    """Return the class of the style sheets that has the colour of an owner."""
    return f"owner{owner % _COLOURS}"


def draw_svg(
    scene: Scene, tips: Sequence[str], heats: Sequence[float], style: str, title: str
) -> str:
    """Return a drawing as an ``svg`` element.

    Args:
        scene: The drawing.
        tips: For each box the text that is shown when the mouse is over it.
        heats: For each box its share of the run's time, 0 to 1.
        style: The style sheet.
        title: The title of the drawing.
    """
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" id="drawing" role="img" '
        f'width="{_number(scene.width)}" height="{_number(scene.height)}" '
        f'viewBox="0 0 {_number(scene.width)} {_number(scene.height)}">',
        f"<title>{svg_text(title)}</title>",
        f"<style>{style}</style>",
        '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto"><path d="M0 0 8 4 0 8z"/></marker></defs>',
    ]
    frames = [k for k, box in enumerate(scene.boxes) if box.kind == FRAME]
    others = [k for k, box in enumerate(scene.boxes) if box.kind != FRAME]
    # Frames lie below the lines inside them, and all lines below the other boxes.
    out += [_box(k, scene.boxes[k], tips[k], heats[k]) for k in frames]
    out += [
        f'<text class="left" x="{_number(x)}" y="{_number(y)}">{svg_text(text)}</text>'
        for text, (x, y) in scene.captions
    ]
    out += [_line(edge) for edge in scene.edges]
    out += [_box(k, scene.boxes[k], tips[k], heats[k]) for k in others]
    return "\n".join([*out, "</svg>"])


def _box(number: int, box: Box, tip: str, heat: float) -> str:
    kind = box.kind if box.owner < 0 else f"{box.kind} {owner_class(box.owner)}"
    radius = {FRAME: 8, INPUT: 10, OUTPUT: 10}.get(box.kind, 4)
    place = f'x="{_number(box.x)}" y="{_number(box.y)}" width="{_number(box.width)}"'
    shape = f'<rect {place} height="{_number(box.height)}" rx="{radius}"/>'
    if heat > _SHOWN_HEAT and box.kind != FRAME:
        # The root shows small shares as well: a tenth of the time is a third of the full colour.
        opacity = min(heat**0.5, 1.0)
        shape += (
            f'<rect class="heat" {place} height="{_number(box.height)}" rx="{radius}" '
            f'fill-opacity="{opacity:.2f}"/>'
        )
    texts = _texts(box)
    return f'<g class="{kind}" data-box="{number}"><title>{svg_text(tip)}</title>{shape}{texts}</g>'


def _texts(box: Box) -> str:
    if box.kind == FRAME:
        at = f'x="{_number(box.x + 10)}" y="{_number(box.y + TITLE_HEIGHT - 7)}"'
        return f'<text class="title left" {at}>{svg_text(box.title)}</text>'
    middle = _number(box.x + box.width / 2)
    base = box.y + box.height / 2 + 4
    if not box.line:
        return f'<text class="title" x="{middle}" y="{_number(base)}">{svg_text(box.title)}</text>'
    return (
        f'<text class="title" x="{middle}" y="{_number(base - 7)}">{svg_text(box.title)}</text>'
        f'<text class="line" x="{middle}" y="{_number(base + 7)}">{svg_text(box.line)}</text>'
    )


def _line(edge: Edge) -> str:
    tip = svg_text(with_type(edge.value))
    return (
        f'<path class="edge" data-from="{edge.source}" data-to="{edge.target}" '
        f'd="{_path(edge.points)}" marker-end="url(#arrow)"><title>{tip}</title></path>'
    )


def _path(points: Iterable[Point]) -> str:
    """Return the path through points: straight down, or a curve that begins and ends downward."""
    first, *rest = points
    x, y = first
    parts = [f"M{_number(x)} {_number(y)}"]
    for next_x, next_y in rest:
        if next_x == x:
            parts.append(f"V{_number(next_y)}")
        else:
            middle = _number((y + next_y) / 2)
            parts.append(
                f"C{_number(x)} {middle} {_number(next_x)} {middle} "
                f"{_number(next_x)} {_number(next_y)}"
            )
        x, y = next_x, next_y
    return "".join(parts)


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
