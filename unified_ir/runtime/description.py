"""The description of a bundle's graph, as values; `files.proto` defines its form in `bundle.pb`.

Decoding refuses more than `MAX_DESCRIPTION_BYTES` bytes, unknown fields, and numbers out of range.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from triplane.proto import files_pb2 as pb
from triplane.proto.errors import Corrupt
from triplane.proto.messages import message_from, value_from
from triplane.unified_ir.files.digests import Buffer
from triplane.unified_ir.files.manifest import parse
from triplane.unified_ir.runtime.signature import TensorInfo

MAX_DESCRIPTION_BYTES: Final = 1 << 20
MAX_ADAPT_STEPS: Final = 100
"""Limit for the steps of a bundle: a node adapts before it serves, and callers have to wait."""

Labels = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Preprocessing:
    """One preprocessing step of a raw sample that becomes `input`; see `Step` in files.proto."""

    input: str
    name: str
    params: tuple[tuple[str, tuple[float, ...]], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraints:
    """Requirements of the graph on its machine; 0 where unstated."""

    runtime: str = "onnxruntime"
    min_version: str = ""
    opset: int = 0
    instructions: tuple[str, ...] = ()
    memory_bytes: int = 0
    latency_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """An output y passes against its golden g when |y - g| <= absolute + relative |g|."""

    absolute: float = 1e-5
    relative: float = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """The description of a bundle: identity, signature, labels by output name, requirements.

    adapt_steps: runs of `adapt.onnx` on a node's own samples before it serves; 0 without that
    graph.
    """

    name: str
    version: str
    target: str
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    labels: Labels = field(default_factory=dict)
    preprocessing: tuple[Preprocessing, ...] = ()
    constraints: Constraints = Constraints()
    tolerance: Tolerance = Tolerance()
    model_digest: str = ""
    adapt_steps: int = 0


def encode(d: Description) -> bytes:
    """Return the bytes of `bundle.pb`."""
    message = message_from(
        pb.Bundle,
        d,
        inputs=[_info_message(info, ()) for info in d.inputs],
        outputs=[_info_message(info, d.labels.get(info.name, ())) for info in d.outputs],
        preprocessing=[_step_message(step) for step in d.preprocessing],
        constraints=message_from(pb.Constraints, d.constraints),
        tolerance=message_from(pb.Tolerance, d.tolerance),
        model_digest=bytes.fromhex(d.model_digest),
    )
    # Deterministic, because the bytes are part of the digest that gets signed.
    return message.SerializeToString(deterministic=True)


def decode(data: Buffer, what: str) -> Description:
    """Return the description in `bundle.pb`; Corrupt starts with `what`."""
    m = parse(pb.Bundle(), bounded(data, what), what)
    c = m.constraints
    check_amounts([m.tolerance.absolute, m.tolerance.relative, c.latency_s], what)
    if m.adapt_steps > MAX_ADAPT_STEPS:
        raise Corrupt(f"{what}: {m.adapt_steps} steps of adaptation, at most {MAX_ADAPT_STEPS}")
    return value_from(
        Description,
        m,
        inputs=tuple(map(_info, m.inputs)),
        outputs=tuple(map(_info, m.outputs)),
        labels={info.name: tuple(info.labels) for info in m.outputs if info.labels},
        preprocessing=tuple(map(_step, m.preprocessing)),
        constraints=value_from(Constraints, c, instructions=tuple(c.instructions)),
        tolerance=value_from(Tolerance, m.tolerance),
        model_digest=m.model_digest.hex(),
    )


def bounded(data: Buffer, what: str) -> bytes:
    """Return `data` as bytes; Corrupt if it is longer than a description may be."""
    if len(data) > MAX_DESCRIPTION_BYTES:
        raise Corrupt(f"{what}: {len(data)} bytes, at most {MAX_DESCRIPTION_BYTES} are read")
    return bytes(data)


def check_amounts(values: Iterable[float], what: str) -> None:
    """Refuse numbers that are negative, infinite or not numbers."""
    for value in values:
        if not (math.isfinite(value) and value >= 0):
            raise Corrupt(f"{what}: {value} must be a finite number >= 0")


def _info_message(info: TensorInfo, labels: tuple[str, ...]) -> pb.TensorInfo:
    dims = [pb.Dim(fixed=dim) if isinstance(dim, int) else pb.Dim(symbol=dim) for dim in info.shape]
    return pb.TensorInfo(name=info.name, dtype=info.dtype, shape=dims, labels=labels)


def _info(message: pb.TensorInfo) -> TensorInfo:
    shape = tuple(
        dim.fixed if dim.WhichOneof("size") == "fixed" else dim.symbol for dim in message.shape
    )
    return TensorInfo(message.name, message.dtype, shape)


def _step_message(step: Preprocessing) -> pb.Step:
    params = [pb.Param(key=key, values=values) for key, values in step.params]
    return pb.Step(input=step.input, name=step.name, params=params)


def _step(message: pb.Step) -> Preprocessing:
    params = tuple((param.key, tuple(param.values)) for param in message.params)
    return Preprocessing(message.input, message.name, params)
