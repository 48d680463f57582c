"""Signed targets and the release policy: how they are written and parsed.

Signers write them, the cloud forwards them, nodes decide by them. All three parse them with the
functions here, so that no input can be read in two ways. This module checks no signatures; it
parses the content of signed metadata and refuses everything that is not exactly as documented.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from triplane.proto.errors import Corrupt, InvalidInput
from triplane.proto.plan_statement import PlanName, PlanStatement, is_plan
from triplane.proto.roster import ROSTER_PATH, Roster
from triplane.proto.signed_fields import (
    AUTO,
    NAME,
    RELEASE,
    is_hex_digest,
    parse_policy,
    shown,
)

ROLES: Final = (RELEASE, AUTO)
"""Roles that sign bundles."""
POLICY_PATH: Final = "policy.json"
METRICS: Final = ("accuracy",)
MAX_TARGET_BYTES: Final = 1 << 40
MAX_POLICY_BYTES: Final = 256 << 10
MAX_POLICY_MODELS: Final = 1000
SHARE_BITS: Final = 53
"""Bits that a float represents exactly, so that a share of 1 includes every node."""

_BUNDLE: Final = re.compile(rf"(release|auto)/({NAME})@([1-9][0-9]{{0,8}})\+({NAME})\.bundle")
_GOLDEN: Final = re.compile(rf"golden/{NAME}")
_CUSTOM: Final = {"model", "version", "target", "model_digest", "content_digest"}
_RULE: Final = {"share", "golden", "metric", "floor"}


@dataclass(frozen=True, slots=True, order=True)
class TargetName:
    """A bundle by the role that signs it: `release/digits@3+ort-x64.bundle`."""

    role: str
    model: str
    version: int
    target: str

    def __str__(self) -> str:
        return f"{self.role}/{self.model}@{self.version}+{self.target}.bundle"

    @classmethod
    def parse(cls, path: str) -> "TargetName":
        """Parse a target path. InvalidInput unless it is spelled exactly as `str` spells it."""
        match = _BUNDLE.fullmatch(path)
        if match is None:
            raise InvalidInput(
                f"a bundle's target path is ROLE/MODEL@VERSION+TARGET.bundle with role "
                f"{' or '.join(ROLES)}, got {path[:200]!r}"
            )
        role, model, version, target = match.groups()
        return cls(role, model, int(version), target)


@dataclass(frozen=True, slots=True)
class SignedTarget:
    """The signed metadata of one file.

    custom: for a bundle, the strings model, target, model_digest and content_digest (hexadecimal)
    and the integer version; for a plan, see `PlanStatement`; for the roster, its text; empty for
    other targets.
    """

    path: str
    length: int
    sha256: bytes
    custom: Mapping[str, Any]

    @property
    def name(self) -> TargetName:
        """The parts of the path. InvalidInput if the target is not a bundle."""
        return TargetName.parse(self.path)

    @property
    def statement(self) -> PlanStatement:
        """What was signed about a plan. InvalidInput if the target is not a plan."""
        return PlanStatement.read(self.path, self.custom)

    @property
    def roster(self) -> Roster:
        """The roster of devices. Corrupt if the target is not one."""
        return _roster_in(self.path, self.length, self.sha256.hex(), self.custom)


def roster_target(roster: Roster) -> SignedTarget:
    """Return the target of a roster, whose text its entry contains."""
    text = roster.text()
    data = text.encode()
    hashes = {"sha256": hashlib.sha256(data).hexdigest()}
    return read_target(ROSTER_PATH, len(data), hashes, {"text": text})


def bundle_target(
    name: TargetName, *, length: int, sha256: bytes, model_digest: bytes, content_digest: bytes
) -> SignedTarget:
    """Return the target of a bundle; its fields are checked as by `read_target`."""
    custom = {
        "model": name.model,
        "version": name.version,
        "target": name.target,
        "model_digest": model_digest.hex(),
        "content_digest": content_digest.hex(),
    }
    return read_target(str(name), length, {"sha256": sha256.hex()}, custom)


def plan_target(role: str, statement: PlanStatement, *, length: int, sha256: bytes) -> SignedTarget:
    """Return the target of a plan; its fields are checked as by `read_target`."""
    path = str(PlanName(role, statement.digest))
    return read_target(path, length, {"sha256": sha256.hex()}, statement.custom())


def read_target(path: str, length: Any, hashes: Mapping[str, Any], custom: Any) -> SignedTarget:
    """Read one entry of targets metadata. Corrupt if it is incomplete or contradicts its path.

    The custom fields repeat the path: a bundle listed under another model's name is refused.
    """
    # Not isinstance: `true` in JSON is a bool, which Python counts as an int.
    if type(length) is not int or not 0 < length <= MAX_TARGET_BYTES:
        raise Corrupt(f"{path}: a length is 1 to {MAX_TARGET_BYTES} bytes, got {shown(length)}")
    digest = hashes.get("sha256")
    if set(hashes) != {"sha256"} or not is_hex_digest(digest):
        raise Corrupt(f"{path}: a target has one hash, SHA-256, got {shown(dict(hashes))}")
    if is_plan(path):
        PlanStatement.read(path, custom)
        return SignedTarget(path, length, bytes.fromhex(str(digest)), dict(custom))
    if path == ROSTER_PATH:
        _roster_in(path, length, str(digest), custom)
        return SignedTarget(path, length, bytes.fromhex(str(digest)), dict(custom))
    if not path.startswith(tuple(f"{role}/" for role in ROLES)):
        return SignedTarget(path, length, bytes.fromhex(str(digest)), {})
    name = TargetName.parse(path)
    expected = {"model": name.model, "version": name.version, "target": name.target}
    if not isinstance(custom, dict) or set(custom) != _CUSTOM:
        raise Corrupt(f"{path}: custom fields are {sorted(_CUSTOM)}, got {shown(custom)}")
    digests = custom["model_digest"], custom["content_digest"]
    # Types are compared, too, because 1 == True and 1 == 1.0.
    contradicts = any(type(custom[k]) is not type(v) or custom[k] != v for k, v in expected.items())
    if contradicts or not all(map(is_hex_digest, digests)):
        raise Corrupt(f"{path}: custom fields contradict the path: {shown(custom)}")
    return SignedTarget(path, length, bytes.fromhex(str(digest)), dict(custom))


def _roster_in(path: str, length: int, digest: str, custom: Any) -> Roster:
    """Return the roster in an entry's custom field, if it has the entry's length and digest."""
    if not isinstance(custom, Mapping) or set(custom) != {"text"}:
        raise Corrupt(f"{path}: its entry must contain the roster as custom.text")
    text = custom["text"]
    data = text.encode(errors="replace") if isinstance(text, str) else b""
    if (len(data), hashlib.sha256(data).hexdigest()) != (length, digest):
        raise Corrupt(f"{path}: its text does not have the entry's length and SHA-256")
    try:
        return Roster.parse(text)
    except InvalidInput as error:
        raise Corrupt(f"{path}: {error}") from error


@dataclass(frozen=True, slots=True)
class Rule:
    """The rights of the role `auto` on one model.

    share: share of the nodes, 0 to 1, that accept versions that people have not released. golden:
    path of the target with the labelled samples; metric: the measure computed on them; floor: the
    lowest value with which a version may be committed.
    """

    share: float
    golden: str
    metric: str
    floor: float


@dataclass(frozen=True, slots=True)
class Policy:
    """Rules by model name. The role `auto` cannot release a model without a rule."""

    models: Mapping[str, Rule]

    def text(self) -> str:
        """Return this policy as JSON with sorted keys, the only text of it."""
        rules = {
            model: {"share": r.share, "golden": r.golden, "metric": r.metric, "floor": r.floor}
            for model, r in self.models.items()
        }
        return json.dumps({"format": 1, "models": rules}, sort_keys=True, indent=1) + "\n"

    @classmethod
    def parse(cls, text: str) -> "Policy":
        """Read a policy; InvalidInput names the model and the field that breaks a rule."""
        models = parse_policy(
            text, "a policy", max_bytes=MAX_POLICY_BYTES, max_models=MAX_POLICY_MODELS
        )
        return cls({model: _rule(model, rule) for model, rule in models.items()})


def in_share(node: str, model: str, share: float) -> bool:
    """Return whether SHA-256(node, model), read as a fraction of 1, is below the share.

    A model's share has the same nodes for every version, so no series of automatic releases can
    reach the others.
    """
    # Names hold no NUL, so different pairs never give the same text.
    digest = hashlib.sha256(f"{node}\0{model}".encode()).digest()
    # Node and cloud compute this separately; 53 bits keep the division exact on both.
    fraction = (int.from_bytes(digest[:8], "big") >> (64 - SHARE_BITS)) / (1 << SHARE_BITS)
    return fraction < share


def _rule(model: str, fields: Any) -> Rule:
    if not isinstance(fields, dict) or set(fields) != _RULE:
        raise InvalidInput(f"policy of {model}: a rule has {sorted(_RULE)}, got {shown(fields)}")
    share, golden, metric, floor = (fields[k] for k in ("share", "golden", "metric", "floor"))
    if not _is_share(share):
        raise InvalidInput(f"policy of {model}: share is 0 to 1, got {shown(share)}")
    if not isinstance(golden, str) or not _GOLDEN.fullmatch(golden):
        raise InvalidInput(f"policy of {model}: golden is golden/NAME, got {shown(golden)}")
    if metric not in METRICS:
        raise InvalidInput(f"policy of {model}: metric is one of {METRICS}, got {shown(metric)}")
    if not _is_share(floor):
        raise InvalidInput(f"policy of {model}: floor is 0 to 1, got {shown(floor)}")
    return Rule(float(share), golden, metric, float(floor))


def _is_share(x: Any) -> bool:
    return type(x) in {int, float} and 0 <= x <= 1
