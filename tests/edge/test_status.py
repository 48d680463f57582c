"""`triplane edge status` on a home with a damaged file."""

import json
import time

import pytest
from click.testing import CliRunner

from triplane.cloud.home import initialize
from triplane.cloud.identity.authority import Authority
from triplane.edge.cli import edge
from triplane.edge.home import NodeHome, NodeSettings
from triplane.edge.status import NodeStatus
from triplane.proto.errors import Corrupt
from triplane.proto.identity import certificate_pem, certificate_request, key_pem, new_key
from triplane.unified_ir.cli.shell import EXIT_CODES


@pytest.fixture(scope="module")
def enrolled(tmp_path_factory):
    """An enrolled node of a cloud that is away."""
    folder = tmp_path_factory.mktemp("status")
    cloud = initialize(folder / "cloud", offline_keys=folder / "keys").home
    node, authority, key = NodeHome(folder / "node"), Authority.load(cloud.authority), new_key()
    node.make()
    issued = authority.issue(certificate_request(key), "camera-1", time.time())
    node.identity.save(
        authority=authority.pem,
        certificate=certificate_pem(issued),
        key=key_pem(key),
        cloud="127.0.0.1:1",
    )
    return node


@pytest.fixture
def node(enrolled):
    """The same with good settings and no models."""
    if enrolled.settings_file.is_dir():
        enrolled.settings_file.rmdir()
    enrolled.save_settings(NodeSettings(port=0, metrics_port=0))
    for pointer in enrolled.models.iterdir():
        pointer.unlink()
    return enrolled


def status(node, *options):
    found = CliRunner().invoke(edge, ["status", "--home", str(node.path), *options])
    assert found.exception is None or isinstance(found.exception, SystemExit), found.exception
    return found


def test_a_whole_home_has_nothing_damaged(node):
    found = status(node, "--json")
    assert found.exit_code == 0
    assert (json.loads(found.stdout)["damaged"], json.loads(found.stdout)["unreadable"]) == ("", [])


def test_a_cloud_that_does_not_answer_is_named_and_no_trouble_of_the_node(node):
    found = status(node)
    assert found.exit_code == 0
    assert "the cloud does not answer from here: connection refused" in found.stdout


@pytest.mark.parametrize("text", ["", "null", '{"host": "127.0', "[1]", '{"pork": 1}', "\0\xff"])
def test_damaged_settings_are_named_and_the_exit_code_is_that_of_up(node, text):
    node.settings_file.write_text(text, encoding="latin-1")
    found = status(node)
    assert found.exit_code == EXIT_CODES[Corrupt]
    assert f"DAMAGED: {node.settings_file} cannot be read" in found.stdout
    assert "camera-1 of 127.0.0.1:1: serving DOWN, agent DOWN" in found.stdout
    found = status(node, "--json")
    assert found.exit_code == EXIT_CODES[Corrupt]
    assert str(node.settings_file) in json.loads(found.stdout)["damaged"]


def test_a_folder_in_the_place_of_the_settings_is_damage_too(node):
    node.settings_file.unlink()
    node.settings_file.mkdir()
    found = status(node)
    assert found.exit_code == EXIT_CODES[Corrupt]
    assert str(node.settings_file) in found.stdout


def test_a_damaged_pointer_is_named_but_the_node_mends_it_itself(node):
    (node.models / "eyes.json").write_text("no pointer")
    found = status(node)
    assert found.exit_code == 0
    assert f"unreadable: {node.models / 'eyes.json'} is not a pointer" in found.stdout


@pytest.mark.parametrize(
    ("serving", "words"),
    [(None, "not known"), ({}, "nothing"), ({"digits": "3"}, "3")],
)
def test_what_is_served_is_told_from_what_is_not_known(serving, words):
    status = NodeStatus(
        name="n", cloud="c", expires_s=0.0, processes={}, serving=serving, committed={},
        desired={"digits": 3}, last={},
    )  # fmt: skip
    assert f"digits: serves {words}, committed nothing, assigned 3" in status.text()
