"""The home of a node: its paths, and its settings (`node.json`)."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final, get_type_hints

from triplane.proto.disk import OS_DISK, write_atomic
from triplane.proto.errors import Corrupt, InvalidInput, NotFound
from triplane.proto.identity import IdentityFolder

MAX_SETTINGS_BYTES: Final = 64 << 10
MAX_PORT: Final = 65535


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSettings:
    """The settings in `node.json`, for the operator of the machine.

    targets: converter's targets this node takes, best first; empty for those of its processor.
    max_disk_bytes: of bundles. probation_s: where an assignment does not say. min_bytes_per_s,
    patience_s: below how many bytes over how long a download is given up, where the link is slower
    than `proto.transfer.Pace` expects.
    """

    host: str = "127.0.0.1"
    port: int = 8001
    metrics_port: int = 8002
    targets: tuple[str, ...] = ()
    probation_s: float = 5.0
    max_disk_bytes: int = 16 << 30
    min_bytes_per_s: int | None = None
    patience_s: float | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_client_ca: str | None = None


def _check_kinds(values: Mapping[str, Any]) -> None:
    """InvalidInput names a setting whose value is not of its kind."""
    kinds = get_type_hints(NodeSettings)
    for name, value in values.items():
        if name == "targets":
            fits, kind = isinstance(value, list) and all(isinstance(t, str) for t in value), "names"
        elif name.endswith("port"):
            fits, kind = type(value) is int and 0 <= value <= MAX_PORT, f"0 to {MAX_PORT}"
        else:
            wanted = kinds[name]
            as_float = type(value) is int and isinstance(0.0, wanted)
            fits = as_float or (isinstance(value, wanted) and not isinstance(value, bool))
            kind = getattr(wanted, "__name__", str(wanted))
        if not fits:
            raise InvalidInput(f"{name} is {str(value)[:80]!r}, it has to be {kind}")


class NodeHome:
    """Paths of a node's home."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path).absolute()
        self.identity = IdentityFolder(self.path / "identity")
        self.trust = self.path / "trust"
        self.bundles = self.path / "bundles"
        self.models = self.path / "models"
        self.samples = self.path / "samples"
        self.damaged = self.path / "damaged"
        self.journal = self.path / "journal"
        self.desired = self.path / "desired"
        self.run = self.path / "run"
        self.logs = self.path / "logs"
        self.settings_file = self.path / "node.json"
        self.control_socket = self.run / "serving.sock"

    def make(self) -> None:
        """Make the folders; only this user may enter."""
        for folder in (
            self.path, self.models, self.samples, self.run, self.logs, self.trust, self.bundles,
        ):  # fmt: skip
            OS_DISK.make_folder(folder)
        for folder in (self.path, self.run):
            folder.chmod(0o700)

    def require_enrolled(self) -> None:
        """NotFound where this is no home of an enrolled node."""
        if not (self.identity.path / "cert.pem").is_file():
            raise NotFound(
                f"no enrolled node in {self.path}; ask an operator for `triplane "
                f"cloud token --role node`, then: triplane edge enrol TOKEN --cloud HOST:PORT "
                f"--home {self.path}"
            )

    @property
    def settings(self) -> NodeSettings:
        """Return the settings of `node.json`, or the defaults without it.

        Corrupt names the error.
        """
        try:
            data = self.settings_file.read_bytes()[: MAX_SETTINGS_BYTES + 1]
        except FileNotFoundError:
            return NodeSettings()
        except IsADirectoryError as error:
            raise Corrupt(f"{self.settings_file} cannot be read: it is a folder") from error
        try:
            parsed = json.loads(data)
            known = {field.name for field in fields(NodeSettings)}
            if not isinstance(parsed, dict) or not parsed.keys() <= known:
                raise InvalidInput(f"keys are {', '.join(sorted(known))}")
            _check_kinds(parsed)
            return NodeSettings(**{**parsed, "targets": tuple(parsed.get("targets", ()))})
        except (ValueError, TypeError, RecursionError) as error:
            raise Corrupt(f"{self.settings_file} cannot be read: {error}") from error

    def save_settings(self, settings: NodeSettings) -> None:
        """Write `node.json` whole."""
        text = json.dumps(asdict(settings), indent=1, sort_keys=True)
        write_atomic(self.settings_file, f"{text}\n".encode())
