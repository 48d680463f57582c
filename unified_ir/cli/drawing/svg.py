"""An outline as a self-contained SVG: what the page shows when it is opened; no script, no font."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from importlib.resources import files

from triplane.unified_ir.cli.drawing.item import Item
from triplane.unified_ir.cli.drawing.phases import BACKWARD
from triplane.unified_ir.cli.drawing.placing import LINE, Placed, lines, lines_of, placed

MARGIN = 24
TOP = 44


def svg(root: Item) -> str:
    """Return the picture; the titles of boxes, which browsers show as tips, hold the details."""
    box = placed(root)
    width, height = max(box.width + 2 * MARGIN, 480), box.height + TOP + MARGIN
    title = escape(title_of(root))
    size = f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="graph" {size}>',
        f"<title>{title}</title>",
        f"<style>{style()}</style>",
        '<rect width="100%" height="100%" style="fill: var(--ground)"/>',
        f'<text class="first" x="{MARGIN}" y="24">{title}</text>',
        f'<g transform="translate({(width - box.width) / 2:.1f},{TOP - MARGIN})">',
        *_inside(box),
        "</g>",
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def title_of(root: Item) -> str:
    """Return the title of the picture."""
    count = f"{root.name}: {root.nodes:,} node{'' if root.nodes == 1 else 's'}"
    # A gradient is taken of a rewritten forward pass (`passes.simplify`); the order of `construct`
    # is no longer known.
    is_rewritten = any(item.kind == BACKWARD for item in root.children)
    return f"{count}, simplified for its gradients" if is_rewritten else count


def style() -> str:
    """Return the style sheet of graphs, in the SVG as in the page."""
    return files("triplane.unified_ir.cli.drawing").joinpath("boxes.css").read_text("utf-8")


def _inside(box: Placed) -> Iterator[str]:
    """Yield links, then boxes, so that boxes cover the ends of lines."""
    for line in lines(box, upward=box.item is not None and box.item.upward):
        yield f'<path class="link{" back" if line.back else ""}" d="{line.path}"/>'
        if line.arrow:
            dy = -7 * line.arrow
            yield f'<path class="head" d="M{line.x:.1f} {line.y:.1f}l-4 {dy}h8z"/>'
    for spot in box.inner:
        if spot.item is not None:
            yield from _box(spot, spot.item)


def _box(box: Placed, item: Item) -> Iterator[str]:
    names = f"{item.kind}{' open' if box.inner else ' group' if item.children else ''}"
    tip = "\n".join(item.tip or lines_of(item))
    size = f'width="{box.width:.1f}" height="{box.height:.1f}" rx="{0 if item.children else 5}"'
    place = f"translate({box.x:.1f},{box.y:.1f})"
    yield f'<g class="{names}" data-n="{item.number}" transform="{place}">'
    yield f"<title>{escape(tip)}</title>"
    if item.times > 1 and not box.inner:
        yield f'<rect {size} x="4" y="4"/>'
    yield f"<rect {size}/>"
    first, *more = lines_of(item)
    if item.children:
        first = (
            "\N{BLACK DOWN-POINTING SMALL TRIANGLE} "
            if box.inner
            else "\N{BLACK RIGHT-POINTING SMALL TRIANGLE} "
        ) + first
    if box.inner:
        yield f'<text class="first" x="8" y="17">{escape(first)}</text>'
        yield from _inside(box)
    else:
        middle = f'x="{box.width / 2:.1f}" text-anchor="middle"'
        yield f'<text class="first" {middle} y="17">{escape(first)}</text>'
        for i, line in enumerate(more, 1):
            yield f'<text class="more" {middle} y="{17 + LINE * i}">{escape(line)}</text>'
    yield "</g>"
