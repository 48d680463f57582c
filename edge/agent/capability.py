"""The capability of this machine, as the node reports it."""

import os
import re
from importlib import metadata
from pathlib import Path
from typing import Final

from triplane.proto import fleet_pb2 as pb
from triplane.proto.machines import targets_here, this_machine

# The newest ONNX opset that each onnxruntime release runs; a later release runs the last row's.
MAX_OPSET: Final = (((1, 20), 21), ((1, 22), 22), ((1, 23), 23), ((1, 24), 24))
INSTRUCTIONS: Final = frozenset(
    {"avx", "avx2", "fma", "avx512f", "avx512_vnni", "avx_vnni", "asimddp", "i8mm", "fphp", "sve"}
)


def capability(folder: Path, targets: tuple[str, ...] = ()) -> pb.Capability:
    """Return the capability.

    folder: on the disk that counts. targets: in place of the machine's.
    """
    version = metadata.version("onnxruntime")
    space = os.statvfs(folder)
    return pb.Capability(
        runtime="onnxruntime",
        runtime_version=version,
        max_opset=_max_opset(version),
        machine=this_machine(),
        instructions=sorted(_flags() & INSTRUCTIONS),
        memory_bytes=_memory_bytes(),
        free_disk_bytes=space.f_bavail * space.f_frsize,
        targets=targets or targets_here(),
        software=f"triplane {metadata.version('triplane')}",
    )


def _max_opset(version: str) -> int:
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    return max((opset for since, opset in MAX_OPSET if since <= numbers), default=0)


def _flags() -> set[str]:
    match = re.search(r"^(?:flags|Features)\s*:(.*)$", _read("/proc/cpuinfo"), re.MULTILINE)
    return set(match.group(1).split()) if match else set()


def _memory_bytes() -> int:
    match = re.search(r"^MemTotal:\s+(\d+) kB$", _read("/proc/meminfo"), re.MULTILINE)
    return int(match.group(1)) * 1024 if match else 0


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
