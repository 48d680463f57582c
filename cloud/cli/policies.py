"""`triplane cloud policy`: requests and output."""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tuf.api._payload import Targets

from triplane.cloud.cli.connection import Calls
from triplane.cloud.cli.plan_policies import (
    plan_policy_record,
    plan_policy_rows,
    stored_plan_policy,
)
from triplane.cloud.cli.progress import reported
from triplane.cloud.cli.remote import Remote, remote_at
from triplane.cloud.cli.text import table
from triplane.cloud.trust.checks import read_policy
from triplane.cloud.trust.roles import parse
from triplane.cloud.trust.signing import SigningResult, change_policy
from triplane.proto.errors import Corrupt, InvalidInput, NotFound
from triplane.proto.targets import METRICS, Policy, Rule
from triplane.proto.transfer import upload
from triplane.unified_ir.files.golden_set import golden_set, has_episodes

MODEL_CHARS = 40
DIGEST_CHARS = 16


def describe_policy(cloud: Calls) -> tuple[dict[str, Any], str]:
    """Show the policy as the cloud reports it; nodes and signers verify its signature."""
    with remote_at(cloud) as remote:
        policy = _stored_policy(remote)
        plans = stored_plan_policy(remote)
    rows = [
        (model, f"{rule.share:.0%}", f"{rule.metric} >= {rule.floor:g}", rule.golden)
        for model, rule in sorted(policy.models.items())
    ]
    releases = (
        table(("MODEL", "SHARE OF NODES", "FLOOR", "SAMPLES"), rows)
        if rows
        else "no model may be released automatically; allow one with triplane cloud policy set"
    )
    headings = ("PLANS OF", "ALGORITHMS", "AT LEAST", "TENSORS THAT MAY LEAVE")
    signed = (
        table(headings, plan_policy_rows(plans))
        if plans.models
        else "people sign every plan; allow the cloud to with triplane cloud policy set-plans"
    )
    record = _record(policy) | {"plans": plan_policy_record(plans)}
    return record, f"{releases}\n\n{signed}"


def allow(
    cloud: Calls, *, model: str, golden: Path, floor: float, share: float, keys: Path
) -> tuple[dict[str, Any], str]:
    """Upload the samples; sign a policy under which the auto role may release `model`."""
    _check_golden(golden)
    digest = hashlib.sha256(golden.read_bytes()).hexdigest()
    # The digest in the name: new samples get a new target, and never replace published ones.
    path = f"golden/{model[:MODEL_CHARS]}-{digest[:DIGEST_CHARS]}"
    with reported(cloud.output, f"uploading {golden.name}") as progress:
        # Upload first, because the cloud refuses a policy whose samples it lacks.
        upload(cloud.channel, golden, progress)
    with remote_at(cloud) as remote:
        rule = Rule(share=share, golden=path, metric=METRICS[0], floor=floor)
        policy, signed = change_policy(
            remote,
            lambda before: Policy({**before.models, model: rule}),
            keys,
            goldens={path: golden},
        )
    return _record(policy), _signed_text(model, signed)


def _check_golden(golden: Path) -> None:
    """Refuse samples with which every node would refuse every version."""
    try:
        golden_set(golden, episodes=has_episodes(golden))
    except Corrupt as error:
        raise InvalidInput(f"--golden {golden.name}: {error}") from error


def forbid(cloud: Calls, *, model: str, keys: Path) -> tuple[dict[str, Any], str]:
    """Sign a policy without `model`."""
    with remote_at(cloud) as remote:
        policy, signed = change_policy(remote, lambda before: _without(before, model), keys)
    return _record(policy), _signed_text(model, signed)


def _without(policy: Policy, model: str) -> Policy:
    models = dict(policy.models)
    if models.pop(model, None) is None:
        listed = ", ".join(sorted(models)) or "none"
        raise NotFound(f"the policy has no rule for model {model!r} (listed: {listed})")
    return Policy(models)


def _stored_policy(remote: Remote) -> Policy:
    # The pending version, if there is one: a rule that waits for signatures must not be dropped.
    return read_policy(parse(Targets, remote.pending("targets").metadata, "targets").signed)


def _record(policy: Policy) -> dict[str, Any]:
    return {"models": {model: asdict(rule) for model, rule in policy.models.items()}}


def _signed_text(model: str, signed: SigningResult) -> str:
    submitted = signed.submitted
    if submitted.published:
        return (
            f"policy {submitted.version} published; it decides about automatic releases of {model}"
        )
    return (
        f"policy {submitted.version} has {submitted.signatures} of {submitted.threshold} "
        "signatures; the other signers run the same command"
    )
