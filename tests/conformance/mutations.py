"""Broken rows in a copied table: the proof that the suite watches every column of every row."""

from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from types import MappingProxyType

import numpy as np
import pytest
from tests.conformance import checks
from tests.conformance.checks import batches_agree
from tests.conformance.rows import FLAT, MISSING, NO_SYMBOL, OPSETS
from tests.conformance.uses import Use

from triplane.unified_ir.ops.table import TABLE

READERS = ("autodiff.transforms", "engines.reference", "onnx.emit", "ops.table", "passes.rewrite")
"""Modules that hold the table under the name TABLE."""


def checks_of(use):
    """The suite for one use, as test_rows and test_vmap run it."""
    if use.row.batch:
        yield lambda: batches_agree(use)
    yield lambda: checks.reference_runs_as_inferred(use)
    if use.row.reference and use.row.body:
        yield lambda: checks.body_means_the_same(use)
    for opset in OPSETS:
        if not {str(use), str(use.row)} & MISSING[opset]:
            yield lambda opset=opset: checks.onnx_agrees(use, opset)
    if str(use.row) not in MISSING[21]:
        yield lambda: checks.ascend_agrees(use)
    if str(use) not in NO_SYMBOL:
        opset = 26 if str(use.row) in MISSING[21] else 21
        yield lambda: checks.symbolic_axis_keeps_types(use, opset)
    if str(use.row) in FLAT:
        yield lambda: checks.gradient_is_zero(use)
    elif use.row.differentiable:
        yield lambda: checks.gradients_hold(use)
        yield lambda: checks.gradient_graph_agrees(use)


@contextmanager
def in_place(row):
    """Everything reads a copy of the table in which `row` stands for the row of its name."""
    table = MappingProxyType({**TABLE, (row.domain, row.name): row})
    with pytest.MonkeyPatch.context() as patch:
        for name in READERS:
            patch.setattr(import_module(f"triplane.unified_ir.{name}"), "TABLE", table)
        yield table


def first_complaint(row):
    """What the suite says about a table with this row in it; None if nothing."""
    with in_place(row) as table:
        for number in range(len(row.samples)):
            for check in checks_of(Use(row, number, table)):
                try:
                    check()
                except AssertionError as error:
                    return str(error)
    return None


def _off(array):
    if array.dtype.kind == "b":
        return ~array
    if array.dtype.kind == "O":
        return array + "x"
    return array + array.dtype.type(1)


def wrong_kernel(row):
    def kernel(*args, **attrs):
        raw = row.reference(*args, **attrs)
        first, *rest = raw if isinstance(raw, tuple) else (raw,)
        return (_off(np.asarray(first)), *rest)

    return replace(row, reference=kernel)


def wrong_vjp(row):
    def vjp(*args, **attrs):
        found = list(row.vjp(*args, **attrs))
        at = next((i for i, g in enumerate(found) if g is not None), None)
        if at is None:
            return [args[0], *found[1:]]
        found[at] = found[at] * 1.01
        return found

    return replace(row, vjp=vjp)


def wrong_infer(row):
    def infer(call):
        first, *rest = row.infer(call)
        return (first.with_shape((*first.shape, 1)), *rest)

    return replace(row, infer=infer)


def wrong_body(row):
    def body(*args, **attrs):
        made = row.body(*args, **attrs)
        first, *rest = made if isinstance(made, (tuple, list)) else (made,)
        return [first + first, *rest]

    return replace(row, body=body)


def wrong_vjp_with_residuals(row):
    def vjp_with_residuals(*args, **more):
        made, pullback = row.vjp_with_residuals(*args, **more)

        def pull(gs):
            first, *rest = pullback(gs)
            return [first * 1.01, *rest]

        return made, pull

    return replace(row, vjp_with_residuals=vjp_with_residuals)


def wrong_batch(row):
    def batch(call):
        first, *rest = row.batch(call)
        if first.dtype.is_float:
            return [first * 1.01 + 0.01, *rest]
        return [~first if str(first.dtype) == "bool" else first + 1, *rest]

    return replace(row, batch=batch)


def without_lowering(row):
    return replace(row, lower_below={})


BREAK = {
    "reference": wrong_kernel,
    "vjp": wrong_vjp,
    "vjp_with_residuals": wrong_vjp_with_residuals,
    "infer": wrong_infer,
    "body": wrong_body,
    "lower_below": without_lowering,
    "batch": wrong_batch,
}
"""How to break each column."""


def mutants():
    """(row, column) for everything a row states."""
    return [
        (row, column)
        for row in TABLE.values()
        for column in BREAK
        if getattr(row, column) and row.samples
    ]
