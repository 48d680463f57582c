"""Translate an error of python-tuf's client into an `AttemptRefused` of one kind, with the values.

The client only distinguishes classes of errors. Which attack it was depends on the bytes that
caused the error; they are parsed again here, unverified, only for the message.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from tuf.api import exceptions as errors

from triplane.proto.errors import TriplaneError, Unavailable
from triplane.proto.signed.metadata import Client, Fetcher, limit_bytes, parsed
from triplane.proto.signed.refusal import AttemptRefused

ClientError = errors.RepositoryError | errors.DownloadError


@dataclass(frozen=True, slots=True)
class Failure:
    """An error, and the file that was fetched last before it."""

    error: ClientError
    client: Client
    name: str
    data: bytes

    @property
    def role(self) -> str:
        """The role in the file name."""
        return self.name.removesuffix(".json").rpartition(".")[2]


def explain(error: ClientError, client: Client, fetcher: Fetcher) -> TriplaneError:
    """Return an AttemptRefused, or Unavailable if the link failed."""
    name, data = fetcher.last
    failure = Failure(error, client, name, data)
    row = next(row for kind, row in ROWS if isinstance(error, kind))
    try:
        return row(failure)
    except AttemptRefused as refusal:  # the bytes cannot even be parsed
        return refusal


def _endless(f: Failure) -> TriplaneError:
    if len(f.data) <= limit_bytes(f.role):  # longer than its pinned length only
        return _pinned(f)
    text = f"{f.name} has {len(f.data)} bytes, more than its limit: {f.error}"
    return AttemptRefused("endless-data", text)


def _unavailable(f: Failure) -> TriplaneError:
    cause = f.error.__cause__
    return (
        cause if isinstance(cause, AttemptRefused) else Unavailable(f"{f.name}: {cause or f.error}")
    )


def _unsigned(f: Failure) -> TriplaneError:
    metadata = parsed(f.role, f.data)
    result = f.client.judged(f.role, metadata)
    signers = ", ".join(keyid[:12] for keyid in metadata.signatures) or "none"
    return AttemptRefused(
        "threshold" if result.signed else "signature",
        f"{f.name} (version {metadata.signed.version}) has {len(result.signed)} valid signatures "
        f"of {result.threshold} that the role {f.role} needs; it is signed by key ids {signers}",
    )


def _expired(f: Failure) -> TriplaneError:
    gone = f.client.expired()
    if not gone:
        signed = parsed(f.role, f.data).signed
        gone = [f"{f.role} {signed.version} expired {signed.expires:%Y-%m-%d %H:%M:%S}"]
    now = f"{f.client.time:%Y-%m-%d %H:%M:%S} UTC"
    return AttemptRefused("freeze", f"{'; '.join(gone)}; here it is {now}")


def _version(f: Failure) -> TriplaneError:
    version = parsed(f.role, f.data).signed.version
    says = f"{f.name} says version {version}"
    # TUF requires roots to be followed one by one, so only the next version number is valid.
    if f.role == "root":
        verified = f.client.root_version
        kind = "rollback" if version <= verified else "fast-forward"
        return AttemptRefused(kind, f"{says}, the next root is {verified + 1}")
    # No other role pins the timestamp's version, so it can only be a rollback.
    pinned = version if f.role == "timestamp" else f.client.pinned_version(f.role)
    if version != pinned:
        return AttemptRefused("mix-and-match", f"{says}, verified metadata names version {pinned}")
    return AttemptRefused("rollback", f"{says}, older than what was verified before: {f.error}")


def _pinned(f: Failure) -> TriplaneError:
    try:
        metadata = parsed(f.role, f.data)
        is_genuine = bool(f.client.judged(f.role, metadata))
    except AttemptRefused:
        is_genuine = False
    if not is_genuine:
        text = f"{f.name} is damaged or forged, and not the file that is named: {f.error}"
        return AttemptRefused("signature", text)
    return AttemptRefused(
        "mix-and-match",
        f"{f.name} is genuine (version {metadata.signed.version}), but not the file that verified "
        f"metadata names (version {f.client.pinned_version(f.role)}): {f.error}",
    )


def _other(f: Failure) -> TriplaneError:
    parsed(f.role, f.data)
    kind = "rollback" if f.role == "snapshot" else "mix-and-match"
    return AttemptRefused(kind, f"{f.name}: {f.error}")


# An error's class stands before its base: the first row that matches decides.
ROWS: Final[tuple[tuple[type[Exception], Callable[[Failure], TriplaneError]], ...]] = (
    (errors.DownloadLengthMismatchError, _endless),
    (errors.DownloadError, _unavailable),
    (errors.UnsignedMetadataError, _unsigned),
    (errors.ExpiredMetadataError, _expired),
    (errors.BadVersionNumberError, _version),
    (errors.LengthOrHashMismatchError, _pinned),
    (errors.RepositoryError, _other),
)
