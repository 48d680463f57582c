"""Processes that need not import anything: forked by one that has, before it did anything else.

A cloud or a device is ready in a tenth of the processor time that its command takes, so a test can
kill it ten times as often. From then on it is a process like any other: a session of its own, its
module run as `__main__`, nothing shared but code. `Forked` has the methods of `fleet.Process`.
"""

import contextlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from pathlib import Path

MODULES = (
    "triplane.cloud.server",
    "triplane.device.client",
    "triplane.edge.agent.agent",
    "triplane.edge.serving.process",
    "triplane.edge.supervisor.supervisor",
)
REAP_S = 60
MAX_ORDER_BYTES = 64 << 10
LOOP = f"from {__name__} import serve; serve()"


class Nursery:
    """Forks what is asked of it, by any thread; ends with the block."""

    def __init__(self):
        self._lock = threading.Lock()

    def __enter__(self):
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        paths = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
        with theirs:
            self._child = subprocess.Popen(
                [sys.executable, "-c", LOOP, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": paths},
            )
        return self

    def __exit__(self, *_):
        self._ours.close()
        self._child.wait(REAP_S)

    def fork(self, module, arguments, out, err):
        """Run a module in a new process that writes to these descriptors; its id."""
        order = json.dumps([module, arguments]).encode()
        with self._lock:
            socket.send_fds(self._ours, [order], [out, err])
            return int(self._ours.recv(MAX_ORDER_BYTES))


class Forked:
    """A child of a nursery that can be killed and started again; it says on a line it is ready."""

    def __init__(self, nursery, module, arguments, log):
        self._nursery, self._module, self.log = nursery, module, log
        self._arguments = [*map(str, arguments)]
        self.said = {}
        self.start()

    def start(self):
        ready, out = os.pipe()
        with self.log.open("ab") as err:
            self.pid = self._nursery.fork(self._module, self._arguments, out, err.fileno())
        os.close(out)
        self._handle, self._lines = os.pidfd_open(self.pid), os.fdopen(ready, encoding="utf-8")
        line = self._lines.readline()
        assert line, self.log.read_text()[-2000:]
        self.said = json.loads(line)

    @property
    def is_alive(self):
        return not select.select([self._handle], [], [], 0)[0]

    def kill(self):
        self._end(signal.SIGKILL)

    def stop(self):
        self._end(signal.SIGTERM)

    def _end(self, number):
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, number)
        ended, _, _ = select.select([self._handle], [], [], REAP_S)
        os.close(self._handle)
        self._lines.close()
        assert ended, f"{self._module} lives on after signal {number}"


def serve():
    """Fork a process for each order until the other side closes."""
    for module in MODULES:
        __import__(module)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system reaps
    with socket.socket(fileno=int(sys.argv[1])) as orders:
        while True:
            order, handles, _, _ = socket.recv_fds(orders, MAX_ORDER_BYTES, 2)
            if not order:
                return
            pid = os.fork()
            if not pid:
                _become(orders, *json.loads(order), *handles)
            for handle in handles:
                os.close(handle)
            orders.send(str(pid).encode())


def _become(orders, module, arguments, out, err):
    """Be `python -m module arguments`; never returns."""
    code = 1
    try:
        orders.close()
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.dup2(out, 1)
        os.dup2(err, 2)
        sys.argv = [module, *arguments]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    finally:
        if sys.exc_info()[0]:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
