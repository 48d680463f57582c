"""Reading ahead: batches are read and transformed by workers while the caller uses earlier ones.

Workers are threads, or child processes where Python functions keep the interpreter busy. The order
and the random numbers of the batches do not depend on them. At most `workers * prefetch` batches
are held (back pressure); when the caller stops, or Ctrl-C ends it, the workers end too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import islice
from queue import Full, Queue
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, Final

from triplane.unified_ir.data.ahead import Loading
from triplane.unified_ir.data.columns import Columns
from triplane.unified_ir.data.kinds import is_batch_feed, is_batches

if TYPE_CHECKING:
    from triplane.unified_ir.data.dataset import Dataset
    from triplane.unified_ir.data.workers import ChildPool

_POLL_S: Final = 0.1
_JOIN_S: Final = 5.0
_END: Final = object()


class Loader:
    """Batches of a dataset, read ahead; close it to end its workers.

    InvalidInput: with processes, a pipeline that cannot be given to another process.
    """

    def __init__(self, dataset: Dataset, seed: int, loading: Loading) -> None:
        self._opened, self._loading = dataset.opened(seed), loading
        self._children: ChildPool | None = None
        if loading.processes:
            from triplane.unified_ir.data.workers import ChildPool

            self._children = ChildPool(dataset, seed, loading.workers)

    def batches(self, epoch: int, start: int = 0) -> Generator[Columns]:
        """Return the batches of an epoch from number `start` on.

        The iterator must be closed, or read to its end, for its threads to end.
        """
        view = self._opened.view(epoch)
        loading = self._loading
        if is_batches(view) and loading.workers:
            read, numbers = view.batch, range(start, len(view))
            if self._children is not None:
                read = partial(self._children.batch, epoch)
            return _by_number(read, numbers, loading)
        batches = self._opened.batches(epoch, start)
        if is_batch_feed(view) and loading.workers:
            # What can only be read in order is read by one thread.
            return _in_order(batches, loading.workers * loading.prefetch)
        return batches

    def close(self) -> None:
        """End the child processes, if there are any."""
        if self._children is not None:
            self._children.close()


def _by_number(
    read: Callable[[int], Columns], numbers: range, loading: Loading
) -> Generator[Columns]:
    waiting: deque[Future[Columns]] = deque()
    with _pool(loading.workers) as pool:
        left = iter(numbers)
        ahead = islice(left, loading.workers * loading.prefetch)
        waiting.extend(pool.submit(read, k) for k in ahead)
        while waiting:
            batch = waiting.popleft().result()
            waiting.extend(pool.submit(read, k) for k in islice(left, 1))
            yield batch


@contextmanager
def _pool(workers: int) -> Generator[ThreadPoolExecutor]:
    pool = ThreadPoolExecutor(workers, thread_name_prefix="triplane-data")
    try:
        yield pool
    finally:
        # Without waiting for batches that nobody will use: their threads end after them.
        pool.shutdown(wait=True, cancel_futures=True)


def _in_order(batches: Iterator[Columns], ahead: int) -> Generator[Columns]:
    queue: Queue[Any] = Queue(ahead)
    stopped = Event()

    def put(item: Any) -> None:
        # Tried again and again, so that the thread notices when the reader has gone.
        while not stopped.is_set():
            try:
                queue.put(item, timeout=_POLL_S)
            except Full:
                continue
            return

    def run() -> None:
        try:
            for batch in batches:
                put((batch, None))
                if stopped.is_set():
                    return
            put((_END, None))
        except BaseException as error:  # noqa: BLE001 - raised again in the reader's thread
            put((_END, error))

    thread = Thread(target=run, name="triplane-data", daemon=True)
    thread.start()
    try:
        while True:
            batch, error = queue.get()
            if error is not None:
                raise error
            if batch is _END:
                return
            yield batch
    finally:
        stopped.set()
        # A generator of the user's may not come back; the thread does not keep the process.
        thread.join(_JOIN_S)
