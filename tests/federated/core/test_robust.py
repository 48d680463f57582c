"""Robust means against numpy written another way, and against liars."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from triplane.proto.disk import NoRoom
from triplane.proto.errors import InvalidInput
from triplane.unified_ir.federated.algorithms.aggregators import (
    AGGREGATORS,
    UNLIMITED,
    Robustness,
    aggregator,
    reduce_round,
)
from triplane.unified_ir.federated.core import robust
from triplane.unified_ir.federated.core.draws import Draws
from triplane.unified_ir.federated.core.limits import RoundUpdate
from triplane.unified_ir.federated.core.reduce import SGD, reduce

STATE: dict[str, np.ndarray] = {
    "w": np.zeros((4, 5), np.float32),
    "b": np.zeros((), np.float64),
    "n": np.array(3),
}
ROBUST = [name for name in AGGREGATORS if name != "mean"]
EVERY = [*ROBUST, *(f"bucketing+{name}" for name in ROBUST)]


def changes(n, seed=0):
    rng = np.random.default_rng(seed)
    return [{"w": rng.normal(1, 0.3, (4, 5)).astype(np.float32), "b": rng.normal(1, 0.3, ())}
            for _ in range(n)]  # fmt: skip


def flat(change):
    return np.concatenate([change["w"].reshape(-1).astype(np.float64), change["b"].reshape(-1)])


def run(given, name, *, buffers=frozenset(), **numbers):
    """The change of the state, as one vector."""
    updates = [RoundUpdate(1 + k, partial(dict, c)) for k, c in enumerate(given)]
    robustness = Robustness(
        norm_bound="off", max_examples=100, aggregator=name, numbers=numbers, returns=0
    )
    after = reduce_round(
        STATE, {}, updates, robustness=robustness, draws=Draws(7, 1, "", "buckets"),
        weighting="examples", server=SGD, hyper={"server_lr": 1.0}, buffers=buffers,
    )  # fmt: skip
    return flat(after.state)


def close(found, wanted):
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


@pytest.mark.parametrize("n", [3, 4, 9])
def test_the_median_is_the_middle_of_the_sorted_values(n):
    given = changes(n)
    columns = np.sort([flat(c) for c in given], axis=0)
    close(run(given, "median"), (columns[(n - 1) // 2] + columns[n // 2]) / 2)


@pytest.mark.parametrize(
    ("n", "trim", "cut"),
    [(5, 0.2, 1), (10, 0.2, 2), (9, 0.34, 3), (49, 1 / 49, 1), (100, 0.29, 29), (3, 0.49, 1)],
)
def test_the_trimmed_mean_leaves_out_both_ends(n, trim, cut):
    given = changes(n)
    entries = zip(*map(flat, given), strict=True)
    wanted = [np.mean(sorted(values)[cut : n - cut]) for values in entries]
    close(run(given, "trimmed-mean", trim=trim), wanted)


def scores(vectors, f):
    """Krum's, with distances of differences, pair by pair."""
    n = len(vectors)
    return [
        sum(sorted(((v - u) ** 2).sum() for k, u in enumerate(vectors) if k != i)[: n - f - 2])
        for i, v in enumerate(vectors)
    ]


@pytest.mark.parametrize(("n", "f"), [(5, 1), (8, 2), (11, 4)])
def test_krum_and_multi_krum_choose_by_the_scores_of_their_paper(n, f):
    vectors = [flat(c) for c in changes(n)]
    order = np.argsort(scores(vectors, f))
    close(run(changes(n), "krum", byzantine=f), vectors[order[0]])
    wanted = np.mean([vectors[k] for k in order[: n - f]], axis=0)
    close(run(changes(n), "multi-krum", byzantine=f), wanted)


@pytest.mark.parametrize("radius", [0.0, 0.7, 50.0])
def test_centred_clipping_is_the_iteration_of_its_paper(radius):
    vectors = [flat(c) for c in changes(7)]
    vectors[3] = vectors[3] * 40
    given = changes(7)
    given[3] = {k: x * 40 for k, x in given[3].items()}
    tau = radius or sorted(np.linalg.norm(v) for v in vectors)[3]
    centre = np.zeros(21)
    for _ in range(3):
        steps = [v - centre for v in vectors]
        centre = centre + np.mean([s * min(1, tau / np.linalg.norm(s)) for s in steps], axis=0)
    close(run(given, "centred-clip", radius=radius), centre)


def test_bucketing_gives_means_of_shuffled_updates_to_the_rule():
    given = changes(7)
    order = Draws(7, 1, "", "buckets").permutation(7)
    vectors = np.array([flat(c) for c in given])
    means = [vectors[order[at : at + 2]].mean(axis=0) for at in range(0, 7, 2)]
    close(run(given, "bucketing+median"), np.median(means, axis=0))
    means = [vectors[order[at : at + 3]].mean(axis=0) for at in range(0, 7, 3)]
    close(run(given, "bucketing+median", bucket_size=3), np.median(means, axis=0))
    given = changes(9)
    order = Draws(7, 1, "", "buckets").permutation(9)
    vectors = np.array([flat(c) for c in given])
    means = [vectors[order[at : at + 2]].mean(axis=0) for at in range(0, 9, 2)]
    close(run(given, "bucketing+krum"), means[int(np.argmin(scores(means, 1)))])


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("size", [1e6, 3e38, -3e38])
def test_one_liar_does_not_lead_a_robust_mean_away(name, size):
    given = changes(12)
    honest = np.array([flat(c) for c in given])
    given[4] = {"w": np.full((4, 5), size, np.float32), "b": np.array(size)}
    found = run(given, name)
    assert np.isfinite(found).all()
    assert np.linalg.norm(found - honest.mean(axis=0)) < 2 * np.linalg.norm(honest.mean(axis=0))


@pytest.mark.parametrize("name", ["krum", "multi-krum", "centred-clip", "bucketing+krum"])
def test_an_update_whose_square_float64_cannot_hold_is_left_out(name):
    given = changes(12)
    given[4] = {**given[4], "b": np.array(1e300)}
    found = run(given, name)
    assert np.isfinite(found).all()
    assert np.abs(found).max() < 10


@pytest.mark.parametrize("name", EVERY)
def test_a_round_that_needs_a_file_and_small_blocks_gives_the_same(name, monkeypatch):
    whole = run(changes(12), name)
    monkeypatch.setattr(robust, "MAX_BYTES", 100)
    monkeypatch.setattr(robust, "BLOCK_BYTES", 12 * 8 * 3)
    found = run(changes(12), name)
    np.testing.assert_allclose(found, whole, rtol=1e-6)
    assert found.tobytes() == run(changes(12), name).tobytes()


def test_a_disk_without_room_is_an_error_that_says_so(monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(robust, "MAX_BYTES", 100)
    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(NoRoom, match="temporary file cannot take"):
        run(changes(12), "median")


def test_weights_of_buffers_are_of_buffers_alone():
    """A device that lies in its buffers only does not spoil them, nor is its change left out."""
    given = changes(5)
    given[2] = {**given[2], "b": np.array(1e9)}
    apart = run(given, "krum", buffers=frozenset({"b"}))
    plain = [c["w"].reshape(-1) for c in given]
    close(apart[:20], plain[int(np.argmin(scores([x.astype(float) for x in plain], 1)))])
    assert abs(apart[20]) < 10


@pytest.mark.parametrize("weighting", ["examples", "equal"])
def test_an_honest_round_has_the_bits_of_the_plain_mean(weighting):
    given = changes(9)
    updates = [RoundUpdate(3 + k, partial(dict, c)) for k, c in enumerate(given)]
    options: Any = {"weighting": weighting, "server": SGD, "hyper": {"server_lr": 0.7}}
    plain, _ = reduce(STATE, {}, [(u.examples, u.open) for u in updates], **options)
    for robustness in (Robustness(), UNLIMITED):
        found = reduce_round(
            STATE, {}, updates, robustness=robustness, draws=Draws(0, 1, "", "buckets"), **options
        )
        assert found.scaled == 0
        assert {n: x.tobytes() for n, x in found.state.items()} == {
            n: x.tobytes() for n, x in plain.items()
        }


FAR_FROM = {"w": np.full((4, 5), 10, np.float32), "b": np.zeros(())}


def defended(given, state, name="mean", **options):
    updates = [RoundUpdate(1, partial(dict, c)) for c in given]
    after = reduce_round(
        state, options.pop("slots", {}), updates, robustness=Robustness(aggregator=name),
        draws=Draws(0, 1, "", "buckets"), weighting="equal", server=SGD, hyper={"server_lr": 1.0},
        **options,
    )  # fmt: skip
    return after, flat(after.state) - flat(state)


@pytest.mark.parametrize("times", [1e6, -1e6, 3e37, -3e37])
def test_a_change_that_no_honest_device_sends_is_left_out(times):
    given = changes(9)
    lies = [{n: np.asarray(x * times, x.dtype) for n, x in c.items()} for c in given[:2]]
    after, moved = defended([*lies, *given[2:]], FAR_FROM)
    np.testing.assert_allclose(moved, np.mean([flat(c) for c in given[2:]], 0), rtol=1e-5)
    assert after.scaled == 2


def test_a_long_change_that_does_not_replace_the_model_counts_as_a_typical_one():
    """Of a device with new samples, where the others have nothing to learn any more."""
    given = changes(5)
    small = [{n: x / 50 for n, x in c.items()} for c in given[1:]]
    after, moved = defended([given[0], *small], FAR_FROM)
    typical = np.median([np.linalg.norm(flat(c)) for c in (given[0], *small)])
    share = flat(given[0]) * typical / np.linalg.norm(flat(given[0]))
    expected = np.mean([share, *map(flat, small)], 0)
    np.testing.assert_allclose(moved, expected, rtol=1e-4)
    assert after.scaled == 1


def test_updates_that_the_aggregator_needs_are_scaled_instead_of_left_out():
    given = changes(3)
    lie = {n: np.asarray(x * 1e6, x.dtype) for n, x in given[0].items()}
    after, moved = defended([lie, *given[1:]], FAR_FROM, name="median")
    assert after.scaled == 1
    assert np.abs(moved).max() < 3


def test_control_variates_are_limited_by_the_largest_median_of_all_rounds():
    """A device that comes late changes more than those that were asked just before."""
    controls = {"buffers": frozenset("b"), "shares": {"b": 0.5}}
    first, _ = defended(changes(5), FAR_FROM, **controls)
    late = [{n: x / 1000 for n, x in c.items()} for c in changes(4)] + changes(1)
    after, moved = defended(late, FAR_FROM, slots=first.slots, **controls)
    expected = np.mean([flat(c) for c in late], 0) * np.r_[np.ones(20), 0.5]
    np.testing.assert_allclose(moved, expected, rtol=1e-3, atol=1e-6)
    assert after.scaled == 0
    far = {n: np.asarray(x * 5, x.dtype) for n, x in late[4].items()}
    after, moved = defended([*late[:4], far], FAR_FROM, slots=after.slots, **controls)
    # |S| is the number of devices that counted.
    expected = np.mean([flat(c) for c in late[:4]], 0) * np.r_[np.ones(20), 0.5 * 4 / 5]
    np.testing.assert_allclose(moved, expected, rtol=1e-2, atol=1e-6)
    assert (after.scaled, after.left_out) == (1, (4,))


def test_the_order_of_updates_is_all_that_a_tie_of_krum_depends_on():
    same = changes(1) * 5
    close(run(same, "krum"), flat(same[0]))


@pytest.mark.parametrize(
    ("name", "numbers", "least"),
    [("mean", {}, 1), ("median", {}, 3), ("krum", {}, 5), ("krum", {"byzantine": 3}, 9),
     ("multi-krum", {}, 5), ("trimmed-mean", {}, 5), ("trimmed-mean", {"trim": 0.1}, 10),
     ("centred-clip", {}, 3), ("bucketing+median", {}, 5), ("bucketing+krum", {}, 9),
     ("bucketing+median", {"bucket_size": 4}, 9)],
)  # fmt: skip
def test_a_round_that_is_too_small_is_refused_before_the_run(name, numbers, least):
    robustness = Robustness(aggregator=name, numbers=numbers)
    robustness.check_count(least)
    if least > 1:
        with pytest.raises(InvalidInput, match=rf"needs at least {least} updates .* {least - 1}"):
            robustness.check_count(least - 1)
    robustness.check_count(1, groups=max(2, least))
    if least > 2:
        words = rf"needs at least {least} sums of groups .* {least - 1}\. Form more groups"
        with pytest.raises(InvalidInput, match=words):
            robustness.check_count(99, groups=least - 1)


def test_nothing_but_the_aggregator_applies_to_sums_of_groups():
    limits = Robustness(norm_bound="2", max_examples=5, aggregator="krum", numbers={"byzantine": 2})
    assert limits.of_sums == replace(UNLIMITED, aggregator="krum", numbers={"byzantine": 2})
    assert Robustness().of_sums == UNLIMITED


def test_names_and_numbers_that_do_not_exist_are_refused():
    for name in ("mode", "bucketing", "bucketing+mean", "median+krum", "bucketing+bucketing+krum"):
        with pytest.raises(InvalidInput, match="no aggregator"):
            aggregator(name)
    with pytest.raises(InvalidInput, match="median has no number 'trim'; it has none"):
        Robustness(aggregator="median", numbers={"trim": 0.1})
    with pytest.raises(InvalidInput, match=r"trim must be above 0 and below 0\.5, got 0\.5"):
        Robustness(aggregator="trimmed-mean", numbers={"trim": 0.5})
    with pytest.raises(InvalidInput, match="largest weight"):
        Robustness(max_examples=-1)
    with pytest.raises(InvalidInput, match="returns 0 times or more"):
        Robustness(returns=-1)


def test_every_row_says_where_it_comes_from_and_what_it_resists():
    rows = [*AGGREGATORS.values(), aggregator("bucketing+krum")]
    assert all(row.source and row.summary and row.breakdown for row in rows)
    assert all(row.entries is None or row.weights is None for row in rows)
