"""Children within limits: what a parent gets of one that answers, refuses, dies or never ends."""

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from triplane.proto.errors import Conflict, Unavailable
from triplane.proto.sandbox import ChildDied, ChildLimits, ask_once

WAIT_S = 60
SERVE = """
import json, os, resource, sys, threading
from triplane.proto.errors import Conflict
from triplane.proto.sandbox import allow_memory, serve_order

def limits(order):
    print("not an answer")
    kinds = ("DATA", "FSIZE", "NOFILE", "CORE", "CPU")
    allow_memory(5 << 20)
    return {kind: resource.getrlimit(getattr(resource, f"RLIMIT_{kind}")) for kind in kinds}

def busy(order):
    raise Conflict("another one works here")

def much(order):
    return {"size": len(bytes(1 << 31))}

serve_order({"limits": limits, "busy": busy, "much": much,
             "die": lambda _: sys.exit("out of luck"),
             "shut": lambda _: (os.closerange(3, 64), threading.Event().wait()),
             "hang": lambda _: threading.Event().wait()})
"""
LIMITS = {"memory_bytes": 1 << 30, "file_bytes": 1 << 20, "seconds": float(WAIT_S)}


def ask(word, folder=None, **limits):
    """The answer of a child to an order of one word."""
    child = ask_once(
        (sys.executable, "-c", SERVE), {"do": word}, ChildLimits(**{**LIMITS, **limits}),
        name="the child", folder=folder,
    )  # fmt: skip
    return asyncio.run(child)


def test_a_child_has_the_limits_of_its_order_and_answers():
    found = ask("limits", cpu_s=7, open_files=40, may_grow=True)
    most = -1  # RLIM_INFINITY
    assert found["CORE"] == [0, 0]
    assert found["FSIZE"] == [1 << 20, 1 << 20]
    assert found["NOFILE"] == [40, 40]
    assert found["CPU"] == [7, 8]
    assert found["DATA"] == [(1 << 30) + (5 << 20), most]


def test_what_a_child_refuses_is_raised_here():
    with pytest.raises(Conflict, match="another one works here"):
        ask("busy")
    with pytest.raises(Unavailable, match="more than its memory limit of 1024 MiB"):
        ask("much")


def test_a_child_that_dies_tells_its_status_and_last_line(tmp_path):
    with pytest.raises(ChildDied, match="the child ended with status 1: out of luck") as died:
        ask("die", tmp_path)
    assert died.value.status == 1


def test_a_child_that_never_answers_is_ended():
    with pytest.raises(ChildDied, match=r"took longer than 0\.5 s") as died:
        ask("hang", seconds=0.5)
    assert died.value.status is None


def test_a_child_that_closes_its_output_and_lives_on_is_ended():
    with pytest.raises(ChildDied, match=r"took longer than 1 s"):
        ask("shut", seconds=1.0)


def running(script):
    """Start a process that runs a script with the module under test as `sandbox`."""
    path = os.pathsep.join(filter(None, sys.path))
    return subprocess.Popen(
        [sys.executable, "-c", f"from triplane.proto import sandbox\n{script}"],
        stdin=subprocess.PIPE, start_new_session=True, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip


def test_a_child_ends_with_its_parent():
    script = "import threading; threading.Thread(target=sandbox.end_with_parent).start()"
    with running(script) as process:
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(WAIT_S) == -signal.SIGKILL


@pytest.mark.slow
def test_a_child_that_holds_the_interpreter_is_ended_by_the_kernel():
    limits = "memory_bytes=1 << 30, seconds=0.5, file_bytes=1 << 20"
    limit = f"sandbox.limit_process(sandbox.ChildLimits({limits}))"
    with running(f"sandbox.GRACE_S = 0; {limit}; pow(3, 10**9)") as process:
        assert process.wait(WAIT_S) == -signal.SIGALRM


def test_a_child_cannot_write_beyond_its_limit(tmp_path):
    limits = "memory_bytes=1 << 30, seconds=60, file_bytes=1000"
    write = f"open({str(tmp_path / 'big')!r}, 'wb', 0).write(bytes(1001))"
    script = "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_DFL); "
    script += f"sandbox.limit_process(sandbox.ChildLimits({limits}))"
    with running(f"{script}; n = {write}; exit(n != 1000)") as process:
        assert process.wait(WAIT_S) == 0
    assert (tmp_path / "big").stat().st_size == 1000
