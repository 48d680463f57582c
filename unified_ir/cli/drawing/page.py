"""An outline as one HTML page to fold, unfold, move, zoom and search; it needs no network."""

from __future__ import annotations

import json
import re
from html import escape
from importlib.resources import files
from typing import Any, Final

from triplane.unified_ir.cli.drawing.item import Item
from triplane.unified_ir.cli.drawing.placing import lines_of, size_of
from triplane.unified_ir.cli.drawing.svg import style, title_of
from triplane.unified_ir.files.content_policy import content_policy

_PLACE: Final = re.compile(r"\[\[(POLICY|TITLE|DATA)\]\]")


def page(root: Item) -> str:
    """Return the page; the texts of the model are data in it, never markup or script."""
    template = files("triplane.unified_ir.cli.drawing").joinpath("page.html").read_text("utf-8")
    template = template.replace("/* boxes.css */", style())
    data = json.dumps(_data(root), separators=(",", ":"), ensure_ascii=True)
    texts = {
        "POLICY": content_policy(template, "img-src data:"),
        "TITLE": escape(title_of(root)),
        # No text can end the element: JSON may write any character as an escape.
        "DATA": data.replace("<", "\\u003c"),
    }
    # In one pass, so that a name that looks like a place to fill stays a name.
    return _PLACE.sub(lambda match: texts[match[1]], template)


def _data(root: Item) -> dict[str, Any]:
    """Return the boxes column by column; a text is the number of a string."""
    numbers: dict[str, int] = {}

    def number(text: str) -> int:
        return numbers.setdefault(text, len(numbers))

    items = [*root.walk()]
    return {
        "kind": [number(i.kind) for i in items],
        "lines": [[*map(number, lines_of(i))] for i in items],
        "size": [size_of(i) for i in items],
        "tip": [[*map(number, i.tip)] for i in items],
        "sources": [[s.number for s in i.sources] for i in items],
        "parent": [-1 if i.parent is None else i.parent.number for i in items],
        "groups": {
            i.number: {
                "rows": i.layers.rows,
                "links": i.layers.links,
                "back": i.layers.back,
                "upward": i.upward,
                "opened": i.opened,
                "times": i.times,
            }
            for i in items
            if i.children
        },
        "strings": [*numbers],
    }
