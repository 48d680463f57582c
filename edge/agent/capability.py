"""The capability of this machine, as the node reports it."""

import contextlib
import os
import re
from importlib import metadata
from pathlib import Path
from typing import Final

from triplane.proto import fleet_pb2 as pb
from triplane.proto.machines import targets_here, this_machine

# The newest ONNX opset that each onnxruntime release runs; later releases take the last row.
MAX_OPSET: Final = (((1, 20), 21), ((1, 22), 22), ((1, 23), 23), ((1, 24), 24))
INSTRUCTIONS: Final = frozenset(
    {"avx", "avx2", "fma", "avx512f", "avx512_vnni", "avx_vnni", "asimddp", "i8mm", "fphp", "sve"}
)

CPU_FLAGS: Final = r"^(?:flags|Features)\s*:(.*)$"
MEMORY: Final = r"^MemTotal:\s+(\d+) kB$"


def capability(folder: Path, targets: tuple[str, ...] = ()) -> pb.Capability:
    """Return the capability. folder: on the disk for bundles. targets: overrides the machine's."""
    version = metadata.version("onnxruntime")
    space = os.statvfs(folder)
    return pb.Capability(
        runtime="onnxruntime",
        runtime_version=version,
        max_opset=_max_opset(version),
        machine=this_machine(),
        instructions=sorted(INSTRUCTIONS & {*_matched(CPU_FLAGS, "/proc/cpuinfo").split()}),
        memory_bytes=int(_matched(MEMORY, "/proc/meminfo") or 0) * 1024,
        free_disk_bytes=space.f_bavail * space.f_frsize,
        targets=targets or targets_here(),
        software=f"triplane {metadata.version('triplane')}",
    )


def _max_opset(version: str) -> int:
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    return max((opset for since, opset in MAX_OPSET if since <= numbers), default=0)


def _matched(pattern: str, path: str) -> str:
    """Return the group of a pattern in a file; empty if either is missing."""
    with contextlib.suppress(OSError):
        match = re.search(pattern, Path(path).read_text(), re.MULTILINE)
        return match[1] if match else ""
    return ""
