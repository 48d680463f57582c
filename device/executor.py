"""Where a device's tasks run: in this process, or in a child (`child_executor.ChildExecutor`).

One thread at a time uses an executor; any thread may call `interrupt` and `close`.
"""

import threading
from collections.abc import Sequence
from typing import Any, Protocol

import grpc

from triplane.device.home import DeviceHome, DeviceSettings
from triplane.device.stopping import StopToken
from triplane.device.tasks import Blob, Task, WorkSet
from triplane.proto import federation_pb2 as pb
from triplane.proto.channels import connect
from triplane.unified_ir.federated.core.learn import Shard


class TaskExecutor(Protocol):
    """Runs tasks and settles updates; see `task_runner.TaskRunner`."""

    def do(self, task: Task, stop: StopToken, wanted: Sequence[Blob]) -> pb.Contribution:
        """Return the task's contribution. Withdrawn: `stop` ended it. Unavailable: try again."""

    def settle(self, work_set: WorkSet) -> None:
        """Let updates that counted take effect, and forget those whose lease is over."""

    def renewed(self) -> None:
        """Use the new certificate from now on."""

    def interrupt(self) -> None:
        """End all work for good, because the device stops."""

    def close(self) -> None:
        """Release all resources."""


class InProcessExecutor:
    """Runs tasks in the calling thread of this process; graphs end by onnxruntime's own flag."""

    def __init__(self, home: DeviceHome, shard: Shard, settings: DeviceSettings, app: Any) -> None:
        from triplane.device.task_runner import TaskRunner

        self._identity = home.identity
        self._tasks = TaskRunner(home, shard, settings, self._open, app)
        self._channel: grpc.Channel | None = None
        self._lock = threading.Lock()

    def do(self, task: Task, stop: StopToken, wanted: Sequence[Blob]) -> pb.Contribution:
        """See `TaskExecutor`."""
        return self._tasks.do(task, stop, wanted)

    def settle(self, work_set: WorkSet) -> None:
        """See `TaskExecutor`."""
        self._tasks.settle(work_set)

    def renewed(self) -> None:
        """See `TaskExecutor`."""
        self.interrupt()

    def interrupt(self) -> None:
        """Close the channel, so that a call that waits for the cloud ends."""
        with self._lock:
            old, self._channel = self._channel, None
        if old is not None:
            old.close()

    def close(self) -> None:
        """See `TaskExecutor`."""
        self.interrupt()

    def _open(self) -> grpc.Channel:
        with self._lock:
            if self._channel is None:
                self._channel = connect(self._identity)
            return self._channel
