"""Charts of the study report that keep their text at its size on every width of screen.

Marks are placed in percent of the plot, so the browser lays a chart out again where it is narrow.
Colours are classes (`s0` to `s6`), which the page's style sheet defines for light and for dark.
A mark with a `title` is shown with it under the pointer; the script of the page needs nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from typing import Final

from triplane.unified_ir.files.chart import MAX_DOTS, number_text, round_ticks, tick_texts
from triplane.unified_ir.files.html_table import printable

COLOURS: Final = 7
"""Number of colours of series; more series use them again."""
DASHES: Final = ("", "9 4", "3 3", "12 3 3 3")
"""Line styles in turn, so that a line never hides another that coincides with it."""
LEFT, RIGHT = 25.0, 75.0
"""Places of unadapted and adapted scores in a panel, in percent."""
MAX_MARKS: Final = 60
"""Limit for the devices of a panel that are drawn in full colour."""
MAX_LARGE: Final = 20
"""Limit for the points of a line that are drawn large."""
Format = Callable[[float], str]


@dataclass(frozen=True, slots=True)
class LinePoint:
    """A point of a line: the mean, and the range over seeds."""

    x: float
    y: float
    least: float
    most: float


@dataclass(frozen=True, slots=True)
class PanelDot:
    """The two scores of a device, and what its mark says. key: equal for marks of one device."""

    before: float
    after: float
    key: int
    title: str


@dataclass(frozen=True, slots=True)
class DotPanel:
    """Devices of one group after one algorithm. series: number of its colour."""

    name: str
    group: str
    series: int
    dots: Sequence[PanelDot]


@dataclass(frozen=True, slots=True)
class Axis:
    """The range of an axis and its labelled values."""

    low: float
    high: float
    labels: Mapping[float, str]

    def at(self, value: float) -> float:
        """Return the place of a value in percent from the lower end."""
        return 100 * (value - self.low) / ((self.high - self.low) or 1.0)


def vertical(values: Sequence[float], text: Format) -> Axis:
    """Return an axis of round numbers around the values."""
    ticks = round_ticks(values)
    return Axis(ticks[0], ticks[-1], tick_texts(ticks, text))


def horizontal(values: Sequence[float]) -> Axis:
    """Return an axis that ends at the first and last value, with whole numbers in between."""
    low, high = min(values), max(values)
    ticks = [t for t in round_ticks(values) if low <= t <= high and t == int(t)]
    return Axis(low, high, {tick: number_text(tick) for tick in ticks})


def line_figure(
    lines: Mapping[str, Sequence[LinePoint]], y: Axis, title: str, note: str, text: Format
) -> str:
    """Return a chart over rounds of named lines, with a band from least to most where they differ.

    lines: at least one point. text: format of a value of the vertical axis.
    """
    x = horizontal([p.x for line in lines.values() for p in line])
    drawn = [(i, name, line) for i, (name, line) in enumerate(lines.items()) if line]
    # Bands below all lines.
    curves = "".join(draw(i, line, x, y) for draw in (_band, _curve) for i, _, line in drawn)
    marks = "".join(
        _marks(i, line, x, y, partial(_point_text, name, text)) for i, name, line in drawn
    )
    legend = "".join(_legend(i, name, text(line[-1].y)) for i, name, line in drawn)
    # A drawing without a fixed ratio stretches with the plot; its strokes do not.
    body = (
        "<svg class='stretched' viewBox='0 0 100 100' preserveAspectRatio='none' width='100%' "
        f"height='100%'>{curves}</svg>{marks}"
    )
    return (
        f"<figure class='chart'><figcaption><b>{_e(title)}</b><span>{_e(note)}</span></figcaption>"
        f"<ul class='legend'>{legend}</ul>{_plot(body, x, y, title)}"
        "<p class='axis'>round</p></figure>"
    )


def _legend(i: int, name: str, value: str) -> str:
    return f"<li>{_swatch(i)}<span>{_e(name)} <b>{_e(value)}</b></span></li>"


def dot_panels(rows: Sequence[Sequence[DotPanel]], title: str, note: str, text: Format) -> str:
    """Return a small chart per panel in rows, all with the same vertical axis."""
    dots = [dot for row in rows for panel in row for dot in panel.dots]
    y = vertical([v for dot in dots for v in (dot.before, dot.after)], text)
    figures = "".join(
        f"<div>{''.join(_panel(panel, y, text) for panel in row)}</div>" for row in rows
    )
    head = f"<h3>{_e(title)}</h3><p>{_e(note)}</p>"
    return f"<section class='panels'>{head}{figures}</section>"


def _panel(panel: DotPanel, y: Axis, text: Format) -> str:
    count = len(panel.dots)
    ordered = sorted(panel.dots, key=lambda dot: (dot.before, dot.after))
    shown = ordered[:: math.ceil(count / MAX_DOTS)]
    faint = "faint" if len(shown) > MAX_MARKS else ""
    before, after = (math.fsum(v) / count for v in _sides(panel.dots))
    body = "".join(_pair(dot, y) for dot in shown)
    means = "".join(
        f"<line class='mean' x1='{at - 7}%' x2='{at + 7}%' y1='{_p(100 - y.at(mean))}' "
        f"y2='{_p(100 - y.at(mean))}'/>"
        for at, mean in ((LEFT, before), (RIGHT, after))
    )
    x = Axis(0, 100, {LEFT: "before", RIGHT: "adapted"})
    means_text = f"mean {_e(text(before))} → <b>{_e(text(after))}</b>"
    head = (
        f"<figcaption><b>{_swatch(panel.series)}{_e(panel.name)}</b>"
        f"<span>{_e(panel.group)}, {count} scores</span><span>{means_text}</span></figcaption>"
    )
    marks = f"<g class='s{panel.series % COLOURS} {faint}'>{body}</g>{means}"
    name = f"{panel.name}, {panel.group} devices"
    return f"<figure class='panel'>{head}{_plot(marks, x, y, name)}</figure>"


def _sides(dots: Sequence[PanelDot]) -> tuple[list[float], list[float]]:
    return [dot.before for dot in dots], [dot.after for dot in dots]


def _pair(dot: PanelDot, y: Axis) -> str:
    b, a = _p(100 - y.at(dot.before)), _p(100 - y.at(dot.after))
    return (
        f"<g class='mark' data-key='{dot.key}'><title>{_e(dot.title)}</title>"
        f"<line class='link' x1='{LEFT}%' x2='{RIGHT}%' y1='{b}' y2='{a}'/>"
        f"<circle class='open' cx='{LEFT}%' cy='{b}' r='4'/>"
        f"<circle cx='{RIGHT}%' cy='{a}' r='4'/></g>"
    )


def _band(i: int, line: Sequence[LinePoint], x: Axis, y: Axis) -> str:
    """Return the area from least to most, or nothing where all seeds agree."""
    if all(p.most == p.least for p in line):
        return ""
    edge = [(p.x, p.most) for p in line] + [(p.x, p.least) for p in reversed(line)]
    return f"<polygon class='band s{i % COLOURS}' points='{_path(edge, x, y)}'/>"


def _curve(i: int, line: Sequence[LinePoint], x: Axis, y: Axis) -> str:
    dash = DASHES[i % len(DASHES)]
    dashed = f" stroke-dasharray='{dash}'" if dash else ""
    path = _path([(p.x, p.y) for p in line], x, y)
    return f"<polyline class='line s{i % COLOURS}' points='{path}'{dashed}/>"


def _path(points: Sequence[tuple[float, float]], x: Axis, y: Axis) -> str:
    return " ".join(f"{_f(x.at(a))},{_f(100 - y.at(b))}" for a, b in points)


def _marks(
    i: int, line: Sequence[LinePoint], x: Axis, y: Axis, say: Callable[[LinePoint], str]
) -> str:
    radius = 3 if len(line) <= MAX_LARGE else 1.5
    return f"<g class='s{i % COLOURS}'>" + "".join(
        f"<circle class='mark' cx='{_p(x.at(p.x))}' cy='{_p(100 - y.at(p.y))}' r='{radius}'>"
        f"<title>{_e(say(p))}</title></circle>"
        for p in line
    ) + "</g>"  # fmt: skip


def _point_text(name: str, text: Format, p: LinePoint) -> str:
    over = f" ({text(p.least)} to {text(p.most)} over seeds)" if p.most > p.least else ""
    return f"{name}, round {number_text(p.x)}: {text(p.y)}{over}"


def _plot(body: str, x: Axis, y: Axis, title: str) -> str:
    """Return the plot of marks with its grid and axes: three drawings beside each other."""
    heights = {_p(100 - y.at(tick)): label for tick, label in y.labels.items()}
    grid = "".join(f"<line class='grid' x1='0' x2='100%' y1='{at}' y2='{at}'/>" for at in heights)
    left = "".join(f"<text x='100%' y='{at}' dy='4'>{_e(t)}</text>" for at, t in heights.items())
    below = "".join(f"<text x='{_p(x.at(k))}' y='14'>{_e(t)}</text>" for k, t in x.labels.items())
    return (
        f"<div class='plot'><svg class='left' aria-hidden='true'>{left}</svg>"
        f"<svg class='area' role='img' aria-label='{_e(title)}'>{grid}{body}</svg>"
        f"<svg class='below' aria-hidden='true'>{below}</svg></div>"
    )


def _swatch(i: int) -> str:
    dash = DASHES[i % len(DASHES)]
    dashed = f" stroke-dasharray='{dash}'" if dash else ""
    return (
        f"<svg class='swatch s{i % COLOURS}' aria-hidden='true'>"
        f"<line class='line' x1='0' x2='100%' y1='50%' y2='50%'{dashed}/></svg>"
    )


def _e(text: str) -> str:
    return escape(printable(text), quote=True)


def _p(share: float) -> str:
    return f"{_f(share)}%"


def _f(x: float) -> str:
    # A fixed precision, so that the same data gives the same bytes on every machine.
    return f"{x:.2f}".rstrip("0").rstrip(".")
