"""The protocol's calls on a repository: decode, run, encode."""

import time
from collections.abc import Iterable, Mapping
from importlib import metadata
from typing import Final

from triplane.edge.serving.limits import ServingLimits
from triplane.edge.serving.repository import LoadedVersion, Repository
from triplane.edge.serving.request import Contents, check_address, decode
from triplane.edge.serving.response import encode
from triplane.edge.serving.running import CallContext
from triplane.edge.serving.servable import TensorContract
from triplane.edge.serving.statistics import CallDurations, DurationTotal, Statistics
from triplane.proto import open_inference_pb2 as pb
from triplane.proto.errors import NotFound
from triplane.proto.messages import M, message_from
from triplane.proto.status import code_of

PLATFORM: Final = "onnxruntime_onnx"
BACKEND: Final = "onnxruntime"
EXTENSIONS: Final = ("classification", "model_configuration", "parameters", "statistics")


class Service:
    """One method per call of the protocol, from message to message."""

    def __init__(self, repository: Repository, limits: ServingLimits) -> None:
        self._repository = repository
        self._limits = limits
        self.unattributed = Statistics()  # calls that reached no version
        self.ready = False

    def ServerLive(self, request: pb.ServerLiveRequest) -> pb.ServerLiveResponse:
        """Return True: a server that is not live does not answer."""
        return pb.ServerLiveResponse(live=True)

    def ServerReady(self, request: pb.ServerReadyRequest) -> pb.ServerReadyResponse:
        """Return whether calls are accepted, which is not so while models load or it drains."""
        return pb.ServerReadyResponse(ready=self.ready)

    def ModelReady(self, request: pb.ModelReadyRequest) -> pb.ModelReadyResponse:
        """Return whether the version accepts calls; an unknown one is not ready."""
        try:
            self._repository.find(request.name, request.version)
        except NotFound:
            return pb.ModelReadyResponse(ready=False)
        return pb.ModelReadyResponse(ready=self.ready)

    def ServerMetadata(self, request: pb.ServerMetadataRequest) -> pb.ServerMetadataResponse:
        """Return name, version of the package, and the supported extensions of the protocol."""
        return pb.ServerMetadataResponse(
            name="triplane", version=metadata.version("triplane"), extensions=EXTENSIONS
        )

    def ModelMetadata(self, request: pb.ModelMetadataRequest) -> pb.ModelMetadataResponse:
        """Return the tensors of one version, and all versions that are ready. NotFound."""
        version = self._repository.find(request.name, request.version)
        asked = [version] if request.version else self._repository.versions(request.name)
        return pb.ModelMetadataResponse(
            name=version.name,
            versions=[one.version for one in asked],
            platform=PLATFORM,
            inputs=map(_metadata, version.contract.inputs.values()),
            outputs=map(_metadata, version.contract.outputs.values()),
        )

    def ModelConfig(self, request: pb.ModelConfigRequest) -> pb.ModelConfigResponse:
        """Return the version's batching and tensors as a model configuration."""
        version = self._repository.find(request.name, request.version)
        merged = version.runner.merged_rows
        skip = 1 if merged else 0  # the protocol leaves the row dimension out of a batched model

        def tensors(kind: type[M], specs: Mapping[str, TensorContract]) -> list[M]:
            return [
                kind(name=s.name, data_type=s.datatype.config, dims=s.wire_shape[skip:])
                for s in specs.values()
            ]

        config = pb.ModelConfig(
            name=version.name,
            platform=PLATFORM,
            backend=BACKEND,
            max_batch_size=merged,
            input=tensors(pb.ModelInput, version.contract.inputs),
            output=tensors(pb.ModelOutput, version.contract.outputs),
        )
        if merged:
            config.dynamic_batching.preferred_batch_size.append(merged)
        return pb.ModelConfigResponse(config=config)

    def RepositoryIndex(self, request: pb.RepositoryIndexRequest) -> pb.RepositoryIndexResponse:
        """Return every version and its state. NotFound if the request names a repository."""
        if request.repository_name:
            raise NotFound("this server has one repository, without a name; leave it empty")
        entries = self._repository.index(ready_only=request.ready)
        kind = pb.RepositoryIndexResponse.ModelIndex
        return pb.RepositoryIndexResponse(models=[message_from(kind, entry) for entry in entries])

    def ModelStatistics(self, request: pb.ModelStatisticsRequest) -> pb.ModelStatisticsResponse:
        """Return the counters of the ready versions asked for. NotFound if there are none."""
        versions: Iterable[LoadedVersion] = self._repository.versions(request.name)
        if request.name and request.version:
            versions = [self._repository.find(request.name, request.version)]
        elif request.name and not versions:
            self._repository.find(request.name)
        return pb.ModelStatisticsResponse(model_stats=[*map(_statistics, versions)])

    def ModelInfer(
        self, request: pb.ModelInferRequest, call: CallContext, raw: Contents | None = None
    ) -> pb.ModelInferResponse:
        """Run one request. Raises the families; each outcome is counted once.

        raw: its raw contents, if they are not in `request`.
        """
        statistics = self.unattributed
        try:
            check_address(request, self._limits)
            with self._repository.using(request.model_name, request.model_version) as version:
                statistics = version.statistics
                return self._infer(version, request, call, raw)
        except Exception as error:
            statistics.failed(code_of(error).name, time.perf_counter_ns() - call.arrived_ns)
            raise

    def _infer(
        self,
        version: LoadedVersion,
        request: pb.ModelInferRequest,
        call: CallContext,
        raw: Contents | None,
    ) -> pb.ModelInferResponse:
        started = time.perf_counter_ns()
        inference = decode(request, version.contract, self._limits, raw)
        decoded = time.perf_counter_ns()
        ran = version.runner.run(inference.feeds, inference.rows, call)
        returned = time.perf_counter_ns()
        response = pb.ModelInferResponse(
            model_name=version.name, model_version=version.version, id=request.id
        )
        encode(response, ran.results, inference.wanted, version.labels, self._limits)
        timing = CallDurations(
            queue=started - call.arrived_ns + ran.queue_ns,
            decode=decoded - started,
            infer=ran.infer_ns,
            encode=time.perf_counter_ns() - returned,
        )
        version.statistics.answered(inference.rows, timing, now_ms=time.time_ns() // 1_000_000)
        return response


def _metadata(spec: TensorContract) -> pb.ModelMetadataResponse.TensorMetadata:
    return pb.ModelMetadataResponse.TensorMetadata(
        name=spec.name, datatype=spec.datatype.name, shape=spec.wire_shape
    )


def _statistics(version: LoadedVersion) -> pb.ModelStatistics:
    counted = version.statistics
    with counted.lock:
        return pb.ModelStatistics(
            name=version.name,
            version=version.version,
            last_inference=counted.last_inference_ms,
            inference_count=counted.rows,
            execution_count=sum(batch.count for batch in counted.batches.values()),
            inference_stats=pb.InferStatistics(
                success=_duration(counted.success),
                fail=_duration(counted.fail),
                queue=_duration(counted.queue),
                compute_input=_duration(counted.decode),
                compute_infer=_duration(counted.infer),
                compute_output=_duration(counted.encode),
            ),
            batch_stats=[
                pb.InferBatchStatistics(batch_size=rows, compute_infer=_duration(duration))
                for rows, duration in sorted(counted.batches.items())
            ],
        )


def _duration(duration: DurationTotal) -> pb.StatisticDuration:
    return pb.StatisticDuration(count=duration.count, ns=duration.ns)
