"""Encode arrays in a response: always as raw contents, one per output, in the requested order.

Clients of the protocol decode no other form of numeric outputs. A classified output becomes BYTES
of shape (rows, k), each entry `score:index` or `score:index:label`, best first.
"""

import struct
from collections.abc import Mapping, Sequence

import numpy as np

from triplane.edge.serving.limits import ServingLimits
from triplane.edge.serving.servable import Array, Wanted
from triplane.proto import open_inference_pb2 as pb
from triplane.proto.errors import InvalidInput

Labels = Mapping[str, Sequence[str]]


def encode(
    response: pb.ModelInferResponse,
    results: Mapping[str, Array],
    wanted: Sequence[Wanted],
    labels: Labels,
    limits: ServingLimits,
) -> None:
    """Add the wanted outputs to `response`. InvalidInput if they exceed the limits."""
    size = sum(results[want.spec.name].nbytes for want in wanted)
    if size > limits.response_bytes:
        raise InvalidInput(
            f"the outputs have {size} bytes; {limits.response_bytes} at most: "
            "send fewer rows or ask for fewer outputs"
        )
    for want in wanted:
        array = results[want.spec.name]
        if want.classes:
            _add_classes(response, array, want, labels.get(want.spec.name, ()), limits)
        else:
            _add(response, want.spec.name, want.spec.datatype.name, array.shape)
            # The protocol is little-endian; `astype` copies only where the host is not.
            response.raw_output_contents.append(
                array.astype(want.spec.datatype.dtype, copy=False).tobytes()
            )


def _add(response: pb.ModelInferResponse, name: str, datatype: str, shape: tuple[int, ...]) -> None:
    response.outputs.append(
        pb.ModelInferResponse.InferOutputTensor(name=name, datatype=datatype, shape=shape)
    )


def _add_classes(
    response: pb.ModelInferResponse,
    array: Array,
    want: Wanted,
    labels: Sequence[str],
    limits: ServingLimits,
) -> None:
    count = array.shape[0] if array.ndim > 1 else 1
    rows = array.reshape(count, array.size // max(1, count))
    k = min(want.classes, rows.shape[1])
    if rows.shape[0] * k > limits.classification_entries:
        raise InvalidInput(
            f"classification of {rows.shape[0]} rows by {k} classes; "
            f"{limits.classification_entries} entries at most"
        )
    _add(response, want.spec.name, "BYTES", (*array.shape[:1], k) if array.ndim > 1 else (k,))
    response.raw_output_contents.append(b"".join(top_classes(rows, k, labels)))


def top_classes(rows: Array, k: int, labels: Sequence[str]) -> list[bytes]:
    """Return the k best of each row, with length prefixes; ties in class order, NaN last.

    rows: (R, C) numbers; returns R * k entries, row after row. One row is sorted at a time, because
    sorting takes six times the bytes of its input.
    """
    entries = []
    for row in rows:
        scores = row.astype(np.float64)
        for index in np.argsort(-scores, kind="stable")[:k]:
            label = f":{labels[index]}" if index < len(labels) else ""
            entry = f"{scores[index]:f}:{index}{label}".encode()
            entries.append(struct.pack("<I", len(entry)) + entry)
    return entries
