"""Processes here are killed and started anew within tests, so they are counted per module."""

import tempfile
from pathlib import Path

import psutil
import pytest

MEMORY = Path("/dev/shm")  # where a disk is played, thousands of small files need no real one


@pytest.fixture(autouse=True)
def nothing_leaks():
    """Replaces the count per test; `no_process_is_left` counts at the end of a module."""


@pytest.fixture(scope="module", autouse=True)
def no_process_is_left():
    before = {*psutil.Process().children(recursive=True)}
    yield
    left = {*psutil.Process().children(recursive=True)} - before
    left = {process for process in left if not is_of_others(process, before)}
    assert not left, [" ".join(process.cmdline()) for process in left]


def is_of_others(process, before):
    """A browser that tests of another module share starts helpers whenever it likes."""
    try:
        return bool(before.intersection(process.parents()))
    except psutil.NoSuchProcess:  # it ended while we looked
        return True


@pytest.fixture
def quick_folder():
    """An empty folder for many small files, in memory where the machine has it."""
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as made:
        yield Path(made)
