"""A plugin of pytest: the coverage of a line names the test functions that ran it."""

import coverage
import pytest


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    current = coverage.Coverage.current()
    if current is not None:
        current.switch_context(item.nodeid.partition("[")[0])
    try:
        return (yield)
    finally:
        if current is not None:
            current.switch_context("")
