"""Blobs that some part of the cloud references, and which are therefore not collected.

* versions, their samples, and bundles: the registry's tables. Rollouts, nodes and signed metadata
  name bundles by model, version and target, so these rows keep them;
* golden sets of the release policy: the targets metadata that is published, superseded but still
  readable by a node in a refresh, or waiting for signatures;
* plans and states of federated runs: the federation's tables. Their updates have another folder.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from sqlalchemy import Connection

from triplane.cloud.federation import journal
from triplane.cloud.identity import audit
from triplane.cloud.registry import queries
from triplane.cloud.registry.collecting import OnRemoved, Roots, Stored
from triplane.cloud.trust.repository import MetadataRepository

MOST_NAMED: Final = 100
"""Largest number of digests in one entry of the audit log; the count is of all blobs."""
SYSTEM: Final = "cloud"


def roots_of(repository: MetadataRepository) -> tuple[Roots, ...]:
    """Return the roots of every part; each is read inside the transaction that collects."""

    def golden(_: Connection) -> set[bytes]:
        return repository.golden_sets()

    # A root that is missing here loses its blobs: add one for each new part that stores blobs.
    return queries.referenced, journal.referenced, golden


def audit_removals(now_s: float, actor: str = SYSTEM) -> OnRemoved:
    """Return a function that writes removed blobs into the audit log."""

    def record(connection: Connection, removed: Sequence[Stored]) -> None:
        details: dict[str, Any] = {
            "blobs": len(removed),
            "bytes": sum(blob.size for blob in removed),
            "sha256": [blob.sha256.hex() for blob in removed[:MOST_NAMED]],
        }
        audit.record(
            connection, time_s=now_s, actor=actor, action="registry.collect", subject="blobs",
            details=details,
        )  # fmt: skip

    return record
