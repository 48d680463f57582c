"""A process that appends to a record set and commits, until it is killed.

python record_child.py PATH SEED. Each row holds its own number. After a commit has returned, the
number of committed rows goes to standard output, one line for each commit.
"""

import random
import sys

import numpy as np

from triplane.unified_ir.data.columns import Columns, Ragged
from triplane.unified_ir.data.records import RecordWriter

SHARD_BYTES = 200_000
BLOCK_BYTES = 1 << 10


def rows_from(start: int, n: int) -> Columns:
    """Return the rows start..start+n-1."""
    numbers = np.arange(start, start + n)
    offsets = np.concatenate([[0], np.cumsum(numbers % 4)])
    texts = np.empty(n, object)
    texts[:] = [f"row {k}" for k in numbers]
    return {
        "x": np.repeat(numbers[:, None], 9, axis=1).astype(np.uint32),
        "r": Ragged(np.repeat(numbers, numbers % 4), offsets),
        "t": texts,
    }


def report(n: int) -> None:
    """Tell how many rows are committed."""
    sys.stdout.write(f"{n}\n")
    sys.stdout.flush()


def main() -> None:
    """Append and commit for ever."""
    path, rng = sys.argv[1], random.Random(int(sys.argv[2]))
    writer = RecordWriter.open(path, block_bytes=BLOCK_BYTES, shard_bytes=SHARD_BYTES)
    n = writer.commit()
    report(n)
    while True:
        for _ in range(rng.randint(1, 4)):
            size = rng.randint(1, 60)
            writer.append(rows_from(n, size))
            n += size
        assert writer.commit() == n
        report(n)


if __name__ == "__main__":
    main()
