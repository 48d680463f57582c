"""One format of records as a process: it writes a data set, opens it and reads it on command.

Commands and replies are JSON, one per line, on standard input and output, as in `worker.py`. Runs
in an interpreter that has the format's library; only `ours` imports Triplane.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

SEED: Final = 7
BATCH: Final = 128
SHUFFLED: Final = 10_000
"""Records in the buffer of a format that is only read in order."""

Read = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Case:
    """Records of one column. n: records; n_bytes: of each, uint8."""

    n: int
    n_bytes: int


CASES: Final = {"784 B": Case(200_000, 784), "12 KiB": Case(20_000, 12 * 1024)}


def values(case: Case) -> np.ndarray:
    """(n, n_bytes) uint8, the same in every process."""
    rng = np.random.default_rng(SEED)
    return rng.integers(0, 256, (case.n, case.n_bytes), dtype=np.uint8)


def ours(folder: Path, case: Case, *, verify: bool = True) -> Read:
    """Triplane's record set."""
    from triplane.unified_ir.data.records import RecordTable, write_records

    path = folder / "ours.tpr"
    if not path.exists():
        write_records(path, [{"x": values(case)}])
    table = RecordTable(path, verify=verify)
    return lambda rows: table.take(rows)["x"]  # type: ignore[return-value]


def npy(folder: Path, case: Case) -> Read:
    """A memory-mapped array of numpy, the reference: no checksum, no append, one column."""
    path = folder / "x.npy"
    if not path.exists():
        np.save(path, values(case))
    mapped = np.load(path, mmap_mode="r")
    return lambda rows: mapped[rows]


def arrow(folder: Path, case: Case) -> Read:
    """A memory-mapped Arrow IPC file of one record batch; `take` is far slower with several."""
    import pyarrow as pa

    path = folder / "x.arrow"
    if not path.exists():
        kind = pa.binary(case.n_bytes)
        whole = pa.FixedSizeBinaryArray.from_buffers(
            kind, case.n, [None, pa.py_buffer(values(case).tobytes())]
        )
        table = pa.table({"x": whole})
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
    column = pa.ipc.open_file(pa.memory_map(str(path))).read_all()["x"].chunk(0)

    def read(rows: np.ndarray) -> np.ndarray:
        chosen = column.take(pa.array(rows))
        return np.frombuffer(chosen.buffers()[1], np.uint8).reshape(-1, case.n_bytes)

    return read


def array_record(folder: Path, case: Case) -> Read:
    """ArrayRecord, Grain's format, written for random access: a group of one record."""
    source = array_records(folder, case)

    def read(rows: np.ndarray) -> np.ndarray:
        parts = source.__getitems__(rows.tolist())
        return np.frombuffer(b"".join(parts), np.uint8).reshape(-1, case.n_bytes)

    return read


def array_records(folder: Path, case: Case) -> Any:
    """The data source of an ArrayRecord file."""
    from array_record.python import array_record_data_source, array_record_module

    path = folder / "x.arrayrecord"
    if not path.exists():
        writer = array_record_module.ArrayRecordWriter(str(path), "group_size:1,uncompressed")
        for row in values(case):
            writer.write(row.tobytes())
        writer.close()
    return array_record_data_source.ArrayRecordDataSource([str(path)])


def grain(folder: Path, case: Case) -> Read:
    """A shuffled Grain pipeline over that file, with its default threads; rows are its own."""
    import grain as gr

    stream = gr.MapDataset.source(array_records(folder, case)).shuffle(seed=SEED).repeat()
    batched = iter(stream.to_iter_dataset().batch(BATCH, batch_fn=b"".join))
    return lambda _: np.frombuffer(next(batched), np.uint8).reshape(-1, case.n_bytes)


def mds(folder: Path, case: Case) -> Read:
    """MosaicML Streaming's shards, a folder on this machine."""
    from streaming import MDSWriter, StreamingDataset

    path = folder / "mds"
    if not path.exists():
        with MDSWriter(out=str(path), columns={"x": "bytes"}) as writer:
            for row in values(case):
                writer.write({"x": row.tobytes()})
    dataset = StreamingDataset(local=str(path), shuffle=False, batch_size=BATCH)

    def read(rows: np.ndarray) -> np.ndarray:
        parts = [dataset[k]["x"] for k in rows.tolist()]
        return np.frombuffer(b"".join(parts), np.uint8).reshape(-1, case.n_bytes)

    return read


def tfrecord(folder: Path, case: Case) -> Read:
    """TFRecord through tf.data: in order, then a shuffle buffer, whatever rows are asked for."""
    import tensorflow as tf

    path = folder / "x.tfrecord"
    if not path.exists():
        with tf.io.TFRecordWriter(str(path)) as writer:
            for row in values(case):
                writer.write(row.tobytes())
    stream = tf.data.TFRecordDataset(str(path)).repeat().shuffle(SHUFFLED, seed=SEED).batch(BATCH)
    decoded = stream.map(lambda raw: tf.io.decode_raw(raw, tf.uint8))
    batches = iter(decoded.as_numpy_iterator())
    return lambda _: next(batches)


SIDES: Final = {
    "ours": ours,
    "ours, no checksums": lambda folder, case: ours(folder, case, verify=False),
    "npy": npy,
    "Arrow IPC": arrow,
    "ArrayRecord": array_record,
    "Grain": grain,
    "MDS": mds,
    "TFRecord": tfrecord,
}


def batches(case: Case) -> Iterator[np.ndarray]:
    """Endless batches of row numbers, a permutation of all rows in each epoch."""
    epoch = 0
    while True:
        rows = np.random.default_rng([SEED, epoch]).permutation(case.n)
        yield from (rows[k : k + BATCH] for k in range(0, case.n - BATCH + 1, BATCH))
        epoch += 1


def timed(read: Read, pool: Iterator[np.ndarray], steps: int) -> dict[str, Any]:
    """CPU and wall seconds for each record of so many batches."""
    chosen = [next(pool) for _ in range(steps)]
    wall, cpu = time.perf_counter(), time.process_time()
    for rows in chosen:
        read(rows)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    return {"cpu_s": cpu / (steps * BATCH), "wall_s": wall / (steps * BATCH)}


def main() -> None:
    """Answer `{"do": "start" | "run", ...}` until standard input ends."""
    # Libraries write to standard output while they load.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        order = json.loads(line)
        if order["do"] == "start":
            case = CASES[order["case"]]
            side, pool = SIDES[order["side"]], batches(case)
            read = side(Path(order["folder"]), case)
            rows = np.array([5, 1, case.n - 1])
            is_random = order["side"] not in {"TFRecord", "Grain"}  # these have orders of their own
            right = not is_random or np.array_equal(read(rows), values(case)[rows])
            reply: dict[str, Any] = {"right": bool(right)}
            # Opened again: the rows above touched blocks.
            read = side(Path(order["folder"]), case)
        else:
            reply = timed(read, pool, order["steps"])
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


if __name__ == "__main__":
    main()
