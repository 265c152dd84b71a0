"""Map of a swarm as inline SVG: an arrow from each source to each node that learns from it.

Invariant: at most `MAX_NODES` nodes and the `MAX_LINKS` strongest links are drawn; a line below counts the others.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from markupsafe import Markup

from swarm.pages.charts import element, number

MAX_NODES: Final = 1000
MAX_LINKS: Final = 300
_MAX_NAMED: Final = 40  # a ring of names; where there are more, a disc of dots
_WIDTH, _HEIGHT = 520.0, 400.0
_RADIUS = 140.0
_GOLDEN_ANGLE = math.pi * (3 - math.sqrt(5))
Place = tuple[float, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class MapNode:
    """A dot of the map, green if the node is live."""

    key: str
    name: str
    is_live: bool
    tip: str


@dataclass(frozen=True, kw_only=True, slots=True)
class MapLink:
    """`learner` learned from `weight` groups of `source`; both are keys."""

    source: str
    learner: str
    weight: float
    tip: str


def swarm_map(nodes: Sequence[MapNode], links: Sequence[MapLink]) -> Markup:
    """Draws nodes as dots, with an arrow from each source to each learner; more groups make a thicker arrow."""
    if not nodes:
        return element("p", "nobody yet", class_="nothing")
    shown = nodes[:MAX_NODES]
    places = _places(len(shown))
    where = {node.key: place for node, place in zip(shown, places, strict=True)}
    drawn = [link for link in links if link.source in where and link.learner in where and link.source != link.learner]
    num_links = len(drawn)
    drawn = sorted(drawn, key=lambda link: -link.weight)[:MAX_LINKS]
    most = max((link.weight for link in drawn), default=1.0) or 1.0
    is_named = len(shown) <= _MAX_NAMED
    radius = 7.0 if is_named else max(2.0, 7.0 * math.sqrt(_MAX_NAMED / len(shown)))
    parts = [_arrow(where[link.source], where[link.learner], link, most, radius) for link in drawn]
    parts += [_dot(node, place, radius) for node, place in zip(shown, places, strict=True)]
    if is_named:
        parts += [_name(node, place) for node, place in zip(shown, places, strict=True)]
    hidden = [f"{len(nodes) - len(shown):,} nodes"] if len(nodes) > len(shown) else []
    hidden += [f"{num_links - len(drawn):,} weaker links"] if num_links > len(drawn) else []
    note = element("p", f"not drawn: {', '.join(hidden)}", class_="soft") if hidden else Markup("")
    return element("svg", *parts, class_="map", viewBox=f"0 0 {number(_WIDTH)} {number(_HEIGHT)}", role="img") + note


def _places(count: int) -> list[Place]:
    """Returns places of dots: a single one in the middle, few on a ring, many spread evenly over a disc."""
    middle = (_WIDTH / 2, _HEIGHT / 2)
    if count == 1:
        return [middle]
    if count <= _MAX_NAMED:
        polar = [(_RADIUS, 2 * math.pi * index / count - math.pi / 2) for index in range(count)]
    else:
        edge = _HEIGHT / 2 - 10
        polar = [(edge * math.sqrt((index + 0.5) / count), index * _GOLDEN_ANGLE) for index in range(count)]
    return [(middle[0] + r * math.cos(angle), middle[1] + r * math.sin(angle)) for r, angle in polar]


def _arrow(begin: Place, end: Place, link: MapLink, most: float, radius: float) -> Markup:
    """Draws a curved arrow, always bent to the same side so that opposite arrows between two nodes do not overlap."""
    dx, dy = end[0] - begin[0], end[1] - begin[1]
    bend = ((begin[0] + end[0]) / 2 - 0.15 * dy, (begin[1] + end[1]) / 2 + 0.15 * dx)
    ux, uy = end[0] - bend[0], end[1] - bend[1]
    back = math.hypot(ux, uy) or 1.0
    ux, uy = ux / back, uy / back
    width = 0.7 + 4.3 * link.weight / most
    head, tip = 4.0 + width, radius + 2
    to = (end[0] - ux * tip, end[1] - uy * tip)
    base = (to[0] - ux * head, to[1] - uy * head)
    wings = (base[0] - uy * head / 2, base[1] + ux * head / 2, base[0] + uy * head / 2, base[1] - ux * head / 2)
    x, y, corners = number(bend[0]), number(bend[1]), " ".join(map(number, (*to, *wings)))
    curve = f"M{number(begin[0])} {number(begin[1])}Q{x} {y} {number(base[0])} {number(base[1])}"
    return element(
        "g", element("path", d=curve, stroke_width=width), element("polygon", points=corners), data_tip=link.tip
    )


def _dot(node: MapNode, place: Place, radius: float) -> Markup:
    css = "live" if node.is_live else "gone"
    return element("circle", class_=css, cx=place[0], cy=place[1], r=radius, data_tip=node.tip)


def _name(node: MapNode, place: Place) -> Markup:
    away = place[0] - _WIDTH / 2
    anchor = "middle" if abs(away) < 1 else "start" if away > 0 else "end"
    x = place[0] + (0 if anchor == "middle" else math.copysign(12, away))
    y = place[1] + (4 if anchor != "middle" else -14 if place[1] <= _HEIGHT / 2 else 22)
    name = node.name if len(node.name) <= 20 else node.name[:19] + "."
    return element("text", name, class_="name", x=x, y=y, text_anchor=anchor)
