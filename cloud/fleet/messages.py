"""Conversion of the fleet's values to messages of fleet.proto, and of requests to values."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from triplane.cloud.fleet.state import FleetNode, RolloutRecord, warnings
from triplane.cloud.fleet.values import RolloutMember, RolloutPlan
from triplane.cloud.fleet.waves import Count, Percent, Size, cumulative
from triplane.proto import fleet_pb2 as pb
from triplane.proto.documents import check_text
from triplane.proto.errors import InvalidInput
from triplane.proto.messages import message_from
from triplane.proto.targets import ROLES

Connected = Callable[[str], bool]
_NONE: Final[Mapping[str, int]] = MappingProxyType({})

DEFAULT_SUCCESS_SHARE: Final = 1.0
DEFAULT_NODE_DEADLINE_S: Final = 600.0
MAX_SECONDS: Final = 30 * 86400.0
MAX_KEY_BYTES: Final = 64
MAX_REASON_CHARS: Final = 1000
REASONS_BYTES: Final = 2 << 20
"""Largest total size of the reasons in one message, half of its limit, shared by all nodes."""


def desired_message(node: FleetNode) -> pb.Desired:
    """Return the document with the versions that the node must serve, by model name."""
    assignments = [
        message_from(
            pb.Assignment,
            held,
            model=model,
            target_path=held.path,
            sha256=bytes.fromhex(held.sha256),
        )
        for model, held in sorted(node.held.items())
        # Version 0: nothing is assigned any more, so the document leaves the model out.
        if held.version
    ]
    return pb.Desired(number=node.desired_number, assignments=assignments)


def node_message(
    node: FleetNode, *, connected: bool, metadata_versions: Mapping[str, int] = _NONE
) -> pb.Node:
    """Return the node with its desired document and its newest report.

    metadata_versions: the cloud's own, by role; the message warns if a node has seen newer ones.
    """
    return message_from(
        pb.Node,
        node,
        connected=connected,
        desired=desired_message(node),
        warnings=warnings(node, metadata_versions),
    )


def rollout_message(record: RolloutRecord, connected: Connected) -> pb.Rollout:
    """Return the rollout with its nodes in name order; long reasons are cut to fit a message."""
    r = record.rollout
    most_bytes = REASONS_BYTES // max(1, len(r.members))
    return message_from(
        pb.Rollout,
        record,
        id=r.id,
        model=r.plan.model,
        version=r.plan.version,
        selector=record.request.selector,
        state=r.state,
        reason="; ".join(filter(None, (r.reason, r.left_out, r.resumed))),
        wave=max(0, r.wave),
        nodes=[
            _member_message(r.members[name], most_bytes, connected=connected(name))
            for name in sorted(r.members)
        ],
        ended_s=r.ended_s,
    )


def _member_message(m: RolloutMember, most_bytes: int, *, connected: bool) -> pb.RolloutNode:
    excused = f"not counted: {m.excused}" if m.excused else ""
    reason = truncated("; ".join(filter(None, (excused, m.reason))), most_bytes)
    return message_from(pb.RolloutNode, m, state=m.stage, reason=reason, connected=connected)


def plan_from(request: pb.DeployRequest, model: str, version: int, nodes: int) -> RolloutPlan:
    """Return the plan for so many selected nodes. InvalidInput names a field out of its range."""
    success = request.success_share or DEFAULT_SUCCESS_SHARE
    deadline_s = request.node_deadline_s or DEFAULT_NODE_DEADLINE_S
    for what, share in (("success", success), ("failure", request.failure_share)):
        if not 0 <= share <= 1:
            raise InvalidInput(f"{what} is a share from 0 to 1 (0% to 100%), got {share}")
    for what, seconds in (("node_deadline_s", deadline_s), ("probation_s", request.probation_s)):
        if not (math.isfinite(seconds) and 0 <= seconds <= MAX_SECONDS):
            raise InvalidInput(f"{what} is 0 to {MAX_SECONDS:.0f} seconds, got {seconds}")
    return RolloutPlan(
        model=model,
        version=version,
        waves=cumulative([_size(wave) for wave in request.waves], nodes),
        success_share=success,
        failure_share=request.failure_share,
        node_deadline_s=deadline_s,
        pause_between_waves=request.pause_between_waves,
    )


def check_request(request: pb.DeployRequest) -> None:
    """Raise InvalidInput if a field is invalid by itself."""
    if not 1 <= len(request.key) <= MAX_KEY_BYTES:
        raise InvalidInput(f"a key has 1 to {MAX_KEY_BYTES} bytes, got {len(request.key)}")
    if request.role not in ROLES:
        raise InvalidInput(f"role is {' or '.join(ROLES)}, got {request.role[:100]!r}")


def _size(wave: pb.Wave) -> Size:
    return Count(wave.nodes) if wave.WhichOneof("size") == "nodes" else Percent(wave.percent)


def truncated(text: str, most_bytes: int) -> str:
    """Return the text, cut to so many bytes of UTF-8 with an ellipsis at the end."""
    data = text.encode()
    if len(data) <= most_bytes:
        return text
    ellipsis = "…"
    return data[: max(0, most_bytes - len(ellipsis.encode()))].decode(errors="ignore") + ellipsis


def checked_reason(reason: str) -> str:
    """Return a person's reason, cut to its limit. InvalidInput: it has invalid characters."""
    reason = reason[:MAX_REASON_CHARS]
    check_text("a reason", reason, MAX_REASON_CHARS)
    return reason
