"""Messages filled from values of the same shape."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from triplane.proto import registry_pb2
from triplane.proto.federation_pb2 import Score, Settlement
from triplane.proto.messages import message_from, value_from

SCORE = SimpleNamespace(samples=3, before=0.5, after=0.75, round=2)


def test_fields_are_attributes_of_the_same_names():
    assert message_from(Score, SCORE) == Score(samples=3, before=0.5, after=0.75, round=2)


def test_a_keyword_wins_and_none_leaves_a_field_unset():
    score = message_from(Score, SCORE, round=7, before=None)
    assert score == Score(samples=3, after=0.75, round=7)


def test_a_field_without_a_value_and_a_value_without_a_field_are_errors():
    with pytest.raises(AttributeError, match="run"):
        message_from(Settlement, SCORE)
    with pytest.raises(ValueError, match="colour"):
        message_from(Score, SCORE, colour="red")


@dataclass(frozen=True)
class Origin:
    """A value with the fields of `registry_pb2.Lineage`."""

    parent: str
    source: str
    note: str


def test_a_value_is_made_of_a_message_and_of_what_is_given_beside_it():
    message = registry_pb2.Lineage(parent="m@1", note="n")
    assert value_from(Origin, message, source="import") == Origin("m@1", "import", "n")


def test_a_field_that_the_source_lacks_is_an_error():
    with pytest.raises(AttributeError, match="parent"):
        value_from(Origin, registry_pb2.Alias(name="x"))
