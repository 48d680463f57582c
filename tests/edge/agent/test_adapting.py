"""A start point on a node: adapted in a child, compared on samples it never saw."""

import csv
import json
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from triplane.edge.agent import adapting
from triplane.edge.agent.adapting import (
    LEAST_SAMPLES,
    Compared,
    accuracy,
    keep_samples,
    read_samples,
    split,
)
from triplane.edge.agent.trial import golden_accuracy
from triplane.edge.agent.trying import run_adaptation, run_trial
from triplane.edge.cli import edge
from triplane.proto.errors import Corrupt, InvalidInput
from triplane.proto.signed.refusal import AttemptRefused
from triplane.unified_ir import convert, data, nn, ops, optim, train
from triplane.unified_ir.files.pixels import as_input
from triplane.unified_ir.runtime import Bundle


class Digits(nn.Cell):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, padding="same")
        self.head = nn.Dense(8 * 4 * 4, 10)

    def construct(self, x):
        return self.head(ops.flatten(ops.max_pool(ops.relu(self.conv(x)), 2)))


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """A bundle that was trained on digits and adapts in fifty steps."""
    nn.seed(0)
    trainer = train.Trainer(Digits(), loss=nn.SoftmaxCrossEntropy(), optimizer=optim.Adam(0.01))
    trainer.fit(data.digits().take(600), epochs=3, progress="none")
    module = trainer.export(entries=("predict", "evaluate", "adapt"), local_lr=0.3)
    module = replace(module, meta={**module.meta, "adapt_steps": "50"})
    path = tmp_path_factory.mktemp("start") / "start.bundle"
    convert.convert(module, name="digits", out=path)
    return path


@pytest.fixture(scope="module")
def renamed(tmp_path_factory):
    """This node's own question: the number after the one that is shown."""
    path = tmp_path_factory.mktemp("samples") / "digits.npz"
    digits = data.digits().select(np.arange(900, 1000))
    np.savez(path, x=digits.x, y=(digits.y + 1) % 10)
    return path


def adapted(start, samples, out, current=None):
    return run_adaptation(
        start, size=start.stat().st_size, samples=samples, seed="n\0digits", out=out,
        current=current,
    )  # fmt: skip


@pytest.mark.slow
def test_adapted_version_is_scored_on_samples_it_never_saw_beside_the_one_that_serves(
    start, renamed, tmp_path
):
    out = tmp_path / "mine.bundle"
    found = adapted(start, renamed, out, current=start)
    assert found.support + found.held_out == 100
    assert found.current == found.start < found.adapted - 0.2
    assert found.is_better
    Bundle.load(out, expected_digest=found.digest).check_goldens()
    again = adapted(start, renamed, tmp_path / "again.bundle", current=out)
    assert again.current == found.adapted == again.adapted


@pytest.mark.slow
def test_pixels_as_bytes_mean_what_they_meant_in_training(start, renamed, tmp_path):
    with np.load(renamed) as file:
        pixels, y = np.round(file["x"] * 255).astype(np.uint8), file["y"]
    np.savez(tmp_path / "bytes.npz", x=pixels, y=y)
    np.savez(tmp_path / "floats.npz", x=as_input(pixels, "float32"), y=y)
    made = [
        adapted(start, tmp_path / f"{name}.npz", tmp_path / name) for name in ("bytes", "floats")
    ]
    assert made[0] == made[1]
    assert made[0].adapted > made[0].start


@pytest.mark.slow
def test_start_point_that_is_worse_than_what_serves_is_told_apart(start, renamed, tmp_path):
    found = adapted(start, renamed, tmp_path / "mine.bundle")
    assert found.current is None
    better = replace(found, current=found.adapted + 0.01)
    assert found.adapted > found.start
    assert not better.is_better
    assert f"the serving version has {better.current:.3f}" in str(better)


@pytest.mark.slow
def test_samples_that_do_not_fit_are_refused_with_nothing_written(start, tmp_path):
    np.savez(tmp_path / "wrong.npz", x=np.zeros((8, 3), np.float32), y=np.zeros(8, np.int64))
    with pytest.raises(AttemptRefused) as refusal:
        adapted(start, tmp_path / "wrong.npz", tmp_path / "mine.bundle")
    assert refusal.value.kind == "adaptation"
    assert not (tmp_path / "mine.bundle").exists()


@pytest.mark.parametrize(
    ("arrays", "reason"),
    [
        ({"x": np.zeros((8, 2), np.float32)}, "x (N, ...) and whole numbers y"),
        ({"x": np.zeros((8, 2)), "y": np.zeros(8)}, "got float64(8, 2) and float64(8,)"),
        ({"x": np.zeros((3, 2)), "y": np.zeros(3, np.int64)}, f"from {LEAST_SAMPLES} to"),
        ({"x": np.zeros((8, 2)), "y": np.zeros(7, np.int64)}, "int64(7,)"),
    ],
)
def test_samples_say_what_they_should_be(tmp_path, arrays, reason):
    np.savez(tmp_path / "s.npz", **arrays)
    with pytest.raises(InvalidInput) as error:
        read_samples(tmp_path / "s.npz")
    assert reason in str(error.value)


def test_samples_that_are_no_archive_or_hide_objects_are_refused(tmp_path):
    (tmp_path / "s.npz").write_bytes(b"PK\x03\x04 but no zip")
    with pytest.raises(InvalidInput, match=r"s\.npz is an \.npz"):
        read_samples(tmp_path / "s.npz")
    np.savez(tmp_path / "o.npz", x=np.array([{}] * 8, object), y=np.zeros(8, np.int64))
    with pytest.raises(InvalidInput, match=r"o\.npz is an \.npz"):
        read_samples(tmp_path / "o.npz")


def write_table(path, count=8, names=("seven", "zero")):
    """A table of blank images and classes by name."""
    with path.open("w", newline="") as file:
        rows = [[*map(float, np.zeros(64)), names[k % len(names)]] for k in range(count)]
        csv.writer(file).writerows([[*(f"p{k:02}" for k in range(64)), "shows"], *rows])
    return path


def test_a_table_becomes_samples_whose_classes_are_those_of_the_serving_model(start, tmp_path):
    choice: Any = {"x": ["p*:1x8x8"], "y": ["shows"]}
    table = write_table(tmp_path / "t.csv", names=("7", "0"))
    count, kept = keep_samples(tmp_path / "samples", "digits", table, bundle=start, **choice)
    samples = read_samples(kept)
    assert count == 8
    assert samples["y"].tolist() == [7, 0] * 4
    assert (samples["x"].dtype, samples["x"].shape) == (np.float32, (8, 1, 8, 8))
    named = write_table(tmp_path / "n.csv", names=("seven", "0"))
    with pytest.raises(InvalidInput, match="has the class 'seven', but the model's classes are 0"):
        keep_samples(tmp_path / "samples", "digits", named, bundle=start, **choice)
    with pytest.raises(InvalidInput, match="but no version serves here"):
        keep_samples(tmp_path / "samples", "digits", named, **choice)
    assert read_samples(kept)["y"].tolist() == [7, 0] * 4
    people = zip(table.read_text().splitlines(), ["person", *["ann"] * 8], strict=True)
    table.write_text("\n".join(map(",".join, people)))
    kept_column: Any = {"keep": ("person",)}
    count, _ = keep_samples(tmp_path / "samples", "digits", table, **choice, **kept_column)
    assert count == 8


def test_images_of_a_folder_get_the_size_of_the_serving_model(start, tmp_path):
    for k in range(8):
        path = tmp_path / "images" / "70"[k % 2] / f"{k}.pgm"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"P5 %d 9 255\n" % (9 + k) + bytes([20 * k]) * 9 * (9 + k))
    options: Any = {"bundle": start}
    count, kept = keep_samples(tmp_path / "samples", "digits", tmp_path / "images", **options)
    samples = read_samples(kept)
    assert (count, samples["x"].shape) == (8, (8, 1, 8, 8))
    assert samples["y"].tolist() == [0] * 4 + [7] * 4
    options["size"] = (4, 4)
    with pytest.raises(InvalidInput, match="4, 4"):
        keep_samples(tmp_path / "samples", "digits", tmp_path / "images", **options)


def test_windows_that_share_rows_cannot_be_halved(tmp_path):
    np.savez(tmp_path / "rows.npz", x=np.arange(40.0), y=np.arange(40) // 20)
    windows: dict[str, Any] = {"step": "window", "size": 4, "within": ["y"]}
    pipeline = {"format": 1, "source": {"kind": "npz", "path": "rows.npz"}, "steps": [windows]}
    pipeline |= {"inputs": ["x"], "targets": ["y"]}
    (tmp_path / "a.json").write_text(json.dumps(pipeline))
    with pytest.raises(InvalidInput, match=r"share rows with the 3 before them, so both halves"):
        keep_samples(tmp_path / "samples", "steps", tmp_path / "a.json")
    windows["stride"] = 4
    (tmp_path / "a.json").write_text(json.dumps(pipeline))
    assert keep_samples(tmp_path / "samples", "steps", tmp_path / "a.json")[0] == 10


def test_tables_beyond_the_limits_are_refused_before_they_are_kept(tmp_path, monkeypatch):
    (tmp_path / "t.csv").write_text("x,y\n" + "1.5,1\n2.5,0\n" * 2)
    assert keep_samples(tmp_path / "samples", "m", tmp_path / "t.csv")[0] == 4
    with pytest.raises(InvalidInput, match="one input and one column of classes"):
        keep_samples(tmp_path / "samples", "m", tmp_path / "t.csv", x=["x", "y"])
    monkeypatch.setattr(adapting, "MAX_SAMPLES_BYTES", 31)
    with pytest.raises(InvalidInput, match="at most 31 bytes, got 32"):
        keep_samples(tmp_path / "samples", "m", tmp_path / "t.csv")
    (tmp_path / "t.csv").write_text("x,y\n1,1\n")
    with pytest.raises(InvalidInput, match=r"t\.csv has 1 samples; from 4 to"):
        keep_samples(tmp_path / "samples", "m", tmp_path / "t.csv")


def write_episodes(path, count=3, **changed):
    """Episodes of this node's question: the number after the one that is shown."""
    digits = data.digits().select(np.arange(900, 900 + 60 * count))
    x = digits.x.reshape(count, 60, *digits.x.shape[1:])
    y = ((digits.y + 1) % 10).reshape(count, 60)
    arrays = {
        "support.x": x[:, :40], "support.y": y[:, :40], "query.x": x[:, 40:], "query.y": y[:, 40:],
    }  # fmt: skip
    np.savez(path, **{**arrays, **changed})
    return path


@pytest.mark.slow
def test_a_start_point_is_judged_by_what_it_becomes(start, tmp_path):
    bundle = Bundle.load(start)
    session = bundle.session()
    found = golden_accuracy(bundle, session, write_episodes(tmp_path / "e.npz"))
    digits = data.digits().select(np.arange(900, 1080))
    unadapted = accuracy(bundle, {"x": digits.x, "y": (digits.y + 1) % 10})
    assert found > 0.5 > unadapted
    bad = write_episodes(tmp_path / "bad.npz", **{"support.y": np.zeros((3, 39), np.int64)})
    with pytest.raises(Corrupt, match=r"support\.y"):
        golden_accuracy(bundle, session, bad)
    np.savez(tmp_path / "plain.npz", x=digits.x, y=digits.y)
    with pytest.raises(Corrupt, match="which a start point is judged by"):
        golden_accuracy(bundle, session, tmp_path / "plain.npz")


def test_given_samples_are_kept_where_the_agent_looks(tmp_path):
    np.savez(tmp_path / "mine.npz", x=np.zeros((8, 2), np.float32), y=np.arange(8) % 2)
    found = CliRunner().invoke(
        edge, ["samples", "m", str(tmp_path / "mine.npz"), "--home", str(tmp_path / "n"), "--json"]
    )
    assert json.loads(found.stdout)["samples"] == 8
    kept = tmp_path / "n" / "samples" / "m.npz"
    assert kept.read_bytes() == (tmp_path / "mine.npz").read_bytes()


@pytest.mark.parametrize("model", ["../m", "M", "", "a/b"])
def test_a_model_name_that_leaves_the_folder_is_refused(tmp_path, model):
    np.savez(tmp_path / "mine.npz", x=np.zeros((8, 2), np.float32), y=np.arange(8) % 2)
    with pytest.raises(InvalidInput, match="not the name of a model"):
        keep_samples(tmp_path / "samples", model, tmp_path / "mine.npz")


def test_bad_samples_leave_the_good_ones(tmp_path):
    np.savez(tmp_path / "mine.npz", x=np.zeros((8, 2), np.float32), y=np.arange(8) % 2)
    _, kept = keep_samples(tmp_path / "samples", "m", tmp_path / "mine.npz")
    before = kept.read_bytes()
    (tmp_path / "bad.npz").write_bytes(b"nothing")
    with pytest.raises(InvalidInput):
        keep_samples(tmp_path / "samples", "m", tmp_path / "bad.npz")
    assert kept.read_bytes() == before


def rows(part):
    return {row.tobytes() for row in part["x"]}


def pictures(n, seed=0):
    x = np.random.default_rng(seed).random((n, 4), np.float32)
    return {"x": x, "y": np.arange(n) % 5}


def test_split_is_disjoint_and_the_same_for_every_version():
    support, held_out = split(pictures(200), "node\0model")
    assert rows(support) | rows(held_out) == rows(pictures(200))
    assert not rows(support) & rows(held_out)
    assert 70 < len(support["y"]) < 130
    again, _ = split(pictures(200), "node\0model")
    assert np.array_equal(again["x"], support["x"])
    other, _ = split(pictures(200), "other\0model")
    assert rows(other) != rows(support)


def test_a_sample_stays_in_its_half_when_others_come_in_any_order():
    few, many = pictures(40), pictures(60, seed=1)
    support, held_out = split(few, "node\0model")
    order = np.random.default_rng(2).permutation(100)
    both = {name: np.concatenate([many[name], few[name]])[order] for name in few}
    later = [rows(part) for part in split(both, "node\0model")]
    assert rows(support) <= later[0]
    assert rows(held_out) <= later[1]


def test_equal_samples_are_in_one_half_whatever_their_labels():
    once = pictures(20)
    twice = {"x": np.concatenate([once["x"]] * 2), "y": np.arange(40) % 7}
    support, held_out = split(twice, "node\0model")
    assert not rows(support) & rows(held_out)
    same = {"x": np.zeros((8, 4), np.float32), "y": np.arange(8)}
    with pytest.raises(InvalidInput, match="all 8 samples fall into one half"):
        split(same, "node\0model")


@pytest.mark.slow
def test_a_start_that_adaptation_makes_worse_serves_as_it_is(start, tmp_path):
    """Its half to adapt to has wrong labels, the other half right ones."""
    digits = data.digits().select(np.arange(900, 1000))
    support, _ = split({"x": digits.x, "y": digits.y}, "n\0digits")
    misled = [row.tobytes() in rows(support) for row in digits.x]
    np.savez(tmp_path / "s.npz", x=digits.x, y=np.where(misled, 0, digits.y))
    found = adapted(start, tmp_path / "s.npz", tmp_path / "mine.bundle")
    assert found.start > found.adapted
    assert str(found).endswith("nothing serves yet; this node keeps the start point as it is")
    kept = Bundle.load(tmp_path / "mine.bundle", expected_digest=found.digest)
    kept.check_goldens()
    first = Bundle.load(start)
    assert {n: bytes(t.data) for n, t in kept.weights.items()} == {
        n: bytes(t.data) for n, t in first.weights.items()
    }
    assert found.is_better
    assert replace(found, current=found.start).is_better
    worse = replace(found, current=found.start + 0.01)
    assert not worse.is_better
    assert str(worse).endswith("this node keeps the version that serves")


def test_comparison_reads_as_a_sentence():
    found = Compared(support=5, held_out=5, start=0.4, adapted=0.8, current=None, digest="")
    assert str(found) == (
        "adapted to 5 samples of this node, it has accuracy 0.800 (0.400 before) on 5 others; "
        "nothing serves yet; this node keeps the adapted version"
    )


@pytest.mark.slow
def test_samples_of_another_shape_than_what_serves_takes_are_refused(start, tmp_path):
    y = np.arange(8) % 2
    np.savez(tmp_path / "flat.npz", x=np.zeros((8, 64), np.float32), y=y)
    with pytest.raises(InvalidInput, match=r"takes samples of shape \(1, 8, 8\).*\(64,\)"):
        keep_samples(tmp_path / "samples", "digits", tmp_path / "flat.npz", bundle=start)
    assert not (tmp_path / "samples").exists()
    np.savez(tmp_path / "right.npz", x=np.zeros((8, 1, 8, 8), np.float32), y=y)
    count, _ = keep_samples(tmp_path / "samples", "digits", tmp_path / "right.npz", bundle=start)
    assert count == 8


def test_samples_that_are_not_finite_are_refused_with_their_place(tmp_path):
    x = np.zeros((8, 1, 2, 2), np.float32)
    x[5, 0, 1, 0] = np.nan
    np.savez(tmp_path / "odd.npz", x=x, y=np.arange(8) % 2)
    with pytest.raises(InvalidInput, match=r"first in sample 5: x\[5, 0, 1, 0\] is nan"):
        keep_samples(tmp_path / "samples", "digits", tmp_path / "odd.npz")
    assert not (tmp_path / "samples").exists()


@pytest.mark.parametrize("label", [-1, 99_999])
def test_labels_that_no_model_has_are_refused_before_anything_serves(tmp_path, label):
    y = np.arange(8) % 2
    y[6] = label
    np.savez(tmp_path / "odd.npz", x=np.zeros((8, 4), np.float32), y=y)
    with pytest.raises(InvalidInput, match=rf"first one out of range is {label}, sample 6 of odd"):
        keep_samples(tmp_path / "samples", "digits", tmp_path / "odd.npz")


@pytest.mark.slow
def test_labels_beyond_the_classes_of_what_serves_are_refused_with_their_place(start, tmp_path):
    y = np.arange(8) % 2
    y[6] = 10
    np.savez(tmp_path / "odd.npz", x=np.zeros((8, 1, 8, 8), np.float32), y=y)
    said = "digits gives 10 logits, so labels are 0..9, got 0..10; the first one out of range is 10"
    with pytest.raises(InvalidInput, match=rf"{re.escape(said)}, sample 6 of odd\.npz"):
        keep_samples(tmp_path / "samples", "digits", tmp_path / "odd.npz", bundle=start)
    assert not (tmp_path / "samples").exists()


@pytest.mark.slow
def test_a_start_point_is_not_adapted_to_labels_that_it_has_no_class_for(start, tmp_path):
    digits = data.digits().select(np.arange(900, 1000))
    np.savez(tmp_path / "s.npz", x=digits.x, y=np.where(digits.y == 3, 77, digits.y))
    with pytest.raises(AttemptRefused, match=r"first one out of range is 77, sample \d+ of s\.npz"):
        adapted(start, tmp_path / "s.npz", tmp_path / "mine.bundle")
    assert not (tmp_path / "mine.bundle").exists()


@pytest.mark.slow
def test_a_large_parent_does_not_hide_what_a_trial_takes(start):
    """The most that a process held used to begin with what its parent held when it was started."""
    ballast = np.ones(256 << 20, np.uint8)
    answer = run_trial(start, size=start.stat().st_size)
    assert ballast.all()
    assert answer["grown_bytes"] > 1 << 20
