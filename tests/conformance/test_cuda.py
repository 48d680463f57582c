"""Every row on onnxruntime's CUDA kernels, where they are: `make gpu` says what that needs."""

import pytest
from tests.conformance import checks
from tests.conformance.rows import MISSING, ids
from tests.conformance.uses import differentiable, uses_of

from triplane.unified_ir.runtime import available_providers

if "CUDAExecutionProvider" not in available_providers():
    pytest.skip("needs onnxruntime-gpu and a GPU", allow_module_level=True)

EVERY = uses_of()
SLOPED = differentiable()


@pytest.mark.parametrize("use", EVERY, ids=ids(EVERY))
def test_cuda_agrees_with_reference(use):
    if str(use.row) not in MISSING[21]:
        checks.cuda_agrees(use)


@pytest.mark.parametrize("use", SLOPED, ids=ids(SLOPED))
def test_gradients_agree(use):
    if str(use.row) not in MISSING[21]:
        checks.cuda_gradients_agree(use)
