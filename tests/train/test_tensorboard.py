"""Event files, read back by a reader written from the format's definition alone."""

import struct
import zlib
from typing import Any

import numpy as np
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import TensorSpec, nn, ops, optim, trace, train
from triplane.unified_ir.files import png
from triplane.unified_ir.train import events

from .models import QUIET, data, trainer

DOUBLE, FLOAT, INT64, INT32, STRING, MESSAGE, BYTES = 1, 2, 3, 5, 9, 11, 12
FIELDS: dict[str, Any] = {
    "Event": [
        ("wall_time", 1, DOUBLE), ("step", 2, INT64), ("file_version", 3, STRING),
        ("summary", 5, "Summary"),
    ],
    "Summary": [("value", 1, ["Value"])],
    "Value": [
        ("tag", 1, STRING), ("simple_value", 2, FLOAT), ("image", 4, "Image"),
        ("histo", 5, "Histo"),
    ],
    "Image": [
        ("height", 1, INT32), ("width", 2, INT32), ("colorspace", 3, INT32),
        ("encoded_image_string", 4, BYTES),
    ],
    "Histo": [
        ("min", 1, DOUBLE), ("max", 2, DOUBLE), ("num", 3, DOUBLE), ("sum", 4, DOUBLE),
        ("sum_squares", 5, DOUBLE), ("bucket_limit", 6, [DOUBLE]), ("bucket", 7, [DOUBLE]),
    ],
}  # fmt: skip


def event_class():
    """Event as protobuf itself reads it."""
    file = descriptor_pb2.FileDescriptorProto(name="e.proto", package="t", syntax="proto3")
    for name, fields in FIELDS.items():
        message = file.message_type.add(name=name)
        for label, number, kind in fields:
            many = isinstance(kind, list)
            one = kind[0] if many else kind
            field = message.field.add(name=label, number=number, label=3 if many else 1)
            field.type = MESSAGE if isinstance(one, str) else one  # type: ignore[assignment]
            if isinstance(one, str):
                field.type_name = f".t.{one}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("t.Event"))


EVENT = event_class()


def crc(data):
    """CRC-32C bit by bit: the polynomial 0x1EDC6F41 with its bits reversed."""
    value = 0xFFFFFFFF
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = (value >> 1) ^ (0x82F63B78 & -(value & 1))
    return value ^ 0xFFFFFFFF


def read(path):
    """Every event of a file, its checksums verified."""
    raw, at, found = path.read_bytes(), 0, []
    while at < len(raw):
        (length,) = struct.unpack_from("<Q", raw, at)
        parts = raw[at : at + 8], raw[at + 12 : at + 12 + length]
        sums = struct.unpack_from("<I", raw, at + 8) + struct.unpack_from(
            "<I", raw, at + 12 + length
        )
        for part, masked in zip(parts, sums, strict=True):
            turned = (masked - 0xA282EAD8) & 0xFFFFFFFF
            assert (turned >> 17 | turned << 15) & 0xFFFFFFFF == crc(part)
        found.append(EVENT.FromString(parts[1]))
        at += length + 16
    return found


class Watched(nn.Cell):
    def __init__(self):
        super().__init__()
        self.blocks = [Block(4, 4), Block(4, 3)]

    def construct(self, x):
        ops.image_summary("first", x.reshape(-1, 1, 2, 2))
        for block in self.blocks:
            x = block(x)
        return x


class Block(nn.Dense):
    def construct(self, x):
        y = super().construct(x)
        ops.histogram_summary("out", y)
        ops.scalar_summary("mean", y.mean())
        return y


def run(folder, **options):
    clock = iter(range(1_700_000_000, 1_700_001_000))
    record = train.Record()
    board = train.TensorBoard(folder, every_steps=2, clock=lambda: float(next(clock)))
    made = trainer(cell=Watched, callbacks=[board, record], **options)
    made.fit(data(), 2, batch_size=10, validation=data(20), **QUIET)
    (path,) = folder.iterdir()
    return made, record.steps, path


def test_a_run_is_written_as_events_of_the_public_format(tmp_path):
    schedule = optim.Cosine(0.1, 20)
    made, steps, path = run(tmp_path, optimizer=optim.SGD(schedule))
    assert path.name.startswith("events.out.tfevents.1700000000.")
    first, *rest = read(path)
    assert (first.file_version, first.wall_time) == ("brain.Event:2", 1_700_000_000.0)
    assert [e.step for e in rest] == [2, 4, 5, 6, 8, 10, 10]
    assert [e.wall_time for e in rest] == [1_700_000_001.0 + i for i in range(7)]
    values = {v.tag: v for v in rest[0].summary.value}
    for name, number in steps[1].items():
        assert values[f"train/{name}"].simple_value == np.float32(number)
    assert "train/summary/blocks.1/mean" in values
    assert values["learning_rate"].simple_value == np.float32(schedule.at(2))
    epoch = {v.tag: v.simple_value for v in rest[2].summary.value}
    row = made.history.rows[0]
    assert epoch["epoch/loss"] == np.float32(row["loss"])
    assert epoch["validation/loss"] == np.float32(row["validation.loss"])


def test_histograms_and_images_of_nested_cells_are_whole(tmp_path):
    _, _, path = run(tmp_path)
    values = {v.tag: v for v in read(path)[1].summary.value}
    x = values["image/first"].image
    assert (x.height, x.width, x.colorspace) == (2, 2, 1)
    shown = png.decode(x.encoded_image_string, "shown")
    assert shown.shape == (1, 2, 2)
    for name in ("histogram/blocks.0/out", "histogram/blocks.1/out"):
        h = values[name].histo
        assert h.num == sum(h.bucket) == 10 * (4 if "blocks.0" in name else 3)
        assert len(h.bucket) == len(h.bucket_limit) == 32
        assert h.min < h.max == h.bucket_limit[-1]
        assert list(h.bucket_limit) == sorted(h.bucket_limit)


@pytest.mark.parametrize("name", ["onnx", "reference"])
def test_a_histogram_counts_as_numpy_does(name):
    x = np.random.default_rng(0).standard_normal((7, 30)).astype(np.float32)

    class Spread(nn.Cell):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(np.ones(()))

        def construct(self, x):
            ops.histogram_summary("x", x)
            ops.histogram_summary("same", x * 0.0 + 2.0)
            return (x * self.w).sum([1])

    made = train.Trainer(Spread(), loss=lambda y, _: y.mean(), optimizer=optim.SGD(0.1))
    made.engine = name
    made.prepare(x, np.zeros(7, np.float32))
    program = made.training_program()
    loop = program.loop({k: made.state()[k] for k in made.state_names(program.function)})
    results = loop.step(x=x, y=np.zeros(7, np.float32))
    low, high, total, squares, *counts = results["histogram/x"]
    expected = np.histogram(x.astype(np.float64), 32)[0]
    assert np.abs(np.array(counts) - expected).sum() <= 2  # at the edges float32 may go either way
    assert sum(counts) == x.size
    np.testing.assert_allclose(
        [low, high, total, squares], [x.min(), x.max(), x.sum(), (x * x).sum()], rtol=1e-5
    )
    assert results["histogram/same"].tolist()[:5] == [2, 2, 2 * x.size, 4 * x.size, x.size]


def test_pictures_are_png_in_grey_and_colour():
    for channels in (1, 3):
        pixels = np.random.default_rng(1).integers(0, 256, (channels, 5, 3)).astype(np.uint8)
        assert np.array_equal(png.decode(events.png(pixels), "made"), pixels)


def test_each_run_writes_a_file_of_its_own(tmp_path):
    board = train.TensorBoard(tmp_path, clock=lambda: 1_700_000_000.0)
    made = trainer(cell=lambda: nn.Dense(4, 3), callbacks=[board])
    made.fit(data(), 1, **QUIET)
    made.fit(data(), 1, **QUIET)
    assert len(list(tmp_path.iterdir())) == 2
    assert [len(read(p)) for p in tmp_path.iterdir()] == [2, 2]


def test_checksums_are_castagnolis():
    assert events.crc32c(b"123456789") == crc(b"123456789") == 0xE3069283
    assert events.crc32c(b"") == 0
    assert zlib.crc32(b"123456789") != 0xE3069283


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda x: ops.histogram_summary("h", x.cast("int64")), "takes floating point, got int64"),
        (lambda x: ops.image_summary("i", x[:, 0, 0]), r"with 1 or 3 channels, got float32\[N\]"),
        (lambda x: ops.image_summary("i", x[None]), r"1 or 3 channels, got float32\[1,N,4,4\]"),
        (lambda x: ops.scalar_summary("s", x), "takes a scalar"),
        (lambda _: train.TensorBoard("x", every_steps=0), "every_steps >= 1"),
    ],
)
def test_senseless_summaries_are_refused(call, said):
    def record(x):
        call(x)
        return x

    with pytest.raises(InvalidInput, match=said):
        trace(record, TensorSpec(("N", 4, 4), "float32"))
