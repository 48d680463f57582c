"""Values by name in a message: a field of their own where there is one, else the map."""

from triplane.proto import federation_pb2 as pb
from triplane.proto.hyperparameters import set_values, values_of


def test_values_come_back_by_name():
    message = pb.Hyperparameters()
    values = {"lr": 0.5, "inner_steps": 3, "momentum": 0.25}
    set_values(message, values)
    assert (message.lr, message.inner_steps, dict(message.other)) == (0.5, 3, {"momentum": 0.25})
    assert values_of(message) == values


def test_a_count_that_arrives_as_a_fraction_is_stored_as_a_count():
    message = pb.Hyperparameters(other={"inner_steps": 3.0})
    set_values(message, values_of(message))
    assert message.inner_steps == 3
