"""Simulated runs: every algorithm, what a round does, resuming, refusals."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from triplane.proto.errors import Conflict, Corrupt, InvalidInput
from triplane.unified_ir import nn, ops
from triplane.unified_ir.federated.algorithms import ALGORITHMS, plan_of
from triplane.unified_ir.federated.core import learn as device
from triplane.unified_ir.federated.core.learn import Shard, Work
from triplane.unified_ir.federated.core.rules import step
from triplane.unified_ir.federated.study import RoundRow, Study, simulate
from triplane.unified_ir.federated.study.checkpoint import Keeper
from triplane.unified_ir.files import container
from triplane.unified_ir.files.container import Container
from triplane.unified_ir.runtime import Plan

from .given import HYPER, Normed, OwnLayer, Personalized, bits, module, shards, study, there

ROOT = Path(__file__).parents[3]
VICTIM = Path(__file__).with_name("victim.py")


def run(made=None, **options):
    return simulate(module(), shards(), made or study(), **options)


@pytest.mark.parametrize("algorithm", sorted(ALGORITHMS))
def test_every_algorithm_learns_and_scores_seen_and_unseen_devices(algorithm):
    made = run(study(algorithm, evaluate_every=2), unseen=shards(2, first=8))
    assert [row.number for row in made.rounds] == [1, 2, 3, 4]
    assert made.scored_rounds() == (2, 4)
    assert {s.device for s in made.scores if not s.seen} == {"device-8", "device-9"}
    assert {s.samples for s in made.scores} == {10}
    assert made.summary(seen=True).devices == 4
    assert all(np.isfinite(x).all() for x in made.state.values())


class Mixed(nn.Cell):
    """Two layers whose weights may have different element types."""

    def __init__(self, first, second):
        super().__init__()
        numbers = np.random.default_rng(1)
        self.first = nn.Parameter(numbers.normal(size=(2, 8)), dtype=first)
        self.second = nn.Parameter(numbers.normal(size=(8, 2)), dtype=second)

    def construct(self, x):
        return ops.tanh(x @ ops.cast(self.first, "float32")) @ ops.cast(self.second, "float32")


FLOAT_TYPES = (
    ("float64", "float64"), ("float16", "float16"), ("float64", "float32"), ("float32", "float16"),
)  # fmt: skip


@pytest.mark.parametrize(
    ("algorithm", "types"),
    [
        pytest.param(name, types, marks=[] if k == i % len(FLOAT_TYPES) else pytest.mark.long)
        for i, name in enumerate(sorted(ALGORITHMS))
        for k, types in enumerate(FLOAT_TYPES)
    ],
)
def test_weights_of_other_float_types_are_learned_as_those_of_float32(algorithm, types):
    made = study(algorithm, hyper=HYPER.but(floor=0.1))  # else Adam enlarges rounding errors
    plain, other = (
        simulate(module(lambda: Mixed(*kinds)), shards(), made).state  # noqa: B023 - called at once
        for kinds in (("float32", "float32"), types)
    )
    for name, kind in zip(("first", "second"), types, strict=True):
        assert other[name].dtype == kind
        np.testing.assert_allclose(other[name], plain[name], atol=4e-2)


EQUAL = {"maml", "fomaml", "meta-sgd", "reptile", "maml+adam", "scaffold"}


@pytest.mark.parametrize("algorithm", [*sorted(ALGORITHMS), "maml+adam"])
def test_one_round_is_the_mean_of_what_devices_change(tmp_path, algorithm):
    hyper = HYPER.but(server_lr=0.5, floor=0.1)
    made = run(study(algorithm, rounds=1, hyper=hyper))
    given = plan_of(module(), algorithm, hyper, tmp_path / "a.plan")
    plan = Plan.load(tmp_path / "a.plan")
    fresh = plan.state()  # each device has personal state of its own
    sizes = {name: 1 if algorithm in EQUAL else x.examples for name, x in shards().items()}
    mean = {k: np.zeros(x.shape) for k, x in given.state.items()}
    for name, shard in shards().items():
        plan.assign(fresh)
        work = Work(
            run="study", round=1, device=name, seed=0, steps=2, batch_size=6, support=5, query=5
        )
        for k, x in device.learn(plan, work, shard).change.items():
            mean[k] += x.astype(np.float64) * sizes[name] / sum(sizes.values())
    for k, x in made.state.items():
        moved = mean[k] if k.startswith("scaffold.") else 0.5 * mean[k]
        if algorithm in {"fedadam", "maml+adam"}:
            moved = 0.5 * 0.1 * mean[k] / (0.1 * np.abs(mean[k]) + 0.1)
        np.testing.assert_allclose(x, given.state[k] + moved, rtol=1e-5, atol=1e-7)


def test_unseen_devices_change_nothing():
    assert bits(run())[3] == bits(run(unseen=shards(3, first=8)))[3]


def test_a_round_asks_as_many_as_it_should_and_others_next_time():
    asked = run(study(devices=2, rounds=8))
    assert {row.devices for row in asked.rounds} == {2}
    size = sum(x.nbytes for x in asked.state.values())
    assert {(row.bytes_up, row.bytes_down) for row in asked.rounds} == {(2 * size, 2 * size)}


def test_the_seed_decides():
    assert bits(run()) == bits(run())
    assert bits(run())[3] != bits(run(study(seed=1)))[3]


def test_compression_costs_fewer_bytes():
    plain, packed = run(), run(study(compression="int8"))
    assert packed.bytes_up < plain.bytes_up / 2
    for k, x in plain.state.items():
        np.testing.assert_allclose(packed.state[k], x, atol=0.05)


def test_a_sweep_tries_each_rate_and_leaves_the_state():
    made = run(study(rates=(0.0, 0.2)), unseen=shards(1, first=8))
    assert all(s.after == s.before for s in made.sweep[0.0])
    last = [s for s in made.scores if s.round == 4]
    assert list(made.sweep[0.2]) == last  # the run's own rate
    rate, best = made.best_rate(seen=True)
    assert rate in made.sweep
    assert best.after >= made.summary(seen=True).after
    assert bits(made)[3] == bits(run())[3]


def test_the_runs_own_rate_counts_among_those_tried():
    made = run(study(rates=(0.0,)))
    assert list(made.sweep) == [0.0, HYPER.lr]
    assert there(made.best_rate(seen=True))[1].after >= there(made.summary(seen=True)).after


def test_scores_are_told_when_they_are_known():
    told = []
    made = run(
        study(evaluate_every=2, rates=(0.0,)),
        on_scores=lambda *found: told.append(found),
    )
    assert [found[:2] for found in told] == [(0, None), (2, None), (4, None), (4, 0.0)]
    assert told[0][2] == made.start
    assert [s for found in told[1:3] for s in found[2]] == list(made.scores)
    assert told[3][2] == made.sweep[0.0]


def test_the_start_is_scored_before_anything_is_learned():
    made = run(unseen=shards(2, first=8))
    assert [(s.device, s.round) for s in made.start] == [(s.device, 0) for s in made.scores]
    # With a rate of 0 nothing moves, so the end has the scores of the start.
    still = run(study(rounds=1, hyper=HYPER.but(lr=0.0)), unseen=shards(2, first=8))
    assert [s.before for s in still.scores] == [s.before for s in made.start]
    assert [s.before for s in made.start] != [s.before for s in made.scores]


def test_a_start_that_cannot_be_adapted_is_left_out(monkeypatch):
    simulation = sys.modules[Study.__module__]
    original = simulation.device.evaluate

    def evaluate(plan, work, *args, **options):
        if work.round == 0:
            raise InvalidInput("the loss is inf")
        return original(plan, work, *args, **options)

    monkeypatch.setattr(simulation.device, "evaluate", evaluate)
    made = run()
    assert made.start == ()
    monkeypatch.undo()
    assert bits(made)[:4] == bits(run())[:4]


def test_the_rules_hear_of_as_many_events_however_many_devices_are_scored(monkeypatch):
    simulation = sys.modules[Study.__module__]

    def steps(count):
        heard = []

        def hear(state, event):
            heard.append(event)
            return step(state, event)

        monkeypatch.setattr(simulation, "step", hear)
        made = run(study(rounds=1), unseen=shards(count, first=8))
        assert len(made.scores) == 4 + count
        return len(heard)

    assert steps(9) == steps(1)


def test_a_study_without_held_out_samples_scores_nobody():
    bare = {
        name: Shard(shard.train, {k: x[:0] for k, x in shard.held_out.items()})
        for name, shard in shards().items()
    }
    made = simulate(module(), bare, study())
    assert len(made.rounds) == 4
    assert made.scores == ()
    assert made.summary(seen=True) is None


def test_a_device_whose_numbers_break_is_named():
    with pytest.raises(InvalidInput, match=r"device-\d in round 1: .*smaller rate"):
        run(replace(study(), hyper=HYPER.but(lr=1e38)))


def test_personal_state_stays_with_its_device():
    made = simulate(module(Personalized), shards(), study(evaluate_every=1))
    assert "own" not in made.state
    assert "drop.key" not in made.state


def start(folder, kind):
    return subprocess.Popen(
        [sys.executable, str(VICTIM), str(folder), kind],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": f"{ROOT / '.ci' / 'namespace'}:{ROOT}"},
    )  # fmt: skip


def told(process, rounds):
    """Lets the process go through `rounds` more rounds."""
    for _ in range(rounds):
        line = process.stdout.readline()
        if not line:
            break
        process.stdin.write("\n")
        process.stdin.flush()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fedadam", pytest.param("personal", marks=pytest.mark.long)])
def test_a_killed_study_goes_on_to_the_same_bits(tmp_path, kind):
    from .victim import KINDS

    cell, options = KINDS[kind]
    whole = simulate(module(cell), shards(), study(**options), unseen=shards(1, first=8))
    for rounds in (1, 2):
        with start(tmp_path, kind) as process:
            told(process, rounds)
            process.send_signal(signal.SIGKILL)
        assert (tmp_path / "study.tpc").exists() == (rounds > 1)
    resumed = simulate(
        module(cell), shards(), study(**options), unseen=shards(1, first=8), folder=tmp_path
    )
    assert bits(resumed) == bits(whole)


def test_a_finished_study_is_read_back(tmp_path):
    first = run(folder=tmp_path)
    seen: list[RoundRow] = []
    assert bits(run(folder=tmp_path, on_round=seen.append)) == bits(first)
    assert seen == []


def test_a_finished_study_goes_on_to_more_rounds(tmp_path):
    whole = run(study(rounds=6, rates=(0.1,)))
    run(study(rounds=4), folder=tmp_path)
    longer = run(study(rounds=6, rates=(0.1,)), folder=tmp_path)
    assert bits(longer)[0] == bits(whole)[0]
    assert bits(longer)[2:] == bits(whole)[2:]
    assert longer.scored_rounds() == (4, 6)
    with pytest.raises(Conflict, match=r"6 rounds of this study are done; .* got 5"):
        run(study(rounds=5), folder=tmp_path)


def test_a_folder_that_cannot_be_made_is_known_before_any_work(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        run(folder=tmp_path / "file" / "place", on_round=pytest.fail)


def moved(shard):
    """The same sizes, other samples."""
    return replace(shard, held_out={**shard.held_out, "x": shard.held_out["x"] + 1})


OTHER = {
    "an option": (study(seed=1), shards(), {}, "seed is 0 there, 1 here"),
    "a rate": (
        study(hyper=HYPER.but(lr=0.3)), shards(), {}, "hyper.lr is 0.2 there, 0.3 here; model",
    ),
    "samples": (study(), {n: moved(s) for n, s in shards().items()}, {}, "samples of devices"),
    "who learns": (
        study(), shards(3), {"unseen": shards(1, first=3)}, "devices that learn differ",
    ),
}  # fmt: skip


@pytest.mark.parametrize("other", sorted(OTHER))
def test_another_study_does_not_go_on_from_it_and_is_told_what_differs(tmp_path, other):
    run(folder=tmp_path)
    made, devices, options, said = OTHER[other]
    with pytest.raises(Conflict, match=f"of another study.*{said}"):
        simulate(module(), devices, made, folder=tmp_path, **options)


@pytest.mark.parametrize(
    ("tensors", "progress"),
    [
        ({"other/w": np.zeros(1)}, {"rounds": [], "scores": []}),
        ({}, {"rounds": [{"number": 1}], "scores": []}),
        ({}, {"rounds": []}),
        ({}, []),
    ],
)
def test_a_whole_file_that_is_no_place_is_refused(tmp_path, tensors, progress):
    run(folder=tmp_path)
    (path,) = tmp_path.iterdir()
    if isinstance(progress, dict):
        progress = {**progress, "study": study_of(tmp_path)}
    parts = [
        container.part("progress.json", json.dumps(progress).encode()),
        container.tensor_part("state.safetensors", tensors, dict.fromkeys(tensors, "buffer")),
    ]
    container.write(path, "checkpoint", parts)
    with pytest.raises(Corrupt, match="not hold the progress of a study"):
        run(folder=tmp_path)


def test_a_device_may_have_any_name(tmp_path):
    named = {f"a/b %2F{i} é": shard for i, shard in enumerate(shards().values())}
    options = study(compression="int8")
    whole = simulate(module(Personalized), named, options)
    simulate(module(Personalized), named, options, folder=tmp_path)
    place = Keeper(tmp_path, study_of(tmp_path)).newest()
    assert there(place).personal.keys() == there(place).remainders.keys() == named.keys()
    assert bits(simulate(module(Personalized), named, options, folder=tmp_path)) == bits(whole)


def study_of(folder):
    (path,) = folder.iterdir()
    return json.loads(bytes(Container(path, kind="checkpoint").part("progress.json")))["study"]


def test_a_damaged_place_is_refused(tmp_path):
    run(folder=tmp_path)
    (path,) = tmp_path.iterdir()
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(Corrupt):
        run(folder=tmp_path)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rounds": 0}, "at least 1 round"),
        ({"devices": -1}, "counts >= 0"),
        ({"rates": (float("nan"),)}, "finite"),
        ({"compression": "zip"}, "compression is one of"),
        ({"algorithm": "fedsgd"}, "no algorithm 'fedsgd'; choose from fedavg"),
        ({"algorithm": "meta-sgd", "rates": (0.1,)}, "learns its rates"),
    ],
)
def test_odd_options_are_refused(options, said):
    with pytest.raises(InvalidInput, match=said):
        study(**options)


def test_devices_are_there_and_in_one_group():
    with pytest.raises(InvalidInput, match="asks 9 devices; there are 4"):
        run(study(devices=9))
    with pytest.raises(InvalidInput, match="either take part or be unseen"):
        run(unseen=shards(1))


@pytest.mark.parametrize(("algorithm", "compression"), [("fedadam", ""), ("fedavg", "int8")])
def test_statistics_of_batches_stay_variances_through_optimizer_and_compression(
    algorithm, compression
):
    scale = np.array([1, 0.02], np.float32)  # the narrow feature's variance is 0.0004
    devices = {
        name: Shard(*({**part, "x": part["x"] * scale} for part in (shard.train, shard.held_out)))
        for name, shard in shards().items()
    }
    options = {"rounds": 40, "compression": compression, "hyper": HYPER.but(server_lr=0.3)}
    made = simulate(module(Normed), devices, study(algorithm, **options))
    (variance,) = (x for n, x in made.state.items() if n.endswith("running_var"))
    seen = np.concatenate([shard.train["x"] for shard in devices.values()])
    assert (variance > 0).all()
    np.testing.assert_allclose(variance, seen.var(0), rtol=0.1, atol=0.001)


def test_a_personal_hidden_layer_begins_where_the_model_has_it_and_learns():
    made = simulate(module(OwnLayer), shards(), study(rounds=30, steps=5))
    assert made.rounds[0].loss > 0.5
    assert made.rounds[-1].loss < 0.4
    assert there(made.summary(seen=True)).before > 0.8


@pytest.mark.parametrize(("odd", "seen"), [(-1, "-1 to 1"), (2, "0 to 2")])
@pytest.mark.parametrize("part", ["train", "held_out"])
def test_a_label_beyond_the_model_s_classes_is_refused_by_device_and_value(part, odd, seen):
    devices = shards()
    shard = devices["device-2"]
    y = getattr(shard, part)["y"].copy()
    y[3] = odd
    devices["device-2"] = replace(shard, **{part: {**getattr(shard, part), "y": y}})
    with pytest.raises(InvalidInput, match=f"device-2: the model tells 2 classes.* are {seen}"):
        simulate(module(), devices, study())
