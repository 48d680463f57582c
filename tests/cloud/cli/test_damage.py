"""A cloud whose disk lost or damaged files, as an operator meets it: the verbs tell and mend it."""

import pytest
from tests.cloud.cli.verbs import answer
from tests.cloud.registry.models import model_bytes
from tests.support.cloud_process import running

pytestmark = pytest.mark.slow


@pytest.mark.long
def test_damaged_files_of_a_signed_version_are_named_and_mended(tmp_path, monkeypatch):
    home, keys, file = tmp_path / "home", tmp_path / "keys", tmp_path / "s.tpm"
    answer("cloud", "init", "--home", home, "--offline-keys", keys)
    monkeypatch.setenv("TRIPLANE_IDENTITY", str(home / "operator"))
    file.write_bytes(model_bytes(tmp_path))
    with running(home):
        pushed = answer("registry", "push", file, "--target", "ort-x64")
        signed = answer("sign", "s@1", "--keys", keys)["targets"][0]
        bundle = home / "blobs" / pushed["bundles"][0]["blob"]
        model = home / "blobs" / pushed["blob"]
        bundle.write_bytes(bundle.read_bytes()[:3000])
        assert answer("registry", "show", "s@1")["bundles"][0]["state"] == "converting"
        assert answer("sign", "s@1", "--keys", keys)["targets"] == [signed]
        assert bundle.stat().st_size == signed["length"]

        bundle.unlink()
        model.write_bytes(model.read_bytes()[:1000])
        told = answer("sign", "s@1", "--keys", keys, code=2)["error"]["message"]
        assert "the cloud's copy of the model file is lost or damaged" in told
        assert "push the same file again" in told
        assert answer("registry", "show", "s@1")["bundles"][0]["state"] == "failed"
        assert answer("registry", "push", file)["version"] == 2
        assert answer("sign", "s@1", "--keys", keys)["targets"] == [signed]
        assert bundle.stat().st_size == signed["length"]
        shown = answer("registry", "show", "s@1")["bundles"][0]
        assert (shown["state"], shown["signed_path"]) == ("ready", signed["path"])


def test_a_download_of_a_damaged_model_names_the_damage_and_the_way_out(tmp_path, monkeypatch):
    home, file, out = tmp_path / "home", tmp_path / "s.tpm", tmp_path / "out.tpm"
    answer("cloud", "init", "--home", home, "--offline-keys", tmp_path / "keys")
    monkeypatch.setenv("TRIPLANE_IDENTITY", str(home / "operator"))
    file.write_bytes(model_bytes(tmp_path))
    with running(home):
        model = home / "blobs" / answer("registry", "push", file)["blob"]
        model.write_bytes(model.read_bytes()[:1000])
        told = answer("registry", "pull", "s@1", "--out", out, code=2)["error"]["message"]
        assert "the cloud's copy of the file" in told
        assert "is lost or damaged; push the same file again" in told
        answer("registry", "push", file)
        answer("registry", "pull", "s@1", "--out", out)
        assert out.read_bytes() == file.read_bytes()
