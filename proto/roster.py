"""The roster: which identity keys belong to real devices.

People sign it, as a target of the role `plans`, so a cloud that was stolen cannot invent devices:
its own keys are not listed. The identity key of a device is the ECDSA P-256 key of its certificate,
which it keeps when it renews that certificate. Signers, cloud and devices parse the roster here, so
that no input can be read in two ways. This module checks no signatures.
"""

import base64
import hashlib
import json
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from triplane.proto.errors import InvalidInput
from triplane.proto.signed_fields import is_count, shown

ROSTER_PATH: Final = "plans/roster.json"
MAX_ROSTER_KEYS: Final = 20_000
DIGEST_BYTES: Final = 32
MAX_ROSTER_BYTES: Final = 128 + MAX_ROSTER_KEYS * DIGEST_BYTES // 3 * 4 + 8
"""Base64, and the other fields. A list of the role `plans` has 4 MiB for this and all plans."""
MAX_VERSION: Final = (1 << 31) - 1
MAX_TIME_S: Final = 253_402_300_799
"""The last second of the year 9999."""
_FIELDS: Final = {"format", "version", "expires_s", "digests"}


@dataclass(frozen=True, slots=True)
class Roster:
    """The devices that people have confirmed.

    version: never goes back on a device. expires_s: seconds since 1970. digests: SHA-256 of each
    public key, which is its SubjectPublicKeyInfo in DER.
    """

    version: int
    expires_s: int
    digests: frozenset[bytes]

    def __post_init__(self) -> None:
        if not is_count(self.version, 1, MAX_VERSION):
            raise InvalidInput(
                f"a roster's version is 1 to {MAX_VERSION}, got {shown(self.version)}"
            )
        if not is_count(self.expires_s, 1, MAX_TIME_S):
            raise InvalidInput(
                f"a roster expires at 1 to {MAX_TIME_S} seconds since 1970, got "
                f"{shown(self.expires_s)}"
            )
        _check_digests(self.digests)

    def holds(self, public_key: bytes) -> bool:
        """Return whether the key, SubjectPublicKeyInfo in DER, is of a device in the roster."""
        return hashlib.sha256(public_key).digest() in self.digests

    def is_expired(self, now_s: float) -> bool:
        """Return whether it counts no longer."""
        return now_s >= self.expires_s

    @property
    def summary(self) -> str:
        """One line for people."""
        ends = datetime.fromtimestamp(self.expires_s, UTC)
        devices = "1 device" if len(self.digests) == 1 else f"{len(self.digests)} devices"
        return f"roster {self.version} of {devices}, valid until {ends:%Y-%m-%d}"

    def text(self) -> str:
        """Return the roster as JSON, the only text of it."""
        digests = base64.b64encode(b"".join(sorted(self.digests))).decode()
        fields = {"version": self.version, "expires_s": self.expires_s, "digests": digests}
        return json.dumps({"format": 1} | fields, sort_keys=True) + "\n"

    @classmethod
    def parse(cls, text: str) -> "Roster":
        """Read a roster. InvalidInput unless it is exactly as `text` writes it."""
        if len(text) > MAX_ROSTER_BYTES:
            raise InvalidInput(
                f"a roster has at most {MAX_ROSTER_KEYS} devices in {MAX_ROSTER_BYTES} bytes of "
                f"JSON, got {len(text)}"
            )
        try:
            fields = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InvalidInput(f"a roster is a JSON object: {error}") from error
        if not isinstance(fields, dict) or set(fields) != _FIELDS:
            raise InvalidInput(f"a roster has the fields {sorted(_FIELDS)}, got {shown(fields)}")
        if not is_count(fields["format"], 1, 1):
            raise InvalidInput(f"a roster has format 1, got {shown(fields['format'])}")
        roster = cls(fields["version"], fields["expires_s"], _unpacked(fields["digests"]))
        # Repeated digests, another order or spacing would be a second text of the same roster.
        if roster.text() != text:
            raise InvalidInput("a roster is sorted and written in its canonical form only")
        return roster


def _check_digests(digests: frozenset[bytes]) -> None:
    if len(digests) > MAX_ROSTER_KEYS:
        raise InvalidInput(
            f"a roster has at most {MAX_ROSTER_KEYS} devices, got {len(digests)}; remove those "
            "that are gone"
        )
    for digest in digests:
        if len(digest) != DIGEST_BYTES:
            raise InvalidInput(
                f"a roster lists SHA-256 digests of {DIGEST_BYTES} bytes, got {shown(digest)}"
            )


def _unpacked(text: object) -> frozenset[bytes]:
    try:
        data = base64.b64decode(str(text), validate=True)
    except ValueError as error:
        raise InvalidInput(f"digests are one text in base64: {error}") from error
    if len(data) % DIGEST_BYTES:
        raise InvalidInput(f"digests have {DIGEST_BYTES} bytes each, got {len(data)} bytes in all")
    return frozenset(data[at : at + DIGEST_BYTES] for at in range(0, len(data), DIGEST_BYTES))
