"""Every operator with a floating-point operand converts, on weights and on activations."""

import numpy as np
import pytest
from tests.conformance.rows import MISSING
from tests.conformance.uses import Use, first_shallow, uses_of
from tests.convert.every_row import calibration, float_operands, network

from triplane.unified_ir.convert import convert
from triplane.unified_ir.engines.reference import ReferenceEngine
from triplane.unified_ir.runtime import Bundle

PLACES = ("weight", "activation")
TARGET_OPSET = 21
USES = [
    use
    for use in uses_of()
    if float_operands(use) and not {str(use), str(use.row)} & MISSING[TARGET_OPSET]
]
SAMPLE = {
    "AveragePool-3", "BatchNormalization-2", "CenterCropPad-0", "Pad-0", "ReduceL2-0",
    "ReduceLogSumExp-0", "Resize-0", "Sigmoid-0",
}  # fmt: skip
"""Bodies made of operands' contents, a use without an integer kernel, one that leaves operands
unread, and an ordinary one."""


def use_named(name):
    row, number = name.rsplit("-", 1)
    return next(use for use in USES if (str(use.row), use.number) == (row, int(number)))


def converts(use: Use, place, folder):
    """To float, whose bundle gives what the module means, and to int8."""
    module = network(use, place)
    if module is None:
        return
    convert(module, out=folder / "float.bundle")
    x = calibration()[:1]
    function = module.entry("predict")
    held = [x if p.name == "x" else module.state[p.name].array for p in function.params]
    wanted = dict(
        zip(function.result_names, ReferenceEngine().compile(function)(*held), strict=True)
    )
    found = Bundle.load(folder / "float.bundle").predict(x=x)
    assert found.keys() == wanted.keys()
    for name, y in wanted.items():
        if y.dtype.kind == "f":
            np.testing.assert_allclose(found[name], y, err_msg=name, rtol=1e-4, atol=1e-4)
        else:
            np.testing.assert_array_equal(found[name], y, err_msg=name)
    report = convert(module, quantize="int8", calibration=calibration(), out=folder / "int8.bundle")
    assert report.precision == "int8"
    assert not [text for text in report.notes if "could not be computed" in text]
    assert Bundle.load(folder / "int8.bundle").check_goldens() == 0.0


def test_the_sample_is_of_the_table():
    assert {str(use) for use in USES} >= SAMPLE


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "place"),
    [
        pytest.param(name, place, marks=[] if number % 2 == at else pytest.mark.long)
        for number, name in enumerate(sorted(SAMPLE))
        for at, place in enumerate(PLACES)
    ],
)
def test_rows_that_need_contents_convert_to_float_and_int8(name, place, tmp_path):
    converts(use_named(name), place, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("use", first_shallow(USES), ids=str)
def test_every_row_converts_to_float_and_int8(use, place, tmp_path):
    converts(use, place, tmp_path)
