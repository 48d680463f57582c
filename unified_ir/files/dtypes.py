"""The dtypes that files can hold: our name, the safetensors name, the numpy dtype of the bytes.

Numpy has no bfloat16 or fp8. Such tensors are returned as unsigned integers of the same width,
together with the name of the dtype.
"""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np


@dataclass(frozen=True, slots=True)
class StoredDtype:
    """One row: `storage` is little-endian, as every byte in a file is."""

    name: str
    safetensors: str
    storage: np.dtype[Any]


# fmt: off
ROWS: Final = (
    StoredDtype("bool",          "BOOL",    np.dtype("?")),
    StoredDtype("int8",          "I8",      np.dtype("i1")),
    StoredDtype("int16",         "I16",     np.dtype("<i2")),
    StoredDtype("int32",         "I32",     np.dtype("<i4")),
    StoredDtype("int64",         "I64",     np.dtype("<i8")),
    StoredDtype("uint8",         "U8",      np.dtype("u1")),
    StoredDtype("uint16",        "U16",     np.dtype("<u2")),
    StoredDtype("uint32",        "U32",     np.dtype("<u4")),
    StoredDtype("uint64",        "U64",     np.dtype("<u8")),
    StoredDtype("float16",       "F16",     np.dtype("<f2")),
    StoredDtype("bfloat16",      "BF16",    np.dtype("<u2")),
    StoredDtype("float8_e4m3fn", "F8_E4M3", np.dtype("u1")),
    StoredDtype("float8_e5m2",   "F8_E5M2", np.dtype("u1")),
    StoredDtype("float32",       "F32",     np.dtype("<f4")),
    StoredDtype("float64",       "F64",     np.dtype("<f8")),
)
# fmt: on

BY_NAME: Final = {row.name: row for row in ROWS}
BY_SAFETENSORS: Final = {row.safetensors: row for row in ROWS}

assert len(BY_NAME) == len(BY_SAFETENSORS) == len(ROWS)
