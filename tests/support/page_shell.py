"""The terminal of a documentation page: one bash runs all of its shell blocks, in order.

Servers that a block starts in the background go on running in later blocks, as in a terminal.
Copied beside the program that `pages.program_of` writes, which imports it.
"""

import atexit
import contextlib
import fcntl
import socket
import struct
import subprocess
import tempfile
import time
from pathlib import Path

STEP_S = 0.02
SIOCSIFFLAGS = 0x8914
UP = 0x1


def bring_loopback_up():
    """A new network namespace has 127.0.0.1, but switched off."""
    with socket.socket() as handle, contextlib.suppress(OSError):
        fcntl.ioctl(handle, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", UP))


bring_loopback_up()
folder = Path(tempfile.mkdtemp())
bash = subprocess.Popen(["bash", "-e"], stdin=subprocess.PIPE, text=True)


@atexit.register
def end():
    """End the shell; what it started ends with the namespace or the process group."""
    bash.kill()
    bash.communicate()


def sh(text):
    """Run one block; a command that fails ends the page."""
    assert bash.stdin is not None
    block, done = folder / "block", folder / "done"
    block.write_text(text)
    bash.stdin.write(f"source {block} </dev/null\ntouch {done}\n")
    bash.stdin.flush()
    while not done.exists():
        if bash.poll() is not None:
            raise SystemExit(f"a command failed with {bash.returncode} in this block:\n{text}")
        time.sleep(STEP_S)
    done.unlink()
