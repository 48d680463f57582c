"""Several seeds: spreads and margins are numpy's, warnings and verdicts are honest about them."""

import csv
import io
import re
from dataclasses import replace

import numpy as np
import pytest

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.federated.core.metric import LOSS
from triplane.unified_ir.federated.study import page, scores_csv, verdicts, warnings
from triplane.unified_ir.federated.study.export import curve
from triplane.unified_ir.federated.study.seeds import (
    by_algorithm,
    compared,
    final_spread,
    learning_gain,
)
from triplane.unified_ir.federated.study.trial import (
    DeviceScore,
    RoundRow,
    Trial,
    mean_gain,
    student_t,
)

from .given import there

DEVICES = 6  # so that equal gains are significant
# Tables of the t distribution, 0.975 quantile, by degrees of freedom.
QUANTILES = {1: 12.706, 2: 4.303, 5: 2.571, 10: 2.228, 11: 2.201, 15: 2.131, 30: 2.042, 120: 1.980}


def trial(name="fedavg", seed=0, *, gain=0.1, start=0.5, before=0.6, seen=True):
    """A trial of one round whose adapted scores are `gain` above the unadapted ones, on average."""
    rng = np.random.default_rng(seed)
    noise = rng.normal(size=(2, DEVICES)) / 100
    noise[1] -= noise[1].mean()

    def scores(number, level):
        return [
            DeviceScore(f"d{k}", seen, number, 10, level + a, level + gain + a + b)
            for k, (a, b) in enumerate(noise.T)
        ]

    rounds = [RoundRow(1, DEVICES, 0.5, 10, 20, 0.1)]
    return Trial(name, rounds, scores(1, before), {}, {}, seed=seed, start=scores(0, start))


@pytest.mark.parametrize("freedom", QUANTILES)
def test_the_quantile_of_t_is_that_of_tables(freedom):
    assert student_t(freedom) == pytest.approx(QUANTILES[freedom], abs=1e-3)


def test_means_over_seeds_have_their_standard_deviation():
    trials = [trial(seed=k) for k in range(4)]
    means = [np.mean([s.after for s in t.scores]) for t in trials]
    spread = there(final_spread(trials, lambda s: s.after, seen=True))
    assert spread.mean == pytest.approx(np.mean(means))
    assert spread.deviation == pytest.approx(np.std(means, ddof=1))
    assert (spread.least, spread.most, spread.seeds) == (min(means), max(means), 4)
    assert there(final_spread(trials[:1], lambda s: s.after, seen=True)).deviation == 0
    assert final_spread(trials, lambda s: s.after, seen=False) is None


def test_several_seeds_are_compared_seed_by_seed():
    ours = [trial("a", seed, gain=0.3 + seed / 20) for seed in range(3)]
    theirs = [trial("b", seed, gain=0.2) for seed in range(3)]
    gap = there(compared(ours, theirs, seen=True))
    gains = np.array([0.1, 0.15, 0.2])  # the same noise in both, so it cancels
    assert gap.mean == pytest.approx(gains.mean())
    assert gap.margin == pytest.approx(4.303 * gains.std(ddof=1) / np.sqrt(3))
    alone = there(compared(ours, theirs[1:2], seen=True))
    assert alone.mean == pytest.approx(0.15)


def test_one_lucky_seed_is_no_significant_difference():
    ours = [trial("a", 0, gain=0.3), trial("a", 1, gain=0.1), trial("a", 2, gain=0.12)]
    theirs = [trial("b", seed, gain=0.1) for seed in range(3)]
    assert "; behind: b" in verdicts([ours[0], theirs[0]])[0]
    (line,) = verdicts([*ours, *theirs])
    assert "mean of 3 seeds: a" in line
    assert "not significantly different: b" in line


def test_adaptation_that_hurts_is_warned_of_with_its_size():
    (line,) = warnings([trial(gain=-0.2, start=0.3), trial("maml", gain=0.2)])
    assert line.startswith("Adaptation hurts here: fedavg on training devices -")
    assert "maml" not in line
    (line,) = warnings([trial(gain=-0.001, start=0.3)])
    assert line.startswith("Adaptation does not help here: ")
    assert "(not significant)" in line
    assert warnings([trial()]) == []


def test_an_end_that_is_worse_than_the_start_is_warned_of():
    (line,) = warnings([trial(start=0.7, before=0.5, seen=False)])
    assert line.startswith(
        "The end is worse than the start (each adapted or not, whichever is better): "
        "fedavg on unseen devices -20.0"
    )
    # Unadapted scores fall, but what one gets after adaptation rises: not a warning.
    assert warnings([trial(start=0.7, before=0.6, gain=0.3)]) != []
    risen = trial(start=0.5, before=0.4, gain=0.3)
    steady = replace(risen, start=[replace(s, after=s.before + 0.01) for s in risen.start])
    assert warnings([steady]) == []
    assert warnings([replace(trial(start=0.7, before=0.5), start=())]) == []


def test_an_end_that_is_not_significantly_worse_is_no_warning():
    near = trial(before=0.5, gain=0.01)
    start = [
        replace(s, round=0, after=s.after + 0.01 + 0.2 * (-1) ** k)
        for k, s in enumerate(near.scores)
    ]
    gain = there(learning_gain([replace(near, start=start)], seen=True))
    assert gain.mean < 0
    assert not gain.shown
    assert warnings([replace(near, start=start)]) == []


def test_what_is_significant_comes_before_what_is_not():
    doubtful = trial("maml", start=0.7, before=0.5, gain=-0.001)
    worse, hurts = warnings([doubtful])
    assert worse.startswith("The end is worse than the start (")
    assert hurts.startswith("Adaptation does not help here: maml on training devices -")
    hurts, worse = warnings([trial(start=0.7, before=0.5, gain=-0.2)])
    assert hurts.startswith("Adaptation hurts here: ")
    assert worse.startswith("The end is worse ")


def of_one_device(name="fedavg", after=0.2):
    start, end = (DeviceScore("d", True, number, 10, 0.6, 0.6) for number in (0, 1))
    return replace(trial(name), start=[start], scores=[replace(end, before=0.5, after=after)])


def test_one_device_warns_and_shows_no_difference():
    (hurts,) = warnings([of_one_device()])
    assert hurts.startswith(
        "Adaptation does not help here: fedavg on training devices -30.00 (one device); "
    )
    (line,) = verdicts([of_one_device(), of_one_device("maml", 0.9)])
    assert line == (
        "On training devices, after adaptation: maml 90.0; one device cannot show a difference to: "
        "fedavg 20.0."
    )
    text = page([of_one_device()], "t")
    assert "<td data-label='gain of adaptation'>-30.00</td>" in text
    assert "inf" not in re.sub("base64,[^']*|<script>.*</script>", "", text, flags=re.DOTALL)


def test_rounding_is_no_warning():
    assert warnings([of_one_device(after=0.5 - 1e-16)]) == []
    tiny = replace(of_one_device(after=0.5 + 1e-9), metric=LOSS)
    assert warnings([tiny])[0].startswith("Adaptation does not help here: ")


def test_a_loss_that_rises_is_a_warning():
    worse = replace(trial(gain=0.2, start=0.9), metric=LOSS)
    (line,) = warnings([worse])
    assert line.startswith("Adaptation hurts here: fedavg on training devices -0.")


def test_two_trials_of_one_seed_are_refused():
    with pytest.raises(InvalidInput, match="two trials of fedavg have the same seed"):
        by_algorithm([trial(), trial()])


def test_a_page_of_several_seeds_shows_spreads_and_ranges():
    trials = [trial(name, seed) for name in ("a", "b") for seed in (0, 1, 2)]
    text = page(trials, "t")
    spread = there(final_spread(trials[:3], lambda s: s.after, seen=True))
    assert f"{100 * spread.mean:.1f} ± {100 * spread.deviation:.1f}" in text
    assert "over seeds)</title>" in text
    assert "<polygon class='band s0'" in text
    assert "d0, seed 2: " in text
    assert "Pairs are seeds" in text


def test_the_csv_has_every_score_and_marks_the_final_ones():
    one = replace(trial(seed=3), sweep={0.1: trial(seed=3).scores, 0.3: trial(seed=4).scores})
    rows = list(csv.DictReader(io.StringIO(scores_csv([one, trial("maml", seed=3)]))))
    assert len(rows) == DEVICES * (1 + 2) + DEVICES * (1 + 1)
    assert {row["round"] for row in rows if not int(row["final"])} == {"0", "1"}
    best = there(one.best_rate(seen=True))[0]
    final = [row for row in rows if row["algorithm"] == "fedavg" and row["final"] == "1"]
    assert {row["rate"] for row in final} == {f"{best:g}"}
    assert [float(row["adapted"]) for row in final] == [s.after for s in one.final(seen=True)]
    assert {row["devices"] for row in rows} == {"training"}


def test_names_of_devices_are_kept_in_the_csv_whatever_they_hold():
    names = ['a,"b"', "Zoë", "=1+1"]
    scores = [DeviceScore(name, False, 1, 3, 0.5, 0.5) for name in names]
    rows = csv.DictReader(io.StringIO(scores_csv([replace(trial(), scores=scores, start=())])))
    assert [row["device"] for row in rows] == names


def test_a_curve_begins_with_the_start():
    (first, last) = curve(trial(), seen=True)
    assert (first[0], last[0]) == (0, 1)
    assert first[1] < last[1]


@pytest.mark.parametrize("samples", [5, 10, 60])
@pytest.mark.parametrize("devices", range(2, 8))
def test_chance_is_rarely_significant_where_few_samples_make_gains_equal(devices, samples):
    """Both are accuracies of one model, so 5 % of the studies may say otherwise."""
    rng = np.random.default_rng(0)
    right = rng.binomial(samples, 0.9, size=(2, 2000, devices)) / samples
    gains = [mean_gain(list(row)) for row in right[0] - right[1]]
    assert np.mean([there(gain).shown for gain in gains]) < 0.07
