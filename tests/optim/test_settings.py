import pytest

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import optim


@pytest.mark.parametrize("lr", [float("nan"), float("inf"), -0.1, "0.1", None, True])
def test_a_learning_rate_is_a_finite_number_or_a_schedule(lr):
    with pytest.raises(InvalidInput, match="learning rate"):
        optim.SGD(lr)


@pytest.mark.parametrize(
    "make",
    [lambda: optim.Adam(epsilon=float("nan")), lambda: optim.SGD(0.1, weight_decay=float("nan"))],
)
def test_a_setting_of_an_optimizer_is_a_number(make):
    with pytest.raises(InvalidInput, match="needs"):
        make()
