"""Prometheus metrics: one literal table, read from the statistics at scrape time.

A scrape and the protocol's own statistics call read the same counters. Labels are the names of
loaded models only; a call for an unknown name is counted under an empty name, so callers cannot
add labels. The label `lane` is the kind of calls that share a pool of threads (an executor).
"""

import contextlib
import logging
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from socketserver import ThreadingMixIn
from typing import Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import make_wsgi_app
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from triplane.edge.serving.executors import BoundedExecutor
from triplane.edge.serving.repository import LoadedVersion, Repository
from triplane.edge.serving.statistics import Histogram, Statistics
from triplane.proto.errors import Unavailable

logger = logging.getLogger(__name__)

PAGE_CALLERS: Final = 8
PAGE_IDLE_S: Final = 5.0  # between two reads from one caller
PAGE_S: Final = 10.0  # from a caller's arrival to the end of the page


@dataclass(frozen=True, slots=True)
class MetricRow:
    """One metric of a version. read: returns it."""

    name: str
    help: str
    read: Callable[[LoadedVersion], Any]


LABELS: Final = ("model", "version")
CALLS: Final = "triplane_inference_calls"
LANE_CALLS: Final = "triplane_lane_calls"
# fmt: off
HISTOGRAMS: Final = (
    MetricRow("triplane_inference_seconds", "From the arrival of the whole request to the answer.",
              lambda v: v.statistics.call_seconds),
    MetricRow("triplane_inference_queue_seconds", "Wait for a turn and for a run.",
              lambda v: v.statistics.queue_seconds),
    MetricRow("triplane_inference_batch_rows", "Rows in one run of the model.",
              lambda v: v.statistics.batch_rows),
)
GAUGES: Final = (
    MetricRow("triplane_inference_in_flight", "Calls in this version now.", lambda v: v.calls),
    MetricRow("triplane_model_load_seconds", "Duration of loading: check, probe, warm-up.",
              lambda v: v.load_s),
    MetricRow("triplane_model_merged_rows", "Rows up to which requests are merged, 0 for never.",
              lambda v: v.runner.merged_rows),
)
# fmt: on


class ServingCollector(Collector):
    """Collects the table over every ready version, and the calls in each lane."""

    def __init__(
        self, repository: Repository, unattributed: Statistics, executors: Iterable[BoundedExecutor]
    ) -> None:
        self._repository = repository
        self._unattributed = unattributed
        self._executors = tuple(executors)

    def collect(self) -> Iterator[Metric]:
        """See `prometheus_client.registry.Collector`."""
        versions = self._repository.versions()
        yield self._calls(versions)
        for row in HISTOGRAMS:
            family = HistogramMetricFamily(row.name, row.help, labels=LABELS)
            for version in versions:
                with version.statistics.lock:
                    buckets, total = _cumulated(row.read(version))
                family.add_metric([version.name, version.version], buckets, total)
            yield family
        for gauge in GAUGES:
            measured = GaugeMetricFamily(gauge.name, gauge.help, labels=LABELS)
            for version in versions:
                measured.add_metric([version.name, version.version], gauge.read(version))
            yield measured
        held = GaugeMetricFamily(LANE_CALLS, "Calls waiting or running.", labels=["lane"])
        for executor in self._executors:
            held.add_metric([executor.name], executor.held)
        yield held

    def _calls(self, versions: Iterable[LoadedVersion]) -> Metric:
        family = CounterMetricFamily(CALLS, "Calls by outcome.", labels=[*LABELS, "code"])
        counted = [("", "", self._unattributed)]
        counted += [(v.name, v.version, v.statistics) for v in versions]
        for name, version, statistics in counted:
            with statistics.lock:
                for code, count in statistics.codes.items():
                    family.add_metric([name, version, code], count)
        return family


def _cumulated(histogram: Histogram) -> tuple[list[tuple[str, float]], float]:
    bounds = (*map(str, histogram.bounds), "+Inf")
    counts = map(float, accumulate(histogram.counts))
    return list(zip(bounds, counts, strict=True)), histogram.total


class _Caller(WSGIRequestHandler):
    timeout = PAGE_IDLE_S

    def log_message(self, *_: object) -> None:
        """Log nothing."""


class _Page(ThreadingMixIn, WSGIServer):
    """One thread per caller, with a limit of callers, beyond which it hangs up, and of time."""

    daemon_threads = True
    request_queue_size = 64  # with the default, 5, a burst of callers waits for retransmissions

    def __init__(self, address: tuple[str, int]) -> None:
        self._room = threading.BoundedSemaphore(PAGE_CALLERS)
        self._since: dict[socket.socket, float] = {}
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, _Caller)

    def process_request(self, request: Any, client_address: Any) -> None:
        """See `socketserver`."""
        if self._room.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """See `socketserver`."""
        self._since[request] = time.monotonic()
        try:
            super().process_request_thread(request, client_address)
        finally:
            del self._since[request]
            self._room.release()

    def service_actions(self) -> None:
        """Close expired connections, twice a second, also of callers that send a byte at times."""
        for request, since_s in [*self._since.items()]:
            if time.monotonic() - since_s > PAGE_S:
                with contextlib.suppress(OSError):  # the caller has closed it already
                    request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, *_: object) -> None:
        """Log the error. The default prints a traceback for every caller that hangs up."""
        logger.info("metrics caller failed", extra={"reason": str(sys.exc_info()[1])})


class MetricsServer:
    """The scrape page over HTTP, on its own port and threads."""

    def __init__(self, collector: ServingCollector, host: str, port: int) -> None:
        registry = CollectorRegistry()
        registry.register(collector)
        ProcessCollector(registry=registry)
        try:
            self._server = _Page((host, port))
        except OSError as error:
            raise Unavailable(
                f"cannot listen on {host}:{port} for metrics: {error.strerror or error}; "
                "choose another address or port, 0 for any free one"
            ) from error
        self._server.set_app(make_wsgi_app(registry))
        self.port = int(self._server.server_port)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop answering and free the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
