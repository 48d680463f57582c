"""What the cloud would refuse of a push is refused before a byte of the file is sent."""

import os

import numpy as np
import pytest
from tests.cloud.cli.verbs import answer
from tests.cloud.registry.models import model_bytes
from tests.support.cloud_process import running

pytestmark = pytest.mark.slow
BROKEN = os.fsdecode(b"caf\xe9")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("push")
    answer("cloud", "init", "--home", folder / "home", "--offline-keys", folder / "keys")
    (folder / "m.tpm").write_bytes(model_bytes(folder))
    with running(folder / "home"):
        yield folder


@pytest.fixture
def operator(place, monkeypatch):
    monkeypatch.setenv("TRIPLANE_IDENTITY", str(place / "home" / "operator"))


def blobs(place):
    return [path for path in (place / "home" / "blobs").rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--name", "d; rm"), "a name (model) has"),
        (("--name", "é"), "a name (model) has"),
        (("--name", "../x"), "a name (model) has"),
        (("--name", BROKEN), "a name (model) has"),
        (("--note", "x" * 30_000), "note 2000"),
        (("--note", BROKEN), "--note is not valid UTF-8"),
        (("--note", "a\0b"), "NUL"),
        (("--alias", "latest"), "alias"),
        (("--alias", BROKEN), "alias"),
        (("--entry", BROKEN), "entry"),
        (("--parent", "m"), "MODEL@NUMBER"),
        (("--max-accuracy-drop", "1e300"), "max_accuracy_drop"),
        (("--target", "toaster"), "no target 'toaster'"),
    ],
)
def test_a_push_that_breaks_a_rule_sends_nothing(place, operator, options, words):
    told = answer("registry", "push", place / "m.tpm", *options, code=2)["error"]["message"]
    assert words in told
    assert blobs(place) == []


def test_a_file_whose_own_name_is_no_text_is_no_name_of_a_model(place, operator):
    file = place / f"{BROKEN}.tpm"
    file.write_bytes((place / "m.tpm").read_bytes())
    try:
        told = answer("registry", "push", file, code=2)["error"]["message"]
        assert "a name (model) has" in told
        assert "--name" in told
        assert blobs(place) == []
    finally:
        file.unlink()


def test_a_file_under_a_path_that_is_no_text_is_pushed_under_the_name_that_is_given(
    place, operator, tmp_path
):
    folder = tmp_path / BROKEN
    folder.mkdir()
    file = folder / f"{BROKEN}.tpm"
    file.write_bytes((place / "m.tpm").read_bytes())
    assert answer("registry", "push", file, "--name", "cafe")["version"] == 1
    plain = folder / "plain.tpm"
    plain.write_bytes(file.read_bytes())
    assert answer("registry", "push", plain)["model"] == "plain"


def test_samples_that_do_not_fit_the_model_send_nothing(place, operator):
    np.savez(place / "odd.npz", x=np.zeros((4, 3, 9), np.float32), y=np.zeros(4, int))
    before = blobs(place)
    for options in (("--quantize", "int8", "--calibrate"), ("--evaluate",)):
        push = ("registry", "push", place / "m.tpm", *options, place / "odd.npz")
        assert "with at least one sample" in answer(*push, code=2)["error"]["message"]
    assert blobs(place) == before
