"""The options of a serving process, from the command line or a parent process."""

from dataclasses import dataclass, field
from typing import Final

from triplane.edge.serving.limits import ServingLimits
from triplane.proto.errors import InvalidInput
from triplane.unified_ir.runtime.devices import DEVICES, Device

MAX_DRAIN_S: Final = 86_400.0
MODEL_THREADS: Final = range(1, 1025)
LOG_LEVELS: Final = ("debug", "info", "warning", "error")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of one serving process. InvalidInput for an impossible value.

    Port 0 means any free port; the ready line has the chosen one.
    """

    bundles: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = 8001
    metrics_port: int = 8002
    model_threads: int = 1  # threads of one run of a model; calls run in parallel anyway
    device: Device = "cpu"
    drain_s: float = 30.0  # time for calls in progress to finish after a signal
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_client_ca: str | None = None
    control_socket: str | None = None  # for a node's agent, which loads and unloads models
    home: str | None = None  # of a node, whose committed versions are served
    json: bool = False  # the ready line as one JSON object
    log_level: str = "warning"
    limits: ServingLimits = field(default_factory=ServingLimits)

    def __post_init__(self) -> None:
        texts: tuple[object, ...] = (self.host, *self.bundles)
        if not all(isinstance(text, str) and text for text in texts):
            raise InvalidInput(f"host and bundles are texts, got {self.host!r} {self.bundles!r}")
        if not self.bundles and not self.control_socket:
            raise InvalidInput("nothing to serve; name at least one bundle")
        ports: dict[str, object] = {"port": self.port, "metrics_port": self.metrics_port}
        for what, port in ports.items():
            if not isinstance(port, int) or not 0 <= port <= 65535:
                raise InvalidInput(f"{what} is {port!r}; give 0 to 65535, 0 for any free one")
        if self.log_level not in LOG_LEVELS:
            raise InvalidInput(f"log_level is {self.log_level!r}; one of {', '.join(LOG_LEVELS)}")
        if self.device not in DEVICES:
            raise InvalidInput(f"device is {self.device!r}; one of {', '.join(DEVICES)}")
        if not 0 <= self.drain_s <= MAX_DRAIN_S:
            raise InvalidInput(f"drain_s is {self.drain_s}; 0 to {MAX_DRAIN_S} seconds")
        if self.model_threads not in MODEL_THREADS:
            raise InvalidInput(f"model_threads is {self.model_threads}; 1 to {MODEL_THREADS[-1]}")
        if bool(self.tls_cert) != bool(self.tls_key) or (self.tls_client_ca and not self.tls_cert):
            raise InvalidInput("TLS needs both a certificate and its key; give both files")
