"""`steps_per_launch="auto"`: steps in one launch and one by one in turns, until one is faster."""

import numpy as np
import pytest

from triplane.proto.errors import Corrupt, InvalidInput
from triplane.unified_ir.train.launching import (
    AUTO_BYTES,
    AUTO_STEPS,
    MEASURED,
    LaunchChoice,
    Launching,
    SingleBatch,
    checked_steps,
)


def launch(n, rows=4):
    """A launch of `n` batches."""
    batches = SingleBatch()
    for _ in range(n):
        batches.add({"x": np.zeros((rows, 2), np.float32)})
    return batches


def decided(seconds, sizes=(8,)):
    """The turns until a decision, and what was said. seconds: of a step in a launch, and alone."""
    said: list[str] = []
    turns: list[bool] = []
    launching = Launching("auto", choice := LaunchChoice(), said.append)
    compiled = set()
    while choice.together is None:
        n = sizes[len(turns) % len(sizes)]
        turns.append(together := launching.together(launch(n)))
        program = together and n
        took = seconds[not together] * n if program in compiled else 60.0
        compiled.add(program)
        launching.measure(launch(n), took, together=together)
    return turns, said, launching, choice


def test_turns_alternate_and_the_faster_way_stays():
    turns, said, launching, choice = decided((1.0, 2.0))
    assert turns == [True, True, False, False] + [True, False] * (MEASURED - 1)
    assert choice.together
    assert launching.together(launch(8))
    assert not launching.is_single
    way = "the run goes on with launches of several steps"
    assert said == [f"several steps in one launch take 0.50 of the time of as many launches; {way}"]


def test_the_short_launch_at_the_end_of_an_epoch_is_compared_by_the_time_of_a_step():
    turns, said, _, choice = decided((1.0, 2.0), sizes=(32, 12))
    assert len(turns) < 2 * (MEASURED + 3)
    assert choice.together
    assert "take 0.50 of the time" in said[0]


def test_single_steps_stay_where_a_launch_is_slower():
    _, said, launching, choice = decided((2.0, 1.0))
    assert choice.together is False
    assert launching.is_single
    assert not launching.together(launch(8))
    assert "take 2.00 of the time" in said[0]
    assert said[0].endswith("goes on with a launch for each step")


def test_batches_of_different_shapes_are_not_compared():
    launching = Launching("auto", choice := LaunchChoice(), lambda _: None)
    for rows in (4, 5, 6) * (MEASURED + 1):
        batches = launch(8, rows)
        launching.measure(batches, 1.0, together=launching.together(batches))
    assert choice.together is None


def test_a_decision_in_a_checkpoint_is_not_measured_again():
    _, _, _, choice = decided((2.0, 1.0))
    resumed = LaunchChoice()
    resumed.load_state_dict(choice.state_dict())
    assert Launching("auto", resumed, lambda _: None).is_single
    resumed.load_state_dict({})  # the checkpoint of a run that had not decided
    assert resumed.together is None
    assert resumed.state_dict() == {}


@pytest.mark.parametrize("kept", [np.array(1), np.array([True]), np.array(0.0)], ids=str)
def test_a_choice_that_is_none_is_refused(kept):
    with pytest.raises(Corrupt, match="choice of launches"):
        LaunchChoice().load_state_dict({"together": kept})


def test_a_number_is_neither_measured_nor_changed():
    launching = Launching(3, choice := LaunchChoice(), lambda _: None)
    for _ in range(20):
        assert launching.together(launch(3))
        launching.measure(launch(3), 1.0, together=True)
    assert choice.together is None
    assert launching.room((np.zeros(4),)) == 3


def test_auto_limits_the_bytes_of_a_launch():
    room = Launching("auto", LaunchChoice(), lambda _: None).room
    assert room((np.zeros(4, np.uint8),)) == AUTO_STEPS
    quarter = np.broadcast_to(np.zeros(1, np.uint8), (AUTO_BYTES // 4,))
    assert room((quarter,)) == 4
    assert room((quarter,) * 9) == 1


@pytest.mark.parametrize("steps", [0, -1, True, 1.0, "Auto", None])
def test_other_values_are_refused(steps):
    with pytest.raises(InvalidInput, match=r"a number >= 1 or \"auto\""):
        checked_steps(steps)
