"""What a module's metadata says in JSON, such as the names of its classes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from triplane.proto.errors import InvalidInput

LABELS: Final = "labels"
"""The key of class names: a list for the first result, or an object with a list for each result."""


def json_of(meta: Mapping[str, str], key: str) -> Any:
    """Return the value under a key, None if there is none. InvalidInput: it is not JSON."""
    text = meta.get(key, "null")
    try:
        value = json.loads(text)
        # Half a surrogate pair, which JSON can escape, is text that nobody can print or store.
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"the module's meta {key!r} must be JSON, got {text[:80]!r}") from error
    return value


def labels_of(meta: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names of the classes of the first result; none if the model has no list of them.

    InvalidInput: the text is not JSON.
    """
    labels = json_of(meta, LABELS)
    return tuple(map(str, labels)) if isinstance(labels, list) else ()


def labels_if_any(meta: Mapping[str, str]) -> tuple[str, ...]:
    """Return the same; none for another text, which any other tool may have written there."""
    try:
        return labels_of(meta)
    except InvalidInput:
        return ()
