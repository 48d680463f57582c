"""A ready line that is read, and one that nobody can read any more."""

import os
import subprocess
import sys
from pathlib import Path

SAYS = (
    "import logging; logging.basicConfig(); from triplane.proto.logs import say_ready; "
    "say_ready('on port 1'); say_ready('still here'); print('the end')"
)


SAYING = [sys.executable, "-c", SAYS]


def run(stdout, command=SAYING):
    return subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, check=False)


def test_a_ready_line_is_written_at_once():
    done = run(subprocess.PIPE)
    assert done.stdout == "on port 1\nstill here\nthe end\n"
    assert (done.returncode, done.stderr) == (0, "")


def test_a_ready_line_without_a_reader_is_logged_and_the_process_goes_on():
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = run(writer)
    finally:
        os.close(writer)
    assert done.returncode == 0
    assert done.stderr.count("ready line not written") == 1
    assert "Traceback" not in done.stderr


def test_a_ready_line_onto_a_full_disk_is_logged_and_the_process_goes_on():
    with Path("/dev/full").open("wb") as full:
        done = run(full)
    assert done.returncode == 0
    assert "ready line not written" in done.stderr


def test_a_closed_standard_output_is_logged_and_the_process_goes_on():
    # By a shell: with `preexec_fn` this process, in which gRPC may run, would be forked.
    done = run(None, ["sh", "-c", 'exec "$@" >&-', "sh", *SAYING])
    assert done.returncode == 0
    assert "ready line not written" in done.stderr
    assert "Traceback" not in done.stderr
