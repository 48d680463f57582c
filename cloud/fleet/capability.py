"""What a bundle needs and a node offers, as values; `proto.fitting` says whether they fit."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleNeeds:
    """Of one bundle; empty or 0 where it does not care."""

    runtime: str = ""
    min_version: str = ""
    opset: int = 0
    instructions: tuple[str, ...] = ()
    memory_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Capability:
    """Of one node, as it reports it. targets: converter targets it takes, best first."""

    runtime: str = ""
    runtime_version: str = ""
    max_opset: int = 0
    instructions: tuple[str, ...] = ()
    memory_bytes: int = 0
    targets: tuple[str, ...] = ()
