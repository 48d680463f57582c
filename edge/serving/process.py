"""The serving process: load, announce, serve until a signal, drain, exit.

A signal while models load ends the process at once. One line on standard output says that calls are
accepted, and on which ports; a parent that asked for port 0 reads it there. After that, SIGTERM and
SIGINT drain the server: calls in progress finish, new ones are refused. A second signal cancels the
calls in progress. If runs go on regardless, the process is ended: `STOP_S` after the time to drain,
or `signals.HURRY_S` after the second signal.
"""

import json
import logging
import os
import resource
from pathlib import Path
from typing import Final

from triplane.edge.serving import probe
from triplane.edge.serving.bundles import open_bundle
from triplane.edge.serving.control import Control
from triplane.edge.serving.options import Options
from triplane.edge.serving.pointers import read_pointers
from triplane.edge.serving.repository import Repository
from triplane.edge.serving.server import Server, Tls
from triplane.proto import signals
from triplane.proto.disk import lock_file
from triplane.proto.errors import Conflict, TriplaneError
from triplane.proto.logs import say_ready
from triplane.unified_ir.runtime.session import SessionOptions, check_device

logger = logging.getLogger(__name__)

STOP_S: Final = 10.0
"""Longest time to end threads and free models, after the time to drain."""


def run(options: Options) -> None:
    """Serve the bundles until a signal. Call it from the main thread. Raises the families."""
    signals.restore_defaults()
    _raise_descriptor_limit()
    server = start(options)
    termination = signals.Termination(limit_s=options.drain_s + STOP_S, hurry=server.cancel)
    control = None
    try:
        if options.control_socket:
            socket, session = Path(options.control_socket), _session_options(options)
            control = Control(socket, server.repository, server.service, session=session)
        announce(options, server)
        termination.wait()
        logger.info("draining", extra={"seconds_at_most": options.drain_s})
    finally:
        termination.request()
        if control:
            control.close()
        server.stop(options.drain_s)
    logger.info("stopped")


def _raise_descriptor_limit() -> None:
    """Raise the limit of open descriptors as far as possible, because connections take one each."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError) as error:  # macOS reports a hard limit that cannot be set
        logger.info("descriptor limit kept", extra={"limit": soft, "reason": str(error)})


def start(options: Options) -> Server:
    """Load every bundle, then open the ports. Unavailable: the device is not."""
    session = _session_options(options)
    check_device(session.device)  # a node's committed versions would be left out one by one
    if options.home:
        _lock(Path(options.home))
    repository = Repository(probe.plan)
    for path in options.bundles:
        repository.add(open_bundle(Path(path), options=session))
    if options.home:
        _load_committed(Path(options.home), repository, session)
    return Server(
        repository,
        limits=options.limits,
        host=options.host,
        port=options.port,
        metrics_port=options.metrics_port,
        tls=_tls(options),
    )


def _session_options(options: Options) -> SessionOptions:
    return SessionOptions(threads=options.model_threads, device=options.device)


def _lock(home: Path) -> None:
    """Hold the home's serving lock until this process ends. Conflict if another process has it."""
    (home / "run").mkdir(exist_ok=True)
    try:
        with lock_file(home / "run" / "serving.lock") as file:
            os.dup(file.fileno())  # never closed, so that the lock is held
    except BlockingIOError as error:
        raise Conflict(f"another server serves {home}; stop it first") from error


def _load_committed(home: Path, repository: Repository, session: SessionOptions) -> None:
    """Serve the versions that the pointers name. An error of one does not affect the others."""
    pointers, broken = read_pointers(home / "models")
    for error in broken:
        logger.error("pointer unreadable", extra={"reason": str(error)})
    for pointer in pointers.values():
        path = home / "bundles" / pointer.sha256
        try:
            repository.add(open_bundle(path, options=session, expected_digest=pointer.digest))
        except TriplaneError as error:
            logger.warning(
                "committed version does not load",
                extra={"model": pointer.model, "version": pointer.version, "reason": str(error)},
            )


def announce(options: Options, server: Server) -> None:
    """Print the ready line, as text or as one JSON object."""
    models = [(version.name, version.version) for version in server.repository.versions()]
    if options.json:
        line = json.dumps(
            {
                "serving": [{"model": name, "version": version} for name, version in models],
                "host": options.host,
                "port": server.port,
                "metrics_port": server.metrics_port,
                "tls": options.tls_cert is not None,
            }
        )
    else:
        named = ", ".join(f"{name} version {version}" for name, version in models) or "nothing yet"
        line = f"serving {named} on {options.host}:{server.port} (metrics :{server.metrics_port})"
    say_ready(line)


def _tls(options: Options) -> Tls | None:
    if options.tls_cert is None or options.tls_key is None:
        return None
    client_ca = Path(options.tls_client_ca) if options.tls_client_ca else None
    return Tls(cert=Path(options.tls_cert), key=Path(options.tls_key), client_ca=client_ca)
