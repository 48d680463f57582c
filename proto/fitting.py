"""What a bundle needs and a node offers, and why the two do not fit: one rule for both sides.

The cloud asks before it assigns, the node before it loads: a cloud that was taken over would not
ask.
"""

import re
from collections.abc import Collection
from typing import Protocol


class HardwareNeeds(Protocol):
    """Of a bundle; empty or 0 where it does not care."""

    @property
    def runtime(self) -> str:
        """Its name."""

    @property
    def min_version(self) -> str:
        """Of the runtime."""

    @property
    def opset(self) -> int:
        """Of the graph."""

    @property
    def instructions(self) -> Collection[str]:
        """Sets such as "avx512_vnni", all of them needed."""

    @property
    def memory_bytes(self) -> int:
        """To load and run."""


class Offers(Protocol):
    """Of a node."""

    @property
    def runtime(self) -> str:
        """Its name."""

    @property
    def runtime_version(self) -> str:
        """Of the runtime."""

    @property
    def max_opset(self) -> int:
        """The newest that the runtime knows."""

    @property
    def instructions(self) -> Collection[str]:
        """That the processor has."""

    @property
    def memory_bytes(self) -> int:
        """Of the machine."""


def fits(needs: HardwareNeeds, node: Offers) -> str | None:
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
    match = re.match(r"[0-9]{1,9}(?:\.[0-9]{1,9}){0,7}", text)
    return tuple(int(part) for part in match.group().split(".")) if match else ()
