"""Nobody is locked out of his own cloud: certificates are renewed, and the machine lets one in."""

import shutil
import time

import pytest
from tests.cloud.cli.verbs import answer
from tests.faults.fleet import wait_until
from tests.support.cloud_process import running, said

from triplane.cloud.home import admit_operator, initialize
from triplane.cloud.trust.roles import DAY_S
from triplane.proto.errors import Conflict
from triplane.proto.identity import IdentityFolder

pytestmark = pytest.mark.slow


def made_before(folder, days):
    """A cloud whose operator's certificate is so old."""
    now_s = time.time() - days * DAY_S
    return initialize(folder / "home", offline_keys=folder / "keys", now_s=now_s).home


def status(identity):
    return answer("cloud", "status", "--identity", identity)


def test_a_verb_renews_the_certificate_in_its_last_third(tmp_path):
    home = made_before(tmp_path, 25)
    shutil.copytree(home.operator, tmp_path / "laptop")
    with running(home.path) as (ready, _):
        (tmp_path / "laptop" / "cloud").write_text(f"127.0.0.1:{ready['port']}\n")
        told = status(tmp_path / "laptop")
    left_s = told["expires_s"] - time.time()
    assert left_s > 29 * DAY_S
    assert IdentityFolder(tmp_path / "laptop").load().name == "operator"


def test_an_operator_whose_certificate_ended_is_let_in_by_starting_the_cloud(tmp_path, capsys):
    home = made_before(tmp_path, 40)
    before = IdentityFolder(home.operator).expires_s
    assert before < time.time()
    with running(home.path):
        wait_until(lambda: IdentityFolder(home.operator).expires_s > before, "a renewal", 30)
        assert status(home.operator)["role"] == "operator"


def test_a_stopped_cloud_makes_an_operator_where_none_is_left(tmp_path, capsys):
    home = initialize(tmp_path / "home", offline_keys=tmp_path / "keys").home
    lost = tmp_path / "lost"
    shutil.move(home.operator, lost)
    words = ("cloud", "operator", "operator", "--home", home.path, "--identity")
    with running(home.path) as (ready, _):
        assert "another process runs" in said(capsys, *words, tmp_path / "no", code=3)
        (lost / "cloud").write_text(f"127.0.0.1:{ready['port']}\n")
        assert status(lost)["name"] == "operator"
    assert "export TRIPLANE_IDENTITY" in said(capsys, *words, tmp_path / "new")
    with running(home.path) as (ready, _):
        for folder in (lost, tmp_path / "new"):
            (folder / "cloud").write_text(f"127.0.0.1:{ready['port']}\n")
        assert status(tmp_path / "new")["role"] == "operator"
        assert "revoked" in said(capsys, "cloud", "status", "--identity", lost, code=2)
        listed = said(capsys, "audit", "ls", "--identity", tmp_path / "new")
        assert "identity.revoke" in listed
    with pytest.raises(Conflict, match="is not empty"):
        admit_operator(home, "operator", tmp_path / "new")
