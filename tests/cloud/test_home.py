import json
import stat
from pathlib import Path

import pytest

from triplane.cloud.home import Home, initialize, open_database
from triplane.cloud.store import Database
from triplane.proto.errors import Conflict, Corrupt, InvalidInput, NotFound
from triplane.proto.identity import IdentityFolder


def test_a_new_cloud_has_all_it_needs_and_its_offline_keys_lie_elsewhere(tmp_path):
    made = initialize(tmp_path / "home", ["fleet.example.org"], offline_keys=tmp_path / "away")
    home = made.home
    assert home.hosts() == ("fleet.example.org", "127.0.0.1", "localhost")
    assert sorted(path.stem for path in home.keys.glob("*.pem")) == [
        "auto", "snapshot", "timestamp",
    ]  # fmt: skip
    assert sorted(path.stem for path in made.offline) == [
        "plans", "release", "root", "targets",
    ]  # fmt: skip
    assert all(path.is_relative_to(tmp_path / "away") for path in made.offline)
    operator = IdentityFolder(home.operator).load()
    assert (operator.name, operator.cloud) == ("operator", "127.0.0.1:8443")
    from cryptography import x509

    server = x509.load_pem_x509_certificate((home.tls / "server.pem").read_bytes())
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    addresses = map(str, names.get_values_for_type(x509.IPAddress))
    assert {*names.get_values_for_type(x509.DNSName), *addresses} == set(home.hosts())


def test_secrets_are_readable_by_their_owner_only(tmp_path):
    home = initialize(tmp_path / "home", offline_keys=tmp_path / "away").home
    secrets = [
        home.tls / "server.key", home.dashboard_token, home.authority / "ca.key",
        home.operator / "key.pem", *home.keys.glob("*.pem"), *(tmp_path / "away").glob("*.pem"),
    ]  # fmt: skip
    assert [path for path in secrets if stat.S_IMODE(path.stat().st_mode) & 0o077] == []
    assert stat.S_IMODE(home.path.stat().st_mode) == 0o700


def test_an_existing_cloud_is_refused_and_untouched(tmp_path):
    home = initialize(tmp_path / "home", offline_keys=tmp_path / "away").home
    before = (home.authority / "ca.pem").read_bytes()
    with pytest.raises(Conflict, match="is not empty"):
        initialize(tmp_path / "home", offline_keys=tmp_path / "other")
    assert (home.authority / "ca.pem").read_bytes() == before
    assert not (tmp_path / "other").exists()


def test_a_cloud_whose_making_was_cut_off_never_runs(tmp_path):
    home = initialize(tmp_path / "home", offline_keys=tmp_path / "away").home
    (home.path / "home.json").unlink()
    with pytest.raises(Corrupt, match="`init` was interrupted"):
        home.hosts()
    with pytest.raises(NotFound, match="triplane cloud init"):
        Home(tmp_path / "nowhere").hosts()


@pytest.mark.parametrize("damage", [b"", b"[]", b'{"format": 1}', b'{"format": "x", "hosts": []}'])
def test_a_damaged_record_is_named(tmp_path, damage):
    (tmp_path / "home.json").write_bytes(damage)
    with pytest.raises(Corrupt, match=r"home\.json is damaged"):
        Home(tmp_path).hosts()


def test_a_home_of_a_newer_release_is_refused_by_number(tmp_path):
    (tmp_path / "home.json").write_bytes(b'{"format": 2, "hosts": []}')
    with pytest.raises(Conflict, match="has format 2, this release reads up to 1"):
        Home(tmp_path).hosts()


@pytest.mark.parametrize(
    ("hosts", "away", "message"),
    [
        ([], "home/keys", "offline keys must not stay"),
        (["a b"], "away", "a host is a name or an address"),
        ([""], "away", "a host is a name or an address"),
        (["x"] * 33, "away", "at most 32 names"),
    ],
)
def test_what_makes_no_cloud_is_refused_before_anything_is_written(tmp_path, hosts, away, message):
    with pytest.raises(InvalidInput, match=message):
        initialize(tmp_path / "home", hosts, offline_keys=tmp_path / away)
    assert not list(tmp_path.iterdir())


def test_a_home_remembers_its_database_and_refuses_another(tmp_path, monkeypatch):
    elsewhere = f"sqlite:///{tmp_path / 'elsewhere.db'}"
    monkeypatch.setenv("TRIPLANE_DATABASE", elsewhere)
    home = initialize(tmp_path / "home", offline_keys=tmp_path / "keys").home
    monkeypatch.delenv("TRIPLANE_DATABASE")
    open_database(home).close()
    assert not (home.path / "cloud.db").exists()
    monkeypatch.setenv("TRIPLANE_DATABASE", f"sqlite:///{tmp_path / 'other.db'}")
    with pytest.raises(Conflict, match=r"belongs to the database .*elsewhere\.db"):
        open_database(home)
    assert (home.path / "home.json").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b"")])
def test_an_empty_database_is_not_begun_beside_an_old_home(tmp_path, damage):
    home = initialize(tmp_path / "home", offline_keys=tmp_path / "keys").home
    damage(home.path / "cloud.db")
    with pytest.raises(Corrupt, match=r"is empty, so it is not the one .* restore it"):
        open_database(home)


def test_the_database_of_nobody_is_not_taken_for_the_homes_own(tmp_path, monkeypatch):
    home = initialize(tmp_path / "home", offline_keys=tmp_path / "keys").home
    other = f"sqlite:///{tmp_path / 'other.db'}"
    Database.open(other).close()
    monkeypatch.setenv("TRIPLANE_DATABASE", other)  # a home of an older release records none
    with pytest.raises(Corrupt, match=r"other\.db\) is empty"):
        open_database(home)


def test_ports_are_kept_for_the_next_start(tmp_path):
    home = initialize(tmp_path / "home", offline_keys=tmp_path / "keys").home
    assert home.ports() == {"port": 8443, "enrol_port": 8444, "dashboard_port": 8445}
    home.record_ports(port=1, enrol_port=2, dashboard_port=3)
    assert home.ports() == {"port": 1, "enrol_port": 2, "dashboard_port": 3}
    assert home.hosts()


@pytest.mark.parametrize(
    ("recorded", "given"),
    [
        ("postgresql://db/x", "postgresql://db:5432/x"),
        ("postgresql://db/x", "postgresql+psycopg://ann:secret@DB/x"),
        ("postgresql://db:5433/x", "postgresql:///x?host=db&port=5433"),
        ("postgresql://db:5433/x", "postgresql:///x?host=db:5433"),
        ("postgresql:///x?host=a&host=b:5433", "postgresql:///x?host=a:5432&host=b:5433"),
        ("postgresql:///x?host=a,b&port=5432,5433", "postgresql:///x?host=a:5432&host=b:5433"),
        ("postgresql:///x?host=/run/a", "postgresql://ann@:5432/x?host=/run/a"),
        ("sqlite:///a.db", "sqlite:///{here}/a.db"),
        ("sqlite:///{here}/b/../a.db", "sqlite:///./a.db"),
    ],
)
def test_one_database_has_many_names(tmp_path, monkeypatch, recorded, given):
    monkeypatch.chdir(tmp_path)
    url = made_with(tmp_path, monkeypatch, recorded, given)
    assert Home(tmp_path).database_url == url


@pytest.mark.parametrize(
    ("recorded", "given"),
    [
        ("postgresql://db/x", "postgresql://db:5433/x"),
        ("postgresql://db/x", "postgresql://db/y"),
        ("postgresql:///x?host=a", "postgresql:///x?host=b"),
        ("postgresql:///x?host=a&host=b", "postgresql:///x?host=a"),
        ("sqlite:///a.db", "sqlite:///b/a.db"),
        ("sqlite:///a.db", "postgresql:///a.db"),
    ],
)
def test_another_database_is_a_conflict(tmp_path, monkeypatch, recorded, given):
    monkeypatch.chdir(tmp_path)
    made_with(tmp_path, monkeypatch, recorded, given)
    with pytest.raises(Conflict, match="belongs to the database"):
        _ = Home(tmp_path).database_url


def made_with(folder, monkeypatch, recorded, given):
    """A home's record that names one database, beside a variable that names it, or another."""
    recorded, given = (url.format(here=folder) for url in (recorded, given))
    record = {"format": 1, "hosts": ["x"], "database": recorded}
    (folder / "home.json").write_text(json.dumps(record))
    monkeypatch.setenv("TRIPLANE_DATABASE", given)
    return given
