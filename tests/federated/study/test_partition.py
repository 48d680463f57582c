"""A dataset as shards: every sample once, disjoint parts, decided by the seed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.federated.study import (
    by_dirichlet,
    by_group,
    by_label_shards,
    evenly,
)

N = 300


def samples(n=N, classes=10):
    """Each sample is its own number, so that it is known again."""
    return {"x": np.arange(n, dtype=np.float32), "y": np.arange(n) * 7 % classes}


GROUPS = np.arange(N) % 7 * 100

WAYS = {
    "evenly": lambda seed: evenly(samples(), 7, seed=seed),
    "group": lambda seed: by_group(samples(), GROUPS, seed=seed),
    "dirichlet": lambda seed: by_dirichlet(samples(), 7, alpha=0.2, seed=seed),
    "labels": lambda seed: by_label_shards(samples(), 7, shards=2, seed=seed),
}


def xs(shard, part):
    return getattr(shard, part)["x"].astype(int).tolist()


@pytest.mark.parametrize("way", sorted(WAYS))
def test_every_sample_is_one_devices_in_one_part(way):
    made = WAYS[way](0)
    found = [
        x for shard in made.values() for part in ("train", "held_out") for x in xs(shard, part)
    ]
    assert sorted(found) == list(range(N))
    assert list(made) == sorted(made)
    for shard in made.values():
        assert np.array_equal(shard.train["y"], shard.train["x"].astype(int) * 7 % 10)


@pytest.mark.parametrize("way", sorted(WAYS))
def test_the_seed_decides(way):
    def parts(seed):
        return {k: (xs(s, "train"), xs(s, "held_out")) for k, s in WAYS[way](seed).items()}

    assert parts(3) == parts(3)
    assert parts(3) != parts(4)


def test_groups_are_devices_under_their_number():
    made = by_group(samples(), GROUPS, held_out=0.25)
    assert list(made) == [f"device-{k:03}" for k in range(0, 700, 100)]
    for name, shard in made.items():
        numbers = np.array(xs(shard, "train") + xs(shard, "held_out"))
        assert set(numbers % 7 * 100) == {int(name.removeprefix("device-"))}
        assert shard.examples
        assert shard.held_out_samples
    assert abs(sum(s.held_out_samples for s in made.values()) / N - 0.25) < 0.05


def part_of(made, part):
    return {x for shard in made.values() for x in xs(shard, part)}


def test_a_sample_keeps_its_part_when_its_group_grows():
    few = by_group(samples(200), GROUPS[:200])
    many = by_group(samples(), GROUPS)
    for part in ("train", "held_out"):
        assert part_of(few, part) == {x for x in part_of(many, part) if x < 200}


def test_a_sample_keeps_its_device_and_part_when_classes_grow():
    few, many = (by_dirichlet(samples(n), 5, alpha=1.0, seed=2) for n in (1000, 1500))
    for name, shard in few.items():
        for part in ("train", "held_out"):
            assert xs(shard, part) == [x for x in xs(many[name], part) if x < 1000]


@pytest.mark.parametrize("way", ["evenly", "group", "dirichlet", "labels"])
def test_equal_samples_are_never_on_both_sides_not_even_of_two_devices(way):
    once = samples()
    twice = {"x": np.tile(once["x"] % 100, 2), "y": np.arange(2 * N) % 10}
    made = {
        "evenly": lambda: evenly(twice, 7),
        "group": lambda: by_group(twice, np.arange(2 * N) % 7),
        "dirichlet": lambda: by_dirichlet(twice, 7, alpha=0.5),
        "labels": lambda: by_label_shards(twice, 7),
    }[way]()
    assert not part_of(made, "train") & part_of(made, "held_out")


def test_a_device_whose_samples_are_all_equal_is_refused_by_name():
    same: dict[str, np.ndarray] = {"x": np.zeros(6, np.float32), "y": np.arange(6) % 2}
    with pytest.raises(InvalidInput, match="the 3 samples of device-0 are equal"):
        evenly(same, 2)
    with pytest.raises(InvalidInput, match="2 distinct samples each, there are 1"):
        by_dirichlet(same, 2, alpha=1.0)


def test_small_groups_are_left_out():
    groups = np.minimum(np.arange(N) // 10, 3)
    assert list(by_group(samples(), groups, least=11)) == ["device-3"]
    with pytest.raises(InvalidInput, match="no group has 271 samples; the largest has 270"):
        by_group(samples(), groups, least=271)


def test_label_shards_give_few_classes():
    made = by_label_shards(samples(), 10, shards=2)
    classes = [len(np.unique(s.train["y"])) for s in made.values()]
    assert max(classes) <= 4
    assert all(s.examples + s.held_out_samples == 30 for s in made.values())


def spread(made):
    """Mean share of a device's most frequent class."""
    shares = [np.bincount(s.train["y"]).max() / s.examples for s in made.values()]
    return float(np.mean(shares))


def test_a_small_alpha_makes_devices_differ():
    far = spread(by_dirichlet(samples(3000), 10, alpha=0.05))
    near = spread(by_dirichlet(samples(3000), 10, alpha=100.0))
    assert far > 0.5
    assert near < 0.2


@given(alpha=st.floats(1e-3, 1e3), devices=st.integers(1, 40), seed=st.integers(0, 2**32))
def test_dirichlet_always_gives_each_device_two_samples(alpha, devices, seed):
    made = by_dirichlet(samples(80, 3), devices, alpha=alpha, seed=seed)
    assert len(made) == devices
    assert all(s.examples and s.held_out_samples for s in made.values())
    assert sum(s.examples + s.held_out_samples for s in made.values()) == 80


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: evenly(samples(5), 3), "1 to 2 devices"),
        (lambda: evenly(samples(), 0), "got 0"),
        (lambda: evenly(samples(), 3, held_out=1.0), "between 0 and 1"),
        (lambda: evenly({"x": np.zeros(3), "y": np.zeros(4)}, 1), "same number of samples"),
        (lambda: by_dirichlet(samples(), 3, alpha=0.0), "alpha must be finite and above 0"),
        (lambda: by_dirichlet(samples(), 3, alpha=1.0, labels="z"), "there is no array 'z'"),
        (lambda: by_label_shards(samples(), 3, shards=101), "1 to 100 pieces"),
        (lambda: by_group(samples(), GROUPS[:5]), "300 whole numbers"),
        (lambda: by_group(samples(), GROUPS * 0.5), "whole numbers"),
    ],
)
def test_odd_partitions_are_refused(make, said):
    with pytest.raises(InvalidInput, match=said):
        make()


def test_texts_name_the_devices_themselves():
    names = np.array([f"person {k % 3}" for k in range(300)], object)
    assert list(by_group(samples(), names)) == ["person 0", "person 1", "person 2"]
    for bad in ("", "a\nb", "x" * 201):
        names[5] = bad
        with pytest.raises(InvalidInput, match="1 to 200 printable characters"):
            by_group(samples(), names)
    names[5] = 7
    with pytest.raises(InvalidInput, match="300 texts or whole numbers"):
        by_group(samples(), names)
