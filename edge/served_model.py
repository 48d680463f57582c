"""A model on an inference server as a `FileModel`, so that `edge infer` answers as `predict` does.

Any server of the Open Inference Protocol v2 will do. Its answers are untrusted: names, types, sizes
and bytes are compared with what the server itself declared before any number is read.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import grpc
import numpy as np
from google.protobuf.message import DecodeError, Message

from triplane.edge.serving.datatypes import TABLE, Datatype
from triplane.proto import open_inference_pb2 as pb
from triplane.proto.errors import Corrupt, InvalidInput, TriplaneError, Unavailable
from triplane.proto.status import remote_errors
from triplane.unified_ir.cli.models import FileModel
from triplane.unified_ir.files.samples import MAX_CLASSES
from triplane.unified_ir.runtime import TensorInfo

SERVICE: Final = "inference.GRPCInferenceService"
METADATA_S: Final = 10.0
INFER_S: Final = 120.0
MAX_REPLY_BYTES: Final = 256 << 20
TOO_LARGE: Final = "message larger than max"
"""gRPC's text for a message beyond a limit, here or at the server."""
MAX_AXES: Final = 32
MAX_BATCH: Final = 1 << 16
"""Largest batch of a model that takes batches of one size; samples are repeated to fill it."""
SHOWN: Final = 8
"""Number of sizes in a message."""
MAX_PROBE_NUMBERS: Final = 16 << 20
"""Largest input of zeros that is sent to learn the labels."""
BATCH: Final = "N"
"""Symbol of the first size of a tensor where the request decides it."""
CLASSIFICATION: Final = "classification"
_ENTRY: Final = re.compile(r"[^:]*:(?P<index>[0-9]{1,6}):(?P<label>.*)", re.DOTALL)
"""An entry of a classification: score, number of the class, its label."""
_BY_NAME: Final[Mapping[str, Datatype]] = {row.name: row for row in TABLE.values()}

M = TypeVar("M", bound=Message)


@contextmanager
def served_model(address: str, name: str, version: str = "") -> Iterator[FileModel]:
    """Return the model while the block runs; version: the server's choice by default.

    Unavailable: nobody answers at `address`. NotFound: there is no such model or version.
    """
    options = (("grpc.max_receive_message_length", MAX_REPLY_BYTES),
               ("grpc.max_send_message_length", -1))  # fmt: skip
    with grpc.insecure_channel(address, options=options) as channel:
        try:
            server = _Server(channel, name, version)
        except Unavailable as error:
            raise Unavailable(
                f"no inference server answers at {address}: {error}; start one with `triplane edge "
                "serve`, or give its address with --at"
            ) from error
        yield server.model()


class _Server:
    def __init__(self, channel: grpc.Channel, name: str, version: str) -> None:
        self._channel, self._name, self._version = channel, name, version
        request = pb.ModelMetadataRequest(name=name, version=version)
        metadata = self._call("ModelMetadata", request, pb.ModelMetadataResponse, METADATA_S)
        self._inputs = tuple(map(_info, metadata.inputs))
        self._outputs = tuple(map(_info, metadata.outputs))
        if not self._inputs or not self._outputs:
            raise InvalidInput(f"{name} is served without inputs or without outputs")

    def model(self) -> FileModel:
        """Return the model; it has the labels of its first output if the server knows them."""
        labels, last = self._labels(), self._outputs[0].shape[-1:]
        return FileModel(
            inputs=self._inputs,
            outputs=tuple(info.name for info in self._outputs),
            labels=labels if last and last[0] == len(labels) else (),
            compute=self.infer,
        )

    def infer(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        """Return the outputs for a batch."""
        response = self._infer(feeds, [])
        declared = {info.name: info for info in self._outputs}
        results = {}
        contents = zip(response.outputs, response.raw_output_contents, strict=False)
        for tensor, data in contents:
            info = declared.get(tensor.name)
            shape = tuple(tensor.shape)
            row = None if info is None else _BY_NAME.get(tensor.datatype)
            if row is None or info is None or row.dtype != info.dtype or not _fits(shape, info):
                declared_as = "which it does not declare" if info is None else f"declared as {info}"
                raise Corrupt(
                    f"the server answers {tensor.name!r} as {tensor.datatype}{list(shape)[:SHOWN]},"
                    f" {declared_as}"
                )
            if len(data) != math.prod(shape) * row.dtype.itemsize:
                raise Corrupt(f"the server answers {tensor.name!r} {shape} in {len(data)} bytes")
            results[tensor.name] = np.frombuffer(data, row.dtype.newbyteorder("<")).reshape(shape)
        if missing := declared.keys() - results.keys():
            raise Corrupt(f"the server answers without the output {min(missing)!r}")
        return results

    def _labels(self) -> tuple[str, ...]:
        """Return the names of the first output's classes, as an answer for zeros names them.

        The protocol has labels in no other place. A server that does not take this call, or has no
        labels, gives none.
        """
        sizes = [n for n in self._outputs[0].shape[1:] if isinstance(n, int)]
        shapes = {i.name: [n if isinstance(n, int) else 1 for n in i.shape] for i in self._inputs}
        if sum(map(math.prod, shapes.values())) > MAX_PROBE_NUMBERS:
            return ()
        feeds = {info.name: np.zeros(shapes[info.name], info.dtype) for info in self._inputs}
        wanted = pb.ModelInferRequest.InferRequestedOutputTensor(name=self._outputs[0].name)
        wanted.parameters[CLASSIFICATION].int64_param = min(MAX_CLASSES, math.prod(sizes))
        try:
            response = self._infer(feeds, [wanted])
        except TriplaneError:
            return ()
        names: dict[int, str] = {}
        for entry in _entries(b"".join(response.raw_output_contents[:1])):
            parts = _ENTRY.fullmatch(entry)
            if parts:
                names.setdefault(int(parts["index"]), parts["label"])
        count = len(names)
        return tuple(names[k] for k in range(count)) if names.keys() == {*range(count)} else ()

    def _infer(self, feeds: Mapping[str, Any], wanted: Sequence[Any]) -> pb.ModelInferResponse:
        request = pb.ModelInferRequest(
            model_name=self._name, model_version=self._version, outputs=wanted
        )
        for name, x in feeds.items():
            row = TABLE.get(str(x.dtype))
            if row is None:
                raise InvalidInput(f"{name} is {x.dtype}, which the protocol does not have")
            request.inputs.add(name=name, datatype=row.name, shape=x.shape)
            request.raw_input_contents.append(np.ascontiguousarray(x).astype(row.dtype).tobytes())
        return self._call("ModelInfer", request, pb.ModelInferResponse, INFER_S)

    def _call(self, method: str, request: Message, answer: type[M], timeout_s: float) -> M:
        # The answer is parsed here: gRPC reports bytes that are no message as an internal error.
        stub: Callable[..., bytes] = self._channel.unary_unary(
            f"/{SERVICE}/{method}", request_serializer=lambda message: message.SerializeToString()
        )
        with remote_errors():
            try:
                data = stub(request, timeout=timeout_s)
            except grpc.RpcError as error:
                if TOO_LARGE not in str(error):
                    raise
                raise InvalidInput(
                    f"the messages of {method} are too large (answers take at most "
                    f"{MAX_REPLY_BYTES} bytes); send fewer samples at once: --batch-size"
                ) from error
        try:
            return answer.FromString(data)
        except DecodeError as error:
            raise Corrupt(
                f"the server answers {method} with {len(data)} bytes that are no {answer.__name__}"
            ) from error


def _fits(shape: tuple[int, ...], info: TensorInfo) -> bool:
    """Return whether an answer has the sizes that are declared, and so few that numpy has them."""
    if len(shape) != len(info.shape) or not all(0 <= n <= MAX_REPLY_BYTES for n in shape):
        return False
    # numpy refuses even an array without elements if the product of its other sizes is too large.
    is_small = math.prod(n or 1 for n in shape) <= MAX_REPLY_BYTES
    sizes = zip(shape, info.shape, strict=True)
    return is_small and all(n == size for n, size in sizes if isinstance(size, int))


def _info(tensor: Any) -> TensorInfo:
    row = _BY_NAME.get(tensor.datatype)
    if len(tensor.shape) > MAX_AXES or max(tensor.shape[:1], default=0) > MAX_BATCH:
        raise InvalidInput(
            f"{tensor.name} has {len(tensor.shape)} axes {list(tensor.shape)[:SHOWN]}; arrays of "
            f"at most {MAX_AXES} axes and, if it is fixed, {MAX_BATCH} rows are supported"
        )
    if row is None or any(n < -1 for n in tensor.shape):
        raise InvalidInput(
            f"{tensor.name} is {tensor.datatype}{list(tensor.shape)}; arrays of numbers are served "
            f"as {', '.join(_BY_NAME)}"
        )
    sizes = [BATCH if k == 0 else f"{BATCH}{k}" for k in range(len(tensor.shape))]
    shape = tuple(n if n >= 0 else sizes[k] for k, n in enumerate(tensor.shape))
    return TensorInfo(tensor.name, str(row.dtype), shape)


def _entries(data: bytes) -> Iterator[str]:
    """Yield texts with their lengths before them, as far as they are whole."""
    at = 0
    while at + 4 <= len(data):
        (size,) = struct.unpack_from("<I", data, at)
        yield data[at + 4 : at + 4 + size].decode(errors="replace")
        at += 4 + size
