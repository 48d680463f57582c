"""Names of models, aliases and targets, and references to a version by them."""

import re
from dataclasses import dataclass
from typing import Final

from triplane.proto.errors import InvalidInput
from triplane.proto.signed_fields import NAME

LATEST: Final = "latest"
"""Reserved alias of the newest version; nobody can set it."""
MAX_VERSION: Final = 999_999_999

_NAME: Final = re.compile(NAME)
_NUMBER: Final = re.compile(r"[1-9][0-9]{0,8}")


@dataclass(frozen=True, slots=True)
class Reference:
    """A version by its number, or by an alias of its model ("latest" among them)."""

    model: str
    version: int | None = None
    alias: str = LATEST

    @classmethod
    def parse(cls, text: str) -> "Reference":
        """Parse `digits`, `digits@latest`, `digits@stable` or `digits@3`. Raises InvalidInput."""
        model, separator, rest = text.partition("@")
        check_name("model", model)
        if not separator:
            return cls(model)
        if _NUMBER.fullmatch(rest):
            return cls(model, int(rest), "")
        check_name("alias", rest)
        return cls(model, None, rest)

    def __str__(self) -> str:
        return f"{self.model}@{self.version or self.alias}"


def check_name(what: str, name: str) -> None:
    """Raise InvalidInput unless `name` is a valid name of a `what`."""
    if not _NAME.fullmatch(name):
        raise InvalidInput(
            f"a name ({what}) has 1 to 63 of a-z, 0-9, '.', '_', '-' and begins with a letter "
            f"or digit, got {name[:80]!r}"
        )


def check_alias(name: str) -> None:
    """Raise InvalidInput if an alias would hide a version number or the newest version."""
    check_name("alias", name)
    # `digits@3` must always mean version 3.
    if name == LATEST or name.isdecimal():
        raise InvalidInput(
            f"an alias is neither {LATEST!r}, which is always the newest version, nor a number, "
            f"got {name!r}"
        )
