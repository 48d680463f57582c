"""An outline as one HTML page to fold, unfold, move, zoom and search; it needs no network."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html import escape
from importlib.resources import files
from typing import Any, Final

from triplane.unified_ir.cli.drawing.item import Item
from triplane.unified_ir.cli.drawing.placing import lines_of, size_of
from triplane.unified_ir.cli.drawing.svg import style, title_of

_PLACE: Final = re.compile(r"\[\[(POLICY|TITLE|DATA)\]\]")
_INLINE: Final = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


def page(root: Item) -> str:
    """Return the page; the texts of the model are data in it, never markup or script."""
    template = files("triplane.unified_ir.cli.drawing").joinpath("page.html").read_text("utf-8")
    template = template.replace("/* boxes.css */", style())
    data = json.dumps(_data(root), separators=(",", ":"), ensure_ascii=True)
    texts = {
        "POLICY": _policy(template),
        "TITLE": escape(title_of(root)),
        # No text can end the element: JSON may write any character as an escape.
        "DATA": data.replace("<", "\\u003c"),
    }
    # In one pass, so that a name that looks like a place to fill stays a name.
    return _PLACE.sub(lambda match: texts[match[1]], template)


def _policy(template: str) -> str:
    """Return a policy that allows the page's own script and style and nothing else."""
    sources: dict[str, list[str]] = {"script": [], "style": []}
    for kind, text in _INLINE.findall(template):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        sources[kind].append(f"'sha256-{digest}'")
    return (
        f"default-src 'none'; script-src {' '.join(sources['script'])}; "
        f"style-src {' '.join(sources['style'])}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


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
