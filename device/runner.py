"""What does a device's tasks: `InProcessRunner`, or `child_runner.ChildRunner` in a child process.

Both are used from one thread at a time, but for `interrupt` and `close`, which any thread may call.
"""

import threading
from collections.abc import Sequence
from typing import Any, Protocol

import grpc

from triplane.device.home import DeviceHome, Settings
from triplane.device.stopping import Stop
from triplane.device.tasks import Blob, Orders, Task
from triplane.proto import federation_pb2 as pb
from triplane.proto.channels import connect
from triplane.unified_ir.federated.core.learn import Shard


class TaskRunner(Protocol):
    """Does tasks and settles updates; see `desk.Desk`."""

    def do(self, task: Task, stop: Stop, wanted: Sequence[Blob]) -> pb.Contribution:
        """The task's contribution. Withdrawn where `stop` ended it; Unavailable: try again."""

    def settle(self, orders: Orders) -> None:
        """Let updates take effect that counted, and forget those whose lease is over."""

    def renewed(self) -> None:
        """The certificate was replaced: use the new one from now on."""

    def interrupt(self) -> None:
        """End what is being done, for good: the device stops."""

    def close(self) -> None:
        """Give back what the runner holds."""


class InProcessRunner:
    """Runs tasks in the calling thread of this process; graphs end by onnxruntime's own flag."""

    def __init__(self, home: DeviceHome, shard: Shard, settings: Settings, app: Any) -> None:
        from triplane.device.desk import Desk

        self._identity = home.identity
        self._desk = Desk(home, shard, settings, self._open, app)
        self._channel: grpc.Channel | None = None
        self._lock = threading.Lock()

    def do(self, task: Task, stop: Stop, wanted: Sequence[Blob]) -> pb.Contribution:
        """See `TaskRunner`."""
        return self._desk.do(task, stop, wanted)

    def settle(self, orders: Orders) -> None:
        """See `TaskRunner`."""
        self._desk.settle(orders)

    def renewed(self) -> None:
        """See `TaskRunner`."""
        self.interrupt()

    def interrupt(self) -> None:
        """Close the channel, so that a call that waits for the cloud ends."""
        with self._lock:
            old, self._channel = self._channel, None
        if old is not None:
            old.close()

    def close(self) -> None:
        """See `TaskRunner`."""
        self.interrupt()

    def _open(self) -> grpc.Channel:
        with self._lock:
            if self._channel is None:
                self._channel = connect(self._identity)
            return self._channel
