"""Error families by who can act; every package raises these and nothing vaguer.

A message states the rule, the values seen and the way out. `proto/status.py` maps each family to a
gRPC status, so a client raises what the server raised. This module imports nothing.
"""


class TriplaneError(Exception):
    """Root of the tree; catch it at a process edge, raise one of its families."""


class InvalidInput(TriplaneError, ValueError):
    """The call is wrong and fixing the call helps."""


class NotFound(TriplaneError, LookupError):
    """The named thing does not exist here."""


class Conflict(TriplaneError):
    """The thing exists in a state that forbids the call."""


class Unavailable(TriplaneError):
    """Not now; the same call may succeed later."""


class Corrupt(TriplaneError):
    """Bytes are damaged or forged; retrying the same bytes never helps."""


class MissingExtra(TriplaneError, ImportError):
    """An optional dependency is absent; the message names the extra that installs it."""
