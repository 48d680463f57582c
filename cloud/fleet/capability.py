"""What a bundle needs and a node offers, and why the two do not fit."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
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


def fits(needs: Needs, node: Capability) -> str | None:
    """None where the node can run the bundle, else the first reason why it cannot."""
    missing = [name for name in needs.instructions if name not in node.instructions]
    if needs.runtime and needs.runtime != node.runtime:
        return f"needs the runtime {needs.runtime}, the node has {node.runtime or 'none'}"
    if version_key(node.runtime_version) < version_key(needs.min_version):
        return f"needs {needs.runtime} {needs.min_version}, the node has {node.runtime_version}"
    if needs.opset > node.max_opset:
        return f"needs opset {needs.opset}, the node's runtime knows opsets to {node.max_opset}"
    if missing:
        return f"needs the instructions {', '.join(missing)}, which the node's processor lacks"
    if needs.memory_bytes > node.memory_bytes:
        return f"needs {needs.memory_bytes} bytes of memory, the node has {node.memory_bytes}"
    return None


def version_key(text: str) -> tuple[int, ...]:
    """The leading numbers of a version, for comparing: "1.23.2+cpu" is (1, 23, 2)."""
    found = re.match(r"[0-9]{1,9}(?:\.[0-9]{1,9}){0,7}", text)
    return tuple(int(part) for part in found.group().split(".")) if found else ()
