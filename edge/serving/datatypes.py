"""Tensor datatypes of the protocol: name, numpy type and field of typed contents, one row each.

A model with any other type (strings, bfloat16, ...) is refused when it is loaded.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from triplane.proto import open_inference_pb2 as pb
from triplane.proto.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class Datatype:
    """One datatype. contents: the field of typed values, None if there are only raw contents."""

    name: str
    dtype: np.dtype[np.generic]  # little-endian: the byte order of raw contents
    contents: str | None
    config: pb.DataType.ValueType


def _row(
    name: str, dtype: str, contents: str | None, config: pb.DataType.ValueType
) -> tuple[str, Datatype]:
    little_endian = np.dtype(dtype).newbyteorder("<")
    return dtype, Datatype(name, little_endian, contents, config)


# fmt: off
TABLE: Final = dict((
    _row("BOOL",   "bool",    "bool_contents",   pb.TYPE_BOOL),
    _row("UINT8",  "uint8",   "uint_contents",   pb.TYPE_UINT8),
    _row("UINT16", "uint16",  "uint_contents",   pb.TYPE_UINT16),
    _row("UINT32", "uint32",  "uint_contents",   pb.TYPE_UINT32),
    _row("UINT64", "uint64",  "uint64_contents", pb.TYPE_UINT64),
    _row("INT8",   "int8",    "int_contents",    pb.TYPE_INT8),
    _row("INT16",  "int16",   "int_contents",    pb.TYPE_INT16),
    _row("INT32",  "int32",   "int_contents",    pb.TYPE_INT32),
    _row("INT64",  "int64",   "int64_contents",  pb.TYPE_INT64),
    _row("FP16",   "float16", None,              pb.TYPE_FP16),
    _row("FP32",   "float32", "fp32_contents",   pb.TYPE_FP32),
    _row("FP64",   "float64", "fp64_contents",   pb.TYPE_FP64),
))
# fmt: on


def datatype_of(dtype: str) -> Datatype:
    """Return the row of a numpy dtype name. InvalidInput if the protocol has none."""
    if (row := TABLE.get(dtype)) is None:
        raise InvalidInput(
            f"dtype {dtype!r} cannot be served; one of {', '.join(TABLE)}; cast it in the model"
        )
    return row
