"""Two charts as self-contained SVG: lines over a number, and horizontal bars.

No script, no font file, no external reference; the same data gives the same bytes. Colours are
Okabe and Ito's, told apart by readers with any colour vision; each line also has its name at its
end, so colour is never the only key.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Final

from triplane.proto.errors import InvalidInput

Points = Sequence[tuple[float, float]]

WIDTH: Final = 720
HEIGHT: Final = 380
COLOURS: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
INK, SOFT, GRID = "#1f2933", "#52606d", "#e4e7eb"
FONT: Final = "font-family='system-ui, Helvetica, Arial, sans-serif'"
_LEFT, _TOP, _BOTTOM = 64, 52, 56
_BAR, _GAP, _NAME = 20, 12, 190
_MAX_NAME: Final = 30
"""Characters of a bar's name that fit beside it."""


def line_chart(series: Mapping[str, Points], title: str, x_label: str, y_label: str) -> str:
    """Named lines through (x, y) points; at least one point in all, every number finite."""
    points = [p for line in series.values() for p in line]
    _check_finite([c for p in points for c in p], title)
    right = WIDTH - 24 - min(150, 8 + 7 * max(len(name) for name in series))
    x_ticks = _ticks([x for x, _ in points])
    y_ticks = _ticks([y for _, y in points])
    at_x = _scale(x_ticks, _LEFT, right)
    at_y = _scale(y_ticks, HEIGHT - _BOTTOM, _TOP + 16)
    body = [_text(24, 28, title, size=16, weight="600")]
    for y in y_ticks:
        body.append(_rule(_LEFT, at_y(y), right, at_y(y)))
        body.append(_text(_LEFT - 8, at_y(y) + 4, _number(y), anchor="end", colour=SOFT))
    below = HEIGHT - _BOTTOM + 20
    body += [_text(at_x(x), below, _number(x), anchor="middle", colour=SOFT) for x in x_ticks]
    body.append(_text((_LEFT + right) / 2, HEIGHT - 12, x_label, anchor="middle", colour=SOFT))
    body.append(_text(24, 46, y_label, colour=SOFT))
    ends = _apart([at_y(line[-1][1]) for line in series.values() if line])
    drawn = [(name, line) for name, line in series.items() if line]
    for i, ((name, line), end) in enumerate(zip(drawn, ends, strict=True)):
        body += _line([(at_x(x), at_y(y)) for x, y in line], name, end, COLOURS[i % len(COLOURS)])
    return _page(WIDTH, HEIGHT, title, body)


def bar_chart(
    bars: Mapping[str, float], title: str, unit: str, *, note: str = "", highlight: str = ""
) -> str:
    """Horizontal bars of values >= 0, each with its value; `note` stands below.

    highlight: the name of a bar in another colour.
    """
    _check_finite(list(bars.values()), title)
    if min(bars.values()) < 0:
        raise InvalidInput(f"bars of {title!r} are >= 0, got {min(bars.values())}")
    top = max(bars.values()) or 1.0
    room = WIDTH - _NAME - 24 - 90
    body = [_text(24, 28, title, size=16, weight="600")]
    for i, (name, value) in enumerate(bars.items()):
        y = _TOP + i * (_BAR + _GAP)
        width = max(1.0, room * value / top)
        colour = COLOURS[name == highlight]
        body.append(_text(_NAME - 10, y + 14.5, _short(name), anchor="end"))
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
    """Charts below each other on one page, under a heading and lines of text."""
    body = [_text(24, 36, title, size=18, weight="700")]
    y = 60.0
    for line in subtitle:
        body.append(_text(24, y, line, colour=SOFT, size=13))
        y += 20
    for chart in charts:
        body.append(chart.replace("<svg ", f"<svg y='{_f(y)}' ", 1))
        y += _height_of(chart)
    return _page(WIDTH, y + 8, title, body)


def _height_of(chart: str) -> float:
    return float(chart.split("height='", 1)[1].split("'", 1)[0])


def _page(width: float, height: float, title: str, body: Sequence[str]) -> str:
    size = f"width='{_f(width)}' height='{_f(height)}' viewBox='0 0 {_f(width)} {_f(height)}'"
    head = f"<svg xmlns='http://www.w3.org/2000/svg' {size} role='img' {FONT}>"
    paper = f"<rect width='{_f(width)}' height='{_f(height)}' fill='#ffffff'/>"
    return "\n".join([head, f"<title>{escape(title)}</title>", paper, *body, "</svg>"]) + "\n"


def _line(points: Sequence[tuple[float, float]], name: str, end: float, colour: str) -> list[str]:
    path = " ".join(f"{_f(x)},{_f(y)}" for x, y in points)
    marks = [
        f"<circle cx='{_f(x)}' cy='{_f(y)}' r='3' fill='{colour}'/>" for x, y in points
    ] if len(points) <= 40 else []  # fmt: skip
    stroke = f"stroke='{colour}' stroke-width='2' stroke-linejoin='round'"
    return [
        f"<polyline points='{path}' fill='none' {stroke}/>",
        *marks,
        _text(points[-1][0] + 10, end + 4, name, colour=colour, weight="600"),
    ]


def _rule(x1: float, y1: float, x2: float, y2: float) -> str:
    return (
        f"<line x1='{_f(x1)}' y1='{_f(y1)}' x2='{_f(x2)}' y2='{_f(y2)}' stroke='{GRID}' "
        "stroke-width='1'/>"
    )


def _text(
    x: float, y: float, text: str, *, anchor: str = "start", colour: str = INK,
    size: int = 13, weight: str = "400",
) -> str:  # fmt: skip
    return (
        f"<text x='{_f(x)}' y='{_f(y)}' text-anchor='{anchor}' fill='{colour}' "
        f"font-size='{size}' font-weight='{weight}'>{escape(text)}</text>"
    )


def _apart(ends: Sequence[float], least: float = 16.0) -> list[float]:
    """Label heights moved down just enough that no two touch."""
    placed = dict.fromkeys(range(len(ends)), 0.0)
    last = -math.inf
    for i in sorted(placed, key=lambda i: ends[i]):
        last = max(ends[i], last + least)
        placed[i] = last
    return list(placed.values())


def _ticks(values: Sequence[float], about: int = 5) -> list[float]:
    """Round numbers, 1, 2 or 5 times a power of ten apart, that enclose the values."""
    low, high = min(values), max(values)
    spread = high - low or abs(high) or 1.0
    raw = spread / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= raw * (1 - 1e-9))
    first = math.floor(low / step + 1e-9)
    last = max(first + 1, math.ceil(high / step - 1e-9))
    return [round(k * step, 12) for k in range(first, last + 1)]


def _scale(ticks: Sequence[float], start: float, end: float) -> Callable[[float], float]:
    slope = (end - start) / (ticks[-1] - ticks[0])
    return lambda value: start + (value - ticks[0]) * slope


def _check_finite(values: Sequence[float], title: str) -> None:
    if not values or not all(math.isfinite(v) for v in values):
        raise InvalidInput(f"chart {title!r} needs finite numbers, got {list(values)[:8]}")


def _short(name: str) -> str:
    return name if len(name) <= _MAX_NAME else name[: _MAX_NAME - 1] + "…"


def _number(value: float) -> str:
    """At most four significant digits, thousands apart."""
    if value and abs(value) < 1e-3:
        return f"{value:.1e}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _f(x: float) -> str:
    return f"{x:.2f}".rstrip("0").rstrip(".")
