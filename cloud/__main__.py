"""`python -m triplane.cloud OPTIONS`: the cloud process; OPTIONS is one JSON object.

Its keys are the fields of `server.CloudOptions`, which have defaults. One line of JSON on standard
output reports that the cloud is ready, and its ports. People use `triplane cloud up` instead.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import resource
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from triplane.proto import signals
from triplane.proto.errors import InvalidInput
from triplane.proto.logs import configure_logging, exit_on_error, read_options

if TYPE_CHECKING:
    from triplane.cloud.server import CloudOptions

logger = logging.getLogger(__name__)


ARENA_MAX: Final = -8
"""glibc's M_ARENA_MAX."""


def one_arena() -> None:
    """Let all threads share one heap, if the C library is glibc.

    Otherwise each thread that receives chunks of a large upload keeps freed memory in its own heap:
    half a gigabyte after an upload of 1 GB, measured.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(ARENA_MAX, 1)


def all_descriptors() -> int:
    """Raise the limit of open descriptors to what the system allows; return it.

    Each node's stream needs one, and the usual soft limit of 1,024 is for programs that use select.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # macOS reports an unlimited hard limit, which cannot be set.
    if hard not in {resource.RLIM_INFINITY, soft}:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        return hard
    return soft


def tls_1_3_only() -> None:
    """Prevent connections of this process from using TLS 1.2; call it before importing grpc.

    grpc has no setting for the least version, and reads this variable when it is imported. The
    cloud's certificates are ECDSA: if the only cipher offered for TLS 1.2 needs an RSA certificate,
    every handshake of 1.2 fails. The ciphers of 1.3 are not affected.
    """
    os.environ.setdefault("GRPC_SSL_CIPHER_SUITES", "ECDHE-RSA-AES256-GCM-SHA384")


def main(options: CloudOptions) -> None:
    """Log to standard error and serve until a signal. Raises the error families."""
    signals.restore_defaults()
    one_arena()
    descriptors = all_descriptors()
    configure_logging(options.log_level)
    # Imported after `restore_defaults`: a signal during the imports ends the process at once.
    from triplane.cloud import server

    logger.info("descriptors", extra={"most": descriptors})
    server.run(options)


def options_from(values: Mapping[str, Any]) -> CloudOptions:
    """Return options from plain values. InvalidInput names an unknown key."""
    from triplane.cloud.server import CloudOptions

    known = [field.name for field in fields(CloudOptions)]
    for name in values:
        if name not in known:
            raise InvalidInput(f"no option {name!r}; the options are {', '.join(known)}")
    if not isinstance(values.get("home"), str | Path):
        raise InvalidInput('the options must contain the home of the cloud: {"home": "DIR"}')
    return CloudOptions(**{**values, "home": Path(values["home"]).absolute()})


def parse(argv: Sequence[str]) -> CloudOptions:
    """Parse a command line of one JSON object. Raises InvalidInput."""
    return options_from(read_options(argv, '{"home": "DIR"}'))


if __name__ == "__main__":
    tls_1_3_only()
    exit_on_error("cloud", lambda: main(parse(sys.argv[1:])))
