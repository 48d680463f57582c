"""Both databases for every test of state: a file, and a PostgreSQL cluster of this session's own.

`database_url` and `database` run a test twice. PostgreSQL comes from the system's packages; where
it is absent the test skips with its reason, unless TRIPLANE_REQUIRE names "postgres".
"""

import itertools
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psycopg
import pytest

from triplane.cloud.store import Database

BINARIES = Path("/usr/lib/postgresql")
START_S = 60
SETTINGS = {
    "listen_addresses": "''",
    "fsync": "off",  # a cluster of tests; what `kill -9` leaves to the kernel is still there
    "max_connections": "50",
    "shared_buffers": "16MB",
}
COUNT = itertools.count()


@dataclass(frozen=True)
class Cluster:
    """A running server that listens on a socket in `folder`."""

    folder: Path

    def url(self, name: str) -> str:
        return f"postgresql://triplane@/{name}?host={self.folder}"

    def execute(self, statement: str) -> None:
        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            connection.execute(statement.encode())


def missing(reason: str) -> None:
    if "postgres" in os.environ.get("TRIPLANE_REQUIRE", "").split(","):
        pytest.fail(f"TRIPLANE_REQUIRE asks for PostgreSQL, but {reason}")
    pytest.skip(reason)


def binaries() -> Path | None:
    """The folder of initdb and pg_ctl, of the newest release there is."""
    found = sorted(BINARIES.glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    on_path = shutil.which("initdb")
    if found:
        return found[-1].parent
    return Path(on_path).resolve().parent if on_path else None


def server_user() -> str | None:
    """Whom to be, since PostgreSQL refuses to run as root; None: as we are."""
    if os.geteuid() != 0:
        return None
    names = {entry.pw_name for entry in pwd.getpwall()}
    return next((name for name in ("postgres", "nobody") if name in names), None)


@pytest.fixture(scope="session")
def postgres() -> Iterator[Cluster]:
    programs = binaries()
    if programs is None:
        missing("initdb is not installed (Debian: apt-get install postgresql)")
    assert programs is not None
    user = server_user()
    folder = Path(tempfile.mkdtemp(prefix="triplane-pg-"))  # short: a socket's path has 107 bytes
    if user is not None:
        shutil.chown(folder, user)

    def run(program: str, *arguments: str) -> None:
        command = [str(programs / program), "--pgdata", str(folder / "data"), *arguments]
        done = subprocess.run(
            command, user=user, cwd=folder, capture_output=True, text=True,
            timeout=START_S, check=False, env={"PATH": os.defpath, "LC_ALL": "C"},
        )  # fmt: skip
        assert done.returncode == 0, f"{program}: {done.stdout}{done.stderr}"

    options = " ".join(f"-c {key}={value}" for key, value in SETTINGS.items())
    try:
        run("initdb", "--auth=trust", "--username=triplane", "--encoding=UTF8", "--no-sync")
        # To a log file: the server would keep our pipes open for as long as it runs.
        log = ["--log", str(folder / "log"), "--wait"]
        run("pg_ctl", "start", *log, "--options", f"{options} -k {folder}")
        yield Cluster(folder)
    finally:
        if (folder / "data" / "postmaster.pid").exists():
            run("pg_ctl", "stop", "--mode", "immediate")
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.slow)])
def database_url(request, tmp_path) -> Iterator[str]:
    """A new, empty database."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'cloud.db'}"
        return
    cluster: Cluster = request.getfixturevalue("postgres")
    name = f"triplane_{os.getpid()}_{next(COUNT)}"
    cluster.execute(f"CREATE DATABASE {name}")
    yield cluster.url(name)
    cluster.execute(f"DROP DATABASE {name} WITH (FORCE)")


SQLITE_FIRST = pytest.mark.parametrize(
    "database_url", ["sqlite", pytest.param("postgres", marks=pytest.mark.long)], indirect=True
)
"""For tests of many processes: on PostgreSQL only in the long run."""


@pytest.fixture
def database(database_url) -> Iterator[Database]:
    """An open database, with the tables of whatever the test imports."""
    opened = Database.open(database_url)
    yield opened
    opened.close()
