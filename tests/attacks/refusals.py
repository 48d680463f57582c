"""Bytes that every reader of files refuses."""

import time
import tracemalloc
from contextlib import contextmanager

import pytest

from triplane.proto.errors import Corrupt

MEMORY_BYTES = 4 << 20
TIME_S = 10.0  # of the processor, with every allocation traced


@contextmanager
def refused(match: str, family: type[Exception] = Corrupt, memory_bytes: int = MEMORY_BYTES):
    """Demand a clear error in bounded time and Python memory."""
    tracemalloc.start()
    started = time.process_time()
    try:
        with pytest.raises(family, match=match):
            yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < memory_bytes
    assert time.process_time() - started < TIME_S
