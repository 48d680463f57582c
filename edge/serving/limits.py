"""All limits for requests, in one value with units.

A request beyond a limit is refused, naming the limit, before any work or allocation is done for it.
Other quantities follow from these: bytes per tensor from the message, values per tensor from its
bytes.
"""

from dataclasses import dataclass, fields
from typing import Final

from triplane.proto.errors import InvalidInput

MAX_LIMIT: Final = 2**31 - 1  # grpc counts message bytes and milliseconds in 31 bits


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingLimits:
    """Limits of one server. InvalidInput if one is below 1 or above `MAX_LIMIT`."""

    # fmt: off
    message_bytes: int = 64 << 20        # one request, both before and after decompression
    structure_bytes: int = 1 << 20       # a request without its raw contents, but with typed values
    request_bytes: int = 512 << 20       # all requests inside, including those still arriving
    response_bytes: int = 256 << 20      # tensors of one response
    unsent_bytes: int = 512 << 20        # all answers that callers have not read yet
    tensors: int = 64                    # inputs, and requested outputs, of one request
    rank: int = 8                        # dimensions of one tensor
    elements: int = 1 << 26              # values of one tensor, and the largest single dimension
    rows: int = 4096                     # size of a variable first dimension
    name_chars: int = 256                # model, version, tensor and parameter names, request id
    parameters: int = 32                 # parameters of one request, input or output
    classes: int = 1000                  # k of the `classification` parameter
    classification_entries: int = 65536  # rows times k
    threads: int = 16                    # calls that compute at once
    queued_calls: int = 256              # calls that wait for their turn; one more is refused
    receiving: int = 128                 # calls whose request is still arriving, at once
    streams: int = 16                    # open streams; each has one request in flight at a time
    control_calls: int = 64              # metadata and index calls in progress
    receive_s: int = 30                  # from the start of a call to its last request byte
    call_s: int = 60                     # longest life of a call that sets no deadline
    # fmt: on

    def __post_init__(self) -> None:
        for field in fields(self):
            if not 1 <= (value := getattr(self, field.name)) <= MAX_LIMIT:
                raise InvalidInput(f"limit {field.name} is {value}; it must be 1 to {MAX_LIMIT}")
