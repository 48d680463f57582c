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

NAME: Final = r"[a-z0-9][a-z0-9._-]{0,62}"
RELEASE: Final = "release"
AUTO: Final = "auto"
ROLES: Final = (RELEASE, AUTO)
POLICY_PATH: Final = "policy.json"
METRICS: Final = ("accuracy",)
MAX_TARGET_BYTES: Final = 1 << 40
MAX_POLICY_BYTES: Final = 256 << 10
MAX_POLICY_MODELS: Final = 1000
SHARE_BITS: Final = 53
"""Bits that a float represents exactly, so that a share of 1 includes every node."""

_BUNDLE: Final = re.compile(rf"(release|auto)/({NAME})@([1-9][0-9]{{0,8}})\+({NAME})\.bundle")
_GOLDEN: Final = re.compile(rf"golden/{NAME}")
_HEX: Final = re.compile(r"[0-9a-f]{64}")
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
    and the integer version; empty for other targets.
    """

    path: str
    length: int
    sha256: bytes
    custom: Mapping[str, Any]

    @property
    def name(self) -> TargetName:
        """The parts of the path. InvalidInput if the target is not a bundle."""
        return TargetName.parse(self.path)


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


def read_target(path: str, length: Any, hashes: Mapping[str, Any], custom: Any) -> SignedTarget:
    """Read one entry of targets metadata. Corrupt if it is incomplete or contradicts its path.

    The custom fields repeat the path: a bundle listed under another model's name is refused.
    """
    # Not isinstance: `true` in JSON is a bool, which Python counts as an int.
    if type(length) is not int or not 0 < length <= MAX_TARGET_BYTES:
        raise Corrupt(f"{path}: a length is 1 to {MAX_TARGET_BYTES} bytes, got {_shown(length)}")
    digest = hashes.get("sha256")
    if set(hashes) != {"sha256"} or not _is_hex(digest):
        raise Corrupt(f"{path}: a target has one hash, SHA-256, got {_shown(dict(hashes))}")
    if not path.startswith(tuple(f"{role}/" for role in ROLES)):
        return SignedTarget(path, length, bytes.fromhex(str(digest)), {})
    name = TargetName.parse(path)
    expected = {"model": name.model, "version": name.version, "target": name.target}
    if not isinstance(custom, dict) or set(custom) != _CUSTOM:
        raise Corrupt(f"{path}: custom fields are {sorted(_CUSTOM)}, got {_shown(custom)}")
    digests = custom["model_digest"], custom["content_digest"]
    # Types are compared, too, because 1 == True and 1 == 1.0.
    contradicts = any(type(custom[k]) is not type(v) or custom[k] != v for k, v in expected.items())
    if contradicts or not all(map(_is_hex, digests)):
        raise Corrupt(f"{path}: custom fields contradict the path: {_shown(custom)}")
    return SignedTarget(path, length, bytes.fromhex(str(digest)), dict(custom))


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
        if len(text.encode(errors="replace")) > MAX_POLICY_BYTES:
            raise InvalidInput(f"a policy is at most {MAX_POLICY_BYTES} bytes of JSON")
        try:
            # JSON parsers differ in which of two equal keys they take, so equal keys are refused.
            document = json.loads(text, object_pairs_hook=_once)
        except (ValueError, RecursionError) as error:
            raise InvalidInput(f"a policy is a JSON object: {error}") from error
        if not isinstance(document, dict) or set(document) != {"format", "models"}:
            raise InvalidInput('a policy is {"format": 1, "models": {NAME: RULE, ...}}')
        if type(document["format"]) is not int or document["format"] != 1:
            raise InvalidInput(f"a policy has format 1, got {_shown(document['format'])}")
        models = document["models"]
        if not isinstance(models, dict) or len(models) > MAX_POLICY_MODELS:
            raise InvalidInput(f"a policy has at most {MAX_POLICY_MODELS} models, by name")
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
    if not re.fullmatch(NAME, model):
        raise InvalidInput(f"policy: a model's name matches {NAME}, got {_shown(model)}")
    if not isinstance(fields, dict) or set(fields) != _RULE:
        raise InvalidInput(f"policy of {model}: a rule has {sorted(_RULE)}, got {_shown(fields)}")
    share, golden, metric, floor = (fields[k] for k in ("share", "golden", "metric", "floor"))
    if not _is_share(share):
        raise InvalidInput(f"policy of {model}: share is 0 to 1, got {_shown(share)}")
    if not isinstance(golden, str) or not _GOLDEN.fullmatch(golden):
        raise InvalidInput(f"policy of {model}: golden is golden/NAME, got {_shown(golden)}")
    if metric not in METRICS:
        raise InvalidInput(f"policy of {model}: metric is one of {METRICS}, got {_shown(metric)}")
    if not _is_share(floor):
        raise InvalidInput(f"policy of {model}: floor is 0 to 1, got {_shown(floor)}")
    return Rule(float(share), golden, metric, float(floor))


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError(f"a key is repeated in {sorted(key for key, _ in pairs)}")
    return fields


def _is_share(x: Any) -> bool:
    return type(x) in {int, float} and 0 <= x <= 1


def _is_hex(x: Any) -> bool:
    return isinstance(x, str) and _HEX.fullmatch(x) is not None


def _shown(x: Any) -> str:
    return repr(x)[:200]
