"""`triplane cloud keys`: work and output; the rules are in `triplane.cloud.trust`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from triplane.cloud.cli.connection import Calls
from triplane.cloud.cli.remote import Remote, remote_at
from triplane.cloud.cli.text import expiry_text, table, until
from triplane.cloud.trust.chain import Chain, newest_root, read
from triplane.cloud.trust.initial import TRUSTED_ROOT
from triplane.cloud.trust.keys import KeyFolder, read_public
from triplane.cloud.trust.repository import MAX_OVERTAKEN, Submitted
from triplane.cloud.trust.roles import DAY_S, ROLES, TOP, Lists
from triplane.cloud.trust.rotating import LISTING, rotate
from triplane.cloud.trust.signing import renew, replace_keys, trusted_root
from triplane.proto.errors import InvalidInput, NotFound
from triplane.proto.identity import check_name

ROOT_RENEWED_S: Final = 365 * DAY_S
KEY_CHARS: Final = 12
RENEWED: Final = ("targets", "release", "plans", "root")


def expiries_of(remote: Remote) -> dict[str, float]:
    """Return when what is published expires, as the cloud reports it; see `Chain.expiries`."""
    # Starts from the cloud's own root: good enough to display dates, never to sign.
    return read(remote.get, newest_root(remote.get, remote.get(TRUSTED_ROOT))).expiries


def describe_roles(cloud: Calls, folder: Path | None) -> tuple[dict[str, Any], str]:
    """Describe every role, verified from the folder's root if there is one, else the cloud's."""
    with remote_at(cloud) as remote:
        first = trusted_root(folder) if folder else remote.get(TRUSTED_ROOT)
        chain = read(remote.get, newest_root(remote.get, first))
    here = set(KeyFolder(folder).signers()) if folder else set()
    roles = [_role(chain, role, here) for role in ROLES if role in chain.roles]
    headings = ("ROLE", "KEPT", "SIGNERS", "VERSION", "SIGNED", "CONTENT", "ENDS", "KEYS")
    return {"roles": roles}, table(headings, [_row(role) for role in roles])


def _role(chain: Chain, role: str, here: set[str]) -> dict[str, Any]:
    metadata = chain.roles[role]
    named = chain.delegator(role).get_delegated_role(role)
    return {
        "role": role,
        "kept": ROLES[role].keys,
        "keys": [{"id": keyid, "here": keyid in here} for keyid in named.keyids],
        "threshold": named.threshold,
        "version": metadata.signed.version,
        "signed": role not in chain.targets or chain.is_signed(role),
        "content": len(metadata.signed.targets) if role in chain.targets else None,
        "expires_s": metadata.signed.expires.timestamp(),
    }


def _row(role: dict[str, Any]) -> tuple[str, ...]:
    keys = [f"{k['id'][:KEY_CHARS]}{' (here)' if k['here'] else ''}" for k in role["keys"]]
    return (
        role["role"],
        "by the cloud" if role["kept"] == "online" else "offline",
        f"{role['threshold']} of {len(keys)}",
        str(role["version"]),
        "yes" if role["signed"] else "NO",
        "" if role["content"] is None else str(role["content"]),
        until(role["expires_s"]),
        ", ".join(keys),
    )


def renew_roles(
    cloud: Calls, *, keys: Path, roles: Sequence[str], past: int
) -> tuple[dict[str, Any], str]:
    """Sign `roles` again; if empty, those that are due and whose keys are in the folder `keys`.

    past: sign repeatedly until the version is higher, unless others must sign too. NotFound: the
    folder has no such key.
    """
    # Raises NotFound first: without the root beside the keys nothing may be signed.
    trusted_root(keys)
    results: dict[str, Submitted] = {}
    with remote_at(cloud) as remote:
        for role in roles or _due(remote):
            try:
                results[role] = _renew_past(remote, role, keys, past)
            except NotFound as error:
                if roles:
                    raise
                # By default, renew the roles whose keys are here; other people have the other keys.
                cloud.output.note(f"{role}: not renewed: {error}")
        expiries = expiries_of(remote)
    if not results:
        raise NotFound(f"{keys} has no key of {', '.join(RENEWED)}; name the offline folder")
    record = {"roles": {role: asdict(submitted) for role, submitted in results.items()}}
    return record, "\n".join(
        f"{role} {submitted.version} published; it {expiry_text(expiries[role])}"
        if submitted.published
        else f"{role} {submitted.version}: {_signatures_text(submitted)}"
        for role, submitted in results.items()
    )


def _due(remote: Remote) -> list[str]:
    root_is_due = expiries_of(remote)["root"] - time.time() < ROOT_RENEWED_S
    known = expiries_of(remote).keys()  # an older cloud's metadata has no role plans
    return [role for role in RENEWED if role in known and (role != "root" or root_is_due)]


def _renew_past(remote: Remote, role: str, keys: Path, past: int) -> Submitted:
    """Sign the role again, until its version is above `past`."""
    submitted = _renew(remote, role, keys, past)
    if past - submitted.version > MAX_OVERTAKEN:
        raise InvalidInput(
            f"{role} is at version {submitted.version}, and {past} is more than {MAX_OVERTAKEN} "
            "versions ahead, the most that are signed at once; give --past a lower number"
        )
    # Version numbers grow by one per signature, as the cloud refuses to skip any.
    while submitted.published and submitted.version <= past:
        submitted = _renew(remote, role, keys, past)
    return submitted


def _renew(remote: Remote, role: str, keys: Path, past: int) -> Submitted:
    if role == "root":
        return replace_keys(remote, {}, keys, past=past).submitted
    return renew(remote, role, keys, past=past).submitted


def _signatures_text(submitted: Submitted) -> str:
    count = f"{submitted.signatures} of {submitted.threshold} signatures"
    return f"{count}; the other key holders run the same command"


def rotate_role(
    cloud: Calls,
    *,
    role: str,
    keys: Path,
    publics: Sequence[Path],
    threshold: int | None,
    stolen: bool,
) -> tuple[dict[str, Any], str]:
    """Give the role the keys in `publics`, or a new one that is made in the folder `keys`."""
    trusted_root(keys)
    decider = "root" if role in TOP else "targets"
    with remote_at(cloud) as remote:
        before = set(_keyids(remote, role))
        # Fails if the deciding key is not here, before a new key is made for nothing.
        KeyFolder(keys).of(_keyids(remote, decider), decider)
        files = list(publics) or [_new_key(keys, role)]
        new = [read_public(file) for file in files]
        lists = Lists.DROPPED if stolen else Lists.CARRIED
        rotation = rotate(remote, role, new, keys, threshold=threshold, lists=lists)
    submitted = rotation.named.submitted
    # Reported and not removed: copies elsewhere matter just as much, and only people can destroy
    # them.
    unused = KeyFolder(keys).files_of(before - {key.keyid for key in new})
    record = {
        "role": role,
        "keys": [key.keyid for key in new],
        "public": [str(file) for file in files],
        "named": asdict(submitted),
        "signed_again": asdict(rotation.again.submitted) if rotation.again else None,
        "carried": list(rotation.carried),
        "of_no_more_use": [str(file) for file in unused if submitted.published],
    }
    return record, _rotated_text(record, keys, submitted)


def _new_key(folder: Path, role: str) -> Path:
    """Make a key of the role in the folder; return the file of its public half."""
    if ROLES[role].keys == "online":
        raise InvalidInput(
            f"the cloud itself signs {role}, so create its key on the cloud's machine: "
            f"triplane cloud keys make {role}-2 --keys HOME/keys; then pass the file that it "
            f"wrote: --public {role}-2.pub"
        )
    keys = KeyFolder(folder)
    return keys.write_public(keys.make_next(role)[0].stem)


def _keyids(remote: Remote, role: str) -> list[str]:
    """Return the role's key ids as the cloud reports them; signing verifies them."""
    chain = read(remote.get, newest_root(remote.get, remote.get(TRUSTED_ROOT)))
    named = chain.is_named(role)
    return list(chain.delegator(role).get_delegated_role(role).keyids) if named else []


def _rotated_text(record: dict[str, Any], folder: Path, named: Submitted) -> str:
    role = record["role"]
    keys = ", ".join(keyid[:KEY_CHARS] for keyid in record["keys"])
    by = "root" if role in TOP else "targets"
    if not named.published:
        files = " ".join(f"--public {file}" for file in record["public"])
        return f"{role} will have the keys {keys}: {_signatures_text(named)}, with {files}"
    lines = [f"{role} has the keys {keys}, named by {by} {named.version}; nodes follow"]
    if role in LISTING:
        lines.append(_list_text(role, record))
    lines += [f"no longer used: {file}; destroy every copy" for file in record["of_no_more_use"]]
    if ROLES[role].keys == "online":
        lines.append(f"no longer used: the former key of {role} in the folder keys of the cloud")
    else:
        lines.append(f"the second copy of {folder} is out of date; copy the folder again")
    return "\n".join(lines)


def _list_text(role: str, record: dict[str, Any]) -> str:
    again, carried = record["signed_again"], record["carried"]
    if again is None:
        return f"nothing that {role} lists is signed until the holders of its new keys sign"
    if not again["published"]:
        return f"its list: {again['signatures']} of {again['threshold']} signatures"
    return f"signed again: {', '.join(carried) or 'nothing; sign the versions that you know again'}"


def generate_key(name: str, folder: Path) -> tuple[dict[str, Any], str]:
    """Make the key NAME.pem and its public half NAME.pub. Conflict: it exists already."""
    check_name(name)
    keys = KeyFolder(folder)
    key = keys.make(name).public_key
    public = keys.write_public(name)
    private = folder / f"{name}.pem"
    record = {"private": str(private), "public": str(public), "id": key.keyid}
    return record, (
        f"{private}: the private key, which stays here\n"
        f"{public}: its public half, for: triplane cloud keys rotate ROLE --public {public.name}"
    )
