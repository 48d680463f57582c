"""Requirements of bundles and capabilities of nodes; `proto.fitting` compares them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleNeeds:
    """Requirements of one bundle; empty or 0 if it has none."""

    runtime: str = ""
    min_version: str = ""
    opset: int = 0
    instructions: tuple[str, ...] = ()
    memory_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Capability:
    """Capabilities of one node, as it reports them. targets: converter targets, best first."""

    runtime: str = ""
    runtime_version: str = ""
    max_opset: int = 0
    instructions: tuple[str, ...] = ()
    memory_bytes: int = 0
    targets: tuple[str, ...] = ()
