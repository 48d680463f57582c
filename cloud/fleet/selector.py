"""Selectors of nodes: `site=factory,camera!=old`, terms joined by commas, or `all`.

`key=value` selects nodes with that label, `key!=value` all others, also those without the key. A
node is selected if all terms hold.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from triplane.proto.documents import check_label
from triplane.proto.errors import InvalidInput

ALL: Final = "all"
MAX_SELECTOR_CHARS: Final = 1024
_TERM: Final = re.compile(r"([^=!]*)(=|!=)([^=!]*)")


@dataclass(frozen=True, slots=True)
class Term:
    """One condition on one label."""

    key: str
    value: str
    wanted: bool

    def holds(self, labels: Mapping[str, str]) -> bool:
        """Return whether the condition holds for these labels."""
        return (labels.get(self.key) == self.value) is self.wanted


@dataclass(frozen=True, slots=True)
class Selector:
    """Conditions that all hold; none for every node."""

    terms: tuple[Term, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Selector:
        """Parse a selector; InvalidInput names the invalid term."""
        if len(text) > MAX_SELECTOR_CHARS:
            raise InvalidInput(f"a selector has at most {MAX_SELECTOR_CHARS} characters")
        if text.strip() == ALL:
            return cls()
        # An empty shell variable must not select the whole fleet.
        if not text.strip():
            raise InvalidInput('an empty selector is refused; write "all" for every node')
        return cls(tuple(_term(term.strip()) for term in text.split(",")))

    def matches(self, labels: Mapping[str, str]) -> bool:
        """Return whether all terms hold for these labels."""
        return all(term.holds(labels) for term in self.terms)


def _term(text: str) -> Term:
    match = _TERM.fullmatch(text)
    if match is None:
        raise InvalidInput(
            f"a selector's term is key=value or key!=value, got {text!r}; "
            "join terms by commas, as site=factory,camera!=old"
        )
    key, sign, value = (part.strip() for part in match.groups())
    check_label(key, value)
    return Term(key, value, sign == "=")
