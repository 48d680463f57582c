"""Check whether a bundle fits a node's hardware, by the same rule on both sides.

The cloud checks before it assigns a bundle. The node checks again before it loads it, because a
compromised cloud would not.
"""

import re
from collections.abc import Collection
from typing import Protocol


class _Hardware(Protocol):
    """The properties of a machine that both a bundle's needs and a node's capability name."""

    @property
    def runtime(self) -> str:
        """Name of the runtime."""

    @property
    def instructions(self) -> Collection[str]:
        """Instruction sets such as "avx512_vnni"."""

    @property
    def memory_bytes(self) -> int:
        """Memory to load and run a bundle, or memory of the machine."""


class HardwareNeeds(_Hardware, Protocol):
    """The needs of a bundle; empty or 0 if it has none."""

    @property
    def min_version(self) -> str:
        """Oldest version of the runtime."""

    @property
    def opset(self) -> int:
        """Opset of the graph."""


class Offers(_Hardware, Protocol):
    """The capability of a node."""

    @property
    def runtime_version(self) -> str:
        """Version of the runtime."""

    @property
    def max_opset(self) -> int:
        """Newest opset that the runtime supports."""


def fits(needs: HardwareNeeds, node: Offers) -> str | None:
    """Return None if the node can run the bundle, else the first reason why it cannot."""
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
    """Return the leading numbers of a version, for comparing: "1.23.2+cpu" is (1, 23, 2)."""
    # The other machine chose the text: bound the digits, since parsing a huge integer is quadratic.
    match = re.match(r"[0-9]{1,9}(?:\.[0-9]{1,9}){0,7}", text)
    return tuple(int(part) for part in match.group().split(".")) if match else ()
