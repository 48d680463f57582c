"""A changed policy holds the rules that people signed, whatever the cloud says of the others."""

import json
from pathlib import Path

import pytest
from tests.attacks.trust_stage import stage
from tests.support.plan_signatures import PlanSigner
from tuf.api._payload import Targets
from tuf.api.metadata import Metadata

from triplane.cloud.trust.initial import plan_policy_file
from triplane.cloud.trust.repository import Pending
from triplane.cloud.trust.signing import change_plan_policy, change_policy, sign_plan_policy
from triplane.proto.errors import Conflict
from triplane.proto.plan_statement import PLAN_POLICY_PATH, Least, PlanPolicy, PlanRule
from triplane.proto.targets import Policy

pytestmark = pytest.mark.long

ANY = PlanRule(("*",), ("*",))
CAREFUL = PlanRule(("fedavg",), ("w",), Least(3, 8, 2))


def adding(name, rule=CAREFUL):
    return lambda before: PlanPolicy({**before.models, name: rule})


class Lying:
    """A stolen cloud, which says that a version of its own waits for signatures."""

    def __init__(self, cloud, policy):
        self._cloud, self._policy = cloud, policy
        self.get, self.submit = cloud.get, cloud.submit

    def pending(self, role):
        waits = Metadata[Targets].from_bytes(self._cloud.pending(role).metadata)
        waits.signed.version += 1
        waits.signed.targets[PLAN_POLICY_PATH] = plan_policy_file(self._policy)
        return Pending(waits.to_bytes(), published=False, signatures=0, threshold=1)


@pytest.mark.parametrize("is_published", [True, False])
def test_rules_that_only_the_cloud_names_are_not_signed(tmp_path, monkeypatch, is_published):
    signer = PlanSigner(tmp_path)
    signer.allow(old=CAREFUL)
    cloud = Lying(signer.repository, PlanPolicy({"old": ANY, "new": ANY}))
    if is_published:
        pending = cloud.pending("targets")
        published = Pending(pending.metadata, published=True, signatures=1, threshold=1)
        monkeypatch.setattr(cloud, "pending", lambda _: published)
    change_plan_policy(cloud, adding("mine"), signer.keys)
    assert signer.repository.plan_policy().models == {"old": CAREFUL, "mine": CAREFUL}
    change_policy(cloud, lambda before: Policy(before.models), signer.keys)
    assert signer.repository.plan_policy().models == {"old": CAREFUL, "mine": CAREFUL}


def test_a_rule_that_waits_for_another_signer_is_kept(tmp_path):
    made = stage(tmp_path, keys={"targets": 2}, thresholds={"targets": 2})
    second = Path(made.offline / "targets-2.pem")
    key = second.read_bytes()
    second.unlink()
    for name in ("a", "b"):
        change_plan_policy(made.repository, adding(name), made.offline)
    second.write_bytes(key)
    (made.offline / "targets-1.pem").unlink()
    _, signed = change_plan_policy(made.repository, adding("b"), made.offline)
    assert signed.submitted.published
    assert set(made.repository.plan_policy().models) == {"a", "b"}


def test_a_policy_that_others_change_meanwhile_is_not_overwritten(tmp_path):
    signer = PlanSigner(tmp_path)

    def slowly(before):
        sign_plan_policy(signer.repository, PlanPolicy({"theirs": CAREFUL}), signer.keys)
        return adding("ours")(before)

    with pytest.raises(Conflict, match="sign again"):
        change_plan_policy(signer.repository, slowly, signer.keys)
    assert json.loads(signer.repository.plan_policy().text())["models"].keys() == {"theirs"}
