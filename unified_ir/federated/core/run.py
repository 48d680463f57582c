"""The values of a federated run: its state, its events and its effects.

The module `rules` has the state machine. A *lease* is one device's work in one round.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, ClassVar, Final

from triplane.unified_ir.federated.core.lease_base import LeaseBase
from triplane.unified_ir.federated.core.limits import Norms
from triplane.unified_ir.federated.core.masked_step import (
    LostGroup,
    MaskedProgress,
    MaskedStep,
    StepAnswer,
)
from triplane.unified_ir.federated.core.run_plan import ADDED, RunPlan
from triplane.unified_ir.federated.core.sorted_map import Index, Records, SortedMap
from triplane.unified_ir.federated.core.spoilt import NO_LOSSES, LossWatch
from triplane.unified_ir.federated.privacy.budget import RunBudget


class Phase(StrEnum):
    """The phase of a run."""

    GATHERING = "gathering"
    COLLECTING = "collecting"
    REDUCING = "reducing"
    FINISHING = "finishing"
    DONE = "done"
    STOPPED = "stopped"
    FAILED = "failed"


class Outcome(StrEnum):
    """The outcome of a lease."""

    OPEN = "open"
    COUNTED = "counted"
    REFUSED = "refused"
    DECLINED = "declined"
    LATE = "late"
    LOST = "lost"


UNWILLING: Final = frozenset({Outcome.DECLINED, Outcome.REFUSED})
ENDED: Final = frozenset({Phase.DONE, Phase.FAILED})
RULES_OF_OLD: Final = 1
"""Rules that restarted an abandoned round immediately and skipped an evaluation that every device
declined."""
RULES_WITH_PAUSES: Final = 2
"""Rules that asked silent devices again in every round."""
RULES_WITH_RESTS: Final = 3
"""Rules that did not look at the loss over devices, and did not let refused devices rest."""
RULES_WITH_WATCHES: Final = 4
"""Rules that let a masked round wait for shares for the time of a later step only, open one with
fewer devices than it needs, and let a run wait for devices of which none may be used again."""
RULES_WITH_WAITS: Final = 5
"""Rules by which `shares` waits as long as the round may, and a run stops without uses."""
NEWEST_RULES: Final = RULES_WITH_WAITS
"""Rules of new runs. The events of a run are always replayed by the rules with which it began."""
NEVER: Final = (1 << 31) - 1
"""`RunMember.used_round` of a device that was used as often as it may be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Accuracy or loss of one device on its own held-out samples, before and after adaptation."""

    samples: int
    before: float
    after: float
    round: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """The cloud's answer to a device about its newest contribution."""

    lease: str
    counted: bool
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMember:
    """A device that joined the run; it stays a member while it is disconnected, since `away_s`.

    dropped: contributions that did not count; `declined` of these were declined by the device
    itself. why: counts by reason, for the first few reasons. missed: rounds in a row without an
    answer in time, or with a refused one; rests_until: number of the first round for which it is
    drawn like the others again. settled: the answer to the newest contribution; counted_lease: the
    newest lease that counted, or empty; included_lease: the newest one that a state includes.
    used_round, uses: of a run with differential privacy, see `selection`.
    """

    device: str
    connected: bool
    examples: int
    held_out: int = 0
    away_s: float | None = None
    score: Score | None = None
    counted: int = 0
    dropped: int = 0
    settled: Settled | None = None
    declined: int = 0
    why: Mapping[str, int] = field(default_factory=dict)
    missed: int = 0
    rests_until: int = 0
    counted_lease: str = ""
    used_round: int = field(default=0, metadata=ADDED)
    uses: int = field(default=0, metadata=ADDED)
    included_lease: str = field(default="", metadata=ADDED)


def _draws(member: RunMember) -> tuple[int, str] | None:
    return (member.rests_until, member.device) if member.connected else None


def _uses(member: RunMember) -> tuple[int, str] | None:
    learns = member.connected and member.examples > 0
    return (member.used_round, member.device) if member.used_round and learns else None


class Members(Records[RunMember]):
    """Members by name, in the order in which they joined.

    Indexes: absent has the names of members without an open stream, away their (since when, name);
    learners and scorers have (`rests_until`, name) of the connected members that can learn or
    score; used has (`used_round`, name) of the learners that were used, used_resting of those with
    a `rests_until`. known has the names of all members with examples, used_up those of them that
    may not be used again.
    """

    __slots__ = ()
    # fmt: off
    indexes: ClassVar[Mapping[str, Index]] = {
        "absent":   lambda m: None if m.connected else m.device,
        "away":     lambda m: None if m.away_s is None else (m.away_s, m.device),
        "learners": lambda m: _draws(m) if m.examples > 0 else None,
        "scorers":  lambda m: _draws(m) if m.held_out > 0 else None,
        "used":     _uses,
        "used_resting": lambda m: _uses(m) if m.rests_until else None,
        "known":    lambda m: m.device if m.examples > 0 else None,
        "used_up":  lambda m: m.device if m.used_round == NEVER and m.examples > 0 else None,
    }
    # fmt: on


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """A contribution whose bytes are on the cloud's disk and valid.

    blob: SHA-256 in hexadecimal. norms: where the run bounds them. is_vector: it is not a file.
    """

    blob: str
    size: int
    examples: int
    loss: float
    seconds: float
    norms: Norms | None = field(default=None, metadata=ADDED)
    is_vector: bool = field(default=False, metadata=ADDED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """One device's work in one round. away_s: when its stream closed; None while it is open.

    bytes_down: bytes that the device was sent for it. Of a masked round: due is the step that it
    has to answer, answers has those that came, and the cloud took those up to the step `taken`.
    base: None in leases of earlier releases, which learn from the run's present state.
    """

    id: str
    device: str
    outcome: Outcome = Outcome.OPEN
    update: Update | None = None
    away_s: float | None = None
    reason: str = ""
    bytes_down: int = 0
    due: MaskedStep | None = field(default=None, metadata=ADDED)
    taken: MaskedStep | None = field(default=None, metadata=ADDED)
    answers: tuple[StepAnswer, ...] = field(default=(), metadata=ADDED)
    base: LeaseBase | None = field(default=None, metadata=ADDED)


class _LeasesByDevice(Records[Lease]):
    __slots__ = ()
    # fmt: off
    indexes: ClassVar[Mapping[str, Index]] = {
        "open":    lambda x: x.device if x.outcome is Outcome.OPEN else None,
        "waiting": lambda x: x.device if x.outcome is Outcome.OPEN and x.due else None,
        "counted": lambda x: x.device if x.outcome is Outcome.COUNTED else None,
        "away":    lambda x: None if x.outcome is not Outcome.OPEN or x.away_s is None
                   else (x.away_s, x.device),
    }
    # fmt: on


class Leases(Sequence[Lease]):
    """Leases in the order of device names, one for each device.

    Indexes: open and counted have the devices with such a lease, waiting those of open ones whose
    answer to a masked step is due; away (since when, device) of the open ones.
    """

    __slots__ = ("_by_device",)

    def __init__(self, by_device: _LeasesByDevice) -> None:
        self._by_device = by_device

    @classmethod
    def from_leases(cls, leases: Iterable[Lease]) -> Leases:
        """Create the sequence from leases in their order."""
        return cls(_LeasesByDevice.from_mapping({x.device: x for x in leases}))

    def of(self, device: str) -> Lease | None:
        """Return the lease of a device."""
        return self._by_device.get(device)

    def with_(self, lease: Lease) -> Leases:
        """Return the leases with this one in place of its device's."""
        return Leases(self._by_device.with_(lease.device, lease))

    def indexed(self, index: str) -> SortedMap[Any, str]:
        """Return the devices by the keys of an index."""
        return self._by_device.indexed(index)

    def listed(self, index: str) -> tuple[Lease, ...]:
        """Return the leases of an index, in its order."""
        return tuple([self._by_device[device] for device in self.indexed(index).values()])

    def __len__(self) -> int:
        return len(self._by_device)

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._by_device.values())

    def __getitem__(self, at: Any) -> Any:
        return tuple(self)[at]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Leases | tuple) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"Leases({tuple(self)!r})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """The current round. leases: by device name. attempt: rounds abandoned in a row before it.

    population: members that could learn when it opened, connected or not. masked: its present step.
    left_out: which groups are not in it any more and why.
    """

    number: int
    evaluates: bool
    attempt: int
    opened_s: float
    leases: Sequence[Lease]
    population: int = field(default=0, metadata=ADDED)
    masked: MaskedProgress | None = field(default=None, metadata=ADDED)
    left_out: str = field(default="", metadata=ADDED)

    def __post_init__(self) -> None:
        if not isinstance(self.leases, Leases):
            object.__setattr__(self, "leases", Leases.from_leases(self.leases))


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The record of an ended round. given_up: why it was abandoned, or empty.

    bytes_down: of answered leases. scaled: updates above a norm bound. returned: why the run
    returned to an earlier state. left_out: why which groups were. norm_bound: of masked updates.
    """

    number: int
    evaluates: bool
    opened_s: float
    closed_s: float
    asked: int
    counted: int
    refused: int
    late: int
    lost: int
    loss: float = math.nan
    bytes_up: int = 0
    given_up: str = ""
    bytes_down: int = 0
    scaled: int = field(default=0, metadata=ADDED)
    returned: str = field(default="", metadata=ADDED)
    left_out: str = field(default="", metadata=ADDED)
    norm_bound: float = field(default=0.0, metadata=ADDED)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """A run between two events.

    turn: (number, evaluates) of the current or next round. since_s: when the phase began;
    looked_s: the newest tick. attempt: rounds abandoned in a row. history: ended rounds, oldest
    first. shared: blob of the state that the next round begins from (SHA-256 in hexadecimal).
    not_before_s: no round opens earlier. rules: version of the rules that the run began under.
    epoch: of the newest restart; "" before the first. watch: of the loss over devices. good: blob
    of the newest state that it judged good, or empty. fresh_optimizer: whether the next reduction
    begins without the optimizer's slots. charged: rounds charged to the plan's budget. clip: norm
    of changes in the next round, where it follows the updates, and buffer_clip that of masked
    buffers. spent: names of devices that masked an update for this state; none does so twice.
    """

    plan: RunPlan
    run: str
    shared: str
    phase: Phase = Phase.GATHERING
    reason: str = ""
    since_s: float = 0.0
    looked_s: float = 0.0
    turn: tuple[int, bool] = (1, False)
    attempt: int = 0
    round: Round | None = None
    members: Mapping[str, RunMember] = field(default_factory=dict)
    history: tuple[Ended, ...] = ()
    refusals: Mapping[str, int] = field(default_factory=dict)
    not_before_s: float = 0.0
    rules: int = RULES_OF_OLD
    epoch: str = ""
    watch: LossWatch = field(default=NO_LOSSES, metadata=ADDED)
    good: str = field(default="", metadata=ADDED)
    fresh_optimizer: bool = field(default=False, metadata=ADDED)
    charged: int = field(default=0, metadata=ADDED)
    clip: float = field(default=0.0, metadata=ADDED)
    spent: tuple[str, ...] = field(default=(), metadata=ADDED)
    buffer_clip: float = field(default=0.0, metadata=ADDED)

    def __post_init__(self) -> None:
        if not isinstance(self.members, Members):
            object.__setattr__(self, "members", Members.from_mapping(self.members))

    @property
    def budget(self) -> RunBudget | None:
        """The budget with the rounds charged so far; None without differential privacy."""
        budget = self.plan.budget
        return None if budget is None else replace(budget, rounds=self.charged)

    @property
    def norm(self) -> float:
        """The norm to which changes of the next round are clipped, if the plan has one."""
        return self.clip or self.plan.clip


# Events. at_s: seconds since 1970, never less than that of the event before.


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """A stream of the device is open; it offers this many samples."""

    at_s: float
    device: str
    examples: int
    held_out: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """The device's stream ended."""

    at_s: float
    device: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _OfLease:
    """An event of a lease. Its fields are stored first, then those of the class below it.

    bytes_down, in those classes: bytes that the device was sent for its lease.
    """

    at_s: float
    device: str
    lease: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived(_OfLease):
    """An update, verified and durable."""

    update: Update
    bytes_down: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """An external strategy chose the devices of the round; the other leases end.

    messages: blob of the request by device, empty if the run's plan states the work.
    """

    at_s: float
    number: int
    evaluates: bool
    attempt: int
    messages: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered(_OfLease):
    """An update for an external strategy, like `Arrived`; it counts in either kind of round."""

    update: Update
    bytes_down: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Masked(_OfLease):
    """An answer to a step of a masked round, durable but not read."""

    answer: StepAnswer
    bytes_down: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchanged:
    """The answers to a step of a masked round were taken, and there is something for each device.

    refused: why an answer was not taken, by device. failure: why the round cannot go on, or empty.
    score: of the last step of an evaluating round, the means over its cohort.
    """

    at_s: float
    number: int
    attempt: int
    step: MaskedStep
    refused: Mapping[str, str]
    failure: str = ""
    score: Score | None = field(default=None, metadata=ADDED)
    left_out: tuple[LostGroup, ...] = field(default=(), metadata=ADDED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored(_OfLease):
    """An evaluation."""

    score: Score
    bytes_down: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused(_OfLease):
    """A contribution that cannot count. kind: one word, counted; reason: for people."""

    kind: str
    reason: str
    bytes_down: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Declined(_OfLease):
    """The device declined its work."""

    reason: str
    bytes_down: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Restarted:
    """The cloud was started again, so no stream is open.

    epoch: identifies the process; its leases differ from those of other processes.
    """

    at_s: float
    epoch: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """The current time."""

    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduced:
    """The round's updates became the next shared state. scaled: those above a norm bound.

    charged: rounds charged to the budget, this one included; 0 without a budget. clip, buffer_clip:
    norms of the next round; see `RunState`. left_out: devices whose updates are not in the state.
    """

    at_s: float
    number: int
    shared: str
    scaled: int = field(default=0, metadata=ADDED)
    charged: int = field(default=0, metadata=ADDED)
    clip: float = field(default=0.0, metadata=ADDED)
    left_out: tuple[str, ...] = field(default=(), metadata=ADDED)
    buffer_clip: float = field(default=0.0, metadata=ADDED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The result is registered."""

    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped:
    """An operator stopped the run, or something failed that a person can fix."""

    at_s: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """An operator resumed the run."""

    at_s: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The run cannot continue."""

    at_s: float
    reason: str


# fmt: off
Event = (
    Joined | Left | Restarted | Asked | Arrived | Answered
    | Masked | Exchanged | Scored | Refused | Declined | Tick
    | Reduced | Finished | Stopped | Resumed | Failed
)
# fmt: on


# Effects.


@dataclass(frozen=True, slots=True)
class Tell:
    """Send the device its work document (`open_lease`, `RunMember.settled`)."""

    device: str


@dataclass(frozen=True, slots=True)
class Reduce:
    """Reduce these updates, in this order, to the next shared state; then `Reduced`."""

    number: int
    leases: tuple[Lease, ...]


@dataclass(frozen=True, slots=True)
class Exchange:
    """Take the answers of these leases to a step of a masked round; then `Exchanged`."""

    number: int
    attempt: int
    step: MaskedStep
    leases: tuple[Lease, ...]


@dataclass(frozen=True, slots=True)
class Judged:
    """An evaluating round is over, with these leases; no event follows."""

    number: int
    leases: tuple[Lease, ...]


@dataclass(frozen=True, slots=True)
class Finish:
    """Register the result; then `Finished`."""


Effect = Tell | Reduce | Exchange | Judged | Finish
Effects = tuple[Effect, ...]
