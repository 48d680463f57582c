"""A device's work on real plans."""

from dataclasses import replace

import numpy as np
import pytest
from tests.federated.core.plans import WORK, Recording, plan, shard

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import data as datasets
from triplane.unified_ir.data.transforms import Scale
from triplane.unified_ir.federated.core.draws import Draws
from triplane.unified_ir.federated.core.learn import (
    EVALUATE_ROWS,
    MAX_STEPS,
    Shard,
    adapt,
    evaluate,
    learn,
    score,
    shared,
)


def test_the_change_is_what_the_steps_by_hand_give(tmp_path):
    learner, data = plan(tmp_path), shard()
    found = learn(learner, WORK, data)
    w, drawn = np.zeros((2, 1), np.float32), Recording(plan(tmp_path))
    learn(drawn, WORK, data)
    for _, batch in drawn.fed:
        x, y = batch["x"], batch["y"]
        e = x @ w + found_bias(drawn, batch) - y
        w -= np.float32(0.1) * (x.T @ e / np.float32(len(x)) + w)
    np.testing.assert_allclose(found.change["w"], w, atol=1e-6)
    assert (found.examples, sorted(found.change)) == (20, ["bias", "w"])


def found_bias(drawn, batch):
    """The bias before that step: it grows by the rate at each."""
    at = next(k for k, (_, fed) in enumerate(drawn.fed) if fed is batch)
    return np.float32(0.1) * np.float32(at)


def test_equal_work_gives_equal_bits_whatever_was_done_before(tmp_path):
    first = learn(plan(tmp_path), WORK, shard())
    again = plan(tmp_path)
    start = again.state()
    learn(again, replace(WORK, round=9), shard())
    again.assign(start)
    second = learn(again, WORK, shard())
    assert first.loss == second.loss
    assert {n: x.tobytes() for n, x in first.change.items()} == {
        n: x.tobytes() for n, x in second.change.items()
    }


@pytest.mark.parametrize("other", [{"seed": 8}, {"round": 4}, {"device": "bob"}])
def test_seed_round_and_device_each_change_the_draw_and_the_run_does_not(tmp_path, other):
    def rows(work):
        noted = Recording(plan(tmp_path))
        learn(noted, work, shard())
        return b"".join(batch["x"].tobytes() for _, batch in noted.fed)

    assert rows(replace(WORK, **other)) != rows(WORK)
    assert rows(replace(WORK, run="another")) == rows(WORK)


def test_batches_are_shuffled_passes_over_the_shard(tmp_path):
    noted = Recording(plan(tmp_path))
    learn(noted, WORK, shard())
    seen = np.concatenate([batch["x"] for _, batch in noted.fed])
    assert sorted(map(tuple, seen)) == sorted(map(tuple, shard().train["x"]))


def test_a_batch_larger_than_the_shard_is_the_shard(tmp_path):
    noted = Recording(plan(tmp_path))
    learn(noted, replace(WORK, batch_size=1000, steps=2), shard(n=3))
    assert [len(batch["x"]) for _, batch in noted.fed] == [3, 3]


def test_support_and_query_of_an_episode_are_disjoint(tmp_path):
    noted = Recording(plan(tmp_path, episodes=True))
    learn(noted, replace(WORK, steps=30), shard(n=8))
    for _, batch in noted.fed:
        support, query = (set(map(tuple, batch[p])) for p in ("support.x", "query.x"))
        assert (len(support), len(query)) == (4, 3)
        assert not support & query


def test_an_episode_shrinks_with_its_shard_and_keeps_both_parts(tmp_path):
    noted = Recording(plan(tmp_path, episodes=True))
    learn(noted, replace(WORK, steps=1), shard(n=2))
    assert [len(noted.fed[0][1][p]) for p in ("support.x", "query.x")] == [1, 1]
    with pytest.raises(InvalidInput, match="at least 1 sample each"):
        learn(noted, WORK, shard(n=1))


def test_anchors_are_the_round_s_start_and_keys_are_the_round_s_own(tmp_path):
    learner = plan(tmp_path)
    learner.assign({"w": np.full((2, 1), 5, np.float32), "anchor.w": np.ones((2, 1), np.float32)})
    learn(learner, replace(WORK, steps=1), shard())
    assert learner.state()["anchor.w"].tolist() == [[5], [5]]
    key = learner.state()["key"]
    other = plan(tmp_path)
    learn(other, replace(WORK, steps=1, round=4), shard())
    assert key.tolist() != other.state()["key"].tolist()


def test_personal_state_is_kept_by_the_plan_and_absent_from_the_change(tmp_path):
    learner = plan(tmp_path)
    assert "head" not in learn(learner, WORK, shard()).change
    assert learner.state("personal")["head"].tolist() == [4, 4]


def test_shared_state_is_of_the_model_only():
    roles = {
        "b": "buffer", "a": "parameter", "anchor.a": "buffer", "hyper.lr": "buffer",
        "rate.a": "parameter", "head": "personal", "m": "optimizer", "k": "key",
    }  # fmt: skip
    assert shared(roles) == ("a", "b", "rate.a")


def test_evaluation_adapts_on_one_support_set_and_leaves_the_plan_as_it_was(tmp_path):
    learner, data = plan(tmp_path), shard(held_out=6)
    learner.assign({"w": np.array([[1.0], [-2.0]], np.float32)})
    before = {n: x.tobytes() for n, x in learner.state().items()}
    noted = Recording(learner)
    scored = evaluate(noted, WORK, data, steps=3)
    assert (scored.samples, scored.before) == (6, 1.0)
    assert scored.after < 1.0  # `adapt` of this plan leads away from the answer
    support = [batch["x"].tobytes() for entry, batch in noted.fed if entry == "adapt"]
    assert len(support) == 3
    assert len(set(support)) == 1
    assert {n: x.tobytes() for n, x in learner.state().items()} == before


def test_adaptation_never_sees_a_held_out_sample(tmp_path):
    data, noted = shard(n=9, held_out=9), Recording(plan(tmp_path))
    evaluate(noted, replace(WORK, support=0), data, steps=1)
    seen = {tuple(row) for entry, b in noted.fed if entry == "adapt" for row in b["x"]}
    assert seen == set(map(tuple, data.train["x"]))
    assert not seen & set(map(tuple, data.held_out["x"]))


def test_scores_over_many_batches_weigh_every_sample_alike(tmp_path):
    learner = plan(tmp_path)
    n = EVALUATE_ROWS + 44
    y = np.ones((n, 1), np.float32)
    y[-44:] = 0
    data = Shard({"x": np.zeros((1, 2), np.float32)}, {"x": np.zeros((n, 2), np.float32), "y": y})
    assert score(learner, data) == pytest.approx(44 / n)


def test_samples_are_cast_where_nothing_but_width_is_lost(tmp_path):
    wide = shard()
    data = Shard({n: x.astype(np.float64) for n, x in wide.train.items()}, {})
    assert learn(plan(tmp_path), WORK, data).loss == learn(plan(tmp_path), WORK, wide).loss
    text = Shard({**wide.train, "y": np.full((20, 1), "a")}, {})
    with pytest.raises(InvalidInput, match=r"'y' is <U1 here, `local_update` takes float32"):
        learn(plan(tmp_path), WORK, text)


def test_learning_that_leaves_the_numbers_is_refused_with_the_way_out(tmp_path):
    with pytest.raises(InvalidInput, match="a smaller rate is needed"):
        learn(plan(tmp_path, lr=1e30), replace(WORK, steps=9), shard())


@pytest.mark.parametrize("steps", [0, -1, MAX_STEPS + 1])
def test_absurd_numbers_of_steps_are_refused_before_any_work(tmp_path, steps):
    noted = Recording(plan(tmp_path))
    with pytest.raises(InvalidInput, match="work has 1 to 1000000 steps"):
        learn(noted, replace(WORK, steps=steps), shard())
    assert not noted.fed


@pytest.mark.parametrize(
    ("train", "held_out", "says"),
    [
        ({"x": np.zeros((2, 1)), "y": np.zeros(3)}, {}, "the same number of samples"),
        ({"x": np.zeros(())}, {}, "the same number of samples"),
        ({}, {}, "at least one sample"),
        ({"x": np.zeros((0, 1))}, {}, "at least one sample"),
    ],
)
def test_a_shard_without_a_meaning_is_refused(train, held_out, says):
    with pytest.raises(InvalidInput, match=says):
        Shard(train, held_out)


def test_samples_that_a_plan_does_not_know_are_named(tmp_path):
    data = Shard({"image": np.zeros((3, 2), np.float32)}, {})
    with pytest.raises(InvalidInput, match=r"takes 'x'; the samples are \['image'\]"):
        learn(plan(tmp_path), WORK, data)
    with pytest.raises(InvalidInput, match="without held-out samples cannot score"):
        evaluate(plan(tmp_path), WORK, data, steps=1)


def test_adaptation_is_kept_where_it_is_asked_for(tmp_path):
    learner = plan(tmp_path)
    adapt(learner, WORK, shard(), steps=2)
    assert learner.state()["w"].any()


def test_draws_are_the_same_for_ever():
    draws = Draws(7, 3, "ann", "samples")
    assert draws.words(2).tolist() == [13652342506612874112, 6828871186803678836]
    assert Draws(7, 3, "ann", "samples").permutation(6).tolist() == [3, 1, 4, 5, 0, 2]


def test_pixels_mean_the_numbers_they_mean_in_training(tmp_path):
    x = np.array([[0, 51], [255, 102], [204, 153]], np.uint8)
    y = np.array([0, 1, 1])
    samples = {"x": x, "y": y[:, None]}
    noted = Recording(plan(tmp_path))
    learn(noted, replace(WORK, steps=1, batch_size=3), Shard(samples, {}))
    (_, fed), *_ = noted.fed
    trained_on = datasets.arrays(x, y).then(Scale("x")).x
    assert fed["x"].dtype == np.float32
    assert sorted(map(tuple, fed["x"])) == sorted(map(tuple, trained_on))


def test_an_episode_shrinks_in_proportion(tmp_path):
    noted = Recording(plan(tmp_path, episodes=True))
    learn(noted, replace(WORK, steps=1, support=2, query=6), shard(n=4))
    assert [len(noted.fed[0][1][p]) for p in ("support.x", "query.x")] == [1, 3]
