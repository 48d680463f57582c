"""The families of errors that every package raises, by who can act on them.

A message states the rule, the values seen and the way out. `proto/status.py` maps each family to a
gRPC status, so that a client raises what the server raised. This module imports nothing.
"""


class TriplaneError(Exception):
    """Base of all families. Catch it where a process ends; raise one of the families."""


class InvalidInput(TriplaneError, ValueError):
    """The call is wrong; fix it."""


class NotFound(TriplaneError, LookupError):
    """The named thing does not exist here."""


class Conflict(TriplaneError):
    """The thing is in a state that does not allow the call."""


class Unavailable(TriplaneError):
    """The call cannot be served now; the same call may succeed later."""


class Corrupt(TriplaneError):
    """Bytes are damaged or forged; retrying with the same bytes never helps."""


class MissingExtra(TriplaneError, ImportError):
    """An optional dependency is not installed; the message names the extra that installs it."""
