"""Checks of layer sizes, where the caller's names are known."""

from __future__ import annotations

from triplane.proto.errors import InvalidInput


def positive(layer: str, **sizes: int) -> tuple[int, ...]:
    """The sizes in order, each a whole number of at least 1."""
    for name, size in sizes.items():
        if type(size) is not int or size < 1:
            raise InvalidInput(f"{layer} needs {name} to be a whole number >= 1, got {size!r}")
    return tuple(sizes.values())
