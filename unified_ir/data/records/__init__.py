"""Record sets (`NAME.tpr`): samples on disk, read in any order at the speed of a mapped array.

`write_records` or `RecordWriter` writes one; `RecordTable` reads it, in a pipeline through
`RecordSource`. The format is in `format.py` and decision 0058. Reading takes numpy alone.
"""

from triplane.unified_ir.data.records.reader import (
    RecordShard,
    RecordSource,
    RecordTable,
    is_records,
)
from triplane.unified_ir.data.records.writer import RecordWriter, write_records

__all__ = [
    "RecordShard",
    "RecordSource",
    "RecordTable",
    "RecordWriter",
    "is_records",
    "write_records",
]
