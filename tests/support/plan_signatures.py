"""Signed metadata of a cloud that tests play, with the keys of every role at hand."""

import hashlib
import time

from triplane.cloud.trust import MetadataRepository, initialize
from triplane.cloud.trust.repository import target_file
from triplane.cloud.trust.rosters import change_roster
from triplane.cloud.trust.signing import Signer, sign_plan_policy
from triplane.proto.plan_statement import Least, PlanPolicy, PlanStatement
from triplane.proto.signed.trust import bootstrap
from triplane.proto.signed_fields import AUTO, PLANS
from triplane.proto.targets import plan_target
from triplane.unified_ir.federated.core.learn import shared
from triplane.unified_ir.files.container import Container
from triplane.unified_ir.runtime.plan import STATE


class PlanSigner:
    """clock: seconds since 1970, for the repository."""

    def __init__(self, folder, clock=time.time):
        self.keys, online, metadata = folder / "offline", folder / "online", folder / "metadata"
        if not metadata.exists():
            initialize(metadata, online, self.keys, now_s=clock())
        self.repository = MetadataRepository(metadata, online, clock=clock)

    def trusted_by(self, home):
        """Let the device in a home start from this root, as at its enrolment."""
        bootstrap(home / "trust", self.repository.get)

    def allow(self, **rules):
        """Sign the policy for plans, by model."""
        sign_plan_policy(self.repository, PlanPolicy(rules), self.keys)

    def enlist(self, *digests, **options):
        """Sign a roster with exactly these digests of keys."""
        done = change_roster(self.repository, lambda _: frozenset(digests), self.keys, **options)
        return done.roster

    def sign(self, path, role=PLANS, **changes):
        """Sign a plan file by people, or with the cloud's key within the policy.

        changes: of the statement, which lets all shared tensors leave in rounds of any size.
        """
        plan = Container(path, kind="plan")
        roles = {tensor.name: tensor.role for tensor in plan.manifest.tensors_of(STATE)}
        fields = {
            "model": "tiny",
            "version": 1,
            "model_digest": "0" * 64,
            "digest": plan.digest,
            "algorithm": "fedavg",
            "hyperparameters": {"lr": 0.1},
            "tensors": shared(roles),
            "least": Least(),
        }
        statement = PlanStatement(**{**fields, **changes})
        data = path.read_bytes()
        sha256 = hashlib.sha256(data).digest()
        if role == AUTO:
            return self.repository.sign_auto_plan(statement, length=len(data), sha256=sha256)
        target = plan_target(PLANS, statement, length=len(data), sha256=sha256)
        signer = Signer(self.repository, self.keys, PLANS)
        signer.sign(None, {**signer.published(), target.path: target_file(target)})
        return target
