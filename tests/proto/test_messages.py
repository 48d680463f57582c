"""Messages filled from values of the same shape."""

from types import SimpleNamespace

import pytest

from triplane.proto.federation_pb2 import Score, Settlement
from triplane.proto.messages import message_from

SCORE = SimpleNamespace(samples=3, before=0.5, after=0.75, round=2)


def test_fields_are_attributes_of_the_same_names():
    assert message_from(Score, SCORE) == Score(samples=3, before=0.5, after=0.75, round=2)


def test_a_keyword_wins_and_none_leaves_a_field_unset():
    score = message_from(Score, SCORE, round=7, before=None)
    assert score == Score(samples=3, after=0.75, round=7)


@pytest.mark.parametrize("wrong", [{"source": object()}, {"source": SCORE, "colour": "red"}])
def test_a_field_without_a_value_and_a_value_without_a_field_are_errors(wrong):
    with pytest.raises((AttributeError, ValueError)):
        message_from(Score if "colour" in wrong else Settlement, **wrong)
