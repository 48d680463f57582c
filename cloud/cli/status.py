"""`triplane cloud status`: requests and output."""

from __future__ import annotations

import time

from triplane.cloud.cli.connection import Answer, Calls
from triplane.cloud.cli.keeping import expiries_of
from triplane.cloud.cli.nodes import all_nodes
from triplane.cloud.cli.remote import remote_at
from triplane.cloud.cli.text import enum_text, expiry_text, facts
from triplane.cloud.trust.expiring import due
from triplane.proto.fleet_pb2 import ListRolloutsRequest
from triplane.proto.identity_pb2 import WhoAmIRequest
from triplane.proto.registry_pb2 import ListModelsRequest

OPEN_STATES = ("preparing", "running", "paused")


def status_of(cloud: Calls) -> Answer:
    """Return who asks, what the cloud holds, and what must be done."""
    me = cloud.identity.WhoAmI(WhoAmIRequest())
    nodes = all_nodes(cloud, "")
    models = cloud.registry.ListModels(ListModelsRequest()).models
    rollouts = cloud.fleet.ListRollouts(ListRolloutsRequest()).rollouts
    open_rollouts = [r for r in rollouts if enum_text(r, "state") in OPEN_STATES]
    with remote_at(cloud) as remote:
        expiries = expiries_of(remote)
    warnings = due(expiries, time.time())
    warnings += [f"node {node.name}: {text}" for node in nodes for text in node.warnings]
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
        "signed_until_s": expiries,
        "warnings": warnings,
    }
    rollouts_text = ", ".join(
        f"{r.id} ({r.model}@{r.version} {enum_text(r, 'state')})" for r in open_rollouts
    )
    rows = [
        ("you", f"{me.name}, {record['role']}; certificate {expiry_text(me.expires_s)}"),
        ("nodes", f"{connected} of {len(nodes)} connected"),
        ("models", f"{len(models)} with {record['versions']} versions"),
        ("rollouts", rollouts_text or "none open"),
        *(("WARNING", text) for text in warnings),
    ]
    return record, facts(rows)
