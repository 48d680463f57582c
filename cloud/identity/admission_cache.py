"""Callers that were admitted a moment ago, so that not every call of theirs reads the database.

An answer is dropped after the commit of a change of any principal, and in any case after `KEEP_S`;
an answer to a query from before a change is never stored. So a revoked name is rejected as soon as
its revocation is answered, as it would be without this cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from triplane.cloud.identity.principals import Principal

KEEP_S: Final = 1.0
MOST: Final = 10_000
"""Largest number of certificates whose answers are kept."""

Key = tuple[str, str, bytes]
"""(serial number, name, SHA-256 of the public key)."""


class AdmissionCache:
    """Answers by certificate. Call all methods from the same event loop, or the same thread."""

    def __init__(self) -> None:
        self._changes = 0
        self._answers: dict[Key, tuple[Principal, float]] = {}

    @property
    def changes(self) -> int:
        """The number of changes so far: read it before the database, and pass it to `keep`."""
        return self._changes

    def get(self, key: Key, now_s: float) -> Principal | None:
        """Return an answer that is still valid, or None."""
        answer = self._answers.get(key)
        # The lower bound drops the answer if the clock was set back, which would prolong its life.
        if answer is None or not answer[1] - KEEP_S <= now_s < answer[1]:
            return None
        return answer[0]

    def keep(self, key: Key, who: Principal, *, expires_s: float, now_s: float, at: int) -> None:
        """Store an answer queried at change `at`. expires_s: when the certificate expires."""
        # Otherwise a principal changed while the database was read, and the answer may be out of
        # date.
        if at == self._changes:
            if len(self._answers) >= MOST:
                self._answers.clear()
            self._answers[key] = who, min(expires_s, now_s + KEEP_S)

    def forget(self) -> None:
        """Drop all answers, after a change was committed."""
        self._changes += 1
        self._answers.clear()
