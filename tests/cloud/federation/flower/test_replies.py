"""Scores of devices without a ClientApp, as a strategy of Flower receives them."""

import pytest

pytest.importorskip("flwr", reason="needs the extra [flower]")

from triplane.cloud.federation.flower.replies import contributed


def test_a_strategy_receives_the_score_under_the_name_of_its_metric():
    facts = {"samples": 4, "before": 2.5, "after": 0.5}
    _, lossy = contributed({**facts, "metric": "loss"}, {}, {}, {})
    assert lossy == {"num-examples": 4, "loss": 2.5, "adapted": 0.5}
    _, accurate = contributed({**facts, "metric": "accuracy"}, {}, {}, {})
    assert accurate == {"num-examples": 4, "accuracy": 2.5, "adapted": 0.5}
