"""Algorithms that stopped in some seeds: named first, marked, not ranked."""

import re

import pytest

from triplane.unified_ir.federated.core.metric import LOSS
from triplane.unified_ir.federated.study import (
    DeviceScore,
    RoundRow,
    Trial,
    page,
    verdicts,
    warnings,
)
from triplane.unified_ir.federated.study.report import charts
from triplane.unified_ir.federated.study.seeds import start_spread

STOPPED = {"maml": [1, 2]}


def trial(name, seed, after):
    """Losses of three devices after one round; the start is the same for all algorithms."""
    start = [DeviceScore(f"d{k}", True, 0, 9, 1 + seed, 0.9 + seed) for k in range(3)]
    scores = [DeviceScore(f"d{k}", True, 1, 9, 0.6, after + k / 100) for k in range(3)]
    rounds = [RoundRow(1, 3, 0.5, 10, 20, 0.1)]
    return Trial(name, rounds, scores, {}, {}, metric=LOSS, seed=seed, start=start)


@pytest.fixture
def trials():
    return [*(trial("fedavg", seed, 0.3) for seed in range(3)), trial("maml", 0, 0.2)]


def test_the_best_is_among_those_that_finished_all_seeds(trials):
    (line,) = verdicts(trials, STOPPED)
    assert line == (
        "On training devices, loss after adaptation, mean of 3 seeds: fedavg 0.31; not ranked: "
        "maml stopped in 2 of 3 seeds."
    )
    assert verdicts(trials[2:]) == []  # no two of one seed


def test_what_stopped_is_the_first_warning(trials):
    assert warnings(trials, STOPPED) == warnings(trials)
    assert warnings(trials)[0] == (
        "maml stopped in 2 of 3 seeds, so it is not ranked; its scores are those of the other."
    )
    assert warnings(trials[:3], {"maml": [0, 1, 2]})[0] == (
        "maml stopped in 3 of 3 seeds, so it has no scores."
    )
    assert warnings(trials[:1], {"maml": [0]})[0] == "maml stopped, so it has no scores."


def test_a_row_tells_its_seeds_and_is_not_bold(trials):
    text = page(trials, "t", stopped=STOPPED)
    rows = re.findall(r"<tr>(<td data-label='algorithm'>maml.*?)</tr>", text)
    assert len(rows) == 2  # scores and costs
    assert all("maml (1 of 3 seeds)" in row and "<b>" not in row for row in rows)
    fedavg = next(row for row in re.findall(r"<tr>(.*?)</tr>", text) if "'>fedavg<" in row)
    assert "<b>0.31 ± 0</b>" in fedavg
    assert text.index("maml stopped in 2 of 3 seeds") < text.index("<table")


def test_the_start_of_a_seed_is_known_from_any_algorithm(trials):
    first, second = (start_spread(r, trials, seen=True) for r in (trials[:3], trials[3:]))
    assert first == second
    assert (first.mean, first.seeds) == (2, 3)


def test_lines_are_of_the_seeds_that_all_finished(trials):
    text = charts(trials)[0]
    begins = re.findall(r"(fedavg|maml), round 0: ([\d.]+)", text)
    assert begins == [("fedavg", "1"), ("maml", "1")]
    assert "only seed 0, which all algorithms finished" in text
    assert "only seed" not in charts(trials[:3])[0]
