"""Keys shown, renewed and replaced against a real cloud process, offline folder at hand."""

import json
import shutil
import time

import pytest
from tests.cloud.cli.verbs import answer
from tests.cloud.registry.models import model_bytes
from tests.support.cloud_process import running, said

from triplane.cloud import trust
from triplane.cloud.home import Home, initialize
from triplane.cloud.trust.roles import DAY_S, ROLES, moment

PATH = "release/lenet@1+ort-x64.bundle"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("keys")


@pytest.fixture(scope="module")
def cloud(place):
    """A cloud made 340 days ago, as far as signatures tell, with one released version."""
    answer("cloud", "init", "--home", place / "home", "--offline-keys", place / "first")
    home = Home(place / "home")
    for folder in (home.metadata, home.keys):
        shutil.rmtree(folder)
    now_s = time.time() - 340 * DAY_S
    trust.initialize(home.metadata, home.keys, place / "keys", now_s=now_s)
    (place / "lenet.tpm").write_bytes(model_bytes(place))
    with running(home.path):
        yield home


@pytest.fixture
def people(cloud, monkeypatch):
    monkeypatch.setenv("TRIPLANE_IDENTITY", str(cloud.operator))
    return cloud


def shown(place):
    return {
        role["role"]: role
        for role in answer("cloud", "keys", "show", "--keys", place / "keys")["roles"]
    }


pytestmark = pytest.mark.slow


def test_what_people_signed_is_renewed_after_a_warning(people, place, capsys):
    day = f"{moment(shown(place)['release']['expires_s']):%Y-%m-%d}"
    status = said(capsys, "cloud", "status")
    for role in ("targets", "release", "plans"):
        assert f"the signatures of people for {role} expire on {day}" in status
        assert f"triplane cloud keys renew --role {role}" in status
    assert "for root" not in status
    done = answer("cloud", "keys", "renew", "--keys", place / "keys")
    assert {role: made["published"] for role, made in done["roles"].items()} == {
        "targets": True,
        "release": True,
        "plans": True,
    }
    assert answer("cloud", "status")["warnings"] == []
    told = said(capsys, "cloud", "keys", "renew", "--keys", place / "keys", "--role", "root")
    assert "root 2 published; it expires in 1825 days" in told


def test_only_the_reviewed_model_is_signed(people, place, capsys):
    pushed = answer("registry", "push", place / "lenet.tpm", "--target", "ort-x64")
    signing = ("sign", "lenet@1", "--keys", place / "keys", "--model-digest")
    refused = said(capsys, *signing, "0" * 64, code=5)
    assert f"is model file {pushed['model_digest'][:12]} in the cloud, not 000000000000" in refused
    done = answer(*signing, pushed["model_digest"].upper())
    assert done["targets"][0]["model_digest"] == pushed["model_digest"]
    version = answer("registry", "show", "lenet@1")
    assert version["bundles"][0]["signed_path"] == PATH


def test_keys_of_every_role_are_replaced_and_the_release_stays(people, place, capsys):
    keys = place / "keys"
    before = shown(place)
    refused = said(capsys, "cloud", "keys", "rotate", "timestamp", "--keys", keys, code=2)
    assert "triplane cloud keys make timestamp-2 --keys HOME/keys" in refused
    for role in ROLES:
        options = []
        if ROLES[role].keys == "online":
            made = answer("cloud", "keys", "make", f"{role}-2", "--keys", people.keys)
            options = ["--public", made["public"]]
        done = answer("cloud", "keys", "rotate", role, "--keys", keys, *options)
        assert done["named"]["published"]
        if ROLES[role].keys == "offline":
            assert done["of_no_more_use"] == [str(keys / f"{role}.pem")]
            assert done["public"] == [str(keys / f"{role}-2.pub")]
    after = shown(place)
    for role, told in after.items():
        assert told["signed"], role
        assert told["keys"] != before[role]["keys"]
        assert told["version"] > before[role]["version"] or role in {"snapshot", "timestamp"}
        assert all(key["here"] == (told["kept"] == "offline") for key in told["keys"])
    assert after["release"]["content"] == 1
    assert answer("registry", "show", "lenet@1")["bundles"][0]["signed_path"] == PATH


def test_after_a_theft_the_old_list_is_dropped_and_the_registry_says_so(people, place, capsys):
    keys = place / "keys"
    told = said(capsys, "cloud", "keys", "rotate", "release", "--keys", keys, "--stolen")
    assert "signed again: nothing; sign the versions that you know again" in told
    assert "destroy every copy" in told
    assert "not signed, so no node takes it" in said(capsys, "registry", "show", "lenet@1")
    answer("sign", "lenet@1", "--keys", keys)
    assert answer("registry", "show", "lenet@1")["bundles"][0]["signed_path"] == PATH
    assert "it cannot be dropped" in said(
        capsys, "cloud", "keys", "rotate", "targets", "--keys", keys, "--stolen", code=2
    )


def test_a_folder_without_keys_is_named(people, place, capsys):
    (place / "empty").mkdir(exist_ok=True)
    shutil.copy(place / "keys" / "root.json", place / "empty")
    words = ("cloud", "keys", "renew", "--keys", place / "empty")
    assert "name the offline folder" in said(capsys, *words, code=2)
    refused = answer("cloud", "keys", "rotate", "release", "--keys", place / "empty", code=2)
    assert "has no key of the role targets" in json.dumps(refused)
    assert not list((place / "empty").glob("*.pem")), "no key is made before it can be named"


def test_the_second_holder_of_a_root_key_names_the_same_new_key(tmp_path, capsys, monkeypatch):
    made = initialize(
        tmp_path / "home", offline_keys=tmp_path / "keys", keys={"root": 2}, thresholds={"root": 2}
    )
    monkeypatch.setenv("TRIPLANE_IDENTITY", str(made.home.operator))
    for person in (1, 2):
        own = tmp_path / f"holder-{person}"
        own.mkdir()
        for name in ("root.json", f"root-{person}.pem", *(["targets.pem"] if person == 1 else [])):
            shutil.copy(tmp_path / "keys" / name, own)
    rotate = ("cloud", "keys", "rotate", "targets", "--keys")
    with running(made.home.path):
        told = said(capsys, *rotate, tmp_path / "holder-1")
        public = tmp_path / "holder-1" / "targets-2.pub"
        assert (
            f"1 of 2 signatures; the other key holders run the same command, with --public {public}"
            in told
        )
        done = answer(*rotate, tmp_path / "holder-2", "--public", public)
        assert done["named"]["published"]
        assert done["signed_again"] is None, "the new key is the first holder's"
        again = answer(*rotate, tmp_path / "holder-1", "--public", public)
        assert again["signed_again"]["published"]
        assert all(role["signed"] for role in answer("cloud", "keys", "show")["roles"])
