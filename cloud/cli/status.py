"""`triplane cloud status`: requests and output."""

from __future__ import annotations

import time
from typing import Any

from triplane.cloud.cli.connection import Calls
from triplane.cloud.cli.keeping import ends_of
from triplane.cloud.cli.nodes import all_nodes
from triplane.cloud.cli.remote import remote_at
from triplane.cloud.cli.text import enum_text, facts, until
from triplane.cloud.trust.expiring import due
from triplane.proto.fleet_pb2 import ListRolloutsRequest
from triplane.proto.identity_pb2 import WhoAmIRequest
from triplane.proto.registry_pb2 import ListModelsRequest

OPEN_STATES = ("preparing", "running", "paused")


def status_of(cloud: Calls) -> tuple[dict[str, Any], str]:
    """The record and the text: who asks, what there is, what must be done about signatures."""
    me = cloud.identity.WhoAmI(WhoAmIRequest())
    nodes = all_nodes(cloud, "")
    models = cloud.registry.ListModels(ListModelsRequest()).models
    rollouts = cloud.fleet.ListRollouts(ListRolloutsRequest()).rollouts
    open_rollouts = [r for r in rollouts if enum_text(r, "state") in OPEN_STATES]
    with remote_at(cloud) as remote:
        ends = ends_of(remote)
    urgent = due(ends, time.time())
    urgent += [f"node {node.name}: {text}" for node in nodes for text in node.warnings]
    connected = sum(node.connected for node in nodes)
    record = {
        "name": me.name,
        "role": enum_text(me, "role"),
        "expires_s": me.expires_s,
        "nodes": len(nodes),
        "connected": connected,
        "models": len(models),
        "versions": sum(model.versions for model in models),
        "open_rollouts": [r.id for r in open_rollouts],
        "signed_until_s": ends,
        "warnings": urgent,
    }
    named = ", ".join(f"{r.id} ({r.model}@{r.version} {enum_text(r, 'state')})"
                      for r in open_rollouts)  # fmt: skip
    text = facts(
        [
            ("you", f"{me.name}, {record['role']}; certificate ends {until(me.expires_s)}"),
            ("nodes", f"{connected} of {len(nodes)} connected"),
            ("models", f"{len(models)} with {record['versions']} versions"),
            ("rollouts", named or "none open"),
            *(("WARNING", text) for text in urgent),
        ]
    )
    return record, text
