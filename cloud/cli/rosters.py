"""`triplane cloud roster`: requests and output."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from triplane.cloud.cli.connection import Calls
from triplane.cloud.cli.remote import remote_at
from triplane.cloud.cli.text import enum_text, shown, table
from triplane.cloud.trust.initial import TRUSTED_ROOT
from triplane.cloud.trust.rosters import Digests, change_roster, published_roster
from triplane.cloud.trust.signing import trusted_root
from triplane.proto.errors import Conflict, InvalidInput, NotFound
from triplane.proto.identity_pb2 import ListPrincipalsRequest
from triplane.proto.roster import MAX_ROSTER_KEYS, Roster

MAX_FILE_BYTES: Final = MAX_ROSTER_KEYS * 200
MOST_LINES: Final = 20
"""Largest number of devices that are printed; `--json` has all."""
_DIGEST: Final = re.compile(r"[0-9a-fA-F]{64}")
_LINE: Final = re.compile(r"\s*([0-9a-fA-F]{64})(?:[\s,;#].*)?")


def describe_roster(cloud: Calls, keys: Path | None) -> tuple[dict[str, Any], str]:
    """Describe the roster, verified from the folder's root if there is one, else the cloud's."""
    with remote_at(cloud) as remote:
        first = trusted_root(keys) if keys else remote.get(TRUSTED_ROOT)
        roster = published_roster(remote, first)
    names = _devices(cloud)
    listed = roster.digests if roster else frozenset[bytes]()
    unknown = sorted(listed - set(names.values()))
    devices = [(name, digest.hex(), digest in listed) for name, digest in sorted(names.items())]
    record = _record(roster) | {
        "enrolled": [{"name": name, "key": key, "listed": is_in} for name, key, is_in in devices],
        "unknown": [digest.hex() for digest in unknown],
    }
    head = roster.summary if roster else "no roster; sign one: triplane cloud roster add"
    rows = [(name, key, "yes" if is_in else "no") for name, key, is_in in devices]
    lines = [head, table(("DEVICE", "KEY", "LISTED"), rows)] if rows else [head]
    if unknown:
        lines.append(f"listed keys of no enrolled device: {len(unknown)}")
    return record, "\n".join(lines)


def _record(roster: Roster | None) -> dict[str, Any]:
    if roster is None:
        return {"version": 0, "expires_s": 0, "devices": 0}
    count = len(roster.digests)
    return {"version": roster.version, "expires_s": roster.expires_s, "devices": count}


def add_devices(
    cloud: Calls, *, devices: Sequence[str], file: Path | None, every: bool, **options: Any
) -> tuple[dict[str, Any], str]:
    """Sign a roster with these devices as well."""
    names = _devices(cloud)
    wanted = _wanted(names, devices, file) | (set(names.values()) if every else set())
    if not wanted:
        raise InvalidInput("name the devices to add, or give --file or --all")
    return _sign(cloud, lambda before: before | wanted, names, **options)


def remove_devices(
    cloud: Calls, *, devices: Sequence[str], file: Path | None, gone: bool, **options: Any
) -> tuple[dict[str, Any], str]:
    """Sign a roster without these devices."""
    enrolled, names = _devices(cloud), _devices(cloud, revoked=True)
    wanted = _wanted(names, devices, file)
    if not wanted and not gone:
        raise InvalidInput("name the devices to remove, or give --file or --gone")

    def change(before: Digests) -> Digests:
        unlisted = sorted(wanted - before)
        if unlisted:
            raise NotFound(
                f"the roster does not list {unlisted[0].hex()}"
                f"{_owner(names, unlisted[0])}; triplane cloud roster show lists it"
            )
        return before - wanted - (before - set(enrolled.values()) if gone else frozenset())

    return _sign(cloud, change, names, **options)


def renew_roster(cloud: Calls, **options: Any) -> tuple[dict[str, Any], str]:
    """Sign the roster as it is."""

    def change(before: Digests) -> Digests:
        if not before:
            raise NotFound("there is no roster to renew; sign one: triplane cloud roster add")
        return before

    return _sign(cloud, change, _devices(cloud, revoked=True), **options)


def _devices(cloud: Calls, *, revoked: bool = False) -> dict[str, bytes]:
    """Return the digest of each device's key by name, as the cloud says. revoked: those too."""
    principals = cloud.identity.ListPrincipals(ListPrincipalsRequest()).principals
    return {
        principal.name: principal.key_sha256
        for principal in principals
        if enum_text(principal, "role") == "device"
        and principal.key_sha256
        and (revoked or not principal.revoked)
    }


def _wanted(names: Mapping[str, bytes], devices: Sequence[str], file: Path | None) -> set[bytes]:
    """Return the digests of devices by name, by digest and in a file."""
    wanted = set(_digests_in(file)) if file else set()
    for device in devices:
        if device in names:
            wanted.add(names[device])
        elif _DIGEST.fullmatch(device):
            wanted.add(bytes.fromhex(device))
        else:
            raise NotFound(
                f"no enrolled device {device[:80]!r}; `triplane cloud roster show` lists them, and "
                "a digest has 64 hexadecimal digits"
            )
    return wanted


def _digests_in(file: Path) -> Iterable[bytes]:
    with file.open("rb") as opened:
        data = opened.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise InvalidInput(f"{file} is larger than {MAX_FILE_BYTES} bytes")
    for number, line in enumerate(data.decode(errors="replace").splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = _LINE.fullmatch(line)
        if match is None:
            raise InvalidInput(
                f"{file}:{number}: a line begins with a digest of 64 hexadecimal digits, got "
                f"{line[:80]!r}"
            )
        yield bytes.fromhex(match[1])


def _sign(
    cloud: Calls,
    change: Callable[[Digests], Digests],
    names: Mapping[str, bytes],
    *,
    keys: Path,
    valid_s: float,
    dry_run: bool,
) -> tuple[dict[str, Any], str]:
    with remote_at(cloud) as remote:
        roster = published_roster(remote, trusted_root(keys))
        before = roster.digests if roster else frozenset[bytes]()
        after = change(before)
        changes = _changes(names, before, after)
        # Before anything is signed, so that it can still be interrupted.
        cloud.output.note("\n".join(_change_lines(changes)))
        record: dict[str, Any] = {"added": changes["+"], "removed": changes["-"]}
        if dry_run:
            return record | {
                "signed": False
            }, f"nothing is signed; the roster would have {len(after)} devices"

        def as_shown(now: Digests) -> Digests:
            if now != before:
                raise Conflict("another roster was published meanwhile; run the command again")
            return after

        done = change_roster(remote, as_shown, keys, valid_s=valid_s, progress=cloud.output.note)
    submitted = done.signing.submitted
    record |= _record(done.roster) | {"signed": True, "submitted": asdict(submitted)}
    if submitted.published:
        return record, f"{done.roster.summary}: published; devices take it within an hour"
    return record, (
        f"{done.roster.summary}: {submitted.signatures} of {submitted.threshold} signatures; the "
        "other signers run the same command"
    )


def _changes(
    names: Mapping[str, bytes], before: Digests, after: Digests
) -> dict[str, list[dict[str, str]]]:
    owners = {digest: name for name, digest in names.items()}
    return {
        sign: [{"key": d.hex(), "name": owners.get(d, "")} for d in sorted(digests)]
        for sign, digests in (("+", after - before), ("-", before - after))
    }


def _change_lines(changes: Mapping[str, Sequence[Mapping[str, str]]]) -> list[str]:
    lines = [
        f"{sign} {entry['key']}  {shown(entry['name']) or 'not enrolled'}"
        for sign, entries in changes.items()
        for entry in entries
    ]
    if len(lines) > MOST_LINES:
        lines = [*lines[:MOST_LINES], f"... and {len(lines) - MOST_LINES} more (--json: all)"]
    added, removed = (len(changes[sign]) for sign in "+-")
    return [*lines, f"devices added: {added}, removed: {removed}"]


def _owner(names: Mapping[str, bytes], digest: bytes) -> str:
    return next((f" of {shown(name)}" for name, d in names.items() if d == digest), "")
