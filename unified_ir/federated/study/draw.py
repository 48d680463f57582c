"""Two charts as self-contained SVG: dots of devices before and after, and lines over rounds.

No script, no font file, no external reference; the same data gives the same bytes. Colours are
Okabe and Ito's, told apart by readers with any colour vision, and names stand beside them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

from triplane.proto.errors import InvalidInput

WIDTH: Final = 760
HEIGHT: Final = 360
DASHES: Final = ("", "9 4", "3 3", "12 3 3 3")
"""Of lines one after another, so that one hides no other that runs along it."""
COLOURS: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
INK, SOFT, GRID = "#1f2933", "#52606d", "#e4e7eb"
FONT: Final = "font-family='system-ui, Helvetica, Arial, sans-serif'"
HALO: Final = "stroke='#ffffff' stroke-width='4' paint-order='stroke'"
MAX_DOTS: Final = 400
"""Devices drawn in one column; of more, every so many of those in order of accuracy."""
_LEFT, _RIGHT, _TOP, _BOTTOM = 48, 16, 56, 52

Scale = Callable[[float], float]


@dataclass(frozen=True, slots=True)
class Column:
    """Accuracy of the same devices before and after adaptation, in 0..1."""

    name: str
    group: str
    pairs: Sequence[tuple[float, float]]


def dots(columns: Sequence[Column], title: str, *, decimals: int = 0) -> str:
    """A line per device from its accuracy before adaptation to that after; bars are means.

    decimals: of the means' percentages.
    """
    values = [value for c in columns for pair in c.pairs for value in pair]
    _check(values, title)
    lowest = min(80, math.floor(10 * min(values)) * 10)
    at = _scale(lowest / 100, 1.0, HEIGHT - _BOTTOM, _TOP + 8)
    body = [_text(16, 26, title, size=15, weight="600")]
    body.append(_text(16, 44, "accuracy on a device's own held-out samples, %", colour=SOFT))
    for percent in range(lowest, 101, 10):
        y = at(percent / 100)
        body.append(_rule(_LEFT, y, WIDTH - _RIGHT, y, GRID, 1))
        body.append(_text(_LEFT - 8, y + 4, str(percent), anchor="end", colour=SOFT))
    room = (WIDTH - _LEFT - _RIGHT) / len(columns)
    names = list(dict.fromkeys(column.name for column in columns))
    for i, column in enumerate(columns):
        colour = COLOURS[names.index(column.name) % len(COLOURS)]
        body += _column(column, _LEFT + i * room, room, at, colour, decimals)
    return _page(title, body)


def lines(series: Mapping[str, Sequence[tuple[float, float]]], title: str, y_label: str) -> str:
    """Named lines over rounds."""
    points = [p for line in series.values() for p in line]
    _check([c for p in points for c in p], title)
    ticks = _ticks([y for _, y in points])
    xs = _ticks([x for x, _ in points])
    right = WIDTH - 24 - min(150, 8 + 7 * max(map(len, series)))
    at_x = _scale(xs[0], xs[-1], _LEFT, right)
    at_y = _scale(ticks[0], ticks[-1], HEIGHT - _BOTTOM, _TOP)
    body = [_text(16, 26, title, size=15, weight="600"), _text(16, 44, y_label, colour=SOFT)]
    for y in ticks:
        body.append(_rule(_LEFT, at_y(y), right, at_y(y), GRID, 1))
        body.append(_text(_LEFT - 8, at_y(y) + 4, f"{y:g}", anchor="end", colour=SOFT))
    below = HEIGHT - _BOTTOM + 18
    body += [_text(at_x(x), below, f"{x:g}", anchor="middle", colour=SOFT) for x in xs]
    body.append(_text((_LEFT + right) / 2, HEIGHT - 12, "round", anchor="middle", colour=SOFT))
    ends = _apart({name: at_y(line[-1][1]) for name, line in series.items()})
    for i, (name, line) in enumerate(series.items()):
        colour = COLOURS[i % len(COLOURS)]
        path = " ".join(f"{_f(at_x(x))},{_f(at_y(y))}" for x, y in line)
        dash = DASHES[i % len(DASHES)]
        dashed = f" stroke-dasharray='{dash}'" if dash else ""
        body.append(
            f"<polyline points='{path}' fill='none' stroke='{colour}' stroke-width='2'{dashed}/>"
        )
        body.append(_text(right + 8, ends[name] + 4, name, colour=colour, weight="600"))
    return _page(title, body)


def _column(
    column: Column, x: float, room: float, at: Scale, colour: str, decimals: int
) -> list[str]:
    left, right, middle = x + room * 0.25, x + room * 0.75, x + room / 2
    shown = _thinned(sorted(column.pairs))
    opacity = _f(max(0.12, min(0.55, 12 / len(shown))))
    body = [
        f"<g stroke='{colour}' fill='{colour}' opacity='{opacity}'>"
        f"<line x1='{_f(left)}' y1='{_f(at(b))}' x2='{_f(right)}' y2='{_f(at(a))}'/>"
        f"<circle cx='{_f(left)}' cy='{_f(at(b))}' r='3' fill='#ffffff'/>"
        f"<circle cx='{_f(right)}' cy='{_f(at(a))}' r='3'/></g>"
        for b, a in shown
    ]
    for place, k in ((left, 0), (right, 1)):
        mean = math.fsum(pair[k] for pair in column.pairs) / len(column.pairs)
        body.append(_rule(place - 9, at(mean), place + 9, at(mean), INK, 3))
        label = _text(
            place, at(mean) - 7, f"{100 * mean:.{decimals}f}", anchor="middle", weight="700"
        )
        body.append(label.replace("<text ", f"<text {HALO} ", 1))
    below = HEIGHT - _BOTTOM + 18
    body.append(_text(middle, below, column.name, anchor="middle", colour=colour, weight="600"))
    body.append(_text(middle, below + 17, column.group, anchor="middle", colour=SOFT, size=12))
    return body


def _thinned(pairs: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    return pairs[:: math.ceil(len(pairs) / MAX_DOTS)]


def _page(title: str, body: Sequence[str]) -> str:
    size = f"width='{WIDTH}' height='{HEIGHT}' viewBox='0 0 {WIDTH} {HEIGHT}'"
    head = f"<svg xmlns='http://www.w3.org/2000/svg' {size} role='img' {FONT}>"
    paper = f"<rect width='{WIDTH}' height='{HEIGHT}' fill='#ffffff'/>"
    return "\n".join([head, f"<title>{escape(title)}</title>", paper, *body, "</svg>"]) + "\n"


def _rule(x1: float, y1: float, x2: float, y2: float, colour: str, width: int) -> str:
    ends = f"x1='{_f(x1)}' y1='{_f(y1)}' x2='{_f(x2)}' y2='{_f(y2)}'"
    return f"<line {ends} stroke='{colour}' stroke-width='{width}'/>"


def _text(
    x: float, y: float, text: str, *, anchor: str = "start", colour: str = INK, size: int = 13,
    weight: str = "400",
) -> str:  # fmt: skip
    return (
        f"<text x='{_f(x)}' y='{_f(y)}' text-anchor='{anchor}' fill='{colour}' "
        f"font-size='{size}' font-weight='{weight}'>{escape(text)}</text>"
    )


def _ticks(values: Sequence[float], about: int = 5) -> list[float]:
    """Round numbers, 1, 2 or 5 times a power of ten apart, that enclose the values."""
    low, high = min(values), max(values)
    raw = (high - low or abs(high) or 1.0) / about
    power = 10.0 ** math.floor(math.log10(raw))
    apart = next(power * m for m in (1, 2, 5, 10) if power * m >= raw * (1 - 1e-9))
    first, last = math.floor(low / apart + 1e-9), math.ceil(high / apart - 1e-9)
    return [round(k * apart, 12) for k in range(first, max(first + 1, last) + 1)]


def _scale(low: float, high: float, start: float, end: float) -> Scale:
    return lambda value: start + (value - low) * (end - start) / (high - low)


def _apart(ends: Mapping[str, float], least: float = 16.0) -> dict[str, float]:
    """Heights of names, moved down just enough that no two touch; up again from the lower edge."""
    placed: dict[str, float] = {}
    last = -math.inf
    for name, y in sorted(ends.items(), key=lambda pair: pair[1]):
        last = placed[name] = max(y, last + least)
    limit = float(HEIGHT - _BOTTOM)
    for name in reversed(list(placed)):
        placed[name] = min(placed[name], limit)
        limit = placed[name] - least
    return placed


def _check(values: Sequence[float], title: str) -> None:
    if not values or not all(math.isfinite(v) for v in values):
        raise InvalidInput(f"chart {title!r} needs finite numbers, got {list(values)[:8]}")


def _f(x: float) -> str:
    return f"{x:.2f}".rstrip("0").rstrip(".")
