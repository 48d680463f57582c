"""`triplane cloud policy`: requests and output."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from tuf.api._payload import Targets

from triplane.cloud.cli.connection import Calls
from triplane.cloud.cli.progress import reported
from triplane.cloud.cli.remote import Remote, remote_at
from triplane.cloud.cli.text import table
from triplane.cloud.trust.checks import read_policy
from triplane.cloud.trust.roles import parse
from triplane.cloud.trust.signing import SigningResult, sign_policy
from triplane.proto.errors import NotFound
from triplane.proto.targets import METRICS, Policy, Rule
from triplane.proto.transfer import upload
from triplane.unified_ir.cli.shell import CommandOutput

MODEL_CHARS = 40
DIGEST_CHARS = 16


def shown(cloud: Calls) -> tuple[dict[str, Any], str]:
    """The policy as the cloud tells it. Only a node, or a signer, verifies its signature."""
    with remote_at(cloud) as remote:
        policy = _stored_policy(remote)
    rows = [
        (model, f"{rule.share:.0%}", f"{rule.metric} >= {rule.floor:g}", rule.golden)
        for model, rule in sorted(policy.models.items())
    ]
    nothing = "no model may be released without a signature; triplane cloud policy set --help"
    text = table(("MODEL", "SHARE OF NODES", "FLOOR", "SAMPLES"), rows) if rows else nothing
    return _record(policy), text


def allow(
    cloud: Calls,
    output: CommandOutput,
    *,
    model: str,
    golden: Path,
    floor: float,
    share: float,
    keys: Path,
) -> tuple[dict[str, Any], str]:
    """Sign a policy that lets the auto role release `model`; uploads the samples first."""
    digest = hashlib.sha256(golden.read_bytes()).hexdigest()
    path = f"golden/{model[:MODEL_CHARS]}-{digest[:DIGEST_CHARS]}"
    with reported(output, f"uploading {golden.name}") as progress:
        upload(cloud.channel, golden, progress)
    with remote_at(cloud) as remote:
        rule = Rule(share=share, golden=path, metric=METRICS[0], floor=floor)
        policy = Policy({**_stored_policy(remote).models, model: rule})
        signed = sign_policy(remote, policy, keys, goldens={path: golden})
    return _record(policy), _signed_text(model, signed)


def forbid(cloud: Calls, *, model: str, keys: Path) -> tuple[dict[str, Any], str]:
    """Sign a policy without `model`."""
    with remote_at(cloud) as remote:
        models = dict(_stored_policy(remote).models)
        if models.pop(model, None) is None:
            raise NotFound(f"the policy has no rule for {model}; it has {sorted(models) or 'none'}")
        policy = Policy(models)
        signed = sign_policy(remote, policy, keys)
    return _record(policy), _signed_text(model, signed)


def _stored_policy(remote: Remote) -> Policy:
    return read_policy(parse(Targets, remote.pending("targets").metadata, "targets").signed)


def _record(policy: Policy) -> dict[str, Any]:
    return {
        "models": {
            model: {"share": r.share, "golden": r.golden, "metric": r.metric, "floor": r.floor}
            for model, r in policy.models.items()
        }
    }


def _signed_text(model: str, signed: SigningResult) -> str:
    done = signed.submitted
    if done.published:
        return f"policy {done.version} published; it says what may happen to {model} by itself"
    return (
        f"policy {done.version} has {done.signatures} of {done.threshold} signatures; the other "
        "signers run the same command"
    )
