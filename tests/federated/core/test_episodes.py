"""Episodes of N classes: what they hold, and what cannot be drawn."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.federated.core.draws import Draws
from triplane.unified_ir.federated.core.episodes import Episodes


def draws():
    return Draws(7, 1, "ann", "samples")


def samples(classes, each, first=0):
    """Samples that know their own class and number; classes have large numbers."""
    y = np.repeat(np.arange(classes) * 100 + 17, each)
    return {"x": np.stack([y, first + np.arange(len(y))], 1), "y": y}


def classes_of(part):
    """The class that each label stands for."""
    pairs = {(int(label), int(x[0])) for x, label in zip(part["x"], part["y"], strict=True)}
    assert len(pairs) == len(set(dict(pairs).values())) == len(dict(pairs))
    return dict(pairs)


@given(
    ways=st.integers(2, 5), shots=st.integers(1, 3), asked=st.integers(1, 3), seed=st.integers(0)
)
def test_an_episode_has_equal_shares_of_its_classes_and_no_sample_twice(ways, shots, asked, seed):
    episodes = Episodes(samples(6, 6), {}, "y", ways=ways, support=ways * shots, query=ways * asked)
    support, query = episodes.to_learn(Draws(seed, 1, "ann", "samples"))
    assert np.bincount(support["y"]).tolist() == [shots] * ways
    assert np.bincount(query["y"]).tolist() == [asked] * ways
    assert classes_of(support) == classes_of(query)
    assert sorted(classes_of(support)) == list(range(ways))
    rows = np.concatenate([support["x"][:, 1], query["x"][:, 1]])
    assert len(set(rows.tolist())) == len(rows)


def test_classes_and_their_numbers_are_drawn_anew_and_the_same_draws_give_the_same():
    def some(count):
        episodes, stream = Episodes(samples(6, 6), {}, "y", ways=2, support=2, query=2), draws()
        return [episodes.to_learn(stream) for _ in range(count)]

    drawn = [tuple(sorted(classes_of(support).items())) for support, _ in some(40)]
    assert len(set(drawn)) > 20  # of 30 ordered pairs
    for ours, theirs in zip(some(3), some(3), strict=True):
        assert [p["x"].tobytes() for p in ours] == [p["x"].tobytes() for p in theirs]


def test_a_scored_episode_asks_about_held_out_samples_alone():
    held_out = samples(4, 1, first=1000)
    episodes = Episodes(samples(6, 3), held_out, "y", ways=3, support=6, query=6)
    support, query = episodes.to_score(draws())
    assert support["x"][:, 1].max() < 1000 <= query["x"][:, 1].min()
    assert classes_of(support) == classes_of(query)
    assert np.bincount(query["y"]).tolist() == [1, 1, 1]  # all that there are
    assert set(classes_of(query).values()) <= set(held_out["y"].tolist())


@pytest.mark.parametrize(("ways", "support", "query"), [(1, 1, 1), (3, 4, 3), (3, 3, 2), (2, 0, 2)])
def test_shares_that_are_not_equal_are_refused(ways, support, query):
    with pytest.raises(InvalidInput, match=f"got {ways} classes, {support} and {query} samples"):
        Episodes(samples(4, 4), {}, "y", ways=ways, support=support, query=query)


def test_a_device_with_too_few_classes_says_how_many_it_has():
    episodes = Episodes(samples(4, 4), samples(2, 1), "y", ways=3, support=9, query=9)
    with pytest.raises(InvalidInput, match="0 of this device's 4 classes have them"):
        episodes.to_learn(draws())
    with pytest.raises(InvalidInput, match="2 of this device's 4 classes have them"):
        episodes.to_score(draws())


def test_labels_of_a_sequence_are_refused():
    several = {"x": np.zeros((8, 1)), "y": np.zeros((8, 2), np.int64)}
    with pytest.raises(InvalidInput, match=r"labels 'y' have the shape \[2\] each"):
        Episodes(several, {}, "y", ways=2, support=2, query=2)
