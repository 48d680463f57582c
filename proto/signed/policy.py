"""Apply the offline-signed release policy to targets that the role `auto` signed.

Only the node does this: the cloud has the key of `auto`, so nothing that it sends, neither the
assignment nor the target's own fields, may extend the policy. A model without a rule, a node
outside the share, a version that is not above the committed one, and a metric below its floor are
refused, each with its own kind.
"""

from dataclasses import dataclass

from triplane.proto.signed.refusal import AttemptRefused
from triplane.proto.signed_fields import AUTO
from triplane.proto.targets import Policy, Rule, SignedTarget, TargetName, in_share


@dataclass(frozen=True, slots=True)
class Admission:
    """A target that may be tried. rule, golden: further requirements, if `auto` signed it."""

    target: SignedTarget
    rule: Rule | None = None
    golden: SignedTarget | None = None


def judge(policy: Policy, name: TargetName, *, node: str, committed_version: int) -> Rule | None:
    """Return the rule that an automatic release must meet; None for a release by people.

    committed_version: the model's version on this node, 0 if none. AttemptRefused of kind "policy",
    "share" or "floor".
    """
    if name.role != AUTO:
        return None
    rule = policy.models.get(name.model)
    if rule is None:
        listed = ", ".join(sorted(policy.models)) or "none"
        raise AttemptRefused(
            "policy",
            f"{name}: the release policy has no rule for model {name.model!r} (listed: {listed}); "
            "it must be released by signers, or listed in a policy signed offline",
        )
    if not in_share(node, name.model, rule.share):
        raise AttemptRefused(
            "share",
            f"{name}: node {node!r} is outside the {rule.share:.2%} of nodes that the release "
            f"policy lets take unreleased versions of {name.model!r}; release the version by hand",
        )
    # Otherwise a stolen cloud could bring back an old version with a known weakness.
    if name.version <= committed_version:
        raise AttemptRefused(
            "floor",
            f"{name}: version {name.version} is not above the committed version "
            f"{committed_version}; only signers may send a node back",
        )
    return rule


def check_metric(admission: Admission, measured: float) -> None:
    """Raise AttemptRefused unless the metric on the golden set reaches the policy's floor."""
    rule = admission.rule
    if rule is not None and not measured >= rule.floor:  # NaN is below every floor
        raise AttemptRefused(
            "metric",
            f"{admission.target.path}: {rule.metric} {measured:.4f} on {rule.golden} is below the "
            f"policy's floor {rule.floor:.4f}",
        )
