"""Signed plans: `triplane cloud policy set-plans`, `remove-plans`, `federate sign`, `unsign`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Final

from tuf.api._payload import Targets

from triplane.cloud.cli.connection import Calls
from triplane.cloud.cli.remote import Remote, remote_at
from triplane.cloud.federation.plan_signing import least_of, sign_plan, unsign_plans
from triplane.cloud.registry.names import Reference
from triplane.cloud.trust.checks import read_plan_policy
from triplane.cloud.trust.roles import parse
from triplane.cloud.trust.signing import SigningResult, change_plan_policy
from triplane.proto.errors import InvalidInput, NotFound
from triplane.proto.federation_pb2 import GetRunRequest, Spec
from triplane.proto.hyperparameters import values_of
from triplane.proto.plan_statement import (
    Least,
    LeastMasking,
    PlanPolicy,
    PlanRule,
    PlanStatement,
)
from triplane.proto.signed_fields import is_hex_digest
from triplane.unified_ir.files.container import Container

OF_ALGORITHMS: Final = ("rate.*", "scaffold.*")
"""Patterns of what algorithms learn beside each parameter: Meta-SGD rates, SCAFFOLD control
variates. No model has tensors of such names."""
STATISTICS: Final = ("running_mean", "running_var")
"""Last parts of the names of batch normalization's statistics, which are averages over batches."""
PARAMETER: Final = "parameter"
BUFFER: Final = "buffer"


def stored_plan_policy(remote: Remote) -> PlanPolicy:
    """Return the policy for plans, as the cloud reports it: what waits for signatures, if any."""
    return read_plan_policy(parse(Targets, remote.pending("targets").metadata, "targets").signed)


def plan_policy_record(policy: PlanPolicy) -> dict[str, Any]:
    """Return the rules for scripts."""
    return {model: rule.fields() for model, rule in sorted(policy.models.items())}


def plan_policy_rows(policy: PlanPolicy) -> list[tuple[str, ...]]:
    """Return a row for each rule."""
    return [
        (
            model,
            ", ".join(rule.algorithms),
            rule.conditions,
            _some(rule.tensors),
        )
        for model, rule in sorted(policy.models.items())
    ]


def _bounds_text(rule: PlanRule) -> str:
    return f"algorithms {', '.join(rule.algorithms)}, at least {rule.conditions}"


def _some(names: Sequence[str]) -> str:
    text = ", ".join(names[:4])
    return text if len(names) <= 4 else f"{text} and {len(names) - 4} more"


def allow_plans(
    cloud: Calls,
    *,
    model: str,
    algorithms: tuple[str, ...],
    tensors: tuple[str, ...],
    masked: float | None,
    roster: bool,
    keys: Path,
    **least: int,
) -> tuple[dict[str, Any], str]:
    """Sign a policy under which the cloud's key may sign plans of `model`."""
    name = Reference.parse(model).model
    if roster and masked is None:
        raise InvalidInput(
            "--roster demands a roster of devices in masked rounds; demand those too, such as by "
            "--masked 0.1"
        )
    with remote_at(cloud) as remote:
        left_out: list[str] = []
        if not tensors:
            tensors, left_out = _parameters(remote, model)
        masking = None if masked is None else LeastMasking(masked, roster=roster)
        rule = PlanRule(algorithms or ("*",), tensors, Least.of_fields(least), masking)
        replaced: list[PlanRule] = []

        def change(before: PlanPolicy) -> PlanPolicy:
            replaced.extend(rule for model, rule in before.models.items() if model == name)
            return PlanPolicy({**before.models, name: rule})

        policy, signed = change_plan_policy(remote, change, keys)
    lines = [_policy_text(name, signed), f"tensors that may leave a device: {_some(rule.tensors)}"]
    lines.append(_bounds_text(rule))
    lines += [f"the rule before: {_bounds_text(old)}" for old in replaced if old != rule]
    if left_out:
        lines.append(
            f"buffers that may not: {_some(left_out)}; a plan that shares them is refused. Allow "
            "them by --tensors PATTERN, beside patterns of the parameters"
        )
    return {"plans": plan_policy_record(policy)}, "\n".join(lines)


def _parameters(remote: Remote, reference: str) -> tuple[tuple[str, ...], list[str]]:
    """Return the names that may leave by default, as patterns, and those of other buffers.

    They are parameters, and the statistics of batch normalization.
    """
    version = remote.version(reference)
    tensors = Container(remote.blob(version.blob, version.size), kind="model").manifest.tensors
    buffers = {tensor.name for tensor in tensors if tensor.role == BUFFER}
    statistics = {name for name in buffers if name.rpartition(".")[2] in STATISTICS}
    names = {tensor.name for tensor in tensors if tensor.role == PARAMETER} | statistics
    if odd := sorted(name for name in names if "*" in name):
        # As a pattern it would let tensors leave that the signer never saw.
        raise InvalidInput(
            f"the tensor {odd[0]!r} of {reference} has a * in its name, which would match others; "
            "say what may leave by --tensors PATTERN"
        )
    return (*sorted(names), *OF_ALGORITHMS), sorted(buffers - statistics)


def forbid_plans(cloud: Calls, *, model: str, keys: Path) -> tuple[dict[str, Any], str]:
    """Sign a policy without `model`: people sign each of its plans."""
    with remote_at(cloud) as remote:
        policy, signed = change_plan_policy(remote, lambda before: _without(before, model), keys)
    return {"plans": plan_policy_record(policy)}, _policy_text(model, signed)


def _without(policy: PlanPolicy, model: str) -> PlanPolicy:
    models = dict(policy.models)
    if models.pop(model, None) is None:
        listed = ", ".join(sorted(models)) or "none"
        raise NotFound(f"the policy for plans has no rule for {model!r} (listed: {listed})")
    return PlanPolicy(models)


def _policy_text(model: str, signed: SigningResult) -> str:
    submitted = signed.submitted
    if submitted.published:
        return f"policy {submitted.version} published; it decides about plans of {model}"
    return (
        f"policy {submitted.version} has {submitted.signatures} of {submitted.threshold} "
        "signatures; the other signers run the same command"
    )


def unsign_run(cloud: Calls, *, run: str, keys: Path) -> tuple[dict[str, Any], str]:
    """Withdraw the signature of the plan of a run, or of a plan by its root digest."""
    if is_hex_digest(run.lower()):
        chosen = partial(_has_digest, run.lower())
    else:
        chosen = partial(_is_of, cloud.federation.GetRun(GetRunRequest(id=run)).spec)
    with remote_at(cloud) as remote:
        done = unsign_plans(remote, chosen, keys, progress=cloud.output.note)
    submitted = done.submitted
    record = asdict(submitted) | {"plans": [plan.custom() for plan in done.plans]}
    lines = [f"{p.digest}: {p.algorithm} of {p.model}@{p.version}" for p in done.plans]
    if submitted.published:
        lines.append(
            "withdrawn; devices do not begin it again, unless the policy for plans lets it"
        )
    else:
        lines.append(
            f"{submitted.signatures} of {submitted.threshold} signatures; the other signers run "
            "the same command"
        )
    return record, "\n".join(lines)


def _has_digest(digest: str, plan: PlanStatement) -> bool:
    return plan.digest == digest


def _is_of(spec: Spec, plan: PlanStatement) -> bool:
    """Return whether a plan was made for runs of this spec."""
    of_plan = (f"{plan.model}@{plan.version}", plan.algorithm, dict(plan.hyperparameters))
    return of_plan == (spec.model, spec.algorithm, values_of(spec.hyperparameters))


def sign_run(
    cloud: Calls, *, run_id: str, keys: Path, model_digest: str, roster: bool, **least: int | None
) -> tuple[dict[str, Any], str]:
    """Make the plan of a run here and sign it."""
    spec = cloud.federation.GetRun(GetRunRequest(id=run_id)).spec
    fields = least_of(spec).fields() | {k: v for k, v in least.items() if v is not None}
    with remote_at(cloud) as remote:
        signed = sign_plan(
            remote,
            spec,
            keys,
            least=Least.of_fields(fields),
            roster=roster,
            model_digest=bytes.fromhex(model_digest),
            progress=cloud.output.note,
        )
    (target,) = signed.targets
    statement, submitted = target.statement, signed.submitted
    record = {
        **asdict(submitted),
        "path": target.path,
        "sha256": target.sha256.hex(),
        **statement.custom(),
    }
    lines = [
        f"{target.path}: {statement.algorithm} of {spec.model}, of model {statement.model_digest}",
        f"tensors that may leave a device: {_some(statement.tensors)}",
        f"in rounds of at least {statement.conditions}",
    ]
    if submitted.published:
        lines.append("signed and published; devices run it")
    else:
        lines.append(
            f"{submitted.signatures} of {submitted.threshold} signatures; the other signers run "
            "the same command"
        )
    return record, "\n".join(lines)
