"""Line and bar charts as inline SVG, with colours from the page's style sheet.

matplotlib's SVG (24 KB a chart instead of 33) is not used: its colours are fixed, so a page could not follow a dark
theme; it shows no value for a point under the mouse; and the page would need the optional `report` extra.

Invariant: every text is escaped, every coordinate finite; a chart without data reads "nothing was measured".
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from markupsafe import Markup

Points = Sequence[tuple[float, float]]

MAX_POINTS = 80  # of a line; where there are more, a point is the mean of as many neighbours as are needed
WIDTH, HEIGHT = 520.0, 240.0
LEFT, RIGHT, TOP, BOTTOM = 46.0, 12.0, 12.0, 34.0
NUM_COLORS = 8


@dataclass(frozen=True, kw_only=True)
class Series:
    """One line of a chart; `color` is an index into the page's palette."""

    name: str
    points: Points
    color: int
    is_dashed: bool = False
    spans: Sequence[tuple[float, float, float]] = ()  # (x, lowest, highest), drawn as a band


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A vertical line at x with a word at its top."""

    x: float
    text: str
    color: int


@dataclass(frozen=True, kw_only=True)
class _Scale:
    """Maps a data range to pixels, linearly."""

    low: float
    high: float
    begin: float
    end: float

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low) if self.high > self.low else 0.5
        return self.begin + share * (self.end - self.begin)


def line_chart(
    series: Sequence[Series],
    *,
    x_label: str,
    x_range: tuple[float, float] | None = None,
    y_range: tuple[float, float] | None = None,
    level: float | None = None,
    level_name: str = "",
    marks: Sequence[Mark] = (),
) -> Markup:
    """Draws lines over a common x; lines without points are skipped.

    Args:
        x_range: range that is shown at least; None fits the data.
        y_range: fixed range; None fits the data.
        level: value of a horizontal reference line, such as a baseline, with the label `level_name`.
    """
    shown = [line for line in series if line.points]
    if not shown:
        return _nothing()
    xs = [x for line in shown for x, _ in line.points] + [mark.x for mark in marks] + [*(x_range or ())]
    ys = [y for line in shown for _, y in line.points] + ([level] if level is not None else [])
    ys += [y for line in shown for _, *ends in line.spans for y in ends]
    x = _Scale(low=min(xs), high=max(xs), begin=LEFT, end=WIDTH - RIGHT)
    low, high = y_range or padded(min(ys), max(ys))
    y = _Scale(low=low, high=high, begin=HEIGHT - BOTTOM, end=TOP)
    parts = [*_y_axis(y), _x_title(x_label)]
    parts += [_text(x(tick), HEIGHT - BOTTOM + 14, _value(tick), "middle") for tick in ticks(x.low, x.high, 7)]
    if level is not None:
        below = 12 if y(level) < HEIGHT - BOTTOM - 14 else -4
        parts.append(element("line", class_="level", x1=LEFT, x2=WIDTH - RIGHT, y1=y(level), y2=y(level)))
        parts.append(_text(WIDTH - RIGHT - 4, y(level) + below, level_name, "end", "level"))
    parts += [_mark(mark, x) for mark in marks]
    parts += [_line(line, x, y, x_label) for line in shown]
    return _svg(parts, HEIGHT)


def bar_chart(
    groups: Sequence[tuple[str, Sequence[tuple[str, float]]]], *, x_label: str, names: Sequence[str], tone: str = "t"
) -> Markup:
    """Draws a vertical stack for each (category, ((series, value), ...)); the order of `names` decides colours.

    `tone`: "s" for series that are nodes, whose colours mean nothing else on a page; "t" for parts of anything else.
    """
    totals = [sum(value for _, value in stack) for _, stack in groups]
    if not totals or max(totals) <= 0:
        return _nothing()
    y = _Scale(low=0.0, high=max(totals) * 1.08, begin=HEIGHT - BOTTOM, end=TOP)
    slot = (WIDTH - LEFT - RIGHT) / len(groups)
    parts = [*_y_axis(y), _x_title(x_label)]
    for index, (category, stack) in enumerate(groups):
        left, floor = LEFT + slot * index + slot * 0.15, 0.0
        for name, value in stack:
            if value <= 0:
                continue
            css = f"{tone}{names.index(name) % NUM_COLORS}"
            top, height = y(floor + value), y(floor) - y(floor + value)
            parts.append(_box(left, top, slot * 0.7, height, css, f"{category} {x_label}, {name}: {_value(value)}"))
            floor += value
        parts.append(_text(left + slot * 0.35, HEIGHT - BOTTOM + 14, category, "middle"))
    return _svg(parts, HEIGHT)


def stacked_rows(rows: Sequence[tuple[str, Sequence[tuple[str, float]]]], *, names: Sequence[str], unit: str) -> Markup:
    """Draws horizontal stacks of (label, ((part, value), ...)) on one scale; the order of `names` decides colours."""
    longest = max((sum(value for _, value in parts) for _, parts in rows), default=0.0)
    if longest <= 0:
        return _nothing()
    indent, slot, width = 130.0, 26.0, 2.1 * WIDTH  # drawn over the whole width of the page
    x = _Scale(low=0.0, high=longest, begin=indent, end=width - RIGHT)
    height = slot * len(rows) + BOTTOM
    drawn: list[Markup] = []
    for index, (label, parts) in enumerate(rows):
        top, begin = slot * index + 4, 0.0
        drawn.append(_text(indent - 8, top + 13, label, "end", "name"))
        for name, value in parts:
            if value > 0:
                tip = f"{label}, {name}: {_value(value)} {unit} ({value / longest:.0%} of the longest row)"
                css = f"t{names.index(name) % NUM_COLORS}"
                drawn.append(_box(x(begin), top, x(begin + value) - x(begin), slot - 8, css, tip))
                begin += value
    for tick in ticks(0.0, longest):
        drawn.append(_text(x(tick), height - BOTTOM + 14, _value(tick), "middle"))
    drawn.append(_text((indent + width - RIGHT) / 2, height - 4, unit, "middle"))
    return _svg(drawn, height, width)


def interval_bar(low: float, value: float, high: float, tip: str, may_be_good: bool = True) -> Markup:
    """Draws a difference in [-1, 1] as a dot with its interval: green above zero (`may_be_good`), red below it."""
    css = "good" if low > 0 and may_be_good else "bad" if high < 0 else ""
    x = _Scale(low=-1.0, high=1.0, begin=4.0, end=156.0)
    parts = [
        element("line", class_="zero", x1=x(0), x2=x(0), y1=0, y2=18),
        element("line", class_="span", x1=x(low), x2=x(high), y1=9, y2=9),
        element("circle", class_="value", cx=x(value), cy=9, r=4),
    ]
    return element("svg", *parts, class_=f"interval {css}", viewBox="0 0 160 18", role="img", data_tip=tip)


def padded(low: float, high: float) -> tuple[float, float]:
    """Returns the range with a margin of 6 %; values that are never negative get an axis that begins just below 0."""
    margin = 0.06 * (high - low) or 0.5 * abs(high) or 1.0
    return (max(low - margin, -0.04 * (high + margin)) if low >= 0 else low - margin), high + margin


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Returns round values inside a range, at most about `count`; only `low` for an empty range."""
    if not 1e-300 < high - low < math.inf:
        return [low]
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough)
    first = math.ceil(low / step)
    return [index * step for index in range(first, math.floor(high / step + 1e-9) + 1)]


def _y_axis(y: _Scale) -> list[Markup]:
    parts: list[Markup] = []
    for tick in ticks(y.low, y.high):
        parts.append(element("line", class_="grid", x1=LEFT, x2=WIDTH - RIGHT, y1=y(tick), y2=y(tick)))
        parts.append(_text(LEFT - 6, y(tick) + 4, _value(tick), "end"))
    return parts


def _x_title(text: str) -> Markup:
    return _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 4, text, "middle")


def _line(line: Series, x: _Scale, y: _Scale, x_label: str) -> Markup:
    """Draws a line with a dot at each point; where points are means, a band spans the lowest and highest values."""
    size = math.ceil(len(line.points) / MAX_POINTS)
    parts = [line.points[begin : begin + size] for begin in range(0, len(line.points), size)]
    points = [(part[len(part) // 2][0], fmean(b for _, b in part)) for part in parts]
    css = f"s{line.color % NUM_COLORS}" + (" dashed" if line.is_dashed else "")
    radius = "3" if len(points) <= 40 else "1.8"
    of = f" (mean of {size})" if size > 1 else ""
    dots = [  # by hand: there are hundreds of them in a chart
        Markup('<circle class="dot {}" cx="{}" cy="{}" r="{}" data-tip="{}"/>').format(
            css, number(x(a)), number(y(b)), radius, f"{line.name}: {_value(b)}{of} at {_value(a)} {x_label}"
        )
        for a, b in points
    ]
    band, spans = Markup(""), line.spans
    if size > 1:
        spans = [(a, *_ends([b for _, b in part])) for (a, _), part in zip(points, parts, strict=True)]
    if len(spans) > 1:
        around = _path([*((a, high) for a, _, high in spans), *((a, low) for a, low, _ in reversed(spans))], x, y)
        band = element("path", class_=f"band s{line.color % NUM_COLORS}", d=f"{around}Z")
    return band + element("path", class_=f"line {css}", d=_path(points, x, y)) + Markup("").join(dots)


def _ends(values: Sequence[float]) -> tuple[float, float]:
    return min(values), max(values)


def _path(points: Points, x: _Scale, y: _Scale) -> str:
    return " ".join(f"{'L' if index else 'M'}{number(x(a))} {number(y(b))}" for index, (a, b) in enumerate(points))


def _mark(mark: Mark, x: _Scale) -> Markup:
    at, css = x(mark.x), f"mark s{mark.color % NUM_COLORS}"
    line = element("line", class_=css, x1=at, x2=at, y1=TOP, y2=HEIGHT - BOTTOM)
    hit = element("rect", class_="hit", x=at - 5, y=TOP, width=10, height=HEIGHT - TOP - BOTTOM)
    return element("g", line, hit, data_tip=mark.text)


def _box(left: float, top: float, width: float, height: float, css: str, tip: str) -> Markup:
    sizes = {"width": max(width, 0.5), "height": max(height, 0.5)}
    return element("rect", class_=f"bar {css}", x=left, y=top, **sizes, rx=2, data_tip=tip)


def _text(x: float, y: float, text: str, anchor: str, css: str = "tick") -> Markup:
    return element("text", text, class_=css, x=x, y=y, text_anchor=anchor)


def _svg(parts: Sequence[Markup], height: float, width: float = WIDTH) -> Markup:
    return element("svg", *parts, viewBox=f"0 0 {number(width)} {number(height)}", role="img")


def _nothing() -> Markup:
    return element("p", "nothing was measured", class_="nothing")


def element(name: str, *children: str, **attributes: str | float) -> Markup:
    """Returns an element; `class_` is written as class, `text_anchor` as text-anchor. Plain text is escaped."""
    shown = [
        Markup(' {}="{}"').format(key.rstrip("_").replace("_", "-"), each if isinstance(each, str) else number(each))
        for key, each in attributes.items()
    ]
    return Markup("<{0}{1}>{2}</{0}>").format(name, Markup("").join(shown), Markup("").join(children))


def number(value: float) -> str:
    """Formats a finite coordinate with at most two decimals."""
    assert math.isfinite(value), value
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _value(value: float) -> str:
    """Formats a value with three significant digits; integers and values from 1000 on in full, in groups of three."""
    if value == int(value) or abs(value) >= 1000:
        return f"{value:,.0f}".replace(",", " ")
    if abs(value) < 1e-3:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value:.3g}"
