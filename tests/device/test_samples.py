"""Samples from arrays, files and batches, and the part that is never learned from."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from triplane.device import samples
from triplane.device.samples import shard_of, split
from triplane.proto.errors import InvalidInput, NotFound
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


def test_nothing_is_held_out_where_nothing_shall_be():
    assert shard_of(arrays(), held_out=0).held_out_samples == 0


def test_what_is_no_set_of_samples_is_refused_with_the_rule(tmp_path, monkeypatch):
    with pytest.raises(NotFound, match="no samples at"):
        shard_of(tmp_path / "none.npz")
    (tmp_path / "bad.npz").write_bytes(b"PK\3\4 not really")
    np.savez(tmp_path / "objects.npz", x=np.array([{}], object))
    np.save(tmp_path / "one.npy", np.zeros(3))
    for name in ("bad.npz", "objects.npz", "one.npy"):
        with pytest.raises(InvalidInput, match="is no npz file of plain arrays"):
            shard_of(tmp_path / name)
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
