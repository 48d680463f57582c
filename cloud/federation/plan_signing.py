"""Signatures of training plans, without which devices run none.

A person signs the plan of a run where the keys are, after making it again from the model; or the
cloud's key signs it, if the policy that people signed allows it. Until one of both has happened the
run waits.
"""

from __future__ import annotations

import asyncio
import hashlib
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Protocol

from tuf.api._payload import TargetFile

from triplane.cloud.federation.children import Children
from triplane.cloud.federation.journal import Prepared
from triplane.cloud.federation.spec import fewest_updates
from triplane.cloud.registry.names import Reference
from triplane.cloud.trust.repository import MetadataRepository, Submitted, target_file
from triplane.cloud.trust.signing import (
    MAX_REPEATED,
    Metadatas,
    Progress,
    Signer,
    SigningResult,
    check_model,
    until_signed,
)
from triplane.proto import federation_pb2 as pb
from triplane.proto.blobs import BlobFolder
from triplane.proto.errors import Conflict, Corrupt, InvalidInput, NotFound
from triplane.proto.hyperparameters import set_values, values_of
from triplane.proto.plan_statement import (
    MAX_LEAST,
    Least,
    LeastMasking,
    PlanStatement,
    is_plan,
)
from triplane.proto.registry_pb2 import Version
from triplane.proto.roster import ROSTER_PATH, Roster
from triplane.proto.signed_fields import PLANS
from triplane.proto.targets import SignedTarget, plan_target, read_target
from triplane.unified_ir.federated.core.metric import Scores
from triplane.unified_ir.files.container import Container

SAFE_BATCH: Final = 2
"""Default of the least batch: the update of a step on one sample is the sample."""


class PlanSource(Metadatas, Protocol):
    """The calls of the cloud that signing a plan needs."""

    def version(self, reference: str, /) -> Version:
        """Return a registered version."""

    def blob(self, sha256: bytes, size: int | None, /) -> Path:
        """Return a local, verified file of that digest."""


def least_of(spec: pb.Spec) -> Least:
    """Return the smallest round that a run has; its batches may be smaller on small devices."""
    sampling = spec.sampling
    return Least(
        devices=fewest_updates(spec),
        batch=min(SAFE_BATCH, _batch_of(spec)),
        steps=sampling.steps,
    )


def least_masking_of(spec: pb.Spec) -> LeastMasking | None:
    """Return the weakest masking that a run has; None if its updates are in the clear."""
    if not spec.HasField("masking"):
        return None
    default = LeastMasking()
    return LeastMasking(spec.masking.colluding_share, spec.masking.failure or default.failure)


def _batch_of(spec: pb.Spec) -> int:
    """Return the samples in a step; of an episode those in its smaller part, as devices count."""
    from triplane.unified_ir.federated.algorithms import algorithm

    sampling = spec.sampling
    if algorithm(spec.algorithm).episodes:
        return min(sampling.support, sampling.query)
    return sampling.batch_size


@dataclass(frozen=True, slots=True)
class PlanFile:
    """What a signature pins. digest: the root digest; sha256, length: of the file."""

    digest: str
    sha256: bytes
    length: int
    tensors: tuple[str, ...]

    def target(
        self,
        role: str,
        spec: pb.Spec,
        model_digest: bytes,
        least: Least,
        masking: LeastMasking | None,
    ) -> SignedTarget:
        """Return the target of this plan, which was made for a run of `spec`."""
        reference = Reference.parse(spec.model)
        statement = PlanStatement(
            model=reference.model,
            version=reference.version or 0,
            model_digest=model_digest.hex(),
            digest=self.digest,
            algorithm=spec.algorithm,
            hyperparameters=values_of(spec.hyperparameters),
            tensors=self.tensors,
            least=least,
            masking=masking,
        )
        return plan_target(role, statement, length=self.length, sha256=self.sha256)


class PlanSignatures:
    """The signatures of the plans that a cloud prepares."""

    def __init__(self, repository: MetadataRepository, blobs: BlobFolder) -> None:
        self._repository, self._blobs = repository, blobs

    def roster(self) -> Roster | None:
        """Return the roster of devices, if people have signed one that is valid now."""
        return self._repository.roster()

    def lacking(
        self, run: str, spec: pb.Spec, prepared: Prepared, model_digest: bytes, used: set[str]
    ) -> str:
        """Return why devices would refuse a prepared run's plan; empty if it is signed.

        It signs the plan with the cloud's key if the policy allows it. used: digests of the plans
        of other runs. Conflict: the run's rounds are smaller than those that were signed.
        """
        sha256 = bytes.fromhex(prepared.plan)
        signed = self._repository.find_plan(prepared.plan_digest)
        by_people = signed is not None and signed.path.startswith(f"{PLANS}/")
        if signed is None or not by_people or signed.sha256 != sha256:
            try:
                signed = self._sign_auto(spec, prepared, model_digest, used)
            except (Conflict, NotFound) as error:  # of the policy; of the cloud's key
                return (
                    f"waits for a signature of its plan: {error}. With the offline folder: "
                    f"triplane federate sign {run} --keys DIR, or triplane cloud policy set-plans "
                    f"{Reference.parse(spec.model).model} --keys DIR for this and later runs"
                )
        _check_size(spec, signed.statement.least)
        masking = signed.statement.masking
        _check_masking(spec, masking)
        if masking is not None and masking.roster and self.roster() is None:
            return (
                "waits for a roster of devices, which the signature of its plan demands: triplane "
                "cloud roster add NAME ... --keys DIR"
            )
        return ""

    def _sign_auto(
        self, spec: pb.Spec, prepared: Prepared, model_digest: bytes, used: set[str]
    ) -> SignedTarget:
        sha256 = bytes.fromhex(prepared.plan)
        length = self._blobs.find(sha256).stat().st_size
        plan = PlanFile(prepared.plan_digest, sha256, length, tuple(sorted(prepared.roles)))
        rule = self._repository.plan_policy().models.get(Reference.parse(spec.model).model)
        least, masking = (Least(), None) if rule is None else (rule.least, rule.masking)
        statement = plan.target(PLANS, spec, model_digest, least, masking).statement
        return self._repository.sign_auto_plan(statement, length=length, sha256=sha256, keep=used)


def _check_size(spec: pb.Spec, least: Least) -> None:
    sampling = spec.sampling
    of_run = Least(
        devices=fewest_updates(spec),
        batch=min(_batch_of(spec), MAX_LEAST),
        steps=sampling.steps,
        held_out=MAX_LEAST,  # which each device has or has not
    )
    lacking = least.lacking(of_run)
    if lacking:
        raise Conflict(
            f"the run is smaller than its signed plan allows, so every device would decline: "
            f"{lacking}; start a larger run, or have the plan signed for smaller ones"
        )


def _check_masking(spec: pb.Spec, masking: LeastMasking | None) -> None:
    if masking is None:
        return
    # Without the roster: whether there is one is not up to the run.
    lacking = replace(masking, roster=False).lacking(least_masking_of(spec))
    if not lacking and spec.scores == Scores.CLEAR:
        lacking = "masking, and scores are in the clear"
    if lacking:
        raise Conflict(
            f"the signature of the plan demands {lacking}, so every device would decline; start a "
            "run with that masking, or have the plan signed for this one"
        )


def sign_plan(
    cloud: PlanSource,
    spec: pb.Spec,
    keys_folder: Path,
    *,
    least: Least,
    roster: bool = False,
    model_digest: bytes = b"",
    progress: Progress = lambda _: None,
    now_s: float | None = None,
) -> SigningResult:
    """Make the plan of a run's spec here, and sign it with the `plans` keys in a folder.

    roster: whether devices demand a signed roster, for a masked run. model_digest: root digest of
    the model file, if the signer knows it; any other is refused. Plans that wait for signatures are
    made and compared as well. NotFound: the folder has no such key. Corrupt: what waits is not what
    its model gives here, or the cloud's metadata does not follow from the root beside the keys.
    """
    wanted = _made_here(cloud, spec, least, progress, roster=roster, model_digest=model_digest)
    checked = {wanted.path: target_file(wanted)}

    def attempt() -> SigningResult:
        signer = Signer(cloud, keys_folder, PLANS)
        base = signer.published()
        if base.get(wanted.path) == checked[wanted.path]:
            pending = cloud.pending(PLANS)
            done = Submitted(True, pending.signatures, pending.threshold, signer.version)
            return SigningResult(done, (wanted,))
        # Also what waits with another roster, so that nobody's signature of it is lost.
        apart = (wanted.path, ROSTER_PATH)
        waiting = signer.waiting({k: v for k, v in base.items() if k not in apart})
        others = {} if waiting is None else dict(waiting.signed.targets)
        if waiting is not None and not signer.has_signed(waiting):
            checked.update(_compared(cloud, base, others, checked, progress))
        progress(f"signing {wanted.path}")
        targets = {**base, **others, wanted.path: checked[wanted.path]}
        return SigningResult(signer.sign(waiting, targets, now_s), (wanted,))

    return until_signed(attempt, progress)


@dataclass(frozen=True, slots=True)
class WithdrawnPlans:
    """The outcome of withdrawing signatures. plans: what was signed about them."""

    submitted: Submitted
    plans: tuple[PlanStatement, ...]


def unsign_plans(
    cloud: Metadatas,
    chosen: Callable[[PlanStatement], bool],
    keys_folder: Path,
    *,
    progress: Progress = lambda _: None,
    now_s: float | None = None,
) -> WithdrawnPlans:
    """Sign the list of `plans` without the plans that `chosen` accepts.

    NotFound: there is none among the published ones. Conflict: other plans or a roster wait for
    signatures. It does not concern plans that the cloud's key has signed within the policy.
    """

    def attempt() -> WithdrawnPlans:
        signer = Signer(cloud, keys_folder, PLANS)
        base = signer.published()
        plans = {path: _statement(path, entry) for path, entry in base.items() if is_plan(path)}
        gone = {path: statement for path, statement in plans.items() if chosen(statement)}
        if not gone:
            listed = ", ".join(f"{s.digest[:12]} of {s.model}@{s.version}" for s in plans.values())
            raise NotFound(f"no such plan is signed by people (signed: {listed[:500] or 'none'})")
        waiting = signer.waiting({})
        if waiting is not None and any(
            base.get(path) != entry for path, entry in waiting.signed.targets.items()
        ):
            raise Conflict("plans or a roster wait for signatures of this role; sign them first")
        kept = {path: entry for path, entry in base.items() if path not in gone}
        return WithdrawnPlans(signer.sign(waiting, kept, now_s), tuple(gone.values()))

    return until_signed(attempt, progress)


def _statement(path: str, entry: TargetFile) -> PlanStatement:
    return read_target(path, entry.length, entry.hashes, entry.custom).statement


def _compared(
    cloud: PlanSource,
    base: Mapping[str, TargetFile],
    waiting: Mapping[str, TargetFile],
    checked: Mapping[str, TargetFile],
    progress: Progress,
) -> dict[str, TargetFile]:
    """Make the plans that wait again; return their entries, which are those that wait. Corrupt."""
    new = {path: entry for path, entry in waiting.items() if base.get(path) != entry}
    if waiting.get(ROSTER_PATH) != base.get(ROSTER_PATH):
        raise Conflict(
            "a roster of devices waits for signatures of the same role; sign it first, by the "
            "command that its first signer ran: triplane cloud roster add, remove or renew"
        )
    if len(new) > MAX_REPEATED:
        raise InvalidInput(f"{len(new)} plans wait; at most {MAX_REPEATED} are signed at once")
    compared: dict[str, TargetFile] = {}
    for path, entry in new.items():
        ours = checked.get(path)
        if ours is None:
            statement = _statement(path, entry)
            spec = pb.Spec(
                model=f"{statement.model}@{statement.version}", algorithm=statement.algorithm
            )
            set_values(spec.hyperparameters, dict(statement.hyperparameters))
            if (masking := statement.masking) is not None:
                spec.masking.colluding_share = masking.colluding_share
                spec.masking.failure = masking.failure
            # What making the plan again does not check, because another signer chose it.
            progress(f"{path} waits too, for rounds of {statement.conditions} or more")
            roster = masking is not None and masking.roster
            ours = target_file(_made_here(cloud, spec, statement.least, progress, roster=roster))
        if ours != entry:
            raise Corrupt(
                f"{path} waits in the cloud with other facts than its model and the options here "
                f"give; the other signers and you must use the same options"
            )
        compared[path] = entry
    return compared


def _made_here(
    cloud: PlanSource,
    spec: pb.Spec,
    least: Least,
    progress: Progress,
    *,
    roster: bool,
    model_digest: bytes = b"",
) -> SignedTarget:
    masking = _signed_masking(spec, roster=roster)
    version = cloud.version(spec.model)
    check_model(version, model_digest)
    progress(f"making the plan of {spec.algorithm} for {spec.model}")
    with tempfile.TemporaryDirectory(prefix="triplane-sign-") as work:
        model = cloud.blob(version.blob, version.size)
        digest = bytes.fromhex(Container(model, kind="model").digest)
        # The digest is the name by which a signer knows the model; the cloud may say any other.
        if digest != version.model_digest:
            raise Corrupt(
                f"the file of {spec.model} is model {digest.hex()[:12]}, and the cloud calls it "
                f"{version.model_digest.hex()[:12]}"
            )
        plan = asyncio.run(_plan_file(Path(work), model, spec))
    return plan.target(PLANS, spec, digest, least, masking)


def _signed_masking(spec: pb.Spec, *, roster: bool) -> LeastMasking | None:
    masking = least_masking_of(spec)
    if not roster:
        return masking
    if masking is None:
        raise InvalidInput(
            "a roster of devices protects masked rounds, and this run is not masked; leave out "
            "--roster, or sign a run with --mask"
        )
    return replace(masking, roster=True)


async def _plan_file(work: Path, model: Path, spec: pb.Spec) -> PlanFile:
    async with Children(work).plan(model, spec) as planned:
        with planned.plan.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").digest()
            length = file.tell()
        return PlanFile(planned.digest, sha256, length, tuple(sorted(planned.roles)))
