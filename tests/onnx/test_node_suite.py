"""ONNX's node cases through the whole path: a sample here, all of them with `deep`."""

import pytest
from tests.onnx.node_suite import cases, chosen, judged, lost

SAMPLE = (
    "test_add_bcast", "test_basic_conv_with_padding", "test_gemm_all_attributes", "test_if",
    "test_loop11", "test_scan_sum", "test_lstm_defaults", "test_reduce_sum_keepdims_random",
    "test_nonzero_example", "test_sequence_insert_at_back", "test_cast_FLOAT_to_BFLOAT16",
    "test_softmax_axis_0_expanded", "test_layer_normalization_4d_axis1", "test_string_concat",
)  # fmt: skip
STEPS = ("import", "types", "files", "own", "21")

REFERENCE_FLOOR = 1_861
"""Cases that onnx.reference passes as they are; at least as many pass on it when re-emitted."""


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLE)
def test_a_case_passes_at_every_step(name):
    (case,) = chosen(f"^{name}$")
    result = judged(case)
    assert all(map(result.passed, STEPS)), result.errors


@pytest.mark.deep
def test_no_case_is_lost_and_nearly_all_run_on_the_reference():
    results = [judged(case, original=True) for case in cases()]
    assert not lost(results)
    assert sum(r.passed("reference") for r in results) >= REFERENCE_FLOOR
    wrong = [r.name for r in results if r.passed("import") and not r.passed("types")]
    assert not wrong, "inferred types differ from the expected arrays"
