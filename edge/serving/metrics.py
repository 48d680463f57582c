"""Prometheus metrics: one literal table, read from the statistics at scrape time.

Nothing is counted twice: a scrape and the protocol's own statistics call read the same fields.
Labels are the names of loaded models only; a call for an unknown name is counted under an empty
one, so callers cannot grow the label set.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import start_http_server
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from triplane.edge.serving.lanes import Lane
from triplane.edge.serving.repository import Repository, Version
from triplane.edge.serving.statistics import Histogram, Statistics
from triplane.proto.errors import Unavailable


@dataclass(frozen=True, slots=True)
class HistogramRow:
    """One histogram of a version."""

    name: str
    help: str
    read: Callable[[Statistics], Histogram]


@dataclass(frozen=True, slots=True)
class GaugeRow:
    """One gauge of a version."""

    name: str
    help: str
    read: Callable[[Version], float]


LABELS: Final = ("model", "version")
CALLS: Final = "triplane_inference_calls"
LANE_CALLS: Final = "triplane_lane_calls"
HISTOGRAMS: Final = (
    HistogramRow(
        "triplane_inference_seconds", "Call, arrival to encoded answer.", lambda s: s.call_seconds
    ),
    HistogramRow(
        "triplane_inference_queue_seconds", "Wait for thread and batch.", lambda s: s.queue_seconds
    ),
    HistogramRow(
        "triplane_inference_batch_rows", "Rows in one run of the model.", lambda s: s.batch_rows
    ),
)
GAUGES: Final = (
    GaugeRow("triplane_inference_in_flight", "Calls inside this version.", lambda v: v.calls),
    GaugeRow("triplane_model_load_seconds", "Check, probe and warm-up.", lambda v: v.load_s),
    GaugeRow(
        "triplane_model_merged_rows",
        "Rows that requests are merged up to, 0 for never.",
        lambda v: v.runner.merged_rows,
    ),
)


class ServingCollector(Collector):
    """Reads the table over every ready version, and the calls held by each lane."""

    def __init__(
        self, repository: Repository, unattributed: Statistics, lanes: Iterable[Lane]
    ) -> None:
        self._repository = repository
        self._unattributed = unattributed
        self._lanes = tuple(lanes)

    def collect(self) -> Iterator[Metric]:
        """See `prometheus_client.registry.Collector`."""
        versions = self._repository.versions()
        yield self._calls(versions)
        for row in HISTOGRAMS:
            family = HistogramMetricFamily(row.name, row.help, labels=LABELS)
            for version in versions:
                with version.statistics.lock:
                    buckets, total = _cumulated(row.read(version.statistics))
                family.add_metric([version.name, version.version], buckets, total)
            yield family
        for gauge in GAUGES:
            measured = GaugeMetricFamily(gauge.name, gauge.help, labels=LABELS)
            for version in versions:
                measured.add_metric([version.name, version.version], gauge.read(version))
            yield measured
        held = GaugeMetricFamily(LANE_CALLS, "Calls waiting or running.", labels=["lane"])
        for lane in self._lanes:
            held.add_metric([lane.name], lane.held)
        yield held

    def _calls(self, versions: Iterable[Version]) -> Metric:
        family = CounterMetricFamily(CALLS, "Calls by outcome.", labels=[*LABELS, "code"])
        counted = [("", "", self._unattributed)]
        counted += [(v.name, v.version, v.statistics) for v in versions]
        for name, version, statistics in counted:
            with statistics.lock:
                for code, count in statistics.codes.items():
                    family.add_metric([name, version, code], count)
        return family


def _cumulated(histogram: Histogram) -> tuple[list[tuple[str, float]], float]:
    total, buckets = 0, []
    for bound, count in zip([*histogram.bounds, float("inf")], histogram.counts, strict=True):
        total += count
        buckets.append(("+Inf" if bound == float("inf") else str(bound), float(total)))
    return buckets, histogram.total


class MetricsServer:
    """The scrape page over HTTP, on its own port and threads."""

    def __init__(self, collector: ServingCollector, host: str, port: int) -> None:
        registry = CollectorRegistry()
        registry.register(collector)
        ProcessCollector(registry=registry)
        try:
            self._server, self._thread = start_http_server(port, addr=host, registry=registry)
        except OSError as error:
            raise Unavailable(
                f"the metrics port {host}:{port} is taken or not ours: {error}; choose another"
            ) from error
        self.port = int(self._server.server_port)

    def close(self) -> None:
        """Stop answering and free the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
