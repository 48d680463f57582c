"""`triplane cloud keys`: work and output; the rules are in `triplane.cloud.trust`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from triplane.cloud.cli.connection import Calls
from triplane.cloud.cli.remote import Remote, remote_at
from triplane.cloud.cli.text import table, until
from triplane.cloud.trust.chain import Chain, newest_root, read
from triplane.cloud.trust.initial import TRUSTED_ROOT
from triplane.cloud.trust.keys import KeyFolder, read_public
from triplane.cloud.trust.repository import MAX_OVERTAKEN, Submitted
from triplane.cloud.trust.roles import DAY_S, ROLES, TOP
from triplane.cloud.trust.rotating import Lists, rotate
from triplane.cloud.trust.signing import renew, replace_keys, trusted_root
from triplane.proto.errors import InvalidInput, NotFound
from triplane.proto.identity import check_name
from triplane.unified_ir.cli.shell import CommandOutput

ROOT_RENEWED_S: Final = 365 * DAY_S
KEY_CHARS: Final = 12
RENEWED: Final = ("targets", "release", "root")


def ends_of(remote: Remote) -> dict[str, float]:
    """When each role's published metadata ends, as the cloud tells it."""
    chain = read(remote.get, newest_root(remote.get, remote.get(TRUSTED_ROOT)))
    return {role: _metadata(chain, role).signed.expires.timestamp() for role in ROLES}


def shown(cloud: Calls, folder: Path | None) -> tuple[dict[str, Any], str]:
    """Every role; verified from the folder's root where one is given, else from the cloud's."""
    with remote_at(cloud) as remote:
        first = trusted_root(folder) if folder else remote.get(TRUSTED_ROOT)
        chain = read(remote.get, newest_root(remote.get, first))
    here = set(KeyFolder(folder).signers()) if folder else set()
    roles = [_role(chain, role, here) for role in ROLES]
    headings = ("ROLE", "KEPT", "SIGNERS", "VERSION", "SIGNED", "CONTENT", "ENDS", "KEYS")
    return {"roles": roles}, table(headings, [_row(role) for role in roles])


def _metadata(chain: Chain, role: str) -> Any:
    tops = {"root": chain.root, "snapshot": chain.snapshot, "timestamp": chain.timestamp}
    return tops.get(role) or chain.targets[role]


def _role(chain: Chain, role: str, here: set[str]) -> dict[str, Any]:
    metadata = _metadata(chain, role)
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


def renewed(
    cloud: Calls, output: CommandOutput, folder: Path, roles: Sequence[str], *, past: int = 0
) -> tuple[dict[str, Any], str]:
    """Sign again; without `roles` what the folder has keys for. NotFound: for none.

    past: sign as often as it takes for the version to be higher, unless others must sign too.
    """
    trusted_root(folder)
    done: dict[str, Submitted] = {}
    with remote_at(cloud) as remote:
        for role in roles or _due(remote):
            try:
                submitted = done[role] = _renewer(role)(remote, folder)
                if past - submitted.version > MAX_OVERTAKEN:
                    raise InvalidInput(
                        f"{role} is at version {submitted.version}; at most {MAX_OVERTAKEN} "
                        f"versions are signed at once, {past} is further"
                    )
                while submitted.published and submitted.version <= past:
                    submitted = done[role] = _renewer(role)(remote, folder)
            except NotFound as error:
                if roles:
                    raise
                output.note(f"{role}: not renewed: {error}")
        ends = ends_of(remote)
    if not done:
        raise NotFound(f"{folder} has no key of {', '.join(RENEWED)}; name the offline folder")
    record = {"roles": {role: _submitted(submitted) for role, submitted in done.items()}}
    return record, "\n".join(
        _renewed_text(role, submitted, ends) for role, submitted in done.items()
    )


def _due(remote: Remote) -> list[str]:
    root_is_due = ends_of(remote)["root"] - time.time() < ROOT_RENEWED_S
    return [role for role in RENEWED if role != "root" or root_is_due]


def _renewer(role: str) -> Callable[[Remote, Path], Submitted]:
    if role == "root":
        return lambda remote, folder: replace_keys(remote, {}, folder).submitted
    return lambda remote, folder: renew(remote, role, folder).submitted


def _renewed_text(role: str, submitted: Submitted, ends: dict[str, float]) -> str:
    if submitted.published:
        return f"{role} {submitted.version} published; it ends {until(ends[role])}"
    return f"{role} {submitted.version}: {_waits(submitted)}"


def _waits(submitted: Submitted) -> str:
    count = f"{submitted.signatures} of {submitted.threshold} signatures"
    return f"{count}; the other holders run the same"


def rotated(
    cloud: Calls,
    role: str,
    folder: Path,
    *,
    publics: Sequence[Path],
    threshold: int | None,
    stolen: bool,
) -> tuple[dict[str, Any], str]:
    """Give the role the keys of `publics`, or one made in the folder."""
    trusted_root(folder)
    decider = "root" if role in TOP else "targets"
    with remote_at(cloud) as remote:
        before = set(_keyids(remote, role))
        KeyFolder(folder).of(_keyids(remote, decider), decider)
        files = list(publics) or [_new(folder, role)]
        keys = [read_public(file) for file in files]
        lists = Lists.DROPPED if stolen else Lists.CARRIED
        rotation = rotate(remote, role, keys, folder, threshold=threshold, lists=lists)
    unused = KeyFolder(folder).files_of(before - {key.keyid for key in keys})
    record = {
        "role": role,
        "keys": [key.keyid for key in keys],
        "public": [str(file) for file in files],
        "named": _submitted(rotation.named.submitted),
        "signed_again": _submitted(rotation.again.submitted) if rotation.again else None,
        "carried": list(rotation.carried),
        "of_no_more_use": [str(file) for file in unused]
        if rotation.named.submitted.published
        else [],
    }
    return record, _rotated_text(record, folder, rotation.named.submitted)


def _new(folder: Path, role: str) -> Path:
    """The public half of a key made in the folder."""
    if ROLES[role].keys == "online":
        raise InvalidInput(
            f"the cloud signs {role} by itself, so its key is made on the cloud's machine: "
            f"triplane cloud keys make {role}-2 --keys HOME/keys; then give the file it wrote: "
            f"--public {role}-2.pub"
        )
    keys = KeyFolder(folder)
    return keys.write_public(keys.make_next(role)[0].stem)


def _keyids(remote: Remote, role: str) -> list[str]:
    """As the cloud tells it; what is signed is verified where it is signed."""
    chain = read(remote.get, newest_root(remote.get, remote.get(TRUSTED_ROOT)))
    return list(chain.delegator(role).get_delegated_role(role).keyids)


def _submitted(submitted: Submitted) -> dict[str, Any]:
    return {
        "published": submitted.published,
        "signatures": submitted.signatures,
        "threshold": submitted.threshold,
        "version": submitted.version,
    }


def _rotated_text(record: dict[str, Any], folder: Path, named: Submitted) -> str:
    role = record["role"]
    keys = ", ".join(keyid[:KEY_CHARS] for keyid in record["keys"])
    by = "root" if role in TOP else "targets"
    if not named.published:
        files = " ".join(f"--public {file}" for file in record["public"])
        return f"{role} shall have {keys}: {_waits(named)}, with {files}"
    lines = [f"{role} has the keys {keys}, named by {by} {named.version}; nodes follow"]
    if role in {"targets", "release"}:
        lines.append(_list_text(role, record))
    lines += [f"of no more use: {file}; destroy every copy" for file in record["of_no_more_use"]]
    if ROLES[role].keys == "online":
        lines.append(f"of no more use: the former key of {role} in the folder keys of the cloud")
    else:
        lines.append(f"copy {folder} again to where its second copy is")
    return "\n".join(lines)


def _list_text(role: str, record: dict[str, Any]) -> str:
    again, carried = record["signed_again"], record["carried"]
    if again is None:
        return f"nothing of {role} is signed until the holders of its new keys sign"
    if not again["published"]:
        return f"its list: {again['signatures']} of {again['threshold']} signatures"
    return f"signed again: {', '.join(carried) or 'nothing; sign what you know with triplane sign'}"


def generate_key(name: str, folder: Path) -> tuple[dict[str, Any], str]:
    """A key of its own name. Conflict: there is one."""
    check_name(name)
    keys = KeyFolder(folder)
    key = keys.make(name).public_key
    public = keys.write_public(name)
    private = folder / f"{name}.pem"
    record = {"private": str(private), "public": str(public), "id": key.keyid}
    return record, (
        f"{private}: the private key, stays here\n"
        f"{public}: its public half, for: triplane cloud keys rotate ROLE --public {public.name}"
    )
