"""Every row under vmap: a batch gives what a Python loop over its slices gives."""

import numpy as np
import pytest
from tests.conformance.checks import batched, batches_agree, check, slices
from tests.conformance.rows import FLAT, ids
from tests.conformance.uses import first_shallow, mostly_long, recorded, uses_of, weighted_sum

from triplane.unified_ir.autodiff import value_and_grad
from triplane.unified_ir.engines.reference import ReferenceEngine
from triplane.unified_ir.ops.batching import RaggedResult
from triplane.unified_ir.ops.inline import introduced_sizes

COARSE = {"rtol": 1e-4, "atol": 1e-4}
SCANNED_IS_ENOUGH = 0.25
"""Share of the rows with samples that may run under a scan, for want of a rule or a body."""


def plain(use):
    return all(a is None or isinstance(a, np.ndarray) for a in use.sample.arrays())


def opens(function):
    """Whether some size depends on data."""
    return any(introduced_sizes(node) for node in function.nodes)


USES = [use for use in uses_of() if plain(use)]


@pytest.mark.parametrize("use", mostly_long(USES), ids=ids(USES))
def test_a_batch_gives_what_a_loop_over_its_slices_gives(use):
    function, args = recorded(use, np.float32)
    if opens(function):
        with pytest.raises(RaggedResult, match="size depends on values"):
            batched(function, (True,) * len(args))
    else:
        batches_agree(use)


SMOOTH = [use for use in USES if use.row.differentiable and str(use.row) not in FLAT]


@pytest.mark.slow
@pytest.mark.parametrize("use", first_shallow(SMOOTH), ids=ids(SMOOTH))
def test_the_gradient_of_each_slice_is_its_own(use):
    function, args = recorded(use, np.float32)
    scalar = weighted_sum(function, np.float32)
    names = use.smooth(args)
    if scalar is None or not names or opens(function):
        return
    given = [{n: a.astype(args[n].dtype) for n, a in g.items()} for g in slices(use, list(args))]
    check(value_and_grad(scalar, names), given, (True,) * len(args), [ReferenceEngine()], COARSE)


def test_most_rows_are_batched_without_a_scan():
    scanned = set()
    for use in USES:
        function, args = recorded(use, np.float32)
        if args and not opens(function):
            made = batched(function, (True,) + (False,) * (len(args) - 1))
            if any(n.op.name == "Scan" for n in made.nodes):
                scanned.add(str(use.row))
    rows = {str(use.row) for use in USES}
    assert len(scanned) <= SCANNED_IS_ENOUGH * len(rows), sorted(scanned)
    assert not scanned & {
        "Add",
        "MatMul",
        "Gemm",
        "Conv",
        "Softmax",
        "ReduceSum",
        "LayerNormalization",
    }
