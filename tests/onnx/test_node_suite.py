"""A sample of ONNX's node cases through the whole path; all of them run with `deep`."""

import pytest
from tests.onnx.node_suite import STEPS, chosen, judged

SAMPLE = ("test_add_bcast", "test_basic_conv_with_padding", "test_gemm_all_attributes", "test_if")


@pytest.mark.parametrize("name", SAMPLE)
def test_a_case_passes_at_every_step(name):
    (case,) = chosen(f"^{name}$")
    result = judged(case)
    assert all(map(result.passed, STEPS)), result.errors
