"""The home of a node: its paths, and its settings (`node.json`)."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final, get_type_hints

from triplane.proto.errors import InvalidInput
from triplane.proto.machine_home import MachineHome
from triplane.unified_ir.runtime.devices import DEVICES, Device

MAX_PORT: Final = 65535


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSettings:
    """The settings in `node.json`, for the operator of the machine. InvalidInput names a bad one.

    targets: targets of the converter that this node takes, best first; empty for those of its
    processor. max_disk_bytes: limit for bundles. probation_s: used if an assignment sets none.
    device: where the inference server runs models. min_bytes_per_s, patience_s: a download that is
    slower than that rate for that time is ended; set them for a link that is slower than
    `proto.transfer.Pace` expects.
    """

    host: str = "127.0.0.1"
    port: int = 8001
    metrics_port: int = 8002
    device: Device = "cpu"
    targets: tuple[str, ...] = ()
    probation_s: float = 5.0
    max_disk_bytes: int = 16 << 30
    min_bytes_per_s: int | None = None
    patience_s: float | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_client_ca: str | None = None

    def __post_init__(self) -> None:
        for name, wanted in get_type_hints(NodeSettings).items():
            value = getattr(self, name)
            if name == "targets":
                fits = isinstance(value, list | tuple) and all(isinstance(t, str) for t in value)
                kind = "names"
            elif name == "device":
                fits, kind = value in DEVICES, " or ".join(DEVICES)
            elif name.endswith("port"):
                fits, kind = type(value) is int and 0 <= value <= MAX_PORT, f"0 to {MAX_PORT}"
            else:
                # JSON has one kind of number, so 5 is accepted where 5.0 is meant; true is never a
                # number.
                as_float = type(value) is int and isinstance(0.0, wanted)
                fits = as_float or (isinstance(value, wanted) and not isinstance(value, bool))
                kind = getattr(wanted, "__name__", str(wanted))
            if not fits:
                raise InvalidInput(f"{name} is {str(value)[:80]!r}, it has to be {kind}")
        object.__setattr__(self, "targets", tuple(self.targets))  # a list in JSON


class NodeHome(MachineHome[NodeSettings]):
    """Paths of a node's home."""

    role, verb, settings_name = "node", "edge", "node.json"

    def __init__(self, path: Path) -> None:
        super().__init__(path, NodeSettings)
        self.trust = self.path / "trust"
        self.bundles = self.path / "bundles"
        self.models = self.path / "models"
        self.samples = self.path / "samples"
        self.damaged = self.path / "damaged"
        self.journal = self.path / "journal"
        self.desired = self.path / "desired"
        self.run = self.path / "run"
        self.logs = self.path / "logs"
        self.control_socket = self.run / "serving.sock"

    def make(self) -> None:
        """Make the folders; only this user may enter."""
        self.make_folders(self.models, self.samples, self.run, self.logs, self.trust, self.bundles)
        self.run.chmod(0o700)
