"""Fetch and verify TUF metadata on a node or a device; it decides which files may run here.

Neither the link nor the cloud nor a holder of its online keys is trusted. python-tuf's client
verifies the metadata. This module adds durable files (the client does not sync its own, and a file
lost in a power cut would lose the rollback protection), a time that never goes back, limits, and
messages: each refusal becomes an `AttemptRefused` of one kind, with the values that broke the rule.

All trust follows from the bootstrap root. It is stored once, when the machine enrols, over the
connection that the token pinned. Later roots must be signed by the ones before.

One thread at a time uses a Trust.
"""

import contextlib
import hashlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, TypeVar

from tuf.api import exceptions as errors

from triplane.proto.disk import OS_DISK, Disk, write_atomic
from triplane.proto.errors import Corrupt, InvalidInput, NotFound, Unavailable
from triplane.proto.plan_statement import NO_PLANS, PLAN_POLICY_PATH, PlanName, PlanPolicy
from triplane.proto.roster import ROSTER_PATH, Roster
from triplane.proto.signed.explain import explain
from triplane.proto.signed.metadata import Client, Fetcher, parsed, versions_in
from triplane.proto.signed.policy import Admission, judge
from triplane.proto.signed.refusal import AttemptRefused
from triplane.proto.signed_fields import AUTO, PLANS
from triplane.proto.targets import POLICY_PATH, ROLES, Policy, SignedTarget, TargetName, read_target

logger = logging.getLogger(__name__)

P = TypeVar("P")

DELEGATED: Final = tuple(f"{role}/" for role in (*ROLES, PLANS))
BOOTSTRAP: Final = "bootstrap.json"
LATEST_TIME: Final = "latest-time"
NODE_NAME: Final = "node-name"
MAX_ROOT_BYTES: Final = 128 << 10
CLOCK_TOLERANCE_S: Final = 60.0
"""Smaller steps back of the clock are not reported as incidents."""
EXPIRED: Final = {
    "node": "the node's metadata expired {} ago; the node goes on serving, but accepts no new "
    "version until the cloud provides fresh metadata",
    "device": "the device's metadata expired {} ago; it runs no plan until the cloud provides "
    "fresh metadata",
}
"""What a machine reports, by its kind, while its metadata has expired."""
MAX_TIME_S: Final = 253_402_300_799.0  # the last second of the year 9999


@dataclass(frozen=True, slots=True)
class Freshness:
    """Outcome of one refresh.

    is_fresh: nothing was refused and nothing has expired, so new targets may be taken. verified_s:
    when this process last fetched and verified everything, negative for never. refusals: what to
    report. error: the link failed, which is not an incident.
    """

    is_fresh: bool
    verified_s: float
    refusals: tuple[AttemptRefused, ...] = ()
    error: Unavailable | None = None


def bootstrap(folder: Path, fetch: Callable[[str], bytes], disk: Disk = OS_DISK) -> None:
    """Store the newest root as this node's first, unless it has one.

    Call it at enrolment, over the connection that the token pinned. AttemptRefused if the root is
    not signed by itself.
    """
    if (folder / BOOTSTRAP).exists():
        return
    data = fetch("root.json")
    if len(data) > MAX_ROOT_BYTES:
        raise AttemptRefused(
            "endless-data", f"root.json has {len(data)} bytes, at most {MAX_ROOT_BYTES}"
        )
    root = parsed("root", data)
    try:
        root.signed.verify_delegate("root", root.signed_bytes, root.signatures)
    except errors.UnsignedMetadataError as error:
        raise AttemptRefused(
            "signature", f"the first root is not signed by itself: {error}"
        ) from error
    disk.make_folder(folder)
    write_atomic(folder / BOOTSTRAP, data, disk)


class Trust:
    """The metadata that this machine has verified.

    folder: holds `bootstrap.json`, the cached metadata, the latest time and the node's first name.
    fetch: returns one metadata file by name, or raises NotFound or Unavailable; its answers are not
    trusted. clock: seconds since 1970. machine: its kind, "node" or "device". verified_s: see
    `Freshness`.
    """

    def __init__(
        self,
        folder: Path,
        fetch: Callable[[str], bytes],
        clock: Callable[[], float] = time.time,
        disk: Disk = OS_DISK,
        machine: str = "node",
    ) -> None:
        self._folder, self._clock, self._disk = folder, clock, disk
        self._machine = machine
        self._fetcher = Fetcher(fetch)
        self._metadata = folder / "metadata"
        disk.make_folder(self._metadata / "root_history")
        self._client: Client | None = None
        self.verified_s = -1.0
        self._latest_s, self._has_latest = 0.0, False
        # A damaged file must not end the process; `refresh` will report it.
        with contextlib.suppress(AttemptRefused):
            self._latest_s, self._has_latest = self._read_latest(), True

    @property
    def now_s(self) -> float:
        """The clock's time, or the latest time seen if the clock is behind it."""
        return max(self._clock(), self._latest_s)

    def versions(self) -> dict[str, int]:
        """Return the newest verified version of each role except the root, from the disk."""
        versions: dict[str, int] = {}
        for role in ("snapshot", "timestamp"):
            with contextlib.suppress(OSError, AttemptRefused):
                data = (self._metadata / f"{role}.json").read_bytes()
                versions |= versions_in(parsed(role, data).signed)
        return versions

    def digest(self) -> bytes:
        """Return the SHA-256 of the verified timestamp; empty before the first."""
        try:
            return hashlib.sha256((self._metadata / "timestamp.json").read_bytes()).digest()
        except OSError:
            return b""

    def refresh(self) -> Freshness:
        """Fetch and verify new metadata. It never raises because of what the cloud sent.

        A refusal is retried once, because the cloud may publish between two files. Metadata that
        was verified before stays until it expires.
        """
        odd: tuple[AttemptRefused, ...] = ()
        try:
            odd = self._advance_clock()
            try:
                client = self._refresh_once()
            except AttemptRefused:
                client = self._refresh_once()
        except AttemptRefused as refusal:
            logger.warning("metadata refused", extra={"kind": refusal.kind, "text": refusal.text})
            return Freshness(False, self.verified_s, (*odd, refusal))
        except Unavailable as error:
            return self._as_known(odd, error)
        # Only a complete refresh replaces the client: targets are read from one publication, never
        # from a mixture of two.
        self._client, self.verified_s = client, self.now_s
        return Freshness(True, self.verified_s, odd)

    def target(self, path: str) -> SignedTarget:
        """Return the target as the role in its path, and no other, signed it.

        AttemptRefused: that role does not list it, or the metadata has expired. Unavailable: the
        role's metadata cannot be fetched now, or `refresh` has not succeeded yet.
        """
        client = self._fresh()
        role = path.partition("/")[0] if path.startswith(DELEGATED) else "targets"
        # The metadata of an older cloud may name a role of which nothing was signed yet.
        if role == PLANS and not client.pinned_version(role):
            raise AttemptRefused(
                "unknown-target", f"{path[:200]} is not listed: nobody has signed plans yet"
            )
        try:
            entry = client.get_targetinfo(path)
        except (errors.RepositoryError, errors.DownloadError) as error:
            raise explain(error, client, self._fetcher) from error
        # python-tuf searches delegations in order; require the role in the path, so that a name of
        # one role signed by another is never accepted.
        if entry is None or not client.lists(role, path):
            raise AttemptRefused(
                "unknown-target", f"{path[:200]} is not listed by {client.seen(role)}"
            )
        try:
            return read_target(path, entry.length, entry.hashes, entry.custom)
        except (Corrupt, InvalidInput) as error:
            raise AttemptRefused("wrong-target", str(error)) from error

    def policy(self) -> Policy:
        """Return the release policy that the offline targets role lists."""
        if POLICY_PATH not in self._fresh().top.targets:
            raise AttemptRefused(
                "unknown-target", f"{POLICY_PATH} is not listed by the role targets"
            )
        return self._policy_at(POLICY_PATH, Policy.parse)

    def plan_policy(self) -> PlanPolicy:
        """Return the policy for plans, which allows none where the role targets lists none."""
        if PLAN_POLICY_PATH not in self._fresh().top.targets:
            return NO_PLANS
        return self._policy_at(PLAN_POLICY_PATH, PlanPolicy.parse)

    def _policy_at(self, path: str, parse: Callable[[str], P]) -> P:
        entry = self._fresh().top.targets[path]
        custom = entry.custom if isinstance(entry.custom, dict) else {}
        try:
            text = str(custom.get("text")).encode()
            # The text comes with the metadata; it must match the target like a fetched file.
            entry.verify_length_and_hashes(text)
            return parse(text.decode())
        except (errors.LengthOrHashMismatchError, UnicodeError, InvalidInput) as error:
            raise AttemptRefused("policy", f"{path} cannot be read: {error}") from error

    def plan(self, digest: str, *, by_people: bool) -> SignedTarget:
        """Return the training plan of this root digest, as it was signed.

        by_people: accept a signature of people only. AttemptRefused: it is not signed, or the role
        `auto` signed it and the policy for plans does not allow it.
        """
        try:
            return self.target(str(PlanName(PLANS, digest)))
        except AttemptRefused as refusal:
            if by_people:
                raise
            of_people = refusal
        # Also if the list of people is unsigned or has expired, which stops only their own plans.
        try:
            target = self.target(str(PlanName(AUTO, digest)))
        except AttemptRefused:
            if of_people.kind != "unknown-target":
                raise of_people from None
            raise
        reason = self.plan_policy().refusal(target.statement)
        if reason:
            raise AttemptRefused("policy", f"the policy for plans forbids {target.path}: {reason}")
        return target

    def roster(self) -> Roster | None:
        """Return the roster of devices, as people signed it; None if they signed none.

        AttemptRefused: it has expired, or the list that would have it cannot be verified.
        """
        try:
            roster = self.target(ROSTER_PATH).roster
        except AttemptRefused as refusal:
            if refusal.kind == "unknown-target":
                return None
            raise
        if roster.is_expired(self.now_s):
            raise AttemptRefused(
                "freeze",
                f"roster {roster.version} expired {_ago(self.now_s - roster.expires_s)} ago; its "
                "signers renew it: triplane cloud roster renew --keys DIR",
            )
        return roster

    def admit(self, path: str, *, node: str, committed_version: int) -> Admission:
        """Return the signed target, if it may be tried on this node; see `policy.judge`.

        node: its name, which must never change, because shares are drawn by names and the cloud
        assigns them. committed_version: the model's version on this node, 0 for none. The admission
        may have a rule, whose metric must then be measured on the golden set before a commit.
        """
        try:
            name = TargetName.parse(path)
        except InvalidInput as error:
            raise AttemptRefused("wrong-target", str(error)) from error
        self._require_name(node)
        rule = judge(self.policy(), name, node=node, committed_version=committed_version)
        target = self.target(path)
        if rule is None:
            return Admission(target)
        golden = self._fresh().top.targets.get(rule.golden)
        if golden is None:
            raise AttemptRefused(
                "policy", f"{path}: the policy's golden set {rule.golden} is not listed"
            )
        try:
            samples = read_target(rule.golden, golden.length, golden.hashes, None)
        except Corrupt as error:
            raise AttemptRefused("policy", str(error)) from error
        return Admission(target, rule, samples)

    def _require_name(self, node: str) -> None:
        file = self._folder / NODE_NAME
        try:
            first = file.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            write_atomic(file, node.encode(), self._disk)
            return
        if node != first:
            raise AttemptRefused(
                "share",
                f"this node was {first[:100]!r} and is called {node!r} now; shares are drawn by "
                f"name, so a renamed node accepts no version; remove {file} if you renamed it",
            )

    def _refresh_once(self) -> Client:
        try:
            client = self._started()
            client.refresh()
        except (errors.RepositoryError, errors.DownloadError) as error:
            raise explain(error, client, self._fetcher) from error
        except OSError as error:
            raise Unavailable(f"could not keep metadata in {self._metadata}: {error}") from error
        return client

    def _started(self) -> Client:
        path = self._folder / BOOTSTRAP
        try:
            bootstrap = path.read_bytes()
            client = Client(self._metadata, self._fetcher, bootstrap, self._disk)
        except FileNotFoundError as error:
            raise NotFound(
                f"{path} is missing; enrol this {self._machine} again to get it"
            ) from error
        except (errors.RepositoryError, ValueError) as error:
            raise Corrupt(
                f"{path} is damaged ({error}); enrol this {self._machine} again"
            ) from error
        # Judge expiry by a time that never goes back: an attacker who controls the clock could
        # otherwise make old metadata valid again (freeze attack).
        client.judge_by(datetime.fromtimestamp(min(self.now_s, MAX_TIME_S), UTC))
        return client

    def _fresh(self) -> Client:
        if self._client is None:
            raise Unavailable("no metadata has been verified yet; refresh first")
        ends = self._client.ends_s
        if self.now_s > ends:
            raise AttemptRefused(
                "freeze",
                EXPIRED[self._machine].format(_ago(self.now_s - ends)),
            )
        return self._client

    def _as_known(self, odd: tuple[AttemptRefused, ...], error: Unavailable) -> Freshness:
        """Return the result for a failed link: verified metadata is valid until it expires."""
        try:
            self._fresh()
        except Unavailable:
            return Freshness(False, self.verified_s, odd, error)
        except AttemptRefused as refusal:
            return Freshness(False, self.verified_s, (*odd, refusal), error)
        return Freshness(True, self.verified_s, odd, error)

    def _advance_clock(self) -> tuple[AttemptRefused, ...]:
        """Store the latest time; return a refusal if the clock is behind it."""
        if not self._has_latest:
            self._latest_s, self._has_latest = self._read_latest(), True
        clock = self._clock()
        behind_s = self._latest_s - clock
        # Stored even if nothing was fetched, so that a clock that is set back later is noticed.
        if behind_s <= 0:
            self._latest_s = min(clock, MAX_TIME_S)
            write_atomic(self._folder / LATEST_TIME, f"{clock:.3f}\n".encode(), self._disk)
        if behind_s <= CLOCK_TOLERANCE_S:
            return ()
        return (
            AttemptRefused(
                "clock",
                f"the clock says {_date(clock)}, but {_date(self._latest_s)} was seen here before: "
                "it was set back, and expiry is judged by the later time. Set the clock right; if "
                f"it once ran ahead, remove {self._folder / LATEST_TIME} after that",
            ),
        )

    def _read_latest(self) -> float:
        path = self._folder / LATEST_TIME
        try:
            latest_s = float(path.read_bytes()[:64])
        except FileNotFoundError:
            return 0.0
        except (ValueError, OSError):
            latest_s = -1.0
        if not 0 <= latest_s <= MAX_TIME_S:
            raise AttemptRefused(
                "clock",
                f"{path} does not hold a time, so expiry cannot be judged; set the clock right, "
                "then remove the file",
            )
        return latest_s


def _date(time_s: float) -> str:
    return f"{datetime.fromtimestamp(min(time_s, MAX_TIME_S), UTC):%Y-%m-%d %H:%M:%S} UTC"


def _ago(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds >= 3600 else f"{seconds:.0f} s"
