"""Charts as self-contained SVG: lines, horizontal bars, and dots before and after a change.

No script, no font file, no external reference; the same data gives the same bytes. The colours are
Okabe and Ito's, which readers with any colour vision can distinguish; names stand beside lines,
bars and dots, so colour is never the only key.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Final

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.files.html_table import printable

Points = Sequence[tuple[float, float]]
Scale = Callable[[float], float]

WIDTH: Final = 720
HEIGHT: Final = 380
COLOURS: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
INK, SOFT, GRID = "#1f2933", "#52606d", "#e4e7eb"
DASHES: Final = ("", "9 4", "3 3", "12 3 3 3")
"""Line styles in turn, so that a line never hides another that coincides with it."""
HALO: Final = "stroke='#ffffff' stroke-width='4' paint-order='stroke'"
MAX_DOTS: Final = 400
"""Limit for the pairs drawn in one column; of more, every n-th is drawn, sorted by first value."""
FONT: Final = "font-family='system-ui, Helvetica, Arial, sans-serif'"
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 24, 52, 56
_BAR, _GAP, _NAME = 20, 12, 190
_MAX_NAME: Final = 30
"""Characters of a bar's name that fit beside it."""
_MAX_LINE_NAME: Final = 20
"""Characters of a line's name that fit at its end."""
_MORE_DIGITS: Final = range(5, 18)
"""Significant digits of labels that would be equal with fewer."""
_LEAST_STEP: Final = 1e-300
"""Least distance of ticks; numbers that are closer lose their precision."""
_MOST: Final = 1e300
"""Limit for values, whose differences must be finite too."""


@dataclass(frozen=True, slots=True)
class Chart:
    """A drawing: notebooks show it, `save` writes it. svg: the text of the SVG."""

    svg: str

    def __repr__(self) -> str:
        return f"Chart of {len(self.svg):,} bytes; save it with .save('chart.svg')"

    def _repr_svg_(self) -> str:
        return self.svg

    def save(self, path: str | Path) -> None:
        """Write the SVG to a file."""
        Path(path).write_text(self.svg, encoding="utf-8")


def line_chart(series: Mapping[str, Points], title: str, x_label: str, y_label: str) -> str:
    """Draw named lines through (x, y) points: at least one point in all, every number finite.

    The horizontal axis ends where the lines do. y_label: "" where the title says it all.
    """
    points = [p for line in series.values() for p in line]
    _check_finite([c for p in points for c in p], title)
    drawn = {name: line for name, line in series.items() if line}
    longest = max(len(_cut(name, _MAX_LINE_NAME)) for name in drawn)
    right = WIDTH - _RIGHT - min(150, 8 + 7 * longest)
    x_ticks, x_ends = _ticks_within([x for x, _ in points])
    y_ticks = _ticks([y for _, y in points])
    at_x = _scale(x_ends, _LEFT, right)
    at_y = _scale(y_ticks, HEIGHT - _BOTTOM, _TOP + 16)
    body = [_text(24, 28, title, size=16, weight="600")]
    for y, label in tick_texts(y_ticks).items():
        body.append(_rule(_LEFT, at_y(y), right, at_y(y)))
        body.append(_text(_LEFT - 8, at_y(y) + 4, label, anchor="end", colour=SOFT))
    below = HEIGHT - _BOTTOM + 20
    body += [_text(at_x(x), below, _number(x), anchor="middle", colour=SOFT) for x in x_ticks]
    body.append(_text((_LEFT + right) / 2, HEIGHT - 12, x_label, anchor="middle", colour=SOFT))
    body += [_text(24, 46, y_label, colour=SOFT)] if y_label else []
    heights = _label_heights({name: at_y(line[-1][1]) for name, line in drawn.items()})
    for i, (name, line) in enumerate(drawn.items()):
        body += _line([(at_x(x), at_y(y)) for x, y in line], name, heights[name], i)
    return _page(WIDTH, HEIGHT, title, body)


@dataclass(frozen=True, slots=True)
class Column:
    """Values before and after a change, of the members of one group."""

    name: str
    group: str
    pairs: Points


def dot_chart(columns: Sequence[Column], title: str, y_label: str, *, decimals: int = 0) -> str:
    """Draw a line for each pair of shares in 0..1, in percent; bars are means.

    decimals: number of decimals of the means.
    """
    lowest = min(80, math.floor(10 * min(_values(columns, title))) * 10)
    ticks = {percent / 100: str(percent) for percent in range(lowest, 101, 10)}
    return _dots(columns, title, y_label, ticks, lambda share: f"{100 * share:.{decimals}f}")


def value_chart(columns: Sequence[Column], title: str, y_label: str) -> str:
    """Draw a line for each pair of finite numbers; bars are means."""
    ticks = tick_texts(_ticks(_values(columns, title)))
    return _dots(columns, title, y_label, ticks, _number)


def _values(columns: Sequence[Column], title: str) -> list[float]:
    values = [value for c in columns for pair in c.pairs for value in pair]
    _check_finite(values, title)
    return values


def _dots(
    columns: Sequence[Column],
    title: str,
    y_label: str,
    ticks: Mapping[float, str],
    label: Callable[[float], str],
) -> str:
    """Draw a line for each pair, from the value before to that after. label: of a mean."""
    at = _scale(list(ticks), HEIGHT - _BOTTOM, _TOP + 8)
    body = [_text(24, 28, title, size=16, weight="600"), _text(24, 46, y_label, colour=SOFT)]
    for tick, text in ticks.items():
        body.append(_rule(_LEFT, at(tick), WIDTH - _RIGHT, at(tick)))
        body.append(_text(_LEFT - 8, at(tick) + 4, text, anchor="end", colour=SOFT))
    room = (WIDTH - _LEFT - _RIGHT) / len(columns)
    names = list(dict.fromkeys(column.name for column in columns))
    for i, column in enumerate(columns):
        colour = COLOURS[names.index(column.name) % len(COLOURS)]
        body += _column(column, _LEFT + i * room, room, at, colour, label)
    return _page(WIDTH, HEIGHT, title, body)


def bar_chart(
    bars: Mapping[str, float], title: str, unit: str, *, note: str = "", highlight: str = ""
) -> str:
    """Draw horizontal bars of values >= 0, each with its value; `note` stands below.

    highlight: the name of a bar in another colour.
    """
    _check_finite(list(bars.values()), title)
    if min(bars.values()) < 0:
        raise InvalidInput(f"bars of {title!r} must be >= 0, got {min(bars.values())}")
    top = max(bars.values()) or 1.0
    room = WIDTH - _NAME - 24 - 90
    body = [_text(24, 28, title, size=16, weight="600")]
    for i, (name, value) in enumerate(bars.items()):
        y = _TOP + i * (_BAR + _GAP)
        width = max(1.0, room * value / top)
        colour = COLOURS[name == highlight]
        body.append(_text(_NAME - 10, y + 14.5, _cut(name, _MAX_NAME), anchor="end"))
        body.append(
            f"<rect x='{_NAME}' y='{_f(y)}' width='{_f(width)}' height='{_BAR}' rx='2' "
            f"fill='{colour}'/>"
        )
        label = f"{_number(value)} {unit}".strip()
        body.append(_text(_NAME + width + 8, y + 14.5, label, colour=SOFT))
    height = _TOP + len(bars) * (_BAR + _GAP) + 12
    if note:
        body.append(_text(24, height + 6, note, colour=SOFT, size=12))
        height += 22
    return _page(WIDTH, height, title, body)


def stack(charts: Sequence[str], title: str, subtitle: Sequence[str] = ()) -> str:
    """Place charts below each other on one page, under a heading and lines of text."""
    body = [_text(24, 36, title, size=18, weight="700")]
    y = 60.0
    for line in subtitle:
        body.append(_text(24, y, line, colour=SOFT, size=13))
        y += 20
    for chart in charts:
        body.append(chart.replace("<svg ", f"<svg y='{_f(y)}' ", 1))
        # Charts come from `_page`, whose first height is that of the whole chart.
        y += float(chart.split("height='", 1)[1].split("'", 1)[0])
    return _page(WIDTH, y + 8, title, body)


def _page(width: float, height: float, title: str, body: Sequence[str]) -> str:
    size = f"width='{_f(width)}' height='{_f(height)}' viewBox='0 0 {_f(width)} {_f(height)}'"
    head = f"<svg xmlns='http://www.w3.org/2000/svg' {size} role='img' {FONT}>"
    paper = f"<rect width='{_f(width)}' height='{_f(height)}' fill='#ffffff'/>"
    heading = f"<title>{escape(printable(title))}</title>"
    return "\n".join([head, heading, paper, *body, "</svg>"]) + "\n"


def _line(points: Points, name: str, label_y: float, number: int) -> list[str]:
    colour, dash = COLOURS[number % len(COLOURS)], DASHES[number % len(DASHES)]
    path = " ".join(f"{_f(x)},{_f(y)}" for x, y in points)
    label = _cut(name, _MAX_LINE_NAME)
    marks = [
        f"<circle cx='{_f(x)}' cy='{_f(y)}' r='3' fill='{colour}'/>" for x, y in points
    ] if len(points) <= 40 else []  # fmt: skip
    dashed = f" stroke-dasharray='{dash}'" if dash else ""
    stroke = f"stroke='{colour}' stroke-width='2' stroke-linejoin='round'{dashed}"
    return [
        f"<polyline points='{path}' fill='none' {stroke}/>",
        *marks,
        _haloed(_text(points[-1][0] + 10, label_y + 4, label, colour=colour, weight="600")),
    ]


def _column(
    column: Column, x: float, room: float, at: Scale, colour: str, text: Callable[[float], str]
) -> list[str]:
    left, right, middle = x + room * 0.4, x + room * 0.64, x + room / 2
    shown = sorted(column.pairs)[:: math.ceil(len(column.pairs) / MAX_DOTS)]
    opacity = _f(max(0.12, min(0.55, 12 / len(shown))))
    body = [
        f"<g stroke='{colour}' fill='{colour}' opacity='{opacity}'>"
        f"<line x1='{_f(left)}' y1='{_f(at(b))}' x2='{_f(right)}' y2='{_f(at(a))}'/>"
        f"<circle cx='{_f(left)}' cy='{_f(at(b))}' r='3' fill='#ffffff'/>"
        f"<circle cx='{_f(right)}' cy='{_f(at(a))}' r='3'/></g>"
        for b, a in shown
    ]
    for place, outwards, anchor, k in ((left, -12, "end", 0), (right, 12, "start", 1)):
        mean = math.fsum(pair[k] for pair in column.pairs) / len(column.pairs)
        body.append(_rule(place - 9, at(mean), place + 9, at(mean), INK, 3))
        # Beside the dots, which a label above its bar would hide.
        label = _text(place + outwards, at(mean) + 4, text(mean), anchor=anchor, weight="700")
        body.append(_haloed(label))
    below = HEIGHT - _BOTTOM + 18
    body.append(_text(middle, below, column.name, anchor="middle", colour=colour, weight="600"))
    body.append(_text(middle, below + 17, column.group, anchor="middle", colour=SOFT, size=12))
    return body


def _rule(x1: float, y1: float, x2: float, y2: float, colour: str = GRID, width: int = 1) -> str:
    ends = f"x1='{_f(x1)}' y1='{_f(y1)}' x2='{_f(x2)}' y2='{_f(y2)}'"
    return f"<line {ends} stroke='{colour}' stroke-width='{width}'/>"


def _text(
    x: float, y: float, text: str, *, anchor: str = "start", colour: str = INK,
    size: int = 13, weight: str = "400",
) -> str:  # fmt: skip
    return (
        f"<text x='{_f(x)}' y='{_f(y)}' text-anchor='{anchor}' fill='{colour}' "
        f"font-size='{size}' font-weight='{weight}'>{escape(printable(text))}</text>"
    )


def _haloed(text: str) -> str:
    """Return the text with a white rim, where it may lie on lines."""
    return text.replace("<text ", f"<text {HALO} ", 1)


def _cut(name: str, most: int) -> str:
    return name if len(name) <= most else name[: most - 1] + "…"


def _label_heights(ends: Mapping[str, float], least: float = 16.0) -> dict[str, float]:
    """Return label heights by name, moved down until none overlap, then up from the edge."""
    heights: dict[str, float] = {}
    last = -math.inf
    for name, y in sorted(ends.items(), key=lambda pair: pair[1]):
        last = heights[name] = max(y, last + least)
    limit = float(HEIGHT - _BOTTOM)
    for name in reversed(list(heights)):
        heights[name] = min(heights[name], limit)
        limit = heights[name] - least
    # One pass downwards separates labels, one upwards keeps the lowest inside the chart.
    return heights


def _ticks(values: Sequence[float], about: int = 5) -> list[float]:
    """Return round numbers that enclose the values, in steps of 1, 2 or 5 times a power of ten."""
    low, high = min(values), max(values)
    step = _step(high - low or abs(high) or 1.0, about)
    # The margins of 1e-9 absorb rounding, which would otherwise skip a step or add an empty tick.
    first = math.floor(low / step + 1e-9)
    last = max(first + 1, math.ceil(high / step - 1e-9))
    return _multiples(step, first, last)


def _ticks_within(values: Sequence[float], about: int = 6) -> tuple[list[float], list[float]]:
    """Return round numbers between the least and the largest value, and the ends of the axis."""
    low, high = min(values), max(values)
    if low == high:
        ticks = _ticks(values)
        return ticks, [ticks[0], ticks[-1]]
    step = _step(high - low, about)
    if all(float(value).is_integer() for value in values):
        step = max(1.0, step)  # there is no epoch 1.5
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return _multiples(step, first, last), [low, high]


def _multiples(step: float, first: int, last: int) -> list[float]:
    # Without the error of the product, as of 3 * 0.1, also where the step itself is tiny.
    digits = max(12, 12 - math.floor(math.log10(step)))
    return [round(k * step, digits) for k in range(first, last + 1)]


def _step(spread: float, about: int) -> float:
    raw = max(spread / about, _LEAST_STEP)
    power = 10.0 ** math.floor(math.log10(raw))
    return next(power * m for m in (1, 2, 5, 10) if power * m >= raw * (1 - 1e-9))


def _scale(domain: Sequence[float], start: float, end: float) -> Scale:
    """Return the map from the first and last number of the domain to `start` and `end`."""
    slope = (end - start) / (domain[-1] - domain[0])
    return lambda value: start + (value - domain[0]) * slope


def _check_finite(values: Sequence[float], title: str) -> None:
    if not values or not all(abs(v) <= _MOST for v in values):
        raise InvalidInput(
            f"chart {title!r} needs finite numbers up to {_MOST:g}, got {list(values)[:8]}"
        )


def _number(value: float) -> str:
    """Format with at most four significant digits and thousands separators."""
    if value and abs(value) < 1e-3:
        return f"{value:.1e}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def tick_texts(ticks: Sequence[float], text: Callable[[float], str] = _number) -> dict[float, str]:
    """Return the label of each tick, with more digits than `text` gives where labels are equal."""
    for digits in (0, *_MORE_DIGITS):
        labels = {tick: f"{tick:,.{digits}g}" if digits else text(tick) for tick in ticks}
        if len(set(labels.values())) == len(labels):
            break
    return labels


def _f(x: float) -> str:
    # A fixed precision, so that the same data gives the same bytes on every machine.
    return f"{x:.2f}".rstrip("0").rstrip(".")


def round_ticks(values: Sequence[float]) -> list[float]:
    """Return round numbers that enclose the values, for an axis of another drawing."""
    return _ticks(values)


def number_text(value: float) -> str:
    """Format as these charts do: at most four significant digits, thousands separators."""
    return _number(value)
