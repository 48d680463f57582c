"""HOME: everything that a cloud stores, where it is, and how it is created.

`initialize` writes `home.json` last. A folder without it was not finished, and everything that
opens a home refuses it, so a half-made cloud never runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import re
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from triplane.proto.disk import OS_DISK, write_atomic, write_secret
from triplane.proto.errors import Conflict, Corrupt, InvalidInput, NotFound

if TYPE_CHECKING:
    import sqlalchemy as sa

    from triplane.cloud.identity.principals import Principals
    from triplane.cloud.store import Database
    from triplane.proto.identity import IdentityFolder

FORMAT: Final = 1
OPERATOR: Final = "operator"
MACHINE: Final = "the cloud's machine"
"""Actor, in the audit log, of changes on the cloud's own machine."""
LOCAL: Final = "127.0.0.1"
DEFAULT_PORT: Final = 8443
PORTS: Final = {"port": DEFAULT_PORT, "enrol_port": 8444, "dashboard_port": 8445}
RECORD: Final = "home.json"
DATABASE_VARIABLE: Final = "TRIPLANE_DATABASE"
MAX_HOSTS: Final = 32
POSTGRESQL_PORT: Final = 5432
_HOST_AND_PORT: Final = re.compile(r"[A-Za-z0-9.-]*:[0-9]*")
_ALWAYS: Final = (LOCAL, "localhost")


class HomePart:
    """The path of a part of a home, by its name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, home: Home, _: type[Home]) -> Path:
        return home.path / self._name


@dataclass(frozen=True, slots=True)
class Home:
    """The paths of one cloud."""

    path: Path

    blobs = HomePart("blobs")
    """Models and bundles by SHA-256."""
    conversions = HomePart("conversions")
    """Files of running conversions; worthless after a crash."""
    federation = HomePart("federation")
    """Updates of open rounds, and what children of runs write."""
    strategies = HomePart("strategies")
    """Strategies of Flower that the operator puts here, as NAME.py."""
    keys = HomePart("keys")
    """The signing keys that the cloud needs: snapshot, timestamp, auto."""
    metadata = HomePart("metadata")
    """Signed metadata."""
    authority = HomePart("ca")
    """The certificate authority."""
    tls = HomePart("tls")
    """The server's certificate `server.pem` and key `server.key`."""
    operator = HomePart(OPERATOR)
    """The first operator's identity folder."""
    dashboard_token = HomePart("dashboard.token")
    """The token that changes through the dashboard need."""

    @property
    def database_url(self) -> str:
        """The database of this cloud. TRIPLANE_DATABASE may give it other credentials.

        Conflict: the variable names another database than the one that holds this cloud.
        """
        variable, recorded = os.environ.get(DATABASE_VARIABLE, ""), self._recorded_database()
        # Compare places and not URLs: the variable may add a password or use another driver.
        if variable and recorded and _place_of(variable) != _place_of(recorded):
            raise Conflict(
                f"{self.path} belongs to the database {_place_of(recorded)}, but "
                f"{DATABASE_VARIABLE} names {_place_of(variable)}; unset it, or, if you moved the "
                f'database, correct "database" in {self.path / RECORD}'
            )
        return variable or recorded or f"sqlite:///{self.path / 'cloud.db'}"

    def _recorded_database(self) -> str:
        return str(self._record().get("database", "")) if (self.path / RECORD).exists() else ""

    def hosts(self) -> tuple[str, ...]:
        """Names and addresses by which nodes reach this cloud, the first preferred.

        NotFound: no cloud is here. Corrupt: its creation was interrupted, or the record is damaged.
        """
        return tuple(self._record()["hosts"])

    def ports(self) -> dict[str, int]:
        """Return port, enrol_port and dashboard_port of the last start; the defaults at first."""
        ports = self._record().get("ports", {})
        return {name: int(ports.get(name, usual)) for name, usual in PORTS.items()}

    def record_ports(self, **ports: int) -> None:
        """Store the ports for the next start, so that nodes find the cloud again."""
        record = self._record()
        if record.get("ports") != ports:
            write_secret(self.path / RECORD, json.dumps({**record, "ports": ports}).encode())

    def _record(self) -> dict[str, Any]:
        try:
            record = json.loads((self.path / RECORD).read_bytes())
            if record["format"] > FORMAT:
                raise Conflict(
                    f"{self.path} has format {record['format']}, this release reads up to "
                    f"{FORMAT}; use the newer release"
                )
            if not isinstance(record["hosts"], list) or not record["hosts"]:
                raise TypeError("hosts is a list of names")
            return dict(record)
        except OSError as error:
            if self.path.is_dir() and any(self.path.iterdir()):
                raise Corrupt(
                    f"{self.path} is not a complete cloud: home.json is missing, so `init` was "
                    "interrupted; remove the folder and run triplane cloud init again"
                ) from error
            raise NotFound(f"no cloud in {self.path}; make one: triplane cloud init") from error
        except (ValueError, KeyError, TypeError) as error:
            raise Corrupt(f"{self.path / RECORD} is damaged: {error!r}") from error


@dataclass(frozen=True, slots=True)
class InitializedHome:
    """A new cloud. offline: private keys that must be moved off this machine."""

    home: Home
    hosts: tuple[str, ...]
    offline_keys: Path
    offline: tuple[Path, ...]


def initialize(
    path: Path,
    hosts: Sequence[str] = (),
    *,
    offline_keys: Path,
    port: int = DEFAULT_PORT,
    now_s: float | None = None,
    **signing: Any,
) -> InitializedHome:
    """Make a cloud: authority, server certificate, operator, signing keys and metadata, database.

    hosts: names and addresses under which nodes reach it, the first preferred; this machine's own
    are always added. signing: `keys` and `thresholds` as `trust.initialize` takes them.
    Conflict: the folder is not empty. InvalidInput: offline keys inside of it.
    """
    from triplane.cloud import trust

    path, offline_keys = Path(path).absolute(), Path(offline_keys).absolute()
    _check(path, hosts, offline_keys)
    now_s = time.time() if now_s is None else now_s
    names = tuple(dict.fromkeys((*hosts, *_ALWAYS)))
    home = Home(path)
    OS_DISK.make_folder(path)
    # Before anything secret is written into it.
    path.chmod(0o700)
    signed = trust.initialize(home.metadata, home.keys, offline_keys, now_s=now_s, **signing)
    _make_identities(home, names, port, now_s)
    write_secret(home.dashboard_token, f"{secrets.token_urlsafe(32)}\n".encode())
    OS_DISK.make_folder(home.blobs)
    # Last, see the top of the module.
    record = {"format": FORMAT, "hosts": list(names), "created_s": now_s}
    if os.environ.get(DATABASE_VARIABLE):
        record["database"] = os.environ[DATABASE_VARIABLE]
    write_secret(path / RECORD, json.dumps(record).encode())  # a URL may hold a password
    return InitializedHome(home, names, offline_keys, signed.offline)


def _check(path: Path, hosts: Sequence[str], offline_keys: Path) -> None:
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise Conflict(f"{path} is not empty; a cloud is created in a new folder, and only once")
    if offline_keys.is_relative_to(path):
        raise InvalidInput(
            f"{offline_keys} is inside {path}; offline keys must not stay with the cloud: name "
            "another folder, best on a removable medium"
        )
    if len(hosts) > MAX_HOSTS:
        raise InvalidInput(f"a cloud has at most {MAX_HOSTS} names, got {len(hosts)}")
    for host in hosts:
        if not host or len(host) > 253 or not host.isascii() or set(host) & set(" /@[]"):
            raise InvalidInput(f"a host is a name or an address without a port, got {host[:80]!r}")


def _make_identities(home: Home, hosts: Sequence[str], port: int, now_s: float) -> None:
    from triplane.cloud.identity.authority import Authority
    from triplane.cloud.identity.principals import Principals
    from triplane.proto.identity import certificate_pem, key_pem, new_key

    OS_DISK.make_folder(home.authority)
    authority = Authority.make(home.authority, "triplane cloud", now_s)
    OS_DISK.make_folder(home.tls)
    server_key = new_key()
    certificate = authority.issue_server(server_key.public_key(), hosts, now_s)
    write_secret(home.tls / "server.key", key_pem(server_key))
    write_atomic(home.tls / "server.pem", certificate_pem(certificate))
    with contextlib.closing(open_database(home, is_new=True)) as database:
        principals = Principals(database, authority, lambda: now_s)
        _save_operator(principals, OPERATOR, home.operator, authority.pem, f"{LOCAL}:{port}")


def _save_operator(
    principals: Principals, name: str, folder: Path, authority: bytes, cloud: str
) -> None:
    """Admit an operator and write its identity."""
    from triplane.cloud.identity.rights import PrincipalRole
    from triplane.proto.identity import (
        IdentityFolder,
        certificate_pem,
        certificate_request,
        key_pem,
        new_key,
    )

    key = new_key()
    admitted = principals.admit_now(certificate_request(key), name, PrincipalRole.OPERATOR)
    certificate = certificate_pem(admitted)
    IdentityFolder(folder).save(
        authority=authority, certificate=certificate, key=key_pem(key), cloud=cloud
    )


def admit_operator(home: Home, name: str, folder: Path, now_s: float | None = None) -> Path:
    """Make an operator's identity in a new folder; that needs only access to the cloud's machine.

    Use it for a cloud that no operator can reach any more. A former holder of the name is revoked.
    Conflict: the cloud runs, or the folder is not empty. InvalidInput: the name.
    """
    from triplane.cloud.identity.authority import Authority
    from triplane.cloud.identity.principals import Principals
    from triplane.proto.identity import check_name

    check_name(name)
    host, now_s = home.hosts()[0], time.time() if now_s is None else now_s
    if folder.exists() and any(folder.iterdir()):
        raise Conflict(f"{folder} is not empty; an identity is made in a new folder")
    authority = Authority.load(home.authority)
    with contextlib.closing(open_database(home)) as database:
        principals = Principals(database, authority, lambda: now_s)
        # An earlier identity of this name may be stolen or lost; only the new one stays valid.
        with contextlib.suppress(NotFound):
            asyncio.run(principals.revoke(MACHINE, name, "replaced on the cloud's machine"))
        _save_operator(principals, name, folder, authority.pem, f"{host}:{_known_port(home)}")
    return folder


@contextlib.contextmanager
def one_renews(identity: IdentityFolder) -> Iterator[None]:
    """Hold an identity for renewal: two at once would mix key and certificate. Conflict."""
    with (identity.path / ".renewing").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise Conflict(f"another process renews {identity.path}; try again") from error
        yield


def _known_port(home: Home) -> int:
    """Return the port that the first operator's identity names."""
    try:
        return int((home.operator / "cloud").read_text().rpartition(":")[2])
    except (OSError, ValueError):
        return DEFAULT_PORT


def _place_of(url: str) -> str:
    """Return where a database is, without its credentials."""
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    try:
        parts = make_url(url)
    except ArgumentError as error:
        raise InvalidInput(f"{DATABASE_VARIABLE} is not the URL of a database: {error}") from error
    backend, database = parts.get_backend_name(), parts.database or ""
    if backend == "sqlite":
        return f"{backend} {Path(database).resolve() if database else ''}"
    # libpq lets a parameter in the query override the path of the URL.
    name = _last(parts.query.get("dbname")) or database
    return f"{backend} {_hosts_of(parts)} {name}"


def _hosts_of(parts: sa.URL) -> str:
    """Return the database's hosts and ports; the URL's query overrides its authority."""
    hosts = _several(parts.query.get("host")) or [parts.host or ""]
    ports = _several(parts.query.get("port")) or [str(parts.port or "")]
    if len(ports) != len(hosts):
        ports = [ports[0]] * len(hosts)
    named = []
    for host, port in zip(hosts, ports, strict=True):
        name, _, own = host.partition(":") if _HOST_AND_PORT.fullmatch(host) else (host, "", "")
        named.append(f"{_folded(name)}:{own or port or POSTGRESQL_PORT}")
    return ",".join(named)


def _folded(host: str) -> str:
    """Return a host in lower case; the folder of a socket is returned as it is."""
    return host if host.startswith("/") else host.lower()


def _several(value: str | tuple[str, ...] | None) -> list[str]:
    texts = (value,) if isinstance(value, str) else value or ()
    return [part for text in texts for part in text.split(",")]


def _last(value: str | tuple[str, ...] | None) -> str:
    return value if isinstance(value, str) else value[-1] if value else ""


def open_database(home: Home, *, is_new: bool = False) -> Database:
    """Open the database with the tables of every part.

    Conflict: another cloud process runs. Corrupt: it is empty although the cloud is not new.
    """
    import triplane.cloud.federation.tables
    import triplane.cloud.fleet.tables
    import triplane.cloud.identity.tables
    import triplane.cloud.registry.tables  # noqa: F401 - attach their tables
    from triplane.cloud.store import Database as Opened

    url, file = home.database_url, home.path / "cloud.db"
    gone = Corrupt(
        f"the database of {home.path} ({_place_of(url)}) is empty, so it is not the one that "
        f"{home.path} was made with: restore it from a backup, or set {DATABASE_VARIABLE} to the "
        "right one"
    )
    # Checked before opening, because SQLite would create the missing file.
    if not is_new and url.endswith(f"{file}") and not (file.is_file() and file.stat().st_size):
        raise gone
    database = Opened.open(url)
    if not is_new and not database.read_now(_holds_a_cloud):
        database.close()
        raise gone
    return database


def _holds_a_cloud(connection: sa.Connection) -> bool:
    """Return whether any principal exists: every cloud is created with its first operator."""
    from triplane.cloud.identity.tables import PRINCIPALS

    return connection.execute(PRINCIPALS.select().limit(1)).first() is not None
