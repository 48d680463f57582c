"""A cloud as a process, and verbs against it."""

import json
import signal
import subprocess
import sys
from contextlib import contextmanager

from triplane.unified_ir.cli import shell

COMMAND = (sys.executable, "-c", "from triplane.unified_ir.cli import main; main()")
START_S = 30


@contextmanager
def running(home, ports=(0, 0, 0), log=None):
    """`triplane cloud up` as a process; gives its ready line and the process."""
    names = ("--port", "--enrol-port", "--dashboard-port") if ports else ()
    chosen = [text for name, port in zip(names, ports, strict=True) for text in (name, str(port))]
    command = [*COMMAND, "cloud", "up", "--home", str(home), "--host", "127.0.0.1", *chosen]
    process = subprocess.Popen([*command, "--json"], stdout=subprocess.PIPE, text=True, stderr=log)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line, process.wait(START_S)
        yield json.loads(line), process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(START_S)
        process.stdout.close()


def run(*argv, code=0):
    """A verb as a process of its own; its JSON answer."""
    done = subprocess.run(
        [*COMMAND, *map(str, argv), "--json"], capture_output=True, text=True, check=False,
        timeout=120,
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    return json.loads(done.stdout)


def said(capsys, *argv, code=0):
    """A verb in this process; what it said to a person."""
    capsys.readouterr()
    assert shell.run([str(part) for part in argv]) == code
    captured = capsys.readouterr()
    return captured.out if code == 0 else captured.err
