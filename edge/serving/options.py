"""What a serving process is told, as one value; the command line and a parent write the same."""

from dataclasses import dataclass, field

from triplane.edge.serving.limits import Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """One serving process. Port 0 means any free port; the chosen one is in the ready line."""

    bundles: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = 8001
    metrics_port: int = 8002
    model_threads: int = 1  # threads of one run of a model; calls run side by side anyway
    drain_s: float = 30.0  # how long calls inside may take to finish after a signal
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_client_ca: str | None = None
    json: bool = False  # the ready line as one JSON object
    log_level: str = "warning"
    limits: Limits = field(default_factory=Limits)
