"""Accuracy of two sessions."""

import numpy as np
import pytest
from tests.quantize import nets

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import TensorSpec, nn
from triplane.unified_ir.convert import convert
from triplane.unified_ir.convert.checks import measure_accuracy
from triplane.unified_ir.quantize import artifact, freeze


def test_it_counts_right_answers_and_equal_answers_over_all_batches():
    module, _, held_out = nets.digits()
    frozen = freeze(module, "predict")
    other = freeze(nets.module_of(nets.shaken(nets.Digits()), nets.IMAGE), "predict")
    a, b = artifact(frozen).session(), artifact(other).session()
    found = measure_accuracy(frozen, a, b, {"x": held_out.x}, held_out.y)
    chosen = [s.run({"x": held_out.x})["logits"].argmax(1) for s in (a, b)]
    assert found.before == pytest.approx((chosen[0] == held_out.y).mean())
    assert found.after == pytest.approx((chosen[1] == held_out.y).mean())
    assert found.agreement == pytest.approx((chosen[0] == chosen[1]).mean())


class Planes(nn.Cell):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3)

    def construct(self, x):
        return self.conv(x)


@pytest.mark.slow
def test_what_has_no_accuracy_is_refused():
    y = np.zeros(4, np.int64)
    with pytest.raises(InvalidInput, match=r"needs a result \(N, classes\)"):
        convert(nets.module_of(Planes(), TensorSpec(("N", 1, 4, 4))),
                evaluation=(np.zeros((4, 1, 4, 4), np.float32), y))  # fmt: skip
    with pytest.raises(InvalidInput, match=r"classes 0..9, but labels are 0..12"):
        convert(nets.lenet(), evaluation=(nets.images(2), np.array([0, 12])))
