"""Samples from arrays, files and batches, and the part that is never learned from."""

import csv
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from triplane.device import samples
from triplane.device.samples import shard_of, split
from triplane.proto.errors import InvalidInput, NotFound
from triplane.unified_ir import data
from triplane.unified_ir.data.transforms import Reshape
from triplane.unified_ir.federated.core.learn import Shard


def arrays(n=50):
    return {"x": np.arange(2 * n, dtype=np.float32).reshape(n, 2), "y": np.arange(n)}


def rows(part):
    return part["y"].tolist()


def test_arrays_a_file_and_batches_give_the_same_shard(tmp_path):
    whole = arrays()
    np.savez(tmp_path / "a.npz", **whole)
    batches = ({name: x[at : at + 7] for name, x in whole.items()} for at in range(0, 50, 7))
    shards = [shard_of(source) for source in (whole, tmp_path / "a.npz", batches)]
    assert len({str((rows(s.train), rows(s.held_out))) for s in shards}) == 1
    assert (shards[0].examples, shards[0].held_out_samples) == (40, 10)
    given_ = Shard(whole, {})
    assert shard_of(given_) is given_


@pytest.mark.slow
@given(n=st.integers(1, 200), more=st.integers(0, 100), held_out=st.sampled_from([0.1, 0.2, 0.5]))
def test_a_sample_keeps_its_part_when_more_arrive(n, more, held_out):
    few, many = split(arrays(n), held_out), split(arrays(n + more), held_out)
    assert set(rows(few.held_out)) == {k for k in rows(many.held_out) if k < n}
    assert sorted(rows(few.train) + rows(few.held_out)) == list(range(n))
    assert abs(few.held_out_samples - n * held_out) <= 1


def test_sorted_and_periodic_labels_are_held_out_evenly():
    """One of each block of five, chosen at random: neither order of labels hides a class."""
    for labels in (np.repeat(np.arange(5), 200), np.tile(np.arange(5), 200)):
        held = split({"y": labels}, 0.2).held_out["y"]
        assert np.bincount(held, minlength=5).min() >= 20


def test_a_file_may_say_itself_what_is_held_out(tmp_path):
    held_out: dict[str, Any] = {"held_out.x": np.ones((1, 2))}
    np.savez(tmp_path / "a.npz", x=np.zeros((3, 2)), **held_out)
    shard = shard_of(tmp_path / "a.npz")
    assert (shard.examples, shard.held_out["x"].tolist()) == (3, [[1, 1]])


def test_a_table_gives_the_arrays_of_the_model(tmp_path):
    with (tmp_path / "steps.csv").open("w", newline="") as file:
        rows_ = [[k, k + 0.5, k % 2, ["sit", "run"][k % 2]] for k in range(50)]
        csv.writer(file).writerows([["ch0", "ch1", "does", "name"], *rows_])
    shard = shard_of(tmp_path / "steps.csv", x=["ch*"], y=["does"])
    plain = shard_of({"x": np.zeros((50, 2)), "y": np.arange(50)})
    assert (shard.train["x"][:, 0] == rows(plain.train)).all()
    assert shard.train["x"].dtype == np.float32
    assert (shard.train["y"] == shard.train["x"][:, 0] % 2).all()
    named = shard_of(tmp_path / "steps.csv", x=["a=ch0:1", "b=ch1:1"], y=["target=does"])
    assert {name: x.shape[1:] for name, x in named.train.items()} == {
        "a": (1,), "b": (1,), "target": (),
    }  # fmt: skip


def test_columns_of_an_npz_may_be_chosen(tmp_path):
    np.savez(tmp_path / "a.npz", images=np.zeros((9, 2, 2), np.uint8), labels=np.arange(9) % 2)
    shard = shard_of(tmp_path / "a.npz", x=["images"], y=["labels"])
    assert shard.train["x"].shape[1:] == (1, 2, 2)
    with pytest.raises(NotFound, match="no column is called 'y'"):
        shard_of(tmp_path / "a.npz", x=["images"], y=["y"])


def test_a_dataset_is_a_source_with_its_steps(monkeypatch):
    whole = arrays()
    dataset = data.arrays(whole["x"], whole["y"]).then(Reshape("x", (1, 2)))
    shard = shard_of(dataset)
    plain = shard_of(whole)
    assert rows(shard.train) == rows(plain.train)
    assert shard.train["x"].shape == (40, 1, 2)
    batches = data.generated(lambda: ({"x": np.float32(k), "y": k} for k in range(50)))
    assert rows(shard_of(batches.roles("x", "y")).train) == rows(plain.train)
    assert rows(shard_of(dataset.batch(7)).train) == rows(plain.train)
    texts = data.arrays(np.array(["a", "b"]), np.arange(2))
    with pytest.raises(InvalidInput, match=r"'x' holds text, .*; pad or encode it first"):
        shard_of(texts)
    monkeypatch.setattr(samples, "MAX_SHARD_BYTES", 700)
    with pytest.raises(InvalidInput, match="at most 700 bytes, got 800"):
        shard_of(dataset)


def test_windows_cross_no_change_of_a_kept_column_which_no_pattern_takes(tmp_path):
    rows_ = [f"{k},day{k // 10},{k / 2}" for k in range(40)]
    (tmp_path / "a.csv").write_text("\n".join(["c0,cday,y", *rows_]))
    shard = shard_of(tmp_path / "a.csv", x=["c*"], form={"window": 4, "keep": ["cday"]}, held_out=0)
    assert shard.train["x"].shape == (28, 4)
    assert (np.ptp(shard.train["x"] // 10, axis=1) == 0).all()


def test_windows_to_score_on_share_no_row_with_those_to_learn_from(tmp_path):
    rows_ = [f"{k},{k / 2}" for k in range(40)]
    (tmp_path / "a.csv").write_text("\n".join(["x,y", *rows_]))
    shard = shard_of(tmp_path / "a.csv", form={"window": 4}, held_out=0.25)
    learned, scored = ({*part["x"].ravel().tolist()} for part in (shard.train, shard.held_out))
    assert (shard.examples, shard.held_out_samples) == (27, 7)
    assert (max(learned), min(scored)) == (29, 30)
    assert shard_of(tmp_path / "a.csv", form={"window": 4}, held_out=0).examples == 37
    with pytest.raises(InvalidInput, match="leaves one part without a window"):
        shard_of(tmp_path / "a.csv", form={"window": 30})


def test_nothing_is_held_out_where_nothing_shall_be():
    assert shard_of(arrays(), held_out=0).held_out_samples == 0


def test_what_is_no_set_of_samples_is_refused_with_the_rule(tmp_path, monkeypatch):
    with pytest.raises(NotFound, match="no samples at"):
        shard_of(tmp_path / "none.npz")
    (tmp_path / "bad.npz").write_bytes(b"PK\3\4 not really")
    np.savez(tmp_path / "objects.npz", x=np.array([{}], object))
    with pytest.raises(InvalidInput, match="is not an npz file of plain arrays"):
        shard_of(tmp_path / "bad.npz")
    (tmp_path / "a.odd").write_bytes(b"?")
    with pytest.raises(InvalidInput, match="not a supported kind of data"):
        shard_of(tmp_path / "a.odd")
    with pytest.raises(InvalidInput, match=r"objects\.npz: x is not a plain array of numbers"):
        shard_of(tmp_path / "objects.npz")
    with pytest.raises(InvalidInput, match="gave no batch"):
        shard_of(iter(()))
    with pytest.raises(InvalidInput, match="the same names"):
        shard_of([{"x": np.zeros(1)}, {"y": np.zeros(1)}])
    with pytest.raises(InvalidInput, match=r"in \[0, 1\), got 1"):
        shard_of(arrays(), held_out=1)
    with pytest.raises(InvalidInput, match="at least one sample"):
        shard_of({})
    monkeypatch.setattr(samples, "MAX_SHARD_BYTES", 100)
    with pytest.raises(InvalidInput, match="at most 100 bytes"):
        shard_of([arrays()])


X = np.zeros((4, 2), np.float32)
Y = np.arange(4)


# fmt: off
REFUSED: Any = (
    ((X, Y),                                                  "arrays by name"),
    ([(X, Y)],                                                "got tuple"),
    (X,                                                       "got ndarray"),
    (5,                                                       "got int"),
    ([None],                                                  "got NoneType"),
    ({0: X},                                                  "named by strings"),
    ({"x": [[1], [1, 2]], "y": [1, 2]},                       "samples of one shape"),
    ({"x": X, "y": np.array(list("abcd"))},                   "numbers, 'y' is <U1"),
    ({"x": X, "y": np.array([None] * 4)},                     "numbers, 'y' is object"),
    ({"x": X, "y": np.array([0, np.nan, 1, 2])},              "'y' of sample 1 has NaN"),
    ({"x": X + np.float32(np.inf), "y": Y},                   "'x' of sample 0 has an infinity"),
    ([{"x": X, "y": Y}, {"x": X[:, :1], "y": Y}],             r"float32\[1\] in batch 2"),
    ([{"x": X, "y": Y}, {"x": X.astype(float), "y": Y}],      r"float64\[2\] in batch 2"),
    ([{"x": x, "y": y} for x, y in zip(X, Y, strict=True)],   "one sample is a batch of 1"),
    ([{"x": X, "y": Y[:3]}, {"x": X[:3], "y": Y}],            "batch 1 has"),
    (Shard({"x": X, "y": Y}, {"x": X}),                       "names of the others"),
    (Shard({"x": X, "y": Y * np.nan}, {}),                    "has NaN"),
)
# fmt: on


@pytest.mark.parametrize(("source", "says"), REFUSED)
def test_samples_that_no_step_could_take_are_refused_with_their_place(source, says):
    with pytest.raises(InvalidInput, match=says):
        shard_of(source)


def test_batches_whose_sums_agree_while_they_do_not_are_refused():
    """Else the labels of one batch would belong to samples of another, and nobody would know."""
    with pytest.raises(InvalidInput, match="batch 2 has"):
        shard_of([{"x": X, "y": Y}, {"x": X, "y": Y[:3]}, {"x": X[:3], "y": Y}])


def test_what_an_archive_unpacks_to_is_limited_before_it_is_unpacked(tmp_path, monkeypatch):
    np.savez_compressed(tmp_path / "a.npz", x=np.zeros((1000, 100)))
    assert (tmp_path / "a.npz").stat().st_size < 10_000
    monkeypatch.setattr(samples, "MAX_SHARD_BYTES", 10_000)
    with pytest.raises(InvalidInput, match="at most 10000 bytes"):
        shard_of(tmp_path / "a.npz")


@pytest.mark.parametrize("at", [0, 60, 200, -30])
def test_a_damaged_archive_is_named(tmp_path, at):
    np.savez_compressed(tmp_path / "a.npz", x=np.arange(1000.0), y=np.arange(1000))
    data = bytearray((tmp_path / "a.npz").read_bytes())
    data[at : at + 20 if at >= 0 else None] = b"\xff" * len(data[at : at + 20 if at >= 0 else None])
    (tmp_path / "a.npz").write_bytes(data)
    with pytest.raises(InvalidInput, match="is not an npz file of plain arrays"):
        shard_of(tmp_path / "a.npz")
    (tmp_path / "a.npz").write_bytes(b"")
    with pytest.raises(InvalidInput, match="is not an npz file of plain arrays"):
        shard_of(tmp_path / "a.npz")


def test_an_iterator_that_never_ends_is_found_out(monkeypatch):
    monkeypatch.setattr(samples, "MAX_BATCHES", 10)
    with pytest.raises(InvalidInput, match="at most 10 batches; let it end"):
        shard_of({"x": X[:0]} for _ in iter(int, 1))


@pytest.mark.parametrize(("share", "held"), [(0.7, 67), (0.9, 90), (0.999, 100), (1e-300, 0)])
def test_shares_above_a_half_and_tiny_ones_are_kept_to(share, held):
    assert abs(split(arrays(101), share).held_out_samples - held) <= 1


def test_a_path_may_begin_at_the_users_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    np.savez(tmp_path / "a.npz", **arrays())
    assert shard_of("~/a.npz").examples == 40
