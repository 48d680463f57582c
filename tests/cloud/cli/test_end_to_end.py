"""The verbs against a real cloud process: made, used, killed, started again."""

import json
import os
import re
import socket
import subprocess
import urllib.request

import numpy as np
import pytest
from tests.cloud.registry.models import model_bytes
from tests.support.cloud_process import COMMAND, START_S, run, running, said

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("cloud")


@pytest.fixture(scope="module")
def home(place):
    run(
        "cloud", "init", "--home", place / "home", "--offline-keys", place / "keys",
    )  # fmt: skip
    return place / "home"


@pytest.fixture(scope="module")
def cloud(home):
    with running(home) as (ready, _):
        yield ready


@pytest.fixture
def operator(home, cloud, monkeypatch):
    monkeypatch.setenv("TRIPLANE_IDENTITY", str(home / "operator"))
    return home


@pytest.fixture(scope="module")
def pushed(home, cloud, place):
    file = place / "lenet.tpm"
    file.write_bytes(model_bytes(place))
    identity = ("--identity", home / "operator")
    return run("registry", "push", file, "--name", "lenet", "--alias", "stable",
               "--target", "ort-x64", *identity)  # fmt: skip


def test_a_cloud_is_made_once_and_names_what_to_take_away(place, home, capsys):
    refused = run(
        "cloud", "init", "--home", home, "--offline-keys", place / "keys2", code=3
    )  # fmt: skip
    assert str(home) in refused["error"]["message"]
    told = said(capsys, "cloud", "init", "--home", place / "other", "--offline-keys",
                place / "other-keys")  # fmt: skip
    assert "take" in told.lower()
    assert str(place / "other-keys") in told
    assert "triplane cloud up" in told
    for key in (home / "operator" / "key.pem", *(place / "keys").glob("*.pem")):
        assert key.stat().st_mode & 0o077 == 0


def test_status_tells_who_asks(operator, capsys):
    told = said(capsys, "cloud", "status")
    assert re.search(r"you +operator, operator; certificate expires in \d+ days", told)
    assert "0 of 0 connected" in told


def test_a_token_lets_a_person_in_once_and_their_role_holds(operator, cloud, place, capsys):
    made = run("cloud", "token", "--role", "viewer", "--name", "vera")
    address = f"127.0.0.1:{cloud['enrol_port']}"
    enrolled = run("cloud", "enrol", made["token"], "--cloud", address, "--identity", place / "v")
    assert enrolled["name"] == "vera"
    used = ("cloud", "enrol", made["token"], "--cloud", address, "--identity", place / "w")
    again = run(*used, code=3)
    assert "token" in again["error"]["message"]
    viewer = ("--identity", place / "v")
    assert run("cloud", "status", *viewer)["role"] == "viewer"
    refused = run("cloud", "token", *viewer, code=2)
    assert "viewer" in refused["error"]["message"]
    assert "vera" in said(capsys, "cloud", "who")
    renewed = run("cloud", "renew", *viewer)
    assert renewed["name"] == "vera"
    run("cloud", "revoke", "vera", "--reason", "left")
    assert "vera" in run("cloud", "status", *viewer, code=2)["error"]["message"]


def test_a_pushed_model_is_listed_shown_and_named(operator, pushed, capsys):
    assert pushed["version"] == 1
    assert pushed["bundles"][0]["state"] == "ready"
    assert "stable=1" in said(capsys, "registry", "ls")
    assert "lenet@1" in said(capsys, "registry", "ls", "lenet")
    told = said(capsys, "registry", "show", "lenet@stable")
    assert "triplane sign lenet@1 --target ort-x64" in told
    assert pushed["model_digest"] in told
    assert "canary=1" in said(capsys, "registry", "alias", "lenet", "canary", "1")
    assert "canary" not in said(capsys, "registry", "alias", "lenet", "canary", "--remove")
    assert "lenet@7" in said(capsys, "registry", "show", "lenet@7", code=2)


def test_a_signature_is_given_where_the_keys_are(operator, pushed, place, capsys):
    told = said(capsys, "sign", "lenet@1", "--keys", place / "keys")
    assert "release/lenet@1+ort-x64.bundle" in told
    assert "published" in told
    again = run("sign", "lenet@1", "--keys", place / "keys")
    assert again["published"]
    assert [found["path"] for found in again["targets"]] == ["release/lenet@1+ort-x64.bundle"]


@pytest.mark.long
def test_two_signers_release_only_together(place, capsys, monkeypatch):
    home, keys = place / "two", place / "two-keys"
    run("cloud", "init", "--home", home, "--offline-keys", keys, "--release-keys", "2",
        "--release-threshold", "2")  # fmt: skip
    monkeypatch.setenv("TRIPLANE_IDENTITY", str(home / "operator"))
    for person in (1, 2):
        own = place / f"signer-{person}"
        own.mkdir()
        for name in ("root.json", f"release-{person}.pem"):
            (own / name).write_bytes((keys / name).read_bytes())
            (own / name).chmod(0o600)
    file = place / "two.tpm"
    file.write_bytes(model_bytes(place))
    with running(home):
        run("registry", "push", file, "--target", "ort-x64")
        told = said(capsys, "sign", "two@1", "--keys", place / "signer-1")
        assert "1 of 2 signatures" in told
        assert "published" in said(capsys, "sign", "two@1", "--keys", place / "signer-2")


def test_the_policy_is_signed_shown_and_taken_back(operator, pushed, place, capsys):
    golden = place / "golden.npz"
    keys = ("--keys", place / "keys")
    rule = ("cloud", "policy", "set", "lenet", "--golden", golden, "--floor", "95%", *keys)
    golden.write_bytes(b"samples")
    assert "--golden golden.npz" in said(capsys, *rule, code=2)
    np.savez(golden, x=np.zeros((3, 1, 8, 8), np.float32), y=np.zeros(3))
    assert "whole numbers, one for each sample" in said(capsys, *rule, code=2)
    np.savez(golden, x=np.zeros((3, 1, 8, 8), np.float32), y=np.zeros(3, int))
    said(capsys, "cloud", "policy", "set", "lenet", "--golden", golden, "--floor", "95%", *keys)
    assert "accuracy >= 0.95" in said(capsys, "cloud", "policy", "show")
    said(capsys, "cloud", "policy", "remove", "lenet", *keys)
    assert "no model may be released" in said(capsys, "cloud", "policy", "show")
    assert "lenet" in said(capsys, "cloud", "policy", "remove", "lenet", *keys, code=2)


def test_an_empty_fleet_says_how_to_fill_it(operator, pushed, capsys):
    assert "triplane cloud token --role node" in said(capsys, "fleet", "ls")
    assert "no node" in said(capsys, "deploy", "lenet@1", "--to", "all", code=2)
    assert "nobody" in said(capsys, "fleet", "show", "nobody", code=2)
    assert "triplane deploy" in said(capsys, "rollout", "ls")
    assert "triplane rollout ls" in said(capsys, "rollout", "show", code=2)


def test_the_audit_log_holds_what_was_done(operator, pushed, capsys):
    told = said(capsys, "audit", "verify")
    head = re.search(r"head to keep: (\S+)", told)
    assert head
    assert head[1] in said(capsys, "audit", "verify", "--head", head[1])
    forged = head[1].partition(":")[0] + ":" + "0" * 64
    assert "rewritten" in said(capsys, "audit", "verify", "--head", forged, code=5)
    assert "registry.push" in said(capsys, "audit", "ls")


def test_the_dashboard_of_the_process_shows_the_registry(operator, cloud, pushed):
    with urllib.request.urlopen(f"{cloud['dashboard']}/api/versions", timeout=20) as answer:
        assert "lenet@1" in json.load(answer)


def test_a_killed_cloud_is_named_and_comes_back_with_everything(place, capsys, monkeypatch):
    home = place / "mortal"
    run("cloud", "init", "--home", home, "--offline-keys", place / "mortal-keys")
    monkeypatch.setenv("TRIPLANE_IDENTITY", str(home / "operator"))
    with running(home) as (ready, process):
        ports = (ready["port"], ready["enrol_port"], 0)
        token = run("cloud", "token", "--name", "node-1")["token"]
        process.kill()
        process.wait(START_S)
    told = said(capsys, "fleet", "ls", code=4)
    assert f":{ports[0]} does not answer" in told
    assert "triplane cloud up" in told
    with running(home, ports):
        address = f"127.0.0.1:{ports[1]}"
        run("edge", "enrol", token, "--cloud", address, "--home", place / "node-1")
        assert "node-1" in said(capsys, "fleet", "ls")
        assert os.environ["TRIPLANE_IDENTITY"]


def test_a_cloud_that_is_started_again_listens_where_it_did(tmp_path):
    run("cloud", "init", "--home", tmp_path / "home", "--offline-keys", tmp_path / "keys")
    found = []
    for ports in ((0, 0, 0), ()):
        with running(tmp_path / "home", ports) as (ready, _):
            found.append({key: ready[key] for key in ready if "port" in key})
    assert found[0] == found[1]


def test_a_taken_port_is_said_in_our_words_only(tmp_path):
    run("cloud", "init", "--home", tmp_path / "home", "--offline-keys", tmp_path / "keys")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [*COMMAND, "cloud", "up", "--home", tmp_path / "home", "--host", "127.0.0.1"]
        done = subprocess.run(
            [*map(str, command), "--port", str(port)], capture_output=True, text=True, timeout=60,
            check=False,
        )  # fmt: skip
    assert done.returncode == 4
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"triplane: cannot listen on 127.0.0.1:{port}: the port is in use")
