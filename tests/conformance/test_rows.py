"""Every row, every sample, every engine: a new row is covered by having a sample."""

import numpy as np
import pytest
from onnx import defs
from tests.conformance import checks
from tests.conformance.rows import (
    DRAWN,
    FLAT,
    HELD,
    INTEGERS,
    MISSING,
    NO_GRADIENT,
    NO_SYMBOL,
    OPSETS,
    ids,
)
from tests.conformance.uses import differentiable, is_sampled, mostly_long, recorded, uses_of

from triplane.unified_ir.ops.table import TABLE

NO_SAMPLES = {  # tested with regions or sizes of their own
    "Constant": "test_rows, as constants of the other rows",
    "triplane.Dims": "tests/onnx",
    "triplane.Cond": "test_control",
    "triplane.Scan": "test_control",
    "triplane.Loop": "test_control",
    "triplane.CustomGradient": "test_control",
    "triplane.Custom": "tests/ops/rows/control/test_custom",
    **dict.fromkeys(HELD, "tests/ops/rows/data/test_sequences.py"),
    **dict.fromkeys(DRAWN, "tests/ops/rows/randomness/test_drawing.py"),
    "ImageDecoder": "tests/ops/rows/data/test_image_files.py",
    "triplane.Sized": "tests/ops/rows/movement/test_shape_assertions.py",
    "triplane.Checkpoint": "tests/frontend/test_transforms",
}
# fmt: on


EVERY = uses_of()
TOLD_TWICE = [use for use in EVERY if use.row.reference and use.row.body]
OTHER_ON_CUDA = [use for use in EVERY if str(use.row) in {"BatchNormalization", "Resize"}]
LEVEL = [use for use in differentiable() if str(use.row) in FLAT]
SMOOTH = [use for use in differentiable() if str(use.row) not in FLAT]
# Some of its forms need no convolution, but its gradient is one: no float64 kernel.
DOUBLE = [use for use in SMOOTH if str(use.row) != "triplane.ConvGradWeight"]


@pytest.mark.parametrize("use", EVERY, ids=ids(EVERY))
def test_reference_gives_the_inferred_types(use):
    checks.reference_runs_as_inferred(use)


@pytest.mark.parametrize("use", TOLD_TWICE, ids=ids(TOLD_TWICE))
def test_a_body_computes_what_the_kernel_computes(use):
    checks.body_means_the_same(use)


@pytest.mark.parametrize("use", EVERY, ids=ids(EVERY))
def test_onnx_agrees_with_reference(use):
    agrees_or_refuses(use, 21)


OTHER_OPSETS = [
    pytest.param(use, opset, id=f"{use}-{opset}", marks=[] if is_sampled(use) else pytest.mark.long)
    for use in EVERY
    for opset in OPSETS
    if opset != 21
]


@pytest.mark.slow
@pytest.mark.parametrize(("use", "opset"), OTHER_OPSETS)
def test_onnx_agrees_with_reference_at_the_oldest_and_newest_opset(use, opset):
    agrees_or_refuses(use, opset)


def agrees_or_refuses(use, opset):
    if {str(use), str(use.row)} & MISSING[opset]:
        checks.onnx_refuses_by_name(use, opset)
    else:
        checks.onnx_agrees(use, opset)


@pytest.mark.deep
@pytest.mark.parametrize("use", EVERY, ids=ids(EVERY))
def test_onnx_agrees_with_reference_at_the_opsets_between(use):
    """All opsets in one test, for every worker of every run collects each test."""
    for opset in (18, 19, 20, 22, 23, 24, 25):
        if use.row.domain == "" and use.row.body is None and not defs.has(use.row.name, opset, ""):
            checks.onnx_refuses_by_name(use, opset)
        else:
            checks.onnx_agrees(use, opset)


@pytest.mark.parametrize("opset", [17, 21])
@pytest.mark.parametrize("use", OTHER_ON_CUDA, ids=ids(OTHER_ON_CUDA))
def test_forms_for_cuda_mean_the_same(use, opset):
    if {str(use.row), str(use)}.isdisjoint(MISSING[opset]):
        checks.forms_for_cuda_agree(use, opset)


@pytest.mark.parametrize("use", mostly_long(EVERY), ids=ids(EVERY))
def test_ascend_agrees_with_rounded_operands_on_reference(use):
    if str(use.row) not in MISSING[21]:
        checks.ascend_agrees(use)


def test_every_row_has_samples_or_a_test_named_here():
    assert {str(row) for row in TABLE.values() if not row.samples} == NO_SAMPLES.keys()


def test_rows_without_gradient_are_these():
    assert {str(row) for row in TABLE.values() if not row.differentiable} == NO_GRADIENT


@pytest.mark.parametrize("use", mostly_long(EVERY), ids=ids(EVERY))
def test_a_symbolic_first_axis_keeps_types_and_values(use):
    if str(use) in NO_SYMBOL:
        assert checks.symbolic_form(use) is None, "this sample now takes a symbol: unlist it"
    else:
        checks.symbolic_axis_keeps_types(use, 26 if str(use.row) in MISSING[21] else 21)


@pytest.mark.parametrize("use", mostly_long(SMOOTH), ids=ids(SMOOTH))
def test_gradients_of_both_orders_equal_central_differences(use):
    checks.gradients_hold(use)


@pytest.mark.parametrize("use", mostly_long(SMOOTH), ids=ids(SMOOTH))
def test_gradient_graph_agrees_on_every_engine(use):
    checks.gradient_graph_agrees(use)


@pytest.mark.parametrize("use", mostly_long(DOUBLE), ids=ids(DOUBLE))
def test_a_row_that_runs_in_float64_has_its_gradients_in_float64(use):
    checks.double_gradients_agree(use)


def test_every_differentiable_row_has_a_sample_with_finite_differences():
    covered = {str(use.row) for use in SMOOTH if use.smooth(recorded(use, np.float64)[1])}
    wanted = {str(row) for row in TABLE.values() if row.differentiable}
    assert wanted - covered == FLAT | INTEGERS | (NO_SAMPLES.keys() - NO_GRADIENT)


@pytest.mark.parametrize("use", LEVEL, ids=ids(LEVEL))
def test_a_flat_row_has_gradient_zero(use):
    checks.gradient_is_zero(use)
