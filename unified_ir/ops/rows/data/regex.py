"""Full matches of regular expressions in time linear in the text, like RE2.

A pattern from a model may be hostile: Python's own engine can take exponential time on it. Python's
parser reads the pattern, its parts become states, and all states that a prefix of the text can be
in are followed at once. Constructs that no finite automaton has (back references, lookaround) and
patterns of too many states are refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from re import _constants as codes  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any, Final

from triplane.proto.errors import InvalidInput

MAX_STATES: Final = 5_000
MAX_PATTERN_CHARS: Final = 1_000

Accepts = Callable[[str], bool]
Holds = Callable[[str, int], bool]
"""(text, position) -> whether a condition holds before that letter."""


class Automaton:
    """States numbered from 0, the first; the last one accepts."""

    def __init__(self, pattern: str) -> None:
        if len(pattern) > MAX_PATTERN_CHARS:
            raise InvalidInput(f"a pattern has at most {MAX_PATTERN_CHARS} letters")
        self.pattern = pattern
        self.steps: list[list[tuple[Accepts, int]]] = []
        self.free: list[list[tuple[Holds | None, int]]] = []
        try:
            self.end = self._items(parser.parse(pattern), self._state())
        except (re.error, RecursionError, OverflowError) as error:
            raise InvalidInput(f"the pattern {pattern[:80]!r} cannot be read: {error}") from error

    def matches(self, text: str) -> bool:
        """Return whether the whole text is in the language of the pattern."""
        # Thompson's simulation (1968): O(letters x states), whatever the pattern.
        now = self._closed({0}, text, 0)
        for i, letter in enumerate(text):
            reached = {to for s in now for accepts, to in self.steps[s] if accepts(letter)}
            now = self._closed(reached, text, i + 1)
            if not now:
                return False
        return self.end in now

    def _closed(self, states: set[int], text: str, at: int) -> set[int]:
        """Return the states and all states that they reach without reading a letter."""
        reached, waiting = set(states), list(states)
        while waiting:
            for holds, to in self.free[waiting.pop()]:
                # Conditions such as $ hold or not at this place, so they are tested here, not when
                # compiling.
                if to not in reached and (holds is None or holds(text, at)):
                    reached.add(to)
                    waiting.append(to)
        return reached

    def _state(self) -> int:
        if len(self.steps) >= MAX_STATES:
            raise InvalidInput(
                f"the pattern {self.pattern[:80]!r} takes more than {MAX_STATES} states"
            )
        self.steps.append([])
        self.free.append([])
        return len(self.steps) - 1

    def _items(self, items: Iterable[Any], start: int) -> int:
        for kind, argument in items:
            start = self._item(kind, argument, start)
        return start

    def _item(self, kind: Any, argument: Any, start: int) -> int:
        """Append one part of a pattern behind `start`; return the state where it ends."""
        if kind in {codes.SUBPATTERN, codes.ATOMIC_GROUP}:
            group = argument[-1] if kind is codes.SUBPATTERN else argument
            if kind is codes.SUBPATTERN and (argument[1] or argument[2]):
                raise self._refused("a flag inside")
            return self._items(group, start)
        if kind is codes.BRANCH:
            end = self._state()
            for branch in argument[1]:
                self.free[self._items(branch, start)].append((None, end))
            return end
        # Greedy or not makes no difference: only whether the whole text matches is asked.
        if kind in {codes.MAX_REPEAT, codes.MIN_REPEAT}:
            least, most, items = argument
            return self._repeated(items, least, most, start)
        end = self._state()
        if kind is codes.AT:
            self.free[start].append((self._known(_PLACES, argument), end))
        else:
            self.steps[start].append((self._letters(kind, argument), end))
        return end

    def _repeated(self, items: Any, least: int, most: int, start: int) -> int:
        # Repetitions are written out: x{2,4} becomes xxx?x?. A part without states, such as (?:),
        # is the same however often it is repeated; only states are limited, so it must end here.
        for _ in range(least):
            states = len(self.steps)
            start = self._items(items, start)
            if len(self.steps) == states:
                return start
        if most is codes.MAXREPEAT:
            loop = self._state()
            self.free[start].append((None, loop))
            self.free[self._items(items, loop)].append((None, loop))
            return loop
        end = self._state()
        for _ in range(most - least):
            states = len(self.steps)
            self.free[start].append((None, end))
            start = self._items(items, start)
            if len(self.steps) == states:
                break
        self.free[start].append((None, end))
        return end

    def _letters(self, kind: Any, argument: Any) -> Accepts:
        """Return which letters a part takes."""
        if kind is codes.LITERAL:
            return lambda c: ord(c) == argument
        if kind is codes.NOT_LITERAL:
            return lambda c: ord(c) != argument
        if kind is codes.ANY:
            return lambda c: c != "\n"
        if kind is codes.RANGE:
            low, high = argument
            return lambda c: low <= ord(c) <= high
        if kind is codes.CATEGORY:
            accepted: Accepts = self._known(_CATEGORIES, argument)
            return accepted
        if kind is codes.IN:
            negated = argument[0][0] is codes.NEGATE
            any_of = [self._letters(k, a) for k, a in argument[negated:]]
            return lambda c: any(f(c) for f in any_of) != negated
        raise self._refused(str(kind).lower())

    def _known(self, table: Mapping[Any, Any], part: Any) -> Any:
        if part not in table:
            raise self._refused(str(part).lower())
        return table[part]

    def _refused(self, what: str) -> InvalidInput:
        return InvalidInput(
            f"the pattern {self.pattern[:80]!r} has {what}, which cannot be matched in linear time"
        )


def _is_word(c: str) -> bool:
    return c.isascii() and (c.isalnum() or c == "_")


def _at_boundary(text: str, at: int) -> bool:
    before, after = text[at - 1 : at] if at else "", text[at : at + 1]
    return _is_word(before or " ") != _is_word(after or " ")


# fmt: off
_CATEGORIES: Final[Mapping[Any, Accepts]] = {  # of ASCII alone, as in RE2
    codes.CATEGORY_DIGIT:     lambda c: c.isascii() and c.isdigit(),
    codes.CATEGORY_NOT_DIGIT: lambda c: not (c.isascii() and c.isdigit()),
    codes.CATEGORY_SPACE:     lambda c: c in " \t\n\f\r",
    codes.CATEGORY_NOT_SPACE: lambda c: c not in " \t\n\f\r",
    codes.CATEGORY_WORD:      _is_word,
    codes.CATEGORY_NOT_WORD:  lambda c: not _is_word(c),
}
_PLACES: Final[Mapping[Any, Holds]] = {
    codes.AT_BEGINNING:        lambda text, at: at == 0,
    codes.AT_BEGINNING_STRING: lambda text, at: at == 0,
    codes.AT_END:              lambda text, at: at == len(text),
    codes.AT_END_STRING:       lambda text, at: at == len(text),
    codes.AT_BOUNDARY:         _at_boundary,
    codes.AT_NON_BOUNDARY:     lambda text, at: not _at_boundary(text, at),
}
# fmt: on


automaton = lru_cache(maxsize=64)(Automaton)
"""The automaton of a pattern; recent ones are remembered."""
