"""The check against the float reference."""

import numpy as np
import pytest
from tests.quantize import nets

from triplane.proto.errors import Conflict
from triplane.unified_ir.convert.checks import check_against_reference, first
from triplane.unified_ir.convert.fold import fold
from triplane.unified_ir.quantize import Frozen, artifact, freeze


def test_a_graph_that_computes_something_else_is_not_written():
    module = nets.lenet()
    frozen = fold(freeze(module, "predict"))
    x = {"x": nets.images(2)}
    check_against_reference(module, "predict", artifact(frozen).session(), x)
    weights = {n: w * np.float32(1.1) for n, w in frozen.weights.items()}
    wrong = artifact(Frozen(frozen.function, weights)).session()
    with pytest.raises(Conflict, match=r"'logits' differs by .* from the reference"):
        check_against_reference(module, "predict", wrong, x)


def test_first_takes_a_few_samples():
    frozen = freeze(nets.lenet(), "predict")
    assert len(first(frozen, {"x": nets.images(9)}, 4)["x"]) == 4
