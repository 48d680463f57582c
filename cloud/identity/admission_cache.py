"""Who was let in a moment ago, so that not every call of a busy name asks the database.

An answer is forgotten at the next change of any principal, after its commit, and in any case after
`KEEP_S`; one that was asked for before a change is never kept. So a revoked name is out as soon as
its revocation is answered, as without this.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from triplane.cloud.identity.principals import Principal

KEEP_S: Final = 1.0
MOST: Final = 10_000
"""Certificates whose answers are kept."""

Key = tuple[str, str, bytes]
"""(serial number, name, SHA-256 of the public key)."""


class AdmissionCache:
    """Answers by certificate. All methods belong to one event loop, or to no thread but one."""

    def __init__(self) -> None:
        self._changes = 0
        self._answers: dict[Key, tuple[Principal, float]] = {}

    @property
    def changes(self) -> int:
        """To be taken before the database is asked, and given to `keep`."""
        return self._changes

    def get(self, key: Key, now_s: float) -> Principal | None:
        """An answer that still holds."""
        answer = self._answers.get(key)
        if answer is None or not answer[1] - KEEP_S <= now_s < answer[1]:
            return None
        return answer[0]

    def keep(self, key: Key, who: Principal, *, expires_s: float, now_s: float, at: int) -> None:
        """Remember an answer asked for at change `at`; expires_s: of the certificate."""
        if at == self._changes:
            if len(self._answers) >= MOST:
                self._answers.clear()
            self._answers[key] = who, min(expires_s, now_s + KEEP_S)

    def forget(self) -> None:
        """Something changed, and is committed."""
        self._changes += 1
        self._answers.clear()
