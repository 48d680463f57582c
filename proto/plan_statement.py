"""What signed metadata says about a training plan, and the policy for plans.

Devices run a plan only if the role `plans` (people) or the role `auto` (the cloud's key) lists it.
The entry pins the plan's bytes and states which tensors may leave a device. What `auto` signed must
also agree with the plan policy, which the offline role `targets` lists. Signers, cloud and devices
parse both with the functions here, so that no input can be read in two ways.
"""

import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Final

from triplane.proto.errors import Corrupt, InvalidInput
from triplane.proto.roster import ROSTER_PATH
from triplane.proto.signed_fields import (
    AUTO,
    NAME,
    PLANS,
    is_count,
    is_hex_digest,
    parse_policy,
    shown,
)

PLAN_ROLES: Final = (PLANS, AUTO)
PLAN_POLICY_PATH: Final = "plans.json"
MAX_PLAN_POLICY_BYTES: Final = 1 << 20
MAX_MODELS: Final = 1000
MAX_TENSORS: Final = 4096
"""Largest number of tensors in a statement, and of patterns in a rule."""
MAX_TENSOR_CHARS: Final = 200
MAX_NUMBERS: Final = 64
"""Largest number of hyperparameters."""
MAX_LEAST: Final = 1_000_000

_PLAN: Final = re.compile(r"(plans|auto)/([0-9a-f]{64})\.plan")
_ALGORITHM: Final = re.compile(r"[a-z0-9][a-z0-9+._-]{0,62}")
_TENSOR: Final = re.compile(rf"[!-~]{{1,{MAX_TENSOR_CHARS}}}")
_LEAST: Final = ("least_devices", "least_batch", "least_steps")
_HELD_OUT: Final = "least_held_out"
_STATEMENT: Final = frozenset(
    {"model", "version", "model_digest", "content_digest", "algorithm", "hyperparameters",
     "tensors", *_LEAST}
)  # fmt: skip
_LEAST_MASKING: Final = frozenset({"colluding_share", "failure"})
_RULE: Final = frozenset({"algorithms", "tensors", *_LEAST})
_MASKING: Final = "masking"
_OPTIONAL: Final = frozenset({_MASKING, _HELD_OUT})
"""Fields of a statement and of a rule that documents of earlier releases lack."""


@dataclass(frozen=True, slots=True, order=True)
class PlanName:
    """A training plan by the role that signs it: `plans/DIGEST.plan`.

    digest: its root digest, 64 hexadecimal digits.
    """

    role: str
    digest: str

    def __str__(self) -> str:
        return f"{self.role}/{self.digest}.plan"

    @classmethod
    def parse(cls, path: str) -> "PlanName":
        """Parse a target path. InvalidInput unless it is spelled exactly as `str` spells it."""
        match = _PLAN.fullmatch(path)
        if match is None:
            raise InvalidInput(
                f"a plan's target path is ROLE/DIGEST.plan with role {' or '.join(PLAN_ROLES)} and "
                f"64 hexadecimal digits, got {path[:200]!r}"
            )
        return cls(match[1], match[2])


def is_plan(path: str) -> bool:
    """Return whether a target path can only be the one of a plan."""
    of_people = path.startswith(f"{PLANS}/") and path != ROSTER_PATH
    return of_people or (path.startswith(f"{AUTO}/") and path.endswith(".plan"))


@dataclass(frozen=True, slots=True)
class Least:
    """The smallest round in which a plan may run.

    devices: updates that the next state is computed from. batch: samples in a step. steps: steps of
    learning in a task. held_out: samples that a score is of; a task to evaluate has no batch and no
    steps that count here.
    """

    devices: int = 1
    batch: int = 1
    steps: int = 1
    held_out: int = 1

    def __post_init__(self) -> None:
        for name, value in self.numbers.items():
            if not is_count(value, 1, MAX_LEAST):
                raise InvalidInput(f"least {name} is 1 to {MAX_LEAST}, got {shown(value)}")

    @property
    def numbers(self) -> dict[str, int]:
        """These numbers by name; a device compares them for each task, so nothing is copied."""
        return {name: getattr(self, name) for name in UNITS}

    def fields(self) -> dict[str, int]:
        """Return these numbers as signed documents have them."""
        numbers = {f"least_{name}": value for name, value in self.numbers.items()}
        # Left out where it demands nothing, so that devices of earlier releases take the document.
        return {n: value for n, value in numbers.items() if n != _HELD_OUT or value > 1}

    @classmethod
    def of_fields(cls, fields: Mapping[str, Any]) -> "Least":
        """Return the numbers of a signed document. InvalidInput."""
        devices, batch, steps = (fields[name] for name in _LEAST)
        return cls(devices, batch, steps, fields.get(_HELD_OUT, 1))

    @property
    def text(self) -> str:
        """Return these numbers for people."""
        text = f"{self.devices} devices, {self.batch} samples in a step, {self.steps} steps"
        return f"{text}, {self.held_out} samples in a score" if self.held_out > 1 else text

    def stricter(self, other: "Least") -> "Least":
        """Return the larger of each number."""
        return Least(*map(max, self.numbers.values(), other.numbers.values()))

    def lacking(self, other: "Least") -> str:
        """Return which numbers of `other` are below these, as a sentence; empty if none is."""
        ours, theirs = self.numbers, other.numbers
        return " and ".join(
            f"at least {ours[name]} {UNITS[name]}, got {theirs[name]}"
            for name in ours
            if theirs[name] < ours[name]
        )


UNITS: Final = {
    "devices": "devices in a round",
    "batch": "samples in a step",
    "steps": "steps in a task",
    "held_out": "held-out samples in a score",
}


@dataclass(frozen=True, slots=True)
class LeastMasking:
    """The weakest masking of a round in which a plan may run.

    colluding_share: of a cohort that may share all it knows with the cloud, in [0, 1). failure:
    largest probability, in (0, 1), that the bounds on a device's neighbours do not hold. roster:
    whether a device takes part only if it knows a signed roster of devices.
    """

    colluding_share: float = 0.0
    failure: float = 1e-6
    roster: bool = False

    def __post_init__(self) -> None:
        # Not a number compares as false.
        if not (0 <= self.colluding_share < 1 and 0 < self.failure < 1):
            raise InvalidInput(
                "the least share of colluding devices is in [0, 1) and the largest failure "
                f"probability in (0, 1), got {self.colluding_share} and {self.failure}"
            )

    def text(self) -> str:
        """Return this as signed documents have it: canonical JSON has no fractions.

        Earlier releases know no demand for a roster, and refuse a document that has one.
        """
        numbers: dict[str, float] = {
            "colluding_share": self.colluding_share, "failure": self.failure
        }  # fmt: skip
        return json.dumps(numbers | ({"roster": 1} if self.roster else {}), sort_keys=True)

    @property
    def summary(self) -> str:
        """Return these numbers for people."""
        return (
            f"masked against a share of {self.colluding_share:g} colluding devices but for a "
            f"probability of {self.failure:g}{', with a signed roster' if self.roster else ''}"
        )

    @classmethod
    def of_text(cls, text: Any) -> "LeastMasking":
        """Parse what `text` returns. InvalidInput for anything else."""
        numbers = _numbers(text)
        roster = None if numbers is None else numbers.pop("roster", 0)
        if numbers is None or numbers.keys() != _LEAST_MASKING or roster not in {0, 1}:
            raise InvalidInput(
                f"least masking is colluding_share, failure, and roster if it is 1, got "
                f"{shown(text)}"
            )
        return cls(**numbers, roster=roster == 1)

    def stricter(self, other: "LeastMasking") -> "LeastMasking":
        """Return the stricter of each number."""
        return LeastMasking(
            max(self.colluding_share, other.colluding_share),
            min(self.failure, other.failure),
            self.roster or other.roster,
        )

    def lacking(self, other: "LeastMasking | None", what: str = "updates") -> str:
        """Return what a masking, or None, does not hold of these, as a sentence; empty if none.

        what: that it would hide.
        """
        if other is None:
            return f"masking, and {what} are in the clear"
        if other.colluding_share < self.colluding_share:
            return (
                f"masking against a share of at least {self.colluding_share:g} colluding devices, "
                f"got {other.colluding_share:g}"
            )
        if other.failure > self.failure:
            return (
                f"masking that fails with a probability of at most {self.failure:g}, got "
                f"{other.failure:g}"
            )
        if self.roster and not other.roster:
            return "a signed roster of devices (triplane cloud roster add)"
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanStatement:
    """The signed facts of a plan.

    version: of the model, whose file has the root digest `model_digest`. digest: the plan's root
    digest. hyperparameters: by name, enough to make the plan again. tensors: the sorted names of
    those that may leave a device. masking: the weakest masking of a round in which they may; None
    if they may leave in the clear.
    """

    model: str
    version: int
    model_digest: str
    digest: str
    algorithm: str
    hyperparameters: Mapping[str, float]
    tensors: tuple[str, ...]
    least: Least
    masking: LeastMasking | None = None

    @property
    def conditions(self) -> str:
        """Return the smallest round and the weakest masking for people."""
        return _conditions(self.least, self.masking)

    def custom(self) -> dict[str, Any]:
        """Return the custom field of the target."""
        return {
            "model": self.model,
            "version": self.version,
            "model_digest": self.model_digest,
            "content_digest": self.digest,
            "algorithm": self.algorithm,
            # As a text, because canonical JSON has no fractions.
            "hyperparameters": json.dumps(dict(self.hyperparameters), sort_keys=True),
            "tensors": list(self.tensors),
            **self.least.fields(),
            **_masking_field(self.masking),
        }

    @classmethod
    def read(cls, path: str, custom: Any) -> "PlanStatement":
        """Parse the custom field of the target at `path`. Corrupt names the field that is wrong."""
        name = PlanName.parse(path)
        if not isinstance(custom, dict) or set(custom) - _OPTIONAL != _STATEMENT:
            raise Corrupt(f"{path}: custom fields are {sorted(_STATEMENT)}, got {shown(custom)}")
        wrong = next((key for key, holds in _CHECKS.items() if not holds(custom[key])), "")
        if wrong or custom["content_digest"] != name.digest:
            key = wrong or "content_digest"
            raise Corrupt(f"{path}: the field {key} must not be {shown(custom[key])}")
        try:
            least, masking = Least.of_fields(custom), _masking_of(custom)
        except InvalidInput as error:
            raise Corrupt(f"{path}: {error}") from error
        return cls(
            model=custom["model"],
            version=custom["version"],
            model_digest=custom["model_digest"],
            digest=name.digest,
            algorithm=custom["algorithm"],
            hyperparameters=_numbers(custom["hyperparameters"]) or {},
            tensors=tuple(custom["tensors"]),
            least=least,
            masking=masking,
        )


def _conditions(least: Least, masking: LeastMasking | None) -> str:
    return least.text if masking is None else f"{least.text}, {masking.summary}"


def _masking_field(masking: LeastMasking | None) -> dict[str, str]:
    return {} if masking is None else {_MASKING: masking.text()}


def _masking_of(fields: Mapping[str, Any]) -> LeastMasking | None:
    return LeastMasking.of_text(fields[_MASKING]) if _MASKING in fields else None


def _is_name(x: Any) -> bool:
    return isinstance(x, str) and re.fullmatch(NAME, x) is not None


def _is_algorithm(x: Any) -> bool:
    return isinstance(x, str) and _ALGORITHM.fullmatch(x) is not None


def _is_texts(x: Any) -> bool:
    return (
        isinstance(x, list)
        and len(x) <= MAX_TENSORS
        and all(isinstance(text, str) and _TENSOR.fullmatch(text) for text in x)
    )


def _numbers(text: Any) -> dict[str, float] | None:
    """Return hyperparameters from their text; None if it is anything else."""
    if not isinstance(text, str) or len(text) > MAX_NUMBERS * 100:
        return None
    try:
        numbers = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(numbers, dict) or len(numbers) > MAX_NUMBERS:
        return None
    is_fine = all(_is_algorithm(name) and _is_finite(x) for name, x in numbers.items())
    return numbers if is_fine else None


def _is_finite(x: Any) -> bool:
    # Compared rather than converted: an integer of JSON may be larger than any float.
    return type(x) in {int, float} and abs(x) <= sys.float_info.max


_CHECKS: Final[Mapping[str, Callable[[Any], bool]]] = {
    "model": _is_name,
    "version": lambda x: is_count(x, 1, 999_999_999),
    "model_digest": is_hex_digest,
    "content_digest": is_hex_digest,
    "algorithm": _is_algorithm,
    "hyperparameters": lambda x: _numbers(x) is not None,
    "tensors": lambda x: _is_texts(x) and x == sorted(set(x)),
}


@dataclass(frozen=True, slots=True)
class PlanRule:
    """The plans of one model that the role `auto` may sign.

    algorithms, tensors: patterns in which `*` stands for any characters; each tensor that leaves a
    device must match one. least, masking: the smallest rounds and the weakest masking that a
    statement may allow; None: also updates in the clear.
    """

    algorithms: tuple[str, ...]
    tensors: tuple[str, ...]
    least: Least = Least()
    masking: LeastMasking | None = None

    @property
    def conditions(self) -> str:
        """Return the smallest rounds and the weakest masking for people."""
        return _conditions(self.least, self.masking)

    def fields(self) -> dict[str, Any]:
        """Return this rule as the policy has it."""
        return {
            "algorithms": list(self.algorithms),
            "tensors": list(self.tensors),
            **self.least.fields(),
            **_masking_field(self.masking),
        }

    def refusal(self, statement: PlanStatement) -> str:
        """Return why the rule does not allow a plan; empty if it does."""
        if not _matches(statement.algorithm, self.algorithms):
            allowed = ", ".join(self.algorithms)
            return f"the algorithm {statement.algorithm} is not one of {allowed}"
        odd = [name for name in statement.tensors if not _matches(name, self.tensors)]
        if odd:
            names = ", ".join(odd[:4])
            return f"it lets tensors leave a device that no pattern allows: {names}"
        lacking = self.least.lacking(statement.least)
        if not lacking and self.masking is not None:
            lacking = self.masking.lacking(statement.masking)
        return f"it must demand {lacking}" if lacking else ""


@dataclass(frozen=True, slots=True)
class PlanPolicy:
    """Rules by model name. The role `auto` cannot sign a plan of a model without a rule."""

    models: Mapping[str, PlanRule]

    def text(self) -> str:
        """Return this policy as JSON with sorted keys, the only text of it."""
        rules = {model: rule.fields() for model, rule in self.models.items()}
        return json.dumps({"format": 1, "models": rules}, sort_keys=True, indent=1) + "\n"

    @classmethod
    def parse(cls, text: str) -> "PlanPolicy":
        """Read a policy; InvalidInput names the model and the field that breaks a rule."""
        models = parse_policy(
            text, "a plan policy", max_bytes=MAX_PLAN_POLICY_BYTES, max_models=MAX_MODELS
        )
        return cls({model: _rule(model, fields) for model, fields in models.items()})

    def refusal(self, statement: PlanStatement) -> str:
        """Return why the policy does not let `auto` sign a plan; empty if it does."""
        rule = self.models.get(statement.model)
        if rule is None:
            listed = ", ".join(sorted(self.models)) or "none"
            return f"it has no rule for model {statement.model!r} (listed: {listed})"
        reason = rule.refusal(statement)
        return f"of {statement.model}: {reason}" if reason else ""


NO_PLANS: Final = PlanPolicy({})
"""The policy of a cloud whose metadata lists none."""


def _rule(model: str, fields: Any) -> PlanRule:
    what = f"plan policy of {model}"
    if not isinstance(fields, dict) or set(fields) - _OPTIONAL != _RULE:
        raise InvalidInput(f"{what}: a rule has {sorted(_RULE)}, got {shown(fields)}")
    for name in ("algorithms", "tensors"):
        if not (_is_texts(fields[name]) and fields[name]):
            raise InvalidInput(
                f"{what}: {name} are 1 to {MAX_TENSORS} patterns of at most {MAX_TENSOR_CHARS} "
                f"characters, got {shown(fields[name])}"
            )
    try:
        least, masking = Least.of_fields(fields), _masking_of(fields)
    except InvalidInput as error:
        raise InvalidInput(f"{what}: {error}") from error
    return PlanRule(tuple(fields["algorithms"]), tuple(fields["tensors"]), least, masking)


def _matches(name: str, patterns: Iterable[str]) -> bool:
    # Brackets and question marks are meant literally: names of tensors may hold them.
    return any(fnmatchcase(name, re.sub(r"([\[?])", r"[\1]", p)) for p in patterns)
