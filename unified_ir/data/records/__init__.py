"""Record sets (`NAME.tpr`): samples on disk, read in any order at the speed of a mapped array.

`write_records` or `RecordWriter` writes one; `Records` reads it, `RecordSource` in a pipeline. The
format is in `format.py` and decision 0058; to read it takes numpy and the files.
"""

from triplane.unified_ir.data.records.reader import (
    Records,
    RecordShard,
    RecordSource,
    is_records,
)
from triplane.unified_ir.data.records.writer import RecordWriter, write_records

__all__ = [
    "RecordShard",
    "RecordSource",
    "RecordWriter",
    "Records",
    "is_records",
    "write_records",
]
