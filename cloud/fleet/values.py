"""The values of a rollout: its plan, members, facts, events and effects.

The names of fields, states and stages are stored by `storage.py`, so they never change
(`tests/golden/cloud_home` holds them).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from triplane.cloud.fleet.capability import BundleNeeds, Capability


class RolloutState(IntEnum):
    """The state of a rollout; numbers as in fleet.proto."""

    PREPARING = 1
    RUNNING = 2
    PAUSED = 3
    DONE = 4
    ABORTED = 5
    FAILED = 6


class NodeStage(IntEnum):
    """The stage of one node in a rollout; numbers as `NodeState` in fleet.proto."""

    WAITING = 0
    ASSIGNED = 1
    DOWNLOADING = 2
    VERIFIED = 3
    STAGED = 4
    TRIED = 5
    PROBATION = 6
    COMMITTED = 7
    FAILED = 8
    RETURNED = 9
    ADAPTED = 10
    KEPT = 11


ENDED: Final = frozenset({RolloutState.DONE, RolloutState.ABORTED, RolloutState.FAILED})
LOST: Final = frozenset({NodeStage.FAILED, NodeStage.RETURNED})
DONE: Final = frozenset({NodeStage.COMMITTED, NodeStage.KEPT})
SETTLED: Final = LOST | DONE


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutPlan:
    """The plan of a rollout. waves: cumulative node counts, one per wave."""

    model: str
    version: int
    waves: tuple[int, ...]
    success_share: float = 1.0
    failure_share: float = 0.0
    node_deadline_s: float = 600.0
    pause_between_waves: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutMember:
    """A node in a rollout.

    attempt: the newest number, counted over all rollouts of the model. committed_version: the one
    that the node reported after it was assigned; reports about other versions do not count.
    left_out: why the node is never counted; excused: why it is not counted now.
    """

    name: str
    wave: int
    capability: Capability | None = None
    target: str = ""
    stage: NodeStage = NodeStage.WAITING
    reason: str = ""
    attempt: int = 0
    assigned: bool = False
    deadline_s: float = 0.0
    excused: str = ""
    left_out: str = ""
    committed_version: int = 0
    downloaded_bytes: int = 0
    total_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Limit:
    """The limits that the release policy sets for the automatic role and one version.

    share: share of the nodes. released: targets whose bundle people signed; no share limits them.
    """

    share: float
    released: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class BundleSupply:
    """The bundle for one target: needs once it is made, path once it is signed, or a refusal.

    An empty one asks for the bundle: the fleet looks for it until it has a path or a refusal.

    sha256: of the signed bundle, in hexadecimal; empty in rollouts of older releases.
    """

    needs: BundleNeeds | None = None
    path: str = ""
    refusal: str = ""
    sha256: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """A rollout. wave: the open one, -1 before the first; allowed: the last one that may open.

    left_out: which nodes are not counted and why, in words; resumed: who resumed it last and why.
    """

    id: str
    plan: RolloutPlan
    members: Mapping[str, RolloutMember]
    supplies: Mapping[str, BundleSupply]
    allowed: int
    state: RolloutState = RolloutState.PREPARING
    reason: str = ""
    left_out: str = ""
    resumed: str = ""
    wave: int = -1
    ended_s: float = 0.0


@dataclass(frozen=True, slots=True)
class BundleReady:
    """A target's bundle exists; path is empty until it is signed, then the event comes again."""

    target: str
    needs: BundleNeeds
    path: str = ""
    sha256: str = ""


@dataclass(frozen=True, slots=True)
class BundleFailed:
    """The bundle of a target cannot be made."""

    target: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reported:
    """The newest report of a node about the model; committed_version 0 for none.

    committed_sha256: of the signed bundle it comes from, in hexadecimal; empty from older nodes.
    """

    name: str
    capability: Capability
    committed_version: int = 0
    committed_sha256: str = ""
    version: int = 0
    attempt: int = 0
    stage: NodeStage = NodeStage.WAITING
    reason: str = ""
    downloaded_bytes: int = 0
    total_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Excused:
    """The nodes that do not count now, each with the reason; all others count."""

    reasons: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class TimePassed:
    """Time passed."""


@dataclass(frozen=True, slots=True)
class Pause:
    """A person stops opening waves; nodes under way continue."""

    reason: str


@dataclass(frozen=True, slots=True)
class Resume:
    """A person resumes the rollout: failed nodes and bundles are retried. note: who and why."""

    note: str = ""


@dataclass(frozen=True, slots=True)
class Abort:
    """A person ends the rollout. revert: nodes that have committed go back, too."""

    reason: str
    revert: bool


Event = BundleReady | BundleFailed | Reported | Excused | TimePassed | Pause | Resume | Abort


@dataclass(frozen=True, slots=True)
class Assign:
    """Put the version into the node's desired document."""

    name: str
    path: str
    attempt: int
    sha256: str = ""


@dataclass(frozen=True, slots=True)
class Restore:
    """Put back what the node had committed before, as a new attempt."""

    name: str
    attempt: int


Effect = Assign | Restore
Result = tuple[Rollout, tuple[Effect, ...]]
