"""Names that a misspelt one probably stands for, and checks of options that are one of a few."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final

from triplane.proto.errors import InvalidInput

MAX_COMPARED: Final = 10_000
"""Names that are compared; a longer list is cut, since the comparison is slow."""
MAX_NAME: Final = 200
"""Characters of a name that are compared."""


def nearest(name: object, names: Iterable[str]) -> str | None:
    """Return the one of `names` that is most like `name`, whatever its case; None if none is."""
    import difflib  # only errors need it

    wanted = str(name)[:MAX_NAME].lower()
    by_text = {n[:MAX_NAME].lower(): n for n, _ in zip(names, range(MAX_COMPARED), strict=False)}
    matches = difflib.get_close_matches(wanted, by_text, n=1)
    return by_text[matches[0]] if matches else None


def suggestion(name: object, names: Iterable[str]) -> str:
    """Return "; did you mean 'NAME'?" for the nearest name, "" if there is none."""
    close = nearest(name, names)
    return "" if close is None else f"; did you mean {close!r}?"


def check_choice(what: str, value: object, choices: Collection[str]) -> None:
    """Raise InvalidInput, with the nearest choice, unless `value` is one of the choices."""
    if isinstance(value, str) and value in choices:
        return
    listed = ", ".join(map(repr, choices))
    raise InvalidInput(
        f"{what} must be one of {listed}, got {value!r:.80}{suggestion(value, choices)}"
    )
