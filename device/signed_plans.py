"""Which plans a device runs: signed ones, in rounds that are large enough, by its owner's rules.

A plan must be listed by signed metadata that follows from the root that the device stored at its
enrolment (`proto/signed/`). What was signed names the tensors that may leave the device and the
smallest round in which the plan may run; the owner's settings may ask for more.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import grpc

from triplane.device.home import DeviceHome, DeviceSettings
from triplane.device.roster import current_roster, keep_roster
from triplane.device.tasks import Task
from triplane.proto.errors import (
    Conflict,
    Corrupt,
    InvalidInput,
    NotFound,
    TriplaneError,
    Unavailable,
)
from triplane.proto.plan_statement import MAX_LEAST, Least, LeastMasking, PlanStatement
from triplane.proto.roster import Roster
from triplane.proto.targets import SignedTarget, read_target
from triplane.unified_ir.federated.core.learn import Shard, episode_sizes, shared, takes_episodes
from triplane.unified_ir.files.container import Container
from triplane.unified_ir.runtime.plan import Plan

RECHECK_S: Final = 3600.0
"""Time after which a plan that a device goes on running is looked up in the metadata again."""
VERIFYING_S: Final = 120.0
MAX_ANSWER_BYTES: Final = 4 << 20

Verify = Callable[[str], SignedTarget]
"""Returns the signed target of a plan by its root digest; raises if devices must not run it."""


class SignedPlans:
    """The plans that a device may run. Not for several threads."""

    def __init__(
        self, settings: DeviceSettings, verify: Verify, roster: Callable[[], Roster | None]
    ) -> None:
        """Take how to verify a plan, and where the newest roster of devices is."""
        self._settings, self._verify, self._roster = settings, verify, roster
        self._statement: PlanStatement | None = None
        self._blob, self._until_s = b"", 0.0

    def require(self, task: Task, path: Path) -> PlanStatement:
        """Return what was signed about the plan at `path`, which the task names.

        Corrupt: it is not signed, or signed with other bytes. Unavailable: the cloud's metadata
        cannot be fetched now.
        """
        if self._statement is None or self._blob != task.plan.sha256 or self._is_old:
            # Forgotten first: after an error the plan counts as unsigned.
            self._statement = None
            self._statement = self._look_up(task, path)
            self._blob, self._until_s = task.plan.sha256, time.monotonic() + RECHECK_S
        return self._statement

    @property
    def _is_old(self) -> bool:
        return time.monotonic() > self._until_s

    def _look_up(self, task: Task, path: Path) -> PlanStatement:
        digest = Container(path, kind="plan").digest
        try:
            target = self._verify(digest)
        except Unavailable:
            raise
        except TriplaneError as error:
            raise Corrupt(f"this device does not run plan {digest[:12]}: {error}") from error
        if (target.sha256, target.length) != (task.plan.sha256, task.plan.size):
            raise Corrupt(
                f"this device does not run plan {digest[:12]}: {target.length} bytes with SHA-256 "
                f"{target.sha256.hex()[:12]} are signed, the task names {task.plan.size} bytes "
                f"with {task.plan.sha256.hex()[:12]}"
            )
        statement = target.statement
        if statement.digest != digest:
            raise Corrupt(f"the signature of plan {statement.digest[:12]} is not {digest[:12]}'s")
        allowed = self._settings.algorithms
        if allowed and statement.algorithm not in allowed:
            raise Conflict(
                f"the owner of this device allows the algorithms {', '.join(allowed)} (algorithms "
                f"in device.json), the plan is of {statement.algorithm}"
            )
        return statement

    def check(self, statement: PlanStatement, plan: Plan, task: Task, shard: Shard) -> None:
        """Raise Conflict if the plan lets out more than was signed, or the round is too small.

        Corrupt: it is another plan.
        """
        if plan.digest != statement.digest:  # the file has changed since it was looked up
            raise Corrupt(f"plan {plan.digest[:12]} is not the signed {statement.digest[:12]}")
        odd = sorted(set(shared(plan.roles)) - set(statement.tensors))
        if odd:
            raise Conflict(
                f"the plan shares tensors that were not signed as leaving a device: "
                f"{', '.join(odd[:4])}"
            )
        self._check_masking(statement, task)
        self._check_size(statement, _size_of(plan, task, shard))

    def check_message(self, statement: PlanStatement, task: Task) -> None:
        """Raise Conflict if a task of the owner's app is in a round of too few devices.

        The app decides about batches, steps and what it sends.
        """
        self._check_masking(statement, task)
        size = Least(max(1, task.cohort), batch=MAX_LEAST, steps=MAX_LEAST, held_out=MAX_LEAST)
        self._check_size(statement, size)

    def _check_masking(self, statement: PlanStatement, task: Task) -> None:
        """Raise Conflict if the result would be hidden less than the signature or owner demands."""
        owner = self._settings.least_masking
        signed = statement.masking
        demanded = owner if signed is None else owner.stricter(signed)
        if not task.step and signed is None and not self._settings.masked_only:
            return
        # Only people can withdraw a roster that is known, so it is looked at once in a round.
        has_roster = demanded.roster and self._roster() is not None
        what = "scores" if task.kind == "evaluate" else "updates"
        lacking = demanded.lacking(_masking_of(task, roster=has_roster), what)
        if lacking:
            raise Conflict(
                f"the plan's signature and the settings in device.json (masked_only, "
                f"least_colluding_share, most_failure) demand {lacking}"
            )

    def _check_size(self, statement: PlanStatement, size: Least) -> None:
        least = statement.least.stricter(self._settings.least)
        lacking = least.lacking(size)
        if lacking:
            raise Conflict(
                f"the round is too small for this device: the plan's signature and the settings in "
                f"device.json demand {lacking}"
            )


def _size_of(plan: Plan, task: Task, shard: Shard) -> Least:
    # Masking guarantees its own least cohort; `cohort` is the cloud's word.
    devices = task.document.masking.terms.least if task.step else task.cohort
    devices = max(1, min(devices, MAX_LEAST))
    if task.kind == "evaluate":
        held_out = max(1, min(shard.held_out_samples, MAX_LEAST))
        return Least(devices, batch=MAX_LEAST, steps=MAX_LEAST, held_out=held_out)
    work, samples = task.work, shard.examples
    # The smaller part of an episode: the meta-gradient of one query sample is as telling as the
    # gradient of a batch of one.
    of_step = episode_sizes(work, samples) if takes_episodes(plan) else (work.batch_size, samples)
    batch = max(1, min(*of_step, MAX_LEAST))
    return Least(devices, batch, steps=work.steps, held_out=MAX_LEAST)


def _masking_of(task: Task, *, roster: bool) -> LeastMasking | None:
    """Return what the masking of a task holds, or None without masking. InvalidInput."""
    terms = task.document.masking.terms
    return LeastMasking(terms.colluding_share, terms.failure, roster) if task.step else None


def verified_here(
    home: DeviceHome, channel: Callable[[], grpc.Channel], settings: DeviceSettings
) -> Verify:
    """Return a function that verifies in this process, which then holds tuf and cryptography.

    It also stores the roster of devices that people have signed, see `device/roster.py`.
    """

    def verify(digest: str) -> SignedTarget:
        from triplane.proto.signed.metadata import fetch_over
        from triplane.proto.signed.trust import Trust

        require_root(home)
        trust = Trust(home.trust, fetch_over(channel()), machine="device")
        freshness = trust.refresh()
        if not freshness.is_fresh:
            # A failed link first: it passes, and whatever was refused beside it is refused again.
            missing = Unavailable("no signed metadata could be verified")
            raise freshness.error or next(iter(freshness.refusals), missing)
        keep_roster(home, trust)
        if settings.roster_required:
            _require_listed(home, trust.now_s)
        return trust.plan(digest, by_people=settings.plans_by_people)

    return verify


def _require_listed(home: DeviceHome, now_s: float) -> None:
    """Raise NotFound unless there is a roster, with this device in it. Corrupt: it is refused."""
    from triplane.proto.identity import key_digest

    roster, digest = current_roster(home, now_s), key_digest(home.identity.certificate)
    if roster is None or digest not in roster.digests:
        fact = (
            f"the key {digest.hex()} of this device is not in the {roster.summary}"
            if roster
            else "nobody has signed one"
        )
        raise NotFound(
            f"its owner demands a roster of devices (roster_required in device.json), and {fact}; "
            f"a signer adds the device: triplane cloud roster add {home.enrolled.name} --keys DIR"
        )


def verified_apart(home: DeviceHome, settings: DeviceSettings) -> Verify:
    """Return a function that verifies in a process of its own, `device/verifying.py`.

    tuf and cryptography take 14 MB, which a device could not free again.
    """

    def verify(digest: str) -> SignedTarget:
        require_root(home)
        command = [sys.executable, "-m", "triplane.device.verifying", str(home.path), digest]
        command += ["--by-people"] if settings.plans_by_people else []
        command += ["--roster-required"] if settings.roster_required else []
        try:
            done = subprocess.run(
                command, capture_output=True, check=False, timeout=VERIFYING_S,
                stdin=subprocess.DEVNULL,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            raise Unavailable(f"the plan's signature was not verified: {error}") from error
        return _answer(done.stdout[:MAX_ANSWER_BYTES], done.stderr)

    return verify


def _answer(data: bytes, log: bytes) -> SignedTarget:
    try:
        answer: dict[str, Any] = json.loads(data)
    except ValueError as error:
        reason = log.decode(errors="replace").strip()[-500:]
        raise Unavailable(f"the plan's signature was not verified: {reason}") from error
    if "refused" in answer:
        raise Corrupt(str(answer["refused"]))
    if "unavailable" in answer:
        raise Unavailable(str(answer["unavailable"]))
    return read_target(answer["path"], answer["length"], answer["hashes"], answer["custom"])


def require_root(home: DeviceHome) -> None:
    """Raise InvalidInput if the device was enrolled before devices stored a root."""
    if not home.has_root:
        raise InvalidInput(
            "it was enrolled by an earlier release, and has no root of trust by which it could "
            "recognize signed plans. On the device, repeat: triplane device enrol TOKEN --cloud "
            f"HOST:PORT --home {home.path}, with the token of then or a new one"
        )
