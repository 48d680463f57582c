"""Which process of a run on many hosts this one is. The module needs no JAX."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from triplane.proto.errors import InvalidInput, Unavailable

COORDINATOR: Final = "TRIPLANE_COORDINATOR"
PROCESSES: Final = "TRIPLANE_PROCESSES"
AUTO: Final = "auto"
"""In place of HOST:PORT: the coordinator of the environment."""
MEET_WITHIN_S: Final = 300
HEARTBEAT_S: Final = 10
MAX_WAIT_S: Final = 3600
MAX_PROCESSES: Final = 1 << 16
MAX_NAME: Final = 4096
"""Characters of a host's name or of the part of a list of nodes that is read."""
PORTS: Final = 1 << 12
"""SLURM jobs take one of the highest ports, by their number, as JAX does."""
_ADDRESS: Final = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})")
_PART: Final = re.compile(r"([0-9]{1,6})/([0-9]{1,6})")
_LOOPBACK: Final = re.compile(r"localhost|127\.[0-9.]+|\[::1\]")


class ProcessLost(Unavailable):
    """Another process of the run is gone, so the run has ended; its checkpoint stands."""

    exit_code = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosts:
    """One process of a run on many hosts.

    coordinator: HOST:PORT at which the first process serves the others. process: the number of this
    one, from 1 to `count`. heartbeat_s: a process that gives no sign of life for so long is lost.
    meet_within_s: all processes must have started within so long. source: says where these come
    from.
    """

    coordinator: str
    process: int
    count: int
    heartbeat_s: int = HEARTBEAT_S
    meet_within_s: int = MEET_WITHIN_S
    source: str = "the caller"

    def __post_init__(self) -> None:
        waits = {"heartbeat_s": self.heartbeat_s, "meet_within_s": self.meet_within_s}
        values = (self.coordinator, self.process, self.count, *waits.values())
        if [type(value) for value in values] != [str, int, int, int, int]:
            raise InvalidInput(
                "Hosts takes the coordinator as a text, HOST:PORT, and process, count, "
                f"heartbeat_s and meet_within_s as whole numbers, got {values}"
            )
        match = _ADDRESS.fullmatch(self.coordinator[: MAX_NAME + 1])
        if match is None or not 1 <= int(match[2]) < 1 << 16:
            raise InvalidInput(
                "the coordinator is HOST:PORT of the first process, such as node1:9300, got "
                f"{self.coordinator[:80]!r} from {self.source}"
            )
        if not 1 <= self.process <= self.count <= MAX_PROCESSES:
            raise InvalidInput(
                f"a process is one of 1/N to N/N, with N <= {MAX_PROCESSES}, got "
                f"{self.process}/{self.count} from {self.source}"
            )
        for name, seconds in waits.items():
            if not 1 <= seconds <= MAX_WAIT_S:
                option = name.removesuffix("_s").replace("_", "-")
                raise InvalidInput(
                    f"{name} (--{option}) is 1 to {MAX_WAIT_S} seconds, got {seconds}"
                )

    def __str__(self) -> str:
        where = f"coordinator {self.coordinator}"
        return f"process {self.process} of {self.count}, {where} (from {self.source})"

    @property
    def bind_address(self) -> str:
        """Return where the first process listens: on all interfaces, or on loopback only."""
        host, _, port = self.coordinator.rpartition(":")
        return self.coordinator if _LOOPBACK.fullmatch(host) else f"[::]:{port}"


def hosts_of(
    coordinator: str | None,
    process: str | None,
    env: Mapping[str, str],
    *,
    heartbeat_s: int | None = None,
    meet_within_s: int | None = None,
) -> Hosts | None:
    """Return the process that these options and an environment describe; None for a run alone.

    coordinator: HOST:PORT, "auto", or None for `TRIPLANE_COORDINATOR`. process: I/N, or None for
    what SLURM or an indexed Job of Kubernetes says. heartbeat_s, meet_within_s: None for the
    defaults. InvalidInput: something is missing or malformed.
    """
    if coordinator is None and process is None and COORDINATOR not in env:
        return None
    address, first = _coordinator(coordinator, env)
    number, count, second = _process(process, env)
    source = first if first == second else f"{first} and {second}"
    return Hosts(
        coordinator=address,
        process=number,
        count=count,
        heartbeat_s=HEARTBEAT_S if heartbeat_s is None else heartbeat_s,
        meet_within_s=MEET_WITHIN_S if meet_within_s is None else meet_within_s,
        source=source,
    )


def _coordinator(text: str | None, env: Mapping[str, str]) -> tuple[str, str]:
    if text not in {None, AUTO}:
        assert text is not None
        return text, "--coordinator"
    if COORDINATOR in env:
        return env[COORDINATOR], COORDINATOR
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST")
    if text == AUTO and nodes:
        job = _number("SLURM_JOB_ID", env)
        return f"{first_node(nodes)}:{(1 << 16) - PORTS + job % PORTS}", "SLURM"
    raise InvalidInput(
        "a run of several processes needs a coordinator: pass --coordinator HOST:PORT of the "
        f"first process, or set {COORDINATOR}; under SLURM, --coordinator auto takes the first node"
    )


def _process(text: str | None, env: Mapping[str, str]) -> tuple[int, int, str]:
    if text is not None:
        match = _PART.fullmatch(text)
        if match is None:
            raise InvalidInput(f"--process is I/N, the first of four being 1/4, got {text[:80]!r}")
        return int(match[1]), int(match[2]), "--process"
    if "SLURM_PROCID" in env:
        return _number("SLURM_PROCID", env) + 1, _number("SLURM_NTASKS", env), "SLURM"
    if "JOB_COMPLETION_INDEX" in env:
        number = _number("JOB_COMPLETION_INDEX", env) + 1
        return number, _number(PROCESSES, env), "the Kubernetes Job"
    raise InvalidInput(
        "which process is this one? pass --process I/N, such as 1/4; SLURM says it in SLURM_PROCID "
        "and an indexed Job of Kubernetes in JOB_COMPLETION_INDEX, and neither is set"
    )


def _number(name: str, env: Mapping[str, str]) -> int:
    text = env.get(name, "")
    if not re.fullmatch(r"[0-9]{1,12}", text):
        raise InvalidInput(f"{name} in the environment must be a number, got {text[:80]!r}")
    return int(text)


def first_node(nodes: str) -> str:
    """Return the first host of a list as SLURM writes it: node[007-009,12],gpu1 gives node007."""
    # A comma ends the first host unless it is within brackets, which may follow one another.
    # A long list is cut within its brackets.
    start = re.match(r"(?:[^,\[\]]|\[[^\[\]]*(?:\]|$))+", nodes[:MAX_NAME])
    if start is None:
        raise InvalidInput(f"the list of nodes of SLURM names no host: {nodes[:80]!r}")
    return re.sub(r"\[([^\[\],-]*)[^\[\]]*(?:\]|$)", r"\1", start[0])
