"""The content security policy of the product's own pages (W3C Content Security Policy Level 3).

A page runs its own script and style, which are named by their hashes instead of 'unsafe-inline',
so a script that was injected into it does not run.
"""

from __future__ import annotations

import base64
import hashlib
import re
from typing import Final

_INLINE: Final = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


def content_policy(template: str, *allowed: str) -> str:
    """Return a policy that allows the template's own scripts and styles and nothing else.

    template: HTML before any text from outside is filled in, since every `<script>` and `<style>`
    in it is allowed. allowed: further directives, such as "img-src data:".
    """
    hashes: dict[str, list[str]] = {"script": [], "style": []}
    for kind, text in _INLINE.findall(template):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        hashes[kind].append(f"'sha256-{digest}'")
    own = (f"{kind}-src {' '.join(of_kind)}" for kind, of_kind in hashes.items() if of_kind)
    return "; ".join(
        ("default-src 'none'", *own, *allowed, "base-uri 'none'", "form-action 'none'")
    )
