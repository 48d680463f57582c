"""The status of a node, as seen on its own machine with or without the cloud."""

import time
from dataclasses import asdict, dataclass
from typing import Any, Final

import grpc

from triplane.edge.agent.journal import Line, readable
from triplane.edge.agent.reconciler import read_desired
from triplane.edge.agent.seam import Seam
from triplane.edge.home import NodeHome
from triplane.edge.serving.pointers import Pointer, read_pointers
from triplane.edge.supervisor.children import is_alive
from triplane.proto.channels import connect
from triplane.proto.errors import Corrupt, TriplaneError, Unavailable
from triplane.proto.metadata_pb2 import GetRequest
from triplane.proto.metadata_pb2_grpc import MetadataStub
from triplane.proto.status import error_from
from triplane.proto.unreachable import unreachable_cause

PROCESSES: Final = ("serving", "agent")
ASK_S: Final = 3.0
"""Time for the cloud to answer; without an answer the status shows the rest."""


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """The status at one moment.

    serving: ready versions by model, None if the server does not answer. refusal: why the cloud
    refuses this node's calls; empty if it accepts them or does not answer. unreachable: why it does
    not answer, or empty. damaged: a file because of which `edge up` cannot start, or empty.
    unreadable: damaged pointers, which a running agent replaces by itself.
    """

    name: str
    cloud: str
    expires_s: float
    processes: dict[str, bool]
    serving: dict[str, str] | None
    committed: dict[str, Pointer]
    desired: dict[str, int]
    last: dict[str, Line]
    refusal: str = ""
    unreachable: str = ""
    damaged: str = ""
    unreadable: tuple[str, ...] = ()

    @property
    def trouble(self) -> type[TriplaneError] | None:
        """The family of an error that a person must fix, or None."""
        if self.damaged:
            return Corrupt
        return Unavailable if self.refusal else None

    def record(self) -> dict[str, Any]:
        """Return the status for `--json`."""
        return asdict(self)

    def text(self) -> str:
        """Return the status for people."""
        up = ", ".join(f"{n} {'up' if on else 'DOWN'}" for n, on in self.processes.items())
        lines = [f"{self.name} of {self.cloud}: {up}"]
        if self.damaged:
            lines.append(f"  DAMAGED: {self.damaged}")
        if self.refusal:
            lines.append(f"  REFUSED by the cloud: {self.refusal}")
        if self.unreachable:
            lines.append(f"  the cloud does not answer from here: {self.unreachable}")
        models = sorted({*self.committed, *self.desired, *(self.serving or {})})
        lines += [f"  {model}: {self._of(model)}" for model in models] or ["  no model yet"]
        lines += [f"  unreadable: {what}" for what in self.unreadable]
        return "\n".join(lines)

    def _of(self, model: str) -> str:
        pointer, last = self.committed.get(model), self.last.get(model)
        serves = "not known" if self.serving is None else self.serving.get(model, "nothing")
        desired = self.desired.get(model)
        committed = pointer.version if pointer else None
        parts = [f"serves {serves}", f"committed {committed or 'nothing'}"]
        if desired and desired != committed:
            parts.append(f"assigned {desired}")
        if last and (last.version != committed or not last.ended):
            parts.append(f"version {last.version} {last.state.lower()} {last.reason}".strip())
        return ", ".join(parts)


def look(home: NodeHome) -> NodeStatus:
    """Read the home, and ask the server and the cloud. NotFound if there is no node."""
    home.require_enrolled()
    seam = Seam(home.control_socket)
    try:
        serving = seam.versions()
    except TriplaneError:
        serving = None
    finally:
        seam.close()
    committed, broken = read_pointers(home.models)
    damaged = ""  # the reason why `edge up` would refuse this home
    try:
        _ = home.settings
    except Corrupt as error:
        damaged = str(error)
    refusal, unreachable = _asked(home)
    return NodeStatus(
        name=home.identity.name,
        cloud=home.identity.cloud,
        expires_s=home.identity.expires_s,
        processes={name: is_alive(name, home.run) for name in PROCESSES},
        serving=serving,
        committed=committed,
        desired={a.model: a.version for a in read_desired(home.desired).assignments},
        last={line.model: line for line in readable(home.journal)},
        refusal=refusal,
        unreachable=unreachable,
        damaged=damaged,
        unreadable=tuple(map(str, broken)),
    )


def _asked(home: NodeHome) -> tuple[str, str]:
    """Return why the cloud refuses this node's certificate, and why it does not answer."""
    if home.identity.expires_s < time.time():
        return "the certificate of this node has expired; enrol it again with a new token", ""
    with connect(home.identity) as channel:
        try:
            MetadataStub(channel).Get(GetRequest(name="timestamp.json"), timeout=ASK_S)
        except grpc.RpcError as error:
            # Any other error says nothing about this node.
            if error.code() in {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED}:
                return str(error_from(error)), ""
            return "", unreachable_cause(str(error.details())) or ""
    return "", ""
