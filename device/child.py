"""`python -m triplane.device.child JSON`: run the tasks of one device for its main process.

Requests arrive on standard input and replies go to standard output; see `child_executor`. This
process reads the samples. It limits its memory beyond what it takes at its start, and the processor
time of each task. When standard input ends, it ends at once, together with the processes that an
app has started here.
"""

import json
import logging
import math
import os
import queue
import re
import resource
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from triplane.device.__main__ import give_back_code, hold_little_memory, load_app
from triplane.device.child_executor import (
    encoded,
    encoded_error,
    read_frame,
    work_of,
    write_frame,
)
from triplane.device.home import DeviceHome, DeviceSettings
from triplane.device.samples import shard_of
from triplane.device.signed_plans import verified_apart
from triplane.device.stopping import StopToken, Withdrawn
from triplane.device.task_runner import InProcessExecutor
from triplane.device.tasks import Blob, work_set_of
from triplane.proto.errors import TriplaneError
from triplane.proto.logs import configure_logging
from triplane.proto.sandbox import set_limit

MAX_REQUEST_BYTES: Final = 64 << 20
"""Limit for the tasks and settlements of one document; a state in a task has at most 64 KiB."""


class Requests:
    """Reads the parent's requests in a thread, so that a stop is noticed during a task."""

    def __init__(self) -> None:
        self.queue: queue.SimpleQueue[tuple[dict[str, Any], StopToken]] = queue.SimpleQueue()
        self._stop = StopToken(math.inf)

    def read(self) -> None:
        """Read requests until the parent has ended, then end this process."""
        while (data := read_frame(sys.stdin.buffer, MAX_REQUEST_BYTES)) is not None:
            request = json.loads(data)
            if request["kind"] == "stop":
                # A stop refers to the newest request, because the parent sends them one at a time.
                (self._stop.expire if request["expired"] else self._stop.now)()
            else:
                self._stop = StopToken(request.get("until_s", math.inf))
                self.queue.put((request, self._stop))
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)  # a worker of an app would keep the lock for tasks
        os._exit(0)


def main(argv: list[str]) -> None:
    """Serve requests until standard input ends. It returns only if the start fails."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # a service manager signals both; the parent decides
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # so that output of an app cannot look like a reply
    arguments = json.loads(argv[0])
    hold_little_memory()
    configure_logging(arguments["log_level"])
    requests = Requests()
    # Started before the samples are loaded, so that the child ends with its parent during that,
    # too.
    threading.Thread(target=requests.read, daemon=True).start()
    settings = DeviceSettings(**arguments["settings"])
    try:
        home = DeviceHome(arguments["home"])
        # Waits until the child of a killed device is gone: two writers would damage the home.
        lock = home.lock_for_tasks()
        home.recover()
        shard = shard_of(
            arguments["data"], held_out=settings.held_out, x=settings.x, y=settings.y,
            form=settings.form,
        )  # fmt: skip
        app = load_app(arguments["app"]) if arguments["app"] else None
        verify = verified_apart(home, settings)
        runner = InProcessExecutor(home, shard, settings, app, verify)
        give_back_code()
        # Last, so that the limit does not count samples and libraries.
        _limit_memory(settings.max_memory_bytes)
    except (TriplaneError, OSError) as error:
        write_frame(replies, encoded_error(error))
        return
    write_frame(replies, encoded(b""))
    with lock:
        while True:
            request, stop = requests.queue.get()
            write_frame(replies, _answer(runner, settings, request, stop))


def _answer(
    runner: InProcessExecutor, settings: DeviceSettings, request: dict[str, Any], stop: StopToken
) -> bytes:
    try:
        work_set = work_set_of(
            work_of(request), request["device"], max_blob_bytes=settings.max_blob_bytes, now_s=0.0
        )
        if request["kind"] == "settle":
            runner.settle(work_set)
            return encoded(b"")
        if request["kind"] == "write":
            runner.write_model()
            return encoded(b"")
        _limit_processor(settings.max_cpu_s)
        (task,) = work_set.tasks
        wanted = [Blob(bytes.fromhex(sha256), size) for sha256, size in request["wanted"]]
        # Parent and child share the machine's monotonic clock, so the deadline is passed as a time.
        task = replace(task, until_s=stop.until_s)
        return encoded(runner.do(task, stop, wanted).SerializeToString())
    except (TriplaneError, Withdrawn) as error:
        return encoded_error(error)


def _limit_memory(max_bytes: int) -> None:
    """Limit the memory that this process takes from now on; 0 for no limit."""
    status = Path("/proc/self/status")
    match = re.search(r"VmData:\s+(\d+) kB", status.read_text()) if status.exists() else None
    if max_bytes and match:
        set_limit(resource.RLIMIT_DATA, int(match[1]) * 1024 + max_bytes)
    set_limit(resource.RLIMIT_CORE, 0)


def _limit_processor(max_s: float) -> None:
    """Limit the further processor time of this process; 0 for no limit."""
    if max_s:
        soft = int(time.process_time() + max_s) + 1
        # The hard limit stays open, because the next task raises the soft one again.
        set_limit(resource.RLIMIT_CPU, soft, resource.RLIM_INFINITY)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except Exception:
        logging.getLogger(__name__).exception("the process for tasks failed")
    os._exit(1)  # a normal exit would abort, because the reading thread holds standard input
