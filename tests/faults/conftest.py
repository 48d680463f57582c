"""Processes here are killed and started anew within tests, so they are counted per module."""

import psutil
import pytest


@pytest.fixture(autouse=True)
def nothing_leaks():
    """Replaces the count per test; `no_process_is_left` counts at the end of a module."""


@pytest.fixture(scope="module", autouse=True)
def no_process_is_left():
    before = {*psutil.Process().children(recursive=True)}
    yield
    left = {*psutil.Process().children(recursive=True)} - before
    assert not left, [" ".join(process.cmdline()) for process in left]
