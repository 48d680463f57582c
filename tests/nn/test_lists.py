"""A list of numbers where a layer takes a tensor."""

import pytest

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import nn


@pytest.mark.parametrize("layer", [nn.Dense(2, 1), nn.BatchNorm1d(2)])
def test_a_list_of_numbers_is_refused_with_the_way_out(layer):
    with pytest.raises(InvalidInput, match=r"takes x: .*, got a list; pass an array, such as np"):
        layer([[1.0, 2.0]])
